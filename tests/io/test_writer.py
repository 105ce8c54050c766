import json
import resource

import jax.numpy as jnp
import numpy as np
import pytest

from bitmamba.io.writer import MetricsWriter


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_row_is_on_disk_when_write_returns(tmp_path):
    writer = MetricsWriter(tmp_path / "run")

    writer.write(1, {"loss": jnp.float32(0.5), "n": np.int64(3), "note": "é"})

    assert writer.path == tmp_path / "run" / "metrics.jsonl"
    assert rows_of(writer.path) == [{"step": 1, "loss": 0.5, "n": 3, "note": "é"}]
    writer.close()


def test_numbers_that_are_not_finite(tmp_path):
    writer = MetricsWriter(tmp_path)

    writer.write(1, {"loss": np.float32("nan"), "norm": -float("inf"), "lr": 1e-3})
    writer.close()

    (line,) = writer.path.read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 1,
        "loss": None,
        "norm": None,
        "lr": 1e-3,
        "non_finite": {"loss": "nan", "norm": "-inf"},
    }


def test_bad_value_is_refused_by_name(tmp_path):
    writer = MetricsWriter(tmp_path)

    with pytest.raises(ValueError, match="metrics: loss: got ndarray"):
        writer.write(1, {"loss": np.zeros(2)})

    writer.close()
    assert writer.path.read_bytes() == b""


LINES = [
    b'{"step": 0, "eval/loss": 3.0}\n',
    b'{"loss":   2.5,"step":1}\n',  # spacing of another writer stays
    b"not JSON\n",
    b'{"step": 2, "loss": 2.0}\n',
    b'{"step": 3, "loss": 1.5}\n',
    b'{"step": 2, "eval/loss": 2.2}\n',
    b'{"step": 4, "lo',
]


@pytest.mark.parametrize(
    ("resume_step", "kept"),
    [
        (None, []),
        (0, [0, 2]),
        (1, [0, 1, 2]),
        (2, [0, 1, 2, 3, 5]),
        (9, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_resume_cuts_back(tmp_path, resume_step, kept):
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(LINES))

    writer = MetricsWriter(tmp_path, resume_step=resume_step)
    writer.write(10, {"loss": 1.0})
    writer.close()

    new = b'{"step": 10, "loss": 1.0}\n'
    expected = b"".join(LINES[i] for i in kept) + new
    assert writer.path.read_bytes() == expected
    assert [f.name for f in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_full_disk_keeps_whole_rows_and_writes_them_later(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"loss": 1.0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, hard))
    try:
        writer.write(2, {"loss": 2.0})
        assert writer.path.read_bytes() == b'{"step": 1, "loss": 1.0}\n'
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    writer.write(3, {"loss": 3.0})
    writer.close()

    assert [row["step"] for row in rows_of(writer.path)] == [1, 2, 3]
