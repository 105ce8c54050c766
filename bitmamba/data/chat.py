"""Conversations to segments of text, each trained or not.

Segments are encoded one by one, so that the tokens of an answer are those which a
model meets when it continues the encoded prompt.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from bitmamba.assets_path import must_exist
from bitmamba.data.example import Message
from bitmamba.data.formats.hybrid import ANSWER_TAG, THOUGHT_TAG


class DataTokenizer(Protocol):
    """What the data path asks of a tokenizer; see `bitmamba.io.tokenizer`."""

    vocab_size: int
    eot_id: int
    bos_id: int | None
    special_tokens: dict[str, int]
    fingerprint: str

    def decode(self, ids: Sequence[int]) -> str: ...

    def encode_markup(self, texts: Sequence[str]) -> list[Sequence[int]]: ...

    def encode_content(self, texts: Sequence[str]) -> list[Sequence[int]]: ...

    def too_long(self, text: str) -> str: ...


class Segment(NamedTuple):
    """A piece of a document.

    markup: special tokens are recognised in it; otherwise it is ordinary text.
    end: the end-of-text token itself; `text` is empty.
    """

    text: str
    trained: bool
    markup: bool = False
    end: bool = False


class Template(Protocol):
    """How a conversation is written."""

    name: str
    fingerprint: str

    def segments(self, messages: Sequence[Message]) -> list[Segment]: ...

    def prompt(self, messages: Sequence[Message]) -> list[Segment]:
        """The conversation so far and the opening of the answer."""
        ...

    def close(self) -> None:
        """Release what it holds; it may be used again."""
        ...


class BuiltinTemplate:
    """<|user|>question<|assistant|>answer, end-of-text, and so on.

    A thought is written [THOUGHT]thought[ANSWER]answer. A marker that the tokenizer
    lacks as a special token is written as text on a line of its own.
    """

    name = "built-in"
    fingerprint = hashlib.sha256(b"bitmamba built-in template 1").hexdigest()

    def __init__(self, special_tokens: dict[str, int]):
        self._special = special_tokens

    def _marker(self, text: str, trained: bool) -> Segment:
        if text in self._special:
            return Segment(text, trained, markup=True)
        return Segment(f"\n{text}\n", trained)

    def segments(self, messages: Sequence[Message]) -> list[Segment]:
        made: list[Segment] = []
        for message in messages:
            made.append(self._marker(f"<|{message.role}|>", False))
            if message.role == "assistant":
                made += self._answer(message)
            else:
                made.append(Segment(message.content, False))
        return made

    def _answer(self, message: Message) -> list[Segment]:
        trained = message.trained
        made = [Segment(message.content, trained), Segment("", trained, end=True)]
        if message.thought:
            made.insert(0, self._marker(ANSWER_TAG, trained))
            made.insert(0, Segment(message.thought, trained))
            made.insert(0, self._marker(THOUGHT_TAG, trained))
        return made

    def prompt(self, messages: Sequence[Message]) -> list[Segment]:
        return [*self.segments(messages), self._marker("<|assistant|>", False)]

    def close(self) -> None:
        """Holds nothing."""


def load_template(path: str | None, tokenizer: DataTokenizer) -> Template:
    """The built-in template, or a Jinja file.

    Raises:
        ValueError: no such file, too large, or not a template.
    """
    if path is None:
        return BuiltinTemplate(tokenizer.special_tokens)
    from bitmamba.data.jinja_template import JinjaTemplate  # jinja2 only if asked for

    source = must_exist(path, where="data.template").read_bytes()
    return JinjaTemplate(source, tokenizer, where=f"data.template {path}")
