"""Give away what a LoRA run learned: as adapters, or merged into a model of its own.

    python scripts/export_weights.py --checkpoint=runs/lora --to=out/peft --as=peft
    python scripts/export_weights.py --checkpoint=runs/lora --to=out/m --as=merged
    python scripts/export_weights.py --checkpoint=runs/lora --to=out/t --as=ternary
    python scripts/export_weights.py --checkpoint=out/t --to=out/base --as=base

peft: a PEFT folder; scripts/import_adapter.py reads it back. merged: one float32 model
(a ternary model becomes a dense one). ternary: the nearest ternary model. base: takes
a merge back, that is, writes the base it was made from, proved equal bit for bit.
All but the first write a checkpoint that scripts/generate.py, --base and
--config.checkpoint.init_from take. Merges print what they lose: per weight, and as loss
on the run's held-out data.

Exit codes: 0 done, 2 no such run, or it cannot be written in that form.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from rich.console import Console
from rich.table import Table

from bitmamba import command_line

FORMS = ("peft", "merged", "ternary", "base")
_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "A run, or a step of it.")
_TO = flags.DEFINE_string("to", None, "A new folder to write into.")
_AS = flags.DEFINE_string("as", None, ", ".join(FORMS))
_BASE = flags.DEFINE_string("base", None, "The base of the run, if it was moved.")
_WINDOWS = flags.DEFINE_integer(
    "windows", 16, "Held-out windows to measure a merge on, of each kind; 0 for none."
)


def main() -> None:
    """Read the run, write it in the form asked for, say what that lost."""
    for flag in (_CHECKPOINT, _TO, _AS):
        if not flag.value:
            raise ValueError(f"--{flag.name}: missing; expected a value")
    if _AS.value not in FORMS:
        known = ", ".join(FORMS)
        raise ValueError(f"--as: got {_AS.value!r}; expected one of {known}")
    if _WINDOWS.value < 0:
        raise ValueError(f"--windows: got {_WINDOWS.value}; expected at least 0")
    # These load JAX, hence after the flags are checked.
    from bitmamba.train import merging
    from bitmamba.train.build import use_compilation_cache

    use_compilation_cache()
    folder, console = Path(_TO.value), make_console(sys.stdout.isatty())
    merging.check_empty(folder)
    if _AS.value == "base":
        params, config = merging.unmerge(_CHECKPOINT.value, base=_BASE.value)
        merging.write_model(params, config, folder, step=0, extra={})
        console.print("every leaf has the digest that the base had at the merge")
    else:
        run = merging.load_adapter_run(_CHECKPOINT.value, base=_BASE.value)
        if _AS.value == "peft":
            show_peft(run, folder, console)
        else:
            merge(run, folder, console)
    console.print(f"written: {folder}")


def show_peft(run: Any, folder: Path, console: Console) -> None:
    """Write the PEFT folder; list its tensors by their endings, and its limits."""
    from bitmamba.train.exchange import export_peft

    written = export_peft(run, folder)
    console.print(f"{len(written.names)} tensors, as {written.names[0]}")
    for note in written.notes:
        console.print(f"note: {note}")


def merge(run: Any, folder: Path, console: Console) -> None:
    """Merge, write, and print what changed and what it costs in loss."""
    from bitmamba.train import merging

    if _AS.value == "merged":
        merged = merging.as_float(run)
        show_float(merged.rows, console)
    else:
        merged = merging.as_ternary(run)
        show_codes(merged.rows, console)
    for line in remarks(run.config.model, merged.config.model):
        console.print(line)
    if _WINDOWS.value:
        found = merging.losses(run, {_AS.value: merged}, max_windows=_WINDOWS.value)
        show_losses(found, console)
    merging.save_merged(run, merged, folder)


def remarks(before: Any, after: Any) -> list[str]:
    """What the architecture of a float merge means for its user, in sentences."""
    lines = []
    if before.linear != after.linear:
        lines.append(
            "the merged model is dense: its weights are float32 (16 times the 2-bit "
            "form), and its activations are no longer rounded to int8; for a ternary "
            "model use --as=ternary, or keep the adapters beside the base"
        )
    if after.linear == "dense" and after.dtype == "bfloat16":
        lines.append(
            "stored in float32, but this model computes in bfloat16, which loses the "
            "share shown above: set config.model.dtype=float32, or keep the adapters "
            "beside the base"
        )
    return lines


def show_float(rows: Sequence[Any], console: Console) -> None:
    """A row for each weight, and all of them together."""
    from bitmamba.lora.merge import total_change

    table = make_table("merged weight", "|delta|/|W|", "same in bf16", "lost in bf16")
    for row in [*rows, total_change(rows)]:
        table.add_row(
            row.site, f"{row.relative:.2e}", f"{row.unchanged:.1%}", f"{row.lost:.1%}"
        )
    console.print(table)
    console.print(
        "merged in float32 and stored so; the last two columns are what rounding the "
        "result to bfloat16 would do: weights that do not change, and the share of the "
        "change that is lost"
    )


def show_codes(rows: Sequence[Any], console: Console) -> None:
    """A row for each ternary weight, and the codes of all together."""
    if not rows:
        console.print("no ternary weight had adapters; the others were merged exactly")
        return
    columns = ("ternary weight", "|delta|/|W|", "codes changed", "scale", "lost")
    table = make_table(*columns)
    for row in rows:
        table.add_row(
            row.site,
            f"{row.relative:.2e}",
            f"{row.n_changed:,} ({row.n_changed / row.n_weights:.3%})",
            f"x {row.scale_ratio:.4f}",
            f"{row.lost:.1%}",
        )
    console.print(table)
    changed, total = sum(r.n_changed for r in rows), sum(r.n_weights for r in rows)
    console.print(
        f"{changed:,} of {total:,} codes changed ({changed / total:.3%}); lost: "
        "distance from the exact sum, where 100% is that of the base"
    )


def show_losses(found: dict[str, dict[str, float]], console: Console) -> None:
    """Held-out losses of the base, the run and the result."""
    table = make_table("held-out loss", "examples", "replay text")
    for name, values in found.items():
        numbers = [values.get("eval/loss"), values.get("retention/loss")]
        table.add_row(name, *("-" if n is None else f"{n:.4f}" for n in numbers))
    console.print(table)


def make_table(first: str, *others: str) -> Table:
    """A plain table, numbers to the right."""
    table = Table(box=None, pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right")
    return table


def make_console(is_terminal: bool) -> Console:
    """Tables fit a terminal; anywhere else they are plain and never cut."""
    return Console(
        width=None if is_terminal else 10_000,
        highlight=False,
        markup=False,
        soft_wrap=not is_terminal,
    )


if __name__ == "__main__":
    command_line.run(main)
