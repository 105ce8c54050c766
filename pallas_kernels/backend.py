"""Which implementation of an operator runs."""

import functools
import logging

import jax

IMPLEMENTATIONS = ("auto", "reference", "pallas")

_log = logging.getLogger("pallas_kernels")


@functools.cache
def _log_choice(op: str, asked: str, chosen: str, reason: str) -> None:
    """One line for each distinct choice in the life of the process."""
    _log.info("%s: implementation=%s runs %s (%s)", op, asked, chosen, reason)


def resolve(implementation: str, *, op: str) -> str:
    """Turn the caller's wish into the implementation that runs.

    Args:
        implementation: "auto", "reference" or "pallas".
        op: name of the operator, for messages.

    Returns:
        "reference" (the only one there is so far).

    Raises:
        ValueError: the name is unknown.
        NotImplementedError: "pallas" was asked for; the message says what is missing.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"{op}: implementation: got {implementation!r}; expected one of "
            f"{', '.join(map(repr, IMPLEMENTATIONS))}; use 'auto' when in doubt"
        )
    if implementation == "pallas":
        raise NotImplementedError(
            f"{op}: implementation: got 'pallas'; there is no Pallas kernel for {op} "
            f"on platform {jax.default_backend()!r} with JAX {jax.__version__}; "
            "use 'auto' or 'reference'"
        )
    if implementation == "auto":
        _log_choice(op, "auto", "reference", "no kernel has been written for it")
    return "reference"
