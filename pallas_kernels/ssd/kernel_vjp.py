"""The scan by kernels with its hand-written gradient."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.ssd import tiles
from pallas_kernels.ssd.decay_vectors import decay_vectors, document_bounds
from pallas_kernels.ssd.forward import chunk_outputs
from pallas_kernels.ssd.layout import Sizes
from pallas_kernels.ssd.state_pass import state_pass


def forward(x, dt, A, B, C, D, run, initial_state, size):
    """(y, final state, states entering the chunks) of whole chunks."""
    s = sizes_of(x, B, size)
    vectors, through = decay_vectors(dt, A, run, size)
    x_t, B_t, C_t = (as_operand(t, s.parts) for t in (x, B, C))
    start = initial_state.reshape(-1, s.n)
    states, final = state_pass(x_t, B_t, vectors, through, start, s, reverse=False)
    if run is None:
        run = jnp.zeros(x.shape[:2], jnp.int32)
    doc_start, _ = document_bounds(run, size)
    y = chunk_outputs(x_t, B_t, C_t, vectors, states, D.ravel(), doc_start, s, x.dtype)
    return y.reshape(x.shape), final.reshape(initial_state.shape), states


def sizes_of(x, B, size) -> Sizes:
    batch, length, heads, width = x.shape
    parts = 1 if x.dtype == tiles.HALF else 2
    return Sizes(batch, length // size, size, heads, width, *B.shape[2:], parts)


def as_operand(t, parts):
    """(B, L, ...) -> (parts·B·L, ...) bfloat16."""
    flat = t.reshape(t.shape[0] * t.shape[1], -1)
    if parts == 1:
        return flat.astype(tiles.HALF)
    return jnp.concatenate(tiles.split(flat.astype(jnp.float32), parts))
