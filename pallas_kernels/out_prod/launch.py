"""What the kernel can take, and how arguments are brought into that form."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import alignment, backend
from pallas_kernels.out_prod import reference
from pallas_kernels.out_prod.planes import COLUMNS
from pallas_kernels.out_prod.shapes import choose_tiles
from pallas_kernels.sharding import BATCH_AXIS, over_batch, parts

DTYPES = (jnp.bfloat16, jnp.float16)
# Copies to shared memory move 16 bytes at a time.
_BYTES = 16
# Largest tails that the form for Hopper holds in shared memory beside the ring.
WGMMA_RANK, WGMMA_RANK_OF_CODES = 256, 128


def refusal(a, b, *, transpose_a: bool, transpose_b: bool) -> str | None:
    """Why the kernel cannot take these operands, in the caller's words, or None."""
    if a.dtype not in DTYPES:
        return f"a: got {a.dtype}; the kernel takes bfloat16 and float16"
    if b.dtype != a.dtype and not transpose_b:
        return f"b: got {b.dtype} codes stored (K, N); the kernel decodes (N, K) only"
    for name, t in (("a", a), ("b", b)):
        if t.shape[1] * t.dtype.itemsize % _BYTES:
            least = _BYTES // t.dtype.itemsize
            return (
                f"{name}: got {t.shape[1]} columns of {t.dtype}; the kernel takes "
                f"multiples of {least}"
            )
    k, n = a.shape[0 if transpose_a else 1], b.shape[0 if transpose_b else 1]
    if n % 8 or n < 16:
        return f"N: got {n}; the kernel takes multiples of 8 from 16 on"
    if b.dtype == jnp.uint8 and k % 32:
        return f"K: got {k}; the kernel takes multiples of 32 of 2-bit codes"
    if k < (least := 16 if b.dtype == a.dtype else 32):
        return f"K: got {k}; the kernel takes {least} or more of {b.dtype}"
    return None


def run(a, b, scale, tail, *, transpose_a: bool, transpose_b: bool) -> jax.Array:
    """The kernel on operands that `refusal` has let through.

    On several devices the first axis of a is taken to be the batch: rows of the result,
    or, with transpose_a, what the sum runs over.
    """
    options = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    if not transpose_a:
        u, v = tail or (None, None)

        def rows(a, b, scale, u, v):
            return _run_here(a, b, scale, None if u is None else (u, v), **options)

        axes = (0, None, None, 0, None)
        return over_batch(rows, (a, b, scale, u, v), axes=axes, out_axes=0)
    if parts() == 1:
        return _run_here(a, b, scale, tail, **options)

    def share(a, b, scale):
        part = _run_here(a, b, scale, None, **options).astype(jnp.float32)
        return lax.psum(part, BATCH_AXIS)

    axes = (0, 1 if transpose_b else 0, None)
    total = over_batch(share, (a, b, scale), axes=axes, out_axes=None)
    if tail is not None:
        total = total + jnp.dot(*_wide(tail))
    return total.astype(a.dtype)


def _wide(tail):
    u, v = tail
    return u.astype(jnp.float32), v.astype(jnp.float32).T


def _run_here(a, b, scale, tail, *, transpose_a, transpose_b):
    """The kernel on one device."""
    options = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    scale = None if scale is None else scale.reshape(1).astype(jnp.float32)
    if backend.products() == "wgmma" and _takes_wgmma(a, b, tail):
        from pallas_kernels.out_prod.kernels_hopper import out_prod_wgmma

        return out_prod_wgmma(a, b, scale, tail, **options)
    return _run_by_mma(a, b, scale, tail, **options)


def _takes_wgmma(a, b, tail) -> bool:
    """Whether the form for Hopper holds the tail in shared memory, and whole tiles of
    planes: otherwise the portable form runs there too."""
    rank = 0 if tail is None else tail[0].shape[1]
    if b.dtype == a.dtype:
        return rank <= WGMMA_RANK
    whole = b.dtype != jnp.uint8 or b.shape[1] % COLUMNS == 0
    return whole and rank <= WGMMA_RANK_OF_CODES


def _run_by_mma(a, b, scale, tail, *, transpose_a, transpose_b):
    """The portable kernel, with what is left of K in the tail."""
    from pallas_kernels.out_prod.kernels import out_prod_kernel

    m, n = a.shape[1 if transpose_a else 0], b.shape[0 if transpose_b else 1]
    options = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    if alignment.copies_by_tma():
        a, b, tail = _for_tma(a, b, tail, **options)
    padded_m, k = a.shape[:: -1 if transpose_a else 1]
    tiles = choose_tiles(padded_m, k, b.shape[0 if transpose_b else 1])
    tail = _whole_tail(a, b, scale, tail, k % tiles.k, transpose_a, transpose_b)
    if padded_m < tiles.m:
        a = _pad(a, 1 if transpose_a else 0, tiles.m - padded_m)
        tail = tail and (_pad(tail[0], 0, tiles.m - padded_m), tail[1])
    product = out_prod_kernel(a, b, scale, tail, **options, tiles=tiles)
    return product[:m, :n]


def _for_tma(a, b, tail, *, transpose_a, transpose_b):
    """Operands that TMA takes; those that are none are padded with zeros."""
    k, m = a.shape[:: 1 if transpose_a else -1]
    n = b.shape[0 if transpose_b else 1]
    k = alignment.rounded(k, 32)
    m = alignment.rounded(m, 64 if transpose_a else alignment.ROWS)
    n = alignment.rounded(n, alignment.ROWS if transpose_b else 64)
    a = alignment.padded(a, *((k, m) if transpose_a else (m, k)))
    if b.dtype != jnp.uint8:  # planes have whole pieces, and K is their own affair
        b = alignment.padded(b, *((n, k) if transpose_b else (k, n)))
    if tail is not None:
        u, v = tail
        rank = u.shape[1]
        tail = alignment.padded(u, m, rank), alignment.padded(v, n, rank)
    return a, b, tail


def _whole_tail(a, b, scale, tail, left_over, transpose_a, transpose_b):
    """The tail, with what is left of the sum after whole tiles; rank in sixteens.

    So a sum of any length costs no copy of a weight, only of its last few columns.
    """
    parts = [] if tail is None else [tail]
    if left_over:
        u = (a[-left_over:].T if transpose_a else a[:, -left_over:]).astype(a.dtype)
        v = b[:, -left_over:] if transpose_b else b[-left_over:].T
        u = u if scale is None else (u * scale).astype(a.dtype)
        parts.append((u, reference.decode(v, left_over, a.dtype)))
    if not parts:
        return None
    sides = [jnp.concatenate(side, axis=1) for side in zip(*parts, strict=True)]
    return tuple(_pad(side, 1, -side.shape[1] % 16) for side in sides)


def _pad(t, axis, amount):
    widths = [(0, 0), (0, 0)]
    widths[axis] = (0, amount)
    return jnp.pad(t, widths) if amount else t
