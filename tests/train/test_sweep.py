"""A sweep: each arm is the ordinary run to the bit; diverged arms stop, alone."""

import dataclasses

import jax
import numpy as np
import pytest
from sweep_cases import STEPS, Data, make_config, run_sweep

from bitmamba.config import EvalConfig, LoraConfig, LoraRule, Rule
from bitmamba.train import build, restore, sweep, sweep_groups
from bitmamba.train.arms import make_arms
from bitmamba.train.divergence import Limits

pytestmark = [pytest.mark.newest, pytest.mark.usefixtures("programs_compiled_once")]


class NoCheckpoints:
    def restore_latest(self, *_):
        return None

    def save_frozen(self, _):
        return {}


def ordinary(config):
    """What train.py does with the config; its final state."""
    parts = build.build_parts(config, Data)
    begun = restore.start_or_resume(config, parts, NoCheckpoints())
    step, _ = build.compile_step(config, parts)
    state = begun.state
    for batch in Data().batches(0):
        state, _ = step(state, begun.held, batch)
    return state


def groups_of(arms, how):
    return sweep._groups(arms, sweep._plans(arms, Data()), how)[0]


def groups_after(arms, data, how):
    groups = groups_of(arms, how)
    for batch in data.batches(0):
        for group in groups:
            group.runner.step(batch, set(group.arms))()
    return groups


def assert_same_bits(a, b):
    for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def four_arms(name="adamw", mode="lora"):
    return make_arms(make_config(name, mode), lr=["1e-3", "3e-2"], wd=["0", "0.1"])


@pytest.fixture(scope="module")
def in_turn():
    """Four arms of adapters under AdamW after all steps, and the data they read."""
    data = Data()
    (group,) = groups_after(four_arms(), data, "in_turn")
    return group, data


def assert_ordinary(group, arms):
    ends = []
    for i in group.arms:
        state = group.runner.state(i)
        assert_same_bits(state, ordinary(arms[i].config))
        ends.append(jax.tree.leaves(state.trainable)[0].tobytes())
    assert len(set(ends)) == len(arms)


def test_every_arm_is_the_ordinary_run_to_the_bit(in_turn):
    group, data = in_turn

    assert_ordinary(group, four_arms())
    assert data.read == STEPS


@pytest.mark.once
def test_every_arm_is_the_ordinary_run_with_adafactor_and_all_parameters_too():
    arms = four_arms("adafactor", "full")

    (group,) = groups_after(arms, Data(), "in_turn")

    assert_ordinary(group, arms)


def test_arms_of_a_rank_share_one_program_and_all_ranks_one_base():
    arms = make_arms(make_config(), lr=["1e-3", "1"], wd=["0", "0.1"], rank=["2", "3"])
    texts = []
    for arm in (arms[0], arms[3], arms[4]):
        parts = build.build_parts(arm.config, Data)
        shapes = build.state_shape(parts), parts.held, build.batch_shape(arm.config)
        texts.append(parts.step.lower(*shapes).as_text())

    groups = groups_of(arms, "in_turn")

    assert texts[0] == texts[1] != texts[2]
    assert [group.arms for group in groups] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    helds = [held for group in groups for held in group.helds.values()]
    for leaves in zip(*(jax.tree.leaves(h.weights) for h in helds), strict=True):
        assert all(leaf is leaves[0] for leaf in leaves)


@pytest.mark.once
def test_arms_together_are_those_in_turn_up_to_rounding(in_turn):
    turn, _ = in_turn
    arms = four_arms()

    (both,) = groups_after(arms, Data(), "together")

    for i in turn.arms:
        a, b = turn.runner.state(i), both.runner.state(i)
        assert jax.tree.structure(a) == jax.tree.structure(b)
        for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-6)
    is_equal, quicker = sweep_groups.compare(
        turn.compiled, both.compiled, turn.parts, arms
    )
    assert isinstance(is_equal, bool)
    assert quicker > 0


def test_a_diverging_arm_is_stopped_and_named_and_the_others_finish(tmp_path, capsys):
    data = Data()

    # The final norm bounds the losses of so small a model: a low limit will do.
    code, found = run_sweep(
        tmp_path,
        make_config(),
        data,
        Limits(factor=1.02),
        lr=["1e-3", "30"],
        wd=["0", "0.1"],
    )

    assert code == 0
    assert data.read == STEPS
    good, _, bad, _ = found["arms"]
    assert good["diverged"] is None
    assert [row["step"] for row in good["evaluations"]] == [0, 2, 4]
    start = good["evaluations"][0]["eval/loss"]
    assert all(a["evaluations"][0]["eval/loss"] == start for a in found["arms"])
    assert bad["diverged"]["step"] == 4
    assert "held-out loss" in bad["diverged"]["cause"]
    assert any("Decay is not the cause" in s for s in found["findings"])
    assert any("learning rate is the cause" in s for s in found["findings"])
    assert found["command"] == f"train lr={found['arms'][found['best']]['lr']!r}"
    shown = capsys.readouterr().out
    assert "best: " in shown
    assert "the others go on" in shown
    assert (tmp_path / "sweep.png").stat().st_size > 1000


def test_numbers_that_are_not_finite_stop_an_arm_after_max_bad_steps(tmp_path):
    config = make_config()
    config = dataclasses.replace(
        config, train=dataclasses.replace(config.train, max_bad_steps=2)
    )
    limits = Limits(factor=1e30, looks=9, max_bad_steps=2)

    code, found = run_sweep(tmp_path, config, Data(), limits, lr=["1e-3", "1e30"])

    assert code == 0
    assert found["arms"][0]["diverged"] is None
    # Even the first update, of 1e30 in size, is skipped: its norm is infinite.
    assert found["arms"][1]["diverged"]["step"] == 2
    assert "not finite, 2 steps in a row" in found["arms"][1]["diverged"]["cause"]


def test_only_diverged_arms_is_bad_numbers_and_ends_early(tmp_path):
    data = Data()
    config = dataclasses.replace(make_config(), eval=EvalConfig(every=1))

    code, found = run_sweep(
        tmp_path, config, data, Limits(factor=1.01), lr=["30", "60"]
    )

    assert code == 3
    assert found["best"] is None
    assert found["command"] is None
    assert found["done"] < STEPS
    assert data.read < STEPS


def test_lists_that_change_nothing_are_mistakes():
    config = make_config()
    flat = dataclasses.replace(
        config.optim, rules=(Rule(pattern=".*", decay=False, name="all"),)
    )
    no_decay = make_arms(dataclasses.replace(config, optim=flat), wd=["0", "0.1"])
    with pytest.raises(ValueError, match="--wd: got decays that change nothing"):
        sweep._plans(no_decay, Data())

    rules = LoraConfig(rank=2, alpha=4.0, rules=(LoraRule(pattern=".*", rank=2),))
    same = make_arms(dataclasses.replace(config, lora=rules), rank=["2", "3"])
    with pytest.raises(ValueError, match="--rank: got ranks that change nothing"):
        sweep._plans(same, Data())


def test_without_held_out_data_there_is_nothing_to_compare_arms_on(tmp_path):
    data = Data(eval_sft=())
    data.eval_replay = ()
    with pytest.raises(ValueError, match="no held-out data"):
        run_sweep(tmp_path, make_config(), data, lr=["1"])


def test_the_budget_is_checked_before_anything_trains(tmp_path):
    config = dataclasses.replace(make_config(), memory_gb=1e-6)
    with pytest.raises(ValueError, match=r"config\.memory_gb: the sweep needs"):
        run_sweep(tmp_path, config, Data(), lr=["1e-3"])
