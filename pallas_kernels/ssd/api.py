"""The one entry to the scan: check shapes and dtypes, choose, call."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import backend, checks
from pallas_kernels.documents import run_numbers
from pallas_kernels.ssd import reference, refusals, vjp


class SSDOutput(NamedTuple):
    """y: (B, L, H, P) in x.dtype. final_state: (B, H, P, N) float32."""

    y: jax.Array
    final_state: jax.Array


def ssd(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    *,
    D: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk_size: int,
    initial_state: jax.Array | None = None,
    implementation: str = "auto",
) -> SSDOutput:
    """Structured state-space dual scan over one sequence axis.

    Per head: state_t = exp(A·dt_t)·state_{t-1} + dt_t·(x_t ⊗ B_t);  y_t = state_t·C_t
    + D·x_t.

    Args:
        x: (B, L, H, P) float. Inputs after convolution and activation.
        dt: (B, L, H) float32, >= 0, dimensionless. Step size, after softplus.
        A: (H,) float32, < 0, per unit of dt. Decay rate, -exp(A_log).
        B, C: (B, L, G, N) float. Input and output maps; H must be a multiple of G.
        D: (H,), (H, P) or None. Skip weight.
        segment_ids: (B, L) int32 or None. The state restarts wherever the id changes.
        chunk_size: tokens per chunk; L need not be a multiple. The kernels take 64
            or, on Hopper, 128; with N = 1 they have no chunks.
        initial_state: (B, H, P, N) float32, or None for zeros. It belongs to the
            document of the first token.
        implementation: "auto", "reference" or "pallas". "pallas" runs GPU kernels,
            interpreted on a CPU; N = 1 by kernels of its own (narrow/).

    Returns:
        SSDOutput(y: (B, L, H, P) in x.dtype, final_state: (B, H, P, N) float32).

    Raises:
        ValueError: shapes or dtypes disagree (the message names argument, got,
            expected).
        NotImplementedError: "pallas" was asked for and this platform, dtype or size
            lacks it.

    Numerics: float32 inside (float64 if x, dt or the state is; the kernels: products of
        bfloat16, of two parts each for float32, README.md); decays are summed in
        log space and never differ by a cancelled large sum; every exponent is <= 0; no
        token changes a bit of another document.
    Gradient: saves inputs and chunk states, recomputes the rest; README.md, "Backward".
        Reverse mode only.
    Source: Dao & Gu 2024, arXiv:2405.21060, Listing 1. Differs: inter-chunk pass is a
        scan; documents restart; the decay gradient is a sum of non-cancelling terms.
    """
    _check(x, dt, A, B, C, D, segment_ids, initial_state)
    if not isinstance(chunk_size, int | np.integer) or chunk_size < 1:
        raise ValueError(
            f"ssd: chunk_size: got {chunk_size!r}; expected a whole number >= 1"
        )
    batch, _, heads, width = x.shape
    wide = reference.wide_dtype(x, dt)
    if initial_state is None:
        initial_state = jnp.zeros((batch, heads, width, B.shape[-1]), wide)
    run = None if segment_ids is None else run_numbers(segment_ids)
    args = (x, dt, A, B, C, _skip_per_channel(D, x), run, initial_state)
    if _choose(implementation, x, dt, A, B, C, initial_state) == "pallas":
        from pallas_kernels.ssd.kernel_vjp import scan_by_kernels

        return SSDOutput(*scan_by_kernels(*args))
    return SSDOutput(*vjp.ssd_chunked(*args, chunk_size))


def _choose(implementation, *arrays) -> str:
    """The implementation that runs."""
    # The kernels have been compiled for GPUs and interpreted, but not yet run on one:
    # "auto" waits for that.
    return backend.resolve(
        implementation,
        op="ssd",
        has_kernel=True,
        refusal=refusals.refusal(*arrays),
        wins=False,
    )


def ssd_step(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    *,
    D: jax.Array | None = None,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """One token of the recurrence, for decoding.

    Args:
        x: (B, H, P) float. Input of this token.
        dt: (B, H) float32, >= 0. Step size, after softplus.
        A: (H,) float32, < 0. Decay rate.
        B, C: (B, G, N) float. Input and output maps.
        D: (H,), (H, P) or None. Skip weight.
        state: (B, H, P, N) float32. State after the previous token.

    Returns:
        (y: (B, H, P) in x.dtype, state: (B, H, P, N) float32).

    Raises:
        ValueError: shapes or dtypes disagree.

    Numerics: float32 inside. Gradient: JAX's own.
    """
    checks.check_rank("ssd_step", "x", x, 3, "(B, H, P)")
    checks.check_rank("ssd_step", "B", B, 3, "(B, G, N)")
    one = [t[:, None] for t in (x, dt, B, C)]
    _check(one[0], one[1], A, one[2], one[3], D, None, state, op="ssd_step")
    return reference.step(x, dt, A, B, C, _skip_per_channel(D, x), state)


def _skip_per_channel(D: jax.Array | None, x: jax.Array) -> jax.Array | None:
    """D as (H, P), or None."""
    if D is None or D.ndim == 2:
        return D
    return jnp.broadcast_to(D[:, None], x.shape[-2:])


def _check(x, dt, A, B, C, D, segment_ids, state, *, op="ssd") -> None:
    """Every disagreement of shapes and dtypes, in the caller's words."""
    checks.check_rank(op, "x", x, 4, "(B, L, H, P)")
    checks.check_rank(op, "B", B, 4, "(B, L, G, N)")
    batch, length, heads, width = x.shape
    groups, n = B.shape[2:]
    checks.check_shape(op, "dt", dt, (batch, length, heads), "(B, L, H) of x")
    checks.check_shape(op, "A", A, (heads,), "(H,) of x")
    checks.check_shape(op, "B", B, (batch, length, groups, n), "(B, L, G, N)")
    checks.check_shape(op, "C", C, B.shape, "the shape of B")
    if heads % groups:
        raise ValueError(
            f"{op}: B: got {groups} groups for {heads} heads; expected a divisor of "
            "the number of heads; change n_groups or n_heads"
        )
    if D is not None and D.shape != (heads,):
        checks.check_shape(op, "D", D, (heads, width), "(H, P) of x, or (H,)")
    if segment_ids is not None:
        checks.check_shape(op, "segment_ids", segment_ids, (batch, length), "(B, L)")
        checks.check_int(op, "segment_ids", segment_ids)
    if state is not None:
        name = "state" if op == "ssd_step" else "initial_state"
        checks.check_shape(op, name, state, (batch, heads, width, n), "(B, H, P, N)")
        checks.check_wide_float(op, name, state)
    for name, array in (("x", x), ("B", B), ("C", C), ("D", D)):
        if array is not None:
            checks.check_float(op, name, array)
    for name, array in (("dt", dt), ("A", A)):
        checks.check_wide_float(op, name, array)
