"""Each Hopper kernel of the scan with arguments of given sizes, by shape only."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.ssd.decay_vectors import COUNT
from pallas_kernels.ssd.hopper.gradient_of_c import gradient_of_c
from pallas_kernels.ssd.hopper.gradients import chunk_gradients
from pallas_kernels.ssd.hopper.outputs import chunk_outputs
from pallas_kernels.ssd.hopper.state_pass import state_gradients, state_pass
from pallas_kernels.ssd.hopper.tiles import HALF
from pallas_kernels.ssd.layout import Sizes, heads_per_block
from pallas_kernels.wgmma import ROWS


def of_sizes(s: Sizes):
    """(name, function, arguments) of each kernel."""

    def array(*dims, dtype=HALF):
        return jax.ShapeDtypeStruct(dims, dtype)

    def wide(*dims):
        return array(*dims, dtype=jnp.float32)

    x, maps = array(s.tokens, s.h * s.p), array(s.tokens, s.g * s.n)
    states = array(s.b * s.c * s.h * s.p, s.n)
    vectors, through = wide(s.b * s.h * s.c * COUNT * s.q), wide(s.b * s.h * s.c)
    state, D = wide(s.b * s.h * s.p, s.n), wide(s.h * s.p)
    bounds, order = array(s.tokens, dtype=jnp.int32), array(s.q, dtype=jnp.int32)
    dscores = array(s.h // heads_per_block(s) * s.tokens, s.q)
    passed = (x, maps, vectors, through, state)
    of_chunk = (maps, maps, vectors, states, D, bounds, order)
    kernels = [
        ("state_pass", state_pass, passed),
        ("chunk_outputs", chunk_outputs, (x, *of_chunk)),
        ("state_gradients", state_gradients, (*passed, states)),
        ("chunk_gradients", chunk_gradients, (x, x, *of_chunk, array(ROWS, ROWS))),
        ("gradient_of_C", gradient_of_c, (x, maps, maps, vectors, states, dscores)),
    ]
    return [
        (name, functools.partial(kernel, sizes=s), arguments)
        for name, kernel, arguments in kernels
    ]
