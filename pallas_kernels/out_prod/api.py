"""The one entry to the product: check shapes and dtypes, choose, call."""

import jax
import jax.numpy as jnp

from pallas_kernels import backend, checks
from pallas_kernels.out_prod import launch, vjp
from pallas_kernels.out_prod.shapes import PLANES


def out_prod(
    a: jax.Array,
    b: jax.Array,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    scale: jax.Array | None = None,
    tail: tuple[jax.Array, jax.Array] | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Matrix product in any orientation, with a scale and a low-rank tail in one pass.

    op(a) @ op(b) · scale + u @ vᵀ, op the transposition where asked for. The gradient
    of a frozen layer with an adapter has this form: dx = dy @ Wᵀ + (s · dy @ Bᵀ) @ Aᵀ.

    Args:
        a: (M, K), or (K, M) with transpose_a. float.
        b: (K, N), or (N, K) with transpose_b, in a.dtype. Or codes, which do not train:
            int8 whole numbers of that shape, or 2-bit (N, C) uint8 of `pack_planes`
            (then with transpose_b).
        transpose_a, transpose_b: how a and b are stored; neither is ever copied.
        scale: () float32 or None. Multiplies the product, not the tail.
        tail: u (M, R) and v (N, R) in a.dtype, or None.
        implementation: "auto", "reference" or "pallas".

    Returns:
        (M, N) in a.dtype.

    Raises:
        ValueError: shapes or dtypes disagree (argument, got, expected are named).
        NotImplementedError: "pallas" was asked for and this platform, dtype or size
            lacks it.

    Numerics: float32 sums (float64 for float64 inputs), rounded once to a.dtype. Of a
        sum that is no multiple of 32 the portable kernel rounds scale · a of the last
        columns; Hopper's does not.
    Several devices: where a mesh with the axis "data" is set, the first axis of a, and
        of u, is spread over it; see `sharding`.
    Gradient: to a, b, scale and tail; saves them, no product. Those of its products
        that the kernel does not take run as the reference.
    Source: Hu et al. 2021, arXiv:2106.09685, section 4.1, for the tail.
    """
    op = "out_prod"
    checks.check_rank(op, "a", a, 2, "(M, K), or (K, M) with transpose_a")
    checks.check_rank(op, "b", b, 2, "(K, N), or (N, K) with transpose_b")
    checks.check_float(op, "a", a)
    _check(op, a, b, transpose_a, transpose_b, scale, tail)
    chosen = choose_out_prod(
        a,
        b,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        implementation=implementation,
    )
    use_kernel = chosen == "pallas"
    return vjp.out_prod(a, b, scale, tail, transpose_a, transpose_b, use_kernel)


def choose_out_prod(
    a: jax.Array | jax.ShapeDtypeStruct,
    b: jax.Array | jax.ShapeDtypeStruct,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    implementation: str = "auto",
) -> str:
    """What `out_prod` would run for such operands: "reference" or "pallas".

    "auto" takes XLA's product everywhere until a card has shown the kernel to be faster
    (README.md, "When it pays").
    """
    refusal = launch.refusal(a, b, transpose_a=transpose_a, transpose_b=transpose_b)
    return backend.resolve(
        implementation, op="out_prod", has_kernel=True, refusal=refusal
    )


def _check(op, a, b, transpose_a, transpose_b, scale, tail) -> None:
    """Every disagreement of shapes and dtypes, in the caller's words."""
    m, k = a.shape[::-1] if transpose_a else a.shape
    n = b.shape[0] if transpose_b else b.shape[1]
    if b.dtype == jnp.uint8:
        _check_planes(op, b, k, transpose_b)
    else:
        expected = (n, k) if transpose_b else (k, n)
        checks.check_shape(op, "b", b, expected, "(N, K)" if transpose_b else "(K, N)")
        if b.dtype not in (a.dtype, jnp.int8):
            raise ValueError(
                f"{op}: b: got dtype {b.dtype}; expected {a.dtype} as a, int8 codes, "
                "or uint8 of pack_planes; convert one of them"
            )
    if scale is not None:
        checks.check_shape(op, "scale", scale, (), "one number")
        checks.check_wide_float(op, "scale", scale)
    if tail is not None:
        u, v = tail
        checks.check_rank(op, "tail[0]", u, 2, "(M, R)")
        rank = u.shape[1]
        for name, t, rows in (("tail[0]", u, m), ("tail[1]", v, n)):
            checks.check_shape(op, name, t, (rows, rank), "(M, R) and (N, R)")
            if t.dtype != a.dtype:
                raise ValueError(
                    f"{op}: {name}: got dtype {t.dtype}; expected {a.dtype} as a; "
                    "convert it first"
                )


def _check_planes(op, b, k, transpose_b) -> None:
    if not transpose_b:
        raise ValueError(
            f"{op}: b: got 2-bit codes without transpose_b; expected them packed along "
            "K: pack_planes of the (N, K) codes, with transpose_b=True"
        )
    if b.shape[1] * PLANES < k:
        raise ValueError(
            f"{op}: b: got {b.shape[1]} bytes a row; expected at least "
            f"{-(-k // PLANES)} for K = {k}; pack the whole weight"
        )
