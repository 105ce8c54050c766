"""The memory plan: what a run will hold, before it holds it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bitmamba.report import units


class MemoryPlan(NamedTuple):
    """Bytes of one training step.

    parameters: float32 masters, trained and frozen.
    gradients: of what is trained; part of the step's temporaries.
    optimizer: state of the configured optimiser. others: of the alternatives.
    step: temporaries of the compiled step (gradients, activations, logits), or None
        before it is compiled.
    peak: what the step needs in all, or None.
    estimated_from: layers of the compiled steps that step and peak are estimated from;
        empty if the step itself was compiled.
    """

    parameters: int
    gradients: int
    optimizer_name: str
    optimizer: int
    others: Mapping[str, int]
    step: int | None = None
    peak: int | None = None
    estimated_from: tuple[int, ...] = ()


class StepMemory(NamedTuple):
    """Bytes of a step's temporaries and peak; `estimated_from` as in MemoryPlan."""

    temporaries: int
    peak: int
    estimated_from: tuple[int, ...] = ()


def step_memory(compiled) -> StepMemory:
    """The compiled step's temporaries and peak, as XLA reports them."""
    memory = compiled.memory_analysis()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes
    peak = kept - memory.alias_size_in_bytes + memory.temp_size_in_bytes
    return StepMemory(memory.temp_size_in_bytes, peak)


def with_step(plan: MemoryPlan, step: StepMemory) -> MemoryPlan:
    """Add what the step needs."""
    return plan._replace(
        step=step.temporaries, peak=step.peak, estimated_from=step.estimated_from
    )


def plan_rows(plan: MemoryPlan) -> list[tuple[str, str]]:
    """(what, size) rows for the screen."""
    others = ", ".join(f"{k} {units.size(v)}" for k, v in plan.others.items())
    rows = [
        ("parameters", units.size(plan.parameters)),
        (
            f"optimiser state ({plan.optimizer_name})",
            f"{units.size(plan.optimizer)}   (with {others})",
        ),
        ("gradients", units.size(plan.gradients)),
    ]
    if plan.step is not None and plan.peak is not None:
        activations = max(0, plan.step - plan.gradients)
        rows += [
            ("activations and other temporaries", units.size(activations)),
            (_peak_name(plan), units.size(plan.peak)),
        ]
    return rows


def _peak_name(plan: MemoryPlan) -> str:
    if not plan.estimated_from:
        return "peak of the compiled step"
    depths = " and ".join(map(str, plan.estimated_from))
    return f"peak of the step, estimated from compiled steps of {depths} layers"


def check_budget(
    plan: MemoryPlan, limit: int, setting: str, of: str, *, ways: Sequence[str]
) -> str | None:
    """A sentence when the peak is above the limit in bytes, else None.

    Args:
        setting: what the limit belongs to. of: more words on where it comes from.
        ways: what would make the step smaller.
    """
    if plan.peak is None or plan.peak <= limit:
        return None
    return (
        f"{setting}: the step needs {units.size(plan.peak)}; expected at most "
        f"{units.size(limit)}{of}; try {', '.join(ways)}"
    )
