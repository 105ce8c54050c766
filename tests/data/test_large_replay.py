"""Large replay text: the batches of the same texts in memory, from tokens on disk."""

import hashlib
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitmamba.config import DataConfig
from bitmamba.data import DamagedTokensError, TokenCache, build_data, token_file
from bitmamba.data.corpus import Corpus
from bitmamba.data.token_file import MARK, TAIL, TokenFile
from bitmamba.io.tokenizer import ByteTokenizer

TEXTS = [f"text {i} " + "xyz"[i % 3] * (7 * i % 400) for i in range(60)]
STEPS = 12


@pytest.fixture
def shown():
    return []


@pytest.fixture
def large(write, tmp_path, shown):
    """A DataBundle of patterns or shard files; `shown` gets what is told."""

    def large(
        *names,
        sft=(),
        examples=None,
        heldout_replay=(),
        held=None,
        tokenizer=None,
        vocab_size=512,
        cache=None,
        **settings,
    ):
        cfg = {"window": 64, "heldout_share": 0.0, "balance": 1.0} | settings
        cfg |= {"replay": tuple(str(tmp_path / n) for n in names), "replay_share": 0.5}
        if sft or examples:
            cfg["sft"] = (examples or write(sft, "sft.json"),)
        if heldout_replay or held:
            cfg["heldout_replay"] = (held or write(heldout_replay, "held.json"),)
        return build_data(
            DataConfig(**cfg),
            tokenizer or ByteTokenizer(),
            vocab_size=vocab_size,
            steps=STEPS,
            batch_size=2,
            cache=cache or TokenCache(tmp_path / "tokens", show=shown.append),
        )

    return large


@pytest.fixture
def three_shards(write_records):
    for i in range(3):
        write_records(TEXTS[20 * i : 20 * i + 20], f"corpus/{i}.array_record")
    return "corpus/*.array_record"


def rows_of(texts):
    return [{"text": text} for text in texts]


def equal(bundle, other):
    return all(
        np.array_equal(x, y)
        for a, b in zip(bundle.batches(), other.batches(), strict=True)
        for x, y in zip(a, b, strict=True)
    )


def tokens_files(tmp_path):
    return sorted((tmp_path / "tokens").glob("*/*.tokens"))


EXAMPLES = [{"prompt": f"q{i}", "completion": "a" * (i % 9 + 1)} for i in range(30)]


@pytest.mark.parametrize("sft", [(), EXAMPLES], ids=["text", "mixed"])
def test_the_batches_are_those_of_the_same_texts_in_memory(
    large, build, three_shards, sft
):
    in_memory = build(sft, replay=rows_of(TEXTS), steps=STEPS, replay_share=0.5)
    bundle = large(three_shards, sft=sft)

    assert equal(bundle, in_memory)
    mine, theirs = bundle.account, in_memory.account
    assert mine.categories == theirs.categories
    assert (mine.tokens, mine.trained_tokens) == (theirs.tokens, theirs.trained_tokens)
    # Of several processes each reads its own rows of the same batches.
    whole, part = (
        next(bundle.batches(3)),
        next(bundle.batches(3, process_index=1, process_count=2)),
    )
    assert np.array_equal(whole.tokens[:, 1:], part.tokens)


def test_weights_and_masks_come_through(large, build, write):
    rows = [
        {"text": "weighed", "weight": 0.5},
        {"input_ids": [40, 41, 42, 43], "loss_mask": [0, 0, 1, 1]},
        *rows_of(TEXTS[:30]),
    ]
    in_memory = build(replay=rows, steps=STEPS)
    write(rows, "w0.jsonl")

    assert equal(large("w*.jsonl"), in_memory)
    # Weights that begin in the middle of a file, of many blocks.
    late = [*rows_of(["y" * 9000] * 4), *rows]
    write(late, "w0.jsonl")
    assert equal(large("w*.jsonl"), build(replay=late, steps=STEPS))


def test_every_record_is_counted(large, write_records):
    write_records([*TEXTS[:5], b"\xff", "  ", "a\0b", "kept"], "c/a.array_record")
    write_records(TEXTS[5:9], "c/b.array_record")

    account = large("c/*", max_refused_share=1.0).account

    (file,) = account.files
    assert (file.files, file.rows, file.trained) == (2, 13, 10)
    assert file.refused == {"not UTF-8": 1, "empty text": 1, "NUL character": 1}
    assert "a.array_record:6: byte 0xff" in file.examples["not UTF-8"][0]
    assert "(2 files): 13 rows = 10 trained + 0 held out + 3 refused" in "\n".join(
        account.lines()
    )


def test_too_many_refused_records_stop_the_run(large, write_records):
    write_records(["good", *[b"\xff"] * 5], "c/a.array_record")

    for _ in range(2):  # from the cache as well
        with pytest.raises(ValueError, match="5 of 6 rows refused"):
            large("c/*")


def test_held_out_text_is_not_trained_and_needs_no_tokenising_anew(
    large, build, three_shards, shown
):
    held = rows_of([TEXTS[3], TEXTS[41], "elsewhere"])
    large(three_shards)

    bundle = large(three_shards, heldout_replay=held)

    assert shown[-1] == "tokens of 3 shards: 3 from the cache"
    rest = [t for i, t in enumerate(TEXTS) if i not in (3, 41)]
    assert equal(bundle, build(replay=rows_of(rest), steps=STEPS))
    mine = bundle.account.files[-1]
    assert mine.refused == {"also in the held-out text": 2}
    assert "0.array_record:4: " in mine.examples["also in the held-out text"][0]


def test_held_out_text_may_be_shards_and_is_bounded(
    large, three_shards, tmp_path, monkeypatch
):
    held = str(tmp_path / "corpus/2*")
    bundle = large("corpus/0.array_record", held=held)

    assert len(bundle.stores["heldout_replay"].sources) == 20
    assert bundle.eval_replay
    monkeypatch.setattr("bitmamba.data.loading.MAX_HELDOUT_TEXTS", 19)
    with pytest.raises(ValueError, match="more than 19 texts by a pattern"):
        large("corpus/0.array_record", held=held)


def test_examples_may_be_named_by_a_pattern(large, write, tmp_path):
    write(EXAMPLES[:20], "e_a.jsonl")
    write(EXAMPLES[20:], "e_b.jsonl")
    write(rows_of(TEXTS), "t0.jsonl")

    bundle = large("t*.jsonl", examples=str(tmp_path / "e_*.jsonl"))

    assert bundle.categories == ("e_a", "e_b", "replay")
    (file, _) = bundle.account.files
    assert (file.files, file.trained) == (2, 30)


def test_no_file_is_read_twice(large, three_shards):
    with pytest.raises(ValueError, match=r"1\.array_record\) is in data\.replay alr"):
        large("corpus/1.array_record", three_shards)


def test_a_folder_of_one_file_and_files_by_name(large, three_shards):
    assert large("corpus/1*").account.files[0].files == 1
    assert large("corpus/1.array_record").account.files[0].trained == 20


def test_an_empty_corpus_is_refused(large, write_records):
    write_records([], "c/a.array_record")

    with pytest.raises(ValueError, match="has no rows"):
        large("c/*")


# --- what the cache keeps -------------------------------------------------------


def test_the_cache_is_used_and_told(large, three_shards, shown, tmp_path):
    first = large(three_shards)
    assert shown[0].startswith("tokens of 3 shards: 0 from the cache, 3 to make")
    before = [path.stat().st_mtime_ns for path in tokens_files(tmp_path)]
    shown.clear()

    again = large(three_shards)

    assert shown == ["tokens of 3 shards: 3 from the cache"]
    assert [path.stat().st_mtime_ns for path in tokens_files(tmp_path)] == before
    assert again.plan_digest == first.plan_digest
    assert again.fingerprints == first.fingerprints
    assert again.account == first.account


def test_another_time_of_change_is_settled_by_the_content(
    large, three_shards, shown, tmp_path, monkeypatch
):
    first = large(three_shards)
    path = tmp_path / "corpus/1.array_record"
    before = tokens_files(tmp_path)[1].stat().st_mtime_ns
    path.touch()

    again = large(three_shards)

    assert "2 from the cache, 1 to make" in shown[-2]
    assert tokens_files(tmp_path)[1].stat().st_mtime_ns == before
    assert again.fingerprints == first.fingerprints


def test_a_changed_shard_is_made_anew_and_changes_the_fingerprint(
    large, three_shards, write_records, shown
):
    first = large(three_shards)
    write_records([*TEXTS[20:39], "other"], "corpus/1.array_record")

    again = large(three_shards)

    assert any("1.array_record: changed; its tokens are made anew" in s for s in shown)
    changed = {k for k, v in again.fingerprints.items() if first.fingerprints[k] != v}
    assert {key.rpartition("/")[2] for key in changed} == {"*.array_record"}
    assert again.plan_digest != first.plan_digest


def test_another_tokenizer_or_width_has_tokens_of_its_own(
    large, three_shards, shown, tmp_path
):
    plain = large(three_shards)

    marked = large(three_shards, tokenizer=ByteTokenizer(bos=True))
    wide = large(three_shards, vocab_size=70_000)

    assert len(tokens_files(tmp_path)) == 9
    assert next(marked.batches()).tokens[0, 0, 0] == marked.tokenizer.bos_id
    assert equal(wide, plain)
    shown.clear()
    large(three_shards)
    assert shown == ["tokens of 3 shards: 3 from the cache"]


def test_a_smaller_model_does_not_take_its_ids(large, write):
    write([{"input_ids": [400] * 4}], "ids0.jsonl")
    large("ids*.jsonl")

    with pytest.raises(ValueError, match="token id 400; expected < 300"):
        large("ids*.jsonl", vocab_size=300)


@pytest.mark.parametrize("where", ["tokens", "end", "cut", "empty", "foreign"])
def test_a_damaged_cache_is_made_anew_or_stops_the_run(
    large, three_shards, shown, tmp_path, where
):
    first = list(large(three_shards).batches())
    path = tokens_files(tmp_path)[1]
    good = path.read_bytes()
    at = {"tokens": 100, "end": len(good) - 60}.get(where)
    data = bytearray(good[:-40] if where == "cut" else good)
    if where in ("empty", "foreign"):
        data = bytearray(b"" if where == "empty" else b"other" * 1000)
    if at:
        data[at] ^= 4
    path.write_bytes(data)

    if where == "tokens":  # found where they are read
        with pytest.raises(DamagedTokensError, match="damaged; removed: start again"):
            list(large(three_shards).batches())
        assert not path.exists()
    again = large(three_shards)

    assert path.read_bytes() == good
    assert np.array_equal(list(again.batches()), first)
    if where != "tokens":
        assert any("data.token_cache" in s and "made anew" in s for s in shown)


def test_any_flipped_bit_of_a_cached_file_is_found(large, three_shards, tmp_path):
    large(three_shards)
    path = tokens_files(tmp_path)[0]
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    whole = TokenFile(path)
    n, digest, found = whole.n_tokens, whole.digest, 0
    for at in rng.integers(0, len(good), 60):
        data = bytearray(good)
        data[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        with pytest.raises(DamagedTokensError):
            TokenFile(path).read(0, n)
        found += 1
    path.write_bytes(good)
    assert found == 60
    assert TokenFile(path).digest == digest


def test_a_cache_that_goes_away_is_told(large, three_shards, tmp_path):
    bundle = large(three_shards)
    for path in tokens_files(tmp_path):
        path.unlink()

    assert len(list(bundle.batches())) == STEPS  # the files are open
    token_file._opened.cache_clear()
    with pytest.raises(DamagedTokensError, match="No such file or directory; expected"):
        list(bundle.batches())


@given(st.binary(max_size=300), st.sampled_from(["noise", "description", "counts"]))
@settings(max_examples=100, deadline=None)
def test_any_bytes_in_the_cache_are_refused_in_words(tmp_path_factory, data, kind):
    """Noise, and descriptions whose own hash is right."""
    path = tmp_path_factory.getbasetemp() / "any.tokens"
    if kind != "noise":
        if kind == "counts":
            parts = [data[i : i + 8] for i in range(4)]
            numbers = [int.from_bytes(part, "big", signed=True) for part in parts]
            names = ("tokens", "weights", "documents", "checks")
            counts = dict(zip(names, numbers, strict=True))
            described = {"version": 1, "dtype": "<u2", "counts": counts, "sha256": {}}
            data = data + json.dumps(described).encode()
        raw = (
            data[data.index(b'{"version"') :]
            if kind == "counts"
            else data[len(data) // 2 :]
        )
        data += TAIL.pack(hashlib.sha256(raw).digest(), len(raw), MARK)
    path.write_bytes(data)

    with pytest.raises(DamagedTokensError, match=r"any\.tokens: "):
        TokenFile(path)


def test_a_shard_that_changes_while_it_is_read_is_refused(
    large, three_shards, tmp_path, monkeypatch
):
    from bitmamba.data import tokenise

    encode = tokenise._ShardLoader._keep

    def keep(self, *args):
        (tmp_path / "corpus/0.array_record").touch()
        encode(self, *args)

    monkeypatch.setattr(tokenise._ShardLoader, "_keep", keep)
    with pytest.raises(ValueError, match="changed while it was read"):
        large(three_shards)
    assert not list((tmp_path / "tokens").glob("*/*.part"))


def test_a_damaged_shard_is_one_line_and_keeps_what_is_done(
    large, three_shards, tmp_path
):
    path = tmp_path / "corpus/2.array_record"
    path.write_bytes(path.read_bytes()[:1000])

    with pytest.raises(ValueError, match=r"2\.array_record: not an ArrayRecord file"):
        large(three_shards)
    assert len(tokens_files(tmp_path)) == 2
    assert not list((tmp_path / "tokens").glob("*/*.part"))


def test_a_cache_that_cannot_be_written_is_told(large, three_shards, tmp_path):
    (tmp_path / "tokens").write_text("a file")

    with pytest.raises(ValueError, match=r"data\.token_cache: .*set config\.data\.tok"):
        large(three_shards)


def test_documents_over_many_blocks_and_files(large, write_records, tmp_path):
    texts = ["".join(chr(97 + (i * k) % 26) for i in range(20_000)) for k in (1, 3, 7)]
    write_records(texts[:2], "c/a.array_record")
    write_records(texts[2:], "c/b.array_record")
    bundle = large("c/*")

    store = bundle.stores["replay"]
    assert isinstance(store, Corpus)
    for document, text in enumerate(texts):
        for first, end in ((0, 20_000), (8191, 8193), (16_383, 20_000), (5, 6)):
            tokens, weights = store.span(document, first, end)
            assert ByteTokenizer().decode(tokens) == text[first:end]
            assert weights.tolist() == [1.0] * (end - first)


# --- several processes, and kills ----------------------------------------------


def test_processes_share_the_shards(large, three_shards, tmp_path, shown):
    """Each makes its own, then waits for what the other makes."""
    from threading import Thread

    made = {}

    def run(index):
        told = []
        cache = TokenCache(tmp_path / "tokens", index, 2, told.append, gone_s=30)
        made[index] = large(three_shards, cache=cache), told

    threads = [Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    assert equal(made[0][0], made[1][0])
    assert made[0][0].fingerprints == made[1][0].fingerprints
    assert not any("shows no progress" in s for i in made for s in made[i][1])
    assert len(tokens_files(tmp_path)) == 3


def test_the_work_of_a_lost_process_is_done_by_the_others(
    large, three_shards, tmp_path, shown
):
    cache = TokenCache(tmp_path / "tokens", 0, 2, shown.append, gone_s=0.1)

    bundle = large(three_shards, cache=cache)

    assert Counter("process 1 of 2 shows no progress" in s for s in shown)[True] == 1
    assert equal(bundle, large(three_shards))


KILLED = """
import sys, time
sys.path.insert(0, sys.argv[3])
from pathlib import Path
from bitmamba.config import DataConfig
from bitmamba.data import TokenCache, build_data
from bitmamba.io.tokenizer import ByteTokenizer

class Slow(ByteTokenizer):
    def encode_content(self, texts):
        time.sleep(0.05 * len(texts))
        return super().encode_content(texts)

cfg = DataConfig(replay=(sys.argv[1],), window=64)
cache = TokenCache(Path(sys.argv[2]), show=print)
build_data(cfg, Slow(), vocab_size=512, steps=1, batch_size=1, cache=cache)
"""


def test_a_killed_tokenising_goes_on_at_the_shard(large, three_shards, tmp_path, shown):
    root = Path(__file__).resolve().parents[2]
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            KILLED,
            str(tmp_path / three_shards),
            str(tmp_path / "tokens"),
            str(root),
        ]
    )
    end = time.monotonic() + 60
    while len(list((tmp_path / "tokens").glob("*/*.seen"))) < 1:
        assert time.monotonic() < end
        assert child.poll() is None
        time.sleep(0.01)
    time.sleep(0.2)  # in the middle of the second
    child.kill()
    child.wait()
    (left,) = (tmp_path / "tokens").glob("*/*.part")
    (kept,) = tokens_files(tmp_path)
    before = kept.stat().st_mtime_ns

    bundle = large(three_shards)

    assert shown[0].startswith("tokens of 3 shards: 1 from the cache, 2 to make")
    assert kept.stat().st_mtime_ns == before
    assert not left.exists()
    assert [len(f.lengths) for f in bundle.stores["replay"]._files] == [20] * 3


def test_the_memory_of_a_plan_does_not_grow_with_the_texts():
    """Ten million documents, of which a run needs a few: no object for each."""
    import tracemalloc

    from bitmamba.data.plan import make_plan

    lengths = np.full(10_000_000, 700, np.uint32)
    tracemalloc.start()
    plan = make_plan(
        sft_lengths=np.empty(0, np.int64),
        sft_sources=np.empty(0, np.int64),
        replay_lengths=lengths,
        n_windows=1000,
        window=64,
        replay_share=0.5,
        balance=1.0,
        seed=0,
    )
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert plan.n_windows == 1000
    assert peak < 6 * len(lengths)  # four bytes for the order of an epoch


def test_json_records_are_rows(large, write_records, build):
    write_records([json.dumps(row) for row in rows_of(TEXTS)], "j/a.array_record")

    with pytest.raises(ValueError, match="rows of JSON"):
        large("j/*")
    bundle = large("j/*", records="json")
    assert equal(bundle, build(replay=rows_of(TEXTS), steps=STEPS))
