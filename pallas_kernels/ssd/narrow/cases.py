"""Each kernel for one state per channel with arguments of a named size, by shape."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.ssd.narrow.backward import gradients
from pallas_kernels.ssd.narrow.forward import scan
from pallas_kernels.ssd.narrow.states import state_gradients
from pallas_kernels.ssd.narrow.states import states as all_states
from pallas_kernels.ssd.narrow.tile import CHANNELS, WARPS, Sizes
from pallas_kernels.ssd.narrow.vjp import STRETCH


def of_shape(shape, dtype):
    """(name, function, arguments) of each kernel."""
    length = shape.length + -shape.length % (WARPS * STRETCH)
    width = shape.headdim + -shape.headdim % CHANNELS
    s = Sizes(shape.batch, length, shape.n_heads, width, shape.n_groups, STRETCH)
    channels, stretches = s.h * s.p, s.length // s.stretch

    def wide(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    x = jax.ShapeDtypeStruct((s.b * stretches, s.stretch, channels), dtype)
    by_head = wide(s.b * s.h * stretches, s.stretch)
    by_group = wide(s.b * s.g * stretches, s.stretch)
    vectors, skip, end = (
        (by_head, by_head, by_group),
        wide(channels),
        wide(s.b, channels),
    )
    states = wide(s.b * s.tiles, channels)
    scanned = functools.partial(scan, sizes=s, keep_states=True)
    kernels = [
        ("scan", scanned, (x, *vectors, skip, end)),
        ("states", functools.partial(all_states, sizes=s), (x, by_head, by_head, end)),
        (
            "state_gradients",
            functools.partial(state_gradients, sizes=s),
            (x, by_head, by_group),
        ),
        (
            "gradients",
            functools.partial(gradients, sizes=s),
            (x, x, *vectors, skip, states, end),
        ),
    ]
    return [(f"narrow_{name}", *rest) for name, *rest in kernels]
