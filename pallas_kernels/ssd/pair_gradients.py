"""Gradients of the scan between the tokens of one chunk.

One chunk and one block of heads to a thread block; token i reads, token j is read.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.mosaic import plgpu
from pallas_kernels.ssd import tiles
from pallas_kernels.ssd.decay_vectors import COARSE, COUNT
from pallas_kernels.ssd.layout import Block, Sizes, heads_per_block

ds = mosaic.pl.ds
# Tokens read, worked on at once: all of them would not fit the registers.
_COLUMNS = 32


def pair_gradients(x, dy, B, C, vectors, doc_start, order, sizes: Sizes):
    """Gradient of C Bᵀ, and the decay's share between the tokens of a chunk.

    Args:
        x, dy: (parts·B·L, H·P) bfloat16.
        B, C: (parts·B·L, G·N) bfloat16.
        vectors: (B·H·C·5·Q,) float32, see `decay_vectors`.
        doc_start: (B·L,) int32, where in the chunk the token's document starts.
        order: (Q,) int32, 0, 1, ...

    Returns:
        (dscores (parts·K·B·L, Q) bfloat16, summed over the heads of each of K blocks;
        crossing (B·H·C·Q,) float32: of the log decay's gradient at token k,
        sum_{i>=k>j} R_ij).
    """
    s = sizes
    heads = heads_per_block(s)
    scratch = {
        # B and C while they are multiplied, then x, dy and R of one head after another.
        "union_s": plgpu.RefUnion(
            [tiles.scratch(s.parts, s.q, s.n)] * 2,
            [tiles.scratch(s.parts, s.q, width) for width in (s.p, s.p, s.q)],
        ),
        **({} if s.parts == 1 else {"g_s": tiles.scratch(s.parts, s.q, s.q)}),
        "v_s": plgpu.SMEM((4 * s.q,), jnp.float32),
        **tiles.barrier(2 * s.parts),
        **tiles.barrier(2 * s.parts + 1, name="head_bar"),
    }
    body = functools.partial(_body, s=s, heads=heads)
    body.__name__ = "ssd_pair_gradients"
    blocks = s.h // heads
    run = mosaic.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((s.parts * blocks * s.tokens, s.q), tiles.HALF),
            jax.ShapeDtypeStruct((s.b * s.h * s.c * s.q,), jnp.float32),
        ),
        grid=(blocks, s.c, s.b),
        grid_names=("block", "chunk", "b"),
        scratch_types=scratch,
        compiler_params=mosaic.LANE,
    )
    return run(x, dy, B, C, vectors, doc_start, order)


def _body(*refs, s, heads, **scratch):
    x_g, dy_g, b_g, c_g, v_g, start_g, order, dg_g, crossing_g = refs
    (b_s, c_s), (x_s, dy_s, r_s) = scratch["union_s"]
    v_s = scratch["v_s"]
    at = Block.here(s, heads)
    copies = tiles.Copies(scratch.get("bar"))
    for part in range(s.parts):
        copies.start(b_g.at[at.rows(part), at.maps], b_s.at[part])
        copies.start(c_g.at[at.rows(part), at.maps], c_s.at[part])
    copies.wait()
    start = start_g.at[at.rows(0)]
    columns = tiles.pieces(s.q, _COLUMNS)
    scores = [
        tiles.scores(c_s, b_s.at[:, j], tiles.earlier(order, start, j)) for j in columns
    ]
    if "g_s" in scratch:
        # Two parts leave no room in registers: keep the scores in shared memory.
        scores = [tiles.split(part, s.parts) for part in scores]
        tiles.save(scratch["g_s"], tiles.join_columns(scores))
    copies = tiles.Copies(scratch.get("head_bar"))

    def scores_at(n):
        if "g_s" in scratch:
            return tiles.load(scratch["g_s"].at[:, :, columns[n]], tiles.ACC)
        return scores[n]

    def one(k, dscores):
        head, out = at.block * heads + k, []
        mosaic.smem_written()
        for part in range(s.parts):
            channels = ds(head * s.p, s.p)
            copies.start(x_g.at[at.rows(part), channels], x_s.at[part])
            copies.start(dy_g.at[at.rows(part), channels], dy_s.at[part])
        copies.start(v_g.at[at.vector(head, COARSE, 4, COUNT)], v_s)
        copies.wait()
        for n, j in enumerate(columns):
            new, pair = _pairs(scores_at(n), x_s, dy_s, v_s, j, s)
            out.append(dscores[n] + new)
            tiles.save(r_s.at[:, :, j], pair)
        mosaic.smem_written()
        crossing_g[at.vector(head, 0, 1, 1)] = _crossing(r_s, order, start)
        return tuple(out)

    zeros = tuple(tiles.zeros((s.q, j.size)) for j in columns)
    dscores = lax.fori_loop(0, heads, one, zeros)
    dscores = [
        tiles.split(jnp.where(tiles.earlier(order, start, j), part, 0.0), s.parts)
        for j, part in zip(columns, dscores, strict=True)
    ]
    for j, part in zip(columns, dscores, strict=True):
        tiles.save(r_s.at[:, :, j], part)
    for part in range(s.parts):
        tiles.copy_out(dg_g.at[at.block_rows(part)], r_s.at[part])


def _pairs(scores, x_s, dy_s, v_s, j, s):
    """For tokens j: (dscores of one head, unmasked; R_ij = dL/d(l_i - l_j))."""
    coarse, fine, dt = (v_s.at[ds(k * s.q, s.q)] for k in range(3))
    product = tiles.dot(
        tiles.zeros(scores.shape), tiles.Shared(dy_s), tiles.Shared(x_s.at[:, j], True)
    )
    decay = tiles.pair_decay(coarse, fine, j)
    dscores = product * (decay * tiles.across(dt.at[j], scores.shape))
    # Where the scores are zero R is too, and an overflow of foreign tokens not NaN.
    return dscores, tiles.split(jnp.where(scores != 0, dscores * scores, 0.0), s.parts)


def _crossing(r_s, order, start):
    """sum_{i>=k>j} R_ij for every token k: no two terms cancel, whatever the decay."""
    sums, columns = 0.0, tiles.pieces(order.shape[0], _COLUMNS)
    for j in columns:
        below = tiles.zeros((order.shape[0], j.size))
        after = tiles.at_or_after(order)
        below = tiles.dot(below, after, tiles.Shared(r_s.at[:, :, j]))
        crosses = tiles.earlier(order, start, j, strict=True)
        sums = sums + jnp.sum(jnp.where(crosses, below, 0.0), axis=1)
    return sums
