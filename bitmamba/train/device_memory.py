"""What a device has for a run, and what to change where that is too little."""

import os
from collections.abc import MutableMapping
from typing import NamedTuple

import jax

from bitmamba.config import Config

# JAX alone takes 0.75 of a GPU. What is left is for the driver, a screen, and the
# workspaces of the libraries beside XLA: 0.7 GiB of a card of 12 GB, of which JAX then
# has 11.05 GiB, what full training of the largest preset is planned for (MEMORY.md).
SHARE = "0.94"
_SHARES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


class Limit(NamedTuple):
    """Bytes that a run may use of a device; `setting` and `of` say who says so."""

    size: int
    setting: str
    of: str = ""


def claim_gpu(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let JAX have most of a GPU's memory; to be called before it finds its devices.

    What the user has set stays.
    """
    if not any(name in environment for name in _SHARES):
        environment[_SHARES[0]] = SHARE


def memory_limit(memory_gb: float | None) -> Limit | None:
    """The asked budget (GiB), else what the device lets JAX use; None: unknown."""
    if memory_gb is not None:
        return Limit(int(memory_gb * 2**30), "config.memory_gb")
    device = jax.local_devices()[0]
    size = (device.memory_stats() or {}).get("bytes_limit")
    if size is None:
        return None
    of = f", JAX's part of this {device.device_kind} ({_SHARES[0]} is its share)"
    return Limit(size, "the device's memory", of)


def ways_to_less(config: Config) -> list[str]:
    """Settings that would make the step smaller, those that change least first."""
    optim, train = config.optim, config.train
    is_full = train.mode == "full"
    # Sums of gradients are held where there are several micro-batches.
    is_summed = train.accumulation > 1
    ways = {
        "model.remat=True": not config.model.remat,
        "a smaller train.batch_size, with as much more train.accumulation": (
            train.batch_size > 1
        ),
        "optim.name=adafactor": is_full and optim.name != "adafactor",
        "optim.gradient_dtype=bfloat16": (
            is_full and is_summed and optim.gradient_dtype == "float32"
        ),
        "optim.master_dtype=bfloat16": is_full and optim.master_dtype == "float32",
        "a smaller data.window": True,
        "adapters (configs/lora.py)": is_full,
    }
    return [way for way, helps in ways.items() if helps]
