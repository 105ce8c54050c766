"""What JAX's interpreter of Mosaic kernels leaves out of wgmma.

It takes the left operand from shared memory only, and does not look for races of what
wgmma reads. Both are added where a kernel is interpreted; nothing of this is compiled.
"""

from typing import Any

import jax
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

_from_shared_memory = gpu_callbacks.wgmma


@gpu_callbacks.fail_on_exception
def _wgmma(*, a_allocation_key_as_array: Any, **call: Any) -> jax.Array:
    """As JAX's; also for a left operand that is a value, not the key of a buffer."""
    a = np.asarray(a_allocation_key_as_array)
    b_key, b_access = _access(call, "b")
    _check_read(call, b_key, b_access)
    # A key is a row of integers, a value in registers is a matrix.
    if a.ndim == 1:
        call["a_allocation_key_as_array"] = a_allocation_key_as_array
        _check_read(call, *_access(call, "a"))
        return _from_shared_memory(**call)

    memory, thread = gpu_callbacks._get_shared_memory(), call["thread"]
    acc_key, acc_access = _access(call, "acc")
    b = memory.get_buffer_content(b_key, b_access, thread)[0]
    acc = memory.get_buffer_content(acc_key, acc_access, thread)[0]
    total = acc + np.matmul(a, b, dtype=acc.dtype)
    memory.store_buffer_content(acc_key, acc_access, total, thread)
    return call["token"]


def _access(call, name):
    """The key of an operand's buffer, and which part of it."""
    array = call[f"{name}_allocation_key_as_array"]
    key = gpu_callbacks.HostAllocationKey.from_array(array)
    kept = gpu_callbacks._remove_noop_transforms(call[f"{name}_transforms"])
    memory = gpu_callbacks._get_shared_memory()
    return key, memory.access(key, jax.tree.map(int, kept))


def _check_read(call, key, access):
    """Report a read that no barrier, or no fence, orders after the write of it."""
    memory, thread = gpu_callbacks._get_shared_memory(), call["thread"]
    if not memory.detect_races:
        return
    with memory.lock:
        clocks = memory.clocks[thread]
        clocks.inc(memory.thread_to_vc_position(thread))
        clock = clocks.async_smem_clock.copy()
    gpu_callbacks.get_races().check_read(
        thread, clock, key, access, source_info=call.get("source_info")
    )


gpu_callbacks.wgmma = _wgmma
