"""Gradients of the scan, one chunk and one block of heads to a thread block.

Two kernels, each with one accumulator of a group: `reader_gradients` has what belongs to
the token that reads, dC, and `writer_gradients` what belongs to the token that is read,
dx, ddt, dB. The reader leaves dscores of its heads, in sum, for the writer.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.mosaic import plgpu
from pallas_kernels.ssd import tiles
from pallas_kernels.ssd.decay_vectors import COARSE, COUNT, FROM_START
from pallas_kernels.ssd.layout import Block, Sizes, heads_per_block

ds = mosaic.pl.ds


def reader_gradients(x, dy, B, C, vectors, states, doc_start, sizes: Sizes):
    """Gradients at the token that reads.

    Args:
        x, dy: (parts·B·L, H·P) bfloat16.
        B, C: (parts·B·L, G·N) bfloat16.
        vectors: (B·H·C·5·Q,) float32, see `decay_vectors`.
        states: (parts·B·C·H·P, N) bfloat16, the state entering each chunk.
        doc_start: (B·L,) int32, where in the chunk the token's document starts.

    Returns:
        (dC (K·B·L, N) float32, K blocks of heads;
        dscores (parts·K·B·L, Q) bfloat16, gradient of C Bᵀ;
        terms (B·H·C·2·Q,) float32: of the log decay's gradient, what token i reads from
        the state, and what crosses token i inside the chunk).
    """
    s = sizes
    heads = heads_per_block(s)
    scratch = {
        "c_s": tiles.scratch(s.parts, s.q, s.n),
        # B while it is multiplied, else the state of one head after the other.
        "h_s": tiles.scratch(s.parts, max(s.p, s.q), s.n),
        "x_s": tiles.scratch(s.parts, s.q, s.p),
        "dy_s": tiles.scratch(s.parts, s.q, s.p),
        "v_s": plgpu.SMEM((4 * s.q,), jnp.float32),
        **tiles.barrier(2 * s.parts),
        **tiles.barrier(3 * s.parts + 1, name="head_bar"),
        **tiles.barrier(s.parts, name="last_bar"),
    }
    body = functools.partial(_reader, s=s, heads=heads)
    body.__name__ = "ssd_reader_gradients"
    blocks = s.h // heads
    run = mosaic.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((blocks * s.tokens, s.n), jnp.float32),
            jax.ShapeDtypeStruct((s.parts * blocks * s.tokens, s.q), tiles.HALF),
            jax.ShapeDtypeStruct((s.b * s.h * s.c * 2 * s.q,), jnp.float32),
        ),
        grid=(blocks, s.c, s.b),
        grid_names=("block", "chunk", "b"),
        scratch_types=scratch,
        compiler_params=mosaic.LANE,
    )
    return run(x, dy, B, C, vectors, states, doc_start)


def _reader(
    x_g, dy_g, b_g, c_g, v_g, h_g, start_g, dc_g, dg_g, terms_g, *, s, heads, **scratch
):
    c_s, h_s, x_s, dy_s, v_s = (
        scratch[k] for k in ("c_s", "h_s", "x_s", "dy_s", "v_s")
    )
    at = Block.here(s, heads)
    b_s, head_h = h_s.at[:, ds(0, s.q)], h_s.at[:, ds(0, s.p)]
    copies = tiles.Copies(scratch.get("bar"))
    for part in range(s.parts):
        copies.start(c_g.at[at.rows(part), at.maps], c_s.at[part])
        copies.start(b_g.at[at.rows(part), at.maps], b_s.at[part])
    copies.wait()
    start = start_g.at[at.rows(0)]
    scores = tiles.scores(c_s, b_s, tiles.earlier(start, s.q))
    copies = tiles.Copies(scratch.get("head_bar"))

    def one(i, carry):
        dscores, dC = carry
        head = at.block * heads + i
        mosaic.smem_written()
        for part in range(s.parts):
            columns = ds(head * s.p, s.p)
            copies.start(x_g.at[at.rows(part), columns], x_s.at[part])
            copies.start(dy_g.at[at.rows(part), columns], dy_s.at[part])
            copies.start(h_g.at[at.state(part, head)], head_h.at[part])
        copies.start(v_g.at[at.vector(head, FROM_START, 4, COUNT)], v_s)
        copies.wait()
        new, crossing = _between_tokens(scores, x_s, dy_s, v_s, start, s)
        from_state, read = _from_state(dy_s, head_h, c_s, v_s, s)
        terms_g[at.vector(head, 0, 1, 2)] = read
        terms_g[at.vector(head, 1, 1, 2)] = crossing
        dC = tuple(a + b for a, b in zip(dC, from_state, strict=True))
        return dscores + new, dC

    zeros = tiles.zeros((s.q, s.q))
    dC = tuple(tiles.zeros((s.q, w.size)) for w in tiles.halves(s.n))
    dscores, dC = lax.fori_loop(0, heads, one, (zeros, dC))
    dscores = jnp.where(tiles.earlier(start, s.q), dscores, 0.0)
    dscores = tiles.split(dscores, s.parts)
    mosaic.smem_written()
    copies = tiles.Copies(scratch.get("last_bar"))
    for part in range(s.parts):
        copies.start(b_g.at[at.rows(part), at.maps], b_s.at[part])
    tiles.save(x_s.at[:, :, ds(0, s.q)], dscores)
    copies.wait()
    for part in range(s.parts):
        tile = x_s.at[part, :, ds(0, s.q)]
        mosaic.store_tile(dg_g.at[at.block_rows(part)], tile)
    dscores = tiles.as_lhs(dscores)
    for columns, acc in zip(tiles.halves(s.n), dC, strict=True):
        acc = tiles.dot(acc, dscores, tiles.Shared(b_s.at[:, :, columns]), step=32)
        dc_g[at.block_rows(0), columns] = acc


def _between_tokens(scores, x_s, dy_s, v_s, start, s):
    """(dscores of one head, unmasked; sums of dL/d(l_i - l_j) crossing each token).

    crossing_k = sum_{i>=k>j} R_ij. No two of its terms cancel, whatever the decay.
    """
    _, coarse, fine, dt = (v_s.at[ds(k * s.q, s.q)] for k in range(4))
    product = tiles.dot(
        tiles.zeros((s.q, s.q)), tiles.Shared(dy_s), tiles.Shared(x_s, transpose=True)
    )
    dscores = product * (tiles.pair_decay(coarse, fine) * tiles.across(dt, scores.shape))
    # An overflow between foreign tokens is replaced, not multiplied, by zero.
    pairs = jnp.where(tiles.earlier(start, s.q), dscores * scores, 0.0)
    r_s = x_s.at[:, :, ds(0, s.q)]
    tiles.save(r_s, tiles.split(pairs, s.parts))
    mosaic.smem_written()
    below = tiles.dot(tiles.zeros(scores.shape), tiles.at_or_after(s.q), tiles.Shared(r_s))
    crossing = jnp.where(tiles.earlier(start, s.q, strict=True), below, 0.0)
    return dscores, jnp.sum(crossing, axis=1)


def _from_state(dy_s, h_s, c_s, v_s, s):
    """(dC of one head by way of the state, and its product with C)."""
    from_start = v_s.at[ds(0, s.q)]
    parts, read = [], 0.0
    for columns in tiles.halves(s.n):
        acc = tiles.zeros((s.q, columns.size))
        acc = tiles.dot(acc, tiles.Shared(dy_s), tiles.Shared(h_s.at[:, :, columns]))
        acc = tiles.scale_rows(tiles.down(from_start, acc.shape), acc)
        parts.append(acc)
        C = tiles.load(c_s.at[:, :, columns], tiles.ACC)
        read = read + jnp.sum(acc * C, axis=1)
    return parts, read


def writer_gradients(
    x, dy, B, C, vectors, dstates, dscores, D, doc_end, sizes: Sizes, dtype
):
    """Gradients at the token that is read.

    Args:
        x, dy: (parts·B·L, H·P) bfloat16.
        B, C: (parts·B·L, G·N) bfloat16.
        vectors: (B·H·C·5·Q,) float32, see `decay_vectors`.
        dstates: (parts·B·C·H·P, N) bfloat16, gradient of the state leaving each chunk.
        dscores: (parts·K·B·L, Q) bfloat16, from `reader_gradients`.
        D: (H·P,) float32.
        doc_end: (B·L,) int32, where in the chunk the token's document ends.

    Returns:
        (dx (B·L, H·P) in `dtype`; dB (K·B·L, N) float32;
        terms (B·H·C·2·Q,) float32: x·u, and what token j adds to the state;
        dD (B·C, H·P) float32, by chunk).
    """
    s = sizes
    heads = heads_per_block(s)
    scratch = {
        "b_s": tiles.scratch(s.parts, s.q, s.n),
        # C while it is multiplied, else the gradient of one head's state.
        "h_s": tiles.scratch(s.parts, max(s.p, s.q), s.n),
        "x_s": tiles.scratch(s.parts, s.q, s.p),
        "dy_s": tiles.scratch(s.parts, s.q, s.p),
        "v_s": plgpu.SMEM((4 * s.q,), jnp.float32),
        **tiles.barrier(2 * s.parts),
        **tiles.barrier(3 * s.parts + 1, name="head_bar"),
        **tiles.barrier(2 * s.parts, name="last_bar"),
    }
    body = functools.partial(_writer, s=s, heads=heads)
    body.__name__ = "ssd_writer_gradients"
    blocks = s.h // heads
    run = mosaic.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((s.tokens, s.h * s.p), dtype),
            jax.ShapeDtypeStruct((blocks * s.tokens, s.n), jnp.float32),
            jax.ShapeDtypeStruct((s.b * s.h * s.c * 2 * s.q,), jnp.float32),
            jax.ShapeDtypeStruct((s.b * s.c * s.h * s.p,), jnp.float32),
        ),
        grid=(blocks, s.c, s.b),
        grid_names=("block", "chunk", "b"),
        scratch_types=scratch,
        compiler_params=mosaic.LANE,
    )
    return run(x, dy, B, C, vectors, dstates, dscores, D, doc_end)


def _writer(
    x_g,
    dy_g,
    b_g,
    c_g,
    v_g,
    h_g,
    dg_g,
    d_g,
    end_g,
    dx_g,
    db_g,
    terms_g,
    dd_g,
    *,
    s,
    heads,
    **scratch,
):
    b_s, h_s, x_s, dy_s, v_s = (
        scratch[k] for k in ("b_s", "h_s", "x_s", "dy_s", "v_s")
    )
    at = Block.here(s, heads)
    c_s, head_h = h_s.at[:, ds(0, s.q)], h_s.at[:, ds(0, s.p)]
    copies = tiles.Copies(scratch.get("bar"))
    for part in range(s.parts):
        copies.start(b_g.at[at.rows(part), at.maps], b_s.at[part])
        copies.start(c_g.at[at.rows(part), at.maps], c_s.at[part])
    copies.wait()
    scores = tiles.scores(b_s, c_s, tiles.later(end_g.at[at.rows(0)], s.q))
    copies = tiles.Copies(scratch.get("head_bar"))

    def one(i, dB):
        head = at.block * heads + i
        columns = ds(head * s.p, s.p)
        mosaic.smem_written()
        for part in range(s.parts):
            copies.start(x_g.at[at.rows(part), columns], x_s.at[part])
            copies.start(dy_g.at[at.rows(part), columns], dy_s.at[part])
            copies.start(h_g.at[at.state(part, head)], head_h.at[part])
        copies.start(v_g.at[at.vector(head, COARSE, 4, COUNT)], v_s)
        copies.wait()
        _, _, dt, to_end = (v_s.at[ds(k * s.q, s.q)] for k in range(4))
        dB = tuple(
            acc + _to_state(x_s, head_h.at[:, :, w], dt, to_end)
            for acc, w in zip(dB, tiles.halves(s.n), strict=True)
        )
        u, left = _input_gradient(scores, b_s, head_h, dy_s, v_s, s)
        x, dy = tiles.load(x_s, tiles.ACC), tiles.load(dy_s, tiles.ACC)
        terms_g[at.vector(head, 0, 1, 2)] = jnp.sum(x * u, axis=1)
        terms_g[at.vector(head, 1, 1, 2)] = jnp.sum(x * left, axis=1)
        chunk = at.b * s.c + at.chunk
        dd_g[ds(chunk * s.h * s.p + head * s.p, s.p)] = jnp.sum(x * dy, axis=0)
        dx = tiles.down(dt, u.shape) * u + tiles.across(d_g.at[columns], u.shape) * dy
        tiles.store(dx_g.at[at.rows(0), columns], dx, x_s)
        return dB

    dB = tuple(tiles.zeros((s.q, w.size)) for w in tiles.halves(s.n))
    dB = lax.fori_loop(0, heads, one, dB)
    mosaic.smem_written()
    copies = tiles.Copies(scratch.get("last_bar"))
    dscores = x_s.at[:, :, ds(0, s.q)]
    for part in range(s.parts):
        copies.start(c_g.at[at.rows(part), at.maps], c_s.at[part])
        copies.start(dg_g.at[at.block_rows(part)], dscores.at[part])
    copies.wait()
    for columns, acc in zip(tiles.halves(s.n), dB, strict=True):
        maps = tiles.Shared(c_s.at[:, :, columns])
        acc = tiles.dot(acc, tiles.Shared(dscores, transpose=True), maps, step=32)
        db_g[at.block_rows(0), columns] = acc


def _to_state(x_s, h_s, dt, to_end):
    """Some columns of dB of one head by way of the state."""
    acc = tiles.zeros((x_s.shape[1], h_s.shape[2]))
    acc = tiles.dot(acc, tiles.Shared(x_s), tiles.Shared(h_s))
    acc = tiles.scale_rows(tiles.down(to_end, acc.shape), acc)
    return tiles.down(dt, acc.shape) * acc


def _input_gradient(scores, b_s, h_s, dy_s, v_s, s):
    """(u = dL/d(dt·x), and of it what comes by way of the state)."""
    coarse, fine, _, to_end = (v_s.at[ds(k * s.q, s.q)] for k in range(4))
    weights = scores * tiles.pair_decay(coarse, fine, transpose=True)
    weights = tiles.as_lhs(tiles.split(weights, s.parts))
    shape = (s.q, s.p)
    left = tiles.dot(
        tiles.zeros(shape), tiles.Shared(b_s), tiles.Shared(h_s, transpose=True)
    )
    left = tiles.scale_rows(tiles.down(to_end, shape), left)
    return tiles.dot(left, weights, tiles.Shared(dy_s), step=32), left
