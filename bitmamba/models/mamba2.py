"""The standard Mamba-2 mixer: grouped B and C, d_state > 1, gated RMSNorm."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from bitmamba.config import ModelConfig
from bitmamba.models import adapters, init, recurrence
from bitmamba.models.cache import SSMState
from bitmamba.models.layers import Linear, RMSNorm, gated
from bitmamba.models.recompute import recompute


class Mamba2(nn.Module):
    """in_proj [z, x, B, C, dt], conv1d on x, B, C, the scan, gate, norm, out_proj.

    Source: Dao & Gu 2024, arXiv:2405.21060; state-spaces/mamba, modules/mamba2.py,
    with norm_before_gate=False. Differs: with norms inside the linear layers
    (`norm_placement="linear"`) out_proj's norm takes the gated norm's place.
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
        cfg, (d_inner, n_heads, n_maps) = self.cfg.mamba2, sizes(self.cfg)
        width = 2 * d_inner + 2 * n_maps + n_heads
        projected = Linear(width, self.cfg, kernels=self.kernels, name="in_proj")(x)
        z, mixed, dt = jnp.split(
            projected, [d_inner, 2 * d_inner + 2 * n_maps], axis=-1
        )
        A_log = self.param("A_log", init.log_decay, (n_heads,), jnp.float32)
        D = self.param("D", nn.initializers.ones, (n_heads,), jnp.float32)
        make_bias = init.dt_bias(cfg.dt_min, cfg.dt_max, cfg.dt_init_floor)
        dt_bias = self.param("dt_bias", make_bias, (n_heads,), jnp.float32)
        dt = recurrence.step_size(dt, dt_bias, cfg.dt_limit)
        conv_state, ssm_state = (None, None) if state is None else state
        if state is not None:
            mixed, dt = recurrence.hide_padding(mixed, dt, segment_ids)
            segment_ids = None
        conv = recurrence.CausalConv(cfg.d_conv, self.kernels, name="conv1d")
        mixed, conv_state = conv(mixed, segment_ids=segment_ids, state=conv_state)
        inner, B, C = jnp.split(mixed, [d_inner, d_inner + n_maps], axis=-1)
        by_group = (*x.shape[:2], cfg.n_groups, cfg.d_state)
        y, ssm_state = recurrence.scan(
            inner.reshape(*x.shape[:2], n_heads, cfg.headdim),
            dt,
            A_log,
            B.reshape(by_group),
            C.reshape(by_group),
            D=D,
            segment_ids=segment_ids,
            state=ssm_state,
            chunk_size=cfg.chunk_size,
            kernels=self.kernels,
            offset=adapters.state_offset(self),
        )
        y = y.reshape(z.shape)
        if self.cfg.norm_placement == "block":
            y = RMSNorm(self.cfg.norm_eps, cfg.n_groups, name="norm")(y, z)
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
        mixer, (d_inner, n_heads, n_maps) = cfg.mamba2, sizes(cfg)
        shape = (n_heads, mixer.headdim, mixer.d_state)
        channels = d_inner + 2 * n_maps
        return recurrence.empty_state(batch, mixer.d_conv, channels, shape, dtype)


def sizes(cfg: ModelConfig) -> tuple[int, int, int]:
    """(d_inner, n_heads, n_groups · d_state)."""
    mixer = cfg.mamba2
    d_inner = mixer.expand * cfg.d_model
    return d_inner, d_inner // mixer.headdim, mixer.n_groups * mixer.d_state
