"""Continue a text with a checkpoint; the answer appears as it is made.

    python scripts/generate.py --checkpoint=runs/sft --prompt="What is a kludge?"
    python scripts/generate.py --checkpoint=assets:base --prompt="The state of the"

The checkpoint is a work directory (its newest step), a step's folder or "assets:base",
the bundled base model. Tokenizer and chat template are those of its run, if they lie
beside it or in the working directory; otherwise they are named here.

Exit codes: 0 done, 2 no such checkpoint or a setting out of range.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

from absl import flags

from bitmamba import command_line
from bitmamba.config import DataConfig
from bitmamba.config_read import from_config_dict
from bitmamba.types import Tokenizer

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, 'A run, a step, "assets:base".')
_BASE = flags.DEFINE_string(
    "base", None, "The base of a run that trained adapters, if it was moved."
)
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "The run's tokenizer, if moved.")
_TEMPLATE = flags.DEFINE_string("template", None, "The run's template, if moved.")
_PROMPT = flags.DEFINE_string("prompt", None, "The text to continue or to answer.")
_CHAT = flags.DEFINE_boolean(
    "chat", None, "Ask as a user would; the default is as the checkpoint was trained."
)
_TOKENS = flags.DEFINE_integer("max_tokens", 200, "Most tokens to make.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 always takes the likeliest.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Sample among the likeliest this much.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the sampling.")


def main() -> None:
    """Load, encode, stream."""
    for flag in (_CHECKPOINT, _PROMPT):
        if not flag.value:
            raise ValueError(f"--{flag.name}: missing; expected a value")
    # These load JAX, hence after the flags are checked.
    from bitmamba.io.runs import load_run
    from bitmamba.io.tokenizer import load_tokenizer
    from bitmamba.models.sample import Sampling, stream
    from bitmamba.train.build import run_model

    params, settings = load_run(_CHECKPOINT.value, base=_BASE.value)
    config = from_config_dict(settings)
    data = own_files(config.data)
    tokenizer = load_tokenizer(data.tokenizer)
    chat = bool(config.data.sft) if _CHAT.value is None else _CHAT.value
    tokens = stream(
        run_model(config),
        params,
        prompt_ids(_PROMPT.value, data, tokenizer, chat=chat),
        max_tokens=_TOKENS.value,
        stop_id=tokenizer.eot_id,
        sampling=Sampling(_TEMPERATURE.value, _TOP_P.value, _SEED.value),
    )
    for piece in pieces(tokens, tokenizer.decode):
        print(piece, end="", flush=True)
    print()


def own_files(cfg: DataConfig) -> DataConfig:
    """Tokenizer and template as named here, or by the run where that may be."""
    from bitmamba.io.sources import followed

    named = {"tokenizer": _TOKENIZER.value, "template": _TEMPLATE.value}
    for name in named:
        theirs = getattr(cfg, name)
        if named[name] is None and theirs is not None:
            named[name] = followed(theirs, beside=_CHECKPOINT.value, flag=f"--{name}")
    return dataclasses.replace(cfg, **named)


def prompt_ids(
    prompt: str, cfg: DataConfig, tokenizer: Tokenizer, *, chat: bool
) -> list[int]:
    """Tokens of the prompt, as a user's turn or as plain text."""
    from bitmamba.data.chat import Segment, load_template
    from bitmamba.data.encode import encode_prompt
    from bitmamba.data.example import Message

    segments = [Segment(prompt, False)]
    if chat:
        template = load_template(cfg.template, tokenizer)
        segments = template.prompt([Message("user", prompt)])
    return encode_prompt(segments, tokenizer)


def pieces(
    tokens: Iterable[int], decode: Callable[[Sequence[int]], str]
) -> Iterator[str]:
    """Text as it becomes certain: half a character waits for its other half."""
    seen: list[int] = []
    shown = ""
    for token in tokens:
        seen.append(token)
        text = decode(seen)
        if text.startswith(shown) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(shown) :]
            shown = text
    text = decode(seen)
    if len(text) > len(shown):
        yield text[len(shown) :]


if __name__ == "__main__":
    command_line.run(main)
