"""The state entering each chunk, one chunk after the other; or its gradient, backwards.

state_out = through · state_in + sum_j weight_j x_j B_jᵀ, with the weight to_end·dt. In
reverse x is dy, B is C, the weight is from_start, and "entering" is "from the right".
One warpgroup carries the state of a head in float32 registers.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.mosaic import plgpu
from pallas_kernels.ssd.decay_vectors import COUNT, DT, FROM_START
from pallas_kernels.ssd.hopper import tiles
from pallas_kernels.ssd.layout import Sizes
from pallas_kernels.wgmma import ACC, ROWS, dot

ds = mosaic.pl.ds
# Thread blocks that an H200 runs at once, one a multiprocessor.
_BLOCKS = 128


def state_pass(x, B, vectors, through, start, sizes: Sizes):
    """States between chunks, from the first to the last.

    Args:
        x: (B·L, H·P) bfloat16.
        B: (B·L, G·N) bfloat16.
        vectors: (B·H·C·5·Q,) float32, see `decay_vectors`.
        through: (B·H·C,) float32, decay across each chunk.
        start: (B·H·P, N) float32.

    Returns:
        (states (B·C·H·P, N) bfloat16: what enters each chunk,
        final (B·H·P, N) float32).
    """
    return _run(sizes, False, x, B, vectors, through, start)


def state_gradients(dy, C, vectors, through, dfinal, states, sizes: Sizes):
    """Gradients of the states, from the last to the first.

    Args:
        dy, C, vectors, through: as x, B, ... of `state_pass`.
        dfinal: (B·H·P, N) float32, gradient of the final state.
        states: what `state_pass` returned.

    Returns:
        (dstates (B·C·H·P, N) bfloat16: of what leaves each chunk,
        dstart (B·H·P, N) float32,
        passed (K·B·H·C·P,) float32: of the log decay's gradient, what crosses the whole
        chunk; to be summed over P and the K pieces of N).
    """
    return _run(sizes, True, dy, C, vectors, through, dfinal, states)


def _run(s, reverse, *operands):
    columns = s.n if s.b * s.h >= _BLOCKS else ROWS
    # Backwards more is read for a chunk, and one thread block fills a multiprocessor.
    slots = 3 if reverse else 2
    scratch = {
        "x_s": tiles.tile(s.q, s.p, slots),
        "m_s": tiles.tile(s.q, columns, slots),
        "v_s": plgpu.SMEM((slots, 2 * s.q), jnp.float32),
        # Small, so that two thread blocks of `state_pass` share a multiprocessor.
        "out_s": tiles.tile(s.p, ROWS),
        "full": plgpu.Barrier(num_arrivals=4 if reverse else 3, num_barriers=slots),
        "free": plgpu.Barrier(num_arrivals=1, num_barriers=slots),
    }
    out = [
        jax.ShapeDtypeStruct((s.b * s.c * s.h * s.p, s.n), tiles.HALF),
        jax.ShapeDtypeStruct((s.b * s.h * s.p, s.n), jnp.float32),
    ]
    blocks = s.n // columns
    if reverse:
        scratch["h_s"] = tiles.tile(s.p, columns, slots)
        size = blocks * s.b * s.h * s.c * s.p
        out.append(jax.ShapeDtypeStruct((size,), jnp.float32))
    body = functools.partial(_body, s=s, columns=columns, reverse=reverse)
    body.__name__ = f"ssd_hopper_state_{'gradients' if reverse else 'pass'}"
    run = mosaic.kernel(
        body,
        out_type=out,
        grid=(blocks, s.h, s.b),
        grid_names=("n", "h", "b"),
        num_threads=1,
        thread_name=tiles.THREAD,
        scratch_types=scratch,
        compiler_params=tiles.PARAMS,
    )
    return run(*operands)


def _body(*refs, s, columns, reverse, **scratch):
    x_g, m_g, v_g, through_g, start_g, *refs = refs
    h_g = refs.pop(0) if reverse else None
    states_g, last_g, *passed_g = refs
    x_s, m_s, v_s = (scratch[name] for name in ("x_s", "m_s", "v_s"))
    b, h, n = (lax.axis_index(name) for name in ("b", "h", "n"))
    group, column = lax.div(h, s.heads_per_group), ds(n * columns, columns)
    own_rows = ds((b * s.h + h) * s.p, s.p)

    def chunk_of(step):
        return s.c - 1 - step if reverse else step

    def state_rows(chunk):
        return ds(((b * s.c + chunk) * s.h + h) * s.p, s.p)

    def start_copies(step, slot):
        chunk, bar = chunk_of(step), scratch["full"].at[slot]
        rows = ds((b * s.c + chunk) * s.q, s.q)
        tiles.fetch(x_g.at[rows, ds(h * s.p, s.p)], x_s.at[slot], bar)
        maps = m_g.at[rows, ds(group * s.n + n * columns, columns)]
        tiles.fetch(maps, m_s.at[slot], bar)
        if reverse:
            entering = h_g.at[state_rows(chunk), column]
            tiles.fetch(entering, scratch["h_s"].at[slot], bar)
        first = ((b * s.h + h) * s.c + chunk) * COUNT + (FROM_START if reverse else DT)
        tiles.fetch(v_g.at[ds(first * s.q, 2 * s.q)], v_s.at[slot], bar)

    def one(step, slot, state):
        chunk = chunk_of(step)
        for piece in tiles.pieces(columns):
            place = ds(column.start + piece.start, piece.size)
            part = state[:, piece.start : piece.start + piece.size]
            tiles.put(states_g.at[state_rows(chunk), place], part, scratch["out_s"])
        at = (b * s.h + h) * s.c + chunk
        decay = through_g[at]
        # Not multiplied by zero: a foreign state may have overflowed.
        state = jnp.where(decay > 0, decay * state, 0.0)
        if reverse:
            entering = tiles.load(scratch["h_s"].at[slot])
            # Where nothing passes the state entering may have overflowed too.
            passed = jnp.where(decay > 0, state * entering, 0.0)
            at = (n * s.b * s.h * s.c + at) * s.p
            passed_g[0][ds(at, s.p)] = jnp.sum(passed, axis=1)
        weighted = _weighted(x_s.at[slot], v_s.at[slot], s, reverse)
        return dot(weighted, m_s.at[slot], state)

    state = plgpu.load(start_g.at[own_rows, column], layout=ACC, optimized=False)
    state = tiles.for_each(
        s.c, start_copies, one, scratch["full"], scratch["free"], state
    )
    last_g[own_rows, column] = state
    plgpu.wait_smem_to_gmem(0)


def _weighted(x_s, v_s, s, reverse):
    """(weight · x)ᵀ, (P, Q), as a left operand."""
    x = tiles.load(mosaic.transposed(x_s))
    weight = tiles.across(v_s.at[ds(0, s.q)], s.p)
    if not reverse:
        weight = weight * tiles.across(v_s.at[ds(s.q, s.q)], s.p)
    return (weight * x).astype(tiles.HALF)
