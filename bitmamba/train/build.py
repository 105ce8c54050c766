"""Composes a run: model, parameters, optimiser, checkpoints and compiled functions."""

import dataclasses
import math
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bitmamba import paths
from bitmamba.config import Config
from bitmamba.data import DataBundle
from bitmamba.lora.adapters import adapter_shapes, is_adapter_leaf
from bitmamba.lora.placement import check_ranks, place_adapters
from bitmamba.models import LM, build_model, param_shapes
from bitmamba.models.frozen import freeze, is_projection
from bitmamba.models.sites import adapter_sites, state_offset_shapes
from bitmamba.optim import (
    TRANSFORMS,
    Optimizer,
    add_rounded,
    hyper,
    kept_gradients,
    make_optimizer,
    split_frozen,
)
from bitmamba.report.plan import MemoryPlan
from bitmamba.train.evaluate import make_eval_step
from bitmamba.train.layout import Layout, make_layout
from bitmamba.train.objective import Frozen, make_eval_loss, make_loss_fn, make_ready
from bitmamba.train.spike import SpikeRule
from bitmamba.train.spread import spread_eval, spread_gradients
from bitmamba.train.state import TrainState, init_state
from bitmamba.train.step import Pull, make_train_step
from bitmamba.types import Batch, BatchWithBase, Params

HEAD = r"lm_head/.*"


class Parts(NamedTuple):
    """What a run consists of before anything is allocated or compiled.

    base_shapes: the model's own parameters. trainable, frozen: the split of those and
    of the adapters, as they are saved: float32, or what `as_masters` makes of it. held:
    what the step gets as frozen.
    All are trees of ShapeDtypeStructs.
    offsets: shapes of the state offsets that train, by path.
    layout: over which devices all of it lies; None is one device.
    """

    model: LM
    base_shapes: Params
    trainable: Params
    frozen: Params
    held: Frozen
    offsets: dict[str, tuple[int, ...]]
    optimizer: Optimizer
    step: Any
    eval_step: Any
    layout: Layout | None = None


def build_parts(config: Config, data: DataBundle) -> Parts:
    """Build everything that needs no memory: pure functions and shapes.

    Raises:
        ValueError: the rules leave nothing to train, or miss a parameter; a name or
            rule places no adapter, or one of too high a rank; the mesh does not fit
            the devices or the batch.
    """
    layout = make_layout(config)
    model = run_model(config)
    base_shapes = param_shapes(model)
    check_ranks(model.adapters, adapter_sites(config.model, base_shapes))
    offsets = state_offset_shapes(config.model) if config.lora.state_offset else {}
    everything = paths.merge(base_shapes, adapter_shapes(model.adapters, offsets))
    trainable, frozen = split_trainable(config, everything)
    trainable = jax.eval_shape(partial(as_masters, config), trainable)
    optimizer = make_optimizer(
        config.optim,
        trainable,
        steps=config.train.steps,
        clamp_allowed=config.train.mode != "head_only",
        is_scaled=lambda path: not is_adapter_leaf(path),
    )
    step = make_train_step(
        make_loss_fn(model, config.loss),
        optimizer.update,
        n_categories=len(data.categories),
        divergence_weight=config.loss.tmkl,
        pull=_pull(config),
        hyper=lambda frozen: frozen.hyper,
        seed=config.seed,
        watch_zeros=config.train.mode == "lora",
        spike=_spike(config),
        compute=layout and spread_gradients(layout),
        ready=make_ready(model, config.loss),
        keep=_keep(config),
        add=add_rounded if config.optim.master_dtype == "bfloat16" else None,
    )
    eval_step = make_eval_step(make_eval_loss(model), n_categories=len(data.categories))
    parts = Parts(
        model=model,
        base_shapes=base_shapes,
        trainable=trainable,
        frozen=frozen,
        held=jax.eval_shape(partial(hold, config), trainable, frozen),
        offsets=offsets,
        optimizer=optimizer,
        step=jax.jit(step, donate_argnums=0),
        eval_step=jax.jit(eval_step),
    )
    return parts if layout is None else _laid_out(parts, layout, step, eval_step)


def _laid_out(parts: Parts, layout: Layout, step, eval_step) -> Parts:
    """The same parts, whose functions and shapes say where everything lies."""
    state = layout.state_shardings(state_shape(parts))
    held = layout.shapes(parts.held)
    where = jax.tree.map(lambda leaf: leaf.sharding, held)
    return parts._replace(
        held=held,
        step=jax.jit(
            step,
            donate_argnums=0,
            in_shardings=(state, where, layout.micro_rows),
            out_shardings=(state, layout.whole),
        ),
        eval_step=jax.jit(
            spread_eval(eval_step, layout),
            in_shardings=(state.trainable, where, layout.rows),
            out_shardings=layout.whole,
        ),
        layout=layout,
    )


def run_model(config: Config) -> LM:
    """The model of a run, with the adapters that its config places.

    Raises:
        ValueError: a name or rule of `config.lora` places no adapter.
    """
    model = build_model(config.model, kernels=config.kernels)
    if config.train.mode != "lora":
        return model
    if config.lora.state_offset and not state_offset_shapes(config.model):
        raise ValueError(
            "config.lora.state_offset: got True for a model without state-space "
            "layers; expected mamba2 or bitmamba2 layers; set it to False"
        )
    sites = adapter_sites(config.model, param_shapes(model))
    specs = place_adapters(config.lora, sites)
    return build_model(config.model, kernels=config.kernels, adapters=specs)


def hold(config: Config, trainable: Params, frozen: Params) -> Frozen:
    """What the step gets as frozen: weights as a step needs them, and the rates.

    Where the loss compares with the start, first values of `trainable` are copied.
    """
    start: Params = {}
    if config.loss.pull:
        start = jax.tree.map(jnp.copy, trainable)
    elif config.loss.tmkl and not config.loss.is_cached:
        own, _ = paths.split(trainable, lambda path: not is_adapter_leaf(path))
        start = jax.tree.map(jnp.copy, own)
    weights = freeze(frozen, config.model, codes=config.lora.codes)
    return Frozen(weights, start, hyper(config.optim))


def split_trainable(config: Config, tree: Params) -> tuple[Params, Params]:
    """(trainable, frozen) by the mode and by the rules that freeze."""
    mode = config.train.mode
    if mode == "full":
        return split_frozen(config.optim.rules, tree)
    if mode == "head_only":
        return paths.split(tree, lambda path: paths.first_match(path, [HEAD]) == 0)
    direct = config.lora.train
    for i, pattern in enumerate(direct):
        paths.must_match(pattern, paths.flatten(tree), where=f"config.lora.train[{i}]")
    return paths.split(
        tree,
        lambda path: (
            is_adapter_leaf(path) or paths.first_match(path, direct) is not None
        ),
    )


def as_masters(config: Config, trainable: Params) -> Params:
    """What trains in the dtypes in which the run keeps it; float32 stays as it is."""
    if config.optim.master_dtype == "float32":
        return trainable
    flat = {
        path: jnp.asarray(leaf, jnp.bfloat16) if is_projection(path) else leaf
        for path, leaf in paths.flatten(trainable).items()
    }
    return paths.unflatten(flat)


def _keep(config: Config) -> Callable[[Params], Params] | None:
    dtype = config.optim.gradient_dtype
    return None if dtype == "float32" else partial(kept_gradients, dtype=dtype)


def _spike(config: Config) -> SpikeRule | None:
    if not config.guard.spike_sigmas:
        return None
    return SpikeRule(config.guard.spike_sigmas, config.guard.spike_rise)


def _pull(config: Config) -> Pull | None:
    if not config.loss.pull:
        return None
    return Pull(config.loss.pull, lambda frozen: frozen.start)


def batch_shape(config: Config, *, micro: bool = False) -> Batch | BatchWithBase:
    """ShapeDtypeStructs of a training batch (M, B, L), or of an evaluation's (B, L)."""
    shape = (config.train.batch_size, config.data.window)
    if not micro:
        shape = (config.train.accumulation, *shape)
    ints = jax.ShapeDtypeStruct(shape, jnp.int32)
    weights = jax.ShapeDtypeStruct(shape, jnp.float32)
    batch = Batch(ints, ints, weights, ints, ints, ints)
    if micro or not config.loss.is_cached:
        return batch
    largest = (*shape, config.loss.top_k)
    return BatchWithBase(
        *batch,
        base_ids=jax.ShapeDtypeStruct(largest, jnp.int32),
        base_logits=jax.ShapeDtypeStruct(largest, jnp.float32),
    )


def state_shape(parts: Parts) -> TrainState:
    """ShapeDtypeStructs of the training state."""
    shape = jax.eval_shape(
        lambda p: init_state(p, parts.optimizer.init(p)), parts.trainable
    )
    if parts.layout is None:
        return shape
    return shape._replace(
        trainable=parts.layout.shapes(shape.trainable),
        opt_state=parts.layout.shapes(shape.opt_state),
    )


def first_state(parts: Parts, trainable: Params) -> TrainState:
    """The state before step 1, where the layout wants it."""
    init = jax.jit(parts.optimizer.init)
    if parts.layout is None:
        return init_state(trainable, init(trainable))
    trainable = parts.layout.place(trainable)
    where = parts.layout.shardings(jax.eval_shape(init, trainable))
    opt_state = jax.jit(init, out_shardings=where)(trainable)
    return parts.layout.place_state(init_state(trainable, opt_state))


def compile_step(
    config: Config, parts: Parts, *, options: dict[str, Any] | None = None
) -> tuple[Any, float]:
    """(the compiled step, seconds it took); `options` are XLA's."""
    start = time.perf_counter()
    lowered = parts.step.lower(state_shape(parts), parts.held, batch_shape(config))
    compiled = lowered.compile(compiler_options=options)
    return compiled, time.perf_counter() - start


def memory_plan(config: Config, parts: Parts) -> MemoryPlan:
    """Exact bytes of parameters and optimiser states, from shapes alone; a device's."""
    size = _bytes if parts.layout is None else parts.layout.n_bytes
    states = {}
    for name in TRANSFORMS:
        optim = dataclasses.replace(config.optim, name=name)
        init = make_optimizer(optim, parts.trainable, steps=config.train.steps).init
        states[name] = size(jax.eval_shape(init, parts.trainable))
    mine = states.pop(config.optim.name)
    keep = _keep(config) or (lambda grads: grads)
    return MemoryPlan(
        parameters=size((parts.trainable, parts.held)),
        gradients=size(jax.eval_shape(keep, parts.trainable)),
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
