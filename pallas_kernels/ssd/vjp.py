"""The chunked scan with its hand-written gradient: what is saved, what is recomputed.

Saved: the inputs as they came, and the state entering each chunk. Recomputed, chunk by
chunk in one reverse scan: decays, scores and weights.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ssd.chunk import chunk_backward, chunk_forward
from pallas_kernels.ssd.decays import make_masks
from pallas_kernels.ssd.reference import wide_dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(8,))
def ssd_chunked(x, dt, A, B, C, D, run, initial_state, chunk_size):
    """(y, final state); D is (H, P) or None, run (B, L) run numbers or None."""
    y, final_state, _ = _forward(
        x, dt, A, B, C, D, run, initial_state, chunk_size, keep_states=False
    )
    return y, final_state


def _ssd_fwd(x, dt, A, B, C, D, run, initial_state, chunk_size):
    y, final_state, states = _forward(
        x, dt, A, B, C, D, run, initial_state, chunk_size, keep_states=True
    )
    # initial_state is kept for its dtype only; XLA drops an argument nobody reads.
    return (y, final_state), (x, dt, A, B, C, D, run, initial_state, states)


def _ssd_bwd(chunk_size, saved, cotangents):
    x, dt, A, B, C, D, run, initial_state, states = saved
    dy, dfinal = cotangents
    wide, size = states.dtype, _size(x, B, chunk_size)
    A_wide, D_wide = _wide(A, wide), _wide(D, wide)
    inputs = [pad_to_chunks(t, size) for t in (dy, x, dt, B, C)]

    def one(carry, chunk):
        dstate, sums, grads = carry
        index, state, run_c = chunk
        masks = make_masks(*(run_c or (None, None)), size)
        dy_c, x_c, dt_c, *maps = (_chunk(t, index, size).astype(wide) for t in inputs)
        dstate, new_grads, new = chunk_backward(
            dstate, state, dy_c, x_c, dt_c, A_wide, *maps, D_wide, masks
        )
        pairs = zip(grads, new_grads, strict=True)
        grads = tuple(_put(whole, part, index) for whole, part in pairs)
        return (dstate, jax.tree.map(jnp.add, sums, new), grads), None

    zeros = (jnp.zeros_like(A_wide), None if D is None else jnp.zeros_like(D_wide))
    grads = tuple(inputs[1:])  # overwritten, see `_forward`
    carry = (dfinal.astype(wide), zeros, grads)
    chunks = (jnp.arange(len(states)), states, _runs(run, size))
    (dstate, (dA, dD), grads), _ = lax.scan(one, carry, chunks, reverse=True)
    dx, ddt, dB, dC = (t[:, : x.shape[1]] for t in grads)
    dD = None if D is None else dD.astype(D.dtype)
    dstate = dstate.astype(initial_state.dtype)
    return dx, ddt, dA.astype(A.dtype), dB, dC, dD, None, dstate


ssd_chunked.defvjp(_ssd_fwd, _ssd_bwd)


def _forward(x, dt, A, B, C, D, run, initial_state, chunk_size, *, keep_states):
    """(y, final state, states entering the chunks or None)."""
    wide = jnp.promote_types(wide_dtype(x, dt), initial_state.dtype)
    size = _size(x, B, chunk_size)
    A_wide, D_wide = _wide(A, wide), _wide(D, wide)

    inputs = [pad_to_chunks(t, size) for t in (x, dt, B, C)]

    def one(carry, chunk):
        state, y, states = carry
        index, run_c = chunk
        masks = make_masks(*(run_c or (None, None)), size)
        x_c, dt_c, B_c, C_c = (_chunk(t, index, size).astype(wide) for t in inputs)
        after, y_c = chunk_forward(state, x_c, dt_c, A_wide, B_c, C_c, D_wide, masks)
        if keep_states:
            states = lax.dynamic_update_index_in_dim(states, state, index, 0)
        return (after, _put(y, y_c, index), states), None

    state, n_chunks = initial_state.astype(wide), inputs[0].shape[1] // size
    # What is overwritten chunk by chunk starts as values of this layer, not as zeros:
    # XLA:GPU makes the zeros of all layers at once, before the first of them, and keeps
    # them (a GiB for 16 layers of 4096 tokens).
    first = x[(0,) * x.ndim].astype(wide)
    states = jnp.broadcast_to(first, (n_chunks, *state.shape)) if keep_states else None
    chunks = (jnp.arange(n_chunks), _runs(run, size))
    start = (state, inputs[0], states)
    (final_state, y, states), _ = lax.scan(one, start, chunks)
    return y[:, : x.shape[1]], final_state, states


def _size(x, B, chunk_size):
    """Tokens per chunk. With one state per channel the work grows with the chunk and
    carrying the state is nearly free: short chunks win (README.md, "Speed")."""
    longest = 32 if B.shape[-1] == 1 else chunk_size
    return min(chunk_size, longest, x.shape[1])


def _wide(t, wide):
    return None if t is None else t.astype(wide)


def pad_to_chunks(t, size, *, mode="constant"):
    """Pad (B, L, ...) to whole chunks.

    Padding has dt = 0, hence decay 1 and no input: the state passes exactly.
    """
    padding = -t.shape[1] % size
    if not padding:
        return t
    widths = [(0, 0)] * t.ndim
    widths[1] = (0, padding)
    return jnp.pad(t, widths, mode=mode)


def _chunk(t, index, size):
    """Chunk `index` of (B, L, ...), read where it lies: no copy of the whole array."""
    return lax.dynamic_slice_in_dim(t, index * size, size, axis=1)


def _put(whole, part, index):
    """(B, L, ...) with chunk `index` replaced; in place, as the scan's carry."""
    start = index * part.shape[1]
    return lax.dynamic_update_slice_in_dim(
        whole, part.astype(whole.dtype), start, axis=1
    )


def _runs(run, size):
    """Run numbers by chunk, and the run before each chunk; padding joins the last."""
    if run is None:
        return None
    runs = (
        pad_to_chunks(run, size, mode="edge")
        .reshape(run.shape[0], -1, size)
        .swapaxes(0, 1)
    )
    return runs, jnp.concatenate([runs[:1, :, 0], runs[:-1, :, -1]])
