"""Reading a PEFT folder: everything in it is used, or the folder is refused."""

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from bitmamba.io.peft import CONFIG, FACTORS, MAGNITUDE, PREFIX, WEIGHTS, module_name
from bitmamba.types import AdapterSite, AdapterSpec

# Settings that change what the tensors mean, and the values that leave it as it is.
_PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "modules_to_save": (None, []),
    "lora_bias": (False,),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
    # Others (pissa, olora, loftq, ...) have changed the base's weights as well.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}


class PeftAdapter(NamedTuple):
    """Adapters of whole weights, as a folder has them.

    specs: in the order of the model. flat: float32 leaves by path.
    alphas: by path, as in `LoraRule.alpha`. rslora, dora: as in `LoraConfig`.
    """

    specs: tuple[AdapterSpec, ...]
    flat: dict[str, np.ndarray]
    alphas: dict[str, float]
    rslora: bool
    dora: bool


def read_peft(folder: Path, *, sites: Sequence[AdapterSite]) -> PeftAdapter:
    """Adapters from a PEFT folder.

    Args:
        folder: with adapter_config.json and adapter_model.safetensors.
        sites: every weight of the model that they are for.

    Raises:
        ValueError: a file is missing or not readable, or only a pickle is there; a
            setting, tensor or target name that we would ignore; a module that the
            model lacks; a shape that does not fit.
    """
    settings = _read_settings(folder)
    tensors = _read_tensors(folder)
    by_module = _by_module(folder, tensors, sites)
    _check_targets(folder, settings, [module_name(site.path) for site in by_module])
    rslora, dora = bool(settings.get("use_rslora")), bool(settings.get("use_dora"))
    specs, flat, alphas = [], {}, {}
    for site, parts in by_module.items():
        where = f"{folder}: {module_name(site.path)}"
        a, b, length = _leaves(where, site, parts, dora=dora)
        rank = a.shape[1]
        _check_rank(where, settings, site, rank)
        alpha = _pattern(settings, "alpha", module_name(site.path))
        scale = alpha / (math.sqrt(rank) if rslora else rank)
        dropout = float(settings.get("lora_dropout") or 0.0)
        specs.append(
            AdapterSpec(site.path, site.path, site.shape, 0, rank, scale, dropout, dora)
        )
        alphas[site.path] = float(alpha)
        flat |= {f"{site.path}/a": a, f"{site.path}/b": b}
        if length is not None:
            flat[f"{site.path}/magnitude"] = length
    return PeftAdapter(tuple(specs), flat, alphas, rslora, dora)


def as_slices(
    whole: PeftAdapter, specs: Sequence[AdapterSpec]
) -> dict[str, np.ndarray]:
    """The leaves of these specs, out of adapters of whole weights; undoes `write_peft`.

    Args:
        whole: from `read_peft`.
        specs: adapters as they were trained, of whole weights or of slices.

    Returns:
        float32 leaves by path.

    Raises:
        ValueError: the folder has other weights, ranks, or values outside the slices.
    """
    wide = {spec.site: spec for spec in whole.specs}
    mine = {spec.site for spec in specs}
    if odd := sorted(wide.keys() ^ mine):
        raise ValueError(
            f"peft: {odd[0]}: got it in {'the folder' if odd[0] in wide else 'the run'}"
            " alone; expected the same weights adapted in both"
        )
    flat = {}
    for site in wide:
        slices = [spec for spec in specs if spec.site == site]
        flat |= _cut(whole, wide[site], slices)
    return flat


def _cut(
    whole: PeftAdapter, wide: AdapterSpec, slices: Sequence[AdapterSpec]
) -> dict[str, np.ndarray]:
    a, b = (whole.flat[f"{wide.path}/{leaf}"] for leaf in ("a", "b"))
    if wide.rank != sum(spec.rank for spec in slices):
        raise ValueError(
            f"peft: {wide.path}: got rank {wide.rank}; expected "
            f"{sum(spec.rank for spec in slices)}, as the run's adapters have together"
        )
    flat, used, row = {}, np.zeros(b.shape, bool), 0
    for spec in slices:
        rows = slice(row, row + spec.rank)
        columns = slice(spec.start, spec.start + spec.shape[1])
        used[rows, columns] = True
        flat[f"{spec.path}/a"] = np.ascontiguousarray(a[:, rows])
        ratio = np.float32(spec.scale / wide.scale)
        flat[f"{spec.path}/b"] = np.ascontiguousarray(b[rows, columns] / ratio)
        if spec.magnitude:
            length = whole.flat[f"{wide.path}/magnitude"][columns]
            flat[f"{spec.path}/magnitude"] = np.ascontiguousarray(length)
        row += spec.rank
    if np.any(b[~used]):
        raise ValueError(
            f"peft: {wide.path}: got values of B outside the slices that the run "
            "adapted; expected zeros there (was it trained further elsewhere?)"
        )
    return flat


def _read_settings(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG
    if not file.is_file():
        raise ValueError(f"{folder}: {CONFIG} is missing; expected a PEFT folder")
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not JSON ({error}); expected an object") from None
    if not isinstance(settings, dict) or "peft_type" not in settings:
        raise ValueError(f"{file}: got no peft_type; expected a PEFT configuration")
    for name, plain in _PLAIN.items():
        if name in settings and settings[name] not in plain:
            raise ValueError(
                f"{file}: {name}: got {settings[name]!r}; expected {plain[0]!r}: other "
                "values change what the tensors mean, and are not supported"
            )
    return settings


def _read_tensors(folder: Path) -> dict[str, np.ndarray]:
    file = folder / WEIGHTS
    if not file.is_file():
        pickled = folder / "adapter_model.bin"
        also = (
            f"; {pickled.name} is a pickle, which can run code when it is read: save "
        )
        also += "it as safetensors where it was made"
        raise ValueError(
            f"{folder}: {WEIGHTS} is missing; expected a PEFT folder"
            + (also if pickled.exists() else "")
        )
    try:
        tensors = load_file(file)
    except (SafetensorError, ValueError) as error:
        raise ValueError(
            f"{file}: {error}; expected a whole safetensors file"
        ) from None
    for name, value in tensors.items():
        if not np.isfinite(np.asarray(value, np.float32)).all():
            raise ValueError(f"{file}: {name}: got NaN or infinity; expected numbers")
    return {name: np.asarray(value, np.float32) for name, value in tensors.items()}


def _by_module(
    folder: Path, tensors: Mapping[str, np.ndarray], sites: Sequence[AdapterSite]
) -> dict[AdapterSite, dict[str, np.ndarray]]:
    """Tensors by site and part of the name, in order of the model; all are placed."""
    known = {module_name(site.path): site for site in sites}
    endings = [*FACTORS[False], *FACTORS[True], MAGNITUDE]
    found: dict[AdapterSite, dict[str, np.ndarray]] = {}
    for name, value in tensors.items():
        where = f"{folder}: {WEIGHTS}: {name}"
        part = next((e for e in endings if name.endswith(f".{e}")), None)
        if part is None:
            copy = name.endswith(".base_layer.weight")
            raise ValueError(
                f"{where}: unknown kind of tensor; expected one of {', '.join(endings)}"
                + ("; save it with save_embedding_layers=False" if copy else "")
            )
        if not name.startswith(PREFIX) or name.startswith(PREFIX * 2):
            raise ValueError(f"{where}: expected the prefix {PREFIX!r}, once")
        module = name.removeprefix(PREFIX).removesuffix(f".{part}")
        if module not in known:
            near = difflib.get_close_matches(module, known, n=2, cutoff=0.0)
            raise ValueError(
                f"{where}: the model has no module {module!r}; nearest: "
                f"{' or '.join(near)}; use the base that it was trained on"
            )
        found.setdefault(known[module], {})[part] = value
    if not found:
        raise ValueError(f"{folder}: {WEIGHTS}: got no tensor; expected adapters")
    return {site: found[site] for site in sites if site in found}


def _leaves(
    where: str, site: AdapterSite, parts: Mapping[str, np.ndarray], *, dora: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """(a, b, magnitude or None), shapes checked."""
    expected = [*FACTORS[site.path == "embed"], *([MAGNITUDE] if dora else [])]
    if sorted(parts) != sorted(expected):
        raise ValueError(
            f"{where}: got {', '.join(sorted(parts))}; expected {', '.join(expected)}"
        )
    a, b = (parts[name] for name in expected[:2])
    d_in, d_out = site.shape
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise ValueError(
            f"{where}: got A {a.shape} and B {b.shape}; expected (r, {d_in}) and "
            f"({d_out}, r)"
        )
    if a.shape[1] != d_in or b.shape[0] != d_out:
        raise ValueError(
            f"{where}: got A {a.shape} and B {b.shape} for a weight of {d_in} inputs "
            f"and {d_out} outputs; expected ({len(a)}, {d_in}) and ({d_out}, {len(a)})"
        )
    length = parts[MAGNITUDE] if dora else None
    if length is not None and length.shape != (d_out,):
        raise ValueError(
            f"{where}: got a magnitude of shape {length.shape}; expected ({d_out},)"
        )
    return np.ascontiguousarray(a.T), np.ascontiguousarray(b.T), length


def _check_rank(
    where: str, settings: Mapping[str, Any], site: AdapterSite, rank: int
) -> None:
    stated = _pattern(settings, "rank", module_name(site.path))
    if stated != rank:
        raise ValueError(
            f"{where}: got tensors of rank {rank}; expected {stated} by {CONFIG}"
        )


def _pattern(settings: Mapping[str, Any], what: str, module: str) -> Any:
    """The module's rank or alpha, by the rule of PEFT's patterns."""
    for pattern, value in (settings.get(f"{what}_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    name = {"rank": "r", "alpha": "lora_alpha"}[what]
    if not isinstance(settings.get(name), int | float):
        raise ValueError(
            f"{CONFIG}: {name}: got {settings.get(name)!r}; expected a number"
        )
    return settings[name]


def _check_targets(
    folder: Path, settings: Mapping[str, Any], modules: Sequence[str]
) -> None:
    """Every name that the configuration targets must have tensors."""
    targets = settings.get("target_modules") or []
    if isinstance(targets, str):
        return
    for target in targets:
        if not any(m == target or m.endswith(f".{target}") for m in modules):
            near = difflib.get_close_matches(
                target, [m.rpartition(".")[2] for m in modules], n=1, cutoff=0.0
            )
            raise ValueError(
                f"{folder}: target_modules: {target!r} has no tensor in {WEIGHTS}; "
                f"expected every target to have some; nearest that has: {near[0]!r}"
            )
