"""What can be adapted in a model: its projections, their slices, embedding and head."""

from collections.abc import Callable

from bitmamba import paths
from bitmamba.config import ModelConfig
from bitmamba.models import bitmamba2, mamba2
from bitmamba.types import AdapterSite, Params

Slices = tuple[tuple[str, int, int], ...]


def adapter_sites(cfg: ModelConfig, shapes: Params) -> tuple[AdapterSite, ...]:
    """Every weight that a low-rank adapter can stand beside, in order of the layers.

    Args:
        cfg: the architecture.
        shapes: its parameters, or their shapes (`param_shapes`).
    """
    flat = paths.flatten(shapes)
    sites = [AdapterSite("embed", "embed", "embed", flat["embed/embedding"].shape)]
    for i, kind in enumerate(cfg.layers):
        start = f"layer_{i}/mixer/"
        for path, leaf in flat.items():
            if path.startswith(start) and path.endswith("_proj/kernel"):
                site, name = path.removesuffix("/kernel"), path.split("/")[-2]
                fused = name == "in_proj" and kind in _FUSED
                slices = _FUSED[kind](cfg) if fused else ()
                sites.append(AdapterSite(site, kind, name, leaf.shape, slices))
    if "lm_head/kernel" in flat:
        shape = flat["lm_head/kernel"].shape
        sites.append(AdapterSite("lm_head", "head", "lm_head", shape))
    return tuple(sites)


def state_offset_shapes(cfg: ModelConfig) -> dict[str, tuple[int, int, int]]:
    """{path: (H, P, N)} of the offsets that can be added to each layer's SSM state."""
    found = {}
    for i, kind in enumerate(cfg.layers):
        if kind in _STATE:
            found[f"layer_{i}/mixer/state_offset"] = _STATE[kind](cfg)
    return found


def _mamba2_slices(cfg: ModelConfig) -> Slices:
    d_inner, n_heads, n_maps = mamba2.sizes(cfg)
    widths = {"z": d_inner, "x": d_inner, "B": n_maps, "C": n_maps, "dt": n_heads}
    return _edges(widths)


def _bitmamba2_slices(cfg: ModelConfig) -> Slices:
    d_inner, n_heads = bitmamba2.sizes(cfg)
    widths = {"z": d_inner, "x": d_inner, "B": n_heads, "C": n_heads, "dt": n_heads}
    return _edges(widths)


def _edges(widths: dict[str, int]) -> Slices:
    edges, start = [], 0
    for name, width in widths.items():
        edges.append((name, start, start + width))
        start += width
    return tuple(edges)


def _mamba2_state(cfg: ModelConfig) -> tuple[int, int, int]:
    return mamba2.sizes(cfg)[1], cfg.mamba2.headdim, cfg.mamba2.d_state


def _bitmamba2_state(cfg: ModelConfig) -> tuple[int, int, int]:
    d_inner, n_heads = bitmamba2.sizes(cfg)
    return n_heads, d_inner // n_heads, 1


_FUSED: dict[str, Callable[[ModelConfig], Slices]] = {
    "mamba2": _mamba2_slices,
    "bitmamba2": _bitmamba2_slices,
}
_STATE: dict[str, Callable[[ModelConfig], tuple[int, int, int]]] = {
    "mamba2": _mamba2_state,
    "bitmamba2": _bitmamba2_state,
}
