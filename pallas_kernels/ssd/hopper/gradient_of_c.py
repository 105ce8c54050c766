"""Gradient of C: what one chunk and one block of heads add to it.

dC_i = from_start_i stateᵀ dy_i in sum over the heads, and sum_j dscores_ij B_j once.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.mosaic import plgpu
from pallas_kernels.ssd.decay_vectors import COUNT, FROM_START
from pallas_kernels.ssd.hopper import tiles
from pallas_kernels.ssd.layout import Block, Sizes, heads_per_block
from pallas_kernels.wgmma import ROWS, dot, zeros

ds = mosaic.pl.ds
_SLOTS = 3


def gradient_of_c(dy, B, C, vectors, states, dscores, sizes: Sizes):
    """dC by block of heads, and its share in the decay's gradient.

    Args:
        dy: (B·L, H·P) bfloat16.
        B, C: (B·L, G·N) bfloat16.
        vectors: (B·H·C·5·Q,) float32, see `decay_vectors`.
        states: (B·C·H·P, N) bfloat16, entering each chunk.
        dscores: (K·B·L, Q) bfloat16, from `chunk_gradients`.

    Returns:
        (dC (K·B·L, N) float32,
        read (B·H·C·Q,) float32: C_i times what comes by way of the state).
    """
    s, heads, groups = sizes, heads_per_block(sizes), sizes.q // ROWS
    scratch = {
        "b_s": tiles.tile(s.q, s.n),
        "c_s": tiles.tile(s.q, s.n),
        "dscores_s": tiles.tile(s.q, s.q),
        "dy_s": tiles.tile(s.q, s.p, _SLOTS),
        "h_s": tiles.tile(s.p, s.n, _SLOTS),
        "v_s": plgpu.SMEM((_SLOTS, s.q), jnp.float32),
        "once": plgpu.Barrier(num_arrivals=3),
        "full": plgpu.Barrier(num_arrivals=3, num_barriers=_SLOTS),
        "free": plgpu.Barrier(num_arrivals=groups, num_barriers=_SLOTS),
    }
    body = functools.partial(_body, s=s, heads=heads)
    body.__name__ = "ssd_hopper_gradient_of_C"
    blocks = s.h // heads
    run = mosaic.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((blocks * s.tokens, s.n), jnp.float32),
            jax.ShapeDtypeStruct((s.b * s.h * s.c * s.q,), jnp.float32),
        ),
        grid=(blocks, s.c, s.b),
        grid_names=("block", "chunk", "b"),
        num_threads=groups,
        thread_name=tiles.THREAD,
        scratch_types=scratch,
        compiler_params=tiles.PARAMS,
    )
    return run(dy, B, C, vectors, states, dscores)


def _body(dy_g, b_g, c_g, v_g, h_g, dscores_g, dc_g, read_g, *, s, heads, **scratch):
    at, group = Block.here(s, heads), lax.axis_index(tiles.THREAD)
    own, columns = ds(group * ROWS, ROWS), tiles.pieces(s.n)
    b_s, c_s, dscores_s = (scratch[name] for name in ("b_s", "c_s", "dscores_s"))

    @mosaic.pl.when(group == 0)
    def _():
        once = scratch["once"]
        tiles.fetch(c_g.at[at.rows(0), at.maps], c_s, once)
        tiles.fetch(b_g.at[at.rows(0), at.maps], b_s, once)
        tiles.fetch(dscores_g.at[at.block_rows(0)], dscores_s, once)

    def start_copies(k, slot):
        head, bar = at.block * heads + k, scratch["full"].at[slot]
        channels = ds(head * s.p, s.p)
        tiles.fetch(dy_g.at[at.rows(0), channels], scratch["dy_s"].at[slot], bar)
        tiles.fetch(h_g.at[at.state(0, head)], scratch["h_s"].at[slot], bar)
        vector = v_g.at[at.vector(head, FROM_START, 1, COUNT)]
        tiles.fetch(vector, scratch["v_s"].at[slot], bar)

    def one(k, slot, gradient):
        dy_s, h_s, v_s = (scratch[name].at[slot] for name in ("dy_s", "h_s", "v_s"))
        from_start = tiles.down(v_s.at[own], ROWS)
        out, read = [], 0.0
        for n, acc in zip(columns, gradient, strict=True):
            new = tiles.scale_rows(from_start, dot(dy_s.at[own], h_s.at[:, n]))
            read = read + jnp.sum(new * tiles.load(c_s.at[own, n]), axis=1)
            out.append(acc + new)
        mine = at.vector(at.block * heads + k, 0, 1, 1).start + group * ROWS
        read_g[ds(mine, ROWS)] = read
        return tuple(out)

    plgpu.barrier_wait(scratch["once"])
    gradient = tiles.for_each(
        heads,
        start_copies,
        one,
        scratch["full"],
        scratch["free"],
        tuple(zeros((ROWS, n.size)) for n in columns),
    )
    rows = ds(at.block_rows(0).start + group * ROWS, ROWS)
    readers = mosaic.transposed(dscores_s.at[:, own])
    for n, acc in zip(columns, gradient, strict=True):
        dc_g[rows, n] = dot(readers, b_s.at[:, n], acc)
