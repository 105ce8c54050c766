"""What the kernels of the scan cannot take."""

import jax.numpy as jnp

from pallas_kernels import backend

# States in two parts that fit the 99 KB of RTX 50 cards (sm_120) beside TMA's barriers:
# those of 128 are 16 bytes too many in `input_gradients`.
_MOST_ON_SM_120 = 112


def refusal(x, dt, A, B, C, initial_state) -> str | None:
    """Why the kernels cannot take these arguments, or None."""
    for name, array in (("x", x), ("B", B), ("C", C)):
        if array.dtype not in (jnp.bfloat16, jnp.float32):
            return f"{name}: got {array.dtype}; expected bfloat16 or float32"
    for name, array in (("dt", dt), ("A", A), ("initial_state", initial_state)):
        if array.dtype != jnp.float32:
            return f"{name}: got {array.dtype}; expected float32"
    if B.shape[-1] > 128:
        return f"B: got d_state {B.shape[-1]}; expected at most 128"
    return _too_large_in_float32(x, B, C)


def _too_large_in_float32(x, B, C) -> str | None:
    generation, n = (backend.capability() or (0, 0))[0], B.shape[-1]
    if generation != 12 or n <= _MOST_ON_SM_120:
        return None
    if all(array.dtype == jnp.bfloat16 for array in (x, B, C)):
        return None
    return (
        f"B: got d_state {n} with float32 operands; expected at most {_MOST_ON_SM_120} "
        "on this GPU, or bfloat16"
    )
