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
    width, n = x.shape[-1], B.shape[-1]
    if width % 64:
        return f"x: got {width} channels a head; expected a multiple of 64"
    if n != 1 and (n % 16 or n > 128):
        return f"B: got d_state {n}; expected 1 or a multiple of 16 up to 128"
    return None
