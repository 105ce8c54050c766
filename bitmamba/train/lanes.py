"""A traced program, run operation by operation in two precisions side by side.

Each value is held once a lane: lane 0 as the program was traced, the last in float64.
Every operation is looked at: one whose result is not finite, or unlike in the two
lanes, although its inputs are neither, is an origin; whatever was made from such a
result carries the origin's number along.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core

from bitmamba.train.lanes_bind import bind, cast, is_float

WILD = 0.25  # of the norm: rounding to codes alone moves less than a tenth of this


class Lane(NamedTuple):
    """name, and what a float dtype of the program becomes in it."""

    name: str
    dtype: Callable[[Any], Any]


class Value(NamedTuple):
    """An array a lane, and the numbers of the origins that spoiled it."""

    lanes: tuple[Any, ...]
    origins: frozenset[int] = frozenset()


class Origin(NamedTuple):
    """An operation that made bad numbers of good ones.

    scope: names of modules and functions, outermost first. primitive: its name.
    source: file, line and function of ours. bad: names of the lanes that are not
    finite, or () if they are unlike. index: of the first bad element of the result.
    shape: of the result. largest: the largest magnitude in each of its float inputs.
    zeros: for each float input, whether it holds a zero.
    """

    number: int
    scope: str
    primitive: str
    source: str
    bad: tuple[str, ...]
    index: tuple[int, ...]
    shape: tuple[int, ...]
    largest: tuple[float, ...]
    zeros: tuple[bool, ...]


class Seen(NamedTuple):
    """First bad element of a result that an origin spoiled, and the scans it is in."""

    shape: tuple[int, ...]
    index: tuple[int, ...]
    rounds: tuple[int, ...]


class Run:
    """One pass through a program; collects `origins` and where each was first seen."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.lanes = tuple(lanes)
        self.origins: list[Origin] = []
        self.seen: dict[int, list[Seen]] = {}
        self.rounds: list[int] = []  # of the scans around, outermost first

    def value(self, array: Any) -> Value:
        """An input of the program in every lane."""
        return Value(tuple(cast(array, lane.dtype) for lane in self.lanes))

    def evaluate(
        self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Value], scope: str
    ) -> list[Value]:
        """The outputs of a jaxpr; `scope` is where it was called."""
        env: dict[Any, Value] = {}
        last_use = {v: i for i, e in enumerate(jaxpr.eqns) for v in _variables(e)}
        env.update(zip(jaxpr.constvars, map(self.value, consts), strict=True))
        env.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom):
            if isinstance(atom, core.Literal):
                return self.value(np.asarray(atom.val, atom.aval.dtype))
            return env[atom]

        keep = {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}
        for i, eqn in enumerate(jaxpr.eqns):
            outputs = self._equation(eqn, [read(v) for v in eqn.invars], scope)
            env.update(zip(eqn.outvars, outputs, strict=True))
            for v in _variables(eqn):
                if last_use[v] == i and v not in keep:
                    env.pop(v, None)
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn, inputs: list[Value], scope: str) -> list[Value]:
        scope = "/".join(filter(None, (scope, str(eqn.source_info.name_stack))))
        if special := _CALLS.get(eqn.primitive.name):
            return special(self, eqn, inputs, scope)
        results = [
            bind(eqn, [v.lanes[k] for v in inputs], lane.dtype)
            for k, lane in enumerate(self.lanes)
        ]
        return [
            self._look(eqn, inputs, lanes, scope)
            for lanes in zip(*results, strict=True)
        ]

    def _look(self, eqn, inputs: list[Value], lanes: tuple, scope: str) -> Value:
        bad, mask = _badness(self.lanes, lanes)
        if mask is None:
            return Value(lanes)
        index = tuple(map(int, np.argwhere(mask)[0]))
        origins = frozenset().union(*(v.origins for v in inputs))
        if not origins:
            floats = [x for x in (v.lanes[0] for v in inputs) if is_float(x)]
            origins = frozenset({len(self.origins)})
            self.origins.append(
                Origin(
                    number=len(self.origins),
                    scope=scope,
                    primitive=eqn.primitive.name,
                    source=_source(eqn),
                    bad=bad,
                    index=index,
                    shape=tuple(mask.shape),
                    largest=tuple(float(np.abs(_host(x)).max()) for x in floats),
                    zeros=tuple(bool((_host(x) == 0).any()) for x in floats),
                )
            )
        for number in origins:
            seen = Seen(mask.shape, index, tuple(self.rounds))
            self.seen.setdefault(number, []).append(seen)
        return Value(lanes, origins)


def _badness(lanes: Sequence[Lane], arrays: tuple) -> tuple[tuple[str, ...], Any]:
    """(lanes that are not finite, mask of what is bad); the mask is None if nothing."""
    if not is_float(arrays[0]) or not arrays[0].size:
        return (), None
    hosts = [_host(x) for x in arrays]
    finite = [np.isfinite(x) for x in hosts]
    bad = tuple(lane.name for lane, f in zip(lanes, finite, strict=True) if not f.all())
    if bad:
        return bad, np.logical_or.reduce([~f for f in finite])
    first, last = hosts[0].astype(np.float64), hosts[-1]
    gap = np.abs(first - last)
    norm = np.linalg.norm(last)
    if np.linalg.norm(gap) <= WILD * norm or norm < 1e-30:
        return (), None
    return (), gap == gap.max()


def _call(key: str):
    def call(run: Run, eqn, inputs: list[Value], scope: str) -> list[Value]:
        inner = eqn.params[key]
        consts = getattr(inner, "consts", ())
        return run.evaluate(getattr(inner, "jaxpr", inner), consts, inputs, scope)

    return call


def _scan(run: Run, eqn, inputs: list[Value], scope: str) -> list[Value]:
    p, length = eqn.params, eqn.params["length"]
    # What is scanned has one axis more outside than inside (jax 0.11 renamed the
    # parameters that say so).
    body = p["jaxpr"].jaxpr
    n_xs = _scanned(eqn.invars, body.invars)
    n_carry = len(eqn.outvars) - _scanned(eqn.outvars, body.outvars)
    n_consts = len(inputs) - n_xs - n_carry
    consts, carry = inputs[:n_consts], inputs[n_consts : n_consts + n_carry]
    xs = inputs[n_consts + n_carry :]
    rows = []
    order = range(length)[::-1] if p["reverse"] else range(length)
    for i in order:
        now = [x._replace(lanes=tuple(a[i] for a in x.lanes)) for x in xs]
        given = [*consts, *carry, *now]
        run.rounds.append(i)
        outputs = run.evaluate(body, p["jaxpr"].consts, given, scope)
        run.rounds.pop()
        carry, row = outputs[:n_carry], outputs[n_carry:]
        rows.append(row)
    if p["reverse"]:
        rows = rows[::-1]
    return [*carry, *(_stacked(column) for column in zip(*rows, strict=True))]


def _scanned(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    pairs = zip(outside, inside, strict=True)
    return sum(len(a.aval.shape) > len(b.aval.shape) for a, b in pairs)


def _stacked(values: Sequence[Value]) -> Value:
    lanes = zip(*(v.lanes for v in values), strict=True)
    origins = frozenset().union(*(v.origins for v in values))
    return Value(tuple(np.stack(list(map(np.asarray, x))) for x in lanes), origins)


def _while(run: Run, eqn, inputs: list[Value], scope: str) -> list[Value]:
    p = eqn.params
    a, b = p["cond_nconsts"], p["body_nconsts"]
    cond_consts, body_consts, carry = inputs[:a], inputs[a : a + b], inputs[a + b :]
    test, body = p["cond_jaxpr"], p["body_jaxpr"]
    while bool(
        run.evaluate(test.jaxpr, test.consts, [*cond_consts, *carry], scope)[0].lanes[0]
    ):
        carry = run.evaluate(body.jaxpr, body.consts, [*body_consts, *carry], scope)
    return carry


def _cond(run: Run, eqn, inputs: list[Value], scope: str) -> list[Value]:
    branch = eqn.params["branches"][int(inputs[0].lanes[0])]
    return run.evaluate(branch.jaxpr, branch.consts, inputs[1:], scope)


_CALLS: dict[str, Callable] = {
    "jit": _call("jaxpr"),
    "pjit": _call("jaxpr"),
    "closed_call": _call("call_jaxpr"),
    "core_call": _call("call_jaxpr"),
    "custom_jvp_call": _call("call_jaxpr"),
    "custom_vjp_call": _call("call_jaxpr"),
    "checkpoint": _call("jaxpr"),
    "remat2": _call("jaxpr"),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}


def _variables(eqn) -> list:
    return [v for v in eqn.invars if not isinstance(v, core.Literal)]


def _host(x: Any) -> np.ndarray:
    host = np.asarray(x)
    return host if host.dtype in (np.float32, np.float64) else host.astype(np.float32)


def _source(eqn) -> str:
    """ "file:line (function)" of the innermost frame of ours."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        for package in ("/bitmamba/", "/pallas_kernels/"):
            head, found, tail = frame.file_name.rpartition(package)
            if found and not head.endswith("site-packages"):
                name = f"{package[1:]}{tail}:{frame.line_num}"
                return f"{name} ({frame.function_name})"
    return ""
