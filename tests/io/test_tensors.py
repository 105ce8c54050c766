"""safetensors headers that lie: refused in one line, before anything is allocated."""

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from bitmamba.io.tensors import read_header, read_tensors

WHOLE = save(
    {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.zeros((0, 4), np.int8),
        "c": np.ones(5, ml_dtypes.bfloat16),
        "d": np.array(3, np.float16),
    },
    metadata={"format": "pt"},
)


def made(header, data=b"", *, n_header=None):
    """A file with this header, and a length that may lie."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if n_header is None else n_header) + raw + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.fixture
def refuse(tmp_path):
    def refuse(data):
        file = tmp_path / "x.safetensors"
        file.write_bytes(data)
        with pytest.raises(ValueError, match=r"x\.safetensors: ") as error:
            read_tensors(file, read_header(file))
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 700
        return str(error.value)

    return refuse


def test_what_the_library_wrote_is_read(tmp_path):
    file = tmp_path / "x.safetensors"
    file.write_bytes(WHOLE)

    header = read_header(file)
    got = read_tensors(file, header)

    assert header["b"].shape == (2, 3)
    assert header["c"].dtype == "BF16"
    np.testing.assert_array_equal(got["b"], [[0, 1, 2], [3, 4, 5]])
    assert got["a"].shape == (0, 4)
    assert got["c"].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "got 0 bytes"),
        (b"\x02\0\0\0\0\0\0\0{", "got 9 bytes"),
        (made({}, n_header=2**63), "expected a whole safetensors file"),
        (made({}, n_header=2**64 - 1), "expected a whole safetensors file"),
        (made(b" " * (4 * 2**20 + 1)), "expected a whole safetensors file"),
        (made(b"\xff\xff"), "not JSON"),
        (made(b"[" * 99_999), "not JSON"),
        (made(b"[1]"), "no table"),
        (made({"a": [entry()]}), "expected dtype, shape and data_offsets"),
        (made({"a": {**entry(), "more": 1}}), "expected dtype, shape and data_offsets"),
        (made({"a": entry("F8_E4M3", (8,))}, b"0" * 8), "got dtype 'F8_E4M3'"),
        (made({"a": entry("C64", (1,))}, b"0" * 8), "got dtype 'C64'"),
        (made({"a": entry(shape=(-2,))}, b"0" * 8), "expected sizes >= 0"),
        (made({"a": entry(shape=(2.0,))}, b"0" * 8), "expected sizes >= 0"),
        (made({"a": entry(shape=(True, 2))}, b"0" * 8), "expected sizes >= 0"),
        (made({"a": entry(shape=[1] * 9)}, b"0" * 8), "expected sizes >= 0"),
        (made({"a": entry(shape=(2**40, 2**40))}, b"0" * 8), "got 8 bytes for F32"),
        (made({"a": entry(offsets=(-8, 0))}, b"0" * 8), "expected .begin, end."),
        (made({"a": entry(offsets=(8, 0))}, b"0" * 8), "got -8 bytes"),
        (made({"a": entry(offsets=(0, 2**60))}, b"0" * 8), "expected .begin, end."),
        (made({"a": entry(offsets=(8, 16))}, b"0" * 16), "begins at byte 8"),
        (made({"a": entry(), "b": entry()}, b"0" * 8), "begins at byte 0; expected 8"),
        (made({"a": entry()}, b"0" * 7), "got 7 bytes of tensors; expected 8"),
        (made({"a": entry()}, b"0" * 9), "got 9 bytes of tensors; expected 8"),
        (
            made(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2), b"0" * 8),
            "a key appears twice",
        ),
        (made(b'{"a":{"dtype":"F32","shape":[%s]' % (b"9" * 5000)), "not JSON"),
    ],
)
def test_a_header_that_lies_is_refused(refuse, data, message):
    import re

    assert re.search(message, refuse(data))


def test_more_than_the_memory_is_refused_unread(tmp_path):
    n = 2**43 - 2**20
    file = tmp_path / "x.safetensors"
    file.write_bytes(made({"a": entry("I8", (n,), (0, n))}))
    with file.open("ab") as opened:
        try:
            opened.truncate(n + file.stat().st_size)
        except OSError:
            pytest.skip("this file system holds no file of that size")

    with pytest.raises(ValueError, match="GiB of arrays; expected at most"):
        read_tensors(file, read_header(file))


mutated = st.one_of(
    st.binary(max_size=200),
    st.builds(
        lambda at, byte: WHOLE[:at] + byte + WHOLE[at + len(byte) :],
        st.integers(0, len(WHOLE) - 1),
        st.binary(min_size=1, max_size=4),
    ),
    st.builds(lambda n: WHOLE[:n], st.integers(0, len(WHOLE))),
    st.builds(
        lambda header, data: made(header, data),
        st.dictionaries(
            st.sampled_from(["a", "b", "__metadata__", "../x"]),
            st.fixed_dictionaries(
                {
                    "dtype": st.sampled_from(["F32", "BF16", "U8", "F4", "", None]),
                    "shape": st.lists(st.integers(-1, 3), max_size=3),
                    "data_offsets": st.lists(st.integers(-1, 24), max_size=3),
                }
            ),
            max_size=3,
        ),
        st.binary(max_size=24),
    ),
)


@given(data=mutated)
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_tensors_or_one_sentence(tmp_path_factory, data):
    file = Path(tmp_path_factory.getbasetemp()) / "any.safetensors"
    file.write_bytes(data)

    told = ""
    try:
        header = read_header(file)
        got = read_tensors(file, header)
    except ValueError as error:
        told = str(error)
    if told:
        assert told.startswith(f"{file}: ")
        return
    assert got.keys() == header.keys()
    for name, (_, shape, (begin, end)) in header.items():
        assert got[name].shape == shape
        assert got[name].nbytes == end - begin
