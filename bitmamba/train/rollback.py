"""Bad steps are told, roll-backs done, and what a run that stops leaves behind."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from rich.console import Console

from bitmamba.io.writer import MetricsWriter
from bitmamba.paths import flatten
from bitmamba.train import bundle, guard, restore
from bitmamba.train.guard import GO_ON, ROLL_BACK, STOP, Counts
from bitmamba.train.layout import on_host
from bitmamba.train.objective import Frozen
from bitmamba.train.prepare import Run
from bitmamba.train.state import TrainState


class Bad(NamedTuple):
    """Numbers that went bad: at which step, why, and how many steps in a row."""

    step: int
    cause: str
    in_row: int


class Guard:
    """Follows the numbers of a run; `counts` and `held` change with each roll-back."""

    def __init__(self, run: Run, writer: MetricsWriter, console: Console) -> None:
        self._run, self._writer, self._console = run, writer, console
        self._cfg = run.config.guard
        self._max_bad_steps = run.config.train.max_bad_steps
        self._leaves = list(flatten(run.parts.trainable))
        self._told_rule = False
        self.counts = Counts(**run.remembered.get("guard", {}))
        self.in_row = int(run.state.bad_in_row)

    @property
    def must_look_at_once(self) -> bool:
        """Whether the next step must be read before another begins.

        In a row of bad steps the state stays that before the first of them.
        """
        return self.in_row > 0 or self._max_bad_steps == 1

    @property
    def held(self) -> Frozen:
        """What the step gets as frozen, with the learning rate as it is now."""
        held = self._run.held
        if held.hyper is None or self.counts.lr_scale == 1.0:
            return held
        hyper = held.hyper
        return held._replace(hyper=hyper._replace(lr=hyper.lr * self.counts.lr_scale))

    def look(self, number: int, metrics: Mapping[str, Any]) -> tuple[str, Bad | None]:
        """(what to do, what was bad about a step or None); tells a bad step."""
        self.in_row = int(metrics["bad_in_row"])
        cause = guard.cause(metrics, self._leaves)
        if cause is None:
            return GO_ON, None
        if not self._told_rule:
            self._told_rule = True
            told = guard.rule(self._cfg, max_bad_steps=self._max_bad_steps)
            self._console.print(told)
        self._console.print(
            f"[red]step {number}: {cause}; update skipped ({self.in_row} in a row)"
        )
        bad = Bad(number, cause, self.in_row)
        return self._decide(self.in_row), bad

    def look_at_evaluation(
        self, number: int, losses: Mapping[str, float]
    ) -> tuple[str, Bad | None]:
        """The same for held-out losses: parameters that give NaN are not saved."""
        names = [n for n in losses if n in ("eval/loss", "retention/loss")]
        wrong = [n for n in names if not math.isfinite(losses[n])]
        if not wrong:
            return GO_ON, None
        cause = f"{wrong[0]} is not finite"
        self._console.print(f"[red]step {number}: {cause}")
        return self._decide(self._max_bad_steps), Bad(number, cause, self.in_row)

    def _decide(self, in_row: int) -> str:
        return guard.decide(
            in_row, self.counts, max_bad_steps=self._max_bad_steps, cfg=self._cfg
        )

    def roll_back(self, bad: Bad, bad_total: int) -> TrainState | None:
        """The last good state, to go on from with the data after `bad.step`.

        Returns:
            None when no checkpoint on the disk is whole; it has been told.
        """
        run = self._run
        try:
            good, _ = restore.last_good(
                run.config, run.parts, run.checkpointer, run.held
            )
        except ValueError as error:
            self._console.print(f"[red]no way back: {error}")
            return None
        to = int(good.step)
        self.counts = guard.rolled_back(self.counts, self._cfg)
        self.in_row = 0
        self._writer.write(
            bad.step,
            {
                "rolled_back_to": to,
                "cause": bad.cause,
                "rollbacks": self.counts.rollbacks,
                "lr_scale": self.counts.lr_scale,
            },
        )
        where = f"checkpoint of step {to}" if to else "start: nothing was saved before"
        self._console.print(
            f"[yellow]step {bad.step}: rolled back to the {where}; going on with the "
            f"data of step {bad.step + 1}, learning rate x {self.counts.lr_scale:g} "
            f"(roll-back {self.counts.rollbacks} of {self._cfg.max_rollbacks})"
        )
        state = restore.at_step(good, bad.step, bad_total=bad_total)
        return run.parts.layout.place_state(state) if run.parts.layout else state

    def stop(self, bad: Bad, state: TrainState) -> None:
        """Tell that the run ends here, and leave a bundle of its first bad step."""
        if problem := self._run.checkpointer.wait():
            self._console.print(f"[yellow]{problem}")
        good = self._run.checkpointer.last_good()
        kept = "no checkpoint" if good is None else f"last good checkpoint: step {good}"
        self._console.print(
            f"[red]stopped after {self.counts.rollbacks} roll-backs: numbers went bad; "
            f"{kept}"
        )
        # Skipped steps change nothing, so the state is that before the first of them.
        # After a bad evaluation it is that before the next step, if there is one.
        step = bad.step - bad.in_row + 1
        step = min(step, self._run.config.train.steps)
        state, held = on_host((state, self.held))
        if not self._run.peers.is_first:
            return
        try:
            path = bundle.write(
                self._run,
                state,
                held,
                step=step,
                cause=bad.cause,
                lr_scale=self.counts.lr_scale,
            )
        except OSError as error:
            self._console.print(f"[red]no bundle: {error}")
            return
        self._console.print(
            f"bundle of step {step}: {path}; look into it with "
            f"python scripts/replay_step.py {path}"
        )

    def saved(self) -> dict[str, Any]:
        """What checkpoints keep of it."""
        return self.counts._asdict()

    def figures(self, bad_total: int) -> dict[str, str]:
        """What the summary shows; nothing where nothing was bad."""
        shown = {}
        if bad_total:
            shown["skipped steps (bad numbers)"] = str(bad_total)
        if self.counts.rollbacks:
            shown["roll-backs"] = (
                f"{self.counts.rollbacks} (learning rate x {self.counts.lr_scale:g} "
                "since the last)"
            )
        return shown


__all__ = ["GO_ON", "ROLL_BACK", "STOP", "Bad", "Guard"]
