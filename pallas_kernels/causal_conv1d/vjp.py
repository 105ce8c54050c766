"""The convolution with its hand-written gradient: only the inputs are saved."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.causal_conv1d import launch, reference
from pallas_kernels.compat import materialise


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def conv(window, weight, bias, run, activation, use_kernel=False):
    """(B, L, C) in window.dtype from a window (B, K-1+L, C); see `reference`."""
    run_conv = launch.forward if use_kernel else reference.conv
    return run_conv(window, weight, bias, run, activation)


def _conv_fwd(window, weight, bias, run, activation, use_kernel):
    y = conv(window, weight, bias, run, activation, use_kernel)
    return y, (window, weight, bias, run)


def _conv_bwd(activation, use_kernel, saved, dy):
    if use_kernel:
        return *launch.backward(*saved, dy, activation), None
    # Wait for dy: what is computed again would else be computed, and kept, long before.
    (window, weight, bias, run), dy = jax.lax.optimization_barrier((saved, dy))
    wide, taps = reference.wide_dtype(window, weight, bias), weight.shape[0]
    dtotal = dy.astype(wide)
    if activation == "silu":
        total = reference.weighted_sum(window, weight, bias, run)
        gate = jax.nn.sigmoid(total)
        dtotal = dtotal * (gate * (1 + total * (1 - gate)))
        # All taps read it. With a frozen weight nothing else does, and XLA:CPU would
        # compute it anew for each of them: 13 times the time with it alone.
        dtotal = materialise(dtotal)
    weight_wide = weight.astype(wide)
    dwindow = sum(_from_tap(dtotal, weight_wide, run, k, taps) for k in range(taps))
    dweight = jnp.stack(
        [
            (dtotal * reference.tap(window, run, k, taps).astype(wide)).sum((0, 1))
            for k in range(taps)
        ]
    )
    dbias = None if bias is None else dtotal.sum((0, 1)).astype(bias.dtype)
    return dwindow.astype(window.dtype), dweight.astype(weight.dtype), dbias, None


def _from_tap(dtotal, weight, run, k, taps):
    """What tap k sends back to the window, (B, K-1+L, C)."""
    if run is not None:
        length = dtotal.shape[1]
        same = run[:, k : k + length] == run[:, taps - 1 :]
        dtotal = jnp.where(same[..., None], dtotal, 0)
    return jnp.pad(weight[k] * dtotal, ((0, 0), (k, taps - 1 - k), (0, 0)))


conv.defvjp(_conv_fwd, _conv_bwd)
