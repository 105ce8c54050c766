"""A latent weight that trains, with its ternary codes computed beforehand."""

import dataclasses

import jax
import jax.numpy as jnp

from bitmamba.quant.ternary import TernaryWeight, ternarise

_SHIFTS = (0, 2, 4, 6)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Codes:
    """The codes and the scale of a latent weight, at a byte or at 2 bits a code.

    stored: (D, F) int8; or, packed, (ceil(D / 4), F) uint8: each byte holds the codes,
        plus 1, of rows i, i + n, i + 2n, i + 3n, n = ceil(D / 4), the first in the low
        bits. So packing and unpacking are operations on whole rows.
    scale: () float32.
    """

    stored: jax.Array
    scale: jax.Array

    def weight(self, n_rows: int) -> TernaryWeight:
        """Codes (n_rows, F) in int8, and their scale."""
        codes = self.stored
        if codes.dtype == jnp.uint8:
            rows = jnp.concatenate([(codes >> shift) & 3 for shift in _SHIFTS])
            codes = rows[:n_rows].astype(jnp.int8) - 1
        return TernaryWeight(codes, self.scale)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CodedLatent:
    """A latent weight (D, F) beside its codes; a product reads the codes alone.

    The gradient of whatever multiplies by it is the latent's, straight through.
    """

    latent: jax.Array
    codes: Codes

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        return self.latent.shape

    def weight(self) -> TernaryWeight:
        """Codes in int8, and their scale."""
        return self.codes.weight(self.latent.shape[0])


def make_codes(latent: jax.Array, *, packed: bool) -> Codes:
    """The codes of a latent weight (D, F), by `ternarise`.

    Args:
        latent: float.
        packed: at 2 bits a code.
    """
    codes, scale = ternarise(latent)
    if not packed:
        return Codes(codes, scale)
    padded = jnp.pad(codes + 1, ((0, -len(codes) % len(_SHIFTS)), (0, 0)))
    parts = jnp.split(padded.astype(jnp.uint8), len(_SHIFTS))
    shifted = [part << shift for part, shift in zip(parts, _SHIFTS, strict=True)]
    return Codes(shifted[0] | shifted[1] | shifted[2] | shifted[3], scale)
