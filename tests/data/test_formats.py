"""Rows to examples: a golden record and the bad ones of every format."""

import pytest

from bitmamba.data.example import Message, Refused
from bitmamba.data.formats import FORMATS, parse_row

USER, ANSWER = Message("user", "q"), Message("assistant", "a")

GOLDEN = {
    "messages": [
        (
            {
                "messages": [
                    {"role": "user", "content": "q"},
                    {"role": "assistant", "content": "a"},
                ]
            },
            (USER, ANSWER),
        ),
        (
            {
                "messages": [
                    {"role": "developer", "content": "s"},
                    {"role": "user", "content": [{"type": "text", "text": "q"}]},
                    {"role": "assistant", "content": "[THOUGHT]t[ANSWER]a"},
                ]
            },
            (Message("system", "s"), USER, Message("assistant", "a", "t")),
        ),
    ],
    "sharegpt": [
        (
            {
                "conversations": [
                    {"from": "system", "value": "s"},
                    {"from": "human", "value": "q"},
                    {"from": "gpt", "value": "a"},
                ]
            },
            (Message("system", "s"), USER, ANSWER),
        ),
    ],
    "hybrid": [
        (
            {"prompt": "q", "thought": "t", "answer": "a"},
            (USER, Message("assistant", "a", "t")),
        ),
        ({"prompt": "q", "thought": " ", "answer": "a"}, (USER, ANSWER)),
        ({"prompt": "q", "answer": "a"}, (USER, ANSWER)),
    ],
    "scored": [
        ({"prompt": "q", "teacher_response": "a", "score": 1}, (USER, ANSWER)),
    ],
    "teacher": [
        ({"prompt": "q", "teacher_response": "a"}, (USER, ANSWER)),
        (
            {"prompt": "q", "teacher_response": "[THOUGHT] t\n[ANSWER] a"},
            (USER, Message("assistant", "a", "t")),
        ),
        (
            {"prompt": "q", "teacher_response": "a", "system": "s"},
            (Message("system", "s"), USER, ANSWER),
        ),
    ],
    "completion": [
        ({"prompt": "q", "completion": "a"}, (USER, ANSWER)),
        (
            {
                "prompt": [
                    {"role": "user", "content": "q"},
                    {"role": "assistant", "content": "a"},
                    {"role": "user", "content": "q"},
                ],
                "completion": [{"role": "assistant", "content": "a"}],
            },
            (
                USER._replace(trained=False),
                ANSWER._replace(trained=False),
                USER._replace(trained=False),
                ANSWER,
            ),
        ),
    ],
    "alpaca": [
        ({"instruction": "q", "output": "a"}, (USER, ANSWER)),
        ({"instruction": "q", "input": "", "output": "a"}, (USER, ANSWER)),
        (
            {"instruction": "q", "input": "i", "output": "a"},
            (Message("user", "q\n\ni"), ANSWER),
        ),
    ],
}
CASES = [(name, row, want) for name, rows in GOLDEN.items() for row, want in rows]


@pytest.mark.parametrize(("name", "row", "want"), CASES)
def test_conversations(name, row, want):
    kind, example = parse_row(row)

    assert kind == name
    assert example.messages == want
    assert example.text is example.ids is None


def test_every_format_has_a_golden_record():
    assert set(GOLDEN) | {"text", "tokens"} == set(FORMATS)


def test_text_keeps_its_spaces():
    kind, example = parse_row({"text": " a\n", "source": "ignored"})

    assert (kind, example.text) == ("text", " a\n")


@pytest.mark.parametrize(
    ("extra", "mask"),
    [
        ({}, (1, 1, 1)),
        ({"loss_mask": [0, 1, 0.5]}, (0, 1, 0.5)),
        ({"loss_mask": [False, True, True]}, (0, 1, 1)),
        ({"labels": [-100, 6, 7]}, (0, 1, 1)),
    ],
)
def test_tokens(extra, mask):
    kind, example = parse_row({"input_ids": [5, 6, 7], **extra})

    assert kind == "tokens"
    assert (example.ids, example.mask) == ((5, 6, 7), mask)


def test_category_weight_and_score():
    row = {"prompt": "q", "teacher_response": "a", "score": 0.5}

    _, example = parse_row({**row, "category": " docs ", "weight": 2})

    assert (example.category, example.weight, example.score) == ("docs", 2.0, 0.5)


def _chat(*roles, content="x"):
    return {"messages": [{"role": r, "content": content} for r in roles]}


PAIR = {"prompt": "q", "completion": "a"}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "unknown format"),
        ({"question": "q"}, "unknown format"),
        ({"text": None}, "not text"),
        ({"text": 3}, "not text"),
        ({"text": " \n"}, "empty text"),
        ({"text": "a\0b"}, "NUL character"),
        ({"prompt": "q", "completion": None}, "not text"),
        ({"prompt": "q", "completion": ""}, "empty text"),
        ({"prompt": [{"role": "user", "content": "q"}], "completion": "a"}, "not text"),
        ({"prompt": "q", "teacher_response": "a", "score": None}, "not a number"),
        ({"prompt": "q", "teacher_response": "a", "score": "1"}, "not a number"),
        ({"prompt": "q", "teacher_response": "a", "score": True}, "not a number"),
        ({**PAIR, "category": 3}, "not text"),
        ({**PAIR, "category": "replay"}, "reserved category"),
        ({**PAIR, "weight": -1}, "not a weight"),
        ({**PAIR, "weight": 0}, "weight 0"),
        ({**PAIR, "weight": float("inf")}, "not a number"),
        ({"messages": []}, "no messages"),
        ({"messages": "hi"}, "no messages"),
        ({"messages": ["hi"]}, "not a message"),
        ({"messages": [{"content": "x"}]}, "unknown role"),
        (_chat("alien"), "unknown role"),
        (_chat("user", "system", "assistant"), "roles do not alternate"),
        (_chat("assistant", "user"), "roles do not alternate"),
        (_chat("user"), "no answer"),
        (_chat("user", "assistant", content=[{"type": "image"}]), "not text"),
        (
            {
                "messages": [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "content": None, "tool_calls": [{}]},
                ]
            },
            "tool calls",
        ),
        ({"input_ids": []}, "not token ids"),
        ({"input_ids": [1, -1]}, "not token ids"),
        ({"input_ids": [1, 2**31]}, "not token ids"),
        ({"input_ids": [1, True]}, "not token ids"),
        ({"input_ids": [1], "loss_mask": [1, 1]}, "not a loss mask"),
        ({"input_ids": [1], "loss_mask": [-1]}, "not a loss mask"),
        ({"input_ids": [1], "loss_mask": [float("inf")]}, "not a loss mask"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "not labels"),
        ({"input_ids": [1], "labels": [1], "loss_mask": [1]}, "two masks"),
    ],
)
def test_bad_rows_are_refused(row, reason):
    with pytest.raises(Refused) as refused:
        parse_row(row)

    assert refused.value.reason == reason


def test_b007_roles_that_do_not_alternate_name_rule_and_policy():
    with pytest.raises(Refused) as refused:
        parse_row(_chat("user", "assistant", "user", "user"))

    assert refused.value.reason == "roles do not alternate"
    for words in ("message 4", "'user' after 'user'", "expected assistant", "left out"):
        assert words in refused.value.detail


def test_b009_a_null_answer_is_refused_with_its_place():
    row = _chat("user", "assistant")
    row["messages"][1]["content"] = None

    with pytest.raises(Refused, match="'content' of message 2 is null"):
        parse_row(row)


def test_tool_turns_are_read():
    _, example = parse_row(_chat("user", "assistant", "tool", "assistant"))

    assert [m.role for m in example.messages][2] == "tool"


def test_the_content_hash_ignores_keys_order_and_category():
    _, a = parse_row({"prompt": "q", "completion": "a", "category": "x"})
    _, b = parse_row({"category": "y", "teacher_response": "a", "prompt": "q"})
    _, c = parse_row({"prompt": "q", "completion": "b"})

    assert a.content_hash() == b.content_hash() != c.content_hash()
