"""A run that does nothing says so; numbers that are not finite go nowhere."""

import jax.numpy as jnp
import numpy as np
import pytest

from bitmamba.io.load import check_finite
from bitmamba.io.tokenizer import load_tokenizer
from bitmamba.train.noop import NoopWatch
from bitmamba.train.restore import _check_params


def row(norm=1.0, *, tokens=9.0, lr=1e-3, lost=0.0):
    return {
        "loss_tokens": tokens,
        "lr": lr,
        "optim/weights/update_norm": norm,
        "optim/weights/lost_share": lost,
        "optim/state/update_norm": 1.0,
    }


def looked(rows):
    watch = NoopWatch()
    lines = [watch.look(i, r) for i, r in enumerate(rows, start=1)]
    return watch, [line for some in lines for line in some]


def test_a_healthy_run_is_not_complained_about():
    watch, lines = looked([row()] * 9)

    assert (lines, watch.verdict()) == ([], None)


def test_a_step_without_a_token_is_told_once_and_counted():
    watch, lines = looked([row(), row(tokens=0.0), row(tokens=0.0)])

    (line,) = lines
    assert line.startswith("step 2: not one token to train")
    assert watch.empty_steps == 2
    assert watch.verdict() is None


@pytest.mark.parametrize(
    ("rows", "start"),
    [
        ([row(0.0)] * 5, "step 3: group 'weights' has not moved in 3 steps"),
        ([row(lost=0.6)] * 5, "step 3: more than half of the updates of group"),
    ],
    ids=["still", "lost"],
)
def test_a_group_that_does_not_move_is_named_once(rows, start):
    _, (line,) = looked(rows)

    assert line.startswith(start)


def test_one_odd_step_is_no_alarm_and_neither_is_a_rate_of_zero():
    odd = [row(0.0), row(0.0), row(), row(0.0), row(0.0)]

    assert looked(odd)[1] == []
    assert looked([row(0.0, lr=0.0)] * 9)[1] == []


def test_a_run_in_which_nothing_was_trained_is_no_success():
    still = [r | {"optim/state/update_norm": 0.0} for r in [row(0.0)] * 4]

    assert "every update of 4 steps was exactly zero" in looked(still)[0].verdict()
    assert "no step had a token" in looked([row(tokens=0.0)] * 2)[0].verdict()
    assert looked([])[0].verdict() is None


def test_parameters_that_are_not_finite_are_refused_by_place():
    tree = {"a": np.ones((2, 3), np.float32), "n": np.arange(3)}
    check_finite(tree, where="here")
    tree["b"] = np.asarray(jnp.ones((2, 3), jnp.bfloat16).at[1, 2].set(jnp.inf))

    with pytest.raises(ValueError, match=r"here: b: 1 of 6 .* first at \(1, 2\)"):
        check_finite(tree, where="here")


def test_a_run_does_not_begin_from_a_base_that_is_not_finite():
    base = {"embed": {"embedding": np.full((2, 2), np.nan, np.float32)}}

    with pytest.raises(ValueError, match=r"init_from=runs/a: embed/embedding: 4 of 4"):
        _check_params("runs/a", base, base)


def test_ids_that_the_byte_tokenizer_lacks_are_left_out_of_a_text():
    tokenizer = load_tokenizer("bytes")  # of a model with a padded vocabulary

    assert tokenizer.decode([*tokenizer.encode("Hi"), 4095]) == "Hi"
