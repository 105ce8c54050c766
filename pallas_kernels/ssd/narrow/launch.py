"""The kernels in their order, on one device's part of the batch, and XLA's share.

XLA makes what there is one of for each head and token (decays, dt·B), and turns the
kernels' sums over channels into gradients.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.ssd.narrow import pieces
from pallas_kernels.ssd.narrow import states as kernels
from pallas_kernels.ssd.narrow.backward import gradients
from pallas_kernels.ssd.narrow.forward import scan
from pallas_kernels.ssd.narrow.tile import Sizes


class Vectors(NamedTuple):
    """Float32. decay, dtB: (B·H·L/n, n). C: (B·G·L/n, n)."""

    decay: jax.Array
    dtB: jax.Array
    C: jax.Array


def forward(x, dt, A, B, C, D, run, initial_state, *, stretch, keep_states):
    """(y, final state, states (B, tiles, H·P) or None) of whole tiles."""
    s = _sizes(x, B, stretch)
    vectors, x_t = _vectors(dt, A, B, C, run, s), _tokens(x, s)
    start = _entering(x_t, vectors, initial_state, s)
    y, ends, states = scan(x_t, *vectors, D.ravel(), start, s, keep_states=keep_states)
    if keep_states:
        states = states.reshape(s.b, s.tiles, -1)
    final = pieces.by_piece(ends, s)[:, -1]
    return y.reshape(x.shape), final, states


def backward(x, dt, A, B, C, D, run, initial_state, states, dy, dfinal, *, stretch):
    """Gradients of x, dt, A, B, C, D and the initial state.

    Those of A and D by row of the batch, (B, ...). states: from `forward`, or None to
    compute them again.
    """
    s = _sizes(x, B, stretch)
    vectors = _vectors(dt, A, B, C, run, s)
    x_t, dy_t = _tokens(x, s), _tokens(dy, s)
    if states is None:
        start = _entering(x_t, vectors, initial_state, s)
        _, states = kernels.states(x_t, vectors.decay, vectors.dtB, start, s)
    states = states.reshape(s.b * s.tiles, -1)
    dend = _arriving(dy_t, vectors, dfinal, s)
    dx, dstart, dD, *sums = gradients(x_t, dy_t, *vectors, D.ravel(), states, dend, s)
    added, read, crossing = (_by_head(t, s) for t in sums)
    dt = dt.swapaxes(1, 2)
    ddt = _per_head(B, s) * added + A[:, None] * crossing
    dB, dC = _sum_heads(dt * added, B, s), _sum_heads(read, C, s)
    dA, dD = (dt * crossing).sum(2), dD.reshape(s.b, -1, s.h, s.p).sum(1)
    dstart = pieces.by_piece(dstart, s)[:, 0]
    return dx.reshape(x.shape), ddt.swapaxes(1, 2), dA, dB, dC, dD, dstart


def _entering(x_t, vectors, initial_state, s):
    """The state entering each piece, (B·pieces, H·P)."""
    if s.pieces == 1:
        return initial_state.reshape(s.b, -1)
    nothing = jnp.zeros((s.b * s.pieces, s.channels), jnp.float32)
    ends, _ = kernels.states(x_t, vectors.decay, vectors.dtB, nothing, s)
    return pieces.in_series(ends, vectors.decay, initial_state, s)


def _arriving(dy_t, vectors, dfinal, s):
    """The gradient of the state leaving each piece, (B·pieces, H·P)."""
    if s.pieces == 1:
        return dfinal.reshape(s.b, -1)
    sent = kernels.state_gradients(dy_t, vectors.decay, vectors.C, s)
    return pieces.in_series(sent, vectors.decay, dfinal, s, reverse=True)


def _sizes(x, B, stretch):
    batch, length, heads, width = x.shape
    whole = Sizes(batch, length, heads, width, B.shape[2], stretch)
    return whole._replace(pieces=pieces.count(whole))


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


def _by_head(sums, s):
    """(B·blocks·L/n, n), by block of channels -> (B, H, L)."""
    return sums.reshape(s.b, s.h, -1, s.length).sum(2)


def _sum_heads(values, like, s):
    """(B, H, L) -> the gradient of B or C, (B, L, G, 1)."""
    by_group = values.reshape(s.b, s.g, -1, s.length).sum(2)
    return by_group.swapaxes(1, 2)[..., None].astype(like.dtype)
