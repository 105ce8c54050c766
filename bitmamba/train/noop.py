"""Training that does nothing is told: no token, no update, updates lost to rounding.

`watch.py` looks closer at adapters: each leaf must have a gradient, else the run ends.
"""

from collections.abc import Mapping
from typing import Any

STEPS = 3  # in a row, so that one odd batch is no alarm
LOST_SHARE = 0.5


class NoopWatch:
    """Looks at the rows of metrics.jsonl; each complaint is made once.

    has_trained: whether any step changed any group of parameters.
    """

    def __init__(self) -> None:
        self.has_trained = False
        self.empty_steps = 0
        self._steps = 0
        self._rows: dict[str, int] = {}
        self._told: set[str] = set()

    def look(self, step: int, row: Mapping[str, Any]) -> list[str]:
        """Take in a good step; what there is to complain about, one line each."""
        if not row["loss_tokens"]:
            self.empty_steps += 1
            return self._complain(
                "empty",
                f"step {step}: not one token to train in it (every prompt longer than "
                "its window, or rows without an answer); such steps are counted",
            )
        if row.get("lr", 1.0) <= 0.0:
            return []
        self._steps += 1
        lines = []
        for name in _groups(row):
            still = row[f"optim/{name}/update_norm"] == 0.0
            self.has_trained |= not still
            if self._in_row(f"still {name}", still):
                lines += self._complain(
                    f"still {name}",
                    f"step {step}: group {name!r} has not moved in {STEPS} steps: its "
                    "updates are exactly zero; look at optim.rules (lr_mult) and at "
                    "what cuts it off from the loss",
                )
            lost = row.get(f"optim/{name}/lost_share", 0.0) > LOST_SHARE
            if self._in_row(f"lost {name}", lost):
                lines += self._complain(
                    f"lost {name}",
                    f"step {step}: more than half of the updates of group {name!r} "
                    f"were lost to rounding in {STEPS} steps; raise optim.lr or its "
                    "lr_mult",
                )
        return lines

    def verdict(self) -> str | None:
        """At the end: what is wrong with a run in which nothing was trained."""
        if self.has_trained or not (self._steps or self.empty_steps):
            return None
        why = (
            "no step had a token to train"
            if not self._steps
            else f"every update of {self._steps} steps was exactly zero"
        )
        return f"nothing was trained: {why}; parameters are those of the start"

    def _in_row(self, key: str, holds: bool) -> bool:
        self._rows[key] = self._rows.get(key, 0) + 1 if holds else 0
        return self._rows[key] >= STEPS

    def _complain(self, key: str, line: str) -> list[str]:
        if key in self._told:
            return []
        self._told.add(key)
        return [line]


def _groups(row: Mapping[str, Any]) -> list[str]:
    prefix, suffix = "optim/", "/update_norm"
    return [
        key.removeprefix(prefix).removesuffix(suffix)
        for key in row
        if key.startswith(prefix) and key.endswith(suffix)
    ]
