"""The scan with one state per channel by kernels: what is saved, what recomputed.

Saved: the inputs as they came and the state entering each tile, float32, P/32 numbers
per head and token; or, with `save_states=False`, the inputs alone, and the forward
kernel runs again without its outputs.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.sharding import over_batch
from pallas_kernels.ssd.narrow import launch
from pallas_kernels.ssd.narrow.tile import CHANNELS, WARPS
from pallas_kernels.ssd.vjp import pad_to_chunks

# Tokens of a stretch, four of which are a tile. Twice as many do not fit the registers.
STRETCH = 8


def scan_by_kernels(x, dt, A, B, C, D, run, initial_state, *, save_states=True):
    """(y, final state); arguments as `vjp.ssd_chunked` takes them, with N = 1.

    `refusals.refusal` must have been asked. Channels that are no multiple of 128 and
    tokens that are none of a tile are padded with zeros.
    """
    length, width = x.shape[1], x.shape[3]
    D = jnp.zeros(x.shape[2:], jnp.float32) if D is None else D.astype(jnp.float32)
    x, D, state = (_pad_channels(t) for t in (x, D, initial_state[..., 0]))
    x, dt, B, C = (pad_to_chunks(t, WARPS * STRETCH) for t in (x, dt, B, C))
    run = None if run is None else pad_to_chunks(run, WARPS * STRETCH, mode="edge")
    y, final = narrow_scan(x, dt, A, B, C, D, run, state, save_states)
    return y[:, :length, :, :width], final[:, :, :width, None]


def _pad_channels(t):
    """(..., P) with zeros up to what a block walks; as it is where nothing is added."""
    missing = -t.shape[-1] % CHANNELS
    return jnp.pad(t, [(0, 0)] * (t.ndim - 1) + [(0, missing)]) if missing else t


@functools.partial(jax.custom_vjp, nondiff_argnums=(8,))
def narrow_scan(x, dt, A, B, C, D, run, initial_state, save_states):
    """(y, final state (B, H, P)) of whole tiles; D is (H, P), run (B, L) or None."""
    y, final, _ = _forward(x, dt, A, B, C, D, run, initial_state, keep_states=False)
    return y, final


# Which axis of x, dt, A, B, C, D, run, initial_state and the states is the batch.
_AXES = (0, 0, None, 0, 0, None, 0, 0, 0)


def _forward(*arrays, keep_states):
    return over_batch(
        functools.partial(launch.forward, stretch=STRETCH, keep_states=keep_states),
        arrays,
        axes=_AXES[:-1],
        out_axes=(0, 0, 0),
    )


def _fwd(x, dt, A, B, C, D, run, initial_state, save_states):
    arrays = (x, dt, A, B, C, D, run, initial_state)
    y, final, states = _forward(*arrays, keep_states=save_states)
    return (y, final), (*arrays, states)


def _bwd(save_states, saved, cotangents):
    del save_states  # the states say it
    dx, ddt, dA, dB, dC, dD, dstart = over_batch(
        functools.partial(launch.backward, stretch=STRETCH),
        (*saved, *cotangents),
        axes=(*_AXES, 0, 0),
        out_axes=(0,) * 7,
    )
    return dx, ddt, dA.sum(0), dB, dC, dD.sum(0), None, dstart


narrow_scan.defvjp(_fwd, _bwd)
