"""The start screen: one look at the model, what trains, the data and the memory."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bitmamba.config import LAYER_SYMBOLS, Config
from bitmamba.report import units
from bitmamba.report.plan import MemoryPlan, plan_rows

# First match wins; the whole path is matched.
PARAMETER_CLASSES = (
    ("adapters", r".*/(a|b|magnitude|state_offset)"),
    ("embedding", r"embed/.*"),
    ("head", r"lm_head/.*"),
    ("state (A_log, D, dt_bias)", r".*/(A_log|D|dt_bias)"),
    ("convolutions", r".*/conv1d/.*"),
    ("norms", r".*/scale"),
    ("projections", r".*/kernel"),
    ("other", r".*"),
)


def show_start(
    console: Console,
    config: Config,
    *,
    shapes: Mapping[str, Any],
    trainable: Mapping[str, Any],
    groups: Sequence[Any],
    coverage: Sequence[Any],
    account: Sequence[str],
    memory: MemoryPlan,
    hints: Sequence[str],
) -> None:
    """Print the screen.

    Args:
        console: where.
        config: the run.
        shapes, trainable: {path: leaf with a shape} of all parameters, of the trained.
        groups: rows of `bitmamba.optim.group_table`.
        coverage: rows of `bitmamba.lora.coverage`; shown where some are adapted.
        account: lines of the data account.
        memory: the plan, not yet compiled.
        hints: settings that do not do what one may think.
    """
    n_all, n_trained = _n_parameters(shapes.values()), _n_parameters(trainable.values())
    console.rule(f"[bold]{config.name}")
    console.print(_model_line(config, n_all))
    console.print(_classes_table(shapes, trainable))
    console.print(
        f"trains ({config.train.mode}): {units.count(n_trained)} of "
        f"{units.count(n_all)} parameters ({units.percent(n_trained / n_all)}), "
        f"{_optimizer(config)}"
    )
    console.print(f"starts from: {_origin(config)}", soft_wrap=True)
    if any(row.adapted for row in coverage):
        console.print(_coverage_table(coverage))
    console.print(_groups_table(groups))
    for line in account:
        console.print(line, soft_wrap=True)
    console.print(_plan_line(config))
    for what, size in plan_rows(memory):
        console.print(f"memory: {what}: {size}")
    for hint in hints:
        console.print(f"[yellow]note: {hint}")


def show_memory(
    console: Console, memory: MemoryPlan, *, compile_seconds: float
) -> None:
    """Print what the compiled step, or the compiled shallow ones, added to the plan."""
    what = "shallow steps" if memory.estimated_from else "step"
    console.print(f"{what} compiled in {units.duration(compile_seconds)}")
    for what, size in plan_rows(memory)[3:]:
        console.print(f"memory: {what}: {size}")


def evaluation_line(step: int, row: Mapping[str, float]) -> str:
    """One evaluation, on one line."""
    parts = [f"eval at step {step}:"]
    if "eval/loss" in row:
        parts.append(f"held-out loss {units.loss(row['eval/loss'])}")
    if "retention/loss" in row:
        change = row["retention/loss"] - row["retention/base_loss"]
        parts.append(
            f"retention {units.loss(row['retention/loss'])} "
            f"({change:+.4f} against the base)"
        )
    if len(parts) == 1:
        parts.append("no held-out data")
    return "  ".join(parts)


def parameter_class(path: str) -> str:
    """The class of a parameter, by its path."""
    return next(name for name, rx in PARAMETER_CLASSES if re.fullmatch(rx, path))


def _n_parameters(leaves) -> int:
    return sum(math.prod(leaf.shape) for leaf in leaves)


def _model_line(config: Config, n_all: int) -> str:
    symbols = {name: symbol for symbol, name in LAYER_SYMBOLS.items()}
    pattern = "".join(symbols[layer] for layer in config.model.layers)
    weights = {"bit": "ternary", "dense": "dense"}[config.model.linear]
    return (
        f"model: {units.count(n_all)} parameters, {len(config.model.layers)} layers "
        f"{pattern}, d_model {config.model.d_model}, vocabulary "
        f"{units.count(config.model.vocab_size)}, {weights} projections; computes in "
        f"{config.model.dtype}; parameters, norms and SSM states float32"
    )


def _classes_table(shapes, trainable) -> Table:
    table = Table(box=None, pad_edge=False)
    for name, justify in (("class", "left"), ("parameters", "right"), ("", "left")):
        table.add_column(name, justify=justify)
    for name, _ in PARAMETER_CLASSES:
        paths = [path for path in shapes if parameter_class(path) == name]
        if paths:
            trained = sum(path in trainable for path in paths)
            state = {0: "frozen", len(paths): "trained"}.get(trained, "part trained")
            n = _n_parameters(shapes[path] for path in paths)
            table.add_row(name, units.count(n), state)
    return table


def _coverage_table(rows: Sequence[Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in (
        "adapters in",
        "projection",
        "columns",
        "layers",
        "rank",
        "parameters",
    ):
        left = name in ("adapters in", "projection", "columns")
        table.add_column(name, justify="left" if left else "right")
    for row in rows:
        some = row.adapted > 0
        table.add_row(
            row.kind,
            row.projection,
            (", ".join(row.columns) or "all") if some else "-",
            f"{row.adapted} of {row.there}",
            "/".join(map(str, row.ranks)) if some else "-",
            units.count(row.parameters),
        )
    adapted, there = sum(r.adapted for r in rows), sum(r.there for r in rows)
    parameters = units.count(sum(r.parameters for r in rows))
    table.add_row("in all", "", "", f"{adapted} of {there}", "", parameters)
    return table


def _groups_table(groups: Sequence[Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("group", "pattern", "lr x", "decay", "tensors", "parameters"):
        table.add_column(
            name, justify="left" if name in ("group", "pattern") else "right"
        )
    for row in groups:
        decay = "frozen" if row.frozen else ("yes" if row.decay else "no")
        table.add_row(
            row.name,
            escape(row.pattern),
            f"{row.lr_mult:g}",
            decay,
            units.count(row.leaves),
            units.count(row.parameters),
        )
    return table


def _origin(config: Config) -> str:
    return config.checkpoint.init_from or f"random parameters of seed {config.seed}"


def _optimizer(config: Config) -> str:
    optim = config.optim
    clamps = optim.clamp is not None and config.train.mode != "head_only"
    clamp = f", clamp {optim.clamp:g}" if clamps else ""
    clip = "" if optim.max_norm is None else f", {optim.norm} clip {optim.max_norm:g}"
    return (
        f"{optim.name}, lr {optim.lr:g} {optim.schedule} after {optim.warmup_steps} "
        f"steps{clamp}{clip}, weight decay {optim.weight_decay:g}"
    )


def _plan_line(config: Config) -> str:
    train = config.train
    per_step = train.accumulation * train.batch_size * config.data.window
    return (
        f"run: {train.steps} steps of {train.accumulation} x {train.batch_size} "
        f"windows of {config.data.window} ({units.count(per_step)} tokens a step); "
        f"evaluates every {config.eval.every}, saves every {config.checkpoint.every}, "
        f"in {config.workdir}"
    )
