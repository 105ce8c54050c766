"""Generation: greedy or sampled, one compiled step a token, streamed as it comes."""

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bitmamba.models import init_decode_state, variables
from bitmamba.models.lm import LM
from bitmamba.types import Params

# Prompts are padded to a multiple of this, so that few lengths are compiled.
PROMPT_MULTIPLE = 32


class Sampling(NamedTuple):
    """How the next token is chosen.

    temperature: 0 is greedy; otherwise logits are divided by it.
    top_p: sample among the fewest tokens whose probabilities reach it; 1 is all.
    seed: of the random choices; row i of a batch has its own stream.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


def choose(
    logits: jax.Array, key: jax.Array, *, temperature: jax.Array, top_p: jax.Array
) -> jax.Array:
    """The next token of one row.

    Args:
        logits: (V,) float32.
        key: of the random choice; not used when temperature is 0.
        temperature: >= 0; 0 takes the largest logit.
        top_p: in (0, 1]. The most probable token is always kept.

    Returns:
        () int32.
    """
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
    order = jnp.argsort(-scaled)
    probability = jax.nn.softmax(scaled)[order]
    before = jnp.cumsum(probability) - probability
    kept = jnp.zeros(logits.shape, bool).at[order].set(before < top_p)
    drawn = jax.random.categorical(key, jnp.where(kept, scaled, -jnp.inf))
    return jnp.where(temperature > 0, drawn, jnp.argmax(logits)).astype(jnp.int32)


def generate(
    model: LM,
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    stop_id: int,
    sampling: Sampling = Sampling(),
) -> list[list[int]]:
    """Continue prompts of any lengths, in one batch.

    Args:
        model: from `build_model`.
        params: its parameters.
        prompts: token ids, none empty.
        max_tokens: most new tokens a row.
        stop_id: a row ends before this token.
        sampling: how tokens are chosen.

    Returns:
        The new tokens of each row, without stop_id.

    Raises:
        ValueError: an empty prompt, or a setting out of range.
    """
    rows: list[list[int]] = [[] for _ in prompts]
    is_done = np.zeros(len(prompts), bool)
    for tokens in _steps(model, params, prompts, max_tokens, sampling):
        is_done |= tokens == stop_id
        if is_done.all():
            break
        for i in np.flatnonzero(~is_done):
            rows[i].append(int(tokens[i]))
    return rows


def stream(
    model: LM,
    params: Params,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    stop_id: int,
    sampling: Sampling = Sampling(),
) -> Iterator[int]:
    """Continue one prompt, token by token; arguments as for `generate`."""
    for tokens in _steps(model, params, [prompt], max_tokens, sampling):
        if tokens[0] == stop_id:
            return
        yield int(tokens[0])


def _steps(
    model: LM,
    params: Params,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    sampling: Sampling,
) -> Iterator[np.ndarray]:
    """(B,) new tokens, up to max_tokens times."""
    _check(prompts, max_tokens, sampling)
    tokens, is_real = _left_pad(prompts)
    room = tokens.shape[1] + -(-max_tokens // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
    state = init_decode_state(model.cfg, len(prompts), room)
    temperature = np.float32(sampling.temperature)
    top_p = np.float32(sampling.top_p)
    key = jax.random.key(sampling.seed)
    step = _compiled_step(model)
    for t in range(max_tokens):
        now = jax.random.fold_in(key, t)
        chosen, state = step(params, tokens, is_real, state, now, temperature, top_p)
        yield np.asarray(chosen)
        tokens, is_real = chosen[:, None], np.ones((len(prompts), 1), np.int32)


@lru_cache(maxsize=4)
def _compiled_step(model: LM):
    """Decode the given tokens and choose the next; one program a shape."""

    @jax.jit
    def step(params, tokens, is_real, state, key, temperature, top_p):
        logits, state = model.apply(
            variables(model, params),
            tokens,
            state=state,
            segment_ids=is_real,
            method="decode",
        )
        rows = jnp.arange(len(tokens))
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, rows)
        choose_row = partial(choose, temperature=temperature, top_p=top_p)
        chosen = jax.vmap(choose_row)(logits[:, -1], keys)
        return chosen, state

    return step


def _left_pad(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, 1 where real and 0 where padded), (B, L) int32 each."""
    longest = max(len(prompt) for prompt in prompts)
    length = -(-longest // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
    tokens = np.zeros((len(prompts), length), np.int32)
    is_real = np.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, length - len(prompt) :] = prompt
        is_real[row, length - len(prompt) :] = 1
    return tokens, is_real


def _check(
    prompts: Sequence[Sequence[int]], max_tokens: int, sampling: Sampling
) -> None:
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError("generate: prompt: got no tokens; expected at least one")
    if max_tokens < 1:
        raise ValueError(f"generate: max_tokens: got {max_tokens}; expected >= 1")
    if not 0 <= sampling.temperature < float("inf"):
        raise ValueError(
            f"generate: temperature: got {sampling.temperature:g}; expected >= 0"
        )
    if not 0 < sampling.top_p <= 1:
        raise ValueError(
            f"generate: top_p: got {sampling.top_p:g}; expected 0 < top_p <= 1"
        )
