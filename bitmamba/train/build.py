"""Composes a run: model, parameters, optimiser, checkpoints and compiled functions."""

import dataclasses
import math
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import logging

from bitmamba import config_read, paths
from bitmamba.config import Config
from bitmamba.data import DataBundle
from bitmamba.io.base import BASE, load_base
from bitmamba.io.checkpoint import Checkpointer, load_params
from bitmamba.losses import LOSSES
from bitmamba.models import LM, build_model, init_params, param_shapes
from bitmamba.optim import TRANSFORMS, Optimizer, make_optimizer, split_frozen
from bitmamba.report.plan import MemoryPlan
from bitmamba.train.evaluate import make_eval_step
from bitmamba.train.state import TrainState, init_state
from bitmamba.train.step import make_train_step
from bitmamba.types import Batch, Params

HEAD = r"lm_head/.*"


class Parts(NamedTuple):
    """What a run consists of before anything is allocated or compiled.

    shapes: the whole parameter tree; trainable, frozen: its split; all of
    ShapeDtypeStructs.
    """

    model: LM
    shapes: Params
    trainable: Params
    frozen: Params
    optimizer: Optimizer
    step: Any
    eval_step: Any


def build_parts(config: Config, data: DataBundle) -> Parts:
    """Build everything that needs no memory: pure functions and shapes.

    Raises:
        ValueError: the rules leave nothing to train, or miss a parameter.
    """
    model = build_model(config.model, kernels=config.kernels)
    shapes = param_shapes(model)
    trainable, frozen = split_trainable(config, shapes)
    optimizer = make_optimizer(
        config.optim,
        trainable,
        steps=config.train.steps,
        clamp_allowed=config.train.mode != "head_only",
    )
    loss_fn = make_loss_fn(model)
    n_categories = len(data.categories)
    step = make_train_step(loss_fn, optimizer.update, n_categories=n_categories)
    eval_step = make_eval_step(loss_fn, n_categories=n_categories)
    return Parts(
        model=model,
        shapes=shapes,
        trainable=trainable,
        frozen=frozen,
        optimizer=optimizer,
        step=jax.jit(step, donate_argnums=0),
        eval_step=jax.jit(eval_step),
    )


def split_trainable(config: Config, tree: Params) -> tuple[Params, Params]:
    """(trainable, frozen) by the mode and by the rules that freeze."""
    head_only = config.train.mode == "head_only"
    if not head_only:
        return split_frozen(config.optim.rules, tree)
    return paths.split(tree, lambda path: paths.first_match(path, [HEAD]) == 0)


def make_loss_fn(model: LM):
    """(trainable, frozen, batch) -> (B, L) loss; the one place they are merged."""

    def loss_fn(trainable, frozen, batch: Batch):
        features = model.apply(
            {"params": paths.merge(trainable, frozen)},
            batch.tokens,
            segment_ids=batch.segment_ids,
            positions=batch.positions,
            method="features",
        )
        return LOSSES["cross_entropy"](*features, batch.targets)

    return loss_fn


def batch_shape(config: Config, *, micro: bool = False) -> Batch:
    """ShapeDtypeStructs of a training batch (M, B, L), or of an evaluation's (B, L)."""
    shape = (config.train.batch_size, config.data.window)
    if not micro:
        shape = (config.train.accumulation, *shape)
    ints = jax.ShapeDtypeStruct(shape, jnp.int32)
    weights = jax.ShapeDtypeStruct(shape, jnp.float32)
    return Batch(ints, ints, weights, ints, ints, ints)


def state_shape(parts: Parts) -> TrainState:
    """ShapeDtypeStructs of the training state."""
    return jax.eval_shape(
        lambda p: init_state(p, parts.optimizer.init(p)), parts.trainable
    )


def compile_step(config: Config, parts: Parts) -> tuple[Any, float]:
    """(the compiled step, seconds it took); its memory is `.memory_analysis()`."""
    start = time.perf_counter()
    lowered = parts.step.lower(state_shape(parts), parts.frozen, batch_shape(config))
    return lowered.compile(), time.perf_counter() - start


def initial_params(config: Config, parts: Parts) -> Params:
    """Parameters before step 1: of `init_from`, or fresh ones from the seed.

    Raises:
        ValueError: the source lacks a parameter, has another, or of another shape.
    """
    source = config.checkpoint.init_from
    if source is None:
        return init_params(parts.model, jax.random.key(config.seed))
    params = load_base() if source == BASE else load_params(source)[0]
    _check_params(source, params, parts.shapes)
    return jax.tree.map(jnp.asarray, params)


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


def fingerprints(config: Config, data: DataBundle) -> dict[str, Any]:
    """What must not change between a save and a resume, by name."""
    plain = config_read.to_json(config)
    plain["train"].pop("max_bad_steps")
    return {
        **data.fingerprints,
        "plan": data.plan_digest,
        "model": plain["model"],
        "optim": plain["optim"],
        "train": plain["train"],
        "seed": config.seed,
        "init_from": config.checkpoint.init_from,
    }


class Started(NamedTuple):
    """State and frozen parameters in memory, and what a resumed run remembers."""

    state: TrainState
    frozen: Params
    frozen_digests: dict[str, str]
    remembered: dict[str, Any]


def start_or_resume(
    config: Config, parts: Parts, checkpointer: Checkpointer
) -> Started:
    """The newest good checkpoint of the work directory, else the initial parameters."""
    shape = state_shape(parts)
    restored = checkpointer.restore_latest(
        shape.trainable, shape.opt_state, parts.frozen
    )
    if restored is None:
        trainable, frozen = split_trainable(config, initial_params(config, parts))
        state = init_state(trainable, jax.jit(parts.optimizer.init)(trainable))
        digests = checkpointer.save_frozen(frozen)
        return Started(state, frozen, digests, {})
    extra = restored.meta["extra"]
    state = init_state(restored.trainable, restored.opt_state)._replace(
        step=jnp.asarray(restored.step, jnp.int32),
        bad_in_row=jnp.asarray(extra["bad_in_row"], jnp.int32),
        bad_total=jnp.asarray(extra["bad_total"], jnp.int32),
    )
    logging.info("resuming at step %d of %s", restored.step, config.workdir)
    digests = restored.meta["frozen"]["digests"]
    return Started(state, restored.frozen, digests, extra)


def make_checkpointer(config: Config, data: DataBundle) -> Checkpointer:
    """Checkpoints under `<workdir>/checkpoints`."""
    return Checkpointer(
        Path(config.workdir) / "checkpoints",
        keep=config.checkpoint.keep,
        fingerprints=fingerprints(config, data),
        config=config_read.to_json(config),
    )


def memory_plan(config: Config, parts: Parts) -> MemoryPlan:
    """Exact bytes of parameters and optimiser states, from shapes alone."""
    states = {}
    for name in TRANSFORMS:
        optim = dataclasses.replace(config.optim, name=name)
        init = make_optimizer(optim, parts.trainable, steps=config.train.steps).init
        states[name] = _bytes(jax.eval_shape(init, parts.trainable))
    mine = states.pop(config.optim.name)
    return MemoryPlan(
        parameters=_bytes(parts.shapes),
        gradients=_bytes(parts.trainable),
        optimizer_name=config.optim.name,
        optimizer=mine,
        others=states,
    )


def _bytes(tree: Any) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def use_compilation_cache() -> None:
    """Keep compiled programs between runs; JAX_COMPILATION_CACHE_DIR says where."""
    if jax.config.jax_compilation_cache_dir is None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update(
            "jax_compilation_cache_dir", str(Path(home) / "bitmamba" / "xla")
        )
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
