"""The bundle: shares, evaluation, digests, and every mistake one clear line."""

import time

import numpy as np
import pytest

from bitmamba.config import DataConfig
from bitmamba.data import build_data
from bitmamba.io.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()


def pair(prompt="q", answer="a", **more):
    return {"prompt": prompt, "completion": answer, **more}


def pairs(n, **more):
    return [pair(f"q{i}", f"a{i}", **more) for i in range(n)]


def texts(n, size=50):
    return [{"text": f"{i:03d} " + "x" * size} for i in range(n)]


def data_of(*paths):
    cfg = DataConfig(sft=paths)
    return build_data(cfg, TOKENIZER, vocab_size=512, steps=1, batch_size=1)


def test_categories_come_from_the_row_or_the_file_and_replay_is_last(build):
    rows = [pair(category="zoo"), pair("b", category="ants"), pair("c")]

    bundle = build(rows, replay=texts(4), steps=10, replay_share=0.3)

    assert bundle.categories == ("ants", "sft", "zoo", "replay")
    for batch in bundle.batches():
        real = batch.segment_ids > 0
        for source in np.unique(batch.source_ids[real]):
            text = TOKENIZER.decode(batch.tokens[real & (batch.source_ids == source)])
            assert ("xxx" in text) == (bundle.categories[source] == "replay")
    assert [c.documents for c in bundle.account.categories] == [1, 1, 1, 4]


def test_the_mix_by_tokens_is_reported_as_measured(build):
    bundle = build(pairs(50), replay=texts(9), replay_share=0.1, steps=100)

    account, replayed, total = bundle.account, 0, 0
    for batch in bundle.batches():
        real = batch.segment_ids > 0
        total += real.sum()
        replayed += (real & (batch.source_ids == len(bundle.categories) - 1)).sum()
    assert account.tokens == total
    assert account.replay_share == pytest.approx(replayed / total)
    assert account.replay_share == pytest.approx(0.1, abs=64 / total)
    assert account.fill_share == pytest.approx(total / (200 * 64))
    trained = sum(int((b.loss_weights > 0).sum()) for b in bundle.batches())
    assert account.trained_tokens == trained
    assert sum(c.trained_tokens for c in account.categories) == trained


def test_plain_text_training_takes_all_windows_from_the_text(build):
    bundle = build(replay=texts(20), heldout_replay=texts(30)[20:], steps=4)

    assert bundle.eval_sft == []
    assert bundle.account.replay_share == 1.0
    assert bundle.account.fill_share == 1.0
    for batch in bundle.batches():
        last = np.diff(batch.segment_ids, axis=-1, append=-1) != 0
        assert ((batch.loss_weights == 1) == ~last).all()
    held = np.concatenate([b.tokens[b.segment_ids > 0] for b in bundle.eval_replay])
    assert len(held) == len(bundle.stores["heldout_replay"].tokens)


def test_evaluation_is_limited_to_so_many_windows_of_one_shape(build):
    rows = pairs(200)

    bundle = build(
        rows,
        replay=texts(5),
        heldout_replay=texts(90)[5:],
        heldout_share=0.5,
        max_eval_windows=5,
    )

    assert bundle.account.eval_sft_windows == bundle.account.eval_replay_windows == 5
    for batches in (bundle.eval_sft, bundle.eval_replay):
        assert [b.tokens.shape for b in batches] == [(2, 64)] * 3
        assert batches[-1].segment_ids[1].sum() == 0


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"steps": 9}, True),
        ({"batch_size": 3}, False),
        ({"accumulation": 2}, False),
        ({"window": 48}, False),
        ({"seed": 1}, False),
        ({"replay_share": 0.2}, False),
        ({"balance": 0.5}, False),
        ({"heldout_share": 0.5}, False),
        ({"thought": False}, False),
        ({"replay": texts(6)}, False),
        ({"sft": pairs(21)}, False),
        ({"sft": [pair("h0", "a0"), *pairs(20)[1:]]}, False),
        ({"sft": [pair("q0", "a0", weight=2), *pairs(20)[1:]]}, False),
    ],
)
def test_the_digest_covers_all_that_decides_what_is_seen(build, change, same):
    hybrid = {"prompt": "q", "thought": "t", "answer": "a"}
    base = {"sft": pairs(20), "replay": texts(5)}

    first, second = (
        build([*kw.pop("sft"), hybrid], **kw) for kw in (dict(base), base | change)
    )

    assert (first.plan_digest == second.plan_digest) is same


def test_fingerprints_name_files_tokenizer_and_template(build):
    first = build(pairs(3), replay=texts(2))
    again = build(pairs(3), replay=texts(2))
    other = build(pairs(3), replay=texts(3))

    assert first.fingerprints == again.fingerprints
    changed = {k for k, v in first.fingerprints.items() if other.fingerprints[k] != v}
    assert len(changed) == 1
    assert changed.pop().endswith("replay.jsonl")
    assert first.fingerprints["tokenizer"] == TOKENIZER.fingerprint


LOW = {"prompt": "q", "teacher_response": "a", "score": 0.1}
MANY = [pair(str(i), category=str(i)) for i in range(300)]


@pytest.mark.parametrize(
    ("kw", "message"),
    [
        ({}, "neither sft nor replay"),
        ({"sft": b"\n"}, r"data\.sft: .*sft\.jsonl has no rows"),
        ({"sft": b"\xef\xbb\xbf \r\n"}, r"data\.sft: .*sft\.jsonl has no rows"),
        ({"sft": b"junk\n"}, r"1 of 1 rows refused \(100%\).*sft\.jsonl:1: Expecting"),
        ({"sft": pairs(3), "heldout_share": 0.999999}, "nothing left to train: 3 rows"),
        ({"sft": pairs(3), "replay": pairs(2)}, "'completion' row; expected text"),
        ({"sft": [LOW], "min_score": 0.5}, r"0\.1 < data\.min_score = 0\.5"),
        ({"sft": pairs(3), "template": "no.jinja"}, r"data\.template: .*no such file"),
        ({"sft": MANY}, "256 categories"),
    ],
)
def test_mistakes_are_one_clear_line(build, kw, message):
    with pytest.raises(ValueError, match=message) as error:
        build(**kw)

    assert "\n" not in str(error.value)


BAD = {"prompt": "no answer"}


@pytest.mark.parametrize(
    ("role", "rows"),
    [
        ("sft", [*pairs(3), *[BAD] * 10]),
        ("replay", [{"text": "t"}] * 3 + [BAD] * 10),
        ("heldout_replay", [{"text": "held"}] * 3 + [BAD] * 10),
    ],
)
def test_good_rows_of_another_role_do_not_dilute_the_refused(build, role, rows):
    good = {
        "sft": pairs(100),
        "replay": [{"text": f"r{i}"} for i in range(100)],
        "heldout_replay": [{"text": f"h{i}"} for i in range(100)],
    }
    message = rf"data\.{role}: 10 of 13 rows refused \(77%\).*/{role}\.jsonl:4: keys"

    with pytest.raises(ValueError, match=message):
        build(**{**good, role: rows})


def test_what_stops_a_run_is_not_what_the_settings_asked_for(build):
    rows = [LOW] * 9 + [BAD] * 4 + pairs(3)

    with pytest.raises(
        ValueError, match=r"4 of 16 .*most often \(4\) 'unknown format'"
    ):
        build(rows, min_score=0.5)


def test_an_empty_file_is_an_error(write):
    with pytest.raises(ValueError, match=r"empty\.jsonl has no rows"):
        data_of(write(b"", "empty.jsonl"))


def test_a_missing_file_is_told_at_once_with_its_neighbours(write):
    path = write(pairs(1), "there.jsonl")
    start = time.monotonic()

    cfg = DataConfig(sft=(path, path.replace("there", "their")))
    with pytest.raises(ValueError, match=r"their\.jsonl.*no such file.*there\.jsonl"):
        build_data(cfg, TOKENIZER, vocab_size=512, steps=1, batch_size=1)
    with pytest.raises(ValueError, match=r"is in data\.sft already"):
        build_data(
            DataConfig(sft=(path, path)),
            TOKENIZER,
            vocab_size=512,
            steps=1,
            batch_size=1,
        )

    assert time.monotonic() - start < 1


def test_asset_names_stay_in_the_assets():
    for name in ("assets:../config.py", "assets:/etc/passwd", "assets:"):
        with pytest.raises(ValueError, match="name of a bundled file"):
            build_data(
                DataConfig(sft=(name,)),
                TOKENIZER,
                vocab_size=512,
                steps=1,
                batch_size=1,
            )


def test_a_prompt_is_what_training_put_before_the_answer(build):
    bundle = build([pair("who", "me")])

    store = bundle.stores["sft"]
    mask = store.weights == 0
    assert bundle.prompt_ids("who") == store.tokens[mask].tolist()


def test_a_jinja_template_is_used_and_fingerprinted(build, write, trained_texts):
    source = (
        b"{% for m in messages %}{{ m.role[0] }}:{% if m.role == 'assistant' %}"
        b"{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
        b"{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    path = write(source, "chat.jinja")
    rows = [*pairs(9), pair("<|user|>")]

    bundle = build(rows, template=path)

    assert trained_texts(bundle)[0] == "a0<|endoftext|>"
    assert bundle.account.template == "jinja"
    assert bundle.account.files[0].refused == {"spells a special token": 1}
    assert bundle.fingerprints["template"] != build(rows).fingerprints["template"]
    with pytest.raises(ValueError, match="spells a special token"):
        bundle.prompt_ids("<|user|>")


def test_a_text_to_be_continued_begins_as_training_text_does():
    tokenizer = ByteTokenizer(bos=True)
    run = {"vocab_size": 512, "steps": 1, "batch_size": 1}

    cfg = DataConfig(replay=("assets:data/replay_heldout.jsonl",), window=64)
    bundle = build_data(cfg, tokenizer, **run)

    store = bundle.stores["replay"]
    text = tokenizer.decode(store.tokens[1:9].tolist())
    assert bundle.text_ids(text) == store.tokens[:9].tolist()
