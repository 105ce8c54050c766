"""Checkpoints made by somebody else: nothing in them is a path that we follow.

Whoever makes a checkpoint can make its digests match, so the tests do.
"""

import json

import numpy as np
import pytest
import tensorstore as ts

from bitmamba.io import load, meta, sources, tensors
from bitmamba.io.runs import load_run
from bitmamba.io.steps import retire
from bitmamba.io.workdir import check_links
from bitmamba.io.writer import MetricsWriter

pytestmark = pytest.mark.newest


@pytest.fixture
def step(open_checkpointer, toy):
    """A step's folder with frozen parameters beside it, to be spoilt."""
    checkpointer = open_checkpointer()
    table = checkpointer.save_frozen({"head": {"kernel": np.ones((2, 2), np.float32)}})
    toy.save(checkpointer, 5, frozen_digests=table)
    checkpointer.wait()
    return next(f for f in checkpointer._directory.iterdir() if f.name == "5")


def rewrite(step, change, *, raw=None):
    """Change the meta item, and its digest with it."""
    file = step / "meta" / "metadata"
    body = {k: v for k, v in json.loads(file.read_bytes()).items() if k != "digest"}
    change(body)
    file.write_bytes(
        raw or json.dumps({**body, "digest": meta._own_digest(body)}).encode()
    )


def array_metadata(step, path, **change):
    """Change what TensorStore reads of one array."""
    base = {"driver": "file", "path": f"{step}/trainable/"}
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    key = f"{path.replace('/', '.')}/.zarray"
    found = json.loads(store.read(key).result().value)
    store.write(key, json.dumps({**found, **change}).encode()).result()


def test_the_unspoilt_step_is_read(step):
    rewrite(step, lambda body: None)

    params, record = load.load_params(step.parent)

    assert record["step"] == 5
    assert params["head"]["kernel"].shape == (2, 2)


OK = "float32[2]:" + "0" * 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b["frozen"].update(folder="../elsewhere"), "is another's"),
        (lambda b: b["frozen"].update(folder="/etc"), "is another's"),
        (lambda b: b["frozen"].update(folder=["x"]), "is another's"),
        (lambda b: b["frozen"].pop("folder"), "no folder of the frozen"),  # fuzzed
        (lambda b: b["frozen"].update(source=5, folder=None), "source .* no path"),
        (lambda b: b["frozen"].update(source="x"), "source .* no path"),
        (lambda b: b["frozen"].update(digests={"a": 1}), "digests of frozen"),
        (lambda b: b["digests"].update({"../../x": {}}), "digests of other items"),
        (lambda b: b["digests"].pop("opt_state"), "digests of other items"),
        (lambda b: b["digests"].update(trainable=[]), "digests of trainable"),
        (lambda b: b["digests"]["trainable"].update(a="x"), "digests of trainable"),
        (lambda b: b["digests"]["trainable"].update({"a//b": OK}), "no path of a par"),
        (lambda b: b["digests"]["trainable"].update({"scale/x": OK}), "no path of a"),
        (lambda b: b["digests"]["trainable"].update({"head": OK}), "no path of a par"),
        (lambda b: b.update(config=None), "no usable config"),
        (lambda b: b.pop("fingerprints"), "no usable fingerprints"),
        (lambda b: b.update(step=-1), "no usable step"),
        (lambda b: b.update(step=True), "no usable step"),
        (lambda b: b.update(format="1"), "no format"),
    ],
)
def test_what_make_meta_cannot_have_made_is_damage(step, change, message):
    rewrite(step, change)

    with pytest.raises(ValueError, match=f"5: meta: .*{message}") as error:
        load.load_params(step.parent)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "raw",
    [
        b"[1]",
        b"null",
        b"{",
        b"\xff",
        b'{"a":' * 3000 + b"1" + b"}" * 3000,
        b'{"config":' + b"[" * 70 + b"]" * 70 + b"}",
        b'{"step":1,"step":2}',
        b" " * (64 * 2**20 + 1),
    ],
    ids=["list", "null", "cut", "bytes", "deep", "deeper than 64", "twice", "large"],
)
def test_any_other_bytes_for_meta_are_damage(step, raw):
    rewrite(step, lambda body: None, raw=raw)

    with pytest.raises(ValueError, match="5: meta: "):
        load.load_params(step.parent)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [10**15], "chunks": [1]}, r"A_log: got float32\[10+\]; expected"),
        ({"dtype": "<f8"}, r"A_log: got float64\[3\]; expected float32"),
        ({"chunks": [10**12]}, "A_log: got chunks .1000000000000,. of a shape"),
    ],
    ids=["shape", "dtype", "chunks"],
)
def test_sizes_that_lie_take_no_memory(step, change, message):
    array_metadata(step, "layer_0/A_log", **change)

    with pytest.raises(ValueError, match=f"5: trainable: layer_0/{message}"):
        load.load_params(step.parent)


def test_more_arrays_than_memory_are_not_read(step, monkeypatch):
    monkeypatch.setattr(tensors.os, "sysconf", lambda name: 4)

    with pytest.raises(ValueError, match=r"expected at most 0\.0 GiB, the memory"):
        load.load_params(step.parent)


@pytest.mark.parametrize(
    ("named", "follow"),
    [
        ("assets:base", True),
        ("work/here/base", True),
        ("{tmp}/runs/base", True),
        ("{tmp}/runs/lora/../base", True),
        ("{tmp}/elsewhere", False),
        ("{tmp}/runs/../elsewhere", False),
        ("{tmp}/runs/link", False),
        ("../elsewhere", False),
        ("~/base", False),
        ("/", False),
        ("a\0b", False),
    ],
)
@pytest.mark.parametrize("given", ["", "/checkpoints", "/checkpoints/5"])
def test_a_base_is_followed_beside_the_run_or_below_us(
    tmp_path, monkeypatch, named, follow, given
):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "elsewhere"))
    (tmp_path / "runs" / "lora" / "checkpoints").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "elsewhere")
    named = named.replace("{tmp}", str(tmp_path))
    where = f"{tmp_path}/runs/lora{given}"

    if follow:
        assert sources.followed(named, beside=where, flag="--base") == named
        return
    with pytest.raises(ValueError, match="name it with --base"):
        sources.followed(named, beside=where, flag="--base")


def test_a_run_of_adapters_does_not_choose_its_base(step, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    rewrite(step, lambda b: b["frozen"].update(source="/somewhere/else", folder=None))

    with pytest.raises(ValueError, match=r"names '/somewhere/else', .*--base"):
        load_run(tmp_path)
    with pytest.raises(ValueError, match="no such folder"):
        load_run(tmp_path, base=str(tmp_path / "nowhere"))


def test_links_out_of_a_work_directory_are_refused(tmp_path):
    outside = tmp_path / "keys"
    outside.write_text("precious\n")
    for name in ("metrics.jsonl", "samples.jsonl", "checkpoints"):
        workdir = tmp_path / f"run-{name}"
        workdir.mkdir()
        (workdir / name).symlink_to(outside if "jsonl" in name else tmp_path)

        with pytest.raises(ValueError, match=rf"{name}: a link to .*, out of the work"):
            MetricsWriter(workdir)

    assert outside.read_text() == "precious\n"


def test_the_work_directory_itself_may_be_a_link(tmp_path):
    (tmp_path / "disk" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "latest").symlink_to("checkpoints")

    check_links(tmp_path / "run")
    MetricsWriter(tmp_path / "run").close()

    assert (tmp_path / "disk" / "metrics.jsonl").exists()


def test_removing_steps_never_follows_a_link(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    (tmp_path / "checkpoints").mkdir()
    for name in ("1", "9"):
        (tmp_path / "checkpoints" / name).symlink_to(outside)

    retire(tmp_path / "checkpoints", saved=3, keep=1)

    assert (outside / "kept").exists()
