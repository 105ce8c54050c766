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

    def one(carry, chunk):
        dstate, sums = carry
        state, dy_c, x_c, dt_c, B_c, C_c, run_c = chunk
        masks = make_masks(*(run_c or (None, None)), size)
        wides = [t.astype(wide) for t in (dy_c, x_c, dt_c)]
        dstate, (dx, ddt, dB, dC), new = chunk_backward(
            dstate,
            state,
            *wides,
            A_wide,
            B_c.astype(wide),
            C_c.astype(wide),
            D_wide,
            masks,
        )
        sums = jax.tree.map(jnp.add, sums, new)
        out = (dx.astype(x.dtype), ddt, dB.astype(B.dtype), dC.astype(C.dtype))
        return (dstate, sums), out

    zeros = (jnp.zeros_like(A_wide), None if D is None else jnp.zeros_like(D_wide))
    chunks = (states, *(_split(t, size) for t in (dy, x, dt, B, C)), _runs(run, size))
    carry = (dfinal.astype(wide), zeros)
    (dstate, (dA, dD)), grads = lax.scan(one, carry, chunks, reverse=True)
    length = x.shape[1]
    dx, ddt, dB, dC = (_join(t, length) for t in grads)
    dD = None if D is None else dD.astype(D.dtype)
    return (
        dx, ddt.astype(dt.dtype), dA.astype(A.dtype), dB, dC, dD, None,
        dstate.astype(initial_state.dtype),
    )  # fmt: skip


ssd_chunked.defvjp(_ssd_fwd, _ssd_bwd)


def _forward(x, dt, A, B, C, D, run, initial_state, chunk_size, *, keep_states):
    """(y, final state, states entering the chunks or None)."""
    wide = jnp.promote_types(wide_dtype(x, dt), initial_state.dtype)
    size = _size(x, B, chunk_size)
    A_wide, D_wide = _wide(A, wide), _wide(D, wide)

    def one(state, chunk):
        x_c, dt_c, B_c, C_c, run_c = chunk
        masks = make_masks(*(run_c or (None, None)), size)
        x_c, dt_c, B_c, C_c = (t.astype(wide) for t in (x_c, dt_c, B_c, C_c))
        after, y = chunk_forward(state, x_c, dt_c, A_wide, B_c, C_c, D_wide, masks)
        return after, (y.astype(x.dtype), state if keep_states else None)

    chunks = (*(_split(t, size) for t in (x, dt, B, C)), _runs(run, size))
    final_state, (y, states) = lax.scan(one, initial_state.astype(wide), chunks)
    return _join(y, x.shape[1]), final_state, states


def _size(x, B, chunk_size):
    """Tokens per chunk. With one state per channel the work grows with the chunk and
    carrying the state is nearly free: short chunks win (README.md, "Speed")."""
    longest = 32 if B.shape[-1] == 1 else chunk_size
    return min(chunk_size, longest, x.shape[1])


def _wide(t, wide):
    return None if t is None else t.astype(wide)


def _split(t, size, *, mode="constant"):
    """(B, L, ...) -> (chunks, B, size, ...); the last chunk is padded.

    Padding has dt = 0, hence decay 1 and no input: the state passes exactly.
    """
    padding = -t.shape[1] % size
    if padding:
        widths = [(0, 0)] * t.ndim
        widths[1] = (0, padding)
        t = jnp.pad(t, widths, mode=mode)
    return t.reshape(t.shape[0], -1, size, *t.shape[2:]).swapaxes(0, 1)


def _join(t, length):
    """(chunks, B, size, ...) -> (B, length, ...)."""
    t = t.swapaxes(0, 1)
    return t.reshape(t.shape[0], -1, *t.shape[3:])[:, :length]


def _runs(run, size):
    """Run numbers by chunk, and the run before each chunk; padding joins the last."""
    if run is None:
        return None
    runs = _split(run, size, mode="edge")
    return runs, jnp.concatenate([runs[:1, :, 0], runs[:-1, :, -1]])
