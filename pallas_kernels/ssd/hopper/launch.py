"""The Hopper kernels of the scan in their order, on one device's part of the batch."""

import jax.numpy as jnp

from pallas_kernels.ssd import tiles
from pallas_kernels.ssd.decay_vectors import decay_vectors
from pallas_kernels.ssd.hopper.gradient_of_c import gradient_of_c
from pallas_kernels.ssd.hopper.gradients import chunk_gradients
from pallas_kernels.ssd.hopper.head_gradients import (
    ADDED,
    CROSSING,
    CROSSING_ABOVE,
    DIRECT,
    SKIP,
    TERMS,
)
from pallas_kernels.ssd.hopper.outputs import chunk_outputs
from pallas_kernels.ssd.hopper.state_pass import state_gradients, state_pass
from pallas_kernels.ssd.launch import (
    bounds,
    log_decay_gradient,
    make_sizes,
    operand,
    rows,
    step_gradients,
    sum_blocks,
)
from pallas_kernels.wgmma import ROWS


def forward(x, dt, A, B, C, D, run, initial_state, *, size):
    """(y, final state, states (1, B, ...) entering the chunks) of whole chunks."""
    s = make_sizes(x, B, C, size)
    vectors, through = decay_vectors(dt, A, run, size)
    x_t, B_t, C_t = (operand(t, 1) for t in (x, B, C))
    states, final = state_pass(x_t, B_t, vectors, through, rows(initial_state), s)
    starts, _, order = bounds(run, s)
    y = chunk_outputs(x_t, B_t, C_t, vectors, states, D.ravel(), starts, order, s)
    states = states.reshape(1, s.b, -1, s.n)
    return y.reshape(x.shape), final.reshape(initial_state.shape), states


def backward(x, dt, A, B, C, D, run, initial_state, states, dy, dfinal, *, size):
    """Gradients of x, dt, A, B, C, D and the initial state.

    Those of A and D by row of the batch, (B, ...). states: from `forward`, or None to
    compute them again.
    """
    s = make_sizes(x, B, C, size)
    vectors, through = decay_vectors(dt, A, run, size)
    x_t, dy_t, B_t, C_t = (operand(t, 1) for t in (x, dy, B, C))
    if states is None:
        states, _ = state_pass(x_t, B_t, vectors, through, rows(initial_state), s)
    states = rows(states)
    _, ends, order = bounds(run, s)
    dstates, dstart, passed = state_gradients(
        dy_t, C_t, vectors, through, rows(dfinal), states, s
    )
    before = jnp.tril(jnp.ones((ROWS, ROWS), tiles.HALF), -1)
    dx, dB, dscores, terms = chunk_gradients(
        x_t, dy_t, B_t, C_t, vectors, dstates, D.ravel(), ends, order, before, s
    )
    dC, read = gradient_of_c(dy_t, B_t, C_t, vectors, states, dscores, s)
    terms = terms.reshape(s.b, s.h, s.c, TERMS, s.q)
    da = log_decay_gradient(_crossing(terms), read, terms[:, :, :, ADDED], passed, s)
    ddt, dA = step_gradients(terms[:, :, :, DIRECT], da, vectors, A, s)
    by_half = terms[:, :, :, SKIP].reshape(s.b, s.h, -1, s.p)
    dB, dC = sum_blocks(dB, B, s), sum_blocks(dC, C, s)
    dstart = dstart.reshape(initial_state.shape)
    return dx.reshape(x.shape), ddt, dA, dB, dC, by_half.sum(2), dstart


def _crossing(terms):
    """What crosses each token, from pairs within its half of the chunk and from those
    whose first token is in the half before."""
    within = terms[:, :, :, CROSSING]
    above = terms[:, :, :, CROSSING_ABOVE, :ROWS]
    return within.at[..., ROWS:].add(above)
