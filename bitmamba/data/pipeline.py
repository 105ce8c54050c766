"""Windows by grain: random access over the plan, read ahead by threads.

The whole state is the step number: batch k depends on the plan and k alone.
"""

from collections.abc import Iterator, Sequence

import grain
import numpy as np

from bitmamba.data.plan import Plan
from bitmamba.data.store import DocumentStore
from bitmamba.data.windows import make_windows
from bitmamba.types import Batch

READ_THREADS = 2
BATCHES_AHEAD = 4


class StepSource:
    """Step -> batch with (M, B, L) fields; a grain random-access source.

    rows: which of the B rows of the global batch are made; all by default.
    """

    def __init__(
        self,
        plan: Plan,
        stores: Sequence[DocumentStore],
        *,
        window: int,
        batch_size: int,
        accumulation: int,
        rows: slice = slice(None),
    ):
        self._plan, self._stores, self._window = plan, stores, window
        self._shape = (accumulation, batch_size)
        self._rows = rows

    def __len__(self) -> int:
        return self._plan.n_windows // int(np.prod(self._shape))

    def __getitem__(self, step: int) -> Batch:
        n = int(np.prod(self._shape))
        grid = np.arange(step * n, (step + 1) * n).reshape(self._shape)[:, self._rows]
        flat = make_windows(
            self._plan, self._stores, grid.reshape(-1), window=self._window
        )
        return Batch(*(f.reshape(*grid.shape, self._window) for f in flat))


def iterate(source: StepSource, *, start_step: int) -> Iterator[Batch]:
    """Batches of steps start_step, start_step + 1, … to the end of the plan."""
    if start_step == len(source):
        return iter(())
    dataset = grain.MapDataset.source(source)[start_step:]
    options = grain.ReadOptions(
        num_threads=READ_THREADS, prefetch_buffer_size=BATCHES_AHEAD
    )
    return iter(dataset.to_iter_dataset(options))
