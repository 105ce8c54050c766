import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest

from bitmamba import paths
from bitmamba.config import (
    LAYER_SYMBOLS,
    AttentionConfig,
    BitMamba2Config,
    Mamba2Config,
    MLPConfig,
    ModelConfig,
)
from bitmamba.models import MIXERS, build_model, param_shapes


def _tiny(pattern="M", **changes):
    """A config of tiny layers; two groups, three chunks in 20 tokens."""
    fields = {
        "vocab_size": 48,
        "d_model": 16,
        "layers": tuple(LAYER_SYMBOLS[s] for s in pattern),
        "linear": "dense",
        "dtype": "float32",
        "mamba2": Mamba2Config(headdim=8, n_groups=2, d_state=4, chunk_size=8),
        "bitmamba2": BitMamba2Config(n_heads=4, chunk_size=8),
        "attention": AttentionConfig(n_heads=4, n_kv_heads=2, headdim=8),
        "mlp": MLPConfig(d_ff=24),
    }
    return ModelConfig(**(fields | changes))


@pytest.fixture(scope="session")
def tiny():
    return _tiny


@pytest.fixture(scope="session")
def float64():
    """The independent reference, tests/models/float64.py."""
    spec = importlib.util.spec_from_file_location(
        "float64_reference", Path(__file__).parent / "float64.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def fill():
    """Random parameters for a tree of shapes, none 0 or 1 by design; no compilation."""

    def value(path, leaf, rng):
        noise = rng.standard_normal(leaf.shape)
        if path.endswith("kernel"):
            noise = noise / np.sqrt(leaf.shape[0])
        elif path.endswith(("scale", "D", "A_log")):
            noise = 1.0 + 0.2 * noise
        return np.asarray(noise, np.float32)

    def fill_tree(shapes, seed=0):
        rng = np.random.default_rng(seed)
        flat = paths.flatten(shapes)
        return paths.unflatten({p: value(p, leaf, rng) for p, leaf in flat.items()})

    return fill_tree


@pytest.fixture(scope="session")
def make_mixer(fill):
    """(module, parameters) of one mixer."""

    def make(name, cfg, seed=0):
        module = MIXERS[name](cfg)
        x = np.zeros((1, 2, cfg.d_model), np.float32)
        shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), x))
        return module, fill(shapes["params"], seed)

    return make


@pytest.fixture(scope="session")
def make_lm(fill):
    """(model, parameters) of a whole model."""

    def make(cfg, seed=0):
        model = build_model(cfg)
        return model, fill(param_shapes(model), seed)

    return make


@pytest.fixture(scope="session")
def relative_error():
    """Largest difference over largest magnitude, of arrays or trees of them."""

    def error(got, expected):
        def leaf(g, e):
            g, e = np.asarray(g, np.float64), np.asarray(e, np.float64)
            assert g.shape == e.shape
            return float(np.abs(g - e).max() / max(np.abs(e).max(), 1e-30))

        return max(jax.tree.leaves(jax.tree.map(leaf, got, expected)))

    return error
