"""Weights as the layers multiply by them, made beforehand.

Frozen ones are quantised or cast once for all; the codes of what trains once a step.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from bitmamba import paths
from bitmamba.config import ModelConfig
from bitmamba.quant.latent import CodedLatent, Codes, make_codes
from bitmamba.quant.ternary import freeze_ternary
from bitmamba.types import Params


def freeze(tree: Params, cfg: ModelConfig, *, codes: str = "compute") -> Params:
    """Frozen parameters in the form that costs nothing in a step.

    Kernels of ternary layers become `TernaryWeight`s, other kernels of projections
    and of an untied head are cast to the compute dtype; everything else stays.

    Leaf by leaf, so that only one weight at a time is on the device in both forms.

    Args:
        tree: float32 parameters that will not change; any part of a model's; on the
            host or on the device.
        cfg: of the model.
        codes: "compute" stores codes in cfg.dtype, "int8" in a byte each.

    Returns:
        A tree of the same paths. The forward pass gives the same bits.
    """
    dtype = jnp.dtype(cfg.dtype)
    code_dtype = {"compute": dtype, "int8": jnp.int8}[codes]
    flat = paths.flatten(tree)
    for path, leaf in flat.items():
        if is_projection(path) and cfg.linear == "bit":
            flat[path] = _freeze_ternary(leaf, code_dtype)
        else:
            flat[path] = jnp.asarray(leaf, dtype if is_projection(path) else None)
    return paths.unflatten(flat)


_freeze_ternary = jax.jit(freeze_ternary, static_argnums=1)


def trained_codes(tree: Params, cfg: ModelConfig) -> dict[str, Codes]:
    """{path: codes} of the ternary kernels of a tree whose latent weights train.

    Args:
        tree: parameters; any part of a model's.
        cfg: of the model. With `remat` codes are packed: layers keep no codes for their
            backward pass then, so at a byte each these would be the largest of all that
            a step holds beside the weights and their gradients.
    """
    if cfg.linear != "bit":
        return {}
    kernels = {p: w for p, w in paths.flatten(tree).items() if is_projection(p)}
    return {path: make_codes(w, packed=cfg.remat) for path, w in kernels.items()}


def with_codes(tree: Params, codes: Mapping[str, Codes]) -> Params:
    """The tree with a `CodedLatent` wherever there are codes of `trained_codes`."""
    flat = paths.flatten(tree)
    return paths.unflatten(
        flat | {p: CodedLatent(flat[p], c) for p, c in codes.items()}
    )


def is_projection(path: str) -> bool:
    """Whether `linear` or the head multiplies by this parameter."""
    return path.endswith("_proj/kernel") or path == "lm_head/kernel"


def projection_value(tree: Params, site: str) -> jax.Array:
    """The (D, F) values that a site of a frozen tree stands for, float32."""
    kernel = paths.flatten(tree)[f"{site}/kernel"]
    value = kernel.value() if hasattr(kernel, "codes") else kernel
    return value.astype(jnp.float32)
