"""The bundled base model: ternary kernels at 2 bits, everything else as it trained."""

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from bitmamba import paths
from bitmamba.assets_path import resolve
from bitmamba.io.tensors import read_header, read_tensors
from bitmamba.quant.ternary import pack_tree, unpack_tree
from bitmamba.types import Params

BASE = "assets:base"
_FILE = "model.safetensors"


def load_base(folder: str | Path = BASE) -> Params:
    """Parameters of the bundled base, float32.

    Ternary kernels come back as latent weights with the trained codes and scales
    exactly; the latent weights of the pre-training itself are not kept.

    Raises:
        ValueError: the file is missing or damaged.
    """
    path = resolve(str(folder)) / _FILE
    if not path.is_file():
        raise ValueError(f"{folder}: {_FILE} is missing; expected the bundled base")
    named = read_tensors(path, read_header(path))
    try:
        flat = unpack_tree(named)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return paths.unflatten(flat)


def save_base(params: Params, folder: Path) -> int:
    """Write parameters in the bundled form; returns the bytes of the file.

    Kernels of linear layers become 2-bit codes, the embedding float16; norms,
    convolutions and state parameters stay float32.
    """
    folder.mkdir(parents=True, exist_ok=True)
    flat = {p: np.asarray(v) for p, v in paths.flatten(params).items()}
    named = pack_tree(flat, is_ternary=_is_ternary, is_half=_is_embedding)
    save_file(named, folder / _FILE, metadata={"format": "bitmamba-ternary-1"})
    return (folder / _FILE).stat().st_size


def _is_ternary(path: str) -> bool:
    return path.endswith("/kernel") and "conv1d" not in path


def _is_embedding(path: str) -> bool:
    return path == "embed/embedding"
