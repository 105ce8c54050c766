"""Outputs of the scan, one chunk and one block of heads to a thread block.

y_i = sum_j W_ij dt_j x_j + from_start_i state C_i + D x_i. C Bᵀ is computed once and
kept in registers, 64 rows to a warpgroup, for all heads of the block.
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
from pallas_kernels.wgmma import ROWS, dot

ds = mosaic.pl.ds


def chunk_outputs(x, B, C, vectors, states, D, doc_start, order, sizes: Sizes):
    """y (B·L, H·P) bfloat16.

    Args:
        x: (B·L, H·P) bfloat16.
        B, C: (B·L, G·N) bfloat16.
        vectors: (B·H·C·5·Q,) float32, see `decay_vectors`.
        states: (B·C·H·P, N) bfloat16, the state entering each chunk.
        D: (H·P,) float32.
        doc_start: (B·L,) int32, where in the chunk the token's document starts.
        order: (Q,) int32, 0, 1, ...
    """
    s, heads = sizes, heads_per_block(sizes)
    groups, slots = s.q // ROWS, 2
    scratch = {
        "c_s": tiles.tile(s.q, s.n),
        "b_s": tiles.tile(s.q, s.n),
        "x_s": tiles.tile(s.q, s.p, slots),
        "h_s": tiles.tile(s.p, s.n, slots),
        "y_s": tiles.tile(ROWS, s.p, groups),
        "v_s": plgpu.SMEM((slots, 4 * s.q), jnp.float32),
        "once": plgpu.Barrier(num_arrivals=2),
        "d_s": plgpu.SMEM((slots, s.p), jnp.float32),
        "full": plgpu.Barrier(num_arrivals=4, num_barriers=slots),
        "free": plgpu.Barrier(num_arrivals=groups, num_barriers=slots),
    }
    body = functools.partial(_body, s=s, heads=heads)
    body.__name__ = "ssd_hopper_chunk_outputs"
    kernel = mosaic.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((s.tokens, s.h * s.p), tiles.HALF),
        grid=(s.h // heads, s.c, s.b),
        grid_names=("block", "chunk", "b"),
        num_threads=groups,
        thread_name=tiles.THREAD,
        scratch_types=scratch,
        compiler_params=tiles.PARAMS,
    )
    return kernel(x, B, C, vectors, states, D, doc_start, order)


def _body(x_g, b_g, c_g, v_g, h_g, d_g, start_g, order_g, y_g, *, s, heads, **scratch):
    c_s, b_s, x_s, h_s, v_s = (scratch[k] for k in ("c_s", "b_s", "x_s", "h_s", "v_s"))
    at, group = Block.here(s, heads), lax.axis_index(tiles.THREAD)

    @mosaic.pl.when(group == 0)
    def _():
        tiles.fetch(c_g.at[at.rows(0), at.maps], c_s, scratch["once"])
        tiles.fetch(b_g.at[at.rows(0), at.maps], b_s, scratch["once"])

    def start_copies(i, slot):
        head, bar = at.block * heads + i, scratch["full"].at[slot]
        tiles.fetch(x_g.at[at.rows(0), ds(head * s.p, s.p)], x_s.at[slot], bar)
        tiles.fetch(h_g.at[at.state(0, head)], h_s.at[slot], bar)
        tiles.fetch(v_g.at[at.vector(head, FROM_START, 4, COUNT)], v_s.at[slot], bar)
        tiles.fetch(d_g.at[ds(head * s.p, s.p)], scratch["d_s"].at[slot], bar)

    def of_half(half):
        own, y_s = ds(half * ROWS, ROWS), scratch["y_s"].at[half]
        read, rows = ds(0, (half + 1) * ROWS), ds(at.rows(0).start + own.start, ROWS)

        def one(scores, i, slot, _):
            channels = ds((at.block * heads + i) * s.p, s.p)
            x, v = x_s.at[slot], [v_s.at[slot, ds(k * s.q, s.q)] for k in range(4)]
            y = dot(c_s.at[own], mosaic.transposed(h_s.at[slot]))
            y = tiles.scale_rows(tiles.down(v[0].at[own], s.p), y)
            y = dot(_weights(scores, v, own, read), x.at[read], y)
            skip = tiles.across(scratch["d_s"].at[slot], ROWS)
            y = y + skip * tiles.load(x.at[own])
            tiles.put(y_g.at[rows, channels], y, y_s)

        def run():
            plgpu.barrier_wait(scratch["once"])
            scores = dot(c_s.at[own], mosaic.transposed(b_s.at[read]))
            seen = _earlier(order_g, start_g.at[rows], own, read)
            body = functools.partial(one, jnp.where(seen, scores, 0.0))
            bars = scratch["full"], scratch["free"]
            tiles.for_each(heads, start_copies, body, *bars, leads=half == 0)
            plgpu.wait_smem_to_gmem(0)

        return run

    # A program of its own for each: that of the first half is shorter.
    lax.cond(group == 0, of_half(0), of_half(1))


def _earlier(order, start, own, read):
    """(i, j): j <= i, and j not before i's document."""
    reader = tiles.down(order.at[own], read.size)
    token = tiles.across(order.at[read], own.size)
    return (token <= reader) & (token >= tiles.down(start, read.size))


def _weights(scores, v, own, read):
    """C_i·B_j exp(l_i - l_j) dt_j at (i, j), as a left operand."""
    _, coarse, fine, dt = v
    between = (
        tiles.down(coarse.at[own], read.size) - tiles.across(coarse.at[read], ROWS)
    ) + (tiles.down(fine.at[own], read.size) - tiles.across(fine.at[read], ROWS))
    decay = jnp.exp(jnp.minimum(between, 0.0))
    return (scores * decay * tiles.across(dt.at[read], ROWS)).astype(tiles.HALF)
