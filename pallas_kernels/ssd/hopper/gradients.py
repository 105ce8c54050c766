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
from pallas_kernels.ssd.layout import Block, Sizes, heads_per_block
from pallas_kernels.ssd.tiles import split
from pallas_kernels.wgmma import ROWS, dot, zeros

ds = mosaic.pl.ds
_SLOTS = 2
# Tokens that read, worked on at once: all of them would not fit the registers.
_READERS = 32
# Vectors over a chunk of a head that fall out, in their order.
DIRECT, ADDED, CROSSING, CROSSING_ABOVE, SKIP = range(5)
TERMS = 5


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
        # C before and after the heads, between them what C Bᵀ is more than g_s.
        "union_s": plgpu.RefUnion(tiles.tile(s.q, s.n), tiles.narrow_tile(s.q, s.q)),
        "g_s": tiles.narrow_tile(s.q, s.q),
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
    dx_g, db_g, dg_g, terms_g = outputs
    b_s, (c_s, rest_s) = scratch["b_s"], scratch["union_s"]
    g_s = (scratch["g_s"], rest_s)
    at, group = Block.here(s, heads), lax.axis_index(tiles.THREAD)
    own, columns = ds(group * ROWS, ROWS), tiles.pieces(s.n)
    bounds = [scratch["bounds_s"].at[n] for n in range(2)]

    @mosaic.pl.when(group == 0)
    def _():
        once = scratch["once"]
        tiles.fetch(b_g.at[at.rows(0), at.maps], b_s, once)
        tiles.fetch(c_g.at[at.rows(0), at.maps], c_s, once)
        tiles.fetch(before_g, scratch["before_s"], once)
        tiles.fetch(order_g, bounds[0], once)
        tiles.fetch(end_g.at[at.rows(0)], bounds[1], once)

    def meet():
        """Wait for the other warpgroups."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch["meet"])
        plgpu.barrier_wait(scratch["meet"])

    plgpu.barrier_wait(scratch["once"])
    scores = [
        jnp.where(
            tiles.later(*bounds, own, i),
            dot(b_s.at[own], mosaic.transposed(c_s.at[i])),
            0.0,
        )
        for i in tiles.pieces(s.q, _READERS)
    ]
    meet()
    for i, part in zip(tiles.pieces(s.q, _READERS), scores, strict=True):
        for ref, value in zip(g_s, split(part, 2), strict=True):
            ref.at[own, i][...] = value

    def start_copies(k, slot):
        head, bar = at.block * heads + k, scratch["full"].at[slot]
        channels = ds(head * s.p, s.p)
        tiles.fetch(x_g.at[at.rows(0), channels], scratch["x_s"].at[slot], bar)
        tiles.fetch(dy_g.at[at.rows(0), channels], scratch["dy_s"].at[slot], bar)
        tiles.fetch(h_g.at[at.state(0, head)], scratch["h_s"].at[slot], bar)
        tiles.fetch(d_g.at[channels], scratch["d_s"].at[slot], bar)
        vectors = v_g.at[at.vector(head, COARSE, 4, COUNT)]
        tiles.fetch(vectors, scratch["v_s"].at[slot], bar)

    def one(k, slot, carry):
        dscores, db = carry
        # Read, not known: else every address that depends on where the block is would
        # be computed before the loop and kept in registers.
        zero = scratch["bounds_s"][0, 0]
        here, half = at.moved(zero), group + zero
        own, before = ds(half * ROWS, ROWS), scratch["before_s"].at[ds(zero, ROWS)]
        staged = scratch["staged_s"].at[half]
        head = here.block * heads + k
        x_s, dy_s, h_s = (scratch[name].at[slot] for name in ("x_s", "dy_s", "h_s"))
        v = [scratch["v_s"].at[slot, ds(n * s.q, s.q)] for n in range(4)]

        def write(n, value):
            place = here.vector(head, n, 1, TERMS).start + own.start
            terms_g[ds(place, ROWS)] = value

        u = dot(b_s.at[own], mosaic.transposed(h_s))
        u = tiles.scale_rows(tiles.down(v[3].at[own], s.p), u)
        by_state = u * tiles.load(x_s.at[own]) * tiles.down(v[2].at[own], s.p)
        write(ADDED, jnp.sum(by_state, axis=1))
        to_state = _to_state(x_s.at[own], v, own)
        db = tuple(
            dot(to_state, h_s.at[:, n], acc) for n, acc in zip(columns, db, strict=True)
        )
        out, crossing = [], 0.0
        for i in tiles.pieces(s.q):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for part in tiles.pieces(i.size, _READERS):
                place, part = part, ds(i.start + part.start, part.size)
                decay = tiles.pair_decay(*v[:2], own, part)
                weights = (_scores(g_s, own, part) * decay).astype(tiles.HALF)
                u = dot(weights, dy_s.at[part], u)
                new = dot(x_s.at[own], mosaic.transposed(dy_s.at[part]))
                new = new * (decay * tiles.down(v[2].at[own], part.size))
                out.append(dscores[len(out)] + new)
                staged.at[:, place][...] = _pairs(_scores(g_s, own, part), new)
            plgpu.commit_smem()
            crossing = crossing + _crossing(before, staged, bounds, own, i)
            if i.start:
                above = ds(ROWS, ROWS)
                ones = plgpu.layout_cast(jnp.ones((ROWS, ROWS), tiles.HALF), tiles.ACC)
                write(CROSSING_ABOVE, _crossing(ones, staged, bounds, above, i))
        write(CROSSING, crossing)
        write(DIRECT, jnp.sum(tiles.load(x_s.at[own]) * u, axis=1))
        dx = tiles.down(v[2].at[own], s.p) * u
        skip = tiles.across(scratch["d_s"].at[slot], ROWS)
        dx = dx + skip * tiles.load(dy_s.at[own])
        rows = ds(here.rows(0).start + half * ROWS, ROWS)
        tiles.put(dx_g.at[rows, ds(head * s.p, s.p)], dx, staged)
        # By channel, not by token, so that the sum is one of a row.
        x, dy = (tiles.load(mosaic.transposed(t.at[own])) for t in (x_s, dy_s))
        write(SKIP, jnp.sum(x * dy, axis=1))
        return tuple(out), db

    start = (
        tuple(zeros((ROWS, _READERS)) for _ in range(s.q // _READERS)),
        tuple(zeros((ROWS, n.size)) for n in columns),
    )
    dscores, db = tiles.for_each(
        heads, start_copies, one, scratch["full"], scratch["free"], start
    )
    meet()

    @mosaic.pl.when(group == 0)
    def _():
        tiles.fetch(c_g.at[at.rows(0), at.maps], c_s, scratch["again"])

    rows = ds(at.block_rows(0).start + group * ROWS, ROWS)
    kept = []
    for i, part in zip(tiles.pieces(s.q, _READERS), dscores, strict=True):
        part = jnp.where(tiles.later(*bounds, own, i), part, 0.0)
        kept.append(part.astype(tiles.HALF))
        g_s[0].at[own, i][...] = kept[-1]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(g_s[0].at[own], dg_g.at[rows])
    plgpu.barrier_wait(scratch["again"])
    kept = lax.concatenate(kept, 1)
    to_end = tiles.down(bounds[1].at[own], ROWS) == s.q - 1
    for n, acc in zip(columns, db, strict=True):
        # Where nothing goes to the state, its gradient may have overflowed.
        acc = jnp.where(to_end, acc, 0.0)
        db_g[rows, n] = dot(kept, c_s.at[:, n], acc)
    plgpu.wait_smem_to_gmem(0)


def _to_state(x_s, v, own):
    """to_end_j dt_j x_j, as a left operand."""
    dt, to_end = (tiles.down(v[n].at[own], x_s.shape[1]) for n in (2, 3))
    return tiles.scale_rows(to_end * dt, tiles.load(x_s)).astype(tiles.HALF)


def _scores(g_s, own, i):
    """C_i·B_j at (j, i): the two parts that hold 16 of its bits."""
    return sum(tiles.load(part.at[own, i]) for part in g_s)


def _pairs(scores, dscores):
    """R_ij = dL/d(l_i - l_j) at (j, i). Where the scores are zero it is too, and an
    overflow of foreign tokens not NaN."""
    return jnp.where(scores != 0, dscores * scores, 0.0).astype(tiles.HALF)


def _crossing(chosen, pairs_s, bounds, tokens, i):
    """sum over readers i >= k and chosen j of R_ij, for tokens k: no two terms cancel,
    whatever the decay."""
    total = 0.0
    for part in tiles.pieces(i.size, _READERS):
        sums = dot(chosen, pairs_s.at[:, part])
        reads = tiles.later(*bounds, tokens, ds(i.start + part.start, part.size))
        total = total + jnp.sum(jnp.where(reads, sums, 0.0), axis=1)
    return total
