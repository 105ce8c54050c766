"""A bundle's step again, operation by operation: where its numbers went bad, and why.

Source of the idea: JAX's debug_nans, which stops at the first NaN of any kind. Here an
operation counts only if what it spoiled reaches the loss, a gradient or the update.
"""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bitmamba.io import digests
from bitmamba.train.bundle import Bundle
from bitmamba.train.causes import likely_cause
from bitmamba.train.lanes import Lane, Origin, Run, Seen, Value
from bitmamba.train.objective import make_loss_fn
from bitmamba.train.step import gradients

OPTIMIZER = "optimizer"


class Finding(NamedTuple):
    """What a replay found.

    bad: names of results that are not finite or unlike ("loss", "gradient of …",
    "update of …"). lanes: {lane: how many results are not finite in it}.
    origin, parameter: the operation, or the path of an input, that is at the bottom.
    layer: of the operation, or "optimizer", "loss". kind: "value" or "gradient".
    token: (micro-batch, row, position) or None where it cannot be told.
    cause: in words.
    """

    bad: list[str]
    lanes: dict[str, int]
    origin: Origin | None
    parameter: str | None
    layer: str
    kind: str
    token: tuple[int, int, int] | None
    cause: str


def replay(found: Bundle) -> Finding | None:
    """Run the step of a bundle; None if all is finite and alike in both precisions."""
    step = _program(found)
    inputs = {
        "trainable": found.state.trainable,
        "opt_state": found.state.opt_state,
        "held": found.held,
        "batch": found.batch._asdict(),
    }
    traced, shapes = jax.make_jaxpr(step, return_shape=True)(inputs)
    with jax.enable_x64(True):
        run = Run(_lanes(found))
        names = list(digests.leaves(inputs))
        given, wrong = _inputs(run, jax.tree.leaves(inputs), names)
        outputs = run.evaluate(traced.jaxpr, traced.consts, given, "")
    results = dict(zip(digests.leaves(shapes), outputs, strict=True))
    return _finding(found, run, results, wrong)


def _lanes(found: Bundle) -> list[Lane]:
    narrow = found.config.model.dtype
    lanes = [Lane("float32", lambda d: jnp.dtype(jnp.float32))]
    if narrow != "float32":
        lanes = [Lane(f"{narrow} (as run)", jnp.dtype), *lanes]
    return [*lanes, Lane("float64", lambda d: jnp.dtype(jnp.float64))]


def _program(found: Bundle):
    """The step's own loss, gradients and update, without its report and its guard."""
    config, parts = found.config, found.parts
    loss_fn = make_loss_fn(parts.model, config.loss)

    def step(inputs):
        trainable, held = inputs["trainable"], inputs["held"]
        batch = type(found.batch)(**inputs["batch"])
        grads, sums, divergence = gradients(
            loss_fn,
            trainable,
            held,
            batch,
            n_categories=len(found.info["categories"]),
            divergence_weight=config.loss.tmkl,
            key=jax.random.fold_in(jax.random.key(config.seed), found.state.step),
        )
        loss = {"loss": sums.loss.sum() / jnp.maximum(sums.weight.sum(), 1e-30)}
        if divergence is not None:
            loss["divergence"] = divergence
        with jax.named_scope(OPTIMIZER):
            state = inputs["opt_state"]
            rate = parts.optimizer.schedule(state["schedule"].count, lr=held.hyper.lr)
            updates, _ = parts.optimizer.transform.update(
                grads, state, trainable, rate=rate, hyper=held.hyper
            )
        return {**loss, "gradient": grads, "update": updates}

    return step


def _inputs(
    run: Run, leaves: list[Any], names: list[str]
) -> tuple[list[Value], dict[int, str]]:
    """Values of the inputs; those that are not finite are origins, by their paths."""
    given, wrong = [], {}
    for name, leaf in zip(names, leaves, strict=True):
        value = run.value(leaf)
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            bad = ~np.isfinite(np.asarray(leaf, np.float32))
            if bad.any():
                number = -1 - len(wrong)
                wrong[number] = name
                value = value._replace(origins=frozenset({number}))
        given.append(value)
    return given, wrong


def _finding(found: Bundle, run: Run, results: dict[str, Value], wrong) -> Any:
    bad = {name: value for name, value in results.items() if value.origins}
    if not bad:
        return None
    reached = frozenset().union(*(v.origins for v in bad.values()))
    # Inputs have the lowest numbers, then operations in their order.
    number = max((n for n in reached if n < 0), default=min(reached))
    origin = run.origins[number] if number >= 0 else None
    parameter = wrong.get(number)
    scope = origin.scope if origin else ""
    spoiled = [name for name, value in bad.items() if number in value.origins]
    return Finding(
        bad=[_result_name(name) for name in bad],
        lanes={
            lane.name: sum(_not_finite(v.lanes[k]) for v in bad.values())
            for k, lane in enumerate(run.lanes)
        },
        origin=origin,
        parameter=parameter,
        layer=_layer(scope, parameter),
        kind="gradient" if "transpose(" in scope else "value",
        token=_token(found, run.seen.get(number, [])),
        cause=likely_cause(
            found, origin, parameter, layer=_layer(scope, parameter), spoiled=spoiled
        ),
    )


def _not_finite(array: Any) -> bool:
    return not np.isfinite(np.asarray(array, np.float64)).all()


def _result_name(name: str) -> str:
    kind, _, path = name.partition("/")
    return f"{kind} of {path}" if path else kind


def _layer(scope: str, parameter: str | None) -> str:
    """ "layer_3/mixer/in_proj" of a scope or of a parameter's path."""
    if parameter is not None:
        return parameter.partition("/")[2].rpartition("/")[0]
    if f"{OPTIMIZER}/" in f"{scope}/":
        return OPTIMIZER
    parts = [p for p in scope.split("/") if re.fullmatch(r"[a-z]\w*", p)]
    known = [i for i, p in enumerate(parts) if re.fullmatch(_MODULE, p)]
    return "/".join(parts[known[0] :]) if known else "loss"


_MODULE = r"layer_\d+|embed|final_norm|lm_head"


def _token(found: Bundle, seen: list[Seen]) -> tuple[int, int, int] | None:
    """Where it shows first in a result that has the axes of tokens."""
    micro_batches, rows, length = found.batch.tokens.shape
    for shape, index, rounds in seen:
        micro = rounds[0] if micro_batches > 1 and rounds else 0
        if shape[:2] == (rows, length):
            return (micro, *index[:2])
        if shape[:1] == (rows * length,) and length > 1:
            return (micro, *divmod(index[0], length))
    return None
