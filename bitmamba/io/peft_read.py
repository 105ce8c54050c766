"""Reading a PEFT folder: everything in it is used, or the folder is refused."""

import difflib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bitmamba.io import tensors
from bitmamba.io.peft import CONFIG, FACTORS, MAGNITUDE, PREFIX, WEIGHTS, module_name
from bitmamba.io.peft_settings import Settings, read_settings, short
from bitmamba.types import AdapterSite, AdapterSpec


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
    settings = read_settings(folder)
    file = _weights_file(folder)
    header = tensors.read_header(file)
    by_module = _by_module(folder, header, sites)
    _check_targets(folder, settings, [module_name(site.path) for site in by_module])
    for site, names in by_module.items():
        parts = {part: header[name] for part, name in names.items()}
        _check_parts(folder, site, parts, settings)
    found = _finite(file, tensors.read_tensors(file, header))
    specs, flat, alphas = [], {}, {}
    for site, names in by_module.items():
        name = module_name(site.path)
        rank, alpha = settings.rank(name), settings.alpha(name)
        scale = alpha / (math.sqrt(rank) if settings.rslora else rank)
        dropout, dora = settings.dropout, settings.dora
        specs.append(
            AdapterSpec(site.path, site.path, site.shape, 0, rank, scale, dropout, dora)
        )
        alphas[site.path] = alpha
        leaves = dict(zip(FACTORS[site.path == "embed"], ("a", "b"), strict=True))
        for part, leaf in {**leaves, MAGNITUDE: "magnitude"}.items():
            if part in names:  # a transposed vector is itself
                flat[f"{site.path}/{leaf}"] = np.ascontiguousarray(found[names[part]].T)
    return PeftAdapter(tuple(specs), flat, alphas, settings.rslora, settings.dora)


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


def _weights_file(folder: Path) -> Path:
    file = folder / WEIGHTS
    if file.is_file():
        return file
    also = ""
    if (folder / "adapter_model.bin").exists():
        also = (
            "; adapter_model.bin is a pickle, which can run code when it is read: save "
            "it as safetensors where it was made"
        )
    raise ValueError(f"{folder}: {WEIGHTS} is missing; expected a PEFT folder{also}")


def _by_module(
    folder: Path, header: Mapping[str, tensors.Entry], sites: Sequence[AdapterSite]
) -> dict[AdapterSite, dict[str, str]]:
    """Tensors' names by site and part, in order of the model; all are placed."""
    known = {module_name(site.path): site for site in sites}
    endings = [*FACTORS[False], *FACTORS[True], MAGNITUDE]
    found: dict[AdapterSite, dict[str, str]] = {}
    for name, entry in header.items():
        where = f"{folder}: {WEIGHTS}: {name[:200]}"
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
            near = difflib.get_close_matches(module[:200], known, n=2, cutoff=0.0)
            raise ValueError(
                f"{where}: the model has no module {module[:200]!r}; nearest: "
                f"{' or '.join(near)}; use the base that it was trained on"
            )
        if entry.dtype not in tensors.FLOATS:
            raise ValueError(f"{where}: got dtype {entry.dtype}; expected a float")
        found.setdefault(known[module], {})[part] = name
    if not found:
        raise ValueError(f"{folder}: {WEIGHTS}: got no tensor; expected adapters")
    return {site: found[site] for site in sites if site in found}


def _check_parts(
    folder: Path,
    site: AdapterSite,
    parts: Mapping[str, tensors.Entry],
    settings: Settings,
) -> None:
    """Names, shapes and rank of one weight's tensors, before they are read."""
    where = f"{folder}: {module_name(site.path)}"
    expected = [*FACTORS[site.path == "embed"], *([MAGNITUDE] if settings.dora else [])]
    if sorted(parts) != sorted(expected):
        raise ValueError(
            f"{where}: got {', '.join(sorted(parts))}; expected {', '.join(expected)}"
        )
    a, b = (parts[name].shape for name in expected[:2])
    d_in, d_out = site.shape
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        raise ValueError(
            f"{where}: got A {a} and B {b}; expected (r, {d_in}) and ({d_out}, r)"
        )
    if a[1] != d_in or b[0] != d_out:
        raise ValueError(
            f"{where}: got A {a} and B {b} for a weight of {d_in} inputs "
            f"and {d_out} outputs; expected ({a[0]}, {d_in}) and ({d_out}, {a[0]})"
        )
    if settings.dora and parts[MAGNITUDE].shape != (d_out,):
        raise ValueError(
            f"{where}: got a magnitude of shape {parts[MAGNITUDE].shape}; expected "
            f"({d_out},)"
        )
    stated = settings.rank(module_name(site.path))
    if stated != a[0]:
        raise ValueError(
            f"{where}: got tensors of rank {a[0]}; expected {stated} by {CONFIG}"
        )
    if a[0] > d_in + d_out:
        raise ValueError(
            f"{where}: got rank {a[0]}; expected at most {d_in + d_out}: the weight "
            "itself has no more"
        )


def _finite(file: Path, found: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """float32 values; a float64 beyond float32 is infinite in it."""
    made = {}
    for name, value in found.items():
        with np.errstate(over="ignore"):
            made[name] = np.asarray(value, np.float32)
        if not np.isfinite(made[name]).all():
            raise ValueError(f"{file}: {name}: got NaN or infinity; expected numbers")
    return made


def _check_targets(folder: Path, settings: Settings, modules: Sequence[str]) -> None:
    """Every name that the configuration targets must have tensors."""
    for target in settings.targets:
        if not any(m == target or m.endswith(f".{target}") for m in modules):
            near = difflib.get_close_matches(
                target[:200], [m.rpartition(".")[2] for m in modules], n=1, cutoff=0.0
            )
            raise ValueError(
                f"{folder}: target_modules: {short(target)} has no tensor in "
                f"{WEIGHTS}; expected every target to have some; nearest that has: "
                f"{near[0]!r}"
            )
