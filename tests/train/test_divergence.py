"""When an arm counts as diverged."""

import pytest

from bitmamba.train.divergence import Divergence, Limits


@pytest.mark.parametrize(
    ("losses", "step"),
    [
        ([1.0, 1.4, 1.49, 1.2], None),
        ([1.6, 1.0, 1.6, 1.0], None),
        ([1.0, 1.6, 1.6, 1.0], 3),
        ([1.0, 1.0, 1.0, 1.6], 4),
        ([1.0, float("nan"), float("inf"), 1.0], 3),
    ],
)
def test_a_held_out_loss_must_stay_high_for_two_looks_or_to_the_end(losses, step):
    looks = Divergence(Limits(factor=1.5, looks=2), base_loss=1.0)

    for number, loss in enumerate(losses, start=1):
        looks.evaluation(number, loss)
    looks.end(4)

    assert (looks.found and looks.found.step) == step


def test_training_losses_are_looked_at_ten_steps_at_a_time():
    looks = Divergence(Limits(factor=1.5, looks=2), base_loss=2.0)

    for number in range(1, 41):
        loss = 1.0 if number <= 10 else 3.1
        looks.step(number, loss, bad_in_row=0, where="loss")

    assert looks.found == (30, "training loss 3.1000 > 1.5 x 2.0000")
