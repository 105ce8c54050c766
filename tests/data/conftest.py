"""Tiny files, written out in the tests, and what becomes of them."""

import json
from collections import Counter

import pytest

from bitmamba.config import DataConfig
from bitmamba.data import build_data
from bitmamba.data.records import read_lines
from bitmamba.io.tokenizer import ByteTokenizer


@pytest.fixture
def write(tmp_path):
    """Rows (dicts) or raw bytes to a file; returns its path as a string."""

    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        if not isinstance(rows, bytes):
            rows = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(rows)
        return str(path)

    return write


@pytest.fixture
def read(write, tmp_path):
    """Bytes of a file to (rows, [(line, reason)], notes)."""

    def read(data):
        notes = Counter()
        write(data, "read.jsonl")
        lines = list(read_lines(tmp_path / "read.jsonl", notes=notes))
        rows = [line.row for line in lines if line.row is not None]
        refused = [(x.number, x.refused.reason) for x in lines if x.refused]
        return rows, refused, dict(notes)

    return read


@pytest.fixture
def build(write):
    """Rows of an SFT file (and replay texts) to a DataBundle; all rows trained."""

    def build(sft=(), *, replay=(), heldout_replay=(), tokenizer=None, **settings):
        run = {"steps": 2, "batch_size": 2, "accumulation": 1, "vocab_size": 512}
        names = {*run, "max_eval_windows"}
        run |= {k: settings.pop(k) for k in list(settings) if k in names}
        cfg = {"window": 64, "heldout_share": 0.0, "balance": 1.0}
        for role, rows in (
            ("sft", sft),
            ("replay", replay),
            ("heldout_replay", heldout_replay),
        ):
            if rows:
                cfg[role] = (write(rows, f"{role}.jsonl"),)
        cfg |= settings
        return build_data(DataConfig(**cfg), tokenizer or ByteTokenizer(), **run)

    return build


@pytest.fixture
def trained_texts():
    """What each document of a stream trains, by the byte tokenizer."""

    def trained_texts(bundle, stream="sft"):
        store, made = bundle.stores[stream], []
        for start, stop in zip(store.offsets[:-1], store.offsets[1:], strict=True):
            mask = store.weights_of(start, stop) > 0
            made.append(ByteTokenizer().decode(store.tokens[start:stop][mask]))
        return made

    return trained_texts


@pytest.fixture
def write_records(tmp_path):
    """Texts (or bytes) to an ArrayRecord file; returns its path."""
    from array_record.python.array_record_module import ArrayRecordWriter

    def write_records(records, name="a.array_record", *, group_size=4):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = ArrayRecordWriter(str(path), f"group_size:{group_size}")
        for record in records:
            writer.write(record.encode() if isinstance(record, str) else record)
        writer.close()
        return path

    return write_records
