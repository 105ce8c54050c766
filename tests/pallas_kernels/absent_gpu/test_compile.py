"""What the compile check leans on: that a bad kernel is caught."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.absent_gpu import absent_gpu, compile_for


def big_tiles(size):
    """Copies a (size, 64) bfloat16 array through shared memory in one tile."""
    from pallas_kernels import mosaic

    def body(x, out, tile):
        tile[...] = x[...]
        out[...] = tile[...]

    return mosaic.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((size, 64), jnp.bfloat16),
        scratch_types=(mosaic.plgpu.SMEM((size, 64), jnp.bfloat16),),
    )


def test_too_much_shared_memory_is_refused_by_this_gpus_limit(rtx3060):
    def compile_tile(size):
        x = jax.ShapeDtypeStruct((size, 64), jnp.bfloat16)
        return compile_for(rtx3060, lambda x: big_tiles(size)(x), x)

    assert compile_tile(512).memory_analysis().output_size_in_bytes == 512 * 64 * 2
    with pytest.raises(ValueError, match="shared memory: smem_bytes=13"):
        compile_tile(1024)  # 128 KB: an H200 has them, this one has 99


def test_a_second_generation_in_one_process_is_refused(rtx3060):
    from pathlib import Path

    targets = Path(__file__).resolve().parents[3] / "scripts" / "gpu_targets"

    with pytest.raises(ValueError, match="expected one in a process"):
        absent_gpu((targets / "h200.txtpb").read_text())
