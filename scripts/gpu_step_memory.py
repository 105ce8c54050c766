"""Compile whole training steps for a GPU that is not here and print their memory plans.

    python scripts/gpu_step_memory.py
    python scripts/gpu_step_memory.py --models=student_1b4 --ways=lora --codes=int8
    python scripts/gpu_step_memory.py --layers=4 --target=rtx4090
    python scripts/gpu_step_memory.py --ways=full --accumulation=8 --gradients=bfloat16

A LoRA step of 4096 tokens and a full step (Adafactor) of 2048, by the recipes of
configs/lora.py and configs/sft.py with one row and no accumulation; by shape only, so
nothing of the model is allocated. Needs the extra `gpucheck`. A step of 48 layers takes
minutes and some 4 GB to compile; --layers compiles the first few only. XLA cannot
choose its products by timing here, so leave some room.

Exit codes: 0 within the goals (LoRA 6 GiB, full 11 GiB), 1 above one, 2 a mistake.
"""

import dataclasses
import os
import sys
import time
from pathlib import Path

from absl import flags

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bitmamba import command_line  # noqa: E402

TARGETS = ROOT / "scripts" / "gpu_targets"
TOKENS = {"lora": 4096, "full": 2048}
GOAL_GIB = {"lora": 6.0, "full": 11.0}
GIB = 2**30

flags.DEFINE_string("target", "rtx3060", "GPU: a file of scripts/gpu_targets.")
flags.DEFINE_list("models", ["student_1b4", "bitmamba2_1b"], "Of configs/presets.py.")
flags.DEFINE_list("ways", ["lora", "full"], "What trains.")
flags.DEFINE_integer("layers", 0, "Only the first so many layers; 0: all.")
flags.DEFINE_integer("accumulation", 1, "Micro-batches of a step.")
flags.DEFINE_enum(
    "gradients",
    "float32",
    ["float32", "bfloat16"],
    "config.optim.gradient_dtype of full steps.",
)
flags.DEFINE_enum(
    "masters",
    "float32",
    ["float32", "bfloat16"],
    "config.optim.master_dtype of full steps.",
)
flags.DEFINE_enum("codes", "int8", ["compute", "int8"], "config.lora.codes.")
flags.DEFINE_float("tmkl", 0.0, "config.loss.tmkl; above 0 the base runs too.")
FLAGS = flags.FLAGS


class Categories:
    """All that building a step needs of the data."""

    categories = ("all",)


def make_config(model: str, way: str):
    """The recipe's configuration, at the size that is asked for."""
    from bitmamba.config_read import from_config_dict
    from configs import lora, sft

    values = (lora if way == "lora" else sft).get_config(model)
    values.data.window = TOKENS[way]
    values.train.batch_size = 1
    values.train.accumulation = FLAGS.accumulation
    if way == "lora":
        values.loss.tmkl = FLAGS.tmkl
        values.lora.codes = FLAGS.codes
    else:
        values.optim.gradient_dtype = FLAGS.gradients
        values.optim.master_dtype = FLAGS.masters
    if FLAGS.layers:
        values.model.layers = values.model.layers[: FLAGS.layers]
    config = from_config_dict(values)
    # A rule may be for layers beyond the first few.
    rules = tuple(dataclasses.replace(r, optional=True) for r in config.optim.rules)
    return dataclasses.replace(
        config, optim=dataclasses.replace(config.optim, rules=rules)
    )


def plan(gpu, model: str, way: str) -> float:
    """Print the plan of one step; its peak in GiB."""
    import jax

    from bitmamba.report.plan import step_memory
    from bitmamba.train import build
    from pallas_kernels.absent_gpu import compile_for

    start = time.perf_counter()
    config = make_config(model, way)
    parts = build.build_parts(config, Categories)
    state = build.state_shape(parts)
    compiled = compile_for(
        gpu,
        parts.step,
        state,
        parts.held,
        build.batch_shape(config),
        donate_argnums=0,
    )
    found = step_memory(compiled)
    aliased = compiled.memory_analysis().alias_size_in_bytes
    trees = {
        "trained": parts.trainable,
        f"optimiser ({config.optim.name})": state.opt_state,
        "frozen": parts.held,
    }
    rows = {name: _bytes(jax, tree) for name, tree in trees.items()}
    rows |= {"temporaries": found.temporaries, "updated in place": aliased}
    peak = found.peak / GIB
    verdict = "within" if peak <= GOAL_GIB[way] else "above"
    print(
        f"{way} {model}, {len(config.model.layers)} layers, {TOKENS[way]} tokens: peak "
        f"{peak:.2f} GiB, {verdict} the goal of {GOAL_GIB[way]:g} "
        f"({time.perf_counter() - start:.0f} s to compile)"
    )
    for name, size in rows.items():
        print(f"    {name}: {size / GIB:.2f} GiB")
    sys.stdout.flush()
    jax.clear_caches()
    return peak


def _bytes(jax, tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def main() -> int:
    """Compile one step after the other."""
    known = sorted(path.stem for path in TARGETS.glob("*.txtpb"))
    if FLAGS.target not in known:
        raise ValueError(
            f"--target: got {FLAGS.target}; expected one of {', '.join(known)}"
        )
    unknown = [way for way in FLAGS.ways if way not in TOKENS]
    if unknown:
        raise ValueError(f"--ways: got {', '.join(unknown)}; expected lora or full")
    # The GPU is absent: nothing is to run on one that may be here.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from pallas_kernels import absent_gpu

    if lacking := absent_gpu.missing():
        raise ValueError(f"gpu_step_memory: {lacking}")
    config = (TARGETS / f"{FLAGS.target}.txtpb").read_text()
    gpu = absent_gpu.absent_gpu(config)
    above = 0
    for way in FLAGS.ways:
        for model in FLAGS.models:
            above += plan(gpu, model, way) > GOAL_GIB[way]
    return command_line.FAILED if above else command_line.DONE


if __name__ == "__main__":
    command_line.run(main)
