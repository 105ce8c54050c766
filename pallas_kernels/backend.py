"""Which implementation of an operator runs, and on what."""

import contextlib
import contextvars
import functools
import logging
from collections.abc import Iterator

import jax
from jax.extend import backend as jax_backend

from pallas_kernels import compat

IMPLEMENTATIONS = ("auto", "reference", "pallas")
# The first GPU generation with the tensor-core instructions the kernels use.
OLDEST_GPU = (8, 0)

# Tensor-core instructions: warps with registers, sm_80 and later; or whole warpgroups
# that read shared memory, sm_90 alone.
PRODUCTS = ("mma", "wgmma")

_log = logging.getLogger("pallas_kernels")
_products: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "pallas_kernels_products", default=None
)


@functools.cache
def log_choice(op: str, asked: str, chosen: str, reason: str) -> None:
    """One line for each distinct choice in the life of the process."""
    _log.info("%s: implementation=%s runs %s (%s)", op, asked, chosen, reason)


def platform() -> str:
    """Of the device that a computation traced now runs on: "cpu", "gpu" or another."""
    return jax_backend.get_default_device().platform


def capability() -> tuple[int, int] | None:
    """Compute capability of that device, e.g. (8, 6); None if it is no NVIDIA GPU."""
    text = getattr(jax_backend.get_default_device(), "compute_capability", "")
    parts = str(text).split(".")
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        return None
    return int(parts[0]), int(parts[1])


def multiprocessors() -> int:
    """Of that device; a CPU interprets two, so that blocks have several tiles."""
    return getattr(jax_backend.get_default_device(), "core_count", None) or 2


def products() -> str:
    """Which of `PRODUCTS` kernels traced now use where they have both forms.

    "wgmma" on sm_90, "mma" on every other device, if `products_by` says nothing else.
    """
    found = "wgmma" if capability() == (9, 0) else "mma"
    return _products.get() or found


@contextlib.contextmanager
def products_by(which: str) -> Iterator[None]:
    """Trace kernels with that form of `PRODUCTS`: to check wgmma on a CPU, which
    interprets it, or to time the portable form on Hopper.

    It is no part of the key of `jax.jit`'s cache: trace a new function inside.
    """
    if which not in PRODUCTS:
        raise ValueError(
            f"products_by: got {which!r}; expected one of "
            f"{', '.join(map(repr, PRODUCTS))}"
        )
    token = _products.set(which)
    try:
        yield
    finally:
        _products.reset(token)


def resolve(
    implementation: str,
    *,
    op: str,
    has_kernel: bool = False,
    refusal: str | None = None,
    wins: bool = False,
) -> str:
    """Turn the caller's wish into the implementation that runs.

    Args:
        implementation: "auto", "reference" or "pallas".
        op: name of the operator, for messages.
        has_kernel: whether a Pallas kernel has been written for the operator.
        refusal: why it cannot take these arguments ("x: got …; expected …"), or None.
        wins: whether "auto" takes the kernel on a GPU: only where it is known, by
            measurement or by count, to beat the reference.

    Returns:
        "reference" or "pallas". On a CPU "pallas" is interpreted (`mosaic.kernel`).

    Raises:
        ValueError: the name is unknown.
        NotImplementedError: "pallas" was asked for; the message says what is missing.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"{op}: implementation: got {implementation!r}; expected one of "
            f"{', '.join(map(repr, IMPLEMENTATIONS))}; use 'auto' when in doubt"
        )
    if implementation == "reference":
        return "reference"
    missing = _missing(op, has_kernel, refusal)
    if implementation == "pallas":
        if missing:
            raise NotImplementedError(
                f"{op}: implementation: got 'pallas'; {missing}; use 'auto' or "
                "'reference'"
            )
        if platform() == "cpu":
            log_choice(op, "pallas", "pallas", "interpreted: slow, for checking only")
        return "pallas"
    reason = missing or _loss(wins)
    log_choice(op, "auto", *(("reference", reason) if reason else ("pallas", "GPU")))
    return "reference" if reason else "pallas"


def _missing(op: str, has_kernel: bool, refusal: str | None) -> str | None:
    """What a kernel lacks to run here, or None."""
    here = f"on platform {platform()!r} with JAX {jax.__version__}"
    if not has_kernel:
        return f"there is no Pallas kernel for {op} {here}"
    if not compat.HAS_MOSAIC_GPU:
        return f"the kernel needs {compat.MOSAIC_GPU_NEEDS}; this is {jax.__version__}"
    if platform() not in ("cpu", "gpu"):
        return f"the kernel does not run {here}; expected 'gpu', or 'cpu' to check it"
    if platform() == "gpu" and (capability() or (0, 0)) < OLDEST_GPU:
        found = jax_backend.get_default_device().device_kind
        return f"the kernel needs an NVIDIA GPU of sm_80 or later; this is {found}"
    if not refusal and jax.config.jax_enable_x64:
        return "the kernel counts in 32 bits, and jax_enable_x64 is on; switch it off"
    return refusal


def _loss(wins: bool) -> str | None:
    """Why "auto" leaves a kernel that could run, or None."""
    if platform() == "cpu":
        return "no GPU here"
    return None if wins else "not known to be faster than XLA here"
