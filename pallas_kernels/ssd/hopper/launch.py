"""The Hopper kernels of the scan in their order, on one device's part of the batch."""

from pallas_kernels.ssd import launch
from pallas_kernels.ssd.decay_vectors import decay_vectors
from pallas_kernels.ssd.hopper.outputs import chunk_outputs
from pallas_kernels.ssd.hopper.state_pass import state_pass
from pallas_kernels.ssd.launch import bounds, make_sizes, operand, rows


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
    """As `launch.backward`, whose kernels it runs: on halves of the chunks, with states
    of its own."""
    del states
    arrays = (x, dt, A, B, C, D, run, initial_state)
    return launch.backward(*arrays, None, dy, dfinal, size=size // 2)
