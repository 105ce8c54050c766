"""Gradients of the scan within one chunk and one block of heads: all but that of C.

Pairs lie transposed, (j, i) with the reader i along the row: then what u = dL/d(dt·x)
and dB need of them is in registers where a left operand has to be, nothing passes
between the warpgroups, and each weight is formed once.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.mosaic import plgpu
from pallas_kernels.ssd.decay_vectors import COARSE, COUNT
from pallas_kernels.ssd.hopper import tiles
from pallas_kernels.ssd.hopper.head_gradients import READERS, TERMS, Shared, one_head
from pallas_kernels.ssd.layout import Block, Sizes, heads_per_block
from pallas_kernels.wgmma import ROWS, dot, zeros

ds = mosaic.pl.ds
_SLOTS = 2


def chunk_gradients(
    x, dy, B, C, vectors, dstates, D, doc_end, order, before, sizes: Sizes
):
    """dx, dB by block of heads, and what falls out on the way.

    Args:
        x, dy: (B·L, H·P) bfloat16.
        B, C: (B·L, G·N) bfloat16.
        vectors: (B·H·C·5·Q,) float32, see `decay_vectors`.
        dstates: (B·C·H·P, N) bfloat16, gradient of the state leaving each chunk.
        D: (H·P,) float32.
        doc_end: (B·L,) int32, where in the chunk the token's document ends.
        order: (Q,) int32, 0, 1, ...
        before: (64, 64) bfloat16 of ones at (k, j), j < k.

    Returns:
        (dx (B·L, H·P) bfloat16;
        dB (K·B·L, N) float32, K blocks of heads;
        dscores (K·B·L, Q) bfloat16: gradient of C_i·B_j at (j, i), by block of heads;
        terms (B·H·C·5·Q,) float32, vectors over the chunk: x·u, the gradient of dt but
        for the decay; B_j times what comes of dB by way of the state; of the log
        decay's gradient at token k, sum_{i>=k>j} R_ij over the tokens j of k's half of
        the chunk; the same for k + 64 over those before its half; dD, by half).
    """
    s, heads, groups = sizes, heads_per_block(sizes), sizes.q // ROWS
    scratch = {
        "b_s": tiles.tile(s.q, s.n),
        # C before and after the heads, and what leaves; between them C Bᵀ.
        "union_s": plgpu.RefUnion(
            [tiles.tile(s.q, s.n), tiles.narrow_tile(s.q, s.q)],
            tiles.wide_tile(s.q, s.q),
        ),
        "before_s": tiles.narrow_tile(ROWS, ROWS),
        "x_s": tiles.narrow_tile(s.q, s.p, _SLOTS),
        "dy_s": tiles.narrow_tile(s.q, s.p, _SLOTS),
        "h_s": tiles.tile(s.p, s.n, _SLOTS),
        # R of 64 readers, and dx on its way out.
        "staged_s": tiles.narrow_tile(ROWS, s.p, groups),
        "bounds_s": plgpu.SMEM((2, s.q), jnp.int32),
        "d_s": plgpu.SMEM((_SLOTS, s.p), jnp.float32),
        "v_s": plgpu.SMEM((_SLOTS, 4 * s.q), jnp.float32),
        "once": plgpu.Barrier(num_arrivals=5),
        "again": plgpu.Barrier(num_arrivals=1),
        "meet": plgpu.Barrier(num_arrivals=groups),
        "full": plgpu.Barrier(num_arrivals=5, num_barriers=_SLOTS),
        "free": plgpu.Barrier(num_arrivals=groups, num_barriers=_SLOTS),
    }
    body = functools.partial(_body, s=s, heads=heads)
    body.__name__ = "ssd_hopper_chunk_gradients"
    blocks = s.h // heads
    run = mosaic.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((s.tokens, s.h * s.p), tiles.HALF),
            jax.ShapeDtypeStruct((blocks * s.tokens, s.n), jnp.float32),
            jax.ShapeDtypeStruct((blocks * s.tokens, s.q), tiles.HALF),
            jax.ShapeDtypeStruct((s.b * s.h * s.c * TERMS * s.q,), jnp.float32),
        ),
        grid=(blocks, s.c, s.b),
        grid_names=("block", "chunk", "b"),
        num_threads=groups,
        thread_name=tiles.THREAD,
        scratch_types=scratch,
        compiler_params=tiles.PARAMS,
    )
    return run(x, dy, B, C, vectors, dstates, D, doc_end, order, before)


def _body(*refs, s, heads, **scratch):
    x_g, dy_g, b_g, c_g, v_g, h_g, d_g, end_g, order_g, before_g, *outputs = refs
    dx_g, db_g, dscores_g, terms_g = outputs
    at, group = Block.here(s, heads), lax.axis_index(tiles.THREAD)
    known = at
    b_s, ((c_s, dscores_s), scores_s) = scratch["b_s"], scratch["union_s"]
    shared = Shared(b_s, scores_s, **_kept(scratch))

    @mosaic.pl.when(group == 0)
    def _():
        once = scratch["once"]
        tiles.fetch(b_g.at[at.rows(0), at.maps], b_s, once)
        tiles.fetch(c_g.at[at.rows(0), at.maps], c_s, once)
        tiles.fetch(before_g, scratch["before_s"], once)
        tiles.fetch(order_g, scratch["bounds_s"].at[0], once)
        tiles.fetch(end_g.at[at.rows(0)], scratch["bounds_s"].at[1], once)

    def start_copies(k, slot):
        at = known.moved(shared.zero())
        head, bar = at.block * heads + k, scratch["full"].at[slot]
        channels = ds(head * s.p, s.p)
        tiles.fetch(x_g.at[at.rows(0), channels], scratch["x_s"].at[slot], bar)
        tiles.fetch(dy_g.at[at.rows(0), channels], scratch["dy_s"].at[slot], bar)
        tiles.fetch(h_g.at[at.state(0, head)], scratch["h_s"].at[slot], bar)
        tiles.fetch(d_g.at[channels], scratch["d_s"].at[slot], bar)
        vectors = v_g.at[at.vector(head, COARSE, 4, COUNT)]
        tiles.fetch(vectors, scratch["v_s"].at[slot], bar)

    def of_half(half):
        def run():
            plgpu.barrier_wait(scratch["once"])
            _keep_scores(shared, c_s, half, scratch["meet"], s)
            head = functools.partial(one_head, at, half, shared, dx_g, terms_g)
            bars = scratch["full"], scratch["free"]
            start = _zeros(half, s)
            dscores, db = tiles.for_each(
                heads, start_copies, head, *bars, start, leads=half == 0
            )
            tiles.meet(scratch["meet"])
            if half == 0:
                maps = c_g.at[at.rows(0), at.maps]
                tiles.fetch(maps, c_s, scratch["again"])
            zero = shared.zero()
            own = ds(half * ROWS + zero, ROWS)
            rows = ds(at.moved(zero).block_rows(0).start + own.start, ROWS)
            dscores = _put_dscores(dscores_g.at[rows], dscores, dscores_s, shared, own)
            plgpu.barrier_wait(scratch["again"])
            _put_db(db_g, rows, db, dscores, c_s.at[ds(zero, s.q)], shared, own, s)
            plgpu.wait_smem_to_gmem(0)

        return run

    # A program of its own for each: that of the second half is shorter.
    lax.cond(group == 0, of_half(0), of_half(1))


def _kept(scratch):
    """What each head reads, by its name in `Shared`."""
    names = ("before_s", "x_s", "dy_s", "h_s", "staged_s", "d_s", "v_s")
    bounds = [scratch["bounds_s"].at[n] for n in range(2)]
    return {name: scratch[name] for name in names} | {"bounds": bounds}


def _zeros(half, s):
    """(dscores with readers from this half on, dB) to begin with."""
    readers = s.q - half * ROWS
    dscores = tuple(zeros((ROWS, READERS)) for _ in range(readers // READERS))
    return dscores, tuple(zeros((ROWS, n.size)) for n in tiles.pieces(s.n))


def _keep_scores(shared, c_s, half, barrier, s):
    """Put C_i·B_j at (j, i) where C was, once all have read it."""
    own, columns = ds(half * ROWS, ROWS), tiles.pieces(s.q, READERS)
    columns, scores = columns[half * ROWS // READERS :], []
    for i in columns:
        product = dot(shared.b_s.at[own], mosaic.transposed(c_s.at[i]))
        seen = tiles.later(*shared.bounds, own, i)
        scores.append(jnp.where(seen, product, 0.0))
    tiles.meet(barrier)
    for i, part in zip(columns, scores, strict=True):
        shared.scores_s.at[own, i][...] = part


def _put_dscores(destination, dscores, staged, shared, own):
    """Begin to write the gradients of the scores out; as a left operand."""
    columns, out = tiles.pieces(staged.shape[1], READERS), []
    empty = len(columns) - len(dscores)
    for n, i in enumerate(columns):
        part = zeros((ROWS, READERS))
        if n >= empty:
            seen = tiles.later(*shared.bounds, own, i)
            part = jnp.where(seen, dscores[n - empty], 0.0)
        out.append(part.astype(tiles.HALF))
        staged.at[own, i][...] = out[-1]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staged.at[own], destination)
    return lax.concatenate(out, 1)


def _put_db(db_g, rows, db, dscores, c_s, shared, own, s):
    """Write dB out, with what of it comes by way of the scores."""
    to_end = tiles.down(shared.bounds[1].at[own], ROWS) == s.q - 1
    for n, acc in zip(tiles.pieces(s.n), db, strict=True):
        # Where nothing goes to the state, its gradient may have overflowed.
        db_g[rows, n] = dot(dscores, c_s.at[:, n], jnp.where(to_end, acc, 0.0))
