import jax
import numpy as np
import pytest

from bitmamba.models.sample import Sampling, choose, generate, stream

pytestmark = pytest.mark.newest

LOGITS = np.log(np.array([0.5, 0.05, 0.3, 0.15], np.float32))
STOP = 7


@pytest.fixture(scope="module")
def lm(tiny, make_lm):
    return make_lm(tiny("M*", vocab_size=24))


def _draws(temperature, top_p, n=4000):
    keys = jax.random.split(jax.random.key(0), n)
    draw = jax.vmap(
        lambda key: choose(LOGITS, key, temperature=temperature, top_p=top_p)
    )
    return np.bincount(jax.jit(draw)(keys), minlength=4) / n


def test_temperature_0_takes_the_largest():
    assert _draws(0.0, 1.0).tolist() == [1, 0, 0, 0]


def test_sampling_follows_the_distribution():
    assert np.abs(_draws(1.0, 1.0) - np.exp(LOGITS)).max() < 0.03


def test_temperature_sharpens():
    expected = np.exp(2 * LOGITS) / np.exp(2 * LOGITS).sum()

    assert np.abs(_draws(0.5, 1.0) - expected).max() < 0.03


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.01, [0]), (0.49, [0]), (0.7, [0, 2]), (0.9, [0, 2, 3])]
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p, kept):
    shares = _draws(1.0, top_p)

    expected = np.zeros(4)
    expected[kept] = np.exp(LOGITS)[kept] / np.exp(LOGITS)[kept].sum()
    assert np.flatnonzero(shares).tolist() == kept
    assert np.abs(shares - expected).max() < 0.03


def test_greedy_generation_equals_the_whole_model_token_by_token(lm):
    model, params = lm
    prompt = [3, 1, 4]
    whole = jax.jit(lambda tokens: model.apply({"params": params}, tokens))
    text = list(prompt)
    for _ in range(6):
        padded = np.zeros((1, 9), np.int32)
        padded[0, : len(text)] = text
        text.append(int(whole(padded)[0, len(text) - 1].argmax()))

    got = generate(model, params, [prompt], max_tokens=6, stop_id=-1)

    assert got == [text[3:]]


def test_a_prompt_beside_longer_ones_gives_the_same_tokens(lm):
    # Case B094.
    model, params = lm
    prompts = [[3], [5] * 7 + [2], list(range(20))]

    together = generate(model, params, prompts, max_tokens=8, stop_id=-1)
    alone = [generate(model, params, [p], max_tokens=8, stop_id=-1)[0] for p in prompts]

    assert together == alone


def test_a_row_ends_before_the_stop_token_and_the_others_go_on(lm):
    model, params = lm
    prompts = [[3], [9, 2]]
    free = generate(model, params, prompts, max_tokens=8, stop_id=-1)
    stop = free[0][2]

    stopped = generate(model, params, prompts, max_tokens=8, stop_id=stop)

    for row, was in zip(stopped, free, strict=True):
        assert row == was[: was.index(stop)] if stop in was else row == was
    assert len(stopped[0]) < 8


def test_streaming_equals_generation_and_seeds_repeat(lm):
    model, params = lm
    warm = Sampling(temperature=1.0, top_p=0.9, seed=5)
    arguments = {"max_tokens": 12, "stop_id": STOP}

    once = list(stream(model, params, [1, 2], sampling=warm, **arguments))

    assert once == generate(model, params, [[1, 2]], sampling=warm, **arguments)[0]
    assert once == list(stream(model, params, [1, 2], sampling=warm, **arguments))
    other = warm._replace(seed=6)
    assert once != list(stream(model, params, [1, 2], sampling=other, **arguments))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": [[]]}, "prompt: got no tokens"),
        ({"max_tokens": 0}, "max_tokens: got 0"),
        ({"sampling": Sampling(temperature=float("nan"))}, "temperature: got nan"),
        ({"sampling": Sampling(top_p=0.0)}, "top_p: got 0"),
    ],
)
def test_bad_settings_are_refused(changes, message, lm):
    arguments = {"prompts": [[1]], "max_tokens": 2, "stop_id": STOP} | changes

    with pytest.raises(ValueError, match=message):
        generate(*lm, **arguments)
