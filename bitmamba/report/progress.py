"""The progress of a run: a live bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from bitmamba.report import units


class Meter:
    """Speed and losses of the steps since it was made; the loop feeds it."""

    def __init__(self, *, total: int, start: int) -> None:
        self._total, self._start = total, start
        self._begin = time.perf_counter()
        self._waited = 0.0
        self._other = 0.0
        self._tokens = 0
        self._step = start

    def step_done(self, step: int, *, tokens: int, waited: float) -> None:
        """One step with its tokens and the seconds that data made it wait."""
        self._step, self._tokens = step, self._tokens + tokens
        self._waited += waited

    def exclude(self, seconds: float) -> None:
        """Time that was not training: evaluation, samples."""
        self._other += seconds

    @property
    def steps_done(self) -> int:
        """Steps since the meter was made."""
        return self._step - self._start

    @property
    def seconds(self) -> float:
        """Seconds of training."""
        return max(1e-9, time.perf_counter() - self._begin - self._other)

    @property
    def tokens_per_s(self) -> float:
        """Tokens, padding not counted, per second of training."""
        return self._tokens / self.seconds

    @property
    def data_share(self) -> float:
        """Share of the time in which training waited for data."""
        return self._waited / self.seconds

    @property
    def eta(self) -> float:
        """Seconds of training still to come."""
        return (self._total - self._step) * self.seconds / max(1, self.steps_done)

    def line(self, loss: float) -> str:
        """Loss, speed, share of time lost to data, time to go."""
        return (
            f"loss {units.loss(loss)}  {units.count(self.tokens_per_s)} tok/s  "
            f"data {units.percent(self.data_share)}  ETA {units.duration(self.eta)}"
        )


@contextmanager
def progress_bar(console: Console, *, total: int, start: int) -> Iterator:
    """Yields show(step, text): a live bar, or a line about every 20th of the run."""
    if not console.is_terminal:
        every = max(1, total // 20)

        def show_line(step: int, text: str) -> None:
            if step % every == 0 or step in (start + 1, total):
                console.print(f"step {step}/{total}  {text}", highlight=False)

        yield show_line
        return
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=False) as bar:
        task = bar.add_task("", total=total, completed=start)
        yield lambda step, text: bar.update(task, completed=step, description=text)
