"""Tokenizers: text and back, special tokens, and what a file must have."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from tokenizers.decoders import ByteLevel

from bitmamba.io.tokenizer import ByteTokenizer, JsonTokenizer, load_tokenizer

NAMES = ["<s>", "</s>", "<|user|>"]


def made(names=tuple(NAMES), *, bos=False, eos=False, truncated=False):
    """A byte-level tokenizer.json with some special tokens, as bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate([*alphabet, "ab"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    tokenizer.add_special_tokens(list(names))
    if bos or eos:
        single = ("<s> " if bos else "") + "$A" + (" </s>" if eos else "")
        tokens = [(n, tokenizer.token_to_id(n)) for n in ("<s>", "</s>")]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=tokens
        )
    if truncated:
        tokenizer.enable_truncation(max_length=2)
        tokenizer.enable_padding(length=50)
    return tokenizer.to_str().encode()


@pytest.fixture(scope="module")
def bundled():
    return load_tokenizer("assets:tokenizer.json")


@given(text=st.text())
@settings(max_examples=50, deadline=None)
def test_bundled_text_round_trips(bundled, text):
    assert bundled.decode(bundled.encode(text)) == text
    (content,) = bundled.encode_content([text])
    assert bundled.decode(content) == text


@given(text=st.text())
@settings(max_examples=50, deadline=None)
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()

    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert all(0 <= i < tokenizer.vocab_size for i in tokenizer.encode(text))


@pytest.mark.parametrize("name", ["bundled", "bytes"])
def test_special_tokens_are_markup_and_not_content(bundled, name):
    tokenizer = bundled if name == "bundled" else ByteTokenizer()
    text = "<|user|>hi<|endoftext|>"

    markup, (content,) = tokenizer.encode(text), *[tokenizer.encode_content([text])]

    special = set(tokenizer.special_tokens.values())
    assert markup[0] == tokenizer.special_tokens["<|user|>"]
    assert markup[-1] == tokenizer.eot_id
    assert not special & set(content)
    assert tokenizer.encode_markup([text, "x"]) == [markup, tokenizer.encode("x")]
    assert tokenizer.decode(markup) == tokenizer.decode(content) == text


def test_the_bundled_tokenizer_is_described(bundled):
    assert bundled.vocab_size == 4096
    assert bundled.eot_id == bundled.special_tokens["<|endoftext|>"]
    assert bundled.pad_id == bundled.special_tokens["<|pad|>"]
    assert bundled.bos_id is None
    assert len(bundled.fingerprint) == 64


def test_end_of_text_and_padding_are_found_by_content():
    tokenizer = JsonTokenizer(made(), where="here")

    assert tokenizer.decode([tokenizer.eot_id]) == "</s>"
    assert tokenizer.pad_id == tokenizer.eot_id
    assert tokenizer.vocab_size == 260


def test_a_tokenizer_without_end_of_text_is_refused():
    with pytest.raises(ValueError, match=r"^here: no end-of-text token; looked"):
        JsonTokenizer(made(["<s>"]), where="here")


@pytest.mark.parametrize("eos", [False, True])
def test_b025_a_beginning_is_found_and_never_added_by_itself(eos):
    with_bos = JsonTokenizer(made(bos=True, eos=eos), where="here")
    without = JsonTokenizer(made(eos=eos), where="here")

    assert with_bos.decode([with_bos.bos_id]) == "<s>"
    assert without.bos_id is None
    assert with_bos.encode("ab") == without.encode("ab") == [256]
    assert with_bos.encode_content(["ab"]) == with_bos.encode_markup(["ab"]) == [[256]]


def test_truncation_and_padding_left_in_the_file_are_ignored():
    tokenizer = JsonTokenizer(made(truncated=True), where="here")

    assert len(tokenizer.encode("cdefgh")) == 6
    assert [len(x) for x in tokenizer.encode_content(["cdefgh", "c"])] == [6, 1]


def test_the_fingerprint_is_of_the_file():
    assert (
        JsonTokenizer(made(), where="").fingerprint
        != JsonTokenizer(made(bos=True), where="").fingerprint
    )


@pytest.mark.parametrize(
    "data", [b"", b"\xff\xfe", b"{}", b"[1]", json.dumps({"model": 1}).encode()]
)
def test_what_is_no_tokenizer_is_one_line(tmp_path, data):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data)

    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer") as error:
        load_tokenizer(path)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named():
    with pytest.raises(ValueError, match=r"tokenizer: got 'no\.json' \(no such file\)"):
        load_tokenizer("no.json")
    assert isinstance(load_tokenizer("bytes"), ByteTokenizer)
