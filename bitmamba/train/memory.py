"""What a step will need, told without compiling all layers of a deep model."""

import dataclasses
import re
import time
from collections import Counter
from typing import Any

import jax

from bitmamba import paths
from bitmamba.config import Config
from bitmamba.data import DataBundle
from bitmamba.report.plan import StepMemory, step_memory
from bitmamba.train import build

WHOLE_LAYERS = 8
SMALL_VOCABULARY = 256


def plan_step(
    config: Config, data: DataBundle, parts: build.Parts
) -> tuple[StepMemory, float]:
    """(the step's memory, seconds it took to find out); allocates nothing of the model.

    A model of up to WHOLE_LAYERS layers, or one whose layers of one kind differ in
    what is trained, is compiled whole. Otherwise steps of shallow models are compiled,
    of the same widths, batch, window and optimiser:
        memory = shallow + sum over kinds of (layers beyond the shallow ones) · growth.

    Numerics: temporaries are the largest of a few sums (end of the forward pass, end
        of the backward pass, optimiser), each affine in the number of layers, so they
        grow ever faster with depth. The sum that leads in a deep model may not lead in
        a shallow one beside the constant terms of embedding and head. So growth is
        taken at the model's vocabulary and at a small one, and the larger counts.
    """
    start = time.perf_counter()
    if compiles_whole(config, parts):
        compiled, _ = build.compile_step(config, parts, options=_quick_options())
        found = step_memory(compiled)
    else:
        found = _estimate(config, data)
    return found, time.perf_counter() - start


def compiles_whole(config: Config, parts: build.Parts) -> bool:
    """Whether the step itself is compiled: few layers, or unlike ones of one kind."""
    layers = config.model.layers
    few = max(WHOLE_LAYERS, len(shallow_layers(layers)) + 1)
    return len(layers) <= few or not _alike(layers, parts.trainable)


def shallow_layers(layers: tuple[str, ...]) -> tuple[str, ...]:
    """Every kind of layer once, in order of appearance; an only kind twice."""
    kinds = tuple(dict.fromkeys(layers))
    return kinds * 2 if len(kinds) == 1 else kinds


def _estimate(config: Config, data: DataBundle) -> StepMemory:
    base = shallow_layers(config.model.layers)
    vocabularies = (config.model.vocab_size, SMALL_VOCABULARY)
    starts = [_memory(config, data, base, vocab_size=v) for v in vocabularies]
    temporaries, peak = starts[0].temporaries, starts[0].peak
    for kind, count in Counter(config.model.layers).items():
        more = [
            _memory(config, data, (*base, kind), vocab_size=v) for v in vocabularies
        ]
        missing = count - base.count(kind)
        pairs = list(zip(more, starts, strict=True))
        temporaries += missing * max(m.temporaries - s.temporaries for m, s in pairs)
        peak += missing * max(m.peak - s.peak for m, s in pairs)
    return StepMemory(temporaries, peak, estimated_from=(len(base), len(base) + 1))


def _memory(
    config: Config, data: DataBundle, layers: tuple[str, ...], **model: Any
) -> StepMemory:
    """Memory of the step of a model with other layers."""
    # A rule may be for layers that only the deep model has.
    rules = tuple(dataclasses.replace(r, optional=True) for r in config.optim.rules)
    shallow = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, layers=layers, **model),
        optim=dataclasses.replace(config.optim, rules=rules),
    )
    parts = build.build_parts(shallow, data)
    return step_memory(build.compile_step(shallow, parts, options=_quick_options())[0])


def _alike(layers: tuple[str, ...], trainable: Any) -> bool:
    """Whether all layers of a kind train the same parameters."""
    trained: dict[int, set] = {i: set() for i in range(len(layers))}
    for path, leaf in paths.flatten(trainable).items():
        if match := re.fullmatch(r"layer_(\d+)/(.*)", path):
            trained[int(match[1])].add((match[2], leaf.shape))
    by_kind: dict[str, set] = {}
    for i, kind in enumerate(layers):
        if by_kind.setdefault(kind, trained[i]) != trained[i]:
            return False
    return True


def _quick_options() -> dict[str, Any]:
    """Compiler options for a step that never runs: the same buffers, sooner."""
    # Buffers are assigned before LLVM, which on a CPU takes about half of the time.
    return (
        {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
    )
