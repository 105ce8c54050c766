"""The kernels of the scan in their order, on one device's part of the batch."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.ssd import tiles
from pallas_kernels.ssd.decay_vectors import DT, decay_vectors, document_bounds
from pallas_kernels.ssd.forward import chunk_outputs
from pallas_kernels.ssd.input_gradients import input_gradients
from pallas_kernels.ssd.layout import Sizes, heads_per_block
from pallas_kernels.ssd.map_gradient import map_gradient
from pallas_kernels.ssd.pair_gradients import pair_gradients
from pallas_kernels.ssd.state_pass import state_gradients, state_pass


def forward(x, dt, A, B, C, D, run, initial_state, *, size):
    """(y, final state, states (parts, B, ...) entering the chunks) of whole chunks."""
    s = make_sizes(x, B, C, size)
    vectors, through = decay_vectors(dt, A, run, size)
    x_t, B_t, C_t = (operand(t, s.parts) for t in (x, B, C))
    states, final = state_pass(x_t, B_t, vectors, through, rows(initial_state), s)
    starts, _, order = bounds(run, s)
    y = chunk_outputs(
        x_t, B_t, C_t, vectors, states, D.ravel(), starts, order, s, x.dtype
    )
    states = states.reshape(s.parts, s.b, -1, s.n)
    return y.reshape(x.shape), final.reshape(initial_state.shape), states


def backward(x, dt, A, B, C, D, run, initial_state, states, dy, dfinal, *, size):
    """Gradients of x, dt, A, B, C, D and the initial state.

    Those of A and D by row of the batch, (B, ...). states: from `forward`, or None to
    compute them again.
    """
    s = make_sizes(x, B, C, size)
    vectors, through = decay_vectors(dt, A, run, size)
    x_t, dy_t, B_t, C_t = (operand(t, s.parts) for t in (x, dy, B, C))
    if states is None:
        states, _ = state_pass(x_t, B_t, vectors, through, rows(initial_state), s)
    states = rows(states)
    starts, ends, order = bounds(run, s)
    dstates, dstart, passed = state_gradients(
        dy_t, C_t, vectors, through, rows(dfinal), states, s
    )
    dscores, crossing = pair_gradients(x_t, dy_t, B_t, C_t, vectors, starts, order, s)
    dx, direct, dD = input_gradients(
        x_t, dy_t, B_t, C_t, vectors, dstates, D.ravel(), ends, order, s, x.dtype
    )
    dC, read = map_gradient(dy_t, C_t, B_t, vectors, states, dscores, s, of="C")
    dB, added = map_gradient(x_t, B_t, C_t, vectors, dstates, dscores, s, of="B")
    da = log_decay_gradient(crossing, read, added, passed, s)
    ddt, dA = step_gradients(direct, da, vectors, A, s)
    dD = dD.reshape(s.b, s.c, *D.shape).sum(1)
    dB, dC = sum_blocks(dB, B, s), sum_blocks(dC, C, s)
    return dx.reshape(x.shape), ddt, dA, dB, dC, dD, dstart.reshape(initial_state.shape)


def log_decay_gradient(crossing, read, added, passed, s):
    """dL/d(dt_k·A), (B, H, C, Q): everything that crosses token k, nothing cancels."""
    by_chunk = (s.b, s.h, s.c, s.q)
    read, added = read.reshape(by_chunk), added.reshape(by_chunk)
    after = lax.cumsum(read, axis=3, reverse=True)
    before = lax.cumsum(added, axis=3)
    before = jnp.pad(before[..., :-1], ((0, 0), (0, 0), (0, 0), (1, 0)))
    passed = passed.reshape(-1, *by_chunk[:3], s.p).sum((0, 4))
    return crossing.reshape(by_chunk) + after + before + passed[..., None]


def step_gradients(direct, da, vectors, A, s):
    """(ddt (B, L, H), dA (B, H))."""
    by_chunk = (s.b, s.h, s.c, s.q)
    ddt = direct.reshape(by_chunk) + A[:, None, None] * da
    dt = vectors.reshape(*by_chunk[:3], -1, s.q)[:, :, :, DT]
    dA = (dt * da).sum((2, 3))
    return ddt.reshape(s.b, s.h, -1).swapaxes(1, 2), dA


def sum_blocks(gradient, like, s):
    """(K·B·L, N) by block of heads -> (B, L, G, N)."""
    blocks = s.heads_per_group // heads_per_block(s)
    by_group = gradient.reshape(s.g, blocks, s.b, -1, s.n).sum(1)
    return jnp.moveaxis(by_group, 0, 2).astype(like.dtype)


def bounds(run, s):
    """(document starts, document ends, order of the tokens) in the chunk."""
    if run is None:
        run = jnp.zeros((s.b, s.c * s.q), jnp.int32)
    return *document_bounds(run, s.q), jnp.arange(s.q, dtype=jnp.int32)


def count_parts(*operands):
    """bfloat16 parts that hold every operand: one, or two for float32."""
    return 1 if all(t.dtype == tiles.HALF for t in operands) else 2


def make_sizes(x, B, C, size) -> Sizes:
    batch, length, heads, width = x.shape
    groups_n, parts = B.shape[2:], count_parts(x, B, C)
    return Sizes(batch, length // size, size, heads, width, *groups_n, parts)


def rows(state):
    return state.reshape(-1, state.shape[-1])


def operand(t, parts):
    """(B, L, ...) -> (parts·B·L, ...) bfloat16."""
    flat = t.reshape(t.shape[0] * t.shape[1], -1)
    if parts == 1:
        return flat.astype(tiles.HALF)
    return jnp.concatenate(tiles.split(flat.astype(jnp.float32), parts))
