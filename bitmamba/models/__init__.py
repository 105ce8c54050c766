"""Hybrid state-space language models as thin Flax modules over pure functions.

    model = build_model(cfg)
    params = init_params(model, jax.random.key(0))
    hidden, head = model.apply(variables(model, params), tokens, method="features")

Parameter paths ("layer_0/mixer/in_proj/kernel", ...) are a public contract.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bitmamba.config import ModelConfig
from bitmamba.models.adapters import collections
from bitmamba.models.attention import Attention
from bitmamba.models.bitmamba2 import BitMamba2
from bitmamba.models.cache import DecodeState
from bitmamba.models.lm import LM
from bitmamba.models.mamba2 import Mamba2
from bitmamba.models.mlp import MLP
from bitmamba.types import AdapterSpec, Params

MIXERS = {"mamba2": Mamba2, "bitmamba2": BitMamba2, "attention": Attention, "mlp": MLP}


def build_model(
    cfg: ModelConfig, *, kernels: str = "auto", adapters: Sequence[AdapterSpec] = ()
) -> LM:
    """The model of a config, without parameters.

    Args:
        cfg: the architecture.
        kernels: implementation of the sequence operators.
        adapters: low-rank branches beside its weights; `bitmamba.lora` makes them.

    Raises:
        ValueError: a layer name that is not in MIXERS.
    """
    mixers = tuple(_mixer(name, i) for i, name in enumerate(cfg.layers))
    return LM(cfg, mixers, kernels, tuple(adapters))


def variables(model: LM, tree: Params) -> dict[str, Any]:
    """What `model.apply` takes: the tree split into parameters and adapters."""
    return collections(tree, model.adapters)


def init_params(model: LM, key: jax.Array) -> dict[str, Any]:
    """Fresh float32 parameters, by one compiled program without the forward pass."""
    return jax.jit(lambda k: _init(model, k))(key)


def param_shapes(model: LM) -> dict[str, Any]:
    """The tree of parameters as ShapeDtypeStructs; allocates nothing.

    Each kind of layer is traced once, so that deep models take no longer.
    """
    kinds = tuple(dict.fromkeys(model.cfg.layers))
    shallow = build_model(dataclasses.replace(model.cfg, layers=kinds))
    shapes = jax.eval_shape(lambda: _init(shallow, jax.random.key(0)))
    layers = {name: shapes.pop(f"layer_{i}") for i, name in enumerate(kinds)}
    deep = {f"layer_{i}": layers[name] for i, name in enumerate(model.cfg.layers)}
    return shapes | deep


def count_params(model: LM) -> int:
    """The exact number of parameters; allocates nothing."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(param_shapes(model)))


def init_decode_state(
    cfg: ModelConfig, batch: int, max_len: int, dtype: Any = None
) -> DecodeState:
    """The state before the first token.

    Args:
        cfg: of the model that will decode.
        batch: rows.
        max_len: tokens, padding included, that a row may reach (attention only).
        dtype: of attention caches and convolution windows; None is cfg.dtype. The
            recurrent state is float32 always.
    """
    dtype = jnp.dtype(cfg.dtype if dtype is None else dtype)
    layers = tuple(
        _mixer(name, i).init_state(cfg, batch, max_len, dtype)
        for i, name in enumerate(cfg.layers)
    )
    return DecodeState(layers, jnp.zeros((batch,), jnp.int32))


def _init(model: LM, key: jax.Array) -> dict[str, Any]:
    return model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]


def _mixer(name: str, index: int) -> type:
    if name not in MIXERS:
        raise ValueError(
            f"model.layers[{index}]: got {name!r}; expected one of {', '.join(MIXERS)}"
        )
    return MIXERS[name]
