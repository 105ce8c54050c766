"""Continuations of the configured prompts, to be read before and after training."""

import json
from pathlib import Path

from bitmamba.config import Config
from bitmamba.data import DataBundle
from bitmamba.models import LM
from bitmamba.models.sample import Sampling, generate
from bitmamba.paths import merge
from bitmamba.train.layout import on_one_device
from bitmamba.train.prepare import Run
from bitmamba.types import Params

# Small models repeat themselves when the likeliest token is always taken.
TEMPERATURE, TOP_P = 0.7, 0.9


def continue_prompts(
    config: Config, data: DataBundle, model: LM, params: Params
) -> list[tuple[str, str]]:
    """Sampled continuations, with the same draws before and after training.

    A prompt is a user's turn if examples are trained, else plain text.

    Returns:
        (prompt, continuation) pairs, in the order of `config.eval.prompts`.
    """
    prompts = config.eval.prompts
    if not prompts:
        return []
    encode = data.prompt_ids if config.data.sft else data.text_ids
    continued = generate(
        model,
        params,
        [encode(prompt) for prompt in prompts],
        max_tokens=config.eval.sample_tokens,
        stop_id=data.tokenizer.eot_id,
        sampling=Sampling(TEMPERATURE, TOP_P, config.seed),
    )
    texts = [data.tokenizer.decode(ids) for ids in continued]
    return list(zip(prompts, texts, strict=True))


def sample(run: Run, trainable: Params, *, step: int) -> None:
    """Continue the prompts of a run, in the first of its processes; all must ask.

    Raises:
        OSError: the file could not be written.
    """
    if not run.config.eval.prompts:
        return
    params = merge(trainable, run.held.weights)
    if run.parts.layout:
        params = on_one_device(params)
    if run.peers.is_first:
        write_samples(run.config, run.data, run.parts.model, params, step=step)


def write_samples(
    config: Config, data: DataBundle, model: LM, params: Params, *, step: int
) -> None:
    """Append `continue_prompts` to <workdir>/samples.jsonl; step 0 begins it anew."""
    texts = continue_prompts(config, data, model, params)
    path = _path(config)
    with path.open("a" if step else "w", encoding="utf-8") as file:
        for prompt, text in texts:
            row = {"step": step, "prompt": prompt, "text": text}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def are_written(config: Config, step: int) -> bool:
    """Whether the continuations after a step are there; a kill may have missed them."""
    if not config.eval.prompts or not _path(config).exists():
        return True
    lines = _path(config).read_text(encoding="utf-8").splitlines(keepends=True)
    return any(json.loads(x)["step"] == step for x in lines if x.endswith("\n"))


def _path(config: Config) -> Path:
    return Path(config.workdir) / "samples.jsonl"
