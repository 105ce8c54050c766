"""Paths as the user writes them; "assets:NAME" is a file bundled with the package.

Imports nothing of ours, so that both `data` and `io` may use it.
"""

import difflib
from pathlib import Path

ASSETS = Path(__file__).parent / "assets"
PREFIX = "assets:"


def resolve(path: str) -> Path:
    """The file that a setting names.

    Args:
        path: relative to the working directory, absolute, or "assets:NAME".

    Raises:
        ValueError: an asset name that leaves the assets folder.
    """
    if not path.startswith(PREFIX):
        return Path(path).expanduser()
    name = path.removeprefix(PREFIX)
    target = (ASSETS / name).resolve()
    if not name or not target.is_relative_to(ASSETS.resolve()):
        raise ValueError(
            f"{path}: got {name!r}; expected the name of a bundled file, "
            "such as assets:tokenizer.json"
        )
    return target


def must_exist(path: str, *, where: str) -> Path:
    """`resolve`, and refuse what is not a file, naming what lies beside it."""
    target = resolve(path)
    if target.is_file():
        return target
    kind = "a folder" if target.is_dir() else "no such file"
    hint = ""
    if target.parent.is_dir() and not target.is_dir():
        beside = sorted(p.name for p in target.parent.iterdir() if p.is_file())
        near = difflib.get_close_matches(target.name, beside, n=1)
        hint = f"; beside it lie {', '.join(beside[:5])}" if beside else hint
        hint = f"; did you mean {near[0]}?" if near else hint
    raise ValueError(f"{where}: got {path!r} ({kind}); expected a file{hint}")
