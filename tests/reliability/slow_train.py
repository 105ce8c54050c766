"""train.py whose data make it wait, so that a test can meet it at any moment.

Waiting takes no computing. SLOW_TRAIN_S: seconds for each batch.
"""

import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bitmamba import command_line  # noqa: E402
from bitmamba.data.build import DataBundle  # noqa: E402

batches = DataBundle.batches


def slowly(self, start_step=0, **kwargs):
    for batch in batches(self, start_step, **kwargs):
        time.sleep(float(os.environ.get("SLOW_TRAIN_S", "0.05")))
        yield batch


DataBundle.batches = slowly

import train  # noqa: E402

if __name__ == "__main__":
    command_line.run(train.main)
