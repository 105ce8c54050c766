"""The arms of one rank: one compiled step for all of them, in turn or together."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bitmamba.optim import Hyper, hyper
from bitmamba.report import units
from bitmamba.report.plan import step_memory
from bitmamba.train import build
from bitmamba.train.arms import Arm
from bitmamba.train.device_memory import memory_limit
from bitmamba.train.objective import Frozen
from bitmamba.train.state import TrainState, init_state
from bitmamba.types import Batch, Params

HOW = ("auto", "in_turn", "together")

# Tells what a step made, one dict of host arrays an arm; it waits for the device.
Read = Callable[[], dict[int, dict[str, Any]]]


class InTurn:
    """The ordinary compiled step, called once an arm on the same batch."""

    def __init__(self, step, states: Mapping[int, TrainState], helds) -> None:
        """states, helds: by the arm's number; helds share their arrays."""
        self._step, self._states, self._helds = step, dict(states), helds

    def step(self, batch: Batch, alive: Collection[int]) -> Read:
        """Train every arm of `alive` on the batch; forget the others."""
        self._states = {i: s for i, s in self._states.items() if i in alive}
        made = {}
        for i, state in self._states.items():
            self._states[i], made[i] = self._step(state, self._helds[i], batch)
        return partial(jax.device_get, made)

    def state(self, arm: int) -> TrainState:
        """Of an arm that still trains."""
        return self._states[arm]

    def to_save(self, arm: int) -> TrainState:
        """The same."""
        return self._states[arm]


class Together:
    """The step over all arms at once; one that is not alive still costs its share."""

    def __init__(self, step, states: Mapping[int, TrainState], helds) -> None:
        """step: from `together_step`; states, helds: by the arm's number."""
        self._step, self._arms = step, list(states)
        self._states = _stack([states[i] for i in self._arms])
        self._held = together_held([helds[i] for i in self._arms])

    def step(self, batch: Batch, alive: Collection[int]) -> Read:
        """Train on the batch; what the arms of `alive` made can be read."""
        self._states, made = self._step(self._states, self._held, batch)
        wanted = [(k, i) for k, i in enumerate(self._arms) if i in alive]

        def read():
            host = jax.device_get(made)
            return {i: jax.tree.map(lambda x, k=k: x[k], host) for k, i in wanted}

        return read

    def state(self, arm: int) -> TrainState:
        """A copy of one arm's state."""
        k = self._arms.index(arm)
        return jax.tree.map(lambda x: x[k], self._states)

    def to_save(self, arm: int) -> TrainState:
        """The same on the host: on the device there may be no room for all of them."""
        return jax.device_get(self.state(arm))


def together_step(step) -> Callable:
    """The step over a leading axis of states, with one Hyper value for each."""
    axes = (0, Frozen(weights=None, start=None, hyper=0), None)
    return jax.jit(jax.vmap(step, in_axes=axes), donate_argnums=0)


def together_held(helds: Sequence[Frozen]) -> Frozen:
    """One Frozen for all: its weights are those of each."""
    return helds[0]._replace(hyper=_stack([held.hyper for held in helds]))


class Compiled(NamedTuple):
    """The arms of a rank, compiled: make(states, helds) -> InTurn or Together.

    peak: bytes while it steps, states of all its arms included. reason: why this way.
    """

    make: Callable
    name: str
    reason: str
    peak: int
    seconds: float


def compile_group(parts: build.Parts, arms: Sequence[Arm], how: str) -> Compiled:
    """Compile the step of one rank in turn or together; "auto" looks which is better.

    On an accelerator "auto" compiles both and takes "together" if it fits into the
    memory, gives the same bits, and is faster.
    """
    config = arms[0].config
    if how == "together":
        return _together(config, parts, len(arms), "asked for")
    reason = "asked for" if how == "in_turn" else ""
    if how == "auto" and len(arms) == 1:
        reason = "one arm of this rank"
    elif how == "auto" and jax.default_backend() == "cpu":
        reason = (
            "on a CPU arms together are slower, and not equal to the bit (SWEEP.md)"
        )
    turn = _in_turn(config, parts, len(arms), reason)
    return turn if reason else _better(config, parts, arms, turn)


def _in_turn(config, parts: build.Parts, n: int, reason: str) -> Compiled:
    compiled, seconds = build.compile_step(config, parts)
    others = (n - 1) * tree_bytes(build.state_shape(parts))
    peak = step_memory(compiled).peak + others
    return Compiled(partial(InTurn, compiled), "in turn", reason, peak, seconds)


def _together(config, parts: build.Parts, n: int, reason: str) -> Compiled:
    begin = time.perf_counter()
    states = _shapes_of_arms(build.state_shape(parts), n)
    values = Hyper(*(jax.ShapeDtypeStruct((n,), jnp.float32) for _ in Hyper._fields))
    held = parts.held._replace(hyper=values)
    lowered = together_step(parts.step).lower(states, held, build.batch_shape(config))
    compiled = lowered.compile()
    seconds = time.perf_counter() - begin
    peak = step_memory(compiled).peak
    return Compiled(partial(Together, compiled), "together", reason, peak, seconds)


def _better(config, parts: build.Parts, arms: Sequence[Arm], turn: Compiled):
    try:
        both = _together(config, parts, len(arms), "")
    except NotImplementedError as error:
        return turn._replace(reason=f"arms together cannot run here: {error}")
    limit = memory_limit(config.memory_gb)
    if limit is not None and both.peak > limit.size:
        sizes = f"{units.size(both.peak)} of {units.size(limit.size)}"
        return turn._replace(reason=f"arms together would need {sizes}")
    equal, quicker = compare(turn, both, parts, arms)
    verdict = f"together {quicker:.2f} x as fast, {'' if equal else 'not '}bit-equal"
    chosen = both if equal and quicker > 1.0 else turn
    return chosen._replace(reason=f"measured: {verdict}")


def compare(
    turn: Compiled, both: Compiled, parts: build.Parts, arms: Sequence[Arm]
) -> tuple[bool, float]:
    """(whether both make the same bits, time in turn / time together), on made-up data.

    Parameters are small random numbers: all that matters here is arithmetic.
    """
    rng = np.random.default_rng(0)

    def filled(shape):
        if jnp.issubdtype(shape.dtype, jnp.floating):
            return jnp.asarray(0.02 * rng.standard_normal(shape.shape), shape.dtype)
        return jnp.ones(shape.shape, shape.dtype)

    held = jax.tree.map(filled, parts.held)
    batch = jax.tree.map(filled, build.batch_shape(arms[0].config))
    trainable = jax.tree.map(filled, parts.trainable)
    helds = {i: held._replace(hyper=hyper(a.config.optim)) for i, a in enumerate(arms)}
    seconds, ends = [], []
    for compiled in (turn, both):
        group = compiled.make(first_states(parts, trainable, helds), helds)
        group.step(batch, helds)()
        begin = time.perf_counter()
        for _ in range(3):
            read = group.step(batch, helds)
        read()
        seconds.append(time.perf_counter() - begin)
        ends.append(jax.device_get([group.state(i) for i in helds]))
    pairs = zip(*map(jax.tree.leaves, ends), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs), seconds[0] / seconds[1]


def first_states(
    parts: build.Parts, trainable: Params, arms: Collection[int]
) -> dict[int, TrainState]:
    """The state before step 1, once for each arm: a step may write into its own."""
    init = jax.jit(
        lambda p: init_state(jax.tree.map(jnp.copy, p), parts.optimizer.init(p))
    )
    return {i: init(trainable) for i in arms}


def _stack(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _shapes_of_arms(tree: Any, n: int) -> Any:
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct((n, *s.shape), s.dtype), tree)


def tree_bytes(tree: Any) -> int:
    """Of arrays or their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
