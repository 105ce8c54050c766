"""The convolution as K shifted products, and the state it leaves.

`window` is (B, K-1+L, C), the initial state followed by the inputs; `run` is
(B, K-1+L), the run numbers of the same, or None for one document.
"""

import jax
import jax.numpy as jnp


def extend_run(run: jax.Array | None, taps: int) -> jax.Array | None:
    """Run numbers of the window: the initial state belongs to the first run."""
    if run is None:
        return None
    before = jnp.broadcast_to(run[:, :1], (run.shape[0], taps - 1))
    return jnp.concatenate([before, run], axis=1)


def last_inputs(window: jax.Array, run: jax.Array | None, taps: int) -> jax.Array:
    """The last K-1 inputs, zero where they are not of the last document."""
    start = window.shape[1] - (taps - 1)
    state = window[:, start:]
    if run is None:
        return state
    same = run[:, start:] == run[:, -1:]
    return jnp.where(same[..., None], state, 0)


def wide_dtype(*arrays: jax.Array | None) -> jnp.dtype:
    """Dtype of the sums: float32, or float64 if any input is."""
    present = [t for t in arrays if t is not None]
    return jnp.promote_types(jnp.float32, jnp.result_type(*present))


def tap(t: jax.Array, run: jax.Array | None, k: int, taps: int) -> jax.Array:
    """(B, L, C): what weight[k] multiplies at each token, zero across documents."""
    length = t.shape[1] - (taps - 1)
    shifted = t[:, k : k + length]
    if run is None:
        return shifted
    same = run[:, k : k + length] == run[:, taps - 1 :]
    return jnp.where(same[..., None], shifted, 0)


def weighted_sum(window, weight, bias, run):
    """(B, L, C) in the wide dtype, before the activation."""
    wide, taps = wide_dtype(window, weight, bias), weight.shape[0]
    weight = weight.astype(wide)
    total = sum(weight[k] * tap(window, run, k, taps).astype(wide) for k in range(taps))
    return total if bias is None else total + bias.astype(wide)


def conv(window, weight, bias, run, activation):
    """(B, L, C) in window.dtype; differentiable by JAX."""
    total = weighted_sum(window, weight, bias, run)
    if activation == "silu":
        total = jax.nn.silu(total)
    return total.astype(window.dtype)
