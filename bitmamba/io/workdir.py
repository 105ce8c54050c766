"""A work directory from elsewhere: nothing in it may lead our writing out of it."""

import os
from pathlib import Path


def check_links(workdir: str | Path) -> None:
    """Refuse links inside a work directory that lead out of it.

    The work directory itself may be a link, as a user makes one to a larger disk. A
    link inside a directory that was copied or unpacked could let a run append to, or
    replace, a file anywhere.

    Raises:
        ValueError: one line naming the link and where it leads.
    """
    root = Path(workdir)
    inside = root.resolve()
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = Path(folder, name)
            if path.is_symlink() and not path.resolve().is_relative_to(inside):
                raise ValueError(
                    f"{path}: a link to {os.readlink(path)!r}, out of the work "
                    "directory; expected everything inside it; to keep a run on "
                    "another disk, make the whole work directory a link"
                )
