"""Tokenizers: any tokenizer.json, and a byte tokenizer for tests and tiny models.

Text comes in two kinds. *Content* is what people wrote: where it happens to spell a
special token it stays ordinary text (`encode_content`). *Markup* is what templates
and prompts write: special tokens in it are recognised (`encode`).
Neither adds anything at the beginning or the end.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bitmamba.assets_path import must_exist
from bitmamba.io import pieces, tokenizer_file

END_OF_TEXT = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<|eot_id|>",
    "<|im_end|>",
    "<eos>",
    "[EOS]",
)
PADDING = ("<|pad|>", "<pad>", "[PAD]", "<|padding|>")


class JsonTokenizer:
    """A tokenizer.json, read by the `tokenizers` library.

    vocab_size: highest id + 1.
    eot_id, pad_id: found by content; without a padding token pad_id is eot_id.
    bos_id: the token which the file's post-processor puts first, or None.
    special_tokens: content -> id of every special token.
    fingerprint: sha256 of the file.

    Raises:
        ValueError: not a tokenizer, one that `tokenizer_file` refuses, or one without
            an end-of-text token; and, by any method, a text that it cannot encode.
    """

    def __init__(self, data: bytes, *, where: str):
        self._where = where
        loaded = tokenizer_file.load(data, where=where)
        self._markup, self._content, added, self._cut = loaded
        self._content.encode_special_tokens = True

        vocabulary = self._markup.get_vocab(with_added_tokens=True)
        self.fingerprint = hashlib.sha256(data).hexdigest()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size >= 2**31:
            raise ValueError(
                f"{where}: got the token id {self.vocab_size - 1}; expected ids that "
                "int32 holds"
            )
        self.special_tokens = {name: vocabulary[name] for name in added}
        self.eot_id = _find(vocabulary, END_OF_TEXT, where=where)
        self.pad_id = next((vocabulary[p] for p in PADDING if p in vocabulary), -1)
        if self.pad_id < 0:
            self.pad_id = self.eot_id
        self.bos_id = self._first_added()

    def _first_added(self) -> int | None:
        """What the post-processor puts before a text."""
        with tokenizer_file.one_sentence(self._where):
            added = self._markup.encode("a", add_special_tokens=True).ids
            plain = self._markup.encode("a", add_special_tokens=False).ids
        return added[0] if added and added[: len(plain)] != plain else None

    def encode(self, text: str) -> list[int]:
        with tokenizer_file.one_sentence(self._where):
            return self._markup.encode(text, add_special_tokens=False).ids

    def encode_markup(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return self._encode_batch(self._markup, texts)

    def encode_content(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return self._encode_batch(self._content, texts)

    def too_long(self, text: str) -> str:
        """Why a text cannot be encoded in bounded memory; "" if it can."""
        try:
            for _ in pieces.pieces(text, cut=self._cut):
                pass
        except ValueError as error:
            return str(error)
        return ""

    def _encode_batch(
        self, tokenizer: Any, texts: Sequence[str]
    ) -> list[Sequence[int]]:
        """Some of the texts at a time, long ones in pieces: see `pieces`."""
        made: list[list[Sequence[int]]] = [[] for _ in texts]
        for group in self._groups(texts):
            with tokenizer_file.one_sentence(self._where):
                batch = tokenizer.encode_batch_fast(
                    [piece for _, piece in group], add_special_tokens=False
                )
            for (i, _), encoding in zip(group, batch, strict=True):
                made[i].append(encoding.ids)
                if len(texts[i]) > pieces.PIECE:
                    made[i][-1] = np.asarray(made[i][-1], np.int32)
        return [
            parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in made
        ]

    def _groups(self, texts: Sequence[str]) -> Iterator[list[tuple[int, str]]]:
        """(number of the text, piece of it), as many as are encoded together."""
        group: list[tuple[int, str]] = []
        size = 0
        for i, text in enumerate(texts):
            for piece in pieces.pieces(text, cut=self._cut):
                if group and size + len(piece) > pieces.MOST:
                    yield group
                    group, size = [], 0
                group.append((i, piece))
                size += len(piece)
        if group:
            yield group

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens are written out, so that nothing is hidden."""
        with tokenizer_file.one_sentence(self._where):
            return self._markup.decode([int(i) for i in ids], skip_special_tokens=False)


class ByteTokenizer:
    """UTF-8 bytes after a few special tokens; needs no file.

    bos: give the vocabulary a `<|bos|>` that every document begins with.
    """

    def __init__(self, *, bos: bool = False):
        names = ["<|pad|>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>"]
        names += ["[THOUGHT]", "[ANSWER]"] + (["<|bos|>"] if bos else [])
        self.special_tokens = {name: i for i, name in enumerate(names)}
        self._names = names
        self._pattern = re.compile("(" + "|".join(map(re.escape, names)) + ")")
        self.vocab_size = len(names) + 256
        self.pad_id, self.eot_id = 0, 1
        self.bos_id = names.index("<|bos|>") if bos else None
        self.fingerprint = hashlib.sha256(" ".join(names).encode()).hexdigest()

    def _bytes(self, text: str) -> list[int]:
        return [byte + len(self._names) for byte in text.encode("utf-8")]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self._pattern.split(text):
            special = self.special_tokens.get(part)
            ids += self._bytes(part) if special is None else [special]
        return ids

    def encode_markup(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [self.encode(text) for text in texts]

    def too_long(self, text: str) -> str:
        """As for a JsonTokenizer; bytes take little memory."""
        return ""

    def encode_content(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [self._bytes(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        base = len(self._names)
        parts = [
            bytes([i - base]) if i >= base else self._names[i].encode()
            for i in ids
            if i < base + 256  # a model's vocabulary may be larger, as padded ones are
        ]
        return b"".join(parts).decode("utf-8", errors="replace")


def load_tokenizer(path: str | Path) -> JsonTokenizer | ByteTokenizer:
    """Load a tokenizer.json, a bundled one ("assets:NAME"), or "bytes".

    Raises:
        ValueError: no such file, not a tokenizer, or no end-of-text token in it.
    """
    if str(path) == "bytes":
        return ByteTokenizer()
    target = must_exist(str(path), where="tokenizer")
    n_bytes = target.stat().st_size
    if n_bytes > tokenizer_file.MAX_BYTES:
        raise ValueError(
            f"tokenizer {path}: {n_bytes:,} bytes; expected at most "
            f"{tokenizer_file.MAX_BYTES:,}"
        )
    return JsonTokenizer(target.read_bytes(), where=f"tokenizer {path}")


def _find(vocabulary: dict[str, int], names: Sequence[str], *, where: str) -> int:
    for name in names:
        if name in vocabulary:
            return vocabulary[name]
    raise ValueError(
        f"{where}: no end-of-text token; looked for {', '.join(names)}; "
        "add one of them to the tokenizer"
    )
