"""One layer: norm, mixer, residual."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from bitmamba.config import ModelConfig
from bitmamba.models.layers import RMSNorm


class Block(nn.Module):
    """x + mixer(norm(x)); the residual stream stays float32."""

    cfg: ModelConfig
    mixer: type[nn.Module]
    kernels: str = "auto"

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        segment_ids: jax.Array | None,
        positions: jax.Array | None,
        state: Any,
    ) -> tuple[jax.Array, Any]:
        """x: (B, L, D) float32 -> ((B, L, D) float32, new state or None)."""
        h = x
        if self.cfg.norm_placement == "block":
            h = RMSNorm(self.cfg.norm_eps, name="norm")(x)
        mixer = self.mixer(self.cfg, self.kernels, name="mixer")
        y, state = mixer(h, segment_ids=segment_ids, positions=positions, state=state)
        return x + y.astype(jnp.promote_types(y.dtype, jnp.float32)), state
