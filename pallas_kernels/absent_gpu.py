"""Compile for a GPU that is not there: XLA, Mosaic and ptxas run on any x86-64 Linux.

A GPU is described by a GpuTargetConfigProto in text form (scripts/gpu_targets/). What
is compiled cannot run here; registers, shared memory, the program and its memory plan
are those of the described GPU, except that XLA cannot time its choices of products.
"""

import contextlib
import importlib.metadata
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from pallas_kernels import compat

PACKAGES = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm")

_compiled_for: set[str] = set()


class AbsentGPU(NamedTuple):
    """devices: of JAX, compile-only. shared_memory: bytes one block may use."""

    devices: tuple[Any, ...]
    shared_memory: int


def missing() -> str | None:
    """What has to be installed before anything can be compiled, or None."""
    if not compat.HAS_MOSAIC_GPU:
        return f"JAX {jax.__version__}: expected {compat.MOSAIC_GPU_NEEDS}"
    lacking = [name for name in PACKAGES if not _is_installed(name)]
    if lacking:
        return f"{', '.join(lacking)}: not installed; install the extra 'gpucheck'"
    return None


def absent_gpu(config: str, *, n_devices: int = 1) -> AbsentGPU:
    """The GPU that a target text describes, n_devices times.

    Raises:
        ValueError: another architecture was compiled for in this process: Mosaic keeps
            the first one's assembler settings.
    """
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=config,
        topology=f"1x1x{n_devices}",
    )
    wanted = topology.devices[0].compute_capability
    if _compiled_for - {wanted}:
        raise ValueError(
            f"absent_gpu: got compute capability {wanted} after "
            f"{', '.join(_compiled_for)}; expected one in a process; start another"
        )
    _compiled_for.add(wanted)
    limit = re.search(r"shared_memory_per_block_optin: (\d+)", config)
    return AbsentGPU(tuple(topology.devices), int(limit[1]))


def compile_for(
    gpu: AbsentGPU,
    function: Callable[..., Any],
    *arguments: Any,
    mesh: jax.sharding.Mesh | None = None,
    **jit_options: Any,
) -> Any:
    """jax.jit(function, **jit_options), compiled for the GPU and these shapes.

    Args:
        gpu: of `absent_gpu`.
        function: of arrays.
        arguments: trees of ShapeDtypeStruct; those without a sharding are on the first
            device, or with a mesh on all.
        mesh: set while the function is traced.

    Returns:
        What `Lowered.compile` does: as_text(), memory_analysis().

    Raises:
        ValueError: a kernel needs more shared memory than the GPU has.
    """
    from jax.experimental.mosaic import gpu as mgpu

    if mesh is None:
        here = jax.sharding.SingleDeviceSharding(gpu.devices[0])
        setting = contextlib.nullcontext()
    else:
        here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        setting = jax.set_mesh(mesh)

    def placed(t):
        sharding = here if t.sharding is None else t.sharding
        return jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=sharding)

    arguments = jax.tree.map(placed, arguments)
    # Mosaic takes the default device's generation, but for a device that is absent it
    # assumes the shared memory of the largest GPU.
    limit = mgpu.core.artificial_shared_memory_limit(gpu.shared_memory)
    with jax.default_device(gpu.devices[0]), limit, setting, _kept_nowhere():
        return jax.jit(function, **jit_options).lower(*arguments).compile()


@contextlib.contextmanager
def _kept_nowhere():
    """What is compiled for an absent device could not be read from a cache again."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
