"""Where a run begins: the newest good checkpoint, or a base and fresh adapters."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from bitmamba import config_read, paths
from bitmamba.config import Config, LossConfig
from bitmamba.data import DataBundle
from bitmamba.io.base import BASE, load_base
from bitmamba.io.checkpoint import Checkpointer, Restored, load_params
from bitmamba.io.digests import check_same, tree_digests
from bitmamba.io.load import DamagedError, check_finite
from bitmamba.io.peers import ALONE, Peers
from bitmamba.lora.adapters import init_adapters
from bitmamba.models import build_model, init_params
from bitmamba.models.frozen import projection_value
from bitmamba.train.build import (
    Parts,
    as_masters,
    first_state,
    hold,
    split_trainable,
    state_shape,
)
from bitmamba.train.objective import Frozen
from bitmamba.train.spike import LossHistory
from bitmamba.train.state import TrainState, init_state
from bitmamba.types import Params


class Started(NamedTuple):
    """What a run holds before its next step, and what a resumed run remembers.

    digests: of the frozen parameters. source: where they lie if no checkpoint of this
    run holds them (see `keeps_base`), else None.
    """

    state: TrainState
    held: Frozen
    digests: dict[str, str]
    source: str | None
    remembered: dict[str, Any]


def start_or_resume(
    config: Config, parts: Parts, checkpointer: Checkpointer
) -> Started:
    """The newest good checkpoint of the work directory, else the initial parameters.

    Raises:
        ValueError: the initial parameters do not fit the model, or are not those that
            the checkpoint's adapters were trained on.
    """
    shape = state_shape(parts)
    source = None if keeps_base(config) else config.checkpoint.init_from
    targets = shape.trainable, shape.opt_state
    try:
        restored = checkpointer.restore_latest(
            *targets, None if source else parts.frozen
        )
    except DamagedError as damage:  # the frozen ones: damaged steps are set aside
        restored = checkpointer.restore_latest(*targets)
        if restored is None:
            raise
        frozen = _frozen_again(config, parts, checkpointer, restored, str(damage))
        restored = restored._replace(frozen=frozen)
    if restored is None:
        started = _start(config, parts, checkpointer, source)
    else:
        started = _resume(config, parts, restored, source)
    if parts.layout is None:
        return started
    return started._replace(
        state=parts.layout.place_state(started.state),
        held=parts.layout.place(started.held),
    )


def _frozen_again(
    config: Config, parts: Parts, checkpointer: Checkpointer, restored, damage: str
) -> Params:
    """Damaged frozen parameters from where they came from, if they are the same."""
    source = config.checkpoint.init_from or f"seed {config.seed}"
    frozen = split_trainable(config, base_params(config, parts))[1]
    check_same(
        tree_digests(frozen),
        restored.meta["frozen"]["digests"],
        where=f"checkpoint: {damage}; and {source} is not where they came from",
        advice="restore one of both, or start anew in another workdir",
    )
    logging.warning("checkpoint: %s; taken again from %s", damage, source)
    checkpointer.save_frozen(frozen)
    return frozen


def keeps_base(config: Config) -> bool:
    """Whether checkpoints hold the frozen parameters too; adapters name their base."""
    return config.train.mode != "lora" or config.checkpoint.init_from is None


def _start(config: Config, parts: Parts, checkpointer, source) -> Started:
    own, frozen = split_trainable(config, base_params(config, parts))
    digests = tree_digests(frozen) if source else checkpointer.save_frozen(frozen)
    remembered = {"start": tree_digests(own)} if config.loss.compares else {}
    own = jax.tree.map(jnp.asarray, own)
    held = hold(config, own, frozen)
    trainable, held = first_values(config, parts, own, held)
    return Started(first_state(parts, trainable), held, digests, source, remembered)


def _resume(config: Config, parts: Parts, restored, source) -> Started:
    extra, frozen = restored.meta["extra"], restored.frozen
    digests = restored.meta["frozen"]["digests"]
    own: Params = {}
    if source or config.loss.compares:
        own, first_frozen = split_trainable(config, base_params(config, parts))
        where = f"config.checkpoint.init_from={config.checkpoint.init_from}"
        if source:
            frozen = first_frozen
            _check_base(where, tree_digests(frozen), digests)
        if config.loss.compares:
            _check_base(where, tree_digests(own), extra["start"])
    state = state_of(restored)
    held = hold(config, {}, frozen)
    if config.loss.compares:
        _, held = first_values(config, parts, jax.tree.map(jnp.asarray, own), held)
    logging.info("resuming at step %d of %s", restored.step, config.workdir)
    return Started(state, held, digests, source, extra)


def last_good(
    config: Config, parts: Parts, checkpointer: Checkpointer, held: Frozen
) -> tuple[TrainState, dict[str, Any]]:
    """(state to roll back to, what its checkpoint remembers); the start if none is.

    Of the steps on disk the newest that was saved by the schedule: one saved because
    the run was told to stop is not there in a run that was not.

    Raises:
        ValueError: every step on disk is damaged, or the start cannot be made anew.
    """
    shape = state_shape(parts)
    restored = checkpointer.restore_latest(
        shape.trainable,
        shape.opt_state,
        prefer=lambda step: step % config.checkpoint.every == 0,
    )
    if restored is not None:
        return state_of(restored), restored.meta["extra"]
    own, _ = split_trainable(config, base_params(config, parts))
    trainable, _ = first_values(config, parts, jax.tree.map(jnp.asarray, own), held)
    return first_state(parts, trainable), {}


def at_step(state: TrainState, step: int, *, bad_total: int) -> TrainState:
    """A state that goes on with the data after `step`; `bad_total` steps were bad."""
    return state._replace(
        step=jnp.asarray(step, jnp.int32),
        bad_in_row=jnp.zeros((), jnp.int32),
        bad_total=jnp.asarray(bad_total, jnp.int32),
    )


def remembered(state: TrainState) -> dict[str, Any]:
    """What a checkpoint keeps of a state beside its arrays, JSON-able."""
    return {
        "bad_in_row": int(state.bad_in_row),
        "bad_total": int(state.bad_total),
        # float32 as float: through JSON and back to the same bits.
        "losses": np.asarray(state.history.losses).tolist(),
        "n_losses": int(state.history.count),
    }


def state_of(restored: Restored) -> TrainState:
    """The training state of a checkpoint; an old one knows no losses."""
    extra = restored.meta["extra"]
    state = init_state(restored.trainable, restored.opt_state)
    if "losses" in extra:
        losses = jnp.asarray(extra["losses"], jnp.float32)
        count = jnp.asarray(extra["n_losses"], jnp.int32)
        state = state._replace(history=LossHistory(losses, count))
    return state._replace(
        step=jnp.asarray(restored.step, jnp.int32),
        bad_in_row=jnp.asarray(extra["bad_in_row"], jnp.int32),
        bad_total=jnp.asarray(extra["bad_total"], jnp.int32),
    )


def _check_base(
    where: str, found: Mapping[str, str], wanted: Mapping[str, str]
) -> None:
    check_same(
        found,
        wanted,
        where=f"{where} is not the base that this run began from",
        advice="restore it, or start anew in another workdir",
    )


def base_params(config: Config, parts: Parts) -> Params:
    """The model's own parameters before step 1: of `init_from`, or fresh ones.

    Raises:
        ValueError: the source lacks a parameter, has another, or of another shape.
    """
    source = config.checkpoint.init_from
    if source is None:
        plain = build_model(config.model, kernels=config.kernels)
        return init_params(plain, jax.random.key(config.seed))
    params = load_base() if source == BASE else load_params(source)[0]
    _check_params(source, params, parts.base_shapes)
    return params


def first_values(
    config: Config, parts: Parts, own: Params, held: Frozen
) -> tuple[Params, Frozen]:
    """(what trains before step 1, `held` with the start that the loss compares with).

    Args:
        own: base parameters that train directly.
        held: of the run, without the adapters in its start.
    """
    trainable = paths.merge(own, _first_adapters(config, parts, held.weights))
    trainable = as_masters(config, trainable)
    return trainable, held._replace(start=hold(config, trainable, {}).start)


def _first_adapters(config: Config, parts: Parts, weights: Params) -> Params:
    return init_adapters(
        parts.model.adapters,
        parts.offsets,
        weight=lambda site: projection_value(weights, site),
        key=jax.random.key(config.seed),
    )


def _check_params(source: str, params: Params, shapes: Params) -> None:
    found, wanted = paths.flatten(params), paths.flatten(shapes)
    where = f"config.checkpoint.init_from={source}"
    for path in sorted(found.keys() ^ wanted.keys()):
        what = "lacks" if path in wanted else "has the unknown parameter"
        raise ValueError(
            f"{where}: {what} {path}; expected the parameters of config.model; "
            "use the preset the checkpoint was made with"
        )
    for path, leaf in wanted.items():
        if found[path].shape != leaf.shape or found[path].dtype != leaf.dtype:
            raise ValueError(
                f"{where}: {path}: got {found[path].dtype}{found[path].shape}; "
                f"expected {leaf.dtype}{leaf.shape} by config.model"
            )
    check_finite(params, where=where)


def fingerprints(config: Config, data: DataBundle) -> dict[str, Any]:
    """What must not change between a save and a resume, by name."""
    plain = config_read.to_json(config)
    plain["train"].pop("max_bad_steps")
    for name in ("gradient_dtype", "master_dtype"):
        if plain["optim"][name] == "float32":  # as runs from before these settings
            plain["optim"].pop(name)
    used = {}
    if config.train.mode == "lora":
        used["lora"] = plain["lora"]
    if config.loss != LossConfig():
        used["loss"] = plain["loss"]
    return {
        **data.fingerprints,
        **used,
        "plan": data.plan_digest,
        "model": plain["model"],
        "optim": plain["optim"],
        "train": plain["train"],
        "seed": config.seed,
        "init_from": config.checkpoint.init_from,
    }


def make_checkpointer(
    config: Config, data: DataBundle, peers: Peers = ALONE
) -> Checkpointer:
    """Checkpoints under `<workdir>/checkpoints`, which all processes see."""
    return Checkpointer(
        Path(config.workdir) / "checkpoints",
        keep=config.checkpoint.keep,
        fingerprints=fingerprints(config, data),
        config=config_read.to_json(config),
        peers=peers,
    )
