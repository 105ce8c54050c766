"""The one entry to the convolution: check shapes and dtypes, choose, call."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import backend, checks
from pallas_kernels.causal_conv1d import launch, reference, vjp
from pallas_kernels.documents import run_numbers

ACTIVATIONS = (None, "silu")


class ConvOutput(NamedTuple):
    """y: (B, L, C) in x.dtype. final_state: (B, K-1, C) in x.dtype."""

    y: jax.Array
    final_state: jax.Array


def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    segment_ids: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    activation: str | None = None,
    implementation: str = "auto",
) -> ConvOutput:
    """Depthwise causal convolution along the sequence.

    y_t = activation(sum_k weight_k · x_{t-(K-1)+k} + bias), inputs of other documents
    counting as zero.

    Args:
        x: (B, L, C) float.
        weight: (K, C) float. weight[0] multiplies the oldest sample.
        bias: (C,) float or None.
        segment_ids: (B, L) int32 or None. The window restarts wherever the id changes.
        initial_state: (B, K-1, C) float or None for zeros. The inputs before the first
            token, oldest first; they belong to the document of the first token.
        activation: None or "silu".
        implementation: "auto", "reference" or "pallas".

    Returns:
        ConvOutput(y: (B, L, C), final_state: (B, K-1, C)), both in x.dtype; the state
        holds the last inputs of the last document, zeros where it had none.

    Raises:
        ValueError: shapes or dtypes disagree, or the activation is unknown.
        NotImplementedError: "pallas" was asked for and this platform or dtype lacks it.

    Numerics: float32 sums (float64 for float64 inputs); inputs of other documents are
        replaced by zeros, never multiplied by them.
    Several devices: where a mesh with the axis "data" is set, the kernel spreads the
        batch over it; see `sharding`.
    Gradient: saves the inputs, recomputes the sum under the activation.
    Source: Gu & Dao 2023, arXiv:2312.00752, section 3.4 (the short convolution).
        Differs: documents restart; the state is returned.
    """
    op = "causal_conv1d"
    checks.check_rank(op, "x", x, 3, "(B, L, C)")
    _check(op, x, weight, bias, initial_state, activation)
    batch, length, channels = x.shape
    if segment_ids is not None:
        checks.check_shape(op, "segment_ids", segment_ids, (batch, length), "(B, L)")
        checks.check_int(op, "segment_ids", segment_ids)
    chosen = backend.resolve(
        implementation, op=op, has_kernel=True, refusal=launch.refusal(x)
    )
    taps = weight.shape[0]
    if initial_state is None:
        initial_state = jnp.zeros((batch, taps - 1, channels), x.dtype)
    window = jnp.concatenate([initial_state.astype(x.dtype), x], axis=1)
    run = None if segment_ids is None else run_numbers(segment_ids)
    run = reference.extend_run(run, taps)
    y = vjp.conv(window, weight, bias, run, activation, chosen == "pallas")
    return ConvOutput(y, reference.last_inputs(window, run, taps))


def causal_conv1d_step(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    state: jax.Array,
    activation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One token of the convolution, for decoding.

    Args:
        x: (B, C) float. Input of this token.
        weight: (K, C) float. weight[0] multiplies the oldest sample.
        bias: (C,) float or None.
        state: (B, K-1, C) float. The inputs before this token, oldest first.
        activation: None or "silu".

    Returns:
        (y: (B, C) in x.dtype, state: (B, K-1, C) in state.dtype).

    Raises:
        ValueError: shapes or dtypes disagree, or the activation is unknown.

    Numerics: float32 sums. Gradient: JAX's own.
    """
    op = "causal_conv1d_step"
    checks.check_rank(op, "x", x, 2, "(B, C)")
    _check(op, x[:, None], weight, bias, state, activation, state_name="state")
    window = jnp.concatenate([state.astype(x.dtype), x[:, None]], axis=1)
    y = reference.conv(window, weight, bias, None, activation)
    return y[:, 0], window[:, 1:].astype(state.dtype)


def _check(op, x, weight, bias, state, activation, *, state_name="initial_state"):
    """Every disagreement of shapes and dtypes, in the caller's words."""
    batch, _, channels = x.shape
    checks.check_rank(op, "weight", weight, 2, "(K, C)")
    taps = weight.shape[0]
    checks.check_shape(op, "weight", weight, (taps, channels), "(K, C) with C of x")
    if bias is not None:
        checks.check_shape(op, "bias", bias, (channels,), "(C,) of x")
    if state is not None:
        expected = (batch, taps - 1, channels)
        checks.check_shape(op, state_name, state, expected, "(B, K-1, C)")
    named = (("x", x), ("weight", weight), ("bias", bias), (state_name, state))
    for name, array in named:
        if array is not None:
            checks.check_float(op, name, array)
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"{op}: activation: got {activation!r}; expected one of {ACTIVATIONS}"
        )
