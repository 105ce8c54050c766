"""Make a run of a PEFT folder, so that generate.py and export_weights.py can use it.

    python scripts/import_adapter.py --from=out/peft --to=runs/lora_back
    python scripts/import_adapter.py --from=theirs --base=assets:base --to=runs/theirs

A folder of scripts/export_weights.py gives back that run's adapters and settings. Any
other needs --base, the checkpoint its adapters stand beside, whose settings it takes.
Everything in the folder is used, or it is refused.

Exit codes: 0 done, 2 the folder or the base cannot be used.
"""

from pathlib import Path

from absl import flags

from bitmamba import command_line

_FROM = flags.DEFINE_string("from", None, "The PEFT folder.")
_TO = flags.DEFINE_string("to", None, "A new work directory to write.")
_BASE = flags.DEFINE_string(
    "base", None, 'The base of the adapters: a checkpoint or "assets:base".'
)


def main() -> None:
    """Read the folder, write the checkpoint."""
    for flag in (_FROM, _TO):
        if not flag.value:
            raise ValueError(f"--{flag.name}: missing; expected a folder")
    # This loads JAX, hence after the flags are checked.
    from bitmamba.train.exchange import import_peft

    n = import_peft(Path(_FROM.value), Path(_TO.value), base=_BASE.value)
    print(f"written: {_TO.value}, {n} adapters; try")
    print(f'  python scripts/generate.py --checkpoint={_TO.value} --prompt="..."')


if __name__ == "__main__":
    command_line.run(main)
