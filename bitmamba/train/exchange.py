"""A run's adapters to a PEFT folder, and a PEFT folder to a run."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from bitmamba import config_read, paths
from bitmamba.config import Config, LoraConfig, LoraRule, LossConfig, OptimConfig
from bitmamba.io import digests
from bitmamba.io.checkpoint import Checkpointer
from bitmamba.io.json_file import read_json
from bitmamba.io.peft import CONFIG, Written, write_peft
from bitmamba.io.peft_read import PeftAdapter, as_slices, read_peft
from bitmamba.io.runs import load_run
from bitmamba.io.sources import followed
from bitmamba.lora.merge import base_of
from bitmamba.models import param_shapes
from bitmamba.models.frozen import freeze, projection_value
from bitmamba.models.sites import adapter_sites
from bitmamba.train.build import run_model
from bitmamba.train.merging import AdapterRun, check_empty

OURS = "bitmamba_adapter.json"  # beside PEFT's files, which it does not change
_FORMAT = 1
_MAX_BYTES = 64 * 2**20
_BESIDE_TERNARY = (
    "the base is ternary: these adapters belong beside codes x scale, with the branch "
    "on the input before it is rounded to int8; beside other weights they are untrained"
)


def export_peft(run: AdapterRun, folder: Path) -> Written:
    """Write a run's adapters as a PEFT folder, with a file that `import_peft` reads.

    Raises:
        ValueError: the folder has something in it, or the run trained something that
            PEFT has no form for.
    """
    check_empty(folder)
    flat = paths.flatten(run.tree)
    written = write_peft(
        folder,
        run.model.adapters,
        {path: leaf for path, leaf in flat.items() if path not in run.frozen},
        sites=adapter_sites(run.config.model, param_shapes(run.model)),
        rslora=run.config.lora.rslora,
        base=run.source,
        weight=lambda site: np.asarray(_weight(run, site)),
    )
    ours = {
        "format": _FORMAT,
        "step": run.step,
        "base": {"source": run.source, "digests": run.frozen},
        "config": config_read.to_json(run.config),
    }
    (folder / OURS).write_text(json.dumps(ours, indent=2) + "\n")
    if run.config.model.linear == "bit":
        return written._replace(notes=(*written.notes, _BESIDE_TERNARY))
    return written


def import_peft(folder: Path, to: Path, *, base: str | None = None) -> int:
    """Write the adapters of a PEFT folder as a run's checkpoint.

    A folder of `export_peft` gives back the run's adapters; any other gives adapters
    of whole weights beside `base`, in the configuration of that checkpoint.

    Args:
        folder: see `bitmamba.io.peft_read`.
        to: a new work directory; `scripts/generate.py` and `load_run` read it.
        base: a checkpoint or "assets:base"; may be left out if the folder names it.

    Returns:
        The number of adapters.

    Raises:
        ValueError: the folder cannot be used whole, or belongs to another base.
    """
    check_empty(to)
    _check_folder(folder)
    ours = _read_ours(folder)
    if base is None and ours is None:
        raise ValueError(
            f"--base: missing; expected the model that {folder} was trained on, as "
            f"it has no {OURS}"
        )
    source = base or followed(ours["base"]["source"], beside=folder, flag="--base")
    tree, settings = load_run(source)
    tree = base_of(tree)
    config = config_read.from_config_dict(ours["config"] if ours else settings)
    sites = adapter_sites(config.model, tree)
    whole = read_peft(folder, sites=sites)
    if ours is None:
        config, flat = _config_for(whole, config, source), whole.flat
        table = digests.tree_digests(tree)
    else:
        flat, table = (
            as_slices(whole, run_model(config).adapters),
            ours["base"]["digests"],
        )
        found = digests.tree_digests(tree)
        digests.check_same(
            {leaf: found[leaf] for leaf in found if leaf in table},
            table,
            where=f"{folder}: its adapters belong to another base than {source}",
            advice="name the right one with --base",
        )
    _write(
        flat, config, to, source=source, table=table, step=(ours or {}).get("step", 0)
    )
    return len(run_model(config).adapters)


def _weight(run: AdapterRun, site: str) -> Any:
    kernel = paths.flatten(run.tree)[f"{site}/kernel"]
    tree = paths.unflatten({f"{site}/kernel": kernel})
    exact = dataclasses.replace(run.config.model, dtype="float32")
    return projection_value(freeze(tree, exact), site)


def _config_for(whole: PeftAdapter, config: Config, source: str) -> Config:
    """The base's settings, with a rule for each adapter of the folder."""
    rules = tuple(
        LoraRule(
            pattern=re.escape(spec.path),
            rank=spec.rank,
            alpha=whole.alphas[spec.path],
            dropout=spec.dropout,
        )
        for spec in whole.specs
    )
    lora = LoraConfig(place=(), rules=rules, rslora=whole.rslora, dora=whole.dora)
    return dataclasses.replace(
        config,
        lora=lora,
        loss=LossConfig(),
        optim=OptimConfig(name="adamw"),
        train=dataclasses.replace(config.train, mode="lora"),
        checkpoint=dataclasses.replace(config.checkpoint, init_from=source),
    )


def _write(
    flat: dict[str, np.ndarray],
    config: Config,
    to: Path,
    *,
    source: str,
    table: dict[str, str],
    step: int,
) -> None:
    config = dataclasses.replace(config, workdir=str(to))
    checkpointer = Checkpointer(
        to / "checkpoints",
        keep=1,
        fingerprints={},
        config=config_read.to_json(config),
    )
    try:
        checkpointer.save(
            step,
            trainable=paths.unflatten(flat),
            opt_state={},
            frozen_digests=table,
            frozen_source=source,
            extra={},
        )
    finally:
        checkpointer.close()
    config_read.write_json(config, to / "config.json")


def _check_folder(folder: Path) -> None:
    if (folder / CONFIG).is_file():
        return
    found = f"has no {CONFIG}" if folder.is_dir() else "no such folder"
    found = "is a file" if folder.is_file() else found
    raise ValueError(
        f"--from: {folder}: {found}; expected a PEFT folder ({CONFIG} and "
        "adapter_model.safetensors)"
    )


def _read_ours(folder: Path) -> dict[str, Any] | None:
    file = folder / OURS
    if not file.is_file():
        return None
    try:
        ours = read_json(file, max_bytes=_MAX_BYTES)
        base = ours["base"]
        known = (ours["config"], ours["step"], base["digests"])
        as_written = isinstance(base["source"], str) and isinstance(ours["format"], int)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file}: {type(error).__name__} {error}; expected what "
            "scripts/export_weights.py wrote; or remove it and name --base"
        ) from None
    kinds = (dict, int, dict)
    if not as_written or not all(map(isinstance, known, kinds)):
        raise ValueError(
            f"{file}: values of other types than scripts/export_weights.py writes; "
            "remove it and name --base"
        )
    if ours["format"] > _FORMAT:
        raise NotImplementedError(
            f"{file}: got format {ours['format']}; expected at most {_FORMAT}; a newer "
            "version wrote it, update this one"
        )
    return ours
