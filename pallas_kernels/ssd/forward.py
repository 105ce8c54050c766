"""Outputs of the scan, one chunk and one block of heads to a thread block.

y_i = sum_j W_ij dt_j x_j + from_start_i state C_i + D x_i, with C Bᵀ computed once and
kept in registers for all heads of the block.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.mosaic import plgpu
from pallas_kernels.ssd import tiles
from pallas_kernels.ssd.decay_vectors import COUNT, FROM_START
from pallas_kernels.ssd.layout import Block, Sizes, heads_per_block

ds = mosaic.pl.ds


def chunk_outputs(x, B, C, vectors, states, D, doc_start, order, sizes: Sizes, dtype):
    """y (B·L, H·P) in `dtype`.

    Args:
        x: (parts·B·L, H·P) bfloat16.
        B, C: (parts·B·L, G·N) bfloat16.
        vectors: (B·H·C·5·Q,) float32, see `decay_vectors`.
        states: (parts·B·C·H·P, N) bfloat16, the state entering each chunk.
        D: (H·P,) float32.
        doc_start: (B·L,) int32, where in the chunk the token's document starts.
        order: (Q,) int32, 0, 1, ...
    """
    s, heads = sizes, heads_per_block(sizes)
    scratch = {
        "c_s": tiles.scratch(s.parts, s.q, s.n),
        # B until C Bᵀ is there, then the state of one head after the other.
        "h_s": tiles.scratch(s.parts, max(s.p, s.q), s.n),
        "x_s": tiles.scratch(s.parts, s.q, s.p),
        "v_s": plgpu.SMEM((4 * s.q,), jnp.float32),
        **tiles.barrier(2 * s.parts),
        **tiles.barrier(2 * s.parts + 1, name="head_bar"),
    }
    body = functools.partial(_body, s=s, heads=heads)
    body.__name__ = "ssd_chunk_outputs"
    kernel = mosaic.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((s.tokens, s.h * s.p), dtype),
        grid=(s.h // heads, s.c, s.b),
        grid_names=("block", "chunk", "b"),
        scratch_types=scratch,
        compiler_params=mosaic.LANE,
    )
    return kernel(x, B, C, vectors, states, D, doc_start, order)


def _body(x_g, b_g, c_g, v_g, h_g, d_g, start_g, order_g, y_g, *, s, heads, **scratch):
    c_s, h_s, x_s, v_s = (scratch[k] for k in ("c_s", "h_s", "x_s", "v_s"))
    at = Block.here(s, heads)
    copies = tiles.Copies(scratch.get("bar"))
    b_s, head_h = h_s.at[:, ds(0, s.q)], h_s.at[:, ds(0, s.p)]
    for part in range(s.parts):
        copies.start(c_g.at[at.rows(part), at.maps], c_s.at[part])
        copies.start(b_g.at[at.rows(part), at.maps], b_s.at[part])
    copies.wait()
    every = ds(0, s.q)
    mask = tiles.earlier(order_g, start_g.at[at.rows(0)], every)
    scores = tiles.scores(c_s, b_s, mask)

    copies = tiles.Copies(scratch.get("head_bar"))

    def one(i, _):
        head = at.block * heads + i
        columns = ds(head * s.p, s.p)
        mosaic.smem_written()
        for part in range(s.parts):
            copies.start(x_g.at[at.rows(part), columns], x_s.at[part])
            copies.start(h_g.at[at.state(part, head)], head_h.at[part])
        copies.start(v_g.at[at.vector(head, FROM_START, 4, COUNT)], v_s)
        copies.wait()
        y = _outputs(scores, c_s, head_h, x_s, v_s, s)
        x = tiles.load(x_s, tiles.ACC)
        y = y + x * tiles.across(d_g.at[columns], x.shape)
        tiles.store(y_g.at[at.rows(0), columns], y, x_s)

    lax.fori_loop(0, heads, one, None)


def _outputs(scores, c_s, h_s, x_s, v_s, s):
    """y of one head without the skip; v_s holds from_start, coarse, fine, dt."""
    from_start, coarse, fine, dt = (v_s.at[ds(k * s.q, s.q)] for k in range(4))
    seen = tiles.dot(
        tiles.zeros((s.q, s.p)),
        tiles.Shared(c_s),
        tiles.Shared(h_s, transpose=True),
    )
    y = tiles.scale_rows(tiles.down(from_start, seen.shape), seen)
    weights = scores * tiles.pair_decay(coarse, fine, ds(0, s.q))
    weights = weights * tiles.across(dt, scores.shape)
    weights = tiles.as_lhs(tiles.split(weights, s.parts))
    return tiles.dot(y, weights, tiles.Shared(x_s))
