"""What a row says, before any tokenizer: a conversation, a text, or token ids."""

import hashlib
import json
from dataclasses import dataclass
from typing import NamedTuple


class Refused(Exception):
    """A row that is not trained: caught where rows are counted, never the user's.

    reason: short and fixed, so that rows can be counted by it.
    detail: what this row has, for whoever corrects it.
    """

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class Message(NamedTuple):
    """One turn. Only assistant turns can be trained, and only if `trained`."""

    role: str
    content: str
    thought: str = ""
    trained: bool = True


@dataclass(frozen=True, kw_only=True)
class Example:
    """One row. Exactly one of messages, text and ids is set.

    ids, mask: token ids and their loss weights, the same number of each.
    category: None is the name of the file.
    weight: factor on the loss of every token of the row.
    score: to filter by; None if the row has none.
    """

    messages: tuple[Message, ...] | None = None
    text: str | None = None
    ids: tuple[int, ...] | None = None
    mask: tuple[float, ...] | None = None
    category: str | None = None
    weight: float = 1.0
    score: float | None = None

    def content_hash(self) -> int:
        """64 bits of what is learnt from the row, whatever its keys and order."""
        content = [self.messages, self.text, self.ids, self.mask]
        digest = hashlib.sha256(json.dumps(content).encode("ascii")).digest()
        return int.from_bytes(digest[:8], "big")
