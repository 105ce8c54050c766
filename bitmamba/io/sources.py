"""Paths that a file names: followed only where its reader would look anyway.

A checkpoint of adapters says where its base lies, for the convenience of whoever made
both. Somebody else's checkpoint may say anything, so the path is followed only inside
the working directory and the folder that holds the run; elsewhere the user names it.
"""

from pathlib import Path

from bitmamba.assets_path import PREFIX


def followed(named: str, *, beside: str | Path, flag: str) -> str:
    """A path from inside a file, if it may be followed.

    Args:
        named: the path, or "assets:NAME".
        beside: the work directory or folder whose file names it.
        flag: what the user gives to name it himself.

    Raises:
        ValueError: it leads out of the working directory and of the folder that
            holds `beside`, links resolved.
    """
    if named.startswith(PREFIX):
        return named  # `assets_path.resolve` keeps it inside the bundled files
    roots = [Path.cwd(), *_holders(Path(beside).expanduser())]
    # "~" as its reader expands it.
    target = None if "\0" in named else Path(named).expanduser().resolve()
    if target is None or not any(target.is_relative_to(r.resolve()) for r in roots):
        raise ValueError(
            f"{beside}: names {named[:200]!r}, which lies neither in the working "
            f"directory nor beside it; expected one that does; name it with {flag}"
        )
    return named


def _holders(path: Path) -> list[Path]:
    """The folder that holds the run, given its work directory or one of its steps."""
    parts = path.absolute()
    if parts.parent.name == "checkpoints":
        parts = parts.parent
    if parts.name == "checkpoints":
        parts = parts.parent
    return [] if parts.parent == Path(parts.anchor) else [parts.parent]
