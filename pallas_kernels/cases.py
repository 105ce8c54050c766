"""A kernel as scripts/gpu_compile_check.py compiles it: by shape only.

Each operator's shapes.py lists its kernels in `kernel_cases()`. The list is made for
the GPU that is the default device then: sizes may depend on `backend.capability()`,
and a case for one generation alone is listed `if backend.products() == "wgmma"`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from pallas_kernels import backend


class KernelCase(NamedTuple):
    """name: within the operator. function: of arrays of the shapes in arguments."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]


def in_both_forms(make: Callable[[], list[KernelCase]]) -> list[KernelCase]:
    """The cases of make() in the form that the GPU takes by itself.

    On Hopper these use wgmma, and the portable form of each follows as "<name>_mma":
    `backend.products_by("mma")` runs it there.
    """
    found = make()
    if backend.products() == "wgmma":
        with backend.products_by("mma"):
            found = found + [_portable(case) for case in make()]
    return found


def _portable(case: KernelCase) -> KernelCase:
    def function(*arguments):
        with backend.products_by("mma"):
            return case.function(*arguments)

    return KernelCase(f"{case.name}_mma", function, case.arguments)
