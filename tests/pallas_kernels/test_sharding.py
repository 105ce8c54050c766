"""Parts of a batch on two CPU devices, with functions that stand for kernels.

The kernels themselves: absent_gpu/test_sharding.py, and interpreted on one device.
"""

import subprocess
import sys

CODE = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import Mesh
from pallas_kernels.sharding import BATCH_AXIS, over_batch, parts

def kernel(x, w, none):
    seen.append(x.shape)
    assert none is None
    return x * w, x.sum(1)

def run(x, w):
    axes = (0, None, None)
    return over_batch(kernel, (x, w, None), axes=axes, out_axes=(0, 0))

def share(x):
    return lax.psum(x.sum(0), BATCH_AXIS)

x, w = jnp.arange(12.0).reshape(4, 3), jnp.arange(3.0)
mesh = Mesh(np.array(jax.devices()), (BATCH_AXIS,))
for set_mesh, rows, expected in (
    (False, 4, (4, 3)), (True, 4, (2, 3)), (True, 3, (3, 3))
):
    seen = []
    part = x[:rows]
    if set_mesh:
        with jax.set_mesh(mesh):
            assert parts() == 2
            y, sums = jax.jit(run)(part, w)
            total = over_batch(share, (x,), axes=(0,), out_axes=None)
            inner = lambda x: (over_batch(lambda t: t, (x,), axes=(0,), out_axes=0))
            spec = jax.sharding.PartitionSpec(BATCH_AXIS)
            same = jax.shard_map(inner, in_specs=spec, out_specs=spec)(x)
        np.testing.assert_array_equal(total, x.sum(0))
        np.testing.assert_array_equal(same, x)
    else:
        assert parts() == 1
        y, sums = jax.jit(run)(part, w)
    np.testing.assert_array_equal(y, part * w)
    np.testing.assert_array_equal(sums, part.sum(1))
    assert seen == [expected], seen
"""


def test_parts_of_a_batch_make_the_whole():
    flags = "--xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        env={"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": "."},
    )

    assert done.returncode == 0, done.stderr
