"""Gradients of the inputs of the scan.

One chunk and one block of heads to a thread block. The weights are formed transposed,
(j, i): then nothing needs to be transposed for dx.
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
_COLUMNS = 32


def input_gradients(
    x, dy, B, C, vectors, dstates, D, doc_end, order, sizes: Sizes, dtype
):
    """dx, and what falls out on the way.

    Args:
        x, dy: (parts·B·L, H·P) bfloat16.
        B, C: (parts·B·L, G·N) bfloat16.
        vectors: (B·H·C·5·Q,) float32, see `decay_vectors`.
        dstates: (parts·B·C·H·P, N) bfloat16, gradient of the state leaving each chunk.
        D: (H·P,) float32.
        doc_end: (B·L,) int32, where in the chunk the token's document ends.
        order: (Q,) int32, 0, 1, ...

    Returns:
        (dx (B·L, H·P) in `dtype`;
        direct (B·H·C·Q,) float32: x·u, the gradient of dt but for the decay;
        dD (B·C·H·P,) float32, by chunk).
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
    }
    body = functools.partial(_body, s=s, heads=heads)
    body.__name__ = "ssd_input_gradients"
    run = mosaic.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((s.tokens, s.h * s.p), dtype),
            jax.ShapeDtypeStruct((s.b * s.h * s.c * s.q,), jnp.float32),
            jax.ShapeDtypeStruct((s.b * s.c * s.h * s.p,), jnp.float32),
        ),
        grid=(s.h // heads, s.c, s.b),
        grid_names=("block", "chunk", "b"),
        scratch_types=scratch,
        compiler_params=mosaic.LANE,
    )
    return run(x, dy, B, C, vectors, dstates, D, doc_end, order)


def _body(*refs, s, heads, **scratch):
    x_g, dy_g, b_g, c_g, v_g, h_g, d_g, end_g, order_g, *outputs = refs
    dx_g, direct_g, dd_g = outputs
    b_s, h_s, x_s, dy_s, v_s = (
        scratch[name] for name in ("b_s", "h_s", "x_s", "dy_s", "v_s")
    )
    at = Block.here(s, heads)
    c_s, head_h = h_s.at[:, ds(0, s.q)], h_s.at[:, ds(0, s.p)]
    copies = tiles.Copies(scratch.get("bar"))
    for part in range(s.parts):
        copies.start(b_g.at[at.rows(part), at.maps], b_s.at[part])
        copies.start(c_g.at[at.rows(part), at.maps], c_s.at[part])
    copies.wait()
    end, readers = end_g.at[at.rows(0)], tiles.pieces(s.q, _COLUMNS)
    scores = [
        tiles.scores(b_s, c_s.at[:, i], tiles.later(order_g, end, i)) for i in readers
    ]
    copies = tiles.Copies(scratch.get("head_bar"))

    def one(k, _):
        head = at.block * heads + k
        channels = ds(head * s.p, s.p)
        mosaic.smem_written()
        for part in range(s.parts):
            copies.start(x_g.at[at.rows(part), channels], x_s.at[part])
            copies.start(dy_g.at[at.rows(part), channels], dy_s.at[part])
            copies.start(h_g.at[at.state(part, head)], head_h.at[part])
        copies.start(v_g.at[at.vector(head, COARSE, 4, COUNT)], v_s)
        copies.wait()
        u = _from_state(b_s, head_h, v_s, s)
        for n, i in enumerate(readers):
            weights = _weights(scores[n], v_s, i, s)
            u = tiles.dot(u, weights, tiles.Shared(dy_s.at[:, i]))
        x, dy = tiles.load(x_s, tiles.ACC), tiles.load(dy_s, tiles.ACC)
        direct_g[at.vector(head, 0, 1, 1)] = jnp.sum(x * u, axis=1)
        first = (at.b * s.c + at.chunk) * s.h * s.p + channels.start
        dd_g[ds(first, s.p)] = jnp.sum(x * dy, axis=0)
        dt, skip = v_s.at[ds(2 * s.q, s.q)], d_g.at[channels]
        dx = tiles.down(dt, u.shape) * u + tiles.across(skip, u.shape) * dy
        tiles.store(dx_g.at[at.rows(0), channels], dx, x_s)

    lax.fori_loop(0, heads, one, None)


def _from_state(b_s, h_s, v_s, s):
    """What of u = dL/d(dt·x) comes by way of the state."""
    shape = (s.q, h_s.shape[1])
    left = tiles.dot(tiles.zeros(shape), tiles.Shared(b_s), tiles.Shared(h_s, True))
    return tiles.scale_rows(tiles.down(v_s.at[ds(3 * s.q, s.q)], shape), left)


def _weights(scores, v_s, i, s):
    """exp(l_i - l_j) C_i·B_j at (j, i) for readers i, as a left operand."""
    coarse, fine = (v_s.at[ds(k * s.q, s.q)] for k in range(2))
    weights = scores * tiles.pair_decay_transposed(coarse, fine, i)
    return tiles.as_lhs(tiles.split(weights, s.parts))
