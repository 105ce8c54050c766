"""Read data as a run would, say what becomes of every row, and show some examples.

    python scripts/check_data.py --config=configs/sft.py [--config.data.window=256]
    python scripts/check_data.py --files=a.jsonl,b.jsonl --tokenizer=tokenizer.json

Each example is shown as the model gets it: runs of tokens, separated by │, after the
loss weight they have as targets (0 is a prompt, not learnt).

Exit codes: 0 the data can be trained on, 2 it cannot: nothing is left to train, or more
rows are refused than `data.max_refused_share`, with --files its default.
"""

import dataclasses
import itertools
import math

import numpy as np
from absl import flags
from ml_collections import config_flags
from rich.console import Console
from rich.text import Text

from bitmamba import command_line
from bitmamba.config import DataConfig
from bitmamba.config_read import from_config_dict
from bitmamba.data import DataBundle, build_data
from bitmamba.data.account import visible
from bitmamba.data.build import check_refused
from bitmamba.io.tokenizer import load_tokenizer
from bitmamba.train import start

_CONFIG = config_flags.DEFINE_config_file("config", help_string="A file of configs/.")
_FILES = flags.DEFINE_list("files", [], "JSONL files to read instead of a config's.")
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", "assets:tokenizer.json", 'tokenizer.json, with --files; or "bytes".'
)
_TEMPLATE = flags.DEFINE_string("template", None, "Jinja template, with --files.")
_WINDOW = flags.DEFINE_integer("window", 512, "Tokens in a window, with --files.", 2)
_MIN_SCORE = flags.DEFINE_float(
    "min_score",
    0.6,
    "Rows with a lower score are refused, with --files; the default is that of "
    "configs/sft.py, -inf keeps all.",
)
_EXAMPLES = flags.DEFINE_integer("examples", 3, "How many examples to show.", 0)
_WIDTH_PIPED = 100


def main() -> None:
    if bool(_FILES.value) == (_CONFIG.value is not None):
        raise ValueError("check_data: expected either --config=FILE or --files=A,B")
    # Everything is shown first, also where the share of refused rows is too high.
    if _FILES.value:
        bundle, most = _read_files(), DataConfig().max_refused_share
        lines = bundle.account.file_lines()  # no run is planned
    else:
        config = from_config_dict(_CONFIG.value)
        most = config.data.max_refused_share
        lenient = dataclasses.replace(config.data, max_refused_share=1.0)
        bundle = start.read_data(dataclasses.replace(config, data=lenient))
        lines = bundle.account.lines()
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH_PIPED)
    for line in lines:
        console.print(Text(visible(line)), soft_wrap=True)
    _show_examples(bundle, console)
    check_refused(bundle.account.files, most)


def _read_files() -> DataBundle:
    if math.isnan(_MIN_SCORE.value):
        raise ValueError("--min_score: got nan; expected a number, or -inf to keep all")
    tokenizer = load_tokenizer(_TOKENIZER.value)
    cfg = DataConfig(
        sft=tuple(_FILES.value),
        template=_TEMPLATE.value,
        window=_WINDOW.value,
        min_score=_MIN_SCORE.value,
        heldout_share=0.0,
        max_refused_share=1.0,
    )
    return build_data(
        cfg, tokenizer, vocab_size=tokenizer.vocab_size, steps=1, batch_size=1
    )


def _show_examples(bundle: DataBundle, console: Console) -> None:
    """Documents from all over the SFT stream, or the replay stream without it."""
    stream = "sft" if len(bundle.stores["sft"].sources) else "replay"
    store = bundle.stores[stream]
    n = min(_EXAMPLES.value, len(store.sources))
    for document in np.linspace(0, len(store.sources) - 1, n).astype(int):
        n = int(store.lengths[document])
        category = bundle.categories[store.sources[document]]
        console.print(Text(f"\nexample {document + 1}, {category}, {n} tokens"))
        tokens, weights = (part.tolist() for part in store.span(document, 0, n))
        pairs = zip(tokens, weights, strict=True)
        for weight, run in itertools.groupby(pairs, key=lambda pair: pair[1]):
            words = [visible(bundle.tokenizer.decode([t])) for t, _ in run]
            line = Text(f"{weight:<4g} ", style="bold")
            line.append("│".join(words), style="green" if weight else "dim")
            console.print(line)


if __name__ == "__main__":
    command_line.run(main)
