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
        "maps_bar": plgpu.Barrier(num_arrivals=2),
        "full": plgpu.Barrier(num_arrivals=3, num_barriers=slots),
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
    own = ds(group * ROWS, ROWS)
    y_s, rows = scratch["y_s"].at[group], ds(at.rows(0).start + group * ROWS, ROWS)

    @mosaic.pl.when(group == 0)
    def _():
        tiles.fetch(c_g.at[at.rows(0), at.maps], c_s, scratch["maps_bar"])
        tiles.fetch(b_g.at[at.rows(0), at.maps], b_s, scratch["maps_bar"])

    plgpu.barrier_wait(scratch["maps_bar"])
    reader, start = tiles.down(order_g.at[own], s.q), tiles.down(start_g.at[rows], s.q)
    read = tiles.across(order_g, ROWS)
    scores = dot(c_s.at[own], mosaic.transposed(b_s))
    scores = jnp.where((read <= reader) & (read >= start), scores, 0.0)

    def start_copies(i, slot):
        head, bar = at.block * heads + i, scratch["full"].at[slot]
        tiles.fetch(x_g.at[at.rows(0), ds(head * s.p, s.p)], x_s.at[slot], bar)
        tiles.fetch(h_g.at[at.state(0, head)], h_s.at[slot], bar)
        tiles.fetch(v_g.at[at.vector(head, FROM_START, 4, COUNT)], v_s.at[slot], bar)

    def one(i, slot, _):
        channels = ds((at.block * heads + i) * s.p, s.p)
        x, v = x_s.at[slot], [v_s.at[slot, ds(k * s.q, s.q)] for k in range(4)]
        y = dot(c_s.at[own], mosaic.transposed(h_s.at[slot]))
        y = tiles.scale_rows(tiles.down(v[0].at[own], s.p), y)
        y = dot(_weights(scores, v, own, s), x, y)
        y = y + tiles.load(x.at[own]) * tiles.across(d_g.at[channels], ROWS)
        tiles.put(y_g.at[rows, channels], y, y_s)

    tiles.for_each(heads, start_copies, one, scratch["full"], scratch["free"])
    plgpu.wait_smem_to_gmem(0)


def _weights(scores, v, own, s):
    """C_i·B_j exp(l_i - l_j) dt_j at (i, j), as a left operand."""
    _, coarse, fine, dt = v
    between = (tiles.down(coarse.at[own], s.q) - tiles.across(coarse, ROWS)) + (
        tiles.down(fine.at[own], s.q) - tiles.across(fine, ROWS)
    )
    weights = scores * jnp.exp(jnp.minimum(between, 0.0)) * tiles.across(dt, ROWS)
    return weights.astype(tiles.HALF)
