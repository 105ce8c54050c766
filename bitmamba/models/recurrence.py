"""What the two state-space mixers share: convolution and scan, whole or stepwise."""

import jax
import jax.numpy as jnp
from flax import linen as nn

import pallas_kernels
from bitmamba.models import init
from bitmamba.models.cache import SSMState
from bitmamba.models.recompute import recompute


class CausalConv(nn.Module):
    """Depthwise causal convolution with bias and SiLU; kernel (K, C)."""

    n_taps: int
    kernels: str

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None,
        state: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """x: (B, L, C), state: (B, K-1, C) or None -> (y, new state)."""
        make = init.conv_tap(self.n_taps)
        kernel = self.param("kernel", make, (self.n_taps, x.shape[-1]))
        bias = self.param("bias", make, (x.shape[-1],))
        if state is not None and x.shape[1] == 1:
            y, state = pallas_kernels.causal_conv1d_step(
                x[:, 0], kernel, bias, state=state, activation="silu"
            )
            return y[:, None], state
        return pallas_kernels.causal_conv1d(
            x,
            kernel,
            bias,
            segment_ids=segment_ids,
            initial_state=state,
            activation="silu",
            implementation=self.kernels,
        )


def scan(
    x: jax.Array,
    dt: jax.Array,
    A_log: jax.Array,
    B: jax.Array,
    C: jax.Array,
    *,
    D: jax.Array,
    segment_ids: jax.Array | None,
    state: jax.Array | None,
    chunk_size: int,
    kernels: str,
    offset: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The state-space recurrence, by chunks, or by one step when decoding one token.

    Args:
        x: (B, L, H, P) float.
        dt: (B, L, H) float32, >= 0. Step size; 0 leaves the state as it is.
        A_log: (H,) float32. Decay rate exp(A_log).
        B, C: (B, L, G, N) float.
        D: (H,) or (H, P) float32.
        segment_ids: (B, L) int32 or None.
        state: (B, H, P, N) float32, or None.
        chunk_size: tokens a chunk.
        kernels: implementation, see `pallas_kernels.ssd`.
        offset: (H, P, N) float32 or None. Added to the state wherever it is read, and
            not carried on (state-offset tuning; arXiv:2503.03499, equation 7).

    Returns:
        (y: (B, L, H, P) in x.dtype, state: (B, H, P, N) float32).
    """
    A = -jnp.exp(A_log)
    if state is not None and x.shape[1] == 1:
        now = (t[:, 0] for t in (x, dt))
        y, state = pallas_kernels.ssd_step(*now, A, B[:, 0], C[:, 0], D=D, state=state)
        y = y[:, None]
    else:
        y, state = pallas_kernels.ssd(
            x,
            dt,
            A,
            B,
            C,
            D=D,
            segment_ids=segment_ids,
            chunk_size=chunk_size,
            initial_state=state,
            implementation=kernels,
        )
    return y if offset is None else y + _read(offset, C).astype(y.dtype), state


def _read(offset: jax.Array, C: jax.Array) -> jax.Array:
    """What C (B, L, G, N) reads from a constant state (H, P, N): (B, L, H, P)."""
    n_groups = C.shape[2]
    by_group = offset.reshape(n_groups, -1, *offset.shape[1:]).astype(C.dtype)
    y = jnp.einsum("blgn,grpn->blgrp", C, by_group)
    return y.reshape(*C.shape[:2], *offset.shape[:2])


def step_size(
    dt: jax.Array, dt_bias: jax.Array, limit: tuple[float, float] | None = None
) -> jax.Array:
    """softplus(dt + dt_bias), clamped to `limit`; float32 whatever dt is.

    Saves dt alone, and not the whole projection that it is a slice of.
    """

    def size(dt, dt_bias):
        dt = jax.nn.softplus(dt.astype(dt_bias.dtype) + dt_bias)
        if limit is None or limit == (0.0, float("inf")):
            return dt
        return jnp.clip(dt, *limit)

    return recompute(size)(dt, dt_bias)


def hide_padding(
    x: jax.Array, dt: jax.Array, segment_ids: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Zero the inputs and steps of padding: neither window nor state remembers it.

    Args:
        x: (B, L, C), what the convolution will read.
        dt: (B, L, H), step sizes.
        segment_ids: (B, L); 0 is padding. None hides nothing.

    Returns:
        (x, dt), zero where padded.
    """
    if segment_ids is None:
        return x, dt
    real = (segment_ids != 0)[..., None]
    return jnp.where(real, x, 0), jnp.where(real, dt, 0)


def empty_state(batch: int, taps: int, channels: int, shape: tuple, dtype) -> SSMState:
    """Zeros: conv (B, K-1, C) in dtype, ssm (B, *shape) float32."""
    conv = jnp.zeros((batch, taps - 1, channels), dtype)
    return SSMState(conv, jnp.zeros((batch, *shape), jnp.float32))
