"""What the kernels of the scan cannot take."""

import jax.numpy as jnp


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
    return None
