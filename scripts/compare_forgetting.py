"""Compare ways to keep what the base knows while a model learns examples.

    python scripts/compare_forgetting.py --config=configs/lora.py \
        [--tmkl=0.5,2] [--pull=0.01] [--config.train.steps=60 …]

Trains the config five ways, one after another and each as train.py would, with the
same seed, base and examples:
    plain         examples alone: data.replay_share=0
    replay        replay text among the examples, at the config's data.replay_share
    tmkl_W        examples alone and loss.tmkl=W
    replay_tmkl_W both
    pull_P        examples alone and loss.pull=P: after each update, a pull to the start
A list gives a run for each strength.

config.train.steps is that of the ways without replay. Those with replay see the same
windows of examples with replay windows between them, so they take more steps, to the
step that brings the number of windows of examples nearest; the table tells the tokens
of examples that each way saw. Learning rates follow each run's own number of steps.

Shows one table (held-out loss of examples and of replay text before and after, tokens,
time), a table by category, and which ways no other beats; leaves forgetting.json,
forgetting.png and each way's run in --out. A way that is finished is not run again; one
that was stopped goes on with the same command.

Exit codes: 0 done, 1 a save failed, 2 the user's mistake, 3 every way diverged, 143
told to stop.
"""

from collections.abc import Callable
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from bitmamba import command_line
from bitmamba.train import start
from bitmamba.train.ways import make_ways

_CONFIG = config_flags.DEFINE_config_file("config", help_string="A file of configs/.")
_TMKL = flags.DEFINE_list("tmkl", "1", "Weights of the target-masked KL.")
_PULL = flags.DEFINE_list("pull", "0.01", "Strengths of the pull to the start.")
_OUT = flags.DEFINE_string("out", "runs/forgetting", "Folder for results and runs.")
flags.mark_flag_as_required("config")


def main() -> Callable[[], int]:
    config = start.read_config(_CONFIG.value)
    out = Path(_OUT.value)
    ways = make_ways(
        config,
        tmkl=_TMKL.value,
        pull=_PULL.value,
        out=out,
        read_data=start.read_data,
    )

    # JAX loads only here, when the user's mistakes have been told.
    from bitmamba.train import device_memory, forgetting

    device_memory.claim_gpu()
    return lambda: forgetting.run(ways, out, title=f"{config.name}: ways to retain")


if __name__ == "__main__":
    command_line.run(main)
