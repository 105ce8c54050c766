"""Find the learning rate: train many arms on one base and one pass over the data.

    python scripts/sweep.py --config=configs/lora.py --lr=1e-3,1e-2,1e-1 \
        --wd=0,0.001,0.01 [--rank=8,16] [--config.train.steps=60 …]

Every combination of the lists is an arm; what is not listed is the config's. An arm
gets the very updates that train.py would make with its settings, to the bit when arms
take turns; alpha stays the config's at every rank, so that its scale is alpha / rank.
The arms share the frozen base in memory, one compiled step for each rank, and each
batch. With train.mode=full an arm is a whole copy of the model and of its optimiser's
state; the memory that takes is printed first, and compared with config.memory_gb.

An arm has diverged when its loss or gradient was not finite in
config.train.max_bad_steps steps in a row, or when a loss was above --factor x its start
in --looks looks in a row, or in the last one. Looks are the evaluations (start: the
base's loss on the same windows) and, counted apart, the mean training losses of 10
steps (start: the larger of the first step's and the base's held-out loss). It is
stopped and labelled with the step and the cause; the others go on.

--arms=in_turn calls the step once for each arm. together runs all arms of a rank as one
program; a stopped arm still costs its share there. auto takes together on an
accelerator if it fits, gives the same bits and is faster, as measured at the start; on
a CPU arms take turns.

Shows a table with a verdict for each arm, what decided, and the command that trains the
best one; leaves sweep.json and sweep.png in --out (default: <config.workdir>/sweep),
and checkpoints: stopped or killed, the same command goes on from the last one, to the
same bits. Other arms, data or settings are refused there: name another --out.

Exit codes: 0 done, 1 the last save failed, 2 the user's mistake, 3 every arm diverged,
143 told to stop and saved (config.guard.stop_code).
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from bitmamba import command_line
from bitmamba.report.sweep import best_command, config_arguments
from bitmamba.train import start
from bitmamba.train.arms import make_arms
from bitmamba.train.divergence import Limits

_CONFIG = config_flags.DEFINE_config_file("config", help_string="A file of configs/.")
_LR = flags.DEFINE_list("lr", None, "Learning rates (default: config.optim.lr).")
_WD = flags.DEFINE_list("wd", None, "Decays (default: config.optim.weight_decay).")
_RANK = flags.DEFINE_list("rank", None, "Adapter ranks (default: config.lora.rank).")
_ARMS = flags.DEFINE_string("arms", "auto", "in_turn, together or auto.")
_FACTOR = flags.DEFINE_float("factor", 1.2, "A loss above factor x its start is high.")
_LOOKS = flags.DEFINE_integer("looks", 2, "So many high looks in a row: diverged.")
_OUT = flags.DEFINE_string("out", None, "Folder for the results.")
_HOW = ("auto", "in_turn", "together")
flags.mark_flag_as_required("config")


def main() -> Callable[[], int]:
    if _ARMS.value not in _HOW:
        raise ValueError(f"--arms: got {_ARMS.value!r}; expected {', '.join(_HOW)}")
    if not 1.0 < _FACTOR.value < math.inf:
        raise ValueError(f"--factor: got {_FACTOR.value:g}; expected a number above 1")
    if _LOOKS.value < 1:
        raise ValueError(f"--looks: got {_LOOKS.value}; expected at least 1")
    config = start.read_config(_CONFIG.value)
    arms = make_arms(config, lr=_LR.value, wd=_WD.value, rank=_RANK.value)
    data = start.read_data(config)

    # JAX loads only here, when the user's mistakes have been told.
    from bitmamba.train import device_memory, sweep

    device_memory.claim_gpu()
    file, overrides = config_arguments(sys.argv[1:])
    out = Path(_OUT.value or Path(config.workdir) / "sweep")
    return sweep.run(
        arms,
        data,
        how=_ARMS.value,
        limits=Limits(_FACTOR.value, _LOOKS.value, config.train.max_bad_steps),
        out=out,
        command=lambda arm: best_command(
            arm, config_file=file, overrides=overrides, workdir=str(out / "best")
        ),
    )


if __name__ == "__main__":
    command_line.run(main)
