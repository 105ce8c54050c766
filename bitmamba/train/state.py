"""What a training run carries from step to step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bitmamba.train.spike import LossHistory, no_history
from bitmamba.types import Params


class TrainState(NamedTuple):
    """All that changes in a step; the data position is `step` itself.

    step: () int32. Windows consumed so far are step * accumulation * batch_size.
    trainable: the parameters that are trained, float32.
    opt_state: the optimiser's state.
    bad_in_row, bad_total: () int32. Steps skipped because their numbers were bad.
    history: good losses, against which a spike is one.
    """

    step: jax.Array
    trainable: Params
    opt_state: Any
    bad_in_row: jax.Array
    bad_total: jax.Array
    history: LossHistory


def init_state(trainable: Params, opt_state: Any) -> TrainState:
    """The state before step 1."""

    def zero() -> jax.Array:
        return jnp.zeros((), jnp.int32)  # one buffer each: the state is donated

    return TrainState(zero(), trainable, opt_state, zero(), zero(), no_history())
