"""What the kernels can take, and how arguments are brought into that form."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.causal_conv1d.shapes import DEFAULT, Blocks
from pallas_kernels.sharding import over_batch

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_WARPGROUP = 128


def refusal(x: jax.Array) -> str | None:
    """Why the kernels cannot take this input, or None."""
    if x.dtype not in DTYPES:
        return f"x: got {x.dtype}; the kernel takes float32, bfloat16 and float16"
    return None


def forward(window, weight, bias, run, activation):
    """(B, L, C) in window.dtype, by the kernel."""
    from pallas_kernels.causal_conv1d.kernels import conv_kernel

    channels = window.shape[2]
    arrays = [*(_pad(t) for t in (window, weight, bias)), run]
    options = {"activation": activation, "blocks": _blocks(channels)}
    kernel = functools.partial(conv_kernel, **options)
    y = over_batch(kernel, arrays, axes=(0, None, None, 0), out_axes=0)
    return y[..., :channels]


def backward(window, weight, bias, run, dy, activation):
    """(dwindow, dweight, dbias or None), in the dtypes of what they are of."""
    from pallas_kernels.causal_conv1d.kernels import conv_gradient_kernel

    n_taps, channels = weight.shape
    arrays = [*(_pad(t) for t in (window, weight, bias)), run, _pad(dy)]
    options = {"activation": activation, "blocks": _blocks(channels)}
    kernel = functools.partial(conv_gradient_kernel, **options)
    dwindow, sums = over_batch(
        kernel, arrays, axes=(0, None, None, 0, 0), out_axes=(0, 0)
    )
    sums = sums.sum((0, 1))[:, :channels]
    dbias = None if bias is None else sums[n_taps].astype(bias.dtype)
    return dwindow[..., :channels], sums[:n_taps].astype(weight.dtype), dbias


def _blocks(channels: int) -> Blocks:
    whole = channels % DEFAULT.channels == 0
    return DEFAULT if whole else DEFAULT._replace(channels=_WARPGROUP)


def _pad(t):
    """Channels in whole warpgroups; a copy where they are not."""
    if t is None or not t.shape[-1] % _WARPGROUP:
        return t
    widths = [(0, 0)] * t.ndim
    widths[-1] = (0, -t.shape[-1] % _WARPGROUP)
    return jnp.pad(t, widths)
