"""Conversations: `messages` (role, content) and ShareGPT's (from, value)."""

from collections.abc import Sequence
from typing import Any

from bitmamba.data.example import Example, Message, Refused
from bitmamba.data.formats.hybrid import tagged_answer
from bitmamba.data.records import checked_text

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
}
_MAY_FOLLOW = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


def parse_messages(row: dict[str, Any]) -> Example:
    """`messages`, as Hugging Face and OpenAI write them."""
    messages = read_messages(row["messages"])
    check_turns(messages)
    return Example(messages=messages)


def parse_sharegpt(row: dict[str, Any]) -> Example:
    """`conversations`: the same with other words."""
    messages = read_messages(row["conversations"], role_key="from", text_key="value")
    check_turns(messages)
    return Example(messages=messages)


def read_messages(
    value: Any, *, role_key: str = "role", text_key: str = "content"
) -> tuple[Message, ...]:
    """A list of turns, each checked by itself."""
    if not isinstance(value, list) or not value:
        raise Refused("no messages", "expected a list of messages that is not empty")
    return tuple(_message(m, i, role_key, text_key) for i, m in enumerate(value))


def _message(value: Any, index: int, role_key: str, text_key: str) -> Message:
    name = f"message {index + 1}"
    if not isinstance(value, dict):
        raise Refused("not a message", f"{name} is {type(value).__name__}")
    role = value.get(role_key)
    if not isinstance(role, str) or role not in _ROLES:
        expected = ", ".join(_ROLES)
        raise Refused("unknown role", f"{name}: {role!r}; expected one of {expected}")
    if value.get("tool_calls"):
        raise Refused("tool calls", f"{name}: only text can be trained")
    content = checked_text(_joined(value.get(text_key)), f"{text_key!r} of {name}")
    if _ROLES[role] == "assistant":
        return tagged_answer(content)
    return Message(_ROLES[role], content)


def _joined(content: Any) -> Any:
    """A list of text parts as one text; anything else as it is."""
    parts = content if isinstance(content, list) else None
    if parts and all(isinstance(p, dict) and p.get("type") == "text" for p in parts):
        texts = [p.get("text") for p in parts]
        return "".join(texts) if all(isinstance(t, str) for t in texts) else None
    return content


def check_turns(messages: Sequence[Message]) -> None:
    """An optional system message, then user and assistant in turn."""
    before = None
    for index, message in enumerate(messages):
        if message.role not in _MAY_FOLLOW[before]:
            expected = " or ".join(_MAY_FOLLOW[before])
            after = f"after {before!r}" if before else "at the beginning"
            raise Refused(
                "roles do not alternate",
                f"message {index + 1} is {message.role!r} {after}; expected "
                f"{expected}; such rows are left out: merge or correct the turns",
            )
        before = message.role
    if not any(m.role == "assistant" and m.trained for m in messages):
        raise Refused("no answer", "no assistant message to train")
