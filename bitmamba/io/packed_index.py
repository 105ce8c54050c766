"""How much a checkpoint's index unpacks to, known before TensorStore unpacks it.

OCDBT keeps names, places and small values of an item's arrays in nodes, packed with
zstd, anywhere in its files. TensorStore unpacks a node whole, whatever comes out: 32 KB
on disk may be 1 GiB of it. An array's own bytes it unpacks no further than its shape.
"""

import functools
import mmap
import re
from pathlib import Path

MAX_BYTES = 256 * 2**20  # of an item, beyond what its size on disk explains
_RATIO = 32  # a node's names and places shrink to a fifth or so
_BLOCK = 128 * 2**10  # the most that one block of a zstd frame makes
# What a manifest, a node of the tree and one of versions begin with.
_NODE = re.compile(rb"\x0c\xdb(?:\x3a\x2a|\x20\xde|\x12\x34)")
_FRAME = b"\x28\xb5\x2f\xfd"
_HEADER = 8 + 2 * 10  # between both: a length, and two numbers of up to ten bytes


def check_index(folder: Path) -> None:
    """Refuse an item whose index may unpack to far more than it takes on disk.

    Raises:
        ValueError: one line with the file that goes too far, or a link to a folder.
    """
    total = 0
    for file in sorted(folder.rglob("*")):
        if file.is_symlink() and file.is_dir():  # is not looked into from here
            raise ValueError(f"{file.name}: a link to a folder; expected the folder")
        if not file.is_file():
            continue
        about = file.stat()
        total += _unpacked(str(file), about.st_ino, about.st_size, about.st_mtime_ns)
        if total > MAX_BYTES:
            raise ValueError(
                f"{file.name}: its index may unpack to more than "
                f"{MAX_BYTES / 2**20:,.0f} MiB; expected that of a checkpoint"
            )


@functools.lru_cache(maxsize=4096)
def _unpacked(file: str, inode: int, size: int, changed: int) -> int:
    """What nodes in a file may unpack to, beyond _RATIO times their size.

    The file is looked through once while it stays as it is. Nodes of one block do not
    count: few are open at a time, and there may be many. Nor do bytes of arrays that
    happen to look like a node's beginning: what follows is no frame.
    """
    if not size:
        return 0
    with (
        open(file, "rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        found = 0
        for node in _NODE.finditer(data):
            begin = data.find(_FRAME, node.end(), node.end() + _HEADER + len(_FRAME))
            if begin >= 0:
                blocks, end = _frame(data, begin)
                if blocks > 1:
                    found += max(0, _BLOCK * blocks - _RATIO * (end - begin))
            if found > MAX_BYTES:
                break
        return found


def _frame(data: mmap.mmap, frame: int) -> tuple[int, int]:
    """(blocks of a frame, where it ends) by their headers, as far as they make sense.

    Source: RFC 8878, sections 3.1.1.1 and 3.1.1.2.
    """
    flags = data[frame + 4] if frame + 4 < len(data) else 0
    single = flags >> 5 & 1
    sizes = (1 if single else 0, 2, 4, 8), (0, 1, 2, 4)
    at = frame + 5 + (1 - single) + sizes[0][flags >> 6] + sizes[1][flags & 3]
    n = 0
    while at + 3 <= len(data):
        header = int.from_bytes(data[at : at + 3], "little")
        last, kind, size = header & 1, header >> 1 & 3, header >> 3
        if kind == 3:
            break
        n += 1
        at += 3 + (1 if kind == 1 else size)
        if last:
            break
    return n, min(at, len(data))
