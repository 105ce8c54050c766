"""Adapters as a PEFT folder: adapter_config.json and adapter_model.safetensors.

Our leaves are (D, R) and (R, F); PEFT's are their transposes. A weight that we adapt
by slices becomes one PEFT adapter of the whole weight, whose rank is the sum of theirs
and whose B is zero outside each one's columns: the same function, exactly.
`bitmamba/lora/README.md`, "Exchange with PEFT", states names and limits.
"""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from bitmamba.types import AdapterSite, AdapterSpec, Array

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Places of a leaf in PEFT's file: of a projection, and of an embedding.
FACTORS = {False: ("lora_A.weight", "lora_B.weight")}
FACTORS[True] = ("lora_embedding_A", "lora_embedding_B")
MAGNITUDE = "lora_magnitude_vector"


class Written(NamedTuple):
    """What a folder got: its tensors' names, and what its reader must know."""

    names: tuple[str, ...]
    notes: tuple[str, ...]


def write_peft(
    folder: Path,
    specs: Sequence[AdapterSpec],
    flat: Mapping[str, Array],
    *,
    sites: Sequence[AdapterSite],
    rslora: bool,
    base: str | None,
    weight: Callable[[str], np.ndarray],
) -> Written:
    """Write adapters in PEFT's form.

    Args:
        folder: to write into; made if needed.
        specs, flat: the adapters and all trained leaves by path.
        sites: every weight of the model that can be adapted.
        rslora: scales are alpha / sqrt(rank) instead of alpha / rank.
        base: name of the base model, for people.
        weight: site -> (D, F) value of the base's weight; only called where slices
            have magnitudes, for the columns that have none.

    Raises:
        ValueError: a trained leaf that PEFT has no form for.
    """
    _check_expressible(specs, flat)
    modules = {site.path: _wide(site, specs, flat, weight) for site in sites}
    modules = {path: module for path, module in modules.items() if module is not None}
    tensors = {}
    for path, module in modules.items():
        is_embedding = path == "embed"
        for part, value in zip(
            FACTORS[is_embedding], (module.a, module.b), strict=True
        ):
            tensors[f"{PREFIX}{module_name(path)}.{part}"] = _contiguous(value.T)
        if module.magnitude is not None:
            name = f"{PREFIX}{module_name(path)}.{MAGNITUDE}"
            tensors[name] = _contiguous(module.magnitude)
    folder.mkdir(parents=True, exist_ok=True)
    settings = _settings(modules, specs, sites=sites, rslora=rslora, base=base)
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return Written(tuple(sorted(tensors)), _notes(modules, sites))


def module_name(site: str) -> str:
    """The site's module as PEFT names it: transformers' Mamba2ForCausalLM names.

    Layers that class has not are named by the same scheme.
    """
    if site == "embed":
        return "backbone.embeddings"
    if site == "lm_head":
        return "lm_head"
    layer, rest = site.split("/", 1)
    return f"backbone.layers.{layer.removeprefix('layer_')}.{rest.replace('/', '.')}"


class _Module(NamedTuple):
    """One weight's adapter over all its columns. rescaled: sites of folded scales."""

    a: np.ndarray
    b: np.ndarray
    magnitude: np.ndarray | None
    scale: float
    n_slices: int
    rescaled: tuple[str, ...]


def _wide(
    site: AdapterSite,
    specs: Sequence[AdapterSpec],
    flat: Mapping[str, Array],
    weight: Callable[[str], np.ndarray],
) -> _Module | None:
    """The adapters of a site as one; None when it has none."""
    mine = [spec for spec in specs if spec.site == site.path]
    if not mine:
        return None
    scale = mine[0].scale
    b = np.zeros((sum(spec.rank for spec in mine), site.shape[1]), np.float32)
    row = 0
    for spec in mine:
        block = np.asarray(flat[f"{spec.path}/b"], np.float32)
        ratio = np.float32(spec.scale / scale)
        columns = slice(spec.start, spec.start + spec.shape[1])
        b[row : row + spec.rank, columns] = block * ratio
        row += spec.rank
    return _Module(
        a=np.concatenate(
            [np.asarray(flat[f"{s.path}/a"], np.float32) for s in mine], 1
        ),
        b=b,
        magnitude=_wide_magnitude(site, mine, flat, weight),
        scale=scale,
        n_slices=sum(spec.path != spec.site for spec in mine),
        rescaled=tuple(spec.path for spec in mine if not _is_exact(spec.scale / scale)),
    )


def _wide_magnitude(site, mine, flat, weight) -> np.ndarray | None:
    if not any(spec.magnitude for spec in mine):
        return None
    lengths = np.zeros(site.shape[1], np.float32)
    if sum(spec.shape[1] for spec in mine) < site.shape[1]:
        # With its own length, a column that has no adapter stays as it is.
        lengths = np.linalg.norm(np.asarray(weight(site.path), np.float32), axis=0)
    for spec in mine:
        columns = slice(spec.start, spec.start + spec.shape[1])
        lengths[columns] = flat[f"{spec.path}/magnitude"]
    return lengths


def _is_exact(ratio: float) -> bool:
    """Whether multiplying by it loses nothing: a power of two."""
    return math.frexp(ratio)[0] == 0.5


def _settings(
    modules: Mapping[str, _Module],
    specs: Sequence[AdapterSpec],
    *,
    sites: Sequence[AdapterSite],
    rslora: bool,
    base: str | None,
) -> dict[str, Any]:
    """adapter_config.json: the usual rank and alpha, and patterns for the others."""
    ranks = {module_name(p): m.a.shape[1] for p, m in modules.items()}
    alphas = {
        module_name(p): alpha_of(m.scale, m.a.shape[1], rslora=rslora)
        for p, m in modules.items()
    }
    rank, alpha = statistics.mode(ranks.values()), statistics.mode(alphas.values())
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": max(spec.dropout for spec in specs),
        "target_modules": _targets(modules, sites),
        "modules_to_save": None,
        "rank_pattern": {n: r for n, r in ranks.items() if r != rank},
        "alpha_pattern": {n: a for n, a in alphas.items() if a != alpha},
        "use_rslora": rslora,
        "use_dora": any(m.magnitude is not None for m in modules.values()),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "peft_version": "0.21.2",
    }


def alpha_of(scale: float, rank: int, *, rslora: bool) -> int | float:
    """The alpha whose quotient by the rank (or its root) is exactly this scale."""
    divisor = math.sqrt(rank) if rslora else rank
    near = scale * divisor
    tries = (round(near, 9), near, math.nextafter(near, 0), math.nextafter(near, 1e300))
    alpha = next((a for a in tries if a / divisor == scale), near)
    return int(alpha) if alpha == int(alpha) else alpha


def _targets(modules: Mapping[str, Any], sites: Sequence[AdapterSite]) -> list[str]:
    """Short names where all modules of that name are adapted, else whole names."""
    targets = []
    for path in modules:
        name = module_name(path).rpartition(".")[2]
        alike = [
            s.path for s in sites if module_name(s.path).rpartition(".")[2] == name
        ]
        everywhere = all(other in modules for other in alike)
        targets.append(name if everywhere else module_name(path))
    return list(dict.fromkeys(targets))


def _notes(
    modules: Mapping[str, _Module], sites: Sequence[AdapterSite]
) -> tuple[str, ...]:
    """What a reader of the folder must know, one sentence each."""
    notes = []
    kinds = {site.kind for site in sites} - {"embed", "head"}
    if kinds != {"mamba2"}:
        notes.append(
            f"transformers has no class with layers of {', '.join(sorted(kinds))} as "
            "here: names follow Mamba2ForCausalLM, and scripts/import_adapter.py "
            "reads the folder back"
        )
    if any(path.endswith("/mixer/out_proj") for path in modules):
        notes.append(
            "PEFT refuses adapters on out_proj of mamba2 models (its fused path skips "
            "them): load this folder with scripts/import_adapter.py, or use --as=merged"
        )
    if n := sum(module.n_slices > 0 for module in modules.values()):
        notes.append(
            f"{n} weights adapted by slices are written whole: their ranks are added "
            "up, B is zero outside each slice"
        )
    if rescaled := [path for m in modules.values() for path in m.rescaled]:
        notes.append(
            f"{len(rescaled)} slices have another scale than the first of their "
            f"weight ({rescaled[0]}): it is multiplied into B, rounded once to float32"
        )
    return tuple(notes)


def _check_expressible(specs: Sequence[AdapterSpec], flat: Mapping[str, Array]) -> None:
    mine = {f"{spec.path}/{leaf}" for spec in specs for leaf in ("a", "b", "magnitude")}
    others = sorted(flat.keys() - mine)
    if others:
        raise ValueError(
            f"peft: {others[0]}: got {len(others)} trained leaves that are no low-rank "
            "adapters; expected adapters alone, as PEFT has no form for the others; "
            "use --as=merged (state offsets: the run's own checkpoint)"
        )
    if not specs:
        raise ValueError("peft: got no adapter; expected at least one")
    if len({spec.magnitude for spec in specs}) > 1:
        raise ValueError(
            "peft: got magnitudes on some adapters only; expected all or none"
        )


def _contiguous(x: Array) -> np.ndarray:
    return np.ascontiguousarray(x, np.float32)
