"""A kernel as scripts/gpu_compile_check.py compiles it: by shape only.

Each operator's shapes.py lists its kernels in `kernel_cases()`. The list is made for
the GPU that is the default device then: sizes may depend on `backend.capability()`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class KernelCase(NamedTuple):
    """name: within the operator. function: of arrays of the shapes in arguments."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
