"""How a kernel is interpreted: races are found, unwritten output shows."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat

pytestmark = pytest.mark.skipif(
    not compat.HAS_MOSAIC_GPU, reason=f"needs {compat.MOSAIC_GPU_NEEDS}"
)


def copy_kernel(*, waits, length=128):
    """Adds 1 to `length` of 128 numbers, by way of shared memory."""
    from pallas_kernels import mosaic
    from pallas_kernels.mosaic import plgpu

    def body(x, out, tile, barrier):
        plgpu.copy_gmem_to_smem(x, tile, barrier)
        if waits:
            plgpu.barrier_wait(barrier)
        out.at[:length][...] = tile[:length] + 1

    return mosaic.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=(plgpu.SMEM((128,), jnp.float32), plgpu.Barrier()),
    )


X = jnp.arange(128, dtype=jnp.float32)


def test_a_kernel_that_waits_has_no_race():
    from pallas_kernels import mosaic

    with mosaic.races_raise():
        y = copy_kernel(waits=True)(X)

    np.testing.assert_array_equal(y, X + 1)


def test_a_race_is_found_also_when_a_sound_kernel_follows():
    from pallas_kernels import mosaic

    def racy_then_sound():
        with mosaic.races_raise():
            copy_kernel(waits=False)(X)
            copy_kernel(waits=True)(X)

    with pytest.raises(RuntimeError, match="race"):
        racy_then_sound()


def product_kernel(*, waits=True, fenced=True, in_registers=False):
    """A (64, 64) product by wgmma of tiles that TMA, or the warpgroup, has written."""
    from pallas_kernels import interpreter, mosaic  # noqa: F401
    from pallas_kernels.mosaic import plgpu

    def body(a, b, out, a_tile, b_tile, doubled, barrier):
        plgpu.copy_gmem_to_smem(a, a_tile, barrier)
        plgpu.copy_gmem_to_smem(b, b_tile, barrier)
        if waits:
            plgpu.barrier_wait(barrier)
        doubled[...] = b_tile[...] * 2
        if fenced:
            plgpu.commit_smem()

        def total(acc):
            plgpu.wgmma(acc, a_tile[...] if in_registers else a_tile, doubled)
            return acc[...]

        out[...] = mosaic.pl.run_scoped(total, plgpu.ACC((64, 64), jnp.float32))

    tile = mosaic.smem((64, 64), jnp.bfloat16)
    return mosaic.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types=(tile, tile, tile, plgpu.Barrier(num_arrivals=2)),
    )


SQUARES = np.random.default_rng(0).integers(-8, 8, (2, 64, 64))


@pytest.mark.parametrize("in_registers", [False, True])
def test_wgmma_multiplies_from_shared_memory_and_from_registers(in_registers):
    from pallas_kernels import mosaic

    a, b = jnp.asarray(SQUARES, jnp.bfloat16)
    with mosaic.races_raise():
        y = product_kernel(in_registers=in_registers)(a, b)

    np.testing.assert_array_equal(y, 2 * SQUARES[0] @ SQUARES[1])


@pytest.mark.parametrize("missing", ["waits", "fenced"])
def test_a_race_of_what_wgmma_reads_is_found(missing):
    from pallas_kernels import mosaic

    def race():
        with mosaic.races_raise():
            product_kernel(**{missing: False})(*jnp.asarray(SQUARES, jnp.bfloat16))

    with pytest.raises(RuntimeError, match="race"):
        race()


ON_ONE_CORE = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax.numpy as jnp
from pallas_kernels import mosaic
from pallas_kernels.out_prod.kernels_hopper import out_prod_wgmma
from pallas_kernels.tile_sizes import Tiles
sizes = (264, 192), (72, 192), (264, 72), (72, 72)
a, b, u, v = (jnp.ones(size, jnp.bfloat16) for size in sizes)
options = {"transpose_a": False, "transpose_b": True, "tiles": Tiles(128, 64, 64, 3)}
with mosaic.races_raise():
    y = out_prod_wgmma(a, b, jnp.ones(1), (u, v), **options)
assert (y == 264).all()
"""


@pytest.mark.once
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_six_warpgroups_are_interpreted_on_one_core():
    subprocess.run([sys.executable, "-c", ON_ONE_CORE], check=True, timeout=120)


def test_nothing_to_interpret_is_an_error():
    from pallas_kernels import mosaic

    def nothing():
        with mosaic.races_raise():
            pass

    with pytest.raises(RuntimeError, match="no kernel was interpreted"):
        nothing()


def test_what_a_kernel_does_not_write_is_nan():
    y = copy_kernel(waits=True, length=64)(X)

    np.testing.assert_array_equal(y[:64], X[:64] + 1)
    assert np.isnan(y[64:]).all()


def test_a_kernel_may_be_computed_again_by_checkpoint():
    add_one = jax.custom_vjp(lambda x: copy_kernel(waits=True)(x))
    add_one.defvjp(lambda x: (add_one(x), None), lambda _, dy: (dy,))

    def f(x):
        return jnp.sum(jnp.sin(add_one(jnp.cos(x))))

    np.testing.assert_allclose(
        jax.jit(jax.grad(jax.checkpoint(f)))(X), jax.grad(f)(X), rtol=1e-6
    )
