"""The watch over the first steps: who never has a gradient is named."""

import pytest

from bitmamba.train.watch import STEPS, ZeroWatch

PATHS = ["in/a", "in/b", "A_log"]
ALL_MOVE = [False, False, False]


def test_a_factor_may_be_still_while_its_partner_is_zero():
    watch = ZeroWatch(PATHS)

    watch.look([False, True, False], [True, False, False])  # b = 0, so a rests
    for _ in range(STEPS - 1):
        watch.look(ALL_MOVE, ALL_MOVE)

    assert watch.is_over


def test_a_partner_that_stays_zero_is_the_one_that_is_named():
    watch = ZeroWatch(PATHS)
    for _ in range(STEPS - 1):
        watch.look([False, True, False], [True, True, False])

    with pytest.raises(ValueError, match=r"in/b: its gradient .* \(1 such in all\)"):
        watch.look([False, True, False], [True, True, False])


@pytest.mark.parametrize("still", range(3), ids=PATHS)
def test_a_leaf_without_any_gradient_is_named_after_the_first_steps(still):
    zero = [index == still for index in range(3)]
    watch = ZeroWatch(PATHS)
    for _ in range(STEPS - 1):
        watch.look(ALL_MOVE, zero)

    with pytest.raises(ValueError, match=f"^{PATHS[still]}: "):
        watch.look(ALL_MOVE, zero)


def test_later_steps_are_not_watched():
    watch = ZeroWatch(PATHS)
    for step in range(STEPS):
        assert not watch.is_over, step
        watch.look(ALL_MOVE, ALL_MOVE)

    watch.look(ALL_MOVE, [True, True, True])

    assert watch.is_over
