"""The product in plain JAX: int32 sums, which are exact, and one rounding."""

import jax
import jax.numpy as jnp
from jax import lax


def bit_product(x_codes, w_codes, scale, dtype) -> jax.Array:
    """(T, F) in dtype; scale is (T, 1), of both sides."""
    over_channels = (((1,), (1,)), ((), ()))
    whole = lax.dot_general(
        x_codes, w_codes, over_channels, preferred_element_type=jnp.int32
    )
    return (whole.astype(scale.dtype) * scale).astype(dtype)
