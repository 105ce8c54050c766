"""Files to stores: what becomes of every row."""

import numpy as np
import pytest

from bitmamba.io.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()


def pair(prompt="q", answer="a", **more):
    return {"prompt": prompt, "completion": answer, **more}


def pairs(n, **more):
    return [pair(f"q{i}", f"a{i}", **more) for i in range(n)]


def texts(n, size=50):
    return [{"text": f"{i:03d} " + "x" * size} for i in range(n)]


def check_sums(account):
    for file in account.files:
        refused = sum(file.refused.values())
        assert file.rows == file.trained + file.held_out + refused, file.path


def test_every_row_is_accounted_for(build):
    rows = [pair(), {"x": 1}, pair(answer=None), *texts(2, size=200), pair("p" * 99)]
    rows += [
        {**pair(f"s{i}"), "teacher_response": "r", "score": i / 4} for i in range(5)
    ]
    for row in rows[-5:]:
        del row["completion"]

    bundle = build(rows, min_score=0.5, max_refused_share=0.5, replay=texts(3))

    file = bundle.account.files[0]
    check_sums(bundle.account)
    assert file.rows == 11
    assert file.trained == 6
    assert dict(file.refused) == {
        "unknown format": 1,
        "not text": 1,
        "no trained token in the window": 1,
        "score too low": 2,
    }
    assert file.examples["unknown format"][0].startswith(f"{file.path}:2: keys: x")
    assert file.notes["texts longer than a window, split"] == 2
    assert file.formats == {"completion": 2, "text": 2, "scored": 5}
    assert any(
        "11 rows = 6 trained + 0 held out + 5" in x for x in bundle.account.lines()
    )


SCORED = [
    {"prompt": "q", "teacher_response": "a"},
    {"prompt": "q", "completion": "a"},
    {
        "prompt": [{"role": "user", "content": "q"}],
        "completion": [{"role": "assistant", "content": "a"}],
    },
    {"prompt": "q", "answer": "a", "thought": "t"},
    {"instruction": "q", "output": "a"},
    {"messages": [{"role": r, "content": "x"} for r in ("user", "assistant")]},
    {"conversations": [{"from": f, "value": "x"} for f in ("human", "gpt")]},
    {"text": "t"},
    {"input_ids": [5, 6]},
]


@pytest.mark.parametrize("row", SCORED, ids=lambda row: "+".join(row))
def test_a_score_filters_a_row_of_any_format(build, row):
    scores = (0.1, 0, 0.6, 1, "1", None, True)
    rows = [row, *({**row, "score": score} for score in scores)]

    file = build(rows, min_score=0.6, max_refused_share=0.5).account.files[0]

    assert file.trained == 3
    assert file.refused == {"score too low": 2, "not a number": 3}
    (unfiltered,) = build(rows, max_refused_share=0.5).account.files
    assert (unfiltered.trained, unfiltered.refused) == (5, {"not a number": 3})


def test_a_key_of_replay_text_named_score_is_the_corpus_own(build):
    rows = [{"text": f"t{i}", "score": s} for i, s in enumerate((0.1, "high", None))]

    bundle = build(pairs(2), replay=rows, min_score=0.6)

    assert bundle.account.files[1].trained == 3


def test_b001_the_mark_changes_no_token(build, write, tmp_path):
    plain = build(pairs(2))
    data = (tmp_path / "sft.jsonl").read_bytes()

    marked = build(b"\xef\xbb\xbf" + data)

    assert marked.stores["sft"].digest() == plain.stores["sft"].digest()
    assert sum("byte-order mark" in x for x in marked.account.lines()) == 1


def test_b006_an_escaped_emoji_has_the_tokens_of_the_emoji(build):
    escaped = build(rb'{"prompt":"\ud83c\udf78","completion":"x"}')
    raw = build('{"prompt":"\U0001f378","completion":"x"}'.encode())

    assert escaped.stores["sft"].digest() == raw.stores["sft"].digest()


def test_b004_a_lone_surrogate_trains_and_is_told(build, trained_texts):
    bundle = build(rb'{"prompt":"bad \ud83d char","completion":"ok"}')

    assert trained_texts(bundle) == ["ok<|endoftext|>"]
    assert any("lone surrogates" in line for line in bundle.account.lines())


def test_b011_fewer_rows_than_a_batch_train_in_more_epochs(build):
    bundle = build(pairs(18), steps=3, batch_size=32)

    batches = list(bundle.batches())
    assert len(batches) == 3
    assert all((b.loss_weights.sum(axis=-1) > 0).all() for b in batches)
    assert bundle.account.windows == 96
    assert bundle.account.epochs > 18


def test_b013_a_token_past_the_vocabulary_stops_with_id_and_row(build):
    rows = [{"input_ids": [1, 127]}, {"input_ids": [5, 128]}]

    with pytest.raises(ValueError, match=r"sft\.jsonl:2: token id 128; expected < 128"):
        build(rows, vocab_size=128)
    assert build(rows, vocab_size=129)
    with pytest.raises(ValueError, match=r"sft\.jsonl:1: token id .*model\.vocab_size"):
        build(pairs(1), vocab_size=50)
    with pytest.raises(ValueError, match="end-of-text has id 1; expected < 1 "):
        build(pairs(1), vocab_size=1)


@pytest.mark.parametrize("window", [32, 24, 16])
def test_b015_a_prompt_that_fills_the_window_is_counted_or_an_error(build, window):
    long, short = pair("p" * 38, "abc"), pair("q", "a")

    bundle = build([long, short], window=window, max_refused_share=0.5)
    assert bundle.account.files[0].refused == {"no trained token in the window": 1}

    with pytest.raises(ValueError, match=r"2 of 2 rows refused.*raise data\.window"):
        build([long, long], window=window)
    with pytest.raises(ValueError, match=r"nothing left to train.*raise data\.window"):
        build([long, long], window=window, max_refused_share=1.0)


def test_b016_evaluation_windows_always_have_something_to_measure(build):
    rows = [*pairs(60), pair("p" * 99)]

    bundle = build(rows, heldout_share=0.5)

    assert bundle.account.files[0].held_out > 10
    assert bundle.account.files[0].refused == {"no trained token in the window": 1}
    totals = [b.loss_weights.sum() for b in bundle.eval_sft]
    assert all(np.isfinite(totals))
    assert min(totals) > 0


@pytest.mark.parametrize("long", ["truncate", "refuse"])
def test_b017_long_rows_never_starve_the_windows(build, long):
    rows = [{"input_ids": [9] * 12}] * 100 + [{"input_ids": [8] * 6}] * 5

    bundle = build(rows, window=8, long_examples=long, max_refused_share=1.0, steps=20)

    file = bundle.account.files[0]
    if long == "truncate":
        assert (file.truncated, file.trained) == (100, 105)
    else:
        assert (file.refused, file.trained) == ({"longer than the window": 100}, 5)
    for batch in bundle.batches():
        assert (batch.segment_ids.max(axis=-1) > 0).all()
        assert (batch.loss_weights.sum(axis=-1) > 0).all()


def test_an_answer_that_is_cut_has_no_end_of_text(build, trained_texts):
    bundle = build([pair("q", "a" * 100)], window=32)

    assert trained_texts(bundle) == ["a" * 29]


def test_b018_the_last_trained_token_is_end_of_text(build, trained_texts):
    assert trained_texts(build([pair("q", "yes")])) == ["yes<|endoftext|>"]


def test_b038_held_out_rows_are_never_trained_in_any_epoch(build, trained_texts):
    rows = pairs(40)

    bundle = build([*rows, *rows[:10]], heldout_share=0.3, steps=30, batch_size=4)

    held, kept = trained_texts(bundle, "sft_heldout"), trained_texts(bundle)
    assert 5 < len(set(held)) < 25
    assert not set(held) & set(kept)
    assert bundle.account.epochs > 3
    trained = "".join(TOKENIZER.decode(b.tokens.ravel()) for b in bundle.batches())
    for answer in held:
        assert f">{answer}" not in trained
    for answer in kept:
        assert f">{answer}" in trained
    assert bundle.account.files[0].notes["rows that repeat an earlier one"] == 10


def test_added_rows_leave_the_others_on_their_side(build, trained_texts):
    few = build(pairs(30), heldout_share=0.3)
    more = build([*pairs(60)[::-1]], heldout_share=0.3)

    assert set(trained_texts(few)) <= set(trained_texts(more))
    held = set(trained_texts(few, "sft_heldout"))
    assert held <= set(trained_texts(more, "sft_heldout"))


def test_text_that_is_held_out_is_not_trained(build):
    bundle = build(replay=texts(10), heldout_replay=texts(3), max_refused_share=0.0)

    assert bundle.account.files[1].refused == {"also in the held-out text": 3}
    assert len(bundle.stores["replay"].sources) == 7
    assert bundle.account.files[0].held_out == 3
