"""Files of large text: what is read of each kind, and what is refused in a line."""

import json
import random
import sys
from collections import Counter

import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from bitmamba.config import DataConfig
from bitmamba.data import shards
from bitmamba.data.shards import array_record

TEXTS = [f"text {i} é\n" * (i + 1) for i in range(10)]


def read(path, **settings):
    return list(shards.read(path, DataConfig(**settings), notes=Counter()))


def texts_of(lines):
    return [line.row["text"] for line in lines if line.row]


def refusals(lines):
    return [(line.number, line.refused.reason) for line in lines if line.refused]


@pytest.mark.parametrize("group_size", [1, 4, 65536])
def test_records_are_texts_in_their_order(write_records, group_size):
    lines = read(write_records(TEXTS, group_size=group_size))

    assert texts_of(lines) == TEXTS
    assert [line.number for line in lines] == list(range(1, 11))


def test_records_may_be_rows_of_json(write_records):
    rows = [json.dumps({"text": t, "weight": 2.0}) for t in TEXTS]

    lines = read(write_records([*rows, "{no"]), records="json")

    assert texts_of(lines) == TEXTS
    assert refusals(lines) == [(11, "not JSON")]


def test_json_taken_for_text_is_told(write_records):
    path = write_records([json.dumps({"text": t}) for t in TEXTS])

    with pytest.raises(ValueError, match=r"rows of JSON; .* set config.data.records="):
        read(path)
    # Programs and single rows among texts are text.
    assert len(texts_of(read(write_records(['{"text": "a"}', "b"])))) == 2
    assert len(texts_of(read(write_records(["{x}", '{"a": 1}'])))) == 2


def test_what_is_no_text_is_refused_by_its_number(write_records, monkeypatch):
    monkeypatch.setattr("bitmamba.data.records.MAX_LINE_BYTES", 50)

    lines = read(write_records([b"good", b"\xff\xfe", b"x" * 51, b"good"]))

    assert texts_of(lines) == ["good", "good"]
    assert refusals(lines) == [(2, "not UTF-8"), (3, "record too long")]


@pytest.mark.parametrize("keep", [0, 1, 1000, -1])
def test_a_file_that_is_cut_short_is_refused_in_a_line(write_records, keep):
    path = write_records(TEXTS)
    path.write_bytes(path.read_bytes()[:keep])

    with pytest.raises(ValueError, match=r"a\.array_record: (not an Array|damaged)"):
        read(path)


def test_any_flipped_bit_is_found_or_changes_nothing(write_records):
    rng = random.Random(0)
    path = write_records(["".join(rng.choices("abcdef", k=900)) for _ in range(300)])
    good, texts, found = path.read_bytes(), texts_of(read(path)), 0
    for _ in range(40):
        data = bytearray(good)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        said = told(path)
        if said is None:
            assert texts_of(read(path)) == texts
        else:
            found += 1
            assert str(path) in said
            assert "\n" not in said
    assert found > 20


def told(path):
    """What is said of a file that is refused."""
    try:
        assert all(line.row or line.refused for line in read(path))
    except ValueError as error:
        return str(error)
    return None


def test_a_group_too_large_for_memory_is_refused_before_it_is_unpacked(
    write_records, monkeypatch
):
    path = write_records(["x" * 1000] * 300, group_size=100)
    # Groups of few bytes and many records; headers of blocks between and inside them.
    rng = random.Random(0)
    for group_size in (1, 7, 3000):
        texts = [rng.choice("ab") * rng.randint(0, 40) for _ in range(9000)]
        texts += [rng.randbytes(rng.randint(0, 9000)).hex() for _ in range(60)]
        array_record.check_groups(
            write_records(texts, "b.array_record", group_size=group_size)
        )

    array_record.check_groups(path)
    monkeypatch.setattr(array_record, "MAX_GROUP_BYTES", 90_000)
    with pytest.raises(ValueError, match=r"of 100,\d{3} bytes; .* smaller group_size"):
        read(path)


@given(st.binary(max_size=2000), st.integers(0, 2**17), st.integers(0, 2**64 - 1))
@settings(max_examples=80, deadline=None)
def test_any_bytes_are_read_or_refused_in_a_line(tmp_path_factory, data, at, number):
    path = tmp_path_factory.getbasetemp() / "any.array_record"
    writer = ArrayRecordWriter(str(path), "group_size:2")
    for text in TEXTS:
        writer.write(text.encode())
    writer.close()
    whole = path.read_bytes()
    # Pure noise, and noise or a huge number in a good file.
    for changed in (
        data,
        whole[:at] + data + whole[at + len(data) :],
        whole[:at] + number.to_bytes(8, "little") + whole[at + 8 :],
    ):
        path.write_bytes(changed)
        said = told(path)
        assert said is None or str(path) in said


def test_a_pattern_finds_files_only_in_order(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", "d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")

    def names(pattern):
        found = shards.find(str(tmp_path / pattern), where="data.replay")
        return [path.name for path in found]

    assert names("*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert names("**/*.jsonl") == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert names("sub/*") == ["c.jsonl"]
    assert names("a.jsonl") == ["a.jsonl"]


def test_a_pattern_that_matches_nothing_says_what_lies_there(tmp_path):
    (tmp_path / "a.txt").touch()

    with pytest.raises(ValueError, match=r"no file matches; .* lie a\.txt"):
        shards.find(f"{tmp_path}/none/*.jsonl", where="data.replay")
    with pytest.raises(ValueError, match=r"a folder\); .* or a pattern as"):
        shards.find(str(tmp_path), where="data.replay")


def test_an_unknown_kind_of_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a\.txt; expected a name that ends in"):
        shards.suffix_of(tmp_path / "a.txt", where="data.replay")


def test_a_missing_pyarrow_is_told_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")

    with pytest.raises(ValueError, match=r"pip install 'bitmamba\[parquet\]'"):
        read(tmp_path / "a.parquet")


@pytest.fixture
def write_parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def write_parquet(columns, **settings):
        path = tmp_path / "a.parquet"
        parquet.write_table(arrow.table(columns), path, **settings)
        return path

    return write_parquet


def test_parquet_gives_the_texts_of_a_column(write_parquet):
    columns = {
        "n": range(10),
        "parts": [["a", "b"]] * 10,
        "body": [*TEXTS[:5], None, *TEXTS[6:]],
    }
    path = write_parquet(columns, row_group_size=3)

    lines = read(path, text_column="body")

    assert texts_of(lines) == TEXTS[:5] + TEXTS[6:]
    assert refusals(lines) == [(6, "not text")]
    for column, said in (
        ("text", "no column 'text'"),
        ("n", "'n' is int64"),
        ("parts", "list"),
    ):
        with pytest.raises(ValueError, match=said):
            read(path, text_column=column)


def test_parquet_text_that_is_not_utf8_is_refused_alone(write_parquet):
    import pyarrow as arrow

    raw = arrow.array([b"good", b"\xff", b"good"], arrow.binary())
    path = write_parquet({"text": raw.view(arrow.string())})

    lines = read(path)

    assert texts_of(lines) == ["good", "good"]
    assert refusals(lines) == [(2, "not UTF-8")]


def test_damaged_parquet_is_refused_in_a_line(write_parquet, monkeypatch):
    path = write_parquet({"text": TEXTS * 20}, compression="zstd")
    good = path.read_bytes()
    for data in (b"", b"PAR1", good[:-1], good[: len(good) // 2], b"x" * 100):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"a\.parquet: not a Parquet file"):
            read(path)
    path.write_bytes(good)
    # pyarrow 26 aborts the process on some files that are not what they say.
    monkeypatch.setattr("bitmamba.data.shards.parquet._WORKER", "import os; os.abort()")
    with pytest.raises(ValueError, match=r"pyarrow ended at record 1"):
        read(path)
    monkeypatch.undo()
    monkeypatch.setattr("bitmamba.data.shards.parquet.MAX_GROUP_BYTES", 100)
    with pytest.raises(ValueError, match="smaller row groups"):
        read(path)
