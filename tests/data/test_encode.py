"""Conversations to tokens and loss weights: the built-in template, length rules."""

import numpy as np
import pytest

from bitmamba.data.chat import BuiltinTemplate
from bitmamba.data.encode import (
    Encoded,
    encode_examples,
    encode_prompt,
    fit_window,
    split_text,
)
from bitmamba.data.example import Message, Refused
from bitmamba.data.formats import parse_row
from bitmamba.io.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()


def encode(row, *, tokenizer=TOKENIZER, thought=True):
    template = BuiltinTemplate(tokenizer.special_tokens)
    _, example = parse_row(row)
    (made,) = encode_examples(
        [example], template=template, tokenizer=tokenizer, thought=thought
    )
    return made


def pieces(document, tokenizer=TOKENIZER):
    """[(text, weight)] of runs of equal weight."""
    made = []
    for token, weight in zip(document.tokens, document.weights, strict=True):
        if made and made[-1][1] == weight:
            made[-1][0].append(int(token))
        else:
            made.append(([int(token)], float(weight)))
    return [(tokenizer.decode(ids), weight) for ids, weight in made]


def test_b018_the_last_trained_token_of_an_answer_is_end_of_text():
    document = encode({"prompt": "q", "completion": "an"})

    assert pieces(document) == [
        ("<|user|>q<|assistant|>", 0.0),
        ("an<|endoftext|>", 1.0),
    ]
    assert document.tokens[-1] == TOKENIZER.eot_id


def test_b018_end_of_text_is_trained_at_the_end_of_text():
    assert pieces(encode({"text": "abc"})) == [("abc<|endoftext|>", 1.0)]


def test_b022_every_answer_of_four_turns_is_trained_and_no_question():
    turns = [("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2")]
    document = encode({"messages": [{"role": r, "content": c} for r, c in turns]})

    assert pieces(document) == [
        ("<|user|>q1<|assistant|>", 0.0),
        ("a1<|endoftext|>", 1.0),
        ("<|user|>q2<|assistant|>", 0.0),
        ("a2<|endoftext|>", 1.0),
    ]


def test_only_the_completion_of_message_lists_is_trained():
    user, answer = {"role": "user", "content": "q"}, "assistant"
    row = {
        "prompt": [user, {"role": answer, "content": "old"}, user],
        "completion": [{"role": answer, "content": "new"}],
    }

    assert [t for t, w in pieces(encode(row)) if w] == ["new<|endoftext|>"]


def test_a_thought_is_tagged_and_trained_or_left_out():
    row = {"prompt": "q", "thought": "t", "answer": "a"}

    with_thought, without = encode(row), encode(row, thought=False)

    assert pieces(with_thought)[1] == ("[THOUGHT]t[ANSWER]a<|endoftext|>", 1.0)
    assert TOKENIZER.special_tokens["[THOUGHT]"] in with_thought.tokens
    assert pieces(without)[1] == ("a<|endoftext|>", 1.0)


def test_content_that_spells_a_special_token_stays_text():
    document = encode({"prompt": "<|endoftext|>", "completion": "<|user|>"})

    special = [int(t) for t in document.tokens if t < len(TOKENIZER.special_tokens)]
    assert [TOKENIZER.decode([t]) for t in special] == [
        "<|user|>",
        "<|assistant|>",
        "<|endoftext|>",
    ]
    text = encode({"text": "a<|endoftext|>b"})
    assert list(text.tokens).count(TOKENIZER.eot_id) == 1


def test_markers_are_written_as_text_for_a_tokenizer_without_them():
    tokenizer = ByteTokenizer()
    template = BuiltinTemplate({"<|endoftext|>": 1})
    _, example = parse_row({"prompt": "q", "completion": "a"})

    (document,) = encode_examples([example], template=template, tokenizer=tokenizer)

    assert pieces(document) == [
        ("\n<|user|>\nq\n<|assistant|>\n", 0.0),
        ("a<|endoftext|>", 1.0),
    ]
    assert 2 not in document.tokens


@pytest.mark.parametrize(
    "row", [{"prompt": "q", "completion": "a"}, {"text": "abc"}], ids=["chat", "text"]
)
def test_b025_one_bos_a_document_if_the_tokenizer_has_one(row):
    tokenizer = ByteTokenizer(bos=True)

    document = encode(row, tokenizer=tokenizer)

    assert document.tokens[0] == tokenizer.bos_id
    assert list(document.tokens).count(tokenizer.bos_id) == 1
    assert document.weights[0] == 0


@pytest.mark.parametrize("bos", [False, True])
def test_an_answer_begins_where_the_encoded_prompt_ends(bos):
    tokenizer = ByteTokenizer(bos=bos)
    template = BuiltinTemplate(tokenizer.special_tokens)

    document = encode({"prompt": "q", "completion": "a"}, tokenizer=tokenizer)
    prompt = encode_prompt(template.prompt([Message("user", "q")]), tokenizer)

    assert prompt == document.tokens[document.weights == 0].tolist()


def test_the_weight_of_a_row_multiplies_its_loss():
    document = encode({"prompt": "q", "completion": "a", "weight": 0.25})

    assert set(document.weights.tolist()) == {0.0, 0.25}
    tokens = encode({"input_ids": [7, 8], "loss_mask": [0, 0.5], "weight": 3})
    assert tokens.weights.tolist() == [0.0, 1.5]
    assert tokens.weights.dtype == np.float32


def document_of(n, *, prompt=0):
    return Encoded(
        np.arange(n, dtype=np.int32), (np.arange(n) >= prompt).astype(np.float32)
    )


def test_a_long_answer_is_cut_from_its_end_or_refused():
    kept, cut = fit_window(document_of(12, prompt=4), window=8, long="truncate")
    assert cut
    assert kept.tokens.tolist() == list(range(8))

    with pytest.raises(Refused, match="12 tokens; the window has 8"):
        fit_window(document_of(12, prompt=4), window=8, long="refuse")
    assert fit_window(document_of(8, prompt=4), window=8, long="refuse")[1] is False


@pytest.mark.parametrize("window", [32, 24, 16])
def test_b015_an_answer_that_is_cut_away_is_refused(window):
    with pytest.raises(Refused) as refused:
        fit_window(document_of(43, prompt=40), window=window, long="truncate")

    assert refused.value.reason == "no trained token in the window"
    assert f"the first is number 41; the window ends at {window}" in str(refused.value)


def test_a_first_token_is_no_target():
    """Nothing comes before it, so its weight alone does not make a row trainable."""
    alone = Encoded(np.array([1, 2], np.int32), np.array([1, 0], np.float32))

    with pytest.raises(Refused, match="the loss mask is empty"):
        fit_window(alone, window=8, long="truncate")


@pytest.mark.parametrize("n", [1, 7, 8, 9, 15, 16, 17, 100])
def test_text_is_split_without_loss_and_without_single_tokens(n):
    parts = split_text(document_of(n), window=8)

    assert np.concatenate([p.tokens for p in parts]).tolist() == list(range(n))
    assert all(len(p.tokens) <= 8 for p in parts)
    assert n == 1 or min(len(p.tokens) for p in parts) > 1
