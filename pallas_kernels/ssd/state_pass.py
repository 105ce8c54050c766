"""The state entering each chunk, one chunk after the other; or, reversed, its gradient.

state_out = through · state_in + sum_j weight_j x_j B_jᵀ. Forward the weight is to_end·dt;
in reverse x is dy, B is C, the weight is from_start, and "entering" is "from the right".
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

_SLOTS = 2


def state_pass(x, maps, vectors, through, start, sizes: Sizes, *, reverse: bool):
    """States between chunks.

    Args:
        x: (parts·B·L, H·P) bfloat16, x or its gradient.
        maps: (parts·B·L, G·N) bfloat16, B or C.
        vectors: (B·H·C·5·Q,) float32, see `decay_vectors`.
        through: (B·H·C,) float32, decay across each chunk.
        start: (B·H·P, N) float32, the state at the start (or the end).

    Returns:
        (states (parts·B·C·H·P, N) bfloat16: what enters each chunk,
        last (B·H·P, N) float32).
    """
    s = sizes
    columns = state_columns(s.n, s.parts)
    scratch = {
        "x_s": _ring(s.parts, s.q, s.p),
        "m_s": _ring(s.parts, s.q, columns),
        "v_s": plgpu.SMEM((_SLOTS, 2 * s.q), jnp.float32),
        "out_s": tiles.scratch(s.parts, s.p, columns),
        **tiles.barrier(2 * s.parts + 1, _SLOTS),
    }
    body = functools.partial(_body, s=s, columns=columns, reverse=reverse)
    body.__name__ = "ssd_state_pass"
    run = mosaic.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((s.parts * s.b * s.c * s.h * s.p, s.n), tiles.HALF),
            jax.ShapeDtypeStruct((s.b * s.h * s.p, s.n), jnp.float32),
        ),
        grid=(s.n // columns, s.h, s.b),
        grid_names=("n", "h", "b"),
        scratch_types=scratch,
        compiler_params=mosaic.LANE,
    )
    return run(x, maps, vectors, through, start)


def state_columns(n: int, parts: int) -> int:
    """Columns of the state that one thread block carries: small, so that many run."""
    return next(c for c in (64 // parts, 48 // parts, 16) if n % c == 0)


def _ring(parts, rows, columns):
    shape = (rows, columns)
    transforms = mosaic.transforms(shape, tiles.HALF)
    return plgpu.SMEM((_SLOTS, parts, *shape), tiles.HALF, transforms=transforms)


def _body(
    x_g,
    m_g,
    v_g,
    through_g,
    start_g,
    states_g,
    last_g,
    *,
    x_s,
    m_s,
    v_s,
    out_s,
    s,
    columns,
    reverse,
    bar=None,
):
    b, h, n = (lax.axis_index(name) for name in ("b", "h", "n"))
    group = lax.div(h, s.heads_per_group)
    column = pl_ds(n * columns, columns)
    head_rows = (b * s.h + h) * s.p
    first = FROM_START if reverse else DT
    in_flight = 2 * s.parts + 1

    def chunk_of(step):
        return s.c - 1 - step if reverse else step

    def fetch(step, slot):
        chunk = chunk_of(lax.min(step, s.c - 1))
        copies = tiles.Copies(None if bar is None else bar.at[slot])
        mosaic.smem_written()
        for part in range(s.parts):
            rows = pl_ds(((part * s.b + b) * s.c + chunk) * s.q, s.q)
            copies.start(x_g.at[rows, pl_ds(h * s.p, s.p)], x_s.at[slot, part])
            maps = m_g.at[rows, pl_ds(group * s.n + n * columns, columns)]
            copies.start(maps, m_s.at[slot, part])
        at = ((b * s.h + h) * s.c + chunk) * COUNT * s.q + first * s.q
        copies.start(v_g.at[pl_ds(at, 2 * s.q)], v_s.at[slot])

    def one(step, state):
        slot = lax.rem(step, _SLOTS)
        fetch(step + 1, _SLOTS - 1 - slot)
        tiles.Copies(None if bar is None else bar.at[slot]).wait(in_flight)
        chunk = chunk_of(step)
        tiles.save(out_s, tiles.split(state, s.parts))
        for part in range(s.parts):
            row = ((part * s.b + b) * s.c + chunk) * s.h * s.p + h * s.p
            mosaic.store_tile(states_g.at[pl_ds(row, s.p), column], out_s.at[part])
        decay = through_g[(b * s.h + h) * s.c + chunk]
        # Not multiplied by zero: a foreign state may have overflowed.
        state = jnp.where(decay > 0, decay * state, 0.0)
        weighted = _weighted(x_s.at[slot], v_s.at[slot], s, reverse)
        return tiles.dot(state, weighted, tiles.Shared(m_s.at[slot]))

    start = start_g.at[pl_ds(head_rows, s.p), column]
    state = plgpu.load(start, layout=tiles.ACC, optimized=False)
    fetch(0, 0)
    state = lax.fori_loop(0, s.c, one, state)
    last_g[pl_ds(head_rows, s.p), column] = state
    unread = s.c % _SLOTS
    tiles.Copies(None if bar is None else bar.at[unread]).wait()


def _weighted(x_s, v_s, s, reverse):
    """(weight · x)ᵀ, (P, Q), as the left operand."""
    shape = (s.p, s.q)
    x = tiles.load(x_s, tiles.LHS, transpose=True)
    weight = tiles.across(v_s.at[pl_ds(0, s.q)], shape, tiles.LHS)
    if not reverse:
        weight = weight * tiles.across(v_s.at[pl_ds(s.q, s.q)], shape, tiles.LHS)
    return tiles.split(weight * x, s.parts)


pl_ds = mosaic.pl.ds
