"""Ternary weights: the quantiser, 2-bit packing, and storage as named arrays.

A packed byte holds four codes q in {-1, 0, 1} as q + 1, the first in the low bits
(the order of the public .bin files). Code 3 is never written and never accepted.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bitmamba.types import Array

MIN_SCALE = 1e-5


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TernaryWeight:
    """A frozen ternary weight: its value is codes * scale; it is never re-quantised.

    codes: whole numbers in {-1, 0, 1} of any dtype. scale: () float32.
    """

    codes: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        return self.codes.shape

    def value(self) -> jax.Array:
        """The weight in the dtype of the scale."""
        return self.codes.astype(self.scale.dtype) * self.scale


def freeze_ternary(w: jax.Array, dtype: jnp.dtype) -> TernaryWeight:
    """A latent weight as what BitLinear multiplies by, codes stored in dtype."""
    codes, scale = ternarise(w)
    return TernaryWeight(codes.astype(dtype), scale)


def ternarise(w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantise a weight tensor to {-1, 0, 1} times one scale.

    scale = max(mean|w|, 1e-5);  codes = clip(round(w / scale), -1, 1).

    Args:
        w: float, any shape. Latent weights.

    Returns:
        (codes: int8 of w's shape, scale: () float32); the value is codes * scale.

    Numerics: float32 (float64 for float64 input); ties round to even, as everywhere
        in the public model.
    Source: facts of the public BitMamba-2 model, "BitLinear"; Ma et al. 2024,
        arXiv:2402.17764, equations 1-3.
    """
    w = w.astype(jnp.promote_types(w.dtype, jnp.float32))
    scale = jnp.maximum(_mean(jnp.abs(w)), MIN_SCALE)
    codes = jnp.clip(jnp.round(w * (1.0 / scale)), -1, 1)
    return codes.astype(jnp.int8), scale


def latent_from_codes(codes: Array, scale: float) -> np.ndarray:
    """Float weights that ternarise back to exactly these codes, and to this scale.

    With f the share of non-zero codes the latent value is codes * scale / f: its mean
    magnitude is `scale`, and every non-zero lies at or beyond the rounding threshold.

    Args:
        codes: int8 in {-1, 0, 1}, any shape.
        scale: > 0.

    Returns:
        float32 of the shape of codes; zeros where codes are zero.
    """
    codes = np.asarray(codes)
    share = np.count_nonzero(codes) / max(codes.size, 1)
    magnitude = np.float32(float(scale) / share) if share else np.float32(0)
    return codes.astype(np.float32) * magnitude


def pack_ternary(codes: Array) -> np.ndarray:
    """Pack codes along the last axis, four to a byte.

    Args:
        codes: (..., n) integers in {-1, 0, 1}.

    Returns:
        (..., ceil(n / 4)) uint8; the unused places of the last byte hold code 0.

    Raises:
        ValueError: a value outside {-1, 0, 1}.
    """
    codes = np.asarray(codes)
    if codes.size and (codes.min() < -1 or codes.max() > 1):
        raise ValueError(
            f"pack_ternary: codes: got values in [{codes.min()}, {codes.max()}]; "
            "expected -1, 0 or 1; quantise with ternarise first"
        )
    spare = -codes.shape[-1] % 4
    width = [(0, 0)] * (codes.ndim - 1) + [(0, spare)]
    raised = (np.pad(codes, width) + 1).astype(np.uint8)
    four = raised.reshape(*raised.shape[:-1], -1, 4)
    return (four << np.array([0, 2, 4, 6], np.uint8)).sum(-1, dtype=np.uint8)


def unpack_ternary(packed: Array, n: int) -> np.ndarray:
    """The inverse of `pack_ternary`.

    Args:
        packed: (..., ceil(n / 4)) uint8.
        n: length of the last axis before packing.

    Returns:
        (..., n) int8 in {-1, 0, 1}.

    Raises:
        ValueError: the length does not fit n, or a code is 3.
    """
    packed = np.asarray(packed, np.uint8)
    if packed.shape[-1] != -(-n // 4):
        raise ValueError(
            f"unpack_ternary: packed: got {packed.shape[-1]} bytes in the last axis; "
            f"expected {-(-n // 4)} for {n} codes"
        )
    four = (packed[..., None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
    raised = four.reshape(*packed.shape[:-1], -1)[..., :n]
    if (raised == 3).any():
        raise ValueError(
            "unpack_ternary: packed: got the code 3; expected 0, 1 or 2; "
            "the data are damaged or in another format"
        )
    return raised.astype(np.int8) - np.int8(1)


def pack_tree(
    flat: Mapping[str, Array],
    *,
    is_ternary: Callable[[str], bool],
    is_half: Callable[[str], bool] = lambda path: False,
) -> dict[str, np.ndarray]:
    """Parameters as named arrays for a file, ternary kernels at 2 bits.

    Args:
        flat: {path: array}, see `bitmamba.paths.flatten`.
        is_ternary: paths stored as codes: `PATH.codes` (..., ceil(n / 4)) uint8,
            `PATH.scale` float32 and `PATH.columns` int32 (n). Their latent values are
            not kept; `unpack_tree` gives others with the same codes and scale.
        is_half: paths stored in float16 (values beyond 65504 are refused).

    Returns:
        {name: array}; `unpack_tree` reads it back.

    Raises:
        ValueError: a value that float16 cannot hold.
    """
    named = {}
    for path, value in flat.items():
        if is_ternary(path):
            codes, scale = ternarise(jnp.asarray(value))
            named[f"{path}.codes"] = pack_ternary(codes)
            named[f"{path}.scale"] = np.asarray(scale, np.float32)
            named[f"{path}.columns"] = np.asarray(value.shape[-1], np.int32)
        else:
            named[path] = _half(path, value) if is_half(path) else np.asarray(value)
    return named


def unpack_tree(named: Mapping[str, Array]) -> dict[str, np.ndarray]:
    """The inverse of `pack_tree`: {path: array}, float16 back to float32.

    Raises:
        ValueError: one line naming the array that `pack_tree` cannot have made.
    """
    flat: dict[str, np.ndarray] = {}
    for name, value in named.items():
        path, _, part = name.rpartition(".")
        value = np.asarray(value)
        if part == "codes":
            flat[path] = _unpack_codes(path, value, named)
        elif part not in ("scale", "columns"):
            flat[name] = (
                value.astype(np.float32) if value.dtype == np.float16 else value
            )
        elif f"{path}.codes" not in named:
            raise ValueError(f"unpack_tree: {name}: got it without {path}.codes")
    for path in flat:
        parts = path.split("/")
        above = ["/".join(parts[:n]) for n in range(1, len(parts))]
        if not all(parts) or any(p in flat for p in above):
            raise ValueError(
                f"unpack_tree: {path!r}: expected a path that is no part of another"
            )
    return dict(sorted(flat.items()))


def _unpack_codes(path: str, packed: np.ndarray, named: Mapping[str, Array]) -> Any:
    """The latent value of one weight, from its three arrays."""
    columns, scale = (
        np.asarray(named.get(f"{path}.{part}", np.zeros(0, np.uint8)))
        for part in ("columns", "scale")
    )
    fits = packed.dtype == np.uint8 and packed.ndim >= 1
    fits &= columns.shape == scale.shape == ()
    if not fits or columns.dtype != np.int32 or scale.dtype != np.float32:
        raise ValueError(
            f"unpack_tree: {path}: got codes {packed.dtype}{list(packed.shape)}, "
            f"columns {columns.dtype}{list(columns.shape)} and scale {scale.dtype}"
            f"{list(scale.shape)}; expected uint8 codes, one int32 and one float32"
        )
    if not 0 < scale < np.inf or columns < 1:
        raise ValueError(
            f"unpack_tree: {path}: got scale {scale:g} and {columns} columns; "
            "expected a finite scale > 0 and at least one column"
        )
    codes = unpack_ternary(packed, int(columns))
    return latent_from_codes(codes, float(scale))


def _mean(x: jax.Array) -> jax.Array:
    """Mean in two stages: long float32 sums in one stage lose digits."""
    return x.mean() if x.ndim < 2 else x.mean(axis=0).mean()


def _half(path: str, value: Array) -> np.ndarray:
    value = np.asarray(value)
    largest = float(np.abs(value).max(initial=0.0))
    if not largest <= 65504:
        raise ValueError(
            f"pack_tree: {path}: got a magnitude of {largest:g}; expected at most "
            "65504 for float16; store this path in float32"
        )
    return value.astype(np.float16)
