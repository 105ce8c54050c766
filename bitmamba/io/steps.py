"""The folders of a checkpoint directory; names on disk are the only truth.

<step>                     a complete step
<step>.old                 the step before it was saved again; dropped afterwards
<step>.damaged             set aside because it failed its digests
frozen-<digest>            frozen parameters that steps refer to
*.orbax-checkpoint-tmp*    left over from a save that was killed
"""

import re
import shutil
import time
from pathlib import Path

_SPARE_BYTES = 1 << 20  # for metadata, beside the arrays
_SETTLE_S = 2.0
_STEP = re.compile(r"([0-9]{1,18})(\.old)?")
_TEMPORARY = ".orbax-checkpoint-tmp"
_DAMAGED = re.compile(r"\d+\.damaged(-\d+)?")


def step_folders(directory: Path) -> dict[int, Path]:
    """Complete steps by number, newest first."""
    found: dict[int, Path] = {}
    for folder in reversed(_entries(directory)):  # "7.old" before "7"
        match = _STEP.fullmatch(folder.name)
        if match and folder.is_dir():
            found[int(match[1])] = folder
    return dict(sorted(found.items(), reverse=True))


def damaged_folders(directory: Path) -> list[Path]:
    """Steps that were set aside."""
    return [f for f in _entries(directory) if _DAMAGED.fullmatch(f.name)]


def _entries(directory: Path) -> list[Path]:
    """Sorted; before the first save there is no directory, and nothing in it."""
    return sorted(directory.iterdir()) if directory.exists() else []


def tidy(directory: Path) -> list[str]:
    """Remove what a killed save left behind; one line for each thing removed."""
    lines = []
    for folder in _entries(directory):
        if _TEMPORARY in folder.name:
            size = n_bytes(folder)
            remove(folder)
            lines.append(f"{folder}: removed, {size:,} bytes of an unfinished save")
    for old in sorted(directory.glob("*.old")):
        if _STEP.fullmatch(old.name):
            put_back(old.with_suffix(""))
    return lines


def step_names(directory: Path) -> list[tuple[int, str]]:
    """`step_folders` as plain data, for other processes."""
    return [(step, folder.name) for step, folder in step_folders(directory).items()]


def no_room(directory: Path, arrays: int) -> str | None:
    """A sentence when so many bytes of arrays do not fit on the disk, else None.

    Makes the directory, to know its disk.
    """
    need = arrays + _SPARE_BYTES
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{directory} cannot be made: {error.strerror}"
    free = shutil.disk_usage(directory).free
    if free >= need:
        return None
    return (
        f"disk full: {free / 2**20:,.0f} MiB free at {directory}; "
        f"expected at least {need / 2**20:,.0f} MiB; free some space"
    )


def make_way(folder: Path) -> None:
    """Before a step is saved: nothing unfinished is there, nor the step itself."""
    tidy(folder.parent)
    set_aside(folder)


def set_aside(folder: Path) -> None:
    """Keep a step that is about to be written again as `<step>.old`."""
    if folder.exists():
        folder.rename(folder.with_name(f"{folder.name}.old"))


def put_back(folder: Path) -> None:
    """End of a second save: drop `<step>.old`, or return it if the save failed."""
    old = folder.with_name(f"{folder.name}.old")
    if not old.exists():
        return
    if folder.exists():
        remove(old)
    else:
        old.rename(folder)


def quarantine(folder: Path) -> Path:
    """Rename a damaged folder to `<name>.damaged`; returns the new path."""
    name, number = f"{folder.name}.damaged", 1
    while folder.with_name(name).exists():
        number += 1
        name = f"{folder.name}.damaged-{number}"
    return folder.rename(folder.with_name(name))


def retire(directory: Path, *, saved: int, keep: int) -> list[str]:
    """After `saved` was written: keep the newest `keep` steps up to it.

    Later steps belong to a line that was rolled back; a resume must not offer them.

    Returns:
        One line for each later step removed.
    """
    folders = step_folders(directory)
    later = [step for step in folders if step > saved]
    kept = [step for step in folders if step <= saved][: max(keep, 1)]
    for step, folder in folders.items():
        if step not in kept:
            remove(folder)
    return [f"step {s} removed: training went back to before it" for s in later]


def remove(folder: Path) -> None:
    """Delete a file or folder; what another process removed meanwhile is fine.

    Threads of a save that failed may still write there: a while is given to them.
    """
    if not folder.is_dir():
        folder.unlink(missing_ok=True)
        return
    end = time.monotonic() + _SETTLE_S
    shutil.rmtree(folder, ignore_errors=True)
    while folder.exists() and time.monotonic() < end:
        time.sleep(0.02)
        shutil.rmtree(folder, ignore_errors=True)


def n_bytes(folder: Path) -> int:
    """Size on disk of everything under a folder."""
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def resolve(path: str | Path) -> list[Path]:
    """Step folders a user's path stands for, newest first.

    Args:
        path: a work directory, its checkpoints folder, or one step's folder.

    Raises:
        ValueError: nothing there, or no step in it.
    """
    path = Path(path).expanduser().absolute()
    expected = "expected a work directory, its checkpoints folder or a step's folder"
    if not path.is_dir():
        found = "is a file" if path.exists() else "no such folder"
        raise ValueError(f"checkpoint: {path}: {found}; {expected}")
    if (path / "meta").is_dir():
        return [path]
    directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    folders = list(step_folders(directory).values())
    if not folders and _STEP.fullmatch(path.name):
        return [path]
    if not folders:
        raise ValueError(f"checkpoint: {path}: no finished step in it; {expected}")
    return folders
