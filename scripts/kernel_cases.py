"""Inputs of the kernels, what they compute, and how much work that is.

For bench_kernels.py and gpu_check.py; imports jax and pallas_kernels alone.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pallas_kernels
from pallas_kernels import backend
from pallas_kernels.bitlinear import shapes as bit_shapes
from pallas_kernels.causal_conv1d import shapes as conv_shapes
from pallas_kernels.out_prod import shapes as product_shapes
from pallas_kernels.ssd import shapes as ssd_shapes

Arrays = dict[str, Any]

# Operators whose kernels have a form of their own for Hopper.
TWO_FORMS = ("out_prod", "bitlinear", "ssd")
# The scan's takes bfloat16 alone, and more states than this.
FEW_STATES = 16


class Work(NamedTuple):
    """FLOPs and bytes to and from memory, at least, of one pass. rate: of products."""

    flops: float
    bytes: float
    rate: str = "bf16"


class Case(NamedTuple):
    """One operator at one size.

    inputs: floats are float32 and become the dtype that is asked for, except those in
        `wide`; integers stay.
    run: (inputs, implementation) -> outputs, a tuple of arrays.
    trained: inputs whose gradients are wanted; empty if there are none.
    forward, both: work without and with the gradients.
    """

    op: str
    name: str
    inputs: Arrays
    run: Callable[[Arrays, str], tuple]
    trained: tuple[str, ...]
    forward: Work
    both: Work | None
    wide: tuple[str, ...] = ()


def cast(case: Case, dtype: Any, wide: Any = jnp.float32) -> Arrays:
    """The inputs as arrays, floats in dtype, and the `wide` ones in that dtype."""

    def leaf(name, value):
        if value is None or not np.issubdtype(value.dtype, np.floating):
            return None if value is None else jnp.asarray(value)
        return jnp.asarray(value, wide if name in case.wide else dtype)

    return {name: leaf(name, value) for name, value in case.inputs.items()}


def forms(case: Case, dtype: Any = jnp.bfloat16) -> tuple[str, ...]:
    """The forms of products that its kernels have on this device, its own first."""
    two = backend.products() == "wgmma" and case.op in TWO_FORMS
    if case.op == "ssd" and two:
        two = dtype == jnp.bfloat16 and case.inputs["B"].shape[-1] > FEW_STATES
    return ("wgmma", "mma") if two else ("mma",)


def by_form(function: Callable, form: str) -> Callable:
    """A new function, whose kernels are traced in that form."""

    def traced(*arguments):
        with backend.products_by(form):
            return function(*arguments)

    return traced


def forward(case: Case, implementation: str) -> Callable[[Arrays], tuple]:
    """inputs -> outputs, to be jitted."""
    return lambda inputs: case.run(inputs, implementation)


def with_gradients(case: Case, implementation: str) -> Callable[[Arrays], Arrays]:
    """inputs -> outputs by number and the gradients of what trains by name.

    Cotangents are cosines of the place, the same for every dtype and implementation.
    """

    def run(inputs):
        held = {k: v for k, v in inputs.items() if k not in case.trained}

        def outputs(own):
            return case.run(own | held, implementation)

        y, pull = jax.vjp(outputs, {k: inputs[k] for k in case.trained})
        (gradients,) = pull(tuple(_cotangent(t) for t in y))
        return {f"output {i}": t for i, t in enumerate(y)} | gradients

    return run


def _cotangent(y: jax.Array) -> jax.Array:
    places = jnp.arange(y.size, dtype=jnp.int32) % 10007
    return jnp.cos(places.astype(jnp.float32)).reshape(y.shape).astype(y.dtype)


def documents(length: int, count: int) -> np.ndarray:
    """(length,) int32: as many documents of uneven length, none aligned to a chunk."""
    cuts = np.sort(np.random.default_rng(0).integers(1, length, count - 1))
    return np.searchsorted(cuts, np.arange(length), side="right").astype(np.int32)


def scan(batch, length, heads, groups, *, documents_a_row=1, headdim=64, state=128):
    """The scan, chunks of 64."""
    rng = np.random.default_rng(0)
    chunk = 64

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    inputs = {
        "x": normal(batch, length, heads, headdim),
        "dt": rng.uniform(1e-3, 0.1, (batch, length, heads)).astype(np.float32),
        "A": -rng.uniform(1.0, 16.0, heads).astype(np.float32),
        "B": normal(batch, length, groups, state) / state**0.5,
        "C": normal(batch, length, groups, state),
        "D": normal(heads),
        "initial_state": normal(batch, heads, headdim, state),
        "segment_ids": None,
    }
    if documents_a_row > 1:
        ids = documents(length, documents_a_row)
        inputs["segment_ids"] = np.tile(ids, (batch, 1))

    def run(inputs, implementation):
        args = [inputs[k] for k in ("x", "dt", "A", "B", "C")]
        rest = {k: inputs[k] for k in ("D", "segment_ids", "initial_state")}
        made = pallas_kernels.ssd(
            *args, **rest, chunk_size=chunk, implementation=implementation
        )
        return tuple(made)

    # pallas_kernels/ssd/README.md. The lower triangle of a chunk is all that counts;
    # with one state there are no chunks.
    tokens, q, pn = batch * length, 0 if state == 1 else chunk, headdim * state
    one = Work(
        tokens * (heads * (2 * q * headdim + 4 * pn) + 2 * groups * q * state),
        tokens * (4 * heads * headdim + 4 * groups * state + 8 * heads),
    )
    back = Work(
        tokens * (heads * (4 * q * headdim + 8 * pn) + 6 * groups * q * state),
        tokens * (6 * heads * headdim + 8 * groups * state + 16 * heads),
    )
    name = f"B{batch} L{length} H{heads} P{headdim} N{state} G{groups}"
    if documents_a_row > 1:
        name += f", {documents_a_row} documents a row"
    trained = ("x", "dt", "A", "B", "C", "D", "initial_state")
    both = Work(one.flops + back.flops, one.bytes + back.bytes)
    wide = ("dt", "A", "D", "initial_state")
    return Case("ssd", name, inputs, run, trained, one, both, wide)


def scan_of(shape):
    """The scan at a named size."""
    sizes = (shape.batch, shape.length, shape.n_heads, shape.n_groups)
    return scan(*sizes, headdim=shape.headdim, state=shape.d_state)


def convolution(batch, length, channels, taps, *, documents_a_row=1):
    """The convolution with SiLU."""
    rng = np.random.default_rng(1)
    inputs = {
        "x": rng.standard_normal((batch, length, channels), np.float32),
        "weight": rng.standard_normal((taps, channels), np.float32) / taps,
        "bias": rng.standard_normal(channels, np.float32),
        "segment_ids": np.tile(documents(length, documents_a_row), (batch, 1)),
    }

    def run(inputs, implementation):
        made = pallas_kernels.causal_conv1d(
            inputs["x"],
            inputs["weight"],
            inputs["bias"],
            segment_ids=inputs["segment_ids"],
            activation="silu",
            implementation=implementation,
        )
        return tuple(made)

    size = batch * length * channels
    one = Work(2 * taps * size, 4 * size)
    both = Work(6 * taps * size, 4 * size + 6 * size)
    name = f"B{batch} L{length} C{channels} K{taps}"
    trained = ("x", "weight", "bias")
    return Case("causal_conv1d", name, inputs, run, trained, one, both, ("weight",))


def input_gradient(m, k, n, rank, *, codes=None):
    """dy @ Wᵀ + u @ vᵀ: the activation gradient of a frozen layer with an adapter."""
    rng = np.random.default_rng(2)
    weight = rng.standard_normal((n, k), np.float32) / k**0.5
    inputs = {
        "dy": rng.standard_normal((m, k), np.float32),
        "weight": weight,
        "u": rng.standard_normal((m, rank), np.float32),
        "v": rng.standard_normal((n, rank), np.float32) / rank**0.5,
        "scale": None,
    }
    stored = 2.0
    if codes:
        ternary = rng.integers(-1, 2, (n, k)).astype(np.int8)
        packed = np.asarray(pallas_kernels.pack_planes(jnp.asarray(ternary)))
        inputs["weight"] = ternary if codes == "int8" else packed
        inputs["scale"] = np.float32(k**-0.5)
        stored = 1.0 if codes == "int8" else 0.25

    def run(inputs, implementation):
        made = pallas_kernels.out_prod(
            inputs["dy"],
            inputs["weight"],
            transpose_b=True,
            scale=inputs["scale"],
            tail=(inputs["u"], inputs["v"]),
            implementation=implementation,
        )
        return (made,)

    work = Work(2.0 * m * k * n + 2.0 * m * n * rank, 2 * m * (k + n) + stored * n * k)
    name = f"M{m} K{k} N{n} R{rank}, {codes or 'bf16'} weight"
    return Case("out_prod", name, inputs, run, (), work, None, ("scale",))


def code_product(tokens, d_in, d_out):
    """int8 activations by ternary codes, both scales applied."""
    rng = np.random.default_rng(3)
    inputs = {
        "x_codes": rng.integers(-127, 128, (tokens, d_in)).astype(np.int8),
        "w_codes": rng.integers(-1, 2, (d_out, d_in)).astype(np.int8),
        "x_scale": rng.uniform(0.01, 0.02, (tokens, 1)).astype(np.float32),
        "w_scale": np.float32(0.02),
    }

    def run(inputs, implementation):
        made = pallas_kernels.bit_product(
            inputs["x_codes"],
            inputs["w_codes"],
            x_scale=inputs["x_scale"],
            w_scale=inputs["w_scale"],
            dtype=jnp.bfloat16,
            implementation=implementation,
        )
        return (made,)

    flops = 2.0 * tokens * d_in * d_out
    work = Work(flops, (tokens + d_out) * d_in + 2 * tokens * d_out, "int8")
    name = f"T{tokens} D{d_in} F{d_out}"
    return Case("bitlinear", name, inputs, run, (), work, None, ("x_scale", "w_scale"))


def timed_cases(max_tokens: int) -> list[Callable[[], Case]]:
    """Makers of the cases that are timed, of at most so many tokens each.

    The quick ones first: where time is short, the last are left out.
    """
    made = []
    for name in ("student_1b4_in_proj", "student_1b4_out_proj", "square"):
        made.append(partial(input_gradient, *product_shapes.SHAPES[name]))
    layer = product_shapes.SHAPES["student_1b4_in_proj"]
    made += [partial(input_gradient, *layer, codes=c) for c in ("int8", "2bit")]
    for name in ("student_1b4_in_proj", "student_1b4_out_proj"):
        made.append(partial(code_product, *bit_shapes.SHAPES[name]))
    made += [partial(convolution, *conv_shapes.SHAPES["student_1b4"])]
    made[-1].keywords["documents_a_row"] = 4
    one_state = ssd_shapes.SHAPES["bitmamba2_1b"]
    made += [
        partial(scan_of, one_state._replace(batch=b))
        for b in (1, 8)
        if b * one_state.length <= max_tokens
    ]
    scans = [(8, 2048, 64, 1, 1), (8, 2048, 64, 1, 16), (1, 2048, 64, 1, 1)]
    scans += [(8, 2048, 64, 8, 1), (8, 2048, 80, 1, 1)]
    scans += [(32, 2048, 64, 1, 1), (4, 32768, 64, 1, 1)]
    return made + [
        partial(scan, b, n, h, g, documents_a_row=d)
        for b, n, h, g, d in scans
        if b * n <= max_tokens
    ]


def small_cases() -> list[Callable[[], Case]]:
    """Makers of the cases that are compared with float64: odd lengths, documents.

    Products of more than 128 rows, of codes columns, are those of two blocks on Hopper.
    """
    return [
        partial(scan, 2, 70, 4, 2, documents_a_row=5, state=32),
        partial(scan, 1, 129, 2, 1, state=128),
        partial(scan, 2, 70, 2, 2, documents_a_row=5, headdim=72, state=1),
        partial(convolution, 2, 70, 128, 4, documents_a_row=5),
        partial(input_gradient, 70, 96, 48, 4),
        partial(input_gradient, 300, 200, 72, 4),
        partial(input_gradient, 70, 96, 48, 4, codes="int8"),
        partial(input_gradient, 70, 128, 200, 4, codes="2bit"),
        partial(code_product, 300, 96, 48),
    ]
