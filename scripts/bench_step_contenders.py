"""The contenders of bench_step.py: each imports its packages, then makes its step.

CONTENDERS[name](shape) imports and returns make; make() builds the model and returns
(call, number of parameters); call() is one step and returns its loss. `shape` has the
sizes of bench_step.py as attributes.
"""

import importlib
import sys
from pathlib import Path

EXPAND = 2
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.1


def _tokens(shape):
    """(B, L + 1) int32."""
    import numpy as np

    rng = np.random.default_rng(0)
    sizes = (shape.batch, shape.length + 1)
    return rng.integers(0, shape.vocab_size, sizes, dtype=np.int32)


def _ours(shape):
    import jax
    import numpy as np

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from bitmamba import config
    from bitmamba.models import build_model, init_params
    from bitmamba.optim import make_optimizer
    from bitmamba.train.objective import Frozen, make_loss_fn
    from bitmamba.train.state import init_state
    from bitmamba.train.step import make_train_step
    from bitmamba.types import Batch

    def make():
        mixer = config.Mamba2Config(
            expand=EXPAND,
            headdim=shape.headdim,
            d_state=shape.d_state,
            chunk_size=shape.chunk_size,
        )
        model = build_model(
            config.ModelConfig(
                vocab_size=shape.vocab_size,
                d_model=shape.d_model,
                layers=("mamba2",) * shape.layers,
                linear="dense",
                dtype="float32",
                mamba2=mixer,
            )
        )
        params = init_params(model, jax.random.key(0))
        settings = config.OptimConfig(
            name="adamw", lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY
        )
        optimizer = make_optimizer(settings, params, steps=100)
        function = make_train_step(
            make_loss_fn(model, config.LossConfig()), optimizer.update, n_categories=1
        )
        step = jax.jit(function, donate_argnums=0)
        tokens = _tokens(shape)[None]
        ones = np.ones_like(tokens[..., 1:])
        batch = Batch(
            tokens=tokens[..., :-1],
            targets=tokens[..., 1:],
            loss_weights=ones.astype(np.float32),
            segment_ids=ones,
            positions=ones.cumsum(-1, dtype=np.int32) - 1,
            source_ids=ones * 0,
        )
        n_params = _jax_size(params)
        state = [init_state(params, jax.jit(optimizer.init)(params))]
        batch = jax.device_put(batch)

        def call():
            state[0], metrics = step(state[0], Frozen({}, {}), batch)
            jax.block_until_ready(state[0])
            return float(metrics["loss"])

        return call, n_params

    return make


def _mamba2_jax(shape):
    import jax
    import optax

    nnx = importlib.import_module("flax.nnx")
    peer = importlib.import_module("mamba2_jax")

    def make():
        settings = peer.Mamba2Config(
            vocab_size=shape.vocab_size,
            hidden_size=shape.d_model,
            state_size=shape.d_state,
            head_dim=shape.headdim,
            chunk_size=shape.peer_chunk_size,
            expand=EXPAND,
            num_hidden_layers=shape.layers,
            tie_word_embeddings=False,
        )
        model = peer.Mamba2ForCausalLM(settings, rngs=nnx.Rngs(0))
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        n_params = _jax_size(params)
        optimizer = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)

        def loss_of(params, tokens):
            return nnx.merge(graph, params, rest)(tokens, labels=tokens)["loss"]

        def function(params, opt_state, tokens):
            loss, grads = jax.value_and_grad(loss_of)(params, tokens)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        step = jax.jit(function, donate_argnums=(0, 1))
        state = [params, jax.jit(optimizer.init)(params)]
        tokens = jax.device_put(_tokens(shape)[:, :-1])

        def call():
            *state[:], loss = step(*state, tokens)
            jax.block_until_ready(state)
            return float(loss)

        return call, n_params

    return make


def _transformers(shape, *, compiled=False):
    import torch

    peer = importlib.import_module("transformers")
    importlib.import_module("transformers.models.mamba2.modeling_mamba2")

    def make():
        torch.manual_seed(0)
        settings = peer.Mamba2Config(
            vocab_size=shape.vocab_size,
            hidden_size=shape.d_model,
            num_hidden_layers=shape.layers,
            num_heads=EXPAND * shape.d_model // shape.headdim,
            head_dim=shape.headdim,
            state_size=shape.d_state,
            expand=EXPAND,
            n_groups=1,
            chunk_size=shape.peer_chunk_size,
            tie_word_embeddings=False,
            use_cache=False,
        )
        model = peer.Mamba2ForCausalLM(settings).train()
        n_params = sum(p.numel() for p in model.parameters())
        optimizer = torch.optim.AdamW(
            model.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
        )
        tokens = torch.from_numpy(_tokens(shape)[:, :-1]).long()

        def loss_of(tokens):
            return model(tokens, labels=tokens).loss

        loss_of = torch.compile(loss_of) if compiled else loss_of

        def call():
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(tokens)
            loss.backward()
            optimizer.step()
            return loss.item()

        return call, n_params

    return make


def _matrix_product(shape):
    import jax

    def make():
        a = jax.numpy.ones((2048, 2048))
        product = jax.jit(lambda a: a @ a)
        return lambda: product(a).block_until_ready()[0, 0].item(), 0

    return make


PRODUCT = "matrix product"
CONTENDERS = {
    PRODUCT: _matrix_product,
    "ours": _ours,
    "mamba2-jax": _mamba2_jax,
    "transformers": _transformers,
    "transformers compiled": lambda shape: _transformers(shape, compiled=True),
}


def _jax_size(tree):
    import jax

    return sum(leaf.size for leaf in jax.tree.leaves(tree))
