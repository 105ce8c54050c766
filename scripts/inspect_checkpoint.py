"""Show what a checkpoint holds, or how two differ, without the model.

    python scripts/inspect_checkpoint.py PATH
    python scripts/inspect_checkpoint.py PATH --diff OTHER

PATH is a work directory, its checkpoints folder or a step's folder; of several steps
the newest is taken. Without --diff no weights are read. With it, the last line is
`identical` or `N leaves differ`: parameters and optimiser state, bit for bit.

Exit codes: 0 done, whether or not they differ; 2 no readable checkpoint there.
"""

import sys

from absl import flags
from rich.console import Console
from rich.table import Table

from bitmamba import command_line
from bitmamba.io import steps

_DIFF = flags.DEFINE_string("diff", None, "Another checkpoint to compare with.")


def show(path: str, console: Console) -> None:
    """Print step, configuration and a table of every array."""
    from bitmamba.io import inspection  # loads JAX, hence after the paths are checked

    found = inspection.contents(path)
    total = sum(leaf.n_bytes for item in found.items.values() for leaf in item.values())
    console.print(f"checkpoint {found.folder}")
    console.print(
        f"step {found.meta['step']:,}, arrays {_size(total)}, on disk "
        f"{_size(found.n_bytes)} (frozen parameters apart)"
    )
    for title in ("config", "fingerprints", "versions", "extra"):
        for line in _summary(title, found.meta[title]):
            console.print(line)
    table = _table("item", "path", "dtype", "shape", "bytes")
    for item, leaves in found.items.items():
        for name, leaf in leaves.items():
            dtype, _, shape = leaf.spec.partition("[")
            shape = f"({shape[:-1].replace(',', ', ')})"
            table.add_row(item, name, dtype, shape, f"{leaf.n_bytes:,}")
    console.print(table)
    for item, leaves in found.items.items():
        size = sum(leaf.n_bytes for leaf in leaves.values())
        console.print(f"{item}: {len(leaves)} arrays, {_size(size)}")


def show_differences(path: str, other: str, console: Console) -> None:
    """Print the leaves that differ; the last line is the verdict."""
    from bitmamba.io import inspection

    found = inspection.differences(path, other)
    if found:
        table = _table("path", path, other, "max abs difference")
        for path, first, second, max_abs in found:
            gap = "not comparable" if max_abs is None else f"{max_abs:.6g}"
            table.add_row(path, first, second, gap)
        console.print(table)
    print(f"{len(found)} leaves differ" if found else "identical")


def main(argv: list[str]) -> int:
    """Read the command line and do what it says."""
    try:
        left = flags.FLAGS(argv)[1:]
    except flags.Error as error:
        raise ValueError(str(error).splitlines()[0]) from None
    if len(left) != 1:
        raise ValueError(
            f"inspect_checkpoint: got {len(left)} paths; expected one PATH, "
            "as in: inspect_checkpoint.py runs/sft [--diff OTHER]"
        )
    for path in filter(None, (left[0], _DIFF.value)):
        steps.resolve(path)
    console = make_console(sys.stdout.isatty())
    if _DIFF.value is None:
        show(left[0], console)
    else:
        show_differences(left[0], _DIFF.value, console)
    return command_line.DONE


def make_console(is_terminal: bool) -> Console:
    """Tables fit a terminal; anywhere else they are plain and never cut."""
    return Console(
        width=None if is_terminal else 10_000,
        highlight=False,
        markup=False,
        soft_wrap=not is_terminal,
    )


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        right = column in ("bytes", "max abs difference")
        justify = "right" if right else "left"
        table.add_column(column, justify=justify, overflow="fold")
    return table


def _summary(title: str, tree: dict) -> list[str]:
    """Scalars on one line, then one line for each group of them."""
    flat = {k: v for k, v in tree.items() if not isinstance(v, dict)}
    lines = [f"{title}: " + ", ".join(f"{k}={v}" for k, v in flat.items())]
    for key, value in tree.items():
        if isinstance(value, dict):
            lines += _summary(f"{title}.{key}", value)
    return [line for line in lines if not line.endswith(": ")]


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.2f} MiB" if n_bytes >= 2**20 else f"{n_bytes:,} bytes"


if __name__ == "__main__":
    with command_line.quiet_ends(), command_line.one_line_mistakes():
        sys.exit(main(sys.argv))
