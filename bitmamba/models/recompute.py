"""Functions whose backward pass keeps their inputs only."""

from collections.abc import Callable
from typing import Any

import jax


def recompute(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of arrays, computed once more in the backward pass.

    For what is cheap to compute and large to keep: gates, activations, norms. Unlike
    under `jax.checkpoint`, the second computation waits for the cotangent; XLA:CPU else
    schedules it, and keeps its results, before the backward pass begins.

    Gradient: that of autodiff, of all arguments; forward mode is not supported.
    """

    @jax.custom_vjp
    def computed(*arrays):
        return function(*arrays)

    def forward(*arrays):
        return function(*arrays), arrays

    def backward(arrays, cotangent):
        arrays, cotangent = jax.lax.optimization_barrier((arrays, cotangent))
        return jax.vjp(function, *arrays)[1](cotangent)

    computed.defvjp(forward, backward)
    return computed
