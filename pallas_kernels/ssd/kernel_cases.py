"""Each kernel of the scan with arguments of a named size, by shape only."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.ssd import kernel_vjp, tiles
from pallas_kernels.ssd.decay_vectors import COUNT
from pallas_kernels.ssd.forward import chunk_outputs
from pallas_kernels.ssd.hopper import cases as hopper_cases
from pallas_kernels.ssd.input_gradients import input_gradients
from pallas_kernels.ssd.layout import Sizes, heads_per_block
from pallas_kernels.ssd.map_gradient import map_gradient
from pallas_kernels.ssd.narrow import cases as narrow_cases
from pallas_kernels.ssd.pair_gradients import pair_gradients
from pallas_kernels.ssd.state_pass import state_gradients, state_pass


def kernel_sizes(shape, dtype, form) -> Sizes:
    """What the kernels of a form make of an `SSDShape`."""
    q, width = kernel_vjp.FORMS[form].chunk, kernel_vjp.WIDTH
    heads = shape.n_heads * -(-shape.headdim // width)
    n = shape.d_state + -shape.d_state % kernel_vjp.FORMS[form].narrowest
    chunks, parts = -(-shape.length // q), 1 if dtype == tiles.HALF else 2
    return Sizes(shape.batch, chunks, q, heads, width, shape.n_groups, n, parts)


def of_shape(shape, dtype):
    """(name, function, arguments) of each kernel."""
    if shape.d_state == 1:
        return narrow_cases.of_shape(shape, dtype)
    x = jax.ShapeDtypeStruct((shape.n_heads, shape.headdim), dtype)
    maps = jax.ShapeDtypeStruct((shape.n_groups, shape.d_state), dtype)
    form = kernel_vjp.form_for(x, maps, maps)
    s = kernel_sizes(shape, dtype, form)
    if form == "wgmma":
        return hopper_cases.of_sizes(s)

    def array(*dims, dtype=tiles.HALF):
        return jax.ShapeDtypeStruct(dims, dtype)

    def wide(*dims):
        return array(*dims, dtype=jnp.float32)

    x, maps = array(s.parts * s.tokens, s.h * s.p), array(s.parts * s.tokens, s.g * s.n)
    states = array(s.parts * s.b * s.c * s.h * s.p, s.n)
    vectors, through = wide(s.b * s.h * s.c * COUNT * s.q), wide(s.b * s.h * s.c)
    state, D = wide(s.b * s.h * s.p, s.n), wide(s.h * s.p)
    bounds, order = array(s.tokens, dtype=jnp.int32), array(s.q, dtype=jnp.int32)
    dscores = array(s.parts * s.h // heads_per_block(s) * s.tokens, s.q)
    last = {"sizes": s, "dtype": dtype}
    passed = (x, maps, vectors, through, state)
    tokens = (x, x, maps, maps, vectors)
    gradient = functools.partial(map_gradient, sizes=s)
    of_map = (x, maps, maps, vectors, states, dscores)
    return [
        ("state_pass", functools.partial(state_pass, sizes=s), passed),
        (
            "chunk_outputs",
            functools.partial(chunk_outputs, **last),
            (x, maps, maps, vectors, states, D, bounds, order),
        ),
        (
            "state_gradients",
            functools.partial(state_gradients, sizes=s),
            (*passed, states),
        ),
        (
            "pair_gradients",
            functools.partial(pair_gradients, sizes=s),
            (*tokens, bounds, order),
        ),
        (
            "input_gradients",
            functools.partial(input_gradients, **last),
            (*tokens, states, D, bounds, order),
        ),
        ("gradient_of_C", functools.partial(gradient, of="C"), of_map),
        ("gradient_of_B", functools.partial(gradient, of="B"), of_map),
    ]
