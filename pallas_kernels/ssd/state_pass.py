"""The state entering each chunk, one chunk after the other; or its gradient, backwards.

state_out = through · state_in + sum_j weight_j x_j B_jᵀ, with the weight to_end·dt. In
reverse x is dy, B is C, the weight is from_start, and "entering" is "from the right".
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.mosaic import plgpu
from pallas_kernels.ssd import tiles
from pallas_kernels.ssd.decay_vectors import COUNT, DT, FROM_START
from pallas_kernels.ssd.layout import Sizes

ds = mosaic.pl.ds
# Chunks in shared memory: one being worked on, one on its way.
_SLOTS = 2


def state_pass(x, B, vectors, through, start, sizes: Sizes):
    """States between chunks, from the first to the last.

    Args:
        x: (parts·B·L, H·P) bfloat16.
        B: (parts·B·L, G·N) bfloat16.
        vectors: (B·H·C·5·Q,) float32, see `decay_vectors`.
        through: (B·H·C,) float32, decay across each chunk.
        start: (B·H·P, N) float32.

    Returns:
        (states (parts·B·C·H·P, N) bfloat16: what enters each chunk,
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
        (dstates (parts·B·C·H·P, N) bfloat16: of what leaves each chunk,
        dstart (B·H·P, N) float32,
        passed (K·B·H·C·P,) float32: of the log decay's gradient, what crosses the whole
        chunk; to be summed over P and the K pieces of N).
    """
    return _run(sizes, True, dy, C, vectors, through, dfinal, states)


def _run(s, reverse, *operands):
    columns = state_columns(s.n, s.parts)
    scratch = {
        "x_s": tiles.scratch(s.parts, s.q, s.p, _SLOTS),
        "m_s": tiles.scratch(s.parts, s.q, columns, _SLOTS),
        "v_s": plgpu.SMEM((_SLOTS, 2 * s.q), jnp.float32),
        "out_s": tiles.scratch(s.parts, s.p, columns),
        **tiles.barrier(_copies(s, reverse), _SLOTS),
    }
    out = [
        jax.ShapeDtypeStruct((s.parts * s.b * s.c * s.h * s.p, s.n), tiles.HALF),
        jax.ShapeDtypeStruct((s.b * s.h * s.p, s.n), jnp.float32),
    ]
    blocks = s.n // columns
    if reverse:
        scratch["h_s"] = tiles.scratch(s.parts, s.p, columns, _SLOTS)
        size = blocks * s.b * s.h * s.c * s.p
        out.append(jax.ShapeDtypeStruct((size,), jnp.float32))
    body = functools.partial(_body, s=s, columns=columns, reverse=reverse)
    body.__name__ = "ssd_state_gradients" if reverse else "ssd_state_pass"
    run = mosaic.kernel(
        body,
        out_type=out,
        grid=(blocks, s.h, s.b),
        grid_names=("n", "h", "b"),
        scratch_types=scratch,
        compiler_params=mosaic.LANE,
    )
    return run(*operands)


def state_columns(n: int, parts: int) -> int:
    """Columns of the state that one thread block carries: small, so that many run."""
    return next(c for c in (64 // parts, 48 // parts, 16) if n % c == 0)


def _copies(s, reverse):
    return (3 if reverse else 2) * s.parts + 1


def _body(*refs, s, columns, reverse, x_s, m_s, v_s, out_s, h_s=None, bar=None):
    x_g, m_g, v_g, through_g, start_g, *refs = refs
    h_g = refs.pop(0) if reverse else None
    states_g, last_g, *passed_g = refs
    b, h, n = (lax.axis_index(name) for name in ("b", "h", "n"))
    group, column = lax.div(h, s.heads_per_group), ds(n * columns, columns)
    own_rows = ds((b * s.h + h) * s.p, s.p)

    def chunk_of(step):
        return s.c - 1 - step if reverse else step

    def state_rows(part, chunk):
        return ds((((part * s.b + b) * s.c + chunk) * s.h + h) * s.p, s.p)

    def fetch(step, slot):
        chunk = chunk_of(lax.min(step, s.c - 1))
        copies = tiles.Copies.of(bar, slot)
        mosaic.smem_written()
        for part in range(s.parts):
            rows = ds(((part * s.b + b) * s.c + chunk) * s.q, s.q)
            copies.start(x_g.at[rows, ds(h * s.p, s.p)], x_s.at[slot, part])
            maps = m_g.at[rows, ds(group * s.n + n * columns, columns)]
            copies.start(maps, m_s.at[slot, part])
            if reverse:
                entering = h_g.at[state_rows(part, chunk), column]
                copies.start(entering, h_s.at[slot, part])
        first = ((b * s.h + h) * s.c + chunk) * COUNT + (FROM_START if reverse else DT)
        copies.start(v_g.at[ds(first * s.q, 2 * s.q)], v_s.at[slot])

    def one(step, state):
        slot = lax.rem(step, _SLOTS)
        fetch(step + 1, _SLOTS - 1 - slot)
        tiles.Copies.of(bar, slot).wait(_copies(s, reverse))
        chunk = chunk_of(step)
        tiles.save(out_s, tiles.split(state, s.parts))
        for part in range(s.parts):
            tiles.copy_out(states_g.at[state_rows(part, chunk), column], out_s.at[part])
        at = (b * s.h + h) * s.c + chunk
        decay = through_g[at]
        # Not multiplied by zero: a foreign state may have overflowed.
        state = jnp.where(decay > 0, decay * state, 0.0)
        if reverse:
            entering = tiles.load(h_s.at[slot], tiles.ACC)
            # Where nothing passes the state entering may have overflowed too.
            passed = jnp.where(decay > 0, state * entering, 0.0)
            at = (n * s.b * s.h * s.c + at) * s.p
            passed_g[0][ds(at, s.p)] = jnp.sum(passed, axis=1)
        weighted = _weighted(x_s.at[slot], v_s.at[slot], s, reverse)
        return tiles.dot(state, weighted, tiles.Shared(m_s.at[slot]))

    fetch(0, 0)
    state = plgpu.load(start_g.at[own_rows, column], layout=tiles.ACC, optimized=False)
    state = lax.fori_loop(0, s.c, one, state)
    last_g[own_rows, column] = state
    tiles.Copies.of(bar, s.c % _SLOTS).wait()


def _weighted(x_s, v_s, s, reverse):
    """(weight · x)ᵀ, (P, Q), as the left operand."""
    shape = (s.p, s.q)
    x = tiles.load(x_s, tiles.LHS, transpose=True)
    weight = tiles.across(v_s.at[ds(0, s.q)], shape, tiles.LHS)
    if not reverse:
        weight = weight * tiles.across(v_s.at[ds(s.q, s.q)], shape, tiles.LHS)
    return tiles.split(weight * x, s.parts)
