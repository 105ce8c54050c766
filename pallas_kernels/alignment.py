"""Sizes that Mosaic lets TMA copy, sm_90 and later; needs no Pallas.

A tile lies in shared memory as pieces of 8 rows by the bytes of a swizzle, and Mosaic
cuts an array into such pieces before it describes it to TMA ("dimension 1 must have
size smaller or a multiple of its tiling"). So rows have to be a multiple of 8, columns
one of at least 32 bytes. TMA then reads whole pieces beyond the end as zeros, and drops
them when it writes. The interpreter knows no pieces: other sizes fail on a GPU alone.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from pallas_kernels import backend

ROWS = 8
# Of the widest swizzle and the narrowest that wgmma reads.
_WIDEST, _NARROWEST = 128, 32


def copies_by_tma() -> bool:
    """Whether the device that is compiled for does; a CPU is free of these rules."""
    return (backend.capability() or (0, 0)) >= (9, 0)


def rounded(size: int, multiple: int) -> int:
    """The next multiple, or size if it is one."""
    return -(-size // multiple) * multiple


def columns_at_once(sizes: Iterable[int], itemsize: int) -> int | None:
    """The widest piece that all these numbers of columns are multiples of, or None."""
    sizes, width = list(sizes), _WIDEST // itemsize
    while width * itemsize >= _NARROWEST:
        if all(size % width == 0 for size in sizes):
            return width
        width //= 2
    return None


def padded(t: jax.Array, rows: int, columns: int) -> jax.Array:
    """With zeros up to that shape; the array itself where it has it."""
    widths = ((0, rows - t.shape[0]), (0, columns - t.shape[1]))
    return jnp.pad(t, widths) if any(after for _, after in widths) else t
