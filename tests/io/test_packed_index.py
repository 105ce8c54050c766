"""Few bytes on disk that unpack to many: refused before they do."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts

from bitmamba.io import load, packed_index, store

STATUS = Path("/proc/self/status")


@pytest.fixture
def step(open_checkpointer, toy):
    """A step's folder."""
    checkpointer = open_checkpointer()
    toy.save(checkpointer, 5)
    checkpointer.wait()
    return next(f for f in checkpointer._directory.iterdir() if f.name == "5")


@pytest.fixture
def grown():
    """grown() is by how many MiB this process was larger than at the start."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        begin = peak()
    except OSError:
        pytest.skip("the peak of this process cannot be read here")
    return lambda: (peak() - begin) // 1024


def peak():
    line = next(x for x in STATUS.read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1])


def index(folder, **config):
    base = {"driver": "file", "path": f"{folder}/"}
    spec = {"driver": "ocdbt", "base": base, "config": config}
    return ts.KvStore.open(spec).result()


def frame(n_blocks, *, size=None):
    """A zstd frame of blocks of 128 KiB zeros, four bytes each."""
    head = b"\x28\xb5\x2f\xfd\x00\x38"
    if size is not None:
        head = b"\x28\xb5\x2f\xfd\xc0\x38" + struct.pack("<Q", size)
    block = 1 << 1 | 131072 << 3
    one = struct.pack("<I", block)[:3] + b"\0"
    last = struct.pack("<I", block | 1)[:3] + b"\0"
    return head + one * (n_blocks - 1) + last


@pytest.mark.parametrize("size", [None, 12, 2**30], ids=["unsaid", "a lie", "said"])
def test_an_arrays_bytes_unpack_no_further_than_its_shape(step, grown, size):
    # TensorStore's own doing; this test notices if another version differs.
    index(step / "trainable").write("layer_0.A_log/0", frame(2**13, size=size)).result()

    with pytest.raises(ValueError, match="5: trainable: "):
        load.load_params(step.parent)

    assert grown() < 300


def test_an_index_that_unpacks_to_much_is_refused_before_it_does(step, grown):
    # As 2000 values of 1 MiB in one node would be: 64 KB on disk.
    file = step / "trainable" / "d" / "bomb"
    body = b"\x0c\xdb\x20\xde" + bytes(9) + b"\1" + frame(16000)
    file.write_bytes(bytes(100) + body)
    assert file.stat().st_size < 65_000

    with pytest.raises(ValueError, match="trainable: bomb: its index may unpack to mo"):
        load.load_params(step.parent)

    assert grown() < 300


def test_a_link_to_a_folder_hides_nothing(step):
    folder = step / "trainable" / "d"
    folder.rename(step / "elsewhere")
    folder.symlink_to(step / "elsewhere")

    with pytest.raises(ValueError, match="trainable: d: a link to a folder; expected"):
        load.load_params(step.parent)


def test_a_real_node_with_large_values_is_found(tmp_path):
    # The limits are settings of the file, for whoever makes it.
    limits = {"max_inline_value_bytes": 2**20, "max_decoded_node_bytes": 2**30}
    store = index(tmp_path, **limits)
    with ts.Transaction() as transaction:
        within = store.with_transaction(transaction)
        for i in range(48):
            within[b"x%d" % i] = bytes(2**20)

    found = [
        packed_index._unpacked(str(f), 0, f.stat().st_size, 0)
        for f in tmp_path.rglob("*")
        if f.is_file()
    ]

    assert 40 * 2**20 < max(found) < 56 * 2**20
    assert sum(found) - max(found) < 2**20


def test_another_packing_is_refused(step):
    key = "layer_0.A_log/.zarray"
    inside = index(step / "trainable")
    found = json.loads(inside.read(key).result().value)
    found["compressor"] = {"id": "blosc", "cname": "zstd", "clevel": 5, "shuffle": 0}
    inside.write(key, json.dumps(found).encode()).result()

    with pytest.raises(ValueError, match=r"A_log: packed by blosc; expected zstd"):
        load.load_params(step.parent)


def test_arrays_that_look_like_an_index_are_read(step, tmp_path):
    marks = b"\x0c\xdb\x20\xde" + bytes(9) + b"\1"
    array = np.frombuffer((marks + b"\x28\xb5\x2f\xfd" + bytes(50)) * 500, np.uint8)
    writer = store.make_writer()
    store.start_write(writer, tmp_path / "9", params={"a": array.copy()}, meta={})
    writer.wait_until_finished()
    store.close_writer(writer)

    read = store.read_tree(tmp_path / "9" / "params", ["a"])

    assert read["a"].tobytes() == array.tobytes()
