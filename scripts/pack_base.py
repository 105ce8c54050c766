"""Pack the newest checkpoint of a run as a bundled base model.

    python scripts/pack_base.py --checkpoint=runs/base --out=bitmamba/assets/base

Writes model.safetensors (ternary kernels at 2 bits, embedding float16, the rest
float32) and config.json (the run's settings). The optimiser state, and the latent
weights behind the ternary codes, are left out; see `bitmamba.io.base`.
"""

from pathlib import Path

from absl import flags

from bitmamba import command_line

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "A run or one of its steps.")
_OUT = flags.DEFINE_string("out", None, "Folder for the two files.")


def main() -> None:
    for flag in (_CHECKPOINT, _OUT):
        if not flag.value:
            raise ValueError(f"--{flag.name}: missing; expected a folder")
    from bitmamba.config_read import from_config_dict, write_json
    from bitmamba.io.base import save_base
    from bitmamba.io.checkpoint import load_params

    params, meta = load_params(_CHECKPOINT.value)
    config = from_config_dict(meta["config"])
    if config.model.linear != "bit":
        raise ValueError(
            f"--checkpoint: {_CHECKPOINT.value}: got model.linear="
            f"{config.model.linear!r}; expected 'bit' (its weights would be lost)"
        )
    out = Path(_OUT.value)
    n_bytes = save_base(params, out)
    write_json(config, out / "config.json")
    print(f"step {meta['step']}: {n_bytes:,} bytes in {out / 'model.safetensors'}")


if __name__ == "__main__":
    command_line.run(main)
