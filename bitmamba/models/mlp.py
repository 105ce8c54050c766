"""The gated MLP as a layer of its own: it mixes channels, not tokens."""

import functools
from typing import Any

import jax
from flax import linen as nn

from bitmamba.config import ModelConfig
from bitmamba.models.layers import Linear, gated
from bitmamba.models.recompute import recompute


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x)), width d_ff (SwiGLU; Shazeer 2020, 2002.05202)."""

    cfg: ModelConfig
    kernels: str = "auto"

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        state: Any = None,
    ) -> tuple[jax.Array, None]:
        """x: (B, L, D) -> ((B, L, D), None); there is nothing to remember."""
        del segment_ids, positions, state
        width, depth = self.cfg.mlp.d_ff, len(self.cfg.layers)
        linear = functools.partial(Linear, cfg=self.cfg, kernels=self.kernels)
        gate = linear(width, name="gate_proj")(x)
        up = linear(width, name="up_proj")(x)
        down = linear(self.cfg.d_model, init_scale=depth**-0.5, name="down_proj")
        return down(recompute(gated)(up, gate)), None

    @staticmethod
    def init_state(cfg: ModelConfig, batch: int, max_len: int, dtype: Any) -> None:
        """No state."""
