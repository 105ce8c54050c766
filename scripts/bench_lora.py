"""Times a LoRA step beside the full step of the same model on this CPU, and its memory.

    python scripts/bench_lora.py
    python scripts/bench_lora.py --linear=bit --rank=8

Both are the step of `train.py` with AdamW and its report, in float32; the two take
turns, and the median of the ratios of neighbours counts. The last column of the table
is the ratio that the products alone would give: full training multiplies each weight
three times a token (forward, activation gradient, weight gradient), LoRA a frozen one
twice and its factors three times; the scan is the same work in both. Memory is what XLA
plans for the compiled step.
"""

import statistics
import sys
import time
from pathlib import Path

from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

flags.DEFINE_integer("d_model", 512, "residual width")
flags.DEFINE_integer("layers", 8, "Mamba-2 blocks")
flags.DEFINE_integer("d_state", 128, "state size")
flags.DEFINE_integer("vocab_size", 4096, "vocabulary; the head is not tied")
flags.DEFINE_integer("length", 1024, "tokens a row")
flags.DEFINE_integer("rank", 16, "of every adapter")
flags.DEFINE_integer("accumulation", 1, "micro-batches, of one row each, of a step")
flags.DEFINE_bool("remat", False, "layers compute their activations again")
flags.DEFINE_enum("linear", "dense", ["dense", "bit"], "kind of projections")
flags.DEFINE_integer("rounds", 9, "neighbours timed, after two warm ones")
FLAGS = flags.FLAGS
SIZES = (
    "d_model",
    "layers",
    "d_state",
    "vocab_size",
    "length",
    "rank",
    "accumulation",
    "remat",
)


class Categories:
    """All that building a step needs of the data."""

    categories = ("all",)


def _config(mode):
    from bitmamba import config

    place = config.LoraConfig(place=("all",), rank=FLAGS.rank)
    return config.Config(
        name="bench",
        workdir="unused",
        model=config.ModelConfig(
            vocab_size=FLAGS.vocab_size,
            d_model=FLAGS.d_model,
            layers=("mamba2",) * FLAGS.layers,
            linear=FLAGS.linear,
            dtype="float32",
            remat=FLAGS.remat,
            mamba2=config.Mamba2Config(d_state=FLAGS.d_state),
        ),
        data=config.DataConfig(replay=("unused",), window=FLAGS.length),
        optim=config.OptimConfig(name="adamw", lr=1e-3),
        train=config.TrainConfig(
            mode=mode, batch_size=1, steps=100, accumulation=FLAGS.accumulation
        ),
        lora=place if mode == "lora" else config.LoraConfig(),
    )


def _batch():
    import numpy as np

    from bitmamba.types import Batch

    rng = np.random.default_rng(0)
    shape = (FLAGS.accumulation, 1, FLAGS.length)
    ones = np.ones(shape, np.int32)
    tokens = rng.integers(0, FLAGS.vocab_size, (2, *shape), dtype=np.int32)
    return Batch(
        tokens=tokens[0],
        targets=tokens[1],
        loss_weights=ones.astype(np.float32),
        segment_ids=ones,
        positions=ones.cumsum(-1, dtype=np.int32) - 1,
        source_ids=ones * 0,
    )


def _contender(mode):
    """(one step to call, the compiled step, number of trained parameters)."""
    import jax
    import jax.numpy as jnp

    from bitmamba import paths
    from bitmamba.lora.adapters import init_adapters
    from bitmamba.models import build_model, init_params
    from bitmamba.train import build
    from bitmamba.train.state import init_state

    config = _config(mode)
    parts = build.build_parts(config, Categories)
    params = init_params(build_model(config.model), jax.random.key(0))
    own, frozen = build.split_trainable(config, params)
    adapters = init_adapters(
        parts.model.adapters, {}, weight=None, key=jax.random.key(1)
    )
    trainable = paths.merge(own, adapters)
    held = jax.device_put(build.hold(config, trainable, frozen))
    state = [init_state(trainable, jax.jit(parts.optimizer.init)(trainable))]
    compiled, _ = build.compile_step(config, parts)
    batch = jax.tree.map(jnp.asarray, _batch())

    def call():
        state[0], metrics = compiled(state[0], held, batch)
        return float(jax.block_until_ready(metrics["loss"]))

    n_trained = sum(leaf.size for leaf in jax.tree.leaves(trainable))
    return call, compiled, n_trained


def _products():
    """LoRA / full by operations of all products and the scan, as in the docstring."""
    from bitmamba import paths
    from bitmamba.models import build_model, param_shapes
    from bitmamba.models.frozen import is_projection

    config = _config("lora")
    flat = paths.flatten(param_shapes(build_model(config.model)))
    head = FLAGS.d_model * FLAGS.vocab_size
    sizes = {p: leaf.size for p, leaf in flat.items() if is_projection(p)}
    body = sum(sizes.values()) - head
    factors = FLAGS.rank * sum(
        sum(flat[p].shape) for p in sizes if not p.startswith("lm_head")
    )
    q, p, n = 64, 64, FLAGS.d_state
    heads = 2 * FLAGS.d_model // p
    scan = FLAGS.layers * (3 * heads * (2 * q * p + 4 * p * n) + 8 * q * n)
    full = 2 * 3 * (body + head) + scan
    return (2 * (2 * (body + head) + 3 * factors) + scan) / full


def _peak(compiled):
    memory = compiled.memory_analysis()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return kept - memory.alias_size_in_bytes + memory.temp_size_in_bytes


def main(argv):
    """Print the table."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    import jax

    made = {mode: _contender(mode) for mode in ("full", "lora")}
    seconds = {mode: [] for mode in made}
    for index in range(FLAGS.rounds + 2):
        for mode, (call, _, _) in made.items():
            start = time.perf_counter()
            call()
            if index >= 2:
                seconds[mode].append(time.perf_counter() - start)
    ratios = [b / a for a, b in zip(seconds["full"], seconds["lora"], strict=True)]
    peaks = {mode: _peak(compiled) for mode, (_, compiled, _) in made.items()}
    # Gradients and both moments of what LoRA does not train.
    spared = 12 * (made["full"][2] - made["lora"][2])
    sizes = ", ".join(f"{name} {FLAGS[name].value}" for name in SIZES)
    print(f"{FLAGS.linear} projections, jax {jax.__version__}, {sizes}")
    for mode, (_, _, n_trained) in made.items():
        print(
            f"{mode:5} {n_trained:12,} trained  "
            f"{statistics.median(seconds[mode]) * 1e3:8.0f} ms  "
            f"{peaks[mode] / 2**20:8.1f} MiB planned"
        )
    print(
        f"time lora/full {statistics.median(ratios):.3f} "
        f"(of {FLAGS.rounds}: {min(ratios):.3f} to {max(ratios):.3f}); "
        f"products alone {_products():.3f}"
    )
    print(
        f"memory falls by {(peaks['full'] - peaks['lora']) / 2**20:.1f} MiB; gradients "
        f"and moments of what is frozen: {spared / 2**20:.1f} MiB"
    )


if __name__ == "__main__":
    from bitmamba import command_line

    with command_line.quiet_ends():
        app.run(main)
