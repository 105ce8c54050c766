"""Parameter groups: rules over paths to multipliers, decay, freezing, and a table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bitmamba.config import Rule
from bitmamba.paths import assign, first_match, flatten, split
from bitmamba.types import Params


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Which rule decides for which parameter.

    rules, names: as configured; a group is named by its rule.
    index: parameter path -> index of its rule, in sorted order of the paths.
    """

    rules: tuple[Rule, ...]
    names: tuple[str, ...]
    index: Mapping[str, int]

    def rule(self, path: str) -> Rule:
        """The rule that decides for this parameter."""
        return self.rules[self.index[path]]

    def is_frozen(self, path: str) -> bool:
        """Whether a rule keeps this parameter out of training."""
        return self.rule(path).freeze

    def members(self, params: Params) -> dict[str, list[str]]:
        """Group name -> its paths among `params`; empty groups left out."""
        paths = list(flatten(params))
        found = {
            name: [path for path in paths if self.index[path] == i]
            for i, name in enumerate(self.names)
        }
        return {name: paths for name, paths in found.items() if paths}


class GroupRow(NamedTuple):
    """One line of the table printed at the start."""

    name: str
    pattern: str
    lr_mult: float
    decay: bool
    frozen: bool
    leaves: int
    parameters: int


def group_names(rules: Sequence[Rule]) -> tuple[str, ...]:
    """Each rule's name, or one made from its place (see `config.Rule`).

    Raises:
        ValueError: a name twice, or one that cannot be part of a metric's key.
    """
    names = []
    for i, rule in enumerate(rules):
        rest = "all" if len(rules) == 1 else "rest"
        made = rest if rule.pattern == ".*" else f"rule{i}"
        name = made if rule.name is None else rule.name
        if not name or "/" in name or name in names:
            raise ValueError(
                f"optim.rules[{i}].name: got {name!r}; expected a name that is not "
                "empty, has no '/', and differs from the others; rename the rule"
            )
        names.append(name)
    return tuple(names)


def assign_groups(rules: Sequence[Rule], params: Params) -> Groups:
    """Find the rule of every parameter of the whole model, frozen ones included.

    Rules are read in order and the first whose pattern matches the whole path wins.

    Args:
        rules: `OptimConfig.rules`.
        params: the tree of all parameters, or of their shapes.

    Returns:
        Groups.

    Raises:
        ValueError: a parameter that no rule matches; a rule that decides for none and
            is not `optional`; a bad name.
    """
    names = group_names(rules)
    paths = list(flatten(params))
    patterns = [rule.pattern for rule in rules]
    decisive = {first_match(path, patterns) for path in paths}
    kept = [i for i, r in enumerate(rules) if i in decisive or not r.optional]
    chosen = assign(paths, [patterns[i] for i in kept], where="optim.rules")
    index = {path: kept[c] for path, c in zip(paths, chosen, strict=True)}
    return Groups(rules=tuple(rules), names=names, index=index)


def split_frozen(
    rules: Sequence[Rule], params: Params
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the whole model into (trainable, frozen by a rule)."""
    groups = assign_groups(rules, params)
    return split(params, lambda path: not groups.is_frozen(path))


def trainable_groups(rules: Sequence[Rule], trainable: Params) -> Groups:
    """The groups of what is left to train; rules may have lost all their parameters.

    Raises:
        ValueError: nothing to train, a parameter without a rule, or a frozen one.
    """
    paths = list(flatten(trainable))
    if not paths:
        raise ValueError(
            "optim.rules: got no parameter to train; expected at least one; "
            "remove freeze from a rule"
        )
    patterns = [rule.pattern for rule in rules]
    index = {path: first_match(path, patterns) for path in paths}
    for path, i in index.items():
        if i is None:
            assign([path], patterns, where="optim.rules")
        elif rules[i].freeze:
            raise ValueError(
                f"optim.rules[{i}]: {path!r} is frozen but was given to the optimiser; "
                "expected trainable parameters only; use split_frozen"
            )
    return Groups(rules=tuple(rules), names=group_names(rules), index=index)


def group_table(
    rules: Sequence[Rule], params: Params, trainable: Params | None = None
) -> list[GroupRow]:
    """One row a rule, in order, over the whole model; raises as `assign_groups`.

    Args:
        rules: of the optimiser.
        params: the whole model.
        trainable: what trains; None is all that no rule freezes. A row counts what
            trains of it, or else all, as frozen.
    """
    groups = assign_groups(rules, params)
    flat = flatten(params)
    trains = {p for p in flat if not groups.is_frozen(p)}
    if trainable is not None:
        trains &= set(flatten(trainable))
    rows = []
    for i, (rule, name) in enumerate(zip(groups.rules, groups.names, strict=True)):
        mine = {p for p, c in groups.index.items() if c == i}
        sizes = [math.prod(flat[p].shape) for p in mine & trains or mine]
        rows.append(
            GroupRow(
                name=name,
                pattern=rule.pattern,
                lr_mult=rule.lr_mult,
                decay=rule.decay,
                frozen=rule.freeze or (bool(mine) and not mine & trains),
                leaves=len(sizes),
                parameters=sum(sizes),
            )
        )
    return rows
