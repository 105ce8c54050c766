"""What a loss costs when the head is frozen, and what is never in memory whole."""

import jax
import jax.numpy as jnp
import pytest

from bitmamba.losses import cross_entropy, distillation, tmkl

T, D, V, K = 64, 256, 1024, 4
TOKENS, COLUMNS = 16, 256  # of a block: tokens by V, or T by columns

HIDDEN = jax.ShapeDtypeStruct((T, D), jnp.float32)
HEAD = jax.ShapeDtypeStruct((D, V), jnp.float32)
TARGETS = jax.ShapeDtypeStruct((T,), jnp.int32)
IDS = jax.ShapeDtypeStruct((T, K), jnp.int32)
LOGITS = jax.ShapeDtypeStruct((T, K), jnp.float32)

# Name -> (loss of (hidden, head, others), others, multiplications of one product of a
# block, how many products to hidden alone, to both). XLA counts a loop's body once.
LOSSES = {
    "cross_entropy": (
        lambda h, w, targets: cross_entropy(h, w, targets, block_size=COLUMNS),
        (TARGETS,),
        T * D * COLUMNS,
        3,
        4,
    ),
    "tmkl": (
        lambda h, w, base, targets: tmkl(h, w, base, w, targets, block_size=TOKENS),
        (HIDDEN, TARGETS),
        TOKENS * D * V,
        3,
        6,
    ),
    "distillation": (
        lambda h, w, ids, logits: distillation(h, w, ids, logits, block_size=TOKENS),
        (IDS, LOGITS),
        TOKENS * D * V,
        2,
        4,
    ),
}


def micro_batches(loss, argnums):
    """A step as in training: gradients add up over micro-batches in a loop."""
    gradient = jax.grad(lambda h, w, *others: loss(h, w, *others).sum(), argnums)

    def step(head, batches):
        def body(total, batch):
            hidden, *others = batch
            return jax.tree.map(jnp.add, total, gradient(hidden, head, *others)), None

        like = jax.tree.map(lambda b: b[0], batches)
        shapes = jax.eval_shape(gradient, like[0], head, *like[1:])
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return jax.lax.scan(body, zeros, batches)[0]

    return jax.jit(step)


@pytest.mark.parametrize("name", LOSSES)
def test_a_frozen_head_has_no_gradient_product_and_no_logits_are_whole(name):
    loss, others, multiplications, frozen, trained = LOSSES[name]
    batches = [jax.ShapeDtypeStruct((2, *s.shape), s.dtype) for s in (HIDDEN, *others)]

    for argnums, products in (((0,), frozen), ((0, 1), trained)):
        compiled = micro_batches(loss, argnums).lower(HEAD, batches).compile()

        counted = compiled.cost_analysis()["flops"] / (2 * multiplications)
        assert products <= counted < products + 0.5
        assert f"f32[{T},{V}]" not in compiled.as_text()
