"""What is checked before JAX loads, so that a mistake is told within two seconds."""

import os
from pathlib import Path
from typing import Any

from bitmamba.assets_path import resolve
from bitmamba.config import Config
from bitmamba.config_read import from_config_dict
from bitmamba.data import DataBundle, TokenCache, build_data
from bitmamba.io.tokenizer import load_tokenizer
from bitmamba.io.workdir import check_links
from bitmamba.train.cluster import find_place
from bitmamba.train.signals import StopSignal


def read_config(config_dict: Any) -> Config:
    """The resolved configuration; see `bitmamba.config_read`.

    Raises:
        ValueError: a setting is wrong, or names a file or folder that is not there.
    """
    config = from_config_dict(config_dict)
    source = config.checkpoint.init_from
    if source is not None and not resolve(source).exists():
        raise ValueError(
            f"config.checkpoint.init_from: got {source!r}, which does not exist; "
            "expected a run's folder, a checkpoint folder or assets:base"
        )
    workdir = Path(config.workdir)
    if workdir.exists() and not workdir.is_dir():
        raise ValueError(f"config.workdir: got {config.workdir!r}; expected a folder")
    check_links(workdir)
    return config


def read_data(config: Config) -> DataBundle:
    """Read and count every row, and make the plan of all windows.

    Raises:
        ValueError: a file, a row or the whole data set cannot be trained on.
    """
    tokenizer = load_tokenizer(config.data.tokenizer)
    # Large text is tokenised first, which may take hours.
    with StopSignal(at_once=config.guard.stop_code):
        return build_data(
            config.data,
            tokenizer,
            vocab_size=config.model.vocab_size,
            steps=config.train.steps,
            batch_size=config.train.batch_size,
            accumulation=config.train.accumulation,
            max_eval_windows=config.eval.max_windows,
            cache=_token_cache(config),
        )


def _token_cache(config: Config) -> TokenCache:
    """Beside the work directory, so that the runs there share it; one process tells."""
    folder = Path(config.workdir).absolute().parent / "tokens"
    place = find_place(config.distributed, os.environ)
    if place is None:
        return TokenCache(folder, show=_show)
    show = {"show": _show} if place.process_id == 0 else {}
    return TokenCache(folder, place.process_id, place.processes, **show)


def _show(line: str) -> None:
    print(line, flush=True)
