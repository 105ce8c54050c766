"""Bytes to rows."""

import gzip
from collections import Counter

import pytest

from bitmamba.data import records
from bitmamba.data.records import read_lines

TWO = b'{"prompt":"a","completion":"b"}\n{"prompt":"c","completion":"d"}\n'
BOM = b"\xef\xbb\xbf"


def test_b001_a_byte_order_mark_changes_nothing_and_is_mentioned_once(read):
    rows, refused, notes = read(BOM + TWO)

    assert rows == read(TWO)[0]
    assert refused == []
    assert notes == {"byte-order mark": 1}


def test_b003_the_first_record_after_a_mark_is_kept(read):
    rows, refused, _ = read(BOM + b'{"text":"1"}\n{"text":"2"}\n{"text":"3"}\n')

    assert [r["text"] for r in rows] == ["1", "2", "3"]
    assert refused == []


def test_b004_a_lone_surrogate_is_replaced_and_counted(read):
    rows, refused, notes = read(rb'{"prompt":"bad \ud83d char","k\udc00":["\udfff"]}')

    assert rows == [{"prompt": "bad � char", "k�": ["�"]}]
    rows[0]["prompt"].encode("utf-8")
    assert refused == []
    assert notes == {"rows with lone surrogates, replaced by U+FFFD": 1}


def test_b006_an_escaped_emoji_is_the_emoji(read):
    escaped, _, notes = read(rb'{"prompt":"\ud83c\udf78"}')
    raw, _, _ = read('{"prompt":"\U0001f378"}'.encode())

    assert escaped == raw
    assert notes == {}


def test_line_ends_are_newlines_alone(read):
    data = '{"text":"a\u2028b\x85c"}\r\n\r\n  \n{"text":"last"}'.encode()

    rows, refused, notes = read(data)

    assert [r["text"] for r in rows] == ["a\u2028b\x85c", "last"]
    assert refused == []
    assert notes == {"blank lines": 2}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text":"caf\xe9"}', "not UTF-8"),
        (b'{"text":"cut li', "not JSON"),
        (b'{"a":1,"a":2}', "duplicate key"),
        (b'{"m":[{"a":1,"a":2}]}', "duplicate key"),
        (b'{"text":"\x00"}', "not JSON"),
        (b"\x00\x00", "not JSON"),
        (b'[{"text":"a"},{"text":"b"}]', "not a JSON object"),
        (b'"text"', "not a JSON object"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"score":NaN}', "not JSON"),
        (b'{"score":-Infinity}', "not JSON"),
        (b'{"n":' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
def test_a_bad_line_is_refused_by_number_and_the_rest_is_read(read, line, reason):
    rows, refused, _ = read(b'{"text":"1"}\n' + line + b'\n{"text":"3"}\n')

    assert [r["text"] for r in rows] == ["1", "3"]
    assert refused == [(2, reason)]


def test_an_array_over_lines_says_what_is_expected(tmp_path):
    path = tmp_path / "array.jsonl"
    path.write_bytes(b'[\n{"text":"a"},\n{"text":"b"}\n]\n')

    lines = list(read_lines(path, notes=Counter()))

    assert [line.row for line in lines] == [None, None, {"text": "b"}, None]
    for index in (0, 1, 3):
        assert "one object a line" in lines[index].refused.detail


def test_a_line_that_is_too_long_is_refused_and_not_kept(read, monkeypatch):
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 20)
    exact = b'{"text":"123456789"}'

    long = b'{"text":"' + b"x" * 3_000_000 + b'"}'
    rows, refused, _ = read(exact + b"\n" + long + b"\n" + exact)

    assert len(rows) == 2
    assert refused == [(2, "line too long")]


def test_utf16_is_named(read):
    with pytest.raises(ValueError, match="UTF-16; expected UTF-8"):
        read('{"text":"a"}'.encode("utf-16"))


def test_gzip_is_read_and_damage_is_named(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(TWO))
    assert len(list(read_lines(path, notes=Counter()))) == 2

    path.write_bytes(gzip.compress(TWO * 100)[:40])
    with pytest.raises(ValueError, match=r"rows\.jsonl\.gz: damaged gzip"):
        list(read_lines(path, notes=Counter()))


def test_an_empty_file_has_no_rows(read):
    assert read(b"") == ([], [], {})
    assert read(BOM) == ([], [], {"byte-order mark": 1, "blank lines": 1})
