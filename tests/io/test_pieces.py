"""A text cut into pieces has the tokens of the whole, for tokenizers in use."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitmamba.io import pieces
from bitmamba.io.pieces import can_be_cut
from bitmamba.io.tokenizer import JsonTokenizer, load_tokenizer

BUNDLED = load_tokenizer("assets:tokenizer.json")
FILE = json.loads(BUNDLED._markup.to_str())


def changed(**parts):
    """A tokenizer.json with the bundled vocabulary and other parts."""
    return {**FILE, **parts}


def splits(pattern, **more):
    """As Llama 3 and Qwen 2 split."""
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    then = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    both = {"type": "Sequence", "pretokenizers": [split | more, then]}
    return {"pre_tokenizer": both}


LLAMA, QWEN = sorted(pieces._PATTERNS, key=len, reverse=True)
KINDS = {
    "bundled": FILE,
    "llama 3": changed(**splits(LLAMA)),
    "qwen 2": changed(normalizer={"type": "NFC"}, **splits(QWEN)),
}
TOKENIZERS = {
    name: JsonTokenizer(json.dumps(file).encode(), where=name)
    for name, file in KINDS.items()
}
# Words, digits, marks and whitespace that the expressions treat each in its own way.
PARTS = ["a", "Zb", "don't", "'s", "'LL", "12345", "7", ".", ", ", "!?", "\n", "\r\n"]
PARTS += [
    " ",
    "   ",
    "\t",
    "\u3000",
    "\x85",
    "\u00a0",
    "\u0301",
    "é",
    "か\u3099",
    "中文",
]
PARTS += [
    "中文",
    "。",
    "、",
    "\U0001f600",
    "\x1c",
    "_",
    "'",
    "<|user|>",
    "[ANSWER]",
    "ß",
]


def whole(tokenizer, text, *, markup):
    library = tokenizer._markup if markup else tokenizer._content
    return library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("markup", [False, True])
@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=60))
def test_pieces_have_the_tokens_of_the_whole(name, markup, parts):
    tokenizer, text = TOKENIZERS[name], "".join(parts)
    assert tokenizer._cut
    encode = tokenizer.encode_markup if markup else tokenizer.encode_content

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE", 3)
        cut = list(pieces.pieces(text, cut=True))
        (ids,) = encode([text])

    assert "".join(cut) == text
    assert list(ids) == whole(tokenizer, text, markup=markup)


def test_the_texts_of_a_batch_stay_apart_and_in_order(monkeypatch):
    texts = ["one two, three", "", "four", "five six seven eight nine", "ten"]
    expected = [whole(BUNDLED, text, markup=False) for text in texts]
    monkeypatch.setattr(pieces, "PIECE", 4)
    monkeypatch.setattr(pieces, "MOST", 12)

    made = BUNDLED.encode_content(texts)

    assert [list(ids) for ids in made] == expected
    assert BUNDLED.encode_content([]) == []
    assert len(list(BUNDLED._groups(texts))) > 3


def test_a_long_text_is_cut_and_its_tokens_are_an_array():
    text = "The quick brown fox, it is said, jumps over 13 lazy dogs.\n" * 5000

    (ids,) = BUNDLED.encode_content([text])

    assert len(next(BUNDLED._groups([text]))) > 1
    assert isinstance(ids, np.ndarray)
    assert ids.tolist() == whole(BUNDLED, text, markup=False)


def test_what_cannot_be_cut_is_told(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 10)
    monkeypatch.setattr(pieces, "MOST", 40)
    monkeypatch.setattr(pieces, "MOST_WHOLE", 90)
    text = "ab cd ef gh ij " + "x" * 41

    assert BUNDLED.too_long(text[:50]) == ""
    assert "40 characters, from character 12 on, without a" in BUNDLED.too_long(text)
    with pytest.raises(ValueError, match="40 characters"):
        BUNDLED.encode_content([text])
    other = changed(pre_tokenizer={**FILE["pre_tokenizer"], "add_prefix_space": True})
    one_piece = JsonTokenizer(json.dumps(other).encode(), where="here")
    assert one_piece.too_long("é" * 45) == ""
    assert "a text of 92 bytes; this tokenizer takes at most 90" in one_piece.too_long(
        "é" * 46
    )


BYTES = FILE["pre_tokenizer"]


@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": None},
        {"pre_tokenizer": {**BYTES, "add_prefix_space": True}},
        {"pre_tokenizer": {**BYTES, "use_regex": False}},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "_"}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "a b"}}},
        splits(r"\s+|\S+"),
        splits(LLAMA, behavior="MergedWithNext"),
        splits(LLAMA, invert=True),
        {"added_tokens": [{"content": "<a b>"}]},
        {"added_tokens": [{"content": "x", "lstrip": True}]},
        {"added_tokens": [{"content": "x", "single_word": True}]},
    ],
)
def test_other_kinds_are_not_cut(parts):
    assert not can_be_cut(changed(**parts))
