"""First values and shapes of adapters, as parameter trees."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bitmamba.paths import flatten, unflatten
from bitmamba.types import ADAPTER_LEAVES, AdapterSpec

EMBEDDING = "embed"


def adapter_shapes(
    specs: Sequence[AdapterSpec], offsets: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """The tree of all adapters' leaves as ShapeDtypeStructs, float32.

    Args:
        specs: from `place_adapters`.
        offsets: {path: (H, P, N)} of the state offsets that train; {} for none.
    """
    flat = {}
    for spec in specs:
        d_in, d_out = spec.shape
        flat[f"{spec.path}/a"] = (d_in, spec.rank)
        flat[f"{spec.path}/b"] = (spec.rank, d_out)
        if spec.magnitude:
            flat[f"{spec.path}/magnitude"] = (d_out,)
    shapes = flat | dict(offsets)
    return unflatten(
        {p: jax.ShapeDtypeStruct(s, jnp.float32) for p, s in shapes.items()}
    )


def init_adapters(
    specs: Sequence[AdapterSpec],
    offsets: Mapping[str, tuple[int, ...]],
    *,
    weight: Callable[[str], jax.Array],
    key: jax.Array,
) -> dict[str, Any]:
    """Adapters that change nothing yet.

    a is U(±1 / sqrt(D)) and b is 0; beside the embedding, a lookup, a is 0 and b is
    normal(1). A magnitude is the length of the base's column, an offset is 0.

    Args:
        specs, offsets: see `adapter_shapes`.
        weight: site -> (D, F) frozen weight as it multiplies; for magnitudes only.
        key: each adapter has its own stream, by its path.

    Returns:
        A tree of float32 arrays.

    Source: Hu et al. 2021, arXiv:2106.09685; a as in PEFT (kaiming uniform, sqrt(5)).
    """
    flat = flatten(adapter_shapes(specs, offsets))
    values = {path: jnp.zeros(leaf.shape, leaf.dtype) for path, leaf in flat.items()}
    for spec in specs:
        one = jax.random.fold_in(key, zlib.crc32(spec.path.encode()))
        if spec.site == EMBEDDING:
            path = f"{spec.path}/b"
            values[path] = jax.random.normal(one, flat[path].shape)
        else:
            path = f"{spec.path}/a"
            limit = spec.shape[0] ** -0.5
            shape = flat[path].shape
            values[path] = jax.random.uniform(one, shape, minval=-limit, maxval=limit)
        if spec.magnitude:
            columns = weight(spec.site)[:, spec.start : spec.start + spec.shape[1]]
            lengths = jnp.linalg.norm(columns, axis=0)
            values[f"{spec.path}/magnitude"] = lengths
    return unflatten(values)


def is_adapter_leaf(path: str) -> bool:
    """Whether a parameter's path is an adapter's: its last part says so."""
    return path.rpartition("/")[2] in ADAPTER_LEAVES


def partner(path: str) -> str | None:
    """The factor that multiplies this one: while it is 0, so is this one's gradient."""
    stem, _, leaf = path.rpartition("/")
    return {"a": f"{stem}/b", "b": f"{stem}/a"}.get(leaf)
