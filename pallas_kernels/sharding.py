"""Kernels on several devices: each works on its own part of the batch.

XLA cannot split a kernel: left to itself it gathers every operand on every device.
Where a mesh with the axis `BATCH_AXIS` is set (`jax.set_mesh`), each kernel runs under
`jax.shard_map` instead. The custom gradients are outside of it, made of such parts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

BATCH_AXIS = "data"


def over_batch(
    function: Callable[..., Any],
    arrays: Sequence[jax.Array | None],
    *,
    axes: Sequence[int | None],
    out_axes: Any,
) -> Any:
    """function(*arrays), each device on its part of the batch.

    Args:
        function: of arrays; what it returns for a part of the batch is that part of
            what it returns for all, or, where `out_axes` says None, its own concern.
        arrays: None where there is none.
        axes: which axis of each is the batch; None for those that all devices share.
        out_axes: the same for each output; one number or None for one output.

    Returns:
        What function does. Without a mesh, or inside another shard_map, it is called
        as it is. A batch that the devices cannot share evenly is computed by all.
    """
    n_parts = parts()
    if n_parts == 1:
        return function(*arrays)
    pairs = [(t, axis) for t, axis in zip(arrays, axes, strict=True) if t is not None]
    even = all(axis is None or t.shape[axis] % n_parts == 0 for t, axis in pairs)

    def spec(axis):
        if axis is None or not even:
            return PartitionSpec()
        return PartitionSpec(*[None] * axis, BATCH_AXIS)

    one = not isinstance(out_axes, tuple)
    return jax.shard_map(
        function,
        in_specs=tuple(spec(axis) for axis in axes),
        out_specs=spec(out_axes) if one else tuple(spec(axis) for axis in out_axes),
        check_vma=False,
    )(*arrays)


def parts() -> int:
    """Into how many parts the mesh splits the batch; 1 without one."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or BATCH_AXIS not in mesh.axis_names:
        return 1
    return 1 if BATCH_AXIS in mesh.manual_axes else mesh.shape[BATCH_AXIS]
