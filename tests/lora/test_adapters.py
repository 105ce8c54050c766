"""First values of adapters: they change nothing, and each has its own stream."""

import jax
import jax.numpy as jnp
import numpy as np

from bitmamba import paths
from bitmamba.lora.adapters import (
    adapter_shapes,
    init_adapters,
    is_adapter_leaf,
    partner,
)
from bitmamba.types import AdapterSpec

SPECS = (
    AdapterSpec("embed", "embed", (48, 16), 0, 4, 2.0),
    AdapterSpec("layer_0/mixer/in_proj/x", "layer_0/mixer/in_proj", (16, 8), 4, 3, 1.0),
    AdapterSpec("layer_1/mixer/q", "layer_1/mixer/q", (16, 8), 0, 3, 1.0, 0.0, True),
)
OFFSETS = {"layer_0/mixer/state_offset": (2, 3, 4)}
WEIGHT = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)


def first(specs=SPECS, seed=0):
    return paths.flatten(
        init_adapters(
            specs,
            OFFSETS,
            weight=lambda site: jnp.asarray(WEIGHT),
            key=jax.random.key(seed),
        )
    )


def test_one_factor_is_zero_and_the_other_is_not():
    values = first()

    zero = {path for path, value in values.items() if not np.any(value)}
    assert zero == {
        "embed/a",
        "layer_0/mixer/in_proj/x/b",
        "layer_1/mixer/q/b",
        "layer_0/mixer/state_offset",
    }
    spread = np.asarray(values["layer_0/mixer/in_proj/x/a"])
    assert 0.15 < np.abs(spread).max() <= 16**-0.5
    np.testing.assert_allclose(
        values["layer_1/mixer/q/magnitude"], np.linalg.norm(WEIGHT, axis=0), rtol=1e-6
    )


def test_shapes_are_those_of_the_values():
    shapes = paths.flatten(adapter_shapes(SPECS, OFFSETS))

    assert {p: v.shape for p, v in first().items()} == {
        p: s.shape for p, s in shapes.items()
    }
    assert all(is_adapter_leaf(path) for path in shapes)
    assert not is_adapter_leaf("layer_0/mixer/in_proj/kernel")


def test_an_adapters_first_values_do_not_depend_on_the_others():
    alone, together, other = first(SPECS[1:2]), first(), first(seed=1)

    path = "layer_0/mixer/in_proj/x/a"
    assert np.array_equal(alone[path], together[path])
    assert not np.array_equal(other[path], together[path])


def test_partners_are_the_two_factors():
    assert partner("x/in_proj/a") == "x/in_proj/b"
    assert partner("x/in_proj/b") == "x/in_proj/a"
    assert partner("x/A_log") is None
