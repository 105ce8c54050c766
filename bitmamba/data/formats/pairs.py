"""One prompt, one answer: four spellings. An optional `system` key comes first."""

from typing import Any

from bitmamba.data.example import Example, Message, Refused
from bitmamba.data.formats.chat import check_turns, read_messages
from bitmamba.data.formats.hybrid import tagged_answer
from bitmamba.data.records import text_field


def _pair(row: dict[str, Any], prompt: str, answer: Message) -> Example:
    messages = (Message("user", prompt), answer)
    if row.get("system"):
        messages = (Message("system", text_field(row, "system")), *messages)
    return Example(messages=messages)


def parse_teacher(row: dict[str, Any]) -> Example:
    """prompt + teacher_response, whose tags, if any, become thought and answer."""
    answer = tagged_answer(text_field(row, "teacher_response"))
    return _pair(row, text_field(row, "prompt"), answer)


def parse_completion(row: dict[str, Any]) -> Example:
    """prompt + completion, both strings or both lists of messages."""
    if not isinstance(row["prompt"], list):
        answer = tagged_answer(text_field(row, "completion"))
        return _pair(row, text_field(row, "prompt"), answer)
    if not isinstance(row["completion"], list):
        raise Refused("not text", "'prompt' is a list of messages, 'completion' is not")
    prompt = [m._replace(trained=False) for m in read_messages(row["prompt"])]
    messages = (*prompt, *read_messages(row["completion"]))
    check_turns(messages)
    return Example(messages=messages)


def parse_alpaca(row: dict[str, Any]) -> Example:
    """instruction (+ input) + output."""
    prompt = text_field(row, "instruction")
    if row.get("input"):
        prompt += "\n\n" + text_field(row, "input", empty=True)
    return _pair(row, prompt, Message("assistant", text_field(row, "output")))
