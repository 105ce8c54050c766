"""The bundle of a run that stopped: all that its first bad step was made of.

A folder `<workdir>/bundles/step_<k>`: no pickle, nothing outside it is needed.

bundle.json          step, cause, configuration, versions, fingerprints
documents.jsonl      the batch as text: one document a line, with what was trained
batch.safetensors    the batch as the step got it, fields of `Batch`
state.safetensors    trainable/…, opt_state/… before the step, and held/…: what is
                     frozen, with the learning rate
"""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from bitmamba import config_read
from bitmamba.config import Config, MeshConfig
from bitmamba.io import digests, load, meta
from bitmamba.io.json_file import read_json
from bitmamba.io.tensors import read_header, read_tensors
from bitmamba.train import build
from bitmamba.train.objective import Frozen
from bitmamba.train.prepare import Run
from bitmamba.train.state import TrainState, init_state
from bitmamba.types import Batch, BatchWithBase

FORMAT = 1
_MAX_JSON = 64 * 2**20


class Bundle(NamedTuple):
    """A bundle as read: state before the step, the step's own batch."""

    info: dict[str, Any]
    config: Config
    parts: build.Parts
    state: TrainState
    held: Frozen
    batch: Batch | BatchWithBase


def write(
    run: Run, state: TrainState, held: Frozen, *, step: int, cause: str, lr_scale: float
) -> Path:
    """Write the bundle of a step; its folder appears when it is complete.

    Args:
        run: the run.
        state, held: as before the step (a skipped step changes neither).
        step: its number; the batch is read anew.
        cause: in words.
        lr_scale: what roll-backs left of the learning rate.

    Raises:
        OSError: it could not be written; nothing is left of it.
    """
    folder = Path(run.config.workdir) / "bundles" / f"step_{step}"
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    # Of all processes' rows.
    batches = run.batches if run.peers.count == 1 else run.data.batches
    batch = next(iter(batches(step - 1)))
    trees = {"trainable": state.trainable, "opt_state": state.opt_state, "held": held}
    info = {
        "format": FORMAT,
        "step": step,
        "cause": cause,
        "lr_scale": lr_scale,
        "categories": list(run.data.categories),
        "plan": run.data.plan_digest,
        "fingerprints": dict(run.data.fingerprints),
        "versions": meta.versions(),
        "config": config_read.to_json(run.config),
    }
    try:
        part.mkdir(parents=True)
        _save(part / "batch.safetensors", batch._asdict())
        _save(part / "state.safetensors", trees)
        with (part / "documents.jsonl").open("w", encoding="utf-8") as file:
            for row in documents(batch, run.data):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        text = json.dumps(info, indent=1, ensure_ascii=False)
        (part / "bundle.json").write_text(text + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise OSError(f"{folder}: {load.one_line(error)}") from None
    return folder


def documents(batch: Batch | BatchWithBase, data: Any) -> Iterator[dict[str, Any]]:
    """The documents of a batch (M, B, L) as text, in order of micro-batch and row."""
    fields = [np.asarray(f) for f in batch[: len(Batch._fields)]]
    tokens, _, weights, segments, _, sources = fields
    for micro, row in np.ndindex(*tokens.shape[:2]):
        for segment in np.unique(segments[micro, row]):
            at = np.flatnonzero(segments[micro, row] == segment)
            if not segment:  # padding
                continue
            trained = weights[micro, row, at] > 0
            yield {
                "micro": micro,
                "row": row,
                "first": int(at[0]),
                "tokens": len(at),
                "trained": int(trained.sum()),
                "category": data.categories[int(sources[micro, row, at[0]])],
                "text": data.tokenizer.decode(tokens[micro, row, at].tolist()),
            }


def read(path: str | Path) -> Bundle:
    """A bundle as `write` left it.

    Raises:
        ValueError: nothing there, of a newer version, or damaged.
    """
    folder = Path(path)
    where = f"bundle {folder}"
    if not (folder / "bundle.json").is_file():
        raise ValueError(
            f"{where}: no bundle.json in it; expected a folder <workdir>/bundles/"
            "step_<number> that a stopped run left"
        )
    try:
        info = read_json(folder / "bundle.json", max_bytes=_MAX_JSON)
        if info["format"] > FORMAT:
            raise NotImplementedError(
                f"{where}: got format {info['format']}; expected at most {FORMAT}; a "
                "newer version wrote it, update this one"
            )
        config = config_read.from_config_dict(info["config"])
        # One device holds it: what a step does wrong it does there too.
        config = dataclasses.replace(config, mesh=MeshConfig())
        data = SimpleNamespace(categories=tuple(info["categories"]))
        parts = build.build_parts(config, data)
        arrays = _load(folder / "batch.safetensors")
        kind = BatchWithBase if "base_ids" in arrays else Batch
        batch = kind(**{name: jnp.asarray(arrays[name]) for name in kind._fields})
        saved = _load(folder / "state.safetensors")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{where}: damaged: {load.one_line(e)}") from None
    shape = build.state_shape(parts)
    targets = {
        "trainable": shape.trainable,
        "opt_state": shape.opt_state,
        "held": parts.held,
    }
    wanted = digests.leaves(targets)
    for name, leaf in wanted.items():
        if name not in saved or digests.spec(saved[name]) != digests.spec(leaf):
            got = digests.spec(saved[name]) if name in saved else "nothing"
            raise ValueError(
                f"{where}: damaged: {name}: got {got}; expected {digests.spec(leaf)}"
            )
    trees = load.place(saved, targets)
    state = init_state(trees["trainable"], trees["opt_state"])._replace(
        step=jnp.asarray(info["step"] - 1, jnp.int32)
    )
    return Bundle(info, config, parts, state, trees["held"], batch)


def _load(path: Path) -> dict[str, np.ndarray]:
    return read_tensors(path, read_header(path))


def _save(path: Path, tree: Any) -> None:
    arrays = {name: np.asarray(x) for name, x in digests.leaves(tree).items()}
    save_file({name: np.asarray(x, order="C") for name, x in arrays.items()}, path)
