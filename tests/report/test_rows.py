"""metrics.jsonl read back: what is no row is left out, and told once."""

import logging

from bitmamba.report.summary import read_rows


def test_damaged_lines_are_left_out_with_one_warning(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1, "loss": 2.0}\n'
        b'{"step": 2, "lo\x93s": \n'
        b"[3]\n"
        b'{"step": 4, "loss": 1.0}\n'
        b'{"step": 5, "lo'  # cut by a kill: no line yet
    )

    with caplog.at_level(logging.WARNING):
        found = read_rows(path)

    assert [row["step"] for row in found] == [1, 4]
    (told,) = [r.getMessage() for r in caplog.records]
    assert told.endswith("line 2 is no row of ours (2 such in all); left out")


def test_no_file_is_no_rows(tmp_path):
    assert read_rows(tmp_path / "metrics.jsonl") == []
