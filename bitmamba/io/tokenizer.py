"""Tokenizers: any tokenizer.json, and a byte tokenizer for tests and tiny models.

Text comes in two kinds. *Content* is what people wrote: where it happens to spell a
special token it stays ordinary text (`encode_content`). *Markup* is what templates
and prompts write: special tokens in it are recognised (`encode`).
Neither adds anything at the beginning or the end.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from bitmamba.assets_path import must_exist

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
    """

    def __init__(self, data: bytes, *, where: str):
        import tokenizers  # the other tokenizer does without

        try:
            text = data.decode("utf-8")
            self._markup = tokenizers.Tokenizer.from_str(text)
            self._content = tokenizers.Tokenizer.from_str(text)
            added = json.loads(text).get("added_tokens", [])
        except Exception as error:  # the library raises plain Exception
            raise ValueError(
                f"{where}: not a tokenizer.json ({str(error)[:120]}); expected the "
                "JSON file of the tokenizers library"
            ) from None
        for tokenizer in (self._markup, self._content):
            # Files in circulation carry the settings of their last use.
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self._content.encode_special_tokens = True

        vocabulary = self._markup.get_vocab(with_added_tokens=True)
        self.fingerprint = hashlib.sha256(data).hexdigest()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.special_tokens = {t["content"]: t["id"] for t in added if t["special"]}
        self.eot_id = _find(vocabulary, END_OF_TEXT, where=where)
        self.pad_id = next((vocabulary[p] for p in PADDING if p in vocabulary), -1)
        if self.pad_id < 0:
            self.pad_id = self.eot_id
        self.bos_id = self._first_added()

    def _first_added(self) -> int | None:
        """What the post-processor puts before a text."""
        added = self._markup.encode("a", add_special_tokens=True).ids
        plain = self._markup.encode("a", add_special_tokens=False).ids
        return added[0] if added[: len(plain)] != plain else None

    def encode(self, text: str) -> list[int]:
        return self._markup.encode(text, add_special_tokens=False).ids

    def encode_markup(self, texts: Sequence[str]) -> list[list[int]]:
        batch = self._markup.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in batch]

    def encode_content(self, texts: Sequence[str]) -> list[list[int]]:
        batch = self._content.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in batch]

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens are written out, so that nothing is hidden."""
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

    def encode_markup(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode_content(self, texts: Sequence[str]) -> list[list[int]]:
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
    return JsonTokenizer(target.read_bytes(), where=f"tokenizer {path}")


def _find(vocabulary: dict[str, int], names: Sequence[str], *, where: str) -> int:
    for name in names:
        if name in vocabulary:
            return vocabulary[name]
    raise ValueError(
        f"{where}: no end-of-text token; looked for {', '.join(names)}; "
        "add one of them to the tokenizer"
    )
