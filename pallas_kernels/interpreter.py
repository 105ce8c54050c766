"""What JAX's interpreter of Mosaic kernels lacks for several warpgroups and wgmma.

It takes the left operand of wgmma from shared memory only, does not look for races of
what wgmma reads, and may wait for ever where there are fewer cores than warpgroups. All
three are mended where a kernel is interpreted; nothing of this is compiled.
"""

from typing import Any

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import thread_map
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
        with np.errstate(all="ignore"):  # a GPU does not warn of infinite - infinite
            return _from_shared_memory(**call)

    memory, thread = gpu_callbacks._get_shared_memory(), call["thread"]
    acc_key, acc_access = _access(call, "acc")
    b = memory.get_buffer_content(b_key, b_access, thread)[0]
    acc = memory.get_buffer_content(acc_key, acc_access, thread)[0]
    with np.errstate(all="ignore"):
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
    """Report a read that no barrier, or no fence, orders after the write of it.

    wgmma reads as TMA does, apart from the thread that asked for it. Here it is done
    when the call returns: a `wgmma_wait` that is missing does not show.
    """
    memory, thread = gpu_callbacks._get_shared_memory(), call["thread"]
    if not memory.detect_races:
        return
    clock = memory.incr_clock(thread)
    clock.inc(memory.get_next_tma_thread_id())
    gpu_callbacks.get_races().check_read(
        thread,
        clock.async_smem_clock.copy(),
        key,
        access,
        source_info=call.get("source_info"),
    )
    with memory.lock:
        memory.clocks[thread].update(clock)


gpu_callbacks.wgmma = _wgmma


def _run_jaxpr(jaxpr: Any, consts: Any, *args: Any) -> None:
    """As JAX's: what one warpgroup does. But what waits for another waits here.

    By itself XLA hands parts of such a program to a pool of as many threads as there
    are cores: once all of them wait at barriers, nobody is left to arrive there.
    """
    run = jax.jit(thread_map._run, static_argnums=(0,))
    compiled = run.lower(jaxpr, consts, *args).compile(compiler_options=_IN_SEQUENCE)
    compiled(consts, *args)


_IN_SEQUENCE = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}

thread_map._run_jaxpr = _run_jaxpr
