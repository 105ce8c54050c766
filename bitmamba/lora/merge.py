"""Adapters added into the weights they stand beside, and what rounding then loses.

`tree`s hold a run's base and adapters together, as `bitmamba.io.runs.load_run` gives
them. README.md, "Merge", says which weights a merge starts from, and why.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from bitmamba import paths
from bitmamba.lora.adapters import EMBEDDING, is_adapter_leaf
from bitmamba.types import AdapterSpec, Array, Params

Ternarise = Callable[[Array], tuple[Array, Array]]
_ROWS = 4096  # of a weight at a time in sums over bfloat16 copies


class FloatChange(NamedTuple):
    """What a float merge did to one weight.

    n_weights: of the adapted columns. relative: ‖Δ‖ / ‖W‖ there.
    unchanged: share of them that round to the same bfloat16 with and without Δ.
    lost: ‖what bfloat16 keeps of Δ - Δ‖ / ‖Δ‖; 0 keeps all, from 1 on nothing is left.
    """

    site: str
    n_weights: int
    relative: float
    unchanged: float
    lost: float


class CodeChange(NamedTuple):
    """What a ternary merge did to one weight.

    n_weights: of the whole weight. relative: ‖Δ‖ / ‖W‖. n_changed: codes that changed.
    scale_ratio: the new scale over the old one.
    lost: ‖the merged ternary weight - (W + Δ)‖ / ‖Δ‖; 1 is as far as the base is.
    """

    site: str
    n_weights: int
    relative: float
    n_changed: int
    scale_ratio: float
    lost: float


def base_of(tree: Params) -> dict[str, Any]:
    """The tree without the leaves of its adapters."""
    return paths.split(tree, is_adapter_leaf)[1]


def merge_float(
    tree: Params, specs: Sequence[AdapterSpec]
) -> tuple[dict[str, Any], list[FloatChange]]:
    """Weights that compute what base and adapters compute together.

    W + scale · a @ b on the adapted columns; with a magnitude m, each column of that
    sum times m / its norm. In float32 throughout, and rounded to nothing smaller.

    Args:
        tree: float32 weights *as they multiply* (of a ternary layer its value, not
            its latent weight), and the adapters' leaves.
        specs: of those adapters.

    Returns:
        (float32 parameters without adapters, a row for each changed weight).

    Raises:
        ValueError: an adapter that is no change of a weight (a state offset).
    """
    _check_mergeable(tree)
    flat = paths.flatten(tree)
    merged = paths.flatten(base_of(tree))
    rows = []
    for site, mine in _by_site(specs).items():
        path = weight_path(site)
        before = np.asarray(flat[path], np.float32)
        merged[path] = adapted(before, mine, flat)
        rows.append(_float_change(site, before, merged[path], mine))
    return paths.unflatten(merged), rows


def merge_ternary(
    tree: Params,
    specs: Sequence[AdapterSpec],
    *,
    is_ternary: Callable[[str], bool],
    ternarise: Ternarise,
    latent: Callable[[np.ndarray, float], np.ndarray],
) -> tuple[dict[str, Any], list[CodeChange]]:
    """The ternary weights nearest to what base and adapters compute together.

    W + Δ is rounded to codes at the base's scale; the new scale is then the one of
    least squares. A weight of which no code changes stays as it was, bit for bit.

    Args:
        tree: latent weights and the adapters' leaves.
        specs: of those adapters; one beside a float weight is merged in float32.
        is_ternary: whether the weight at a path multiplies as codes · scale.
        ternarise: latent weight -> (codes, scale).
        latent: (codes, scale) -> a latent weight that ternarises to them.

    Returns:
        (latent parameters without adapters, a row for each ternary weight).

    Raises:
        ValueError: a state offset; or ternary weights are adapted and no code changes
            at all, so that they would be those of the base under another name.
    """
    _check_mergeable(tree)
    flat = paths.flatten(tree)
    merged = paths.flatten(base_of(tree))
    rows = []
    for site, mine in _by_site(specs).items():
        path = weight_path(site)
        if not is_ternary(path):
            merged[path] = adapted(np.asarray(flat[path], np.float32), mine, flat)
            continue
        codes, scale = (np.asarray(part) for part in ternarise(jnp.asarray(flat[path])))
        value = codes.astype(np.float32) * scale
        wanted = adapted(value, mine, flat)
        new_codes = np.clip(np.rint(wanted / scale), -1, 1).astype(np.int8)
        n_changed = int(np.count_nonzero(new_codes != codes))
        new_scale = _fitted_scale(wanted, new_codes) if n_changed else float(scale)
        if n_changed:
            merged[path] = latent(new_codes, new_scale)
        rows.append(
            CodeChange(
                site=site,
                n_weights=codes.size,
                relative=_norm(wanted - value) / _norm(value),
                n_changed=n_changed,
                scale_ratio=new_scale / float(scale),
                lost=_ratio(new_codes * np.float32(new_scale) - wanted, wanted - value),
            )
        )
    _check_changed(rows)
    return paths.unflatten(merged), rows


def adapted(
    weight: np.ndarray, specs: Sequence[AdapterSpec], flat: Mapping[str, Array]
) -> np.ndarray:
    """The (D, F) float32 weight with the adapters of its columns merged in.

    Args:
        weight: (D, F) float32, as it multiplies.
        specs: adapters of different columns of this weight.
        flat: their leaves by path.
    """
    merged = weight.copy()
    for spec in specs:
        columns = slice(spec.start, spec.start + spec.shape[1])
        a, b = (np.asarray(flat[f"{spec.path}/{n}"], np.float32) for n in ("a", "b"))
        total = weight[:, columns] + np.float32(spec.scale) * (a @ b)
        if spec.magnitude:
            norms = np.linalg.norm(total, axis=0)
            length = np.asarray(flat[f"{spec.path}/magnitude"], np.float32)
            total = total * (length / np.maximum(norms, np.finfo(np.float32).tiny))
        merged[:, columns] = total
    return merged


def weight_path(site: str) -> str:
    """Path of the weight that a site's adapters stand beside."""
    return f"{site}/embedding" if site == EMBEDDING else f"{site}/kernel"


def total_change(rows: Sequence[FloatChange]) -> FloatChange:
    """All weights of a float merge as one row, weighted by their numbers."""
    n = sum(row.n_weights for row in rows)

    def mean(name: str) -> float:
        return sum(row.n_weights * getattr(row, name) for row in rows) / max(n, 1)

    return FloatChange("all", n, mean("relative"), mean("unchanged"), mean("lost"))


def _float_change(
    site: str, before: np.ndarray, after: np.ndarray, specs: Sequence[AdapterSpec]
) -> FloatChange:
    columns = np.concatenate(
        [np.arange(s.start, s.start + s.shape[1]) for s in sorted(specs, key=_start)]
    )
    n_same = squares = 0.0
    for start in range(0, len(before), _ROWS):
        rows = slice(start, start + _ROWS)
        old, new = before[rows][:, columns], after[rows][:, columns]
        old16, new16 = old.astype(jnp.bfloat16), new.astype(jnp.bfloat16)
        n_same += np.count_nonzero(old16 == new16)
        kept = new16.astype(np.float32) - old16.astype(np.float32)
        squares += _norm(kept - (new - old)) ** 2
    delta = _norm(after - before)
    n_weights = len(before) * len(columns)
    return FloatChange(
        site=site,
        n_weights=n_weights,
        relative=delta / max(_norm(before[:, columns]), 1e-30),
        unchanged=float(n_same) / n_weights,
        lost=squares**0.5 / delta if delta else 0.0,
    )


def _start(spec: AdapterSpec) -> int:
    return spec.start


def _by_site(specs: Sequence[AdapterSpec]) -> dict[str, list[AdapterSpec]]:
    sites: dict[str, list[AdapterSpec]] = {}
    for spec in specs:
        sites.setdefault(spec.site, []).append(spec)
    return sites


def _check_mergeable(tree: Params) -> None:
    offsets = [p for p in paths.flatten(tree) if p.endswith("/state_offset")]
    if offsets:
        raise ValueError(
            f"merge: {offsets[0]}: got a state offset, which is added to the state of "
            "the scan at every token; expected changes of weights only, as no weight "
            "can stand for it; keep the run's own checkpoint (scripts/generate.py "
            "reads it)"
        )


def _check_changed(rows: Sequence[CodeChange]) -> None:
    if rows and not any(row.n_changed for row in rows):
        total = sum(row.n_weights for row in rows)
        largest = max(row.relative for row in rows)
        raise ValueError(
            f"merge into ternary weights: 0 of {total:,} codes change (the largest "
            f"‖Δ‖/‖W‖ is {largest:.2g}): the result would be the base; expected a "
            "change of at least one code; keep the adapters beside the base (the run's "
            "checkpoint, or --as=peft), or merge into float weights (--as=merged)"
        )


def _fitted_scale(wanted: np.ndarray, codes: np.ndarray) -> float:
    """The s that minimises ‖s · codes - wanted‖."""
    products = np.sum(wanted * codes, dtype=np.float64)
    return float(products / max(np.count_nonzero(codes), 1))


def _norm(x: np.ndarray) -> float:
    return float(np.sqrt(np.sum(np.square(x, dtype=np.float32), dtype=np.float64)))


def _ratio(part: np.ndarray, whole: np.ndarray) -> float:
    return _norm(part) / max(_norm(whole), 1e-30)
