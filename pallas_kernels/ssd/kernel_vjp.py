"""The scan by kernels with its hand-written gradient: what is saved, what recomputed.

Saved: the inputs as they came, and the state entering each chunk (bfloat16, P·N/Q
numbers per head and token); or, with `save_states=False`, nothing but the inputs, and
one more state pass in the backward.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.sharding import over_batch
from pallas_kernels.ssd import launch
from pallas_kernels.ssd.narrow import vjp as narrow
from pallas_kernels.ssd.vjp import pad_to_chunks

# Tokens a chunk. More do not fit the shared memory of sm_86 and sm_89.
CHUNK = 64
# Channels of a head in the kernels; a wider head becomes several with the same decays.
WIDTH = 64
# States are padded to a multiple of this: the narrowest operand of the tensor cores.
NARROWEST = 16


def scan_by_kernels(x, dt, A, B, C, D, run, initial_state, *, save_states=True):
    """(y, final state); arguments as `vjp.ssd_chunked` takes them, of any length.

    `refusals.refusal` must have been asked. Channels that are no multiple of 64 and
    states that are none of 16 are padded with zeros. A single state has kernels of its
    own.
    """
    if B.shape[-1] == 1:
        return narrow.scan_by_kernels(
            x, dt, A, B, C, D, run, initial_state, save_states=save_states
        )
    (_, length, heads, width), n = x.shape, B.shape[-1]
    D = jnp.zeros(x.shape[2:], jnp.float32) if D is None else D.astype(jnp.float32)
    x, D = (_pad(t, -1, WIDTH) for t in (x, D))
    B, C = (_pad(t, -1, NARROWEST) for t in (B, C))
    initial_state = _pad(_pad(initial_state, -1, NARROWEST), -2, WIDTH)
    pieces = x.shape[-1] // WIDTH
    x, initial_state = _in_pieces(x, 3), _in_pieces(initial_state, 2)
    dt, A = jnp.repeat(dt, pieces, 2), jnp.repeat(A, pieces)
    x, dt, B, C = (pad_to_chunks(t, CHUNK) for t in (x, dt, B, C))
    run = None if run is None else pad_to_chunks(run, CHUNK, mode="edge")
    D = D.reshape(-1, WIDTH)
    y, final = ssd_by_kernels(x, dt, A, B, C, D, run, initial_state, CHUNK, save_states)
    y = y.reshape(*y.shape[:2], heads, -1)[:, :length, :, :width]
    final = final.reshape(len(final), heads, -1, final.shape[-1])
    return y, final[:, :, :width, :n]


def _pad(t, axis, multiple):
    """t with zeros up to the next multiple; as it is where there is nothing to add."""
    widths = [(0, 0)] * t.ndim
    widths[axis] = (0, -t.shape[axis] % multiple)
    return jnp.pad(t, widths) if widths[axis][1] else t


def _in_pieces(t, axis):
    """(..., H, P, ...) with P at `axis` -> (..., H·P/64, 64, ...)."""
    return t.reshape(*t.shape[: axis - 1], -1, WIDTH, *t.shape[axis + 1 :])


@functools.partial(jax.custom_vjp, nondiff_argnums=(8, 9))
def ssd_by_kernels(x, dt, A, B, C, D, run, initial_state, size, save_states):
    """(y, final state) of whole chunks of `size` tokens.

    D is (H, P), run (B, L) run numbers or None, the rest as in `ssd`.
    """
    (y, final), _ = _fwd(x, dt, A, B, C, D, run, initial_state, size, save_states)
    return y, final


# Which axis of x, dt, A, B, C, D, run, initial_state and the states is the batch.
_AXES = (0, 0, None, 0, 0, None, 0, 0, 1)


def _fwd(x, dt, A, B, C, D, run, initial_state, size, save_states):
    arrays = (x, dt, A, B, C, D, run, initial_state)
    y, final, states = over_batch(
        functools.partial(launch.forward, size=size),
        arrays,
        axes=_AXES[:-1],
        out_axes=(0, 0, 1),
    )
    return (y, final), (*arrays, states if save_states else None)


def _bwd(size, save_states, saved, cotangents):
    dx, ddt, dA, dB, dC, dD, dstart = over_batch(
        functools.partial(launch.backward, size=size),
        (*saved, *cotangents),
        axes=(*_AXES, 0, 0),
        out_axes=(0,) * 7,
    )
    return dx, ddt, dA.sum(0), dB, dC, dD.sum(0), None, dstart


ssd_by_kernels.defvjp(_fwd, _bwd)
