"""Tokenizers: text and back, special tokens, and what a file must have."""

import json
import sys

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


def changed(**parts):
    """A whole file with some parts changed."""
    whole = json.loads(made())
    for name, part in parts.items():
        if isinstance(part, dict) and isinstance(whole[name], dict):
            whole[name] |= part
        else:
            whole[name] = part
    return json.dumps(whole).encode()


def replacing(content, pattern=None):
    return {
        "type": "Replace",
        "pattern": pattern or {"String": "a"},
        "content": content,
    }


WORDS = {"type": "WordLevel", "vocab": {"</s>": 0}, "unk_token": "[UNK]"}
NO_TOKEN = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "X", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"model": {"dropout": 0.5}}, r"model\.dropout: got 0\.5; expected none"),
        (
            {
                "normalizer": {
                    "type": "Sequence",
                    "normalizers": [replacing("aa")] * 11,
                }
            },
            "may lengthen a text more than 1024-fold",
        ),
        ({"normalizer": replacing("x" * 2000)}, "more than 1024-fold"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "non-zero"),
        ({"post_processor": NO_TOKEN}, "here .*no entry found"),
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
            "not a tokenizer.json .*Precompiled",
        ),
        ({"model": WORDS | {"merges": 1}}, r"here \(WordLevel error: Missing"),
        ({"added_tokens": 5}, "not a tokenizer"),
        ({"model": WORDS | {"vocab": {"</s>": 0, "a": 2**32 - 1}}}, "id 4294967295"),
    ],
)
def test_a_file_that_cannot_be_trusted_is_one_line(capfd, parts, message):
    with pytest.raises(ValueError, match=message) as error:
        JsonTokenizer(changed(**parts), where="here")

    assert "\n" not in str(error.value)
    assert str(error.value).startswith("here")
    assert capfd.readouterr().err == ""


def test_a_text_that_cannot_be_encoded_is_one_line(capfd):
    data = changed(model=WORDS | {"vocab": {"</s>": 0, "a": 1}}, pre_tokenizer=None)
    tokenizer = JsonTokenizer(data, where="here")

    for encode in (tokenizer.encode_content, tokenizer.encode_markup):
        with pytest.raises(ValueError, match=r"here \(WordLevel error: Missing"):
            encode(["a", "b"])
    with pytest.raises(ValueError, match="here"):
        tokenizer.encode("b")
    assert tokenizer.encode("a") == [1]


@pytest.mark.parametrize("pattern", ["(a|aa)+$", "(a+)+c"])
def test_a_pattern_that_matches_for_ever_ends(capfd, pattern):
    split = {"type": "Split", "pattern": {"Regex": pattern}}
    split |= {"behavior": "Isolated", "invert": False}
    tokenizer = JsonTokenizer(changed(pre_tokenizer=split), where="here")

    with pytest.raises(ValueError, match=r"here \(Onig: .*retry-limit-in-match over"):
        tokenizer.encode_content(["a" * 1000 + "b"])

    assert capfd.readouterr().err == ""
    print("still here", file=sys.stderr)
    assert "still here" in capfd.readouterr().err


def test_the_file_does_not_choose_ids_that_the_library_does_not_use():
    whole = json.loads(made())
    for token in whole["added_tokens"]:
        token["id"] += 4_000_000

    tokenizer = JsonTokenizer(json.dumps(whole).encode(), where="here")

    assert tokenizer.vocab_size == 260
    assert max(tokenizer.special_tokens.values()) < 260


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "tokenizer.json"
    with path.open("wb") as file:
        file.truncate(2**30)

    with pytest.raises(ValueError, match=r"1,073,741,824 bytes; expected at most"):
        load_tokenizer(path)


@given(at=st.integers(0, 2000), piece=st.binary(max_size=3), drop=st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_any_change_of_a_file_is_a_tokenizer_or_one_sentence(at, piece, drop):
    data = made(bos=True)
    at %= len(data)
    told = ""
    try:
        tokenizer = JsonTokenizer(data[:at] + piece + data[at + drop :], where="here")
    except ValueError as error:
        told = str(error)
    if told:
        assert told.startswith("here")
        assert "\n" not in told
        return
    assert tokenizer.eot_id < tokenizer.vocab_size


def test_a_missing_file_is_named():
    with pytest.raises(ValueError, match=r"tokenizer: got 'no\.json' \(no such file\)"):
        load_tokenizer("no.json")
    assert isinstance(load_tokenizer("bytes"), ByteTokenizer)
