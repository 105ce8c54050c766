"""The likely cause of bad numbers, in words, from the operation that made them."""

import numpy as np

from bitmamba.io import digests
from bitmamba.train.bundle import Bundle
from bitmamba.train.lanes import Origin

EXP_LIMIT = 88.7  # exp of more is beyond float32
HIGHEST_LR = 1e3
USUAL_DT_BIAS = 10.0  # softplus gives step sizes of 0.001 to 0.1 at the start


def likely_cause(
    found: Bundle,
    origin: Origin | None,
    parameter: str | None,
    *,
    layer: str,
    spoiled: list[str],
) -> str:
    """One or two sentences.

    Args:
        found: the bundle.
        origin: the operation, or None.
        parameter: path of an input that was not finite before the step, or None.
        layer: of either.
        spoiled: results that it reached, "update/<path>" and the like.
    """
    if parameter is not None:
        return _bad_input(found, parameter)
    assert origin is not None
    if layer == "optimizer":
        return _optimizer(found, origin, spoiled)
    if origin.primitive == "gather" and layer.startswith("embed"):
        tokens = np.asarray(found.batch.tokens)
        size = found.config.model.vocab_size
        return (
            f"token id {int(tokens.max())} (smallest {int(tokens.min())}) is outside "
            f"the vocabulary of {size}: the tokenizer is not the model's"
        )
    if "step_size" in origin.source or "softplus" in origin.source:
        return _softplus(origin)
    if (extreme := _extreme_dt(found, layer)) is not None:
        return extreme
    return _by_operation(origin)


def absurd_rate(found: Bundle) -> str | None:
    """A learning rate so high that the norm of the update overflows, if it is one.

    The update itself may still be finite, and then no operation of the step is bad.
    """
    if (lr := found.config.optim.lr) <= HIGHEST_LR:
        return None
    return (
        f"optim.lr is {lr:g} (usually 1e-6 to 1): updates and parameters of that size "
        "overflow float32 wherever they are squared; lower it"
    )


def _bad_input(found: Bundle, name: str) -> str:
    array = np.asarray(_leaf(found, name), np.float32)
    bad = ~np.isfinite(array)
    kind, _, path = name.partition("/")
    what = {
        "trainable": "parameter",
        "held": "frozen parameter",
        "opt_state": "optimiser state",
        "batch": "batch field",
    }[kind]
    where = ""
    if array.ndim >= 2:
        rows = np.unique(np.argwhere(bad)[:, 0])
        more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
        where = f", in row {rows[0]}{more}"
    return (
        f"{what} {path} was not finite before the step: {int(bad.sum())} of "
        f"{array.size} values{where}; look at the checkpoint, or at the base it was "
        "loaded from"
    )


def _optimizer(found: Bundle, origin: Origin, spoiled: list[str]) -> str:
    if (cause := absurd_rate(found)) is not None:
        return cause
    paths = [n.partition("/")[2] for n in spoiled if n.startswith("update/")]
    of = f" of {paths[0]} ({len(paths)} in all)" if paths else ""
    if any(origin.zeros) and origin.primitive in ("rsqrt", "div", "pow", "integer_pow"):
        name, eps = found.config.optim.name, found.config.optim.adafactor.eps1
        shown = f" (eps1 {eps:g}; its square is 0 in float32)" if eps else ""
        rule = shown if name == "adafactor" else ""
        return (
            f"optimiser floor: {name} divides by the root of a second moment of zero, "
            f"because the floor under it is zero too{rule}; a row without gradient "
            f"makes 0 · inf of the update{of}"
        )
    return f"the update{of}: {_by_operation(origin)}"


def _softplus(origin: Origin) -> str:
    """Of a step size, the only softplus here."""
    if origin.primitive == "exp" and origin.bad:
        return (
            f"dt overflow: exp({origin.largest[0]:.4g}) is beyond float32 (from "
            f"{EXP_LIMIT:g} on); softplus is written as log(1 + exp(x)) there; use "
            "jax.nn.softplus"
        )
    return (
        "dt overflow: softplus of the step size is right in float64 alone; if it is "
        "written as log(1 + exp(x)), its gradient is lost from 88 on; use "
        "jax.nn.softplus"
    )


def _extreme_dt(found: Bundle, layer: str) -> str | None:
    """A dt_bias of this layer, or of one before it, far from where it belongs."""
    reached = _number(layer)
    for path, leaf in _parameters(found).items():
        if not path.endswith("/dt_bias") or _number(path) > reached:
            continue
        head = int(np.argmax(leaf))
        if leaf[head] > USUAL_DT_BIAS:
            return (
                f"exploding dt_bias: {path} is {leaf[head]:.4g} at head {head} "
                f"(usually -7 to 1), so that step sizes are as large; what the state "
                "takes in grows with them until squares of it overflow; lower "
                "optim.lr or the lr_mult of A_log, D and dt_bias"
            )
    return None


def _number(name: str) -> int:
    """Of a layer; what comes after all layers has the highest."""
    part = name.split("/")[0]
    if part.startswith("layer_"):
        return int(part.removeprefix("layer_"))
    return -1 if part == "embed" else 1 << 30


def _by_operation(origin: Origin) -> str:
    largest = max(origin.largest, default=0.0)
    if not origin.bad:
        return (
            "float32 and float64 disagree from here on: digits cancel, or a result is "
            f"rounded away (inputs up to {largest:.4g})"
        )
    if origin.primitive in ("div", "log", "rsqrt", "pow") and any(origin.zeros):
        return (
            f"empty rows: {origin.primitive} of a zero, as of a mean over no tokens or "
            "the length of a row of zeros"
        )
    if "float64" not in origin.bad:
        return (
            f"overflow: {origin.primitive} of inputs up to {largest:.4g} is beyond "
            f"{origin.bad[-1]}, and finite in float64"
        )
    return (
        f"{origin.primitive} of finite inputs up to {largest:.4g} is not finite in "
        "float64 either: not a matter of precision"
    )


def _leaf(found: Bundle, name: str):
    trees = {
        "trainable": found.state.trainable,
        "opt_state": found.state.opt_state,
        "held": found.held,
        "batch": found.batch._asdict(),
    }
    return digests.leaves(trees)[name]


def _parameters(found: Bundle) -> dict[str, np.ndarray]:
    both = {**digests.leaves(found.held.weights), **digests.leaves(found.state[1])}
    return {path: np.asarray(leaf, np.float32) for path, leaf in both.items()}
