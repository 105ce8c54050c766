"""Thought and answer, in two keys or as tags in one text."""

from typing import Any

from bitmamba.data.example import Example, Message
from bitmamba.data.records import text_field

THOUGHT_TAG = "[THOUGHT]"
ANSWER_TAG = "[ANSWER]"


def parse(row: dict[str, Any]) -> Example:
    """prompt + answer + thought; a missing or empty thought is none."""
    thought = ""
    if "thought" in row:
        thought = text_field(row, "thought", empty=True).strip()
    answer = Message("assistant", text_field(row, "answer"), thought)
    messages = (Message("user", text_field(row, "prompt")), answer)
    if row.get("system"):
        messages = (Message("system", text_field(row, "system")), *messages)
    return Example(messages=messages)


def tagged_answer(text: str) -> Message:
    """An assistant turn; "[THOUGHT] … [ANSWER] …" is taken apart."""
    if text.lstrip().startswith(THOUGHT_TAG) and ANSWER_TAG in text:
        thought, _, answer = text.partition(ANSWER_TAG)
        thought = thought.replace(THOUGHT_TAG, "", 1).strip()
        if answer.strip():
            return Message("assistant", answer.strip(), thought)
    return Message("assistant", text)
