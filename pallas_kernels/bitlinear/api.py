"""The one entry to the product of codes: check shapes and dtypes, choose, call."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import backend, checks
from pallas_kernels.bitlinear import launch, reference


def bit_product(
    x_codes: jax.Array,
    w_codes: jax.Array,
    *,
    x_scale: jax.Array,
    w_scale: jax.Array,
    dtype: Any,
    implementation: str = "auto",
) -> jax.Array:
    """Product of int8 codes, scaled for each row and for the whole weight.

    y = (x_codes @ w_codesᵀ) · (x_scale · w_scale)

    Args:
        x_codes: (T, D) int8. Quantised activations.
        w_codes: (F, D) int8. Ternary codes, input channels last.
        x_scale: (T, 1) float32. What a step of a row's codes stands for.
        w_scale: () float32. The same of the weight.
        dtype: of y, float.
        implementation: "auto", "reference" or "pallas".

    Returns:
        (T, F) in dtype.

    Raises:
        ValueError: shapes or dtypes disagree (argument, got, expected are named).
        NotImplementedError: "pallas" was asked for and this platform, dtype or size
            lacks it.

    Numerics: int32 sums, exact; float32 scales; one rounding. Both implementations give
        the same bits while sums are below 2^24 (D up to 131,072).
    Gradient: none; the caller's straight-through estimator has it.
    Several devices: where a mesh with the axis "data" is set, the kernel spreads the
        tokens over it; see `sharding`.
    Source: Ma et al. 2024, arXiv:2402.17764.
    """
    op = "bit_product"
    checks.check_rank(op, "x_codes", x_codes, 2, "(T, D)")
    checks.check_rank(op, "w_codes", w_codes, 2, "(F, D)")
    (tokens, channels), d_out = x_codes.shape, w_codes.shape[0]
    checks.check_shape(op, "w_codes", w_codes, (d_out, channels), "(F, D) with D of x")
    checks.check_shape(op, "x_scale", x_scale, (tokens, 1), "(T, 1)")
    checks.check_shape(op, "w_scale", w_scale, (), "one number")
    for name, t in (("x_codes", x_codes), ("w_codes", w_codes)):
        if t.dtype != jnp.int8:
            raise ValueError(
                f"{op}: {name}: got dtype {t.dtype}; expected int8 codes; use "
                f"{name}.astype(jnp.int8)"
            )
    for name, t in (("x_scale", x_scale), ("w_scale", w_scale)):
        checks.check_wide_float(op, name, t)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"{op}: dtype: got {jnp.dtype(dtype)}; expected a floating dtype, of y"
        )
    chosen = choose_bit_product(
        x_codes, w_codes, dtype=dtype, implementation=implementation
    )
    run = launch.run if chosen == "pallas" else reference.bit_product
    return run(x_codes, w_codes, x_scale * w_scale, dtype)


def choose_bit_product(
    x_codes: jax.Array | jax.ShapeDtypeStruct,
    w_codes: jax.Array | jax.ShapeDtypeStruct,
    *,
    dtype: Any,
    implementation: str = "auto",
) -> str:
    """What `bit_product` would run for such operands: "reference" or "pallas".

    "auto" takes XLA's product until a card has run the kernel (README.md).
    """
    return backend.resolve(
        implementation,
        op="bit_product",
        has_kernel=True,
        refusal=launch.refusal(x_codes, w_codes, dtype),
    )
