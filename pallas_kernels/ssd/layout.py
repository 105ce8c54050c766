"""Sizes and array forms shared by the kernels of the scan."""

from typing import NamedTuple


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
