"""Train a model: python train.py --config=configs/sft.py [--config.optim.lr=1e-4]."""

from absl import flags
from ml_collections import config_flags

from bitmamba import command_line
from bitmamba.train import start

_CONFIG = config_flags.DEFINE_config_file("config", help_string="A file of configs/.")
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Show what would run (model, data, memory) and stop."
)
flags.mark_flag_as_required("config")


def main():
    config = start.read_config(_CONFIG.value)
    data = start.read_data(config)

    # JAX loads only here, when the user's mistakes have been told.
    from bitmamba.train import device_memory, distributed, loop

    device_memory.claim_gpu()
    distributed.start(config)
    return loop.run(config, data, dry=_DRY_RUN.value)


if __name__ == "__main__":
    command_line.run(main)
