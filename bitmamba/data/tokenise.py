"""Large replay text: from the files of patterns to a `Corpus`, through the cache."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bitmamba.data import shards
from bitmamba.data.account import FileAccount, together
from bitmamba.data.corpus import Corpus
from bitmamba.data.encode import Encoded
from bitmamba.data.example import Example
from bitmamba.data.loading import ALSO_HELD_OUT, SPLIT, Loader, check_trained
from bitmamba.data.records import Line
from bitmamba.data.token_cache import Make, Shard, TokenCache, fill, shard_of
from bitmamba.data.token_file import VERSION, TokenFile
from bitmamba.data.token_writer import TokenWriter

_COUNTERS = ("refused", "notes", "formats")
_COUNTS = ("rows", "trained", "tokens")


def read_corpus(
    entries: Sequence[tuple[str, Sequence[Path]]],
    *,
    loader: Loader,
    cache: TokenCache,
    source: int,
) -> tuple[Corpus, list[FileAccount]]:
    """Tokenise what is not in the cache, and open all.

    Args:
        entries: the settings' names, each with its files, in order.
        loader: has read the held-out text, and knows how rows become tokens.
        cache: where tokens are kept, and who makes them.
        source: the category of the documents.

    Returns:
        The documents that are not held out, and an account for each entry.

    Raises:
        ValueError: a file is no shard, is damaged or has ids that the model has not.
    """
    found = [shard for _, paths in entries for shard in _shards(paths, loader, cache)]
    files = fill(found, _maker(loader), cache)
    heldout = np.array(sorted(loader.heldout_texts), np.uint64)
    keep, accounts = [], []
    for shard, file in zip(found, files, strict=True):
        kept, account = _counted(shard, file, heldout, loader)
        keep.append(kept)
        accounts.append(account)
    corpus, made = Corpus(files, keep=keep, source=source), []
    for name, paths in entries:
        mine, accounts = accounts[: len(paths)], accounts[len(paths) :]
        made.append(together(name, mine))
        if not made[-1].rows:
            raise ValueError(f"data.replay: {name} has no rows; expected text")
    return corpus, made


def _counted(
    shard: Shard, file: TokenFile, heldout: np.ndarray, loader: Loader
) -> tuple[np.ndarray | None, FileAccount]:
    """Which documents of a file are trained (None: all), and its account."""
    _check_ids(shard, file, loader.vocab_size)
    account = _account(shard, file)
    keep = _without(heldout, file, account)
    lengths = file.lengths if keep is None else file.lengths[keep]
    if n := int((lengths > loader.cfg.window).sum()):
        account.notes[SPLIT] = n
    account.check()
    return keep, account


def _shards(paths: Sequence[Path], loader: Loader, cache: TokenCache) -> list[Shard]:
    made = []
    for path in paths:
        suffix = shards.suffix_of(path, where="data.replay")
        made.append(shard_of(path, cache.folder / _settings(suffix, loader)[:16]))
    return made


def _settings(suffix: str, loader: Loader) -> str:
    """sha256 of all that tokens depend on, beside the text."""
    plain = {
        "version": VERSION,
        "tokenizer": loader.tokenizer.fingerprint,
        "dtype": _dtype(loader).str,
        "rows": shards.row_settings([suffix], loader.cfg),
    }
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _dtype(loader: Loader) -> np.dtype:
    return np.dtype("<u2" if loader.vocab_size <= 2**16 else "<i4")


def _maker(loader: Loader) -> Make:
    """What tokenises one shard."""

    def make(
        shard: Shard, sha256: str, path: Path, tell: Callable[[int], None]
    ) -> None:
        account = FileAccount(str(shard.source), "replay", sha256)
        writer = TokenWriter(path, dtype=_dtype(loader))
        try:
            reader = _ShardLoader(loader, writer)
            lines = shards.read(shard.source, loader.cfg, notes=account.notes)
            reader.read(_told(lines, tell), account)
            writer.finish(source=sha256, account=_plain(account))
        finally:
            writer.close()

    return make


def _told(lines: Iterable[Line], tell: Callable[[int], None]) -> Iterator[Line]:
    for line in lines:
        tell(line.n_bytes)
        yield line


class _ShardLoader(Loader):
    """Reads a shard into a file; what is held out is seen to when it is opened."""

    # Encoding holds about 40 times as much.
    bytes_at_once = 2**20

    def __init__(self, like: Loader, writer: TokenWriter):
        super().__init__(like.cfg, like.template, like.tokenizer, like.vocab_size)
        self._writer = writer

    def _check_heldout(self, example: Example, account: FileAccount) -> None:
        """Not here: the tokens of a corpus outlive a choice of held-out text."""

    def _keep(
        self, document: Encoded, example: Example, account: FileAccount, line: int
    ) -> None:
        check_trained(document)
        self._writer.add(document, key=example.content_hash(), record=line)
        account.tokens += len(document.tokens)
        account.trained += 1


def _plain(account: FileAccount) -> dict[str, Any]:
    counts = {name: getattr(account, name) for name in _COUNTS}
    counters = {name: dict(getattr(account, name)) for name in _COUNTERS}
    return {**counts, **counters, "examples": account.examples}


def _account(shard: Shard, file: TokenFile) -> FileAccount:
    """What was counted when the tokens were made."""
    plain = file.meta["account"]
    return FileAccount(
        path=str(shard.source),
        role="replay",
        sha256=file.meta["source"],
        examples={reason: list(kept) for reason, kept in plain["examples"].items()},
        **{name: plain[name] for name in _COUNTS},
        **{name: Counter(plain[name]) for name in _COUNTERS},
    )


def _check_ids(shard: Shard, file: TokenFile, vocab_size: int) -> None:
    if file.meta["highest"] >= vocab_size:
        raise ValueError(
            f"{shard.source}: token id {file.meta['highest']}; expected < {vocab_size} "
            "(model.vocab_size); use the tokenizer that the model was made with"
        )


def _without(
    heldout: np.ndarray, file: TokenFile, account: FileAccount
) -> np.ndarray | None:
    """(documents,) bool, those that are not held out; None if none is."""
    if not len(heldout):
        return None
    keep = ~np.isin(file.keys, heldout)
    if keep.all():
        return None
    for record in file.records[~keep].tolist():
        account.refuse(record, *ALSO_HELD_OUT)
    account.trained -= int((~keep).sum())
    account.tokens -= int(file.lengths[~keep].sum(dtype=np.int64))
    return keep
