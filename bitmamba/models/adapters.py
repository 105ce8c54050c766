"""Low-rank branches beside frozen weights: the mathematics, and how layers get them.

Adapters travel in the parameter tree at their site ("layer_0/mixer/in_proj/a"). For
`apply` they become the collection "lora", whose leaves are `Adapter`s; a layer adds a
branch exactly where that collection has one for it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from bitmamba import paths
from bitmamba.types import STATE_OFFSET, AdapterSpec, Features, Params

COLLECTION = "lora"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
    """One adapter's arrays, with its spec as static data.

    a: (D, R) float32. b: (R, F) float32. magnitude: (F,) float32 or None.
    """

    spec: AdapterSpec = dataclasses.field(metadata={"static": True})
    a: jax.Array
    b: jax.Array
    magnitude: jax.Array | None = None


def collections(tree: Params, specs: Sequence[AdapterSpec]) -> dict[str, Any]:
    """The variables for `apply`: {"params": …} and, with adapters, {"lora": …}.

    Args:
        tree: parameters, and the leaves of the adapters and state offsets, if any.
        specs: of the adapters whose leaves the tree has.

    Raises:
        KeyError: the tree lacks an adapter's leaf.
    """
    flat = paths.flatten(tree)
    lora = {}
    for spec in specs:
        leaves = {n: flat.pop(f"{spec.path}/{n}") for n in ("a", "b")}
        length = flat.pop(f"{spec.path}/magnitude", None)
        columns = spec.path.removeprefix(spec.site).lstrip("/") or "all"
        adapter = Adapter(spec=spec, **leaves, magnitude=length)
        lora[f"{spec.site}/{columns}"] = adapter
    for path in [p for p in flat if p.endswith("/" + STATE_OFFSET)]:
        lora[path] = flat.pop(path)
    variables = {"params": paths.unflatten(flat)}
    return variables | ({COLLECTION: paths.unflatten(lora)} if lora else {})


def adapters_of(module: nn.Module) -> list[Adapter]:
    """The adapters of this module's weight, by column; [] when it has none."""
    found: Mapping[str, Adapter] = module.variables.get(COLLECTION, {})
    return sorted(found.values(), key=lambda adapter: adapter.spec.start)


def state_offset(module: nn.Module) -> jax.Array | None:
    """The offset of this mixer's state, (H, P, N), or None."""
    return module.variables.get(COLLECTION, {}).get(STATE_OFFSET)


def dropout_key(module: nn.Module) -> jax.Array | None:
    """A key for this module's dropout while training, else None."""
    return module.make_rng("dropout") if module.has_rng("dropout") else None


def add_branches(
    y: jax.Array,
    x: jax.Array,
    adapters: Sequence[Adapter],
    *,
    weight: jax.Array | None,
    key: jax.Array | None,
) -> jax.Array:
    """The product of a frozen weight with the branches of its adapters.

    On the adapted columns: y + scale · (x @ a) @ b; with a magnitude m that sum is
    multiplied by m / ‖W + scale · a @ b‖ of each column, the norm held constant in
    the gradient.

    Args:
        y: (..., F) float, x @ W with the frozen (possibly quantised) weight.
        x: (..., D) float, its input: normalised, not quantised.
        adapters: of different columns of W, in order.
        weight: (D, F) float, what W stands for; only needed with a magnitude.
        key: of the dropout; None drops nothing.

    Returns:
        (..., F) in y.dtype.

    Source: Hu et al. 2021, arXiv:2106.09685, section 4.1; dropout on the branch's
        input. Magnitude: Liu et al. 2024, arXiv:2402.09353, equations 5 and 11.
    """
    parts, done = [], 0
    for adapter in adapters:
        start, stop = adapter.spec.start, adapter.spec.start + adapter.spec.shape[1]
        parts.append(y[..., done:start])
        total = y[..., start:stop] + branch(x, adapter, dtype=y.dtype, key=key)
        if adapter.magnitude is not None:
            total = total * _stretch(adapter, weight[:, start:stop]).astype(y.dtype)
        parts.append(total)
        done = stop
    parts.append(y[..., done:])
    parts = [part for part in parts if part.shape[-1]]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def branch(
    x: jax.Array, adapter: Adapter, *, dtype: Any, key: jax.Array | None = None
) -> jax.Array:
    """scale · (dropout(x) @ a) @ b, (..., F) in dtype."""
    low = low_rank(x, adapter, dtype=dtype, key=key)
    flat = low.reshape(-1, low.shape[-1]) @ adapter.b.astype(dtype)
    return flat.reshape(*x.shape[:-1], flat.shape[-1])


def low_rank(
    x: jax.Array, adapter: Adapter, *, dtype: Any, key: jax.Array | None = None
) -> jax.Array:
    """scale · dropout(x) @ a, (..., R) in dtype."""
    rate = adapter.spec.dropout
    if rate and key is not None:
        kept = jax.random.bernoulli(key, 1 - rate, x.shape)
        x = jnp.where(kept, x / (1 - rate), 0)
    flat = x.reshape(-1, x.shape[-1]).astype(dtype) @ adapter.a.astype(dtype)
    return (flat * adapter.spec.scale).reshape(*x.shape[:-1], flat.shape[-1])


def adapt_head(
    features: Features, x: jax.Array, adapters: Sequence[Adapter], key: Any
) -> Features:
    """Features whose product is hidden @ head + scale · (x @ a) @ b, in two factors."""
    hidden, head = features
    dtype = hidden.dtype
    for adapter in adapters:
        low = low_rank(x, adapter, dtype=dtype, key=key)
        hidden = jnp.concatenate([hidden, low], axis=-1)
        head = jnp.concatenate([head.astype(dtype), adapter.b.astype(dtype)], axis=0)
    return Features(hidden, head)


def transposed(adapter: Adapter) -> Adapter:
    """The adapter of the transposed weight: (a @ b)ᵀ = bᵀ @ aᵀ."""
    return dataclasses.replace(adapter, a=adapter.b.T, b=adapter.a.T)


def column_norms(weight: jax.Array, adapter: Adapter) -> jax.Array:
    """‖W + scale · a @ b‖ of every column, (F,) float32, without forming the sum."""
    a, b, scale = adapter.a, adapter.b, adapter.spec.scale
    cross = jnp.sum((a.T @ weight) * b, axis=0)
    own = jnp.sum(b * ((a.T @ a) @ b), axis=0)
    squares = jnp.sum(weight * weight, axis=0) + scale * (2 * cross + scale * own)
    return jnp.sqrt(jnp.maximum(squares, 0.0))


def _stretch(adapter: Adapter, weight: jax.Array) -> jax.Array:
    wide = jnp.promote_types(weight.dtype, jnp.float32)
    norms = jax.lax.stop_gradient(column_norms(weight.astype(wide), adapter))
    return adapter.magnitude / jnp.maximum(norms, jnp.finfo(wide).tiny)
