"""What a sweep found: a verdict per arm, a table, what decided, the best command."""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bitmamba.report import units

MOST_COLUMNS = 6
AGREE = 0.05


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """What became of one arm.

    rank: None without adapters. training: (step, loss) of each step.
    evaluations: {"step": …, "eval/loss": …, "retention/loss": …} each.
    diverged: (step, cause) or None. stopped: its last step if that is not the sweep's.
    """

    lr: float
    weight_decay: float
    rank: int | None
    training: Sequence[tuple[int, float]]
    evaluations: Sequence[Mapping[str, Any]]
    diverged: tuple[int, str] | None = None
    stopped: int | None = None

    @property
    def is_stable(self) -> bool:
        """Whether it went on to the last step, under the limit."""
        return self.diverged is None and self.stopped is None

    @property
    def ends_above(self) -> bool:
        """Whether it learnt nothing: its last held-out loss is not below its first."""
        return not self.last_loss <= self.evaluations[0]["eval/loss"]

    @property
    def last_loss(self) -> float:
        """Held-out loss of its last evaluation."""
        return self.evaluations[-1]["eval/loss"]


def best_arm(results: Sequence[ArmResult]) -> int | None:
    """Of the stable arms the one with the lowest last held-out loss."""
    stable = [i for i, result in enumerate(results) if result.is_stable]
    return min(stable, key=lambda i: results[i].last_loss, default=None)


def verdicts(results: Sequence[ArmResult]) -> list[str]:
    """One for each arm."""
    best = best_arm(results)
    return [
        ("best: " if i == best else "") + _verdict(result)
        for i, result in enumerate(results)
    ]


def _verdict(result: ArmResult) -> str:
    if result.diverged:
        step, cause = result.diverged
        return f"diverged at step {step}: {cause}"
    if result.stopped is not None:
        return f"not finished: at step {result.stopped}"
    if result.ends_above:
        return "stable, but ends above its start"
    return "stable"


def table(results: Sequence[ArmResult]) -> list[str]:
    """Lines of a table that is read as it is, and by Markdown: a row for each arm.

    Held-out losses at up to MOST_COLUMNS evaluations, retention at the last of them.
    """
    steps = _chosen({row["step"] for r in results for row in r.evaluations})
    with_rank = any(r.rank is not None for r in results)
    head = ["lr", "decay", *(["rank"] if with_rank else [])]
    head += [*(f"step {step}" for step in steps), "retention", "verdict"]
    rows = [head]
    for result, verdict in zip(results, verdicts(results), strict=True):
        losses = {row["step"]: row["eval/loss"] for row in result.evaluations}
        last = result.evaluations[-1]
        retention = last.get("retention/loss") if last["step"] == steps[-1] else None
        rows.append(
            [
                f"{result.lr:g}",
                f"{result.weight_decay:g}",
                *([str(result.rank)] if with_rank else []),
                *(units.loss(losses.get(step)) for step in steps),
                units.loss(retention),
                verdict,
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [c.rjust(w) for c, w in zip(row[:-1], widths, strict=False)]
        lines.append(f"| {' | '.join(cells)} | {row[-1].ljust(widths[-1])} |")
    rule = ["-" * (w - 1) + ":" for w in widths[:-1]] + ["-" * widths[-1]]
    return [lines[0], f"| {' | '.join(rule)} |", *lines[1:]]


def _chosen(steps: set[int]) -> list[int]:
    """The first, the last, and evenly spaced ones between."""
    ordered = sorted(steps)
    if len(ordered) <= MOST_COLUMNS:
        return ordered
    share = (len(ordered) - 1) / (MOST_COLUMNS - 1)
    return [ordered[round(i * share)] for i in range(MOST_COLUMNS)]


def findings(results: Sequence[ArmResult]) -> list[str]:
    """What decided: sentences on the learning rate and on decay, if arms show it."""
    if any(result.stopped is not None for result in results):
        return []
    sentences = (
        _lr_sentence(results),
        _decay_sentence(results),
        _edge_sentence(results),
    )
    return [s for s in sentences if s]


def _edge_sentence(results: Sequence[ArmResult]) -> str:
    best, lrs = best_arm(results), sorted({r.lr for r in results})
    if best is None or len(lrs) == 1:
        return ""
    lr = results[best].lr
    if lr == lrs[0]:
        return f"The best learning rate, {lr:g}, is the lowest listed: try lower ones."
    if lr == lrs[-1]:
        return (
            f"The best learning rate, {lr:g}, is the highest listed: try higher ones."
        )
    return ""


def _lr_sentence(results: Sequence[ArmResult]) -> str:
    stable = [r.lr for r in results if r.is_stable]
    diverged = [r.lr for r in results if not r.is_stable]
    if not stable or not diverged or max(stable) >= min(diverged):
        return ""
    return (
        f"The learning rate is the cause: every arm up to {max(stable):g} is stable, "
        f"every arm from {min(diverged):g} on diverged."
    )


def _decay_sentence(results: Sequence[ArmResult]) -> str:
    """Arms that differ only in decay agree if their verdicts do, and good losses.

    The loss of an arm that diverged, or ends above its start, is noise.
    """
    groups: dict[tuple, list[ArmResult]] = {}
    for result in results:
        groups.setdefault((result.rank, result.lr), []).append(result)
    several = [group for group in groups.values() if len(group) > 1]
    if not several:
        return ""
    rule = f"same verdict, and last losses below the start within {AGREE:.0%}"
    gaps = {i: _gap(g) for i, g in enumerate(several) if all(map(_is_good, g))}
    mixed = {i for i, g in enumerate(several) if len({_kind(r) for r in g}) > 1}
    unlike = mixed | {i for i, gap in gaps.items() if gap > AGREE}
    if unlike:
        where = ", ".join(
            f"{lr:g}" for lr in sorted({several[i][0].lr for i in unlike})
        )
        return (
            f"Decay matters at lr {where}: arms that differ only in decay do not agree "
            f"(rule: {rule})."
        )
    some_diverged = any(not r.is_stable for g in several for r in g)
    said = "Decay is not the cause" if some_diverged else "Decay makes no difference"
    close = f", and losses within {max(gaps.values()):.2%}" if gaps else ""
    return (
        f"{said}: arms that differ only in decay have the same verdict{close} "
        f"(rule: {rule})."
    )


def _is_good(result: ArmResult) -> bool:
    return result.is_stable and not result.ends_above


def _kind(result: ArmResult) -> tuple[bool, bool]:
    """The verdict without its figures."""
    return result.is_stable, result.is_stable and result.ends_above


def _gap(group: Sequence[ArmResult]) -> float:
    losses = [r.last_loss for r in group]
    return (max(losses) - min(losses)) / min(losses)


def best_command(
    result: ArmResult, *, config_file: str, overrides: Sequence[str], workdir: str
) -> str:
    """The command that trains the arm: the sweep's own overrides, then the arm's.

    In a `workdir` of its own: the config's may hold a run with other settings.
    """
    swept = {
        "optim.lr": result.lr,
        "optim.weight_decay": result.weight_decay,
        **({} if result.rank is None else {"lora.rank": result.rank}),
    }
    kept = [
        text
        for text in overrides
        if text.split("=")[0].removeprefix("--config.") not in (*swept, "workdir")
    ]
    own = [f"--config.{name}={value!r}" for name, value in swept.items()]
    own.append(f"--config.workdir={workdir}")
    return shlex.join(["python", "train.py", f"--config={config_file}", *kept, *own])


def config_arguments(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """(value of --config, the --config.… overrides as --name=value) of a command."""
    file, overrides = "", []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, has_value, _ = argument.lstrip("-").partition("=")
        if name.split(".")[0] not in ("config", "noconfig"):
            continue
        if not has_value and rest and not rest[0].startswith("--"):
            argument = f"{argument}={rest.pop(0)}"
        if name == "config":
            file = argument.partition("=")[2]
        else:
            overrides.append("--" + argument.lstrip("-"))
    return file, overrides


def as_json(results: Sequence[ArmResult]) -> list[dict[str, Any]]:
    """Plain data, one entry an arm; numbers that are not finite by their names."""
    rows = []
    for result, verdict in zip(results, verdicts(results), strict=True):
        diverged = result.diverged
        rows.append(
            {
                "lr": result.lr,
                "weight_decay": result.weight_decay,
                "rank": result.rank,
                "verdict": verdict,
                "diverged": diverged and {"step": diverged[0], "cause": diverged[1]},
                "evaluations": [
                    {k: _number(v) for k, v in row.items()}
                    for row in result.evaluations
                ],
                "training": [[step, _number(loss)] for step, loss in result.training],
            }
        )
    return rows


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
