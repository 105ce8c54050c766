"""Rules over paths: first match wins, and nothing is left out or idle."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitmamba import paths

TREE = {"embed": {"embedding": 1}, "layer_0": {"mixer": {"A_log": 2, "D": 3}}}
NAMES = ["embed/embedding", "layer_0/mixer/A_log", "layer_0/mixer/D"]


def test_flatten_sorts_and_unflatten_is_its_inverse():
    assert list(paths.flatten(TREE)) == NAMES
    assert paths.unflatten(paths.flatten(TREE)) == TREE


def test_the_first_matching_rule_decides_on_the_whole_path():
    rules = [".*/A_log", "layer_0/.*", ".*"]

    assert paths.assign(NAMES, rules, where="rules") == [2, 0, 1]
    assert paths.first_match("layer_0/mixer/A_log/x", [".*/A_log"]) is None


def test_a_parameter_without_a_rule_is_named():
    with pytest.raises(ValueError, match=r"rules: 1 parameters .*embed/embedding"):
        paths.assign(NAMES, ["layer_0/.*"], where="rules")


@pytest.mark.parametrize("rules", [[".*/A_lg", ".*"], [".*", ".*/A_log"]])
def test_a_rule_that_decides_nothing_is_an_error(rules):
    with pytest.raises(ValueError, match="decides for no parameter"):
        paths.assign(NAMES, rules, where="rules")


@given(st.sets(st.sampled_from(NAMES)))
def test_split_and_merge_are_inverse(chosen):
    first, rest = paths.split(TREE, lambda path: path in chosen)

    assert set(paths.flatten(first)) == chosen
    assert paths.merge(first, rest) == TREE
