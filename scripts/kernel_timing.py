"""How long a function takes on the device, and how long it would have to."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

# (name within JAX's device_kind, TFLOP/s of dense bfloat16 products summed in float32,
# TOP/s of int8 products, GB/s of memory). Vendors' data sheets; for bfloat16 on Hopper
# and the H200's memory the rates that are said to be sustained.
DEVICES = (
    ("H200", 790, 1979, 4300),
    ("H100", 790, 1979, 3350),
    ("A100-SXM4-80GB", 312, 624, 2039),
    ("A100", 312, 624, 1555),
    ("RTX 4090", 165, 661, 1008),
    ("RTX 3080 Laptop", 38, 152, 448),
    ("RTX 3060", 25.5, 102, 360),
)
# Cards of other rates whose names begin alike.
_OTHERS = (" Ti", " SUPER", " Laptop", " D", " PCIe", " NVL", " 80GB PCIe")
REPEATS = 20
LEAST_SECONDS = 0.2


def floor_ms(work: Any, device_kind: str) -> float | None:
    """The longer of arithmetic and memory traffic; None for an unknown device.

    Args:
        work: of `kernel_cases.Work`.
    """
    for name, bf16, int8, bandwidth in DEVICES:
        before, found, after = device_kind.partition(name)
        # GH200, RTX 4090 Laptop GPU and the like are not the card that is meant.
        if found and not before[-1:].isalnum() and not after.startswith(_OTHERS):
            rate = {"bf16": bf16, "int8": int8}[work.rate] * 1e12
            return 1e3 * max(work.flops / rate, work.bytes / (bandwidth * 1e9))
    return None


def median_ms(function: Callable, *arguments: Any) -> tuple[float, str]:
    """(median milliseconds of a call, how it was measured); compiled before.

    On a GPU "cupti": the time its kernels take, without the gaps. Where CUPTI does not
    work, and on a CPU, "clock": calls one after another until the last is done.
    """
    jax.block_until_ready(function(*arguments))
    if jax.default_backend() == "gpu":
        try:
            return _cupti_ms(function, arguments), "cupti"
        except Exception as error:  # whatever the profiler finds wrong
            print(f"no CUPTI here ({type(error).__name__}: {error}); taking the clock")
    return _clock_ms(function, arguments), "clock"


def _cupti_ms(function, arguments) -> float:
    from jax.experimental.mosaic.gpu import profiler

    _, found = profiler.measure(function, iterations=REPEATS)(*arguments)
    return statistics.median(found)


def _clock_ms(function, arguments) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    once = max(time.perf_counter() - start, 1e-6)
    calls = max(1, min(50, int(LEAST_SECONDS / once)))
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(calls):
            result = function(*arguments)
        jax.block_until_ready(result)
        taken.append((time.perf_counter() - start) / calls)
    return 1e3 * statistics.median(taken)
