"""Serving the plan: resume at any step, any number of processes."""

import numpy as np
import pytest

from bitmamba.types import Batch

STEPS = 12


@pytest.fixture
def bundle(build):
    rows = [
        {"prompt": f"q{i}", "completion": "a" * (i % 17 + 1), "category": f"c{i % 3}"}
        for i in range(40)
    ]
    text = [{"text": f"{i} " + "x" * 90} for i in range(8)]
    return build(
        rows, replay=text, steps=STEPS, batch_size=4, accumulation=2, balance=0.5
    )


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_batches_have_the_accumulation_axis(bundle, build):
    batch = next(bundle.batches())

    assert isinstance(batch, Batch)
    assert {f.shape for f in batch} == {(2, 4, 64)}
    single = build([{"text": "abc"}])
    assert next(single.batches()).tokens.shape == (1, 2, 64)


def test_b044_a_resumed_run_sees_what_the_unbroken_one_saw(bundle):
    unbroken = list(bundle.batches())

    assert len(unbroken) == STEPS
    for start in range(0, STEPS, 5):
        resumed = list(bundle.batches(start))
        assert len(resumed) == STEPS - start
        assert all(map(equal, resumed, unbroken[start:]))


def test_b046_a_resume_at_the_end_ends_cleanly_and_after_it_is_refused(bundle):
    assert list(bundle.batches(STEPS)) == []
    for step in (STEPS + 1, -1):
        with pytest.raises(ValueError, match=f"start_step: got {step}; expected 0 to"):
            bundle.batches(step)


def test_b041_the_last_epoch_is_not_swallowed(build):
    """8 batches an epoch, 3 epochs, resumed at the end of the first."""
    rows = [{"input_ids": [10 + i] * 8} for i in range(16)]
    bundle = build(rows, window=8, steps=24, batch_size=2)

    first = [b for b, _ in zip(bundle.batches(), range(8), strict=False)]
    rest = list(bundle.batches(8))

    assert len(first) + len(rest) == 24
    seen = np.concatenate([b.tokens[..., 0].ravel() for b in [*first, *rest]])
    assert np.unique(seen, return_counts=True)[1].tolist() == [3] * 16


def test_b042_a_resume_inside_an_epoch_sees_its_remaining_rows(build):
    rows = [{"input_ids": [10 + i] * 8} for i in range(10)]
    bundle = build(rows, window=8, steps=20, batch_size=1)

    order = [int(b.tokens[0, 0, 0]) for b in bundle.batches()]
    resumed = [int(b.tokens[0, 0, 0]) for b in bundle.batches(15)]

    assert resumed == order[15:]
    assert sorted(order[10:15] + resumed) == list(range(10, 20))


@pytest.mark.parametrize(("saved", "resumed"), [(4, 2), (2, 1), (1, 4)])
def test_b047_b048_the_number_of_processes_may_change(bundle, saved, resumed):
    def joined(start, stop, count):
        streams = [
            bundle.batches(start, process_index=i, process_count=count)
            for i in range(count)
        ]
        for _ in range(start, stop):
            parts = [next(s).tokens for s in streams]
            yield np.concatenate(parts, axis=1)

    unbroken = [b.tokens for b in bundle.batches()]

    seen = [*joined(0, 5, saved), *joined(5, STEPS, resumed)]

    assert all(map(np.array_equal, seen, unbroken))


def test_tokens_of_a_step_are_counted_from_the_plan(bundle):
    counted = [np.count_nonzero(b.segment_ids) for b in bundle.batches()]

    assert [bundle.n_tokens(step) for step in range(STEPS)] == counted
    assert len(set(counted)) > 1


def test_more_steps_continue_the_same_run(build):
    rows = [{"text": f"text {i}"} for i in range(9)]

    short, long = build(rows, steps=3), build(rows, steps=6)

    assert short.plan_digest == long.plan_digest
    assert all(map(equal, short.batches(), long.batches()))
    assert len(list(long.batches(3))) == 3


def test_batches_are_read_ahead_and_dropped_without_trouble(bundle):
    iterator = bundle.batches(2)
    next(iterator)

    del iterator

    assert len(list(bundle.batches(10))) == 2
