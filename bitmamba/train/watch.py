"""After the first steps every adapter must have moved: one that cannot is an error."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bitmamba.lora.adapters import partner

STEPS = 3


class ZeroWatch:
    """Looks for leaves whose gradient stays exactly zero in the first steps of a run.

    A factor of an adapter is excused while the other one is zero: its gradient must
    be. So is a step without a token to train.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        """paths: of what trains, in the order of the step's "…_is_zero" metrics."""
        self._paths = list(paths)
        self._seen = 0
        self._moved = np.zeros(len(paths), bool)
        self._excused = np.ones(len(paths), bool)

    @property
    def is_over(self) -> bool:
        """Whether the first steps have passed, and all that trains had a gradient."""
        return self._seen >= STEPS

    def saved(self) -> dict[str, Any]:
        """What it has seen, JSON-able."""
        return {
            "seen": self._seen,
            "moved": self._moved.tolist(),
            "excused": self._excused.tolist(),
        }

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `saved` made."""
        self._seen = saved["seen"]
        self._moved = np.asarray(saved["moved"], bool)
        self._excused = np.asarray(saved["excused"], bool)

    def look(
        self, leaf_is_zero: Sequence[bool], gradient_is_zero: Sequence[bool]
    ) -> None:
        """Take in one step that had tokens to train.

        Raises:
            ValueError: after STEPS steps a leaf never had a gradient.
        """
        if self.is_over:
            return
        self._seen += 1
        self._moved |= ~np.asarray(gradient_is_zero)
        zero = dict(zip(self._paths, leaf_is_zero, strict=True))
        waits = [bool(zero.get(partner(path) or "", False)) for path in self._paths]
        self._excused &= np.asarray(waits)
        stuck = [
            path
            for path, moved, excused in zip(
                self._paths, self._moved, self._excused, strict=True
            )
            if not moved and not excused
        ]
        if self.is_over and stuck:
            raise ValueError(
                f"{stuck[0]}: its gradient was exactly zero in {STEPS} steps "
                f"({len(stuck)} such in all); expected every trained parameter to "
                "reach the loss; leave it out of config.lora, or look for what cuts it "
                "off (a mask, an input that is always zero)"
            )
