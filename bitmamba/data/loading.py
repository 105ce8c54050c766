"""Files to token stores, with every row accounted for."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from bitmamba.config import DataConfig
from bitmamba.data import shards
from bitmamba.data.account import FileAccount, together, visible
from bitmamba.data.chat import DataTokenizer, Template
from bitmamba.data.encode import Encoded, encode_examples, fit_window, split_text
from bitmamba.data.example import Example, Refused
from bitmamba.data.formats import misspelt, parse_row
from bitmamba.data.records import Line
from bitmamba.data.store import StoreBuilder, TokenStore

REPLAY_CATEGORY = "replay"
SPLIT = "texts longer than a window, split"
ALSO_HELD_OUT = "also in the held-out text", "the same text is held out"
MAX_CATEGORIES = 256
# By a pattern. Evaluation takes a few windows of them; more would only fill memory.
MAX_HELDOUT_TEXTS = 20_000
# Rows encoded together: many short ones, few long ones (`Loader.bytes_at_once`).
_ROWS_AT_ONCE = 512
_MAX_KEY_SETS = 100  # looked through for misspelt keys; a file has few


@dataclass
class Loader:
    """Reads files one after another into four streams.

    cfg: which rows are trained and how. template, tokenizer: how they become tokens.
    vocab_size: of the model; a higher token id stops everything.
    """

    cfg: DataConfig
    template: Template
    tokenizer: DataTokenizer
    vocab_size: int
    files: list[FileAccount] = field(default_factory=list)
    # Of rows that are encoded together.
    bytes_at_once: ClassVar[int] = 8 * 2**20

    def __post_init__(self) -> None:
        names = ("sft", "sft_heldout", "replay", "heldout_replay")
        self._builders = {n: StoreBuilder(vocab_size=self.vocab_size) for n in names}
        self._categories: dict[str, int] = {REPLAY_CATEGORY: 0}
        self._heldout_texts: set[int] = set()
        self._seen: set[int] = set()
        self._misspelt: dict[tuple[str, ...], list[tuple[str, str]]] = {}
        special = sorted(self.tokenizer.special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)) or r"(?!)")

    def load(
        self, name: str, path: Path, *, role: str, at_most: int | None = None
    ) -> None:
        """Read one file.

        Args:
            name: the path as the user wrote it, for messages.
            path: where it is.
            role: "sft", "replay" or "heldout_replay" (load this before "replay").
            at_most: refuse a file with more rows.

        Raises:
            ValueError: the file has no rows, or a token id the model has not.
        """
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        account = FileAccount(path=name, role=role, sha256=sha256)
        self.files.append(account)
        lines = shards.read(path, self.cfg, notes=account.notes)
        if at_most is not None:
            lines = _bounded(lines, at_most, name)
        self.read(lines, account)
        if account.rows == 0:
            raise ValueError(
                f"data.{role}: {name} has no rows; expected JSON objects, one a line"
            )

    def load_all(self, name: str, paths: Sequence[Path], *, role: str) -> None:
        """Read the files of a name, which may be a pattern; arguments as for `load`.

        Raises:
            ValueError: as `load`; or more held-out text than is to lie in memory.
        """
        if not shards.is_large(name):
            self.load(name, paths[0], role=role)
            return
        left = MAX_HELDOUT_TEXTS if role == "heldout_replay" else None
        for path in paths:
            self.load(str(path), path, role=role, at_most=left)
            left = None if left is None else left - self.files[-1].rows
        mine = together(name, self.files[-len(paths) :])
        self.files[-len(paths) :] = [mine]

    def read(self, lines: Iterable[Line], account: FileAccount) -> None:
        """Read the rows of one file, each counted in its account."""
        waiting: list[tuple[int, Example]] = []
        n_bytes = 0
        for line in lines:
            account.rows += 1
            n_bytes += line.n_bytes
            try:
                if line.refused:
                    raise line.refused
                waiting.append((line.number, self._example(line.row, account)))
            except Refused as refused:
                account.refuse(line.number, refused.reason, refused.detail)
            if len(waiting) >= _ROWS_AT_ONCE or n_bytes >= self.bytes_at_once:
                self._encode(waiting, account)
                waiting, n_bytes = [], 0
        self._encode(waiting, account)
        account.check()

    @property
    def heldout_texts(self) -> frozenset[int]:
        """Content hashes of the texts that retention is measured on."""
        return frozenset(self._heldout_texts)

    def stores(self) -> tuple[dict[str, TokenStore], tuple[str, ...]]:
        """The streams, and the categories that their sources are numbers of.

        Categories are in alphabetical order, "replay" last.
        """
        names = sorted(n for n in self._categories if n != REPLAY_CATEGORY)
        names.append(REPLAY_CATEGORY)
        number = np.zeros(len(names), np.int32)
        for new, name in enumerate(names):
            number[self._categories[name]] = new
        stores = {}
        for stream, builder in self._builders.items():
            store = builder.build()
            stores[stream] = store._replace(sources=number[store.sources])
        return stores, tuple(names)

    def _example(self, row: dict, account: FileAccount) -> Example:
        kind, example = parse_row(row, role=account.role)
        account.formats[kind] += 1
        if account.role != "sft":
            if example.messages is not None:
                detail = f"{kind!r} row; expected text or input_ids"
                raise Refused("not plain text", detail)
            self._check_heldout(example, account)
        score, least = example.score, self.cfg.min_score
        if score is not None and least is not None and score < least:
            raise Refused("score too low", f"{score:g} < data.min_score = {least:g}")
        self._note(example, account)
        self._note_keys(tuple(row), account)
        return example

    def _check_heldout(self, example: Example, account: FileAccount) -> None:
        """Text that retention is measured on is never trained on."""
        content = example.content_hash()
        if account.role == "heldout_replay":
            self._heldout_texts.add(content)
        elif content in self._heldout_texts:
            raise Refused(*ALSO_HELD_OUT)

    def _note(self, example: Example, account: FileAccount) -> None:
        if account.role == "sft":
            content = example.content_hash()
            if content in self._seen:
                account.notes["rows that repeat an earlier one"] += 1
            self._seen.add(content)
        texts = [example.text] if example.text is not None else []
        texts += [m.content for m in example.messages or ()]
        if any(self._special.search(text) for text in texts):
            account.notes["rows that spell a special token, kept as plain text"] += 1

    def _note_keys(self, keys: tuple[str, ...], account: FileAccount) -> None:
        """An optional key with a slip of the finger would do nothing, silently."""
        if keys not in self._misspelt:
            if len(self._misspelt) >= _MAX_KEY_SETS or len(keys) > _MAX_KEY_SETS:
                return
            self._misspelt[keys] = misspelt(keys)
        for key, near in self._misspelt[keys]:
            account.notes[f"key {visible(key)!r} ignored; did you mean {near!r}?"] += 1

    def _encode(
        self, rows: Sequence[tuple[int, Example]], account: FileAccount
    ) -> None:
        try:
            documents = encode_examples(
                [example for _, example in rows],
                template=self.template,
                tokenizer=self.tokenizer,
                thought=self.cfg.thought,
            )
        except ValueError as error:  # of one row: which?
            if len(rows) == 1:
                raise ValueError(f"{account.path}:{rows[0][0]}: {error}") from None
            for row in rows:
                self._encode([row], account)
            return
        for (line, example), document in zip(rows, documents, strict=True):
            try:
                if isinstance(document, Refused):
                    raise document
                self._check_ids(document, f"{account.path}:{line}")
                self._keep(document, example, account, line)
            except Refused as refused:
                account.refuse(line, refused.reason, refused.detail)

    def _check_ids(self, document: Encoded, where: str) -> None:
        if not len(document.tokens):
            raise Refused("no token", "nothing is left of the row after encoding")
        highest = int(document.tokens.max())
        if highest >= self.vocab_size:
            raise ValueError(
                f"{where}: token id {highest}; expected < {self.vocab_size} "
                "(model.vocab_size); use the tokenizer that the model was made with"
            )

    def _keep(
        self, document: Encoded, example: Example, account: FileAccount, line: int
    ) -> None:
        if account.role == "sft":
            heldout = _is_held_out(example, self.cfg.heldout_share)
            stream = "sft_heldout" if heldout else "sft"
            pieces = self._fitted(document, example, account)
            category = self._category(
                example.category or _stem(account.path), account.path
            )
        else:
            heldout = account.role == "heldout_replay"
            stream, pieces, category = account.role, [document], 0
            check_trained(document)
            if len(document.tokens) > self.cfg.window:
                account.notes[SPLIT] += 1
        for piece in pieces:
            self._builders[stream].add(piece, category)
            account.tokens += len(piece.tokens)
        if heldout:
            account.held_out += 1
        else:
            account.trained += 1

    def _fitted(
        self, document: Encoded, example: Example, account: FileAccount
    ) -> list[Encoded]:
        window = self.cfg.window
        if example.text is not None:
            if len(document.tokens) > window:
                account.notes[SPLIT] += 1
            return split_text(document, window=window)
        kept, cut = fit_window(document, window=window, long=self.cfg.long_examples)
        account.truncated += cut
        return [kept]

    def _category(self, name: str, path: str) -> int:
        number = self._categories.setdefault(name, len(self._categories))
        if number > MAX_CATEGORIES:
            raise ValueError(
                f"data.sft: {path}: more than {MAX_CATEGORIES} categories, e.g. "
                f"{name!r}; "
                "expected few enough to evaluate each; merge the 'category' keys"
            )
        return number


def check_trained(document: Encoded) -> None:
    """Refuse a text of which nothing is trained."""
    if not document.weights[1:].any():
        raise Refused("no trained token", "the loss mask is empty")


def _bounded(lines: Iterable[Line], at_most: int, name: str) -> Iterator[Line]:
    for number, line in enumerate(lines, start=1):
        if number > at_most:
            raise ValueError(
                f"data.heldout_replay: {name}: more than {MAX_HELDOUT_TEXTS:,} texts "
                "by a pattern; expected at most as many, as they lie in memory; name "
                "fewer files"
            )
        yield line


def _is_held_out(example: Example, share: float) -> bool:
    """By content alone: the same for every epoch, order, and whatever is added."""
    return example.content_hash() < share * 2.0**64


def _stem(path: str) -> str:
    name = Path(path.rpartition(":")[2]).name
    stem = name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")
    # The stream of replay text has that name already.
    return f"{stem}_sft" if stem == REPLAY_CATEGORY else stem
