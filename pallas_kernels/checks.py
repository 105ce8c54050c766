"""Argument checks shared by the operators: `where: name: got X; expected Y; fix`."""

import jax
import jax.numpy as jnp


def check_shape(
    op: str, name: str, array: jax.Array, expected: tuple[int, ...], meaning: str
) -> None:
    """Raise ValueError unless `array` has exactly the expected shape."""
    _check_array(op, name, array)
    if array.shape != expected:
        raise ValueError(
            f"{op}: {name}: got shape {array.shape}; expected {expected} = {meaning}"
        )


def _check_array(op: str, name: str, array: jax.Array) -> None:
    """Raise ValueError for a list, a number, or anything else that is no array."""
    if not (hasattr(array, "shape") and hasattr(array, "dtype")):
        raise ValueError(
            f"{op}: {name}: got a {type(array).__name__}; expected an array; use "
            "jnp.asarray"
        )


def check_rank(op: str, name: str, array: jax.Array, rank: int, meaning: str) -> None:
    """Raise ValueError unless `array` has `rank` axes, none of them empty."""
    _check_array(op, name, array)
    if array.ndim != rank or 0 in array.shape:
        raise ValueError(
            f"{op}: {name}: got shape {array.shape}; expected {rank} non-empty axes "
            f"{meaning}"
        )


def check_float(op: str, name: str, array: jax.Array) -> None:
    """Raise ValueError unless `array` is of a floating dtype."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(
            f"{op}: {name}: got dtype {array.dtype}; expected a floating dtype; "
            "convert it first"
        )


def check_wide_float(op: str, name: str, array: jax.Array) -> None:
    """Raise ValueError unless `array` is float32 or float64."""
    if array.dtype not in (jnp.float32, jnp.float64):
        raise ValueError(
            f"{op}: {name}: got dtype {array.dtype}; expected float32 (scales, decays, "
            f"step sizes and states are never narrower); use "
            f"{name}.astype(jnp.float32)"
        )


def check_int(op: str, name: str, array: jax.Array) -> None:
    """Raise ValueError unless `array` is of an integer dtype."""
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(
            f"{op}: {name}: got dtype {array.dtype}; expected int32 ids, one per token"
        )
