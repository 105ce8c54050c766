"""The scan by kernels with its hand-written gradient: what is saved, what recomputed.

Saved: the inputs as they came, and the state entering each chunk (bfloat16, P·N/Q
numbers per head and token); or, with `save_states=False`, nothing but the inputs, and
one more state pass in the backward.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.sharding import over_batch
from pallas_kernels.ssd import launch
from pallas_kernels.ssd.hopper import launch as hopper
from pallas_kernels.ssd.narrow import vjp as narrow
from pallas_kernels.ssd.vjp import pad_to_chunks

# Channels of a head in the kernels; a wider head becomes several with the same decays.
WIDTH = 64


class Form(NamedTuple):
    """Kernels of one scan, and the sizes they are for.

    chunk: tokens. narrowest: N is padded to a multiple of it.
    """

    forward: Callable
    backward: Callable
    chunk: int
    narrowest: int


FORMS = {
    # More tokens do not fit the shared memory of sm_86 and sm_89; no operand of the
    # tensor cores is narrower than 16.
    "mma": Form(launch.forward, launch.backward, chunk=64, narrowest=16),
    # A swizzle of 128 bytes, which all operands of a product share, is 64 numbers wide.
    "wgmma": Form(hopper.forward, hopper.backward, chunk=128, narrowest=64),
}


def form_for(x: jax.Array, B: jax.Array, C: jax.Array) -> str:
    """The form that takes these operands where the scan is traced now.

    `wgmma` has none for operands in two parts; and to pad a few states to 64 would move
    more bytes than chunks twice as long save.
    """
    if launch.count_parts(x, B, C) > 1 or B.shape[-1] <= FORMS["mma"].narrowest:
        return "mma"
    return backend.products()


def scan_by_kernels(x, dt, A, B, C, D, run, initial_state, *, save_states=True):
    """(y, final state); arguments as `vjp.ssd_chunked` takes them, of any length.

    `refusals.refusal` must have been asked. Channels that are no multiple of 64 and
    states that are none of 16 (by wgmma, of 64) are padded with zeros. A single state
    has kernels of its own.
    """
    if B.shape[-1] == 1:
        return narrow.scan_by_kernels(
            x, dt, A, B, C, D, run, initial_state, save_states=save_states
        )
    (_, length, heads, width), n = x.shape, B.shape[-1]
    name = form_for(x, B, C)
    form = FORMS[name]
    D = jnp.zeros(x.shape[2:], jnp.float32) if D is None else D.astype(jnp.float32)
    x, D = (_pad(t, -1, WIDTH) for t in (x, D))
    B, C = (_pad(t, -1, form.narrowest) for t in (B, C))
    initial_state = _pad(_pad(initial_state, -1, form.narrowest), -2, WIDTH)
    pieces = x.shape[-1] // WIDTH
    x, initial_state = _in_pieces(x, 3), _in_pieces(initial_state, 2)
    dt, A = jnp.repeat(dt, pieces, 2), jnp.repeat(A, pieces)
    x, dt, B, C = (pad_to_chunks(t, form.chunk) for t in (x, dt, B, C))
    run = None if run is None else pad_to_chunks(run, form.chunk, mode="edge")
    D = D.reshape(-1, WIDTH)
    y, final = ssd_by_kernels(x, dt, A, B, C, D, run, initial_state, name, save_states)
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
def ssd_by_kernels(x, dt, A, B, C, D, run, initial_state, form, save_states):
    """(y, final state) of whole chunks, by the kernels of `FORMS[form]`.

    D is (H, P), run (B, L) run numbers or None, the rest as in `ssd`.
    """
    (y, final), _ = _fwd(x, dt, A, B, C, D, run, initial_state, form, save_states)
    return y, final


# Which axis of x, dt, A, B, C, D, run, initial_state and the states is the batch.
_AXES = (0, 0, None, 0, 0, None, 0, 0, 1)


def _fwd(x, dt, A, B, C, D, run, initial_state, form, save_states):
    arrays = (x, dt, A, B, C, D, run, initial_state)
    y, final, states = over_batch(
        functools.partial(FORMS[form].forward, size=FORMS[form].chunk),
        arrays,
        axes=_AXES[:-1],
        out_axes=(0, 0, 1),
    )
    return (y, final), (*arrays, states if save_states else None)


def _bwd(form, save_states, saved, cotangents):
    dx, ddt, dA, dB, dC, dD, dstart = over_batch(
        functools.partial(FORMS[form].backward, size=FORMS[form].chunk),
        (*saved, *cotangents),
        axes=(*_AXES, 0, 0),
        out_axes=(0,) * 7,
    )
    return dx, ddt, dA.sum(0), dB, dC, dD.sum(0), None, dstart


ssd_by_kernels.defvjp(_fwd, _bwd)
