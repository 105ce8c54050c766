"""What a step minimises: cross-entropy, and how far the model may leave the base."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from bitmamba import paths
from bitmamba.config import LossConfig
from bitmamba.lora.adapters import is_adapter_leaf
from bitmamba.losses import LOSSES, tmkl, tmkl_topk, top_k_logits
from bitmamba.models import LM, build_model, variables
from bitmamba.models.frozen import freeze, trained_codes, with_codes
from bitmamba.optim import Hyper
from bitmamba.quant.latent import Codes
from bitmamba.train.step import TokenLoss
from bitmamba.types import Batch, BatchWithBase, Features, Params


class Frozen(NamedTuple):
    """What a step reads and never changes.

    weights: parameters that do not train, as `models.frozen.freeze` leaves them.
    start: first values of what trains, where the loss compares with them.
    hyper: learning rate and decay; None leaves the config's in the compiled step.
    """

    weights: Params
    start: Params
    hyper: Hyper | None = None


class Ready(NamedTuple):
    """What all micro-batches of a step read and none has to compute again.

    codes: ternary codes of what trains, by path.
    start: `Frozen.start` without adapters, frozen; None where no step reads it.
    """

    codes: dict[str, Codes]
    start: Params | None = None


def make_ready(model: LM, cfg: LossConfig) -> Callable[[Params, Frozen], Ready] | None:
    """Build (trainable, frozen) -> Ready; None for a model without ternary layers."""
    if model.cfg.linear != "bit":
        return None

    def ready(trainable, frozen: Frozen) -> Ready:
        codes = trained_codes(trainable, model.cfg)
        if not cfg.compares or cfg.is_cached:
            return Ready(codes)
        return Ready(codes, freeze(_own(frozen.start), model.cfg, codes="int8"))

    return ready


def make_loss_fn(model: LM, cfg: LossConfig) -> Callable[..., TokenLoss]:
    """Build loss_fn(trainable, frozen, batch, key, ready) -> TokenLoss for the step.

    Args:
        model: with its adapters.
        cfg: `tmkl` > 0 or `pull` > 0 adds the divergence from the base. Its logits
            come from the same frozen weights with the adapters off (and, where base
            parameters train directly, their first values): one more forward pass. Or,
            with `base_logits="cached"`, from the batch, a `BatchWithBase`.

    The function's `ready` is what `make_ready`'s made of the same trainable and frozen,
    or None; the result is the same.
    """
    base = build_model(model.cfg, kernels=model.kernels)

    def divergence(features, frozen: Frozen, batch, ready: Ready | None):
        if cfg.is_cached:
            known = batch.base_ids, batch.base_logits
            return tmkl_topk(*features, *known, batch.targets, direction=cfg.direction)
        own = _own(frozen.start) if ready is None else ready.start
        base_tree = paths.merge(own, frozen.weights)
        fixed = jax.lax.stop_gradient(_features(base, base_tree, batch, None))
        return tmkl(*features, *fixed, batch.targets, direction=cfg.direction)

    def loss_fn(
        trainable, frozen: Frozen, batch: Batch | BatchWithBase, key=None, ready=None
    ) -> TokenLoss:
        if ready is not None:
            trainable = with_codes(trainable, ready.codes)
        tree = paths.merge(trainable, frozen.weights)
        features = _features(model, tree, batch, key)
        nll = LOSSES["cross_entropy"](*features, batch.targets)
        if not cfg.compares:
            return TokenLoss(nll)
        if not cfg.tmkl:
            features = jax.lax.stop_gradient(features)
        return TokenLoss(nll, divergence(features, frozen, batch, ready))

    return loss_fn


def make_base_top_k(
    model: LM, top_k: int
) -> Callable[[Params, Params, Batch], tuple[jax.Array, jax.Array]]:
    """Build (own, weights, batch) -> (ids, logits), both (B, L, K), of the base.

    Args:
        model: its adapters are left out.
        top_k: K.
    """
    base = build_model(model.cfg, kernels=model.kernels)

    def largest(own: Params, weights: Params, batch: Batch):
        features = _features(base, paths.merge(own, weights), batch, None)
        return top_k_logits(*features, top_k)

    return largest


def make_eval_loss(model: LM) -> Callable[[Params, Frozen, Batch], jax.Array]:
    """Build (trainable, frozen, batch) -> (B, L) loss, without dropout."""

    def loss_fn(trainable, frozen: Frozen, batch: Batch):
        tree = paths.merge(trainable, frozen.weights)
        features = _features(model, tree, batch, None)
        return LOSSES["cross_entropy"](*features, batch.targets)

    return loss_fn


def _own(start: Params) -> Params:
    """First values of the model's own parameters, without those of adapters."""
    return paths.split(start, lambda path: not is_adapter_leaf(path))[0]


def _features(model: LM, tree: Params, batch: Batch, key) -> Features:
    return model.apply(
        variables(model, tree),
        batch.tokens,
        segment_ids=batch.segment_ids,
        positions=batch.positions,
        method="features",
        rngs=None if key is None else {"dropout": key},
    )
