"""Gradients of one head in one chunk, the 64 tokens of one warpgroup.

Token j is the warpgroup's own and lies along the column; reader i along the row.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels import mosaic
from pallas_kernels.mosaic import plgpu
from pallas_kernels.ssd.hopper import tiles
from pallas_kernels.wgmma import ROWS, dot

ds = mosaic.pl.ds
# Readers worked on at once: all of them would not fit the registers.
READERS = 32
# Vectors over a chunk of a head that fall out, in their order.
DIRECT, ADDED, CROSSING, CROSSING_ABOVE, SKIP = range(5)
TERMS = 5


class Shared(NamedTuple):
    """Shared memory of a thread block. What comes for each head has slots.

    b_s: B. scores_s: C_i·B_j at (j, i), float32, zero where i does not read j. bounds:
    (order, doc_end). The others as in `gradients.chunk_gradients`.
    """

    b_s: Any
    scores_s: Any
    before_s: Any
    x_s: Any
    dy_s: Any
    h_s: Any
    staged_s: Any
    d_s: Any
    v_s: Any
    bounds: Any

    def zero(self) -> Any:
        """Zero, read and not known: what depends on it is computed where it is used.

        Else every address that depends on where the block and the warpgroup are would
        be computed before the loop over heads, and kept in registers through it.
        """
        return self.bounds[0][0]


class Head(NamedTuple):
    """What of shared memory is one head's; v: sums of decays, coarse and fine, dt,
    to_end."""

    own: Any
    x: Any
    dy: Any
    h: Any
    v: Any

    def down(self, n: int, columns: int = ROWS) -> Any:
        """Vector n at the warpgroup's own tokens, along the column."""
        return tiles.down(self.v[n].at[self.own], columns)


def one_head(at, half, shared, dx_g, terms_g, k, slot, carry):
    """Fold a head into (dscores, dB by way of the state); write what is its own.

    half: of the chunk, a number: the program of one warpgroup. The tokens of the second
    one have no readers in the first.
    """
    dscores, db = carry
    s, zero = at.s, shared.zero()
    here, own = at.moved(zero), ds(half * ROWS + zero, ROWS)
    number = here.block * here.heads + k
    v = [shared.v_s.at[slot, ds(n * s.q, s.q)] for n in range(4)]
    head = Head(own, *(t.at[slot] for t in (shared.x_s, shared.dy_s, shared.h_s)), v)
    staged = shared.staged_s.at[half + zero]

    def write(n, value):
        place = here.vector(number, n, 1, TERMS).start + own.start
        terms_g[ds(place, ROWS)] = value

    u = dot(shared.b_s.at[own], mosaic.transposed(head.h))
    u = tiles.scale_rows(head.down(3), u)
    write(ADDED, jnp.sum(u * tiles.load(head.x.at[own]) * head.down(2), axis=1))
    to_state = tiles.scale_rows(
        head.down(3) * head.down(2), tiles.load(head.x.at[own])
    ).astype(tiles.HALF)
    db = tuple(
        dot(to_state, head.h.at[:, n], acc)
        for n, acc in zip(tiles.pieces(s.n), db, strict=True)
    )
    u, dscores = _between(shared, half, head, staged, u, dscores, write, s)
    write(DIRECT, jnp.sum(tiles.load(head.x.at[own]) * u, axis=1))
    skip = tiles.across(shared.d_s.at[slot], ROWS) * tiles.load(head.dy.at[own])
    rows = ds(here.rows(0).start + own.start, ROWS)
    dx = dx_g.at[rows, ds(number * s.p, s.p)]
    tiles.put(dx, head.down(2) * u + skip, staged)
    # By channel, not by token, so that the sum is one of a row.
    x, dy = (tiles.load(mosaic.transposed(t.at[own])) for t in (head.x, head.dy))
    write(SKIP, jnp.sum(x * dy, axis=1))
    return dscores, db


def _between(shared, half, head, staged, u, dscores, write, s):
    """What passes between the chunk's tokens: (u, dscores) with it."""
    before = shared.before_s.at[ds(head.own.start - half * ROWS, ROWS)]
    crossing, out, bounds = 0.0, [], shared.bounds
    for n, i in list(enumerate(tiles.pieces(s.q)))[half:]:
        u, new = _readers(shared, head, staged, i, u, dscores[len(out) :])
        out += new
        crossing = crossing + _crossing(before, staged, bounds, head.own, i, n == half)
        if n > half:
            ones = plgpu.layout_cast(jnp.ones((ROWS, ROWS), tiles.HALF), tiles.ACC)
            write(CROSSING_ABOVE, _crossing(ones, staged, bounds, i, i, True))
    write(CROSSING, crossing)
    return u, tuple(out)


def _readers(shared, head, staged, i, u, dscores):
    """(u, dscores) with what passes to 64 readers; R of them in shared memory."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    out = []
    for part in tiles.pieces(i.size, READERS):
        readers = ds(i.start + part.start, part.size)
        scores_s = shared.scores_s.at[head.own, readers]
        decay = tiles.pair_decay(*head.v[:2], head.own, readers)
        scores = plgpu.load(scores_s, layout=tiles.ACC, optimized=False)
        u = dot((scores * decay).astype(tiles.HALF), head.dy.at[readers], u)
        new = dot(head.x.at[head.own], mosaic.transposed(head.dy.at[readers]))
        new = new * (decay * head.down(2, part.size))
        out.append(dscores[len(out)] + new)
        scores = plgpu.load(scores_s, layout=tiles.ACC, optimized=False)
        staged.at[:, part][...] = _pairs(scores, new)
    plgpu.commit_smem()
    return u, out


def _pairs(scores, dscores):
    """R_ij = dL/d(l_i - l_j) at (j, i). Where the scores are zero it is too, and an
    overflow of foreign tokens not NaN."""
    return jnp.where(scores != 0, dscores * scores, 0.0).astype(tiles.HALF)


def _crossing(chosen, pairs_s, bounds, tokens, i, diagonal):
    """sum over readers i >= k and chosen j of R_ij, for tokens k: no two terms cancel,
    whatever the decay. Without `diagonal` all the readers come after all the tokens."""
    total = 0.0
    for part in tiles.pieces(i.size, READERS):
        sums = dot(chosen, pairs_s.at[:, part])
        readers = ds(i.start + part.start, part.size)
        seen = (tiles.later if diagonal else tiles.same)(*bounds, tokens, readers)
        total = total + jnp.sum(jnp.where(seen, sums, 0.0), axis=1)
    return total
