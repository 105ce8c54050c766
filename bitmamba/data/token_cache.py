"""Which shards have their tokens in the cache, and who makes those that have not.

Several processes share the work through the folder alone, before they know each other:
process i makes shards i, i + n, …, then waits for the others' to appear. What a process
works on is a file with its number in the name, touched every few seconds; if nothing of
a process stirs any more, the others make its shards. Two that make the same one write
the same bytes, each whole or not at all, so nothing else needs to be agreed on.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bitmamba.data.token_file import DamagedTokensError, TokenFile

_TOUCHED_S, _SHOWN_S = 5, 10
_FULL = (errno.ENOSPC, errno.EDQUOT)


class TokenCache(NamedTuple):
    """Where tokens are kept, and this process's place among those that make them.

    folder: seen by all of them. index, count: which this is, of how many.
    show: what becomes of each line that a person should see.
    gone_s: how long a process may show no progress before others do its work; above
        what a network file system may hide from them.
    """

    folder: Path
    index: int = 0
    count: int = 1
    show: Callable[[str], None] = lambda line: None
    gone_s: float = 120.0


class Shard(NamedTuple):
    """One file of text, and the file of the cache for its tokens."""

    source: Path
    file: Path

    @property
    def memo(self) -> Path:
        """Remembers the hash of the source's content, by its size and time."""
        return self.file.with_suffix(".seen")


# Makes the tokens of a shard, whose content has a sha256, in a new file; calls back
# with the bytes of each record.
Make = Callable[[Shard, str, Path, Callable[[int], None]], None]


def shard_of(source: Path, folder: Path) -> Shard:
    """The place of a source's tokens in a folder, by the source's path."""
    path = str(source.absolute())
    name = re.sub(r"[^A-Za-z0-9_-]", "_", source.name)[:60]
    name += "-" + hashlib.sha256(path.encode()).hexdigest()[:16]
    return Shard(source, folder / f"{name}.tokens")


def fill(shards: Sequence[Shard], make: Make, cache: TokenCache) -> list[TokenFile]:
    """The tokens of all shards, made where the cache has them not, or not whole.

    A source whose size and time of change are as they were is not read again. With
    another time its content decides, by its hash.

    Args:
        shards: in order, the same for every process.
        make: see `Make`.
        cache: the folder, and the share of this process.

    Raises:
        ValueError: the folder cannot be written, or is full; a source changes while it
            is read; what `make` raises.
    """
    try:
        for folder in {shard.file.parent for shard in shards}:
            folder.mkdir(parents=True, exist_ok=True)
        return _Work(shards, make, cache).done()
    except OSError as error:
        if error.errno not in (*_FULL, errno.EACCES, errno.EROFS, errno.ENOTDIR):
            raise
        raise ValueError(
            f"data.token_cache: {cache.folder}: {error.strerror}; expected a folder to "
            "write in, with room for about the size of the text; set "
            "config.data.token_cache"
        ) from None


class _Work:
    """One filling of the cache by one of its processes."""

    def __init__(self, shards: Sequence[Shard], make: Make, cache: TokenCache):
        self._shards, self._make, self._cache = shards, make, cache
        self._ready: dict[Shard, TokenFile] = {}
        # How many this process has to make is known once it has looked.
        self._progress = _Progress(0, cache)

    def done(self) -> list[TokenFile]:
        left = [shard for shard in self._shards if not self._look(shard)]
        what = f"tokens of {len(self._shards):,} shards:"
        there = f"{what} {len(self._shards) - len(left):,} from the cache"
        if not left:
            self._show(there)
        else:
            size = _size(sum(shard.source.stat().st_size for shard in left))
            by = f" by {self._cache.count} processes" if self._cache.count > 1 else ""
            self._show(f"{there}, {len(left):,} to make{by} ({size})")
            mine = self._shards[self._cache.index :: self._cache.count]
            self._progress = _Progress(len({*mine}.intersection(left)), self._cache)
            for shard in mine:
                self._settle(shard)
            self._wait(left)
            self._show(f"{what} all there")
        return [self._ready[shard] for shard in self._shards]

    def _show(self, line: str) -> None:
        self._cache.show(line)

    def _look(self, shard: Shard) -> bool:
        """Whether a shard's tokens are there, without reading the shard."""
        if shard in self._ready:
            return True
        memo, found = _read_memo(shard), _open(shard)
        stat = shard.source.stat()
        if not found or memo.get("of") != [stat.st_size, stat.st_mtime_ns]:
            return False
        if found.meta["source"] != memo["sha256"]:
            return False
        self._ready[shard] = found
        return True

    def _settle(self, shard: Shard) -> None:
        """Make a shard's tokens, unless those of the same content are there."""
        if self._look(shard):  # another process was here
            return
        cache = self._cache
        mine = f"{cache.index}of{cache.count}.{socket.gethostname()}-{os.getpid()}"
        part = shard.file.with_suffix(f".{mine}.part")
        try:
            with self._progress.working_on(part):
                self._renew(shard, part)
        finally:
            part.unlink(missing_ok=True)

    def _renew(self, shard: Shard, part: Path) -> None:
        part.touch()
        before = shard.source.stat()
        sha256 = _hash(shard.source, self._progress.tick)
        found = _open(shard, tell=self._show)
        if found is None or found.meta["source"] != sha256:
            if found is not None:
                self._show(f"{shard.source}: changed; its tokens are made anew")
            self._make(shard, sha256, part, self._progress.text)
            after = shard.source.stat()
            if _identity(after) != _identity(before):
                raise ValueError(
                    f"{shard.source}: changed while it was read; expected files that "
                    "nothing writes to; start again"
                )
            # Gone if another process finished first, and tidied up.
            with contextlib.suppress(FileNotFoundError):
                os.replace(part, shard.file)
        _write_memo(shard, {"of": _identity(before), "sha256": sha256})
        _sync(shard.file.parent)
        for left_over in shard.file.parent.glob(f"{shard.file.stem}.*.part"):
            left_over.unlink(missing_ok=True)
        if not self._look(shard):
            raise ValueError(
                f"data.token_cache: {shard.file} is not what was written; expected a "
                "folder that keeps files; set config.data.token_cache"
            )
        self._progress.finished()

    def _wait(self, left: Sequence[Shard]) -> None:
        """Until the others' shards are there; those of a lost process are made here."""
        count = self._cache.count
        owners = {shard: i % count for i, shard in enumerate(self._shards)}
        seen: dict[int, tuple[object, float]] = {}
        while left := [shard for shard in left if not self._look(shard)]:
            for owner in sorted({owners[shard] for shard in left}):
                signs = self._signs(owner)
                if owner not in seen or seen[owner][0] != signs:
                    seen[owner] = signs, time.monotonic()
                elif time.monotonic() - seen[owner][1] >= self._cache.gone_s:
                    theirs = [shard for shard in left if owners[shard] == owner]
                    shard = theirs[self._cache.index % len(theirs)]
                    self._show(
                        f"process {owner} of {count} shows no progress; "
                        f"{shard.source.name} is done for it"
                    )
                    self._settle(shard)
                    break
            else:
                time.sleep(min(1.0, self._cache.gone_s / 4))

    def _signs(self, owner: int) -> object:
        """What changes as long as a process works."""
        found = []
        for folder in {shard.file.parent for shard in self._shards}:
            for part in folder.glob(f"*.{owner}of{self._cache.count}.*.part"):
                with contextlib.suppress(FileNotFoundError):
                    found.append((part.name, part.stat().st_mtime_ns))
        return sorted(found)


class _Progress:
    """Touches the file at work, and shows how far this process is."""

    def __init__(self, total: int, cache: TokenCache):
        self._total, self._show, self._part = total, cache.show, None
        self._begin = self._touched = self._shown = time.monotonic()
        self._text = self._finished = 0

    @contextlib.contextmanager
    def working_on(self, part: Path) -> Iterator[None]:
        self._part = part
        yield
        self._part = None

    def tick(self) -> None:
        now = time.monotonic()
        if self._part and now - self._touched >= _TOUCHED_S:
            self._touched = now
            with contextlib.suppress(FileNotFoundError):
                os.utime(self._part)

    def text(self, n_bytes: int) -> None:
        self._text += n_bytes
        self.tick()
        now = time.monotonic()
        if now - self._shown >= _SHOWN_S:
            self._shown = now
            rate = self._text / (now - self._begin)
            self._show(
                f"tokenising: {self._finished} of {self._total} shards done, "
                f"{_size(self._text)} of text at {_size(rate)} a second"
            )

    def finished(self) -> None:
        self._finished += 1


def _identity(stat: os.stat_result) -> list[int]:
    return [stat.st_size, stat.st_mtime_ns]


def _hash(path: Path, tick: Callable[[], None]) -> str:
    made = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(2**22):
            made.update(part)
            tick()
    return made.hexdigest()


def _open(shard: Shard, tell: Callable[[str], None] | None = None) -> TokenFile | None:
    try:
        return TokenFile(shard.file)
    except FileNotFoundError:
        return None
    except DamagedTokensError as damage:
        if tell:
            tell(f"data.token_cache: {damage}; made anew")
        return None


def _read_memo(shard: Shard) -> dict:
    try:
        found = json.loads(shard.memo.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) and found.keys() == {"of", "sha256"} else {}


def _write_memo(shard: Shard, found: dict) -> None:
    part = shard.memo.with_suffix(f".seen.{socket.gethostname()}-{os.getpid()}.part")
    part.write_text(json.dumps(found))
    os.replace(part, shard.memo)


def _sync(folder: Path) -> None:
    """Names in a folder, down to the disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _size(n_bytes: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if n_bytes < 1000 or unit == "GB":
            break
        n_bytes /= 1000
    return f"{n_bytes:.3g} {unit}"
