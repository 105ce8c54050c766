"""When an arm of a sweep has diverged: one rule, on plain numbers."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from bitmamba.report.units import loss as shown

LOOK_STEPS = 10


class Limits(NamedTuple):
    """factor: of the start, above which a loss is too high. looks: so many in a row.

    A fine-tuned model should end below its start. Adam's bounded steps rarely give
    infinite losses: a model that is lost may stay near the loss of chance, which for a
    small base is not far above the start; hence a factor of little more than 1.
    max_bad_steps: updates in a row skipped because numbers were not finite.
    """

    factor: float = 1.2
    looks: int = 2
    max_bad_steps: int = 3

    def rule(self) -> str:
        """The rule in words."""
        return (
            "An arm has diverged when its loss or gradient was not finite in "
            f"{self.max_bad_steps} steps in a row (config.train.max_bad_steps), or "
            f"when a loss was above {self.factor:g} x its start in {self.looks} looks "
            "in a row, or in the last one. Looks are the evaluations (start: the "
            "base's loss on the same windows) and, counted apart, the mean training "
            f"losses of {LOOK_STEPS} steps (start: the larger of the first step's and "
            "the base's held-out loss)."
        )


class Diverged(NamedTuple):
    """After which step an arm was stopped, and why."""

    step: int
    cause: str


class Divergence:
    """Looks at the numbers of one arm; `found` is set once."""

    def __init__(self, limits: Limits, *, base_loss: float) -> None:
        """base_loss: held-out loss before the first step."""
        self.found: Diverged | None = None
        self._limits = limits
        self._base = base_loss
        self._start = math.nan
        self._block: list[float] = []
        self._above = {"held-out loss": 0, "training loss": 0}
        self._last = ""

    def step(self, number: int, loss: float, *, bad_in_row: int, where: str) -> None:
        """Take in a step; `where` says what was bad about it if something was."""
        if bad_in_row >= self._limits.max_bad_steps:
            self._stop(number, f"{where}, {bad_in_row} steps in a row")
        if bad_in_row:
            return
        if math.isnan(self._start):
            self._start = max(loss, self._base)
        self._block.append(loss)
        if len(self._block) == LOOK_STEPS:
            mean = sum(self._block) / LOOK_STEPS
            self._look("training loss", number, mean, self._start)
            self._block = []

    def evaluation(self, number: int, loss: float) -> None:
        """Take in a held-out loss."""
        self._look("held-out loss", number, loss, self._base)

    def end(self, number: int) -> None:
        """After the last look: nothing would show that a high loss comes down."""
        if self._above["held-out loss"]:
            self._stop(number, self._last)

    def saved(self) -> dict[str, Any]:
        """What it has seen, JSON-able."""
        return {
            "found": self.found,
            "start": self._start,
            "block": self._block,
            "above": self._above,
            "last": self._last,
        }

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `saved` made."""
        self.found = saved["found"] and Diverged(*saved["found"])
        self._start, self._last = saved["start"], saved["last"]
        self._block, self._above = list(saved["block"]), dict(saved["above"])

    def _look(self, name: str, number: int, loss: float, start: float) -> None:
        if loss <= self._limits.factor * start:
            self._above[name] = 0
            return
        self._above[name] += 1
        cause = f"{name} {shown(loss)} > {self._limits.factor:g} x {shown(start)}"
        if name == "held-out loss":
            self._last = cause
        if self._above[name] >= self._limits.looks:
            self._stop(number, cause)

    def _stop(self, number: int, cause: str) -> None:
        self.found = self.found or Diverged(number, cause)
