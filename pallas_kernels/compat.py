"""The one place that knows JAX versions (0.10 to 0.12).

The Mosaic GPU names that move between them are in `mosaic`, which only kernel files
import: a process that runs no kernel does not load Pallas.
"""

import jax

HAS_BARRIER = jax.__version_info__ >= (0, 11)
# Tensor-core kernels for GPUs before Hopper. JAX 0.10 has none.
HAS_MOSAIC_GPU = jax.__version_info__ >= (0, 11)
MOSAIC_GPU_NEEDS = "JAX 0.11 or later (and with it Python 3.12)"


def materialise(x: jax.Array) -> jax.Array:
    """x, computed once into an array of its own, whatever reads it.

    Several reads at different offsets within one fusion make XLA:CPU compute what they
    read anew for each of them. JAX 0.10 drops an optimisation barrier before it fuses;
    there a conditional stands for it, with branches that XLA cannot tell to be equal.
    """
    if HAS_BARRIER:
        return jax.lax.optimization_barrier(x)
    first = x[(0,) * x.ndim]
    return jax.lax.cond(first == first, lambda v: v, lambda v: v + 0.0, x)
