"""Gradient of C, or of B: what one chunk and one block of heads add to it.

dC_i = from_start_i stateᵀ dy_i + sum_j dscores_ij B_j, in sum over the heads; and
dB_j = to_end_j dt_j dstateᵀ x_j + sum_i dscores_ij C_i: one form, roles exchanged.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.mosaic import plgpu
from pallas_kernels.ssd import tiles
from pallas_kernels.ssd.decay_vectors import COUNT, DT, FROM_START
from pallas_kernels.ssd.layout import Block, Sizes, heads_per_block

ds = mosaic.pl.ds


def map_gradient(t, own, other, vectors, states, dscores, sizes: Sizes, *, of: str):
    """dC by block of heads, and its share in the decay's gradient; or those of B.

    Args:
        t: (parts·B·L, H·P) bfloat16, dy (for B: x).
        own, other: (parts·B·L, G·N) bfloat16, C and B (B and C).
        vectors: (B·H·C·5·Q,) float32, see `decay_vectors`.
        states: (parts·B·C·H·P, N) bfloat16, entering each chunk (gradient of those
            leaving it).
        dscores: (parts·K·B·L, Q) bfloat16, from `pair_gradients`.
        of: "C" or "B".

    Returns:
        (gradient (K·B·L, N) float32,
        terms (B·H·C·Q,) float32: own_i times what comes by way of the state).
    """
    s = sizes
    heads = heads_per_block(s)
    scratch = {
        "own_s": tiles.scratch(s.parts, s.q, s.n),
        "h_s": tiles.scratch(s.parts, max(s.p, s.q), s.n),
        # One head's tokens after the other, at the end dscores.
        "union_s": plgpu.RefUnion(
            tiles.scratch(s.parts, s.q, s.p), tiles.scratch(s.parts, s.q, s.q)
        ),
        "v_s": plgpu.SMEM((2 * s.q,), jnp.float32),
        **tiles.barrier(s.parts),
        **tiles.barrier(2 * s.parts + 1, name="head_bar"),
        **tiles.barrier(2 * s.parts, name="last_bar"),
    }
    body = functools.partial(_body, s=s, heads=heads, of=of)
    body.__name__ = f"ssd_gradient_of_{of}"
    blocks = s.h // heads
    run = mosaic.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((blocks * s.tokens, s.n), jnp.float32),
            jax.ShapeDtypeStruct((s.b * s.h * s.c * s.q,), jnp.float32),
        ),
        grid=(blocks, s.c, s.b),
        grid_names=("block", "chunk", "b"),
        scratch_types=scratch,
        compiler_params=mosaic.LANE,
    )
    return run(t, own, other, vectors, states, dscores)


def _body(*refs, s, heads, of, **scratch):
    t_g, own_g, other_g, v_g, h_g, dg_g, out_g, terms_g = refs
    own_s, h_s, v_s = (scratch[name] for name in ("own_s", "h_s", "v_s"))
    t_s, dscores = scratch["union_s"]
    at = Block.here(s, heads)
    other_s, head_h = h_s.at[:, ds(0, s.q)], h_s.at[:, ds(0, s.p)]
    first = FROM_START if of == "C" else DT
    copies = tiles.Copies(scratch.get("bar"))
    for part in range(s.parts):
        copies.start(own_g.at[at.rows(part), at.maps], own_s.at[part])
    copies.wait()
    copies = tiles.Copies(scratch.get("head_bar"))

    def one(i, gradient):
        head = at.block * heads + i
        mosaic.smem_written()
        for part in range(s.parts):
            columns = ds(head * s.p, s.p)
            copies.start(t_g.at[at.rows(part), columns], t_s.at[part])
            copies.start(h_g.at[at.state(part, head)], head_h.at[part])
        copies.start(v_g.at[at.vector(head, first, 2, COUNT)], v_s)
        copies.wait()
        out, terms = [], 0.0
        for columns, acc in zip(tiles.pieces(s.n), gradient, strict=True):
            new = _by_state(t_s, head_h.at[:, :, columns], v_s, s, of)
            own = tiles.load(own_s.at[:, :, columns], tiles.ACC)
            terms = terms + jnp.sum(new * own, axis=1)
            out.append(acc + new)
        terms_g[at.vector(head, 0, 1, 1)] = terms
        return tuple(out)

    zeros = tuple(tiles.zeros((s.q, w.size)) for w in tiles.pieces(s.n))
    gradient = lax.fori_loop(0, heads, one, zeros)
    mosaic.smem_written()
    copies = tiles.Copies(scratch.get("last_bar"))
    for part in range(s.parts):
        copies.start(other_g.at[at.rows(part), at.maps], other_s.at[part])
        copies.start(dg_g.at[at.block_rows(part)], dscores.at[part])
    copies.wait()
    dscores = tiles.Shared(dscores, transpose=of == "B")
    for columns, acc in zip(tiles.pieces(s.n), gradient, strict=True):
        acc = tiles.dot(acc, dscores, tiles.Shared(other_s.at[:, :, columns]))
        out_g[at.block_rows(0), columns] = acc


def _by_state(t_s, h_s, v_s, s, of):
    """Some columns of the gradient of one head by way of the state."""
    acc = tiles.zeros((s.q, h_s.shape[2]))
    acc = tiles.dot(acc, tiles.Shared(t_s), tiles.Shared(h_s))
    if of == "C":
        return tiles.scale_rows(tiles.down(v_s.at[ds(0, s.q)], acc.shape), acc)
    acc = tiles.scale_rows(tiles.down(v_s.at[ds(s.q, s.q)], acc.shape), acc)
    return tiles.down(v_s.at[ds(0, s.q)], acc.shape) * acc
