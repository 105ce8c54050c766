"""The other processes of a run: what they tell one another beside arrays.

Small JSON values go through the store that `jax.distributed` keeps at process 0. Every
process must ask the same things in the same order, from its main thread.
"""

import json
from collections.abc import Callable
from typing import Any

import jax

_SIGNS = "bitmamba/signs/"
_TIMEOUT_MS = 600_000  # a lost process ends the run long before


class Peers:
    """The processes of a run, this one among them.

    index, count: which process this is, of how many.
    """

    def __init__(self, client: Any = None, *, index: int = 0, count: int = 1) -> None:
        """client: of `jax.distributed`; None if this process is alone."""
        self.index, self.count = index, count
        self._client = client
        self._round = 0

    @property
    def is_first(self) -> bool:
        """Whether this process shows and writes what only one may."""
        return self.index == 0

    def gather(self, value: Any) -> list[Any]:
        """What every process said, in their order."""
        if self.count == 1:
            return [value]
        here = f"bitmamba/round/{self._round}"
        self._client.key_value_set(f"{here}/{self.index}", json.dumps(value))
        said = [
            json.loads(self._client.blocking_key_value_get(f"{here}/{i}", _TIMEOUT_MS))
            for i in range(self.count)
        ]
        # All have said something in this round, so all have read the one before it.
        if self._round:
            before = f"bitmamba/round/{self._round - 1}/{self.index}"
            self._client.key_value_delete(before)
        self._round += 1
        return said

    def first(self, make: Callable[[], Any]) -> Any:
        """What process 0 makes of it; the others do not call `make`."""
        return self.gather(make() if self.is_first else None)[0]

    def do_first(self, act: Callable[[], Any]) -> None:
        """Process 0 acts; the others go on once it is done."""
        self.first(lambda: act() and None)

    def all(self, flag: bool) -> bool:
        """Whether it is so for every process."""
        return all(self.gather(bool(flag)))

    def meet(self, timeout_s: float) -> bool:
        """Whether all come here within a time."""
        try:
            self._client.wait_at_barrier("bitmamba/meet", int(1000 * timeout_s))
        except Exception:  # somebody did not
            return False
        return True

    def give_sign(self, sign: str) -> None:
        """Leave a sign of life for the others; from any thread."""
        key = f"{_SIGNS}{self.index}"
        self._client.key_value_set(key, sign, allow_overwrite=True)

    def signs(self) -> dict[int, str]:
        """The last sign of every process that gave one; from any thread."""
        found = self._client.key_value_dir_get(_SIGNS)
        return {int(key.rpartition("/")[2]): sign for key, sign in found}


ALONE = Peers()


def of_jax() -> Peers:
    """The processes that `jax.distributed` brought together; `ALONE` without it."""
    if not jax.distributed.is_initialized():
        return ALONE
    # The store has no public name; Orbax takes it from there too.
    from jax._src import distributed

    state = distributed.global_state
    return Peers(state.client, index=state.process_id, count=state.num_processes)
