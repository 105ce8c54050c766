"""Rules over paths: first match wins, everything is covered, frozen means no state."""

import jax
import jax.numpy as jnp
import pytest

from bitmamba.config import OptimConfig, Rule
from bitmamba.optim import (
    GroupRow,
    assign_groups,
    group_table,
    make_optimizer,
    split_frozen,
)

STATE = Rule(pattern=r".*/(A_log|D|dt_bias)", name="state", lr_mult=50, decay=False)
EMBED = Rule(pattern=r"embed/.*", name="embed", freeze=True)
REST = Rule(pattern=".*")


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


PARAMS = {
    "embed": {"embedding": shape(32, 8)},
    "layer_0": {
        "norm": {"scale": shape(8)},
        "mixer": {"in_proj": {"kernel": shape(8, 20)}, "A_log": shape(4)},
    },
    "layer_1": {"mixer": {"q_proj": {"kernel": shape(8, 8)}}},
}
NO_SSM = {"layer_1": PARAMS["layer_1"]}


def test_every_parameter_has_the_first_rule_that_matches():
    groups = assign_groups((STATE, EMBED, REST), PARAMS)

    assert groups.index == {
        "embed/embedding": 1,
        "layer_0/mixer/A_log": 0,
        "layer_0/mixer/in_proj/kernel": 2,
        "layer_0/norm/scale": 2,
        "layer_1/mixer/q_proj/kernel": 2,
    }
    assert groups.rule("layer_0/mixer/A_log").lr_mult == 50
    assert groups.is_frozen("embed/embedding")
    assert not groups.is_frozen("layer_0/norm/scale")


def test_the_table_counts_each_rule_and_frozen_ones_too():
    rows = group_table((STATE, EMBED, REST), PARAMS)

    assert rows == [
        GroupRow("state", STATE.pattern, 50, False, False, 1, 4),
        GroupRow("embed", "embed/.*", 1.0, True, True, 1, 256),
        GroupRow("rest", ".*", 1.0, True, False, 3, 8 + 160 + 64),
    ]


def test_the_table_counts_what_trains_where_not_all_does():
    head = {"layer_1": PARAMS["layer_1"]}

    rows = group_table((STATE, REST), PARAMS, head)

    assert [(r.name, r.frozen, r.parameters) for r in rows] == [
        ("state", True, 4),
        ("rest", False, 64),
    ]


def test_an_uncovered_parameter_is_named():
    with pytest.raises(ValueError, match=r"2 parameters match no rule, e\.g\. 'lay"):
        assign_groups(
            (STATE, EMBED, Rule(pattern=".*kernel")),
            PARAMS | {"layer_2": {"norm": {"scale": shape(8)}}},
        )


def test_a_rule_without_parameters_is_refused_unless_optional():
    """The default presets serve models with and without state-space layers."""
    optional = Rule(pattern=STATE.pattern, name="state", optional=True)

    with pytest.raises(ValueError, match=r"optim\.rules\[0\]: pattern .*A_log"):
        assign_groups((STATE, REST), NO_SSM)
    groups = assign_groups((optional, REST), NO_SSM)

    assert groups.index == {"layer_1/mixer/q_proj/kernel": 1}
    assert group_table((optional, REST), NO_SSM)[0].parameters == 0


def test_the_default_rules_suit_every_model():
    for params in (PARAMS, NO_SSM):
        assert group_table(OptimConfig().rules, params)[0].name == "all"


@pytest.mark.parametrize("name", ["", "a/b", "rest"])
def test_names_that_spoil_the_metrics_are_refused(name):
    with pytest.raises(ValueError, match=r"optim\.rules\[1\]\.name: got|rules\[0\]"):
        assign_groups((Rule(pattern="layer_0/.*", name=name), REST), PARAMS)


def test_a_frozen_parameter_is_split_off_and_has_no_state():
    trainable, frozen = split_frozen((STATE, EMBED, REST), PARAMS)
    cfg = OptimConfig(name="adamw", rules=(STATE, EMBED, REST))

    state = jax.eval_shape(make_optimizer(cfg, trainable, steps=1).init, trainable)

    assert frozen == {"embed": PARAMS["embed"]}
    assert "embed" not in state["precondition"].mu
    assert set(state["precondition"].mu) == {"layer_0", "layer_1"}


def test_an_optimizer_of_part_of_the_model_accepts_all_rules():
    """Head-only training leaves rules without a parameter; that is no mistake."""
    head = {"lm_head": {"kernel": shape(8, 32)}}
    cfg = OptimConfig(rules=(STATE, EMBED, REST))

    groups = make_optimizer(cfg, head, steps=1).groups

    assert groups.members(head) == {"rest": ["lm_head/kernel"]}


def test_frozen_uncovered_or_no_parameters_are_refused_by_the_optimizer():
    with pytest.raises(ValueError, match="'embed/embedding' is frozen"):
        make_optimizer(OptimConfig(rules=(EMBED, REST)), PARAMS, steps=1)
    with pytest.raises(ValueError, match="match no rule"):
        make_optimizer(OptimConfig(rules=(STATE,)), PARAMS, steps=1)
    with pytest.raises(ValueError, match="no parameter to train"):
        make_optimizer(OptimConfig(), {}, steps=1)
