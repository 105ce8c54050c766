"""Continuations of the configured prompts, to be read before and after training."""

from bitmamba.config import Config
from bitmamba.data import DataBundle
from bitmamba.models import LM
from bitmamba.models.sample import generate
from bitmamba.types import Params


def continue_prompts(
    config: Config, data: DataBundle, model: LM, params: Params
) -> list[tuple[str, str]]:
    """Greedy continuations; a prompt is a user's turn if examples are trained.

    Returns:
        (prompt, continuation) pairs, in the order of `config.eval.prompts`.
    """
    tokenizer = data.tokenizer
    pairs = []
    for prompt in config.eval.prompts:
        is_chat = bool(config.data.sft)
        ids = data.prompt_ids(prompt) if is_chat else data.text_ids(prompt)
        continued = generate(
            model,
            params,
            ids,
            max_tokens=config.eval.sample_tokens,
            stop_id=tokenizer.eot_id,
        )
        pairs.append((prompt, tokenizer.decode(list(continued))))
    return pairs
