"""The public BitMamba-2 mixer: one scalar state a channel, B and C per head."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from bitmamba.config import ModelConfig
from bitmamba.models import adapters, init, recurrence
from bitmamba.models.cache import SSMState
from bitmamba.models.layers import Linear, RMSNorm, gated
from bitmamba.models.recompute import recompute


class BitMamba2(nn.Module):
    """in_proj [z, x, B, C, dt], conv1d on x alone, the scan with N = 1, gate, out_proj.

    Per head: state_t = exp(A·dt_t)·state_{t-1} + x_t·(B_t·dt_t);  y_t = C_t·state_t +
    D·x_t with D per channel. B and C are neither convolved nor activated.

    Source: the public BitMamba-2 checkpoints (Salazar 2026, MIT), which have
    `norm_placement="linear"`. Differs: with norms in the block, the gated norm of
    Mamba-2 stands before out_proj.
    """

    cfg: ModelConfig
    kernels: str = "auto"

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        state: SSMState | None = None,
    ) -> tuple[jax.Array, SSMState | None]:
        """Mix tokens of the same document along the sequence.

        Args:
            x: (B, L, D) float.
            segment_ids: (B, L) int32 or None. Without a state, documents are
                isolated; with one, a row is one document and segment 0 is padding.
            positions: not used; the recurrence orders the tokens.
            state: after earlier tokens, or None.

        Returns:
            ((B, L, D), the state after these tokens, or None without one).
        """
        del positions
        cfg, (d_inner, n_heads) = self.cfg.bitmamba2, sizes(self.cfg)
        width = 2 * d_inner + 3 * n_heads
        projected = Linear(width, self.cfg, kernels=self.kernels, name="in_proj")(x)
        edges = [d_inner, 2 * d_inner, 2 * d_inner + n_heads, 2 * d_inner + 2 * n_heads]
        z, inner, B, C, dt = jnp.split(projected, edges, axis=-1)
        A_log = self.param("A_log", init.log_decay, (n_heads,), jnp.float32)
        D = self.param("D", nn.initializers.ones, (d_inner,), jnp.float32)
        make_bias = init.dt_bias(cfg.dt_min, cfg.dt_max, cfg.dt_init_floor)
        dt_bias = self.param("dt_bias", make_bias, (n_heads,), jnp.float32)
        dt = recurrence.step_size(dt, dt_bias)
        conv_state, ssm_state = (None, None) if state is None else state
        if state is not None:
            inner, dt = recurrence.hide_padding(inner, dt, segment_ids)
            segment_ids = None
        conv = recurrence.CausalConv(cfg.d_conv, self.kernels, name="conv1d")
        inner, conv_state = conv(inner, segment_ids=segment_ids, state=conv_state)
        y, ssm_state = recurrence.scan(
            inner.reshape(*x.shape[:2], n_heads, -1),
            dt,
            A_log,
            B[..., None],
            C[..., None],
            D=D.reshape(n_heads, -1),
            segment_ids=segment_ids,
            state=ssm_state,
            chunk_size=cfg.chunk_size,
            kernels=self.kernels,
            offset=adapters.state_offset(self),
        )
        y = y.reshape(z.shape)
        if self.cfg.norm_placement == "block":
            y = RMSNorm(self.cfg.norm_eps, name="norm")(y, z)
        else:
            y = recompute(gated)(y, z)
        scale = len(self.cfg.layers) ** -0.5
        width = self.cfg.d_model
        out = Linear(width, self.cfg, scale, self.kernels, name="out_proj")(y)
        return out, None if state is None else SSMState(conv_state, ssm_state)

    @staticmethod
    def init_state(cfg: ModelConfig, batch: int, max_len: int, dtype: Any) -> SSMState:
        """Zeros; the length does not matter."""
        del max_len
        mixer, (d_inner, n_heads) = cfg.bitmamba2, sizes(cfg)
        shape = (n_heads, d_inner // n_heads, 1)
        return recurrence.empty_state(batch, mixer.d_conv, d_inner, shape, dtype)


def sizes(cfg: ModelConfig) -> tuple[int, int]:
    """(d_inner, n_heads)."""
    return cfg.bitmamba2.expand * cfg.d_model, cfg.bitmamba2.n_heads
