"""train.py whose data make it wait, so that a test can meet it at any moment.

Waiting takes no computing. SLOW_TRAIN_S: seconds for each batch.
SLOW_TRAIN_COMPILES=always: programs are compiled as a user's are.
SLOW_TRAIN_SCRIPT=scripts.sweep: another command than train.py.
"""

import importlib
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

COMPILES_ONCE = os.environ.get("SLOW_TRAIN_COMPILES") != "always"
if COMPILES_ONCE:  # as the tests' own programs, small ones too; before JAX loads
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

from bitmamba import command_line  # noqa: E402
from bitmamba.data.build import DataBundle  # noqa: E402

batches = DataBundle.batches


def slowly(self, start_step=0, **kwargs):
    for batch in batches(self, start_step, **kwargs):
        time.sleep(float(os.environ.get("SLOW_TRAIN_S", "0.05")))
        yield batch


DataBundle.batches = slowly

if COMPILES_ONCE:
    from bitmamba.train import build

    build.use_compilation_cache = lambda: None

script = importlib.import_module(os.environ.get("SLOW_TRAIN_SCRIPT", "train"))

if __name__ == "__main__":
    command_line.run(script.main)
