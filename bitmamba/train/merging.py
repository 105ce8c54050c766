"""A run's adapters merged into a model of its own, measured; and taken out again."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from bitmamba import config_read, paths
from bitmamba.config import Config, LoraConfig, LossConfig, OptimConfig
from bitmamba.io import digests
from bitmamba.io.checkpoint import Checkpointer
from bitmamba.io.load import check_finite, load_trainable
from bitmamba.io.runs import load_run
from bitmamba.io.sources import followed
from bitmamba.lora.merge import (
    CodeChange,
    FloatChange,
    base_of,
    merge_float,
    merge_ternary,
)
from bitmamba.models import LM, build_model
from bitmamba.models.frozen import is_projection
from bitmamba.quant.ternary import latent_from_codes, ternarise
from bitmamba.train.build import run_model
from bitmamba.train.evaluate import held_out_losses, make_eval_step
from bitmamba.train.objective import Frozen, make_eval_loss
from bitmamba.train.start import read_data
from bitmamba.types import Params


class AdapterRun(NamedTuple):
    """A LoRA run as its checkpoint and its base give it.

    tree: base and adapters. base: parameters before the first step. source: where
    those lie. frozen: digests of what did not train. path: of the run. step: updates
    done.
    """

    config: Config
    model: LM
    tree: Params
    base: Params
    source: str
    frozen: dict[str, str]
    path: str
    step: int


class Merged(NamedTuple):
    """A model without adapters: its configuration, parameters, and what changed."""

    config: Config
    params: Params
    rows: list[FloatChange] | list[CodeChange]


def load_adapter_run(path: str, *, base: str | None = None) -> AdapterRun:
    """A run that trained adapters, with its base.

    Args:
        path: a work directory, its checkpoints folder or a step's folder.
        base: where the base lies, if not where the run says.

    Raises:
        ValueError: nothing there, damaged, another base, or a run without adapters.
    """
    _, meta = load_trainable(path)
    config = config_read.from_config_dict(meta["config"])
    if config.train.mode != "lora":
        raise ValueError(
            f"--checkpoint={path}: got a run with train.mode={config.train.mode}, "
            "which has no adapters; expected a run of configs/lora.py"
        )
    tree, _ = load_run(path, base=base)
    check_finite(tree, where=f"--checkpoint={path}")
    source = base or meta["frozen"]["source"]
    before = base_of(tree)
    if source and config.lora.train:
        before = load_run(source)[0]
    return AdapterRun(
        config=config,
        model=run_model(config),
        tree=tree,
        base=before,
        source=source or str(path),
        frozen=meta["frozen"]["digests"],
        path=str(path),
        step=meta["step"],
    )


def as_float(run: AdapterRun) -> Merged:
    """Base and adapters as one float32 model.

    A ternary model becomes a dense one of the values it multiplied with; its
    activations are then no longer rounded to int8.

    Raises:
        ValueError: a state offset, or norms that dense layers cannot have.
    """
    model, tree = run.config.model, run.tree
    if model.linear == "bit":
        if model.norm_placement == "linear":
            raise ValueError(
                '--as=merged: got a ternary model with norm_placement="linear"; '
                "expected norms outside its linear layers, as dense layers have none; "
                "use --as=ternary or --as=peft"
            )
        model = dataclasses.replace(model, linear="dense")
        flat = paths.flatten(tree)
        values = {p: _value(w) if is_projection(p) else w for p, w in flat.items()}
        tree = paths.unflatten(values)
    params, rows = merge_float(tree, run.model.adapters)
    return Merged(_plain_config(run.config, model), params, rows)


def as_ternary(run: AdapterRun) -> Merged:
    """Base and adapters as the nearest ternary model of the same architecture.

    Raises:
        ValueError: the model is not ternary, no code changes, or a state offset.
    """
    if run.config.model.linear != "bit":
        raise ValueError(
            '--as=ternary: got a model with linear="dense"; expected ternary layers '
            '(linear="bit"); use --as=merged'
        )
    params, rows = merge_ternary(
        run.tree,
        run.model.adapters,
        is_ternary=is_projection,
        ternarise=ternarise,
        latent=latent_from_codes,
    )
    return Merged(_plain_config(run.config, run.config.model), params, rows)


def losses(
    run: AdapterRun, merged: Mapping[str, Merged], *, max_windows: int
) -> dict[str, dict[str, float]]:
    """Held-out losses of the base, of the run, and of merged models, by their names.

    Args:
        run: its configuration names the data; no window of it was trained on.
        merged: by name.
        max_windows: of examples and of text each.

    Returns:
        {"base": {"eval/loss": …, "retention/loss": …}, "adapters": …, name: …};
        "eval/loss" only where examples are held out: no text stands in for them.
    """
    windows = dataclasses.replace(run.config.eval, max_windows=max_windows)
    data = read_data(dataclasses.replace(run.config, eval=windows))
    steps: dict[Any, Any] = {}

    def measure(model: LM, params: Params) -> dict[str, float]:
        if model not in steps:
            n = len(data.categories)
            steps[model] = jax.jit(
                make_eval_step(make_eval_loss(model), n_categories=n)
            )
        found = held_out_losses(
            steps[model],
            {},
            Frozen(params, {}),
            examples=data.eval_sft,
            text=data.eval_replay,
            categories=data.categories,
        )
        if not data.eval_sft:
            found.pop("eval/loss", None)
        return found

    plain = build_model(run.config.model, kernels=run.config.kernels)
    found = {"base": measure(plain, run.base), "adapters": measure(run.model, run.tree)}
    for name, one in merged.items():
        model = build_model(one.config.model, kernels=run.config.kernels)
        found[name] = measure(model, one.params)
    return found


def save_merged(run: AdapterRun, merged: Merged, folder: Path) -> None:
    """A whole checkpoint, with the base's place and digests for `unmerge`.

    Raises:
        ValueError: the folder has something in it.
        OSError: it could not be written.
    """
    origin = {
        "run": run.path,
        "source": run.source,
        "digests": digests.tree_digests(run.base),
    }
    write_model(
        merged.params, merged.config, folder, step=run.step, extra={"merged": origin}
    )


def unmerge(path: str, *, base: str | None = None) -> tuple[Params, Config]:
    """The base that a merged checkpoint was made from, bit for bit.

    Float sums cannot be undone exactly, so nothing is subtracted: the base is read
    where it lies, and every leaf must have the digest it had at the merge.

    Args:
        path: written by `save_merged`.
        base: where the base lies now, if it was moved.

    Returns:
        (its parameters, its configuration).

    Raises:
        ValueError: no merged checkpoint, or another base.
    """
    _, meta = load_trainable(path)
    origin = meta["extra"].get("merged")
    if origin is None:
        raise ValueError(
            f"--checkpoint={path}: got a checkpoint that no merge made; expected one "
            "of --as=merged or --as=ternary"
        )
    source = base or followed(origin["source"], beside=path, flag="--base")
    tree, settings = load_run(source)
    tree = base_of(tree)
    digests.check_same(
        digests.tree_digests(tree),
        origin["digests"],
        where=f"{source}: not the base that {path} was merged from",
        advice="name that one with --base",
    )
    config = config_read.from_config_dict(settings)
    return tree, _plain_config(config, config.model)


def write_model(
    params: Params, config: Config, folder: Path, *, step: int, extra: dict[str, Any]
) -> None:
    """Write a whole model as a checkpoint of one step under `folder`.

    Raises:
        ValueError: the folder has something in it.
        OSError: it could not be written.
    """
    check_empty(folder)
    config = dataclasses.replace(config, workdir=str(folder))
    checkpointer = Checkpointer(
        folder / "checkpoints",
        keep=1,
        fingerprints={},
        config=config_read.to_json(config),
    )
    try:
        checkpointer.save(
            step, trainable=params, opt_state={}, frozen_digests={}, extra=extra
        )
    finally:
        checkpointer.close()
    config_read.write_json(config, folder / "config.json")


def check_empty(folder: Path) -> None:
    """Refuse to write beside or over what is there."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"--to={folder}: already there and not empty; expected a new folder"
        )


def _value(latent: Any) -> np.ndarray:
    """What a ternary layer multiplies by, float32."""
    codes, scale = ternarise(jax.numpy.asarray(latent))
    return np.asarray(codes, np.float32) * np.asarray(scale)


def _plain_config(config: Config, model: Any) -> Config:
    """The run's settings for a model without adapters."""
    return dataclasses.replace(
        config,
        model=model,
        lora=LoraConfig(),
        loss=LossConfig(),
        optim=OptimConfig(),
        train=dataclasses.replace(config.train, mode="full"),
        checkpoint=dataclasses.replace(config.checkpoint, init_from=None),
    )
