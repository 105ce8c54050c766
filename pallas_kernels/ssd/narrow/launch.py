"""The kernels in their order, on one device's part of the batch, and XLA's share.

XLA makes what there is one of for each head and token (decays, dt·B), and turns the
kernels' sums over channels into gradients.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.ssd.narrow import backward as kernels_backward
from pallas_kernels.ssd.narrow import forward as kernels_forward
from pallas_kernels.ssd.narrow.tile import Sizes


class Vectors(NamedTuple):
    """Float32. decay, dtB: (B·H·L/n, n). C: (B·G·L/n, n)."""

    decay: jax.Array
    dtB: jax.Array
    C: jax.Array


def forward(x, dt, A, B, C, D, run, initial_state, *, stretch, keep_states):
    """(y, final state, states (B, tiles, H·P) or None) of whole tiles."""
    s = _sizes(x, B, stretch)
    vectors = _vectors(dt, A, B, C, run, s)
    y, states, final = kernels_forward.scan(
        _tokens(x, s),
        *vectors,
        D.ravel(),
        initial_state.reshape(s.b, -1),
        s,
        keep_states=keep_states,
    )
    return y.reshape(x.shape), final.reshape(initial_state.shape), _by_row(states, s)


def backward(x, dt, A, B, C, D, run, initial_state, states, dy, dfinal, *, stretch):
    """Gradients of x, dt, A, B, C, D and the initial state.

    Those of A and D by row of the batch, (B, ...). states: from `forward`, or None to
    compute them again.
    """
    s = _sizes(x, B, stretch)
    vectors, x_t = _vectors(dt, A, B, C, run, s), _tokens(x, s)
    if states is None:
        start = initial_state.reshape(s.b, -1)
        decay, dtB, _ = vectors
        _, states, _ = kernels_forward.scan(
            x_t, decay, dtB, None, None, start, s, keep_states=True
        )
    dx, dstart, dD, *sums = kernels_backward.gradients(
        x_t,
        _tokens(dy, s),
        *vectors,
        D.ravel(),
        states.reshape(s.b * s.tiles, -1),
        dfinal.reshape(s.b, -1),
        s,
    )
    added, read, crossing = (_by_head(t, s) for t in sums)
    dt = dt.swapaxes(1, 2)
    ddt = _per_head(B, s) * added + A[:, None] * crossing
    dB, dC = _sum_heads(dt * added, B, s), _sum_heads(read, C, s)
    dA, dD = (dt * crossing).sum(2), dD.reshape(s.b, -1, s.h, s.p).sum(1)
    dstart = dstart.reshape(initial_state.shape)
    return dx.reshape(x.shape), ddt.swapaxes(1, 2), dA, dB, dC, dD, dstart


def _sizes(x, B, stretch):
    batch, length, heads, width = x.shape
    return Sizes(batch, length, heads, width, B.shape[2], stretch)


def _vectors(dt, A, B, C, run, s) -> Vectors:
    decay = jnp.exp(jnp.minimum(dt * A, 0))
    if run is not None:
        starts = jnp.pad(run[:, 1:] != run[:, :-1], ((0, 0), (1, 0)))
        decay = jnp.where(starts[:, :, None], 0, decay)
    rows = decay.swapaxes(1, 2), dt.swapaxes(1, 2) * _per_head(B, s), _wide(C)
    return Vectors(*(t.reshape(-1, s.stretch) for t in rows))


def _wide(maps):
    """B or C (B, L, G, 1) -> (B, G, L) float32."""
    return maps[..., 0].astype(jnp.float32).swapaxes(1, 2)


def _per_head(maps, s):
    """B or C (B, L, G, 1) -> (B, H, L) float32."""
    return jnp.repeat(_wide(maps), s.h // s.g, axis=1)


def _tokens(t, s):
    """(B, L, H, P) -> (B·L/n, n, H·P)."""
    return t.reshape(-1, s.stretch, s.h * s.p)


def _by_row(states, s):
    return None if states is None else states.reshape(s.b, s.tiles, -1)


def _by_head(sums, s):
    """(B·blocks·L/n, n), by block of channels -> (B, H, L)."""
    return sums.reshape(s.b, s.h, -1, s.length).sum(2)


def _sum_heads(values, like, s):
    """(B, H, L) -> the gradient of B or C, (B, L, G, 1)."""
    by_group = values.reshape(s.b, s.g, -1, s.length).sum(2)
    return by_group.swapaxes(1, 2)[..., None].astype(like.dtype)
