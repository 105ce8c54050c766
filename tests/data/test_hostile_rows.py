"""Rows and files made to break a reader: each is counted, or one sentence."""

import gzip
import json
import resource
import zlib
from collections import Counter

import numpy as np
import pytest

from bitmamba.data import loading, records
from bitmamba.data.formats import parse_row
from bitmamba.data.records import read_lines
from bitmamba.io.tokenizer import ByteTokenizer

HUGE = "9" * 4000  # a whole number that json reads and float64 does not hold
PAIR = {"prompt": "q", "completion": "a"}


def row_of(text):
    return f'{{"prompt":"q","completion":"a",{text}}}'.encode()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (row_of(f'"weight":{HUGE}'), "not a number"),
        (row_of('"weight":1e39'), "not a weight"),
        (row_of('"weight":1e-40'), "not a weight"),
        (row_of('"weight":-1'), "not a weight"),
        (row_of('"weight":1e999'), "not a number"),
        (row_of('"weight":true'), "not a number"),
        (row_of('"category":"a\\u001b[2Jb"'), "not a category"),
        (row_of('"a\\ud800":1,"a\\ud801":2'), "duplicate key"),
        (row_of('"x":' + "[" * 80 + "]" * 80), "nested too deeply"),
        (row_of('"x":' + "[" * 900 + '"\\u0041"' + "]" * 900), "nested too deeply"),
        (row_of('"x":' + '{"a":' * 5000 + "1" + "}" * 5000), "nested too deeply"),
        (b'{"input_ids":[1,%s]}' % HUGE.encode(), "not token ids"),
        (b'{"input_ids":[1,2],"loss_mask":[1,%s]}' % HUGE.encode(), "not a loss mask"),
        (b'{"input_ids":[1,2],"loss_mask":[1,1e39]}', "not a loss mask"),
        (b'{"input_ids":[1,2],"labels":[1,-%s]}' % HUGE.encode(), "not labels"),
        (
            b'{"prompt":"q","teacher_response":"a","score":%s}' % HUGE.encode(),
            "not a number",
        ),
    ],
    ids=lambda x: x[:40].decode() if isinstance(x, bytes) else x,
)
def test_a_row_is_refused_and_the_others_train(build, line, reason):
    good = json.dumps(PAIR).encode()

    bundle = build(good + b"\n" + line + b"\n", max_refused_share=0.5)

    (file,) = bundle.account.files
    assert file.refused == {reason: 1}
    assert (file.rows, file.trained) == (2, 1)
    assert file.examples[reason][0].startswith(f"{file.path}:2: ")


def test_what_is_told_of_a_row_is_short_and_does_nothing_to_the_terminal(build):
    rows = [PAIR, {"messages": [{"role": "\x1b[2J\u202e" + "x" * 9999, "content": ""}]}]

    account = build(rows, max_refused_share=0.5).account

    (told,) = account.files[0].examples["unknown role"]
    assert told.isprintable()
    assert len(told) < 500


def test_the_extremes_of_weights_stay_finite(build):
    rows = [{**PAIR, "weight": 1e6}, {**PAIR, "weight": 1e-6}]
    rows += [{"input_ids": [9, 9], "loss_mask": [0, 1e6], "weight": 1e6}]

    weights = build(rows).stores["sft"].weights

    assert np.isfinite(weights).all()
    assert np.unique(weights).size == 4
    assert weights[weights > 0].min() > 1e-7


class Mute(ByteTokenizer):
    """As a tokenizer.json whose normaliser deletes everything."""

    def encode_markup(self, texts):
        return [[] for _ in texts]


@pytest.mark.parametrize(
    ("body", "reason"), [("x", "no token"), ("", "no trained span")]
)
def test_a_document_without_a_token_is_refused(build, write, body, reason):
    """The last turn has no end to be learnt, and the template writes nothing."""
    source = "{% generation %}" + body + "{% endgeneration %}"
    template = write(source.encode(), "empty.jinja")
    turns = [("user", "q"), ("assistant", "a"), ("user", "q")]
    row = {"messages": [{"role": r, "content": c} for r, c in turns]}
    settings = {"template": template, "max_refused_share": 0.5, "tokenizer": Mute()}

    bundle = build([{"text": "x"}, row], **settings)

    assert bundle.account.files[0].refused == {reason: 1}


def test_a_gigabyte_in_one_line_is_refused_and_not_kept(tmp_path):
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text":"')
        file.truncate(2**30)  # a hole: it takes no room on disk
        file.seek(2**30)
        file.write(b'"}\n' + json.dumps(PAIR).encode())

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lines = list(read_lines(path, notes=Counter()))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    assert [line.row for line in lines] == [None, PAIR]
    assert str(lines[0].refused) == (
        "line too long: 1,073,741,827 bytes; the limit is 16 MiB"
    )
    assert after - before < 64 * 2**10


def test_long_rows_are_encoded_few_at_a_time(build, monkeypatch):
    seen = []
    encode = loading.encode_examples

    def spy(examples, **settings):
        seen.append(len(examples))
        return encode(examples, **settings)

    monkeypatch.setattr(loading, "encode_examples", spy)
    monkeypatch.setattr(loading.Loader, "bytes_at_once", 5000)

    build([{"text": "x" * 2000}] * 7)

    assert [n for n in seen if n] == [3, 3, 1]


def test_a_gzip_that_unpacks_to_far_more_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MIN_UNPACKED_BYTES", 2**16)
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n" * 2**18))

    with pytest.raises(ValueError, match=r"bomb\.jsonl\.gz: gzip: unpacks to more tha"):
        list(read_lines(path, notes=Counter()))

    path.write_bytes(gzip.compress(b"\n" * 2**15))
    assert list(read_lines(path, notes=Counter())) == []


def test_gzip_is_known_by_its_bytes_and_every_damage_is_named(tmp_path):
    rows = b"".join(b'{"text":"%d"}\n' % i for i in range(200))
    path = tmp_path / "rows.jsonl"
    whole = gzip.compress(rows, mtime=0)
    path.write_bytes(whole)
    assert len(list(read_lines(path, notes=Counter()))) == 200

    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    with pytest.raises(zlib.error):
        zlib.decompress(bytes(damaged), wbits=31)
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"rows\.jsonl: damaged gzip"):
        list(read_lines(path, notes=Counter()))


class Picky(ByteTokenizer):
    """As a tokenizer.json without an unknown token: some texts it cannot encode."""

    def encode_content(self, texts):
        if any("§" in text for text in texts):
            raise ValueError("tokenizer: missing [UNK]")
        return super().encode_content(texts)


def test_a_text_that_the_tokenizer_cannot_encode_is_named_by_its_line(build):
    with pytest.raises(ValueError, match=r"sft\.jsonl:2: tokenizer: missing \[UNK\]"):
        build([PAIR, {"text": "§"}, PAIR], tokenizer=Picky())


class Short(ByteTokenizer):
    """As a tokenizer.json whose long texts cannot be cut."""

    def too_long(self, text):
        return "a text of 9 bytes; split it" if len(text) == 9 else ""


def test_a_text_too_long_to_encode_is_a_refused_row(build):
    rows = [PAIR, {"prompt": "q", "completion": "123456789"}, *[PAIR] * 8]

    shown = "\n".join(build(rows, tokenizer=Short()).account.lines())

    assert "too long to encode at once" in shown
    assert "sft.jsonl:2: a text of 9 bytes; split it" in shown


def test_too_many_categories_name_the_file(build, monkeypatch):
    monkeypatch.setattr(loading, "MAX_CATEGORIES", 3)

    with pytest.raises(ValueError, match=r"sft\.jsonl: more than 3 categories"):
        build([{**PAIR, "category": f"c{i}"} for i in range(5)])


def test_a_number_that_only_looks_like_one_is_fast():
    """No digit string of a whole row takes more than moments."""
    digits = "1" * 2**22

    with pytest.raises(Exception, match="unknown format"):
        parse_row(json.loads(f'{{"x":1.{digits}e-{digits[:5]}}}'))


def test_a_misspelt_key_is_told(build):
    rows = [{**PAIR, "wieght": 2}, {**PAIR, "Category": "x"}, {**PAIR, "id": 7}]
    rows += [{"prompt": "q", "complettion": "a"}]

    file = build(rows, max_refused_share=0.5).account.files[0]

    assert file.notes["key 'wieght' ignored; did you mean 'weight'?"] == 1
    assert file.notes["key 'Category' ignored; did you mean 'category'?"] == 1
    assert not any("'id'" in note for note in file.notes)
    assert "did you mean 'completion'?" in file.examples["unknown format"][0]


def test_rows_of_ever_other_keys_are_not_all_remembered(build):
    rows = [{**PAIR, f"weigh{i}": 1} for i in range(300)]

    file = build(rows).account.files[0]

    assert file.trained == 300
    assert len(file.notes) <= 101
