"""Sizes and array forms shared by the kernels of the scan."""

from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl


class Sizes(NamedTuple):
    """B, C chunks of Q tokens, H, P, G, N; and in how many parts operands come."""

    b: int
    c: int
    q: int
    h: int
    p: int
    g: int
    n: int
    parts: int

    @property
    def heads_per_group(self) -> int:
        return self.h // self.g

    @property
    def tokens(self) -> int:
        """Rows of one part of x (parts·B·L, H·P)."""
        return self.b * self.c * self.q


def heads_per_block(sizes: Sizes) -> int:
    """Heads that one thread block goes through, sharing C Bᵀ among them.

    Many, so that the shared part costs little, yet few enough that `_BLOCKS` thread
    blocks run at once.
    """
    s = sizes
    heads = s.heads_per_group
    fitting = [n for n in range(1, heads + 1) if heads % n == 0 and n <= _MOST_HEADS]
    full = [n for n in fitting if s.b * s.c * s.h // n >= _BLOCKS]
    return max(full, default=1)


_MOST_HEADS = 16
_BLOCKS = 256


class Block(NamedTuple):
    """Where one thread block's data lie: chunk of a row, and a block of heads."""

    s: Sizes
    heads: int
    b: Any
    chunk: Any
    block: Any

    @classmethod
    def here(cls, sizes: Sizes, heads: int) -> "Block":
        """From the grid (block, chunk, b)."""
        b, chunk, block = (lax.axis_index(name) for name in ("b", "chunk", "block"))
        return cls(sizes, heads, b, chunk, block)

    def moved(self, by: Any) -> "Block":
        """The same place if `by` is zero, which a compiler may not know."""
        here = (self.b + by, self.chunk + by, self.block + by)
        return Block(self.s, self.heads, *here)

    @property
    def maps(self) -> Any:
        """Columns of B and C."""
        group = lax.div(self.block * self.heads, self.s.heads_per_group)
        return pl.ds(group * self.s.n, self.s.n)

    def rows(self, part: int) -> Any:
        """Rows of x, B, C."""
        s = self.s
        return pl.ds(((part * s.b + self.b) * s.c + self.chunk) * s.q, s.q)

    def block_rows(self, part: int) -> Any:
        """Rows of what there is one of for each block of heads."""
        s = self.s
        first = part * (s.h // self.heads) + self.block
        return pl.ds(((first * s.b + self.b) * s.c + self.chunk) * s.q, s.q)

    def state(self, part: int, head: Any) -> Any:
        """Rows of the states."""
        s = self.s
        chunk = (part * s.b + self.b) * s.c + self.chunk
        return pl.ds((chunk * s.h + head) * s.p, s.p)

    def vector(self, head: Any, first: int, n: int, of: int) -> Any:
        """`n` of the `of` vectors of a head's chunk."""
        s = self.s
        at = ((self.b * s.h + head) * s.c + self.chunk) * of + first
        return pl.ds(at * s.q, n * s.q)
