"""One operation of a traced program, in a precision that need not be its own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bitmamba.train.lanes_numpy import OPERATIONS


def bind(eqn, arrays: list, dtype: Callable[[Any], Any]) -> list:
    """The operation itself; float dtypes that it names become the lane's."""
    if eqn.primitive.name in _AS_TRACED:
        given = [
            cast(x, lambda d, a=v.aval: a.dtype)
            for x, v in zip(arrays, eqn.invars, strict=True)
        ]
        out = eqn.primitive.bind(*given, **eqn.params)
        out = out if eqn.primitive.multiple_results else [out]
        return [cast(x, dtype) for x in out]
    if eqn.primitive.name == "scatter-add":
        keep = ("indices_are_sorted", "unique_indices", "mode")
        settings = {k: eqn.params[k] for k in keep}
        numbers = eqn.params["dimension_numbers"]
        return [jax.lax.scatter_add(*arrays, numbers, **settings)]
    params = {
        k: dtype(v) if k in _DTYPES and _is_float_dtype(v) else v
        for k, v in eqn.params.items()
    }
    operation = OPERATIONS.get(eqn.primitive.name)
    if operation and not any(_is_key(x) for x in arrays):
        with np.errstate(all="ignore"):
            out = operation([np.asarray(x) for x in arrays], params)
        return [_flushed(x) for x in (out if isinstance(out, list) else [out])]
    out = eqn.primitive.bind(*arrays, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


_DTYPES = ("new_dtype", "dtype", "preferred_element_type")
# Bits of a float32 mean nothing in another dtype.
_AS_TRACED = ("bitcast_convert_type", "reduce_precision", "erf_inv")


def is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _is_float_dtype(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def _flushed(x: Any) -> np.ndarray:
    """Without the float32 numbers below 1.2e-38, which XLA takes for zero too."""
    x = np.asarray(x)
    if x.dtype != np.float32:
        return x
    tiny = np.abs(x) < np.finfo(np.float32).tiny
    return np.where(tiny, np.float32(0), x) if tiny.any() else x


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def cast(array: Any, dtype: Callable[[Any], Any]) -> Any:
    if not is_float(array):
        return array
    with np.errstate(over="ignore"):
        return np.asarray(array).astype(dtype(array.dtype))
