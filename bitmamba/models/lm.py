"""The language model: embedding, a stack of blocks, final norm, head."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from bitmamba.config import ModelConfig
from bitmamba.models.block import Block
from bitmamba.models.cache import DecodeState, document_positions, real_tokens
from bitmamba.models.layers import Embed, Head, RMSNorm
from bitmamba.types import AdapterSpec, Features


class LM(nn.Module):
    """Build it with `bitmamba.models.build_model`, which fills in `mixers`.

    cfg: the architecture. mixers: one module class a layer. kernels: implementation of
    the sequence operators, see `pallas_kernels`. adapters: those whose leaves its
    parameter trees hold; see `variables`.
    """

    cfg: ModelConfig
    mixers: tuple[type[nn.Module], ...]
    kernels: str = "auto"
    adapters: tuple[AdapterSpec, ...] = ()

    def setup(self):
        self.embed = Embed(self.cfg)
        block = nn.remat(Block) if self.cfg.remat else Block
        for i, mixer in enumerate(self.mixers):
            setattr(self, f"layer_{i}", block(self.cfg, mixer, self.kernels))
        self.final_norm = RMSNorm(self.cfg.norm_eps)
        if not self.cfg.tie_embeddings:
            self.lm_head = Head(self.cfg)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Logits (B, L, V) in float32; arguments as for `features`."""
        return _logits(
            self.features(tokens, segment_ids=segment_ids, positions=positions)
        )

    def features(
        self,
        tokens: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> Features:
        """What the head multiplies: logits are exactly hidden @ head.

        Args:
            tokens: (B, L) int32.
            segment_ids: (B, L) int32 or None for one document a row. Tokens of
                different documents do not touch each other in any layer.
            positions: (B, L) int32 or None for 0, 1, ... from each document's start.

        Returns:
            Features(hidden (B, L, D), head (D, V)): float32 for a ternary head, else
            in the compute dtype. Gradients to both reach the parameters.
        """
        if positions is None:
            positions = document_positions(tokens, segment_ids)
        x = self.embed(tokens)
        for i in range(len(self.mixers)):
            x, _ = getattr(self, f"layer_{i}")(x, segment_ids, positions, None)
        return self._head(x)

    def decode(
        self,
        tokens: jax.Array,
        *,
        state: DecodeState,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> tuple[jax.Array, DecodeState]:
        """Continue every row by the given tokens; one call may take many, or one.

        Args:
            tokens: (B, L) int32.
            state: from `init_decode_state` or an earlier call. A cache with attention
                must have room for L more tokens.
            segment_ids: (B, L) int32 or None. 0 marks (left) padding, which enters
                neither convolution, state nor attention; any other value is text.
            positions: (B, L) int32 or None: counted on from the state, padding not
                counted.

        Returns:
            (logits (B, L, V) float32, state after these tokens).
        """
        real = real_tokens(tokens, segment_ids)
        count = jnp.cumsum(real, axis=1, dtype=jnp.int32)
        if positions is None:
            positions = state.positions[:, None] + jnp.maximum(count - 1, 0)
        x = self.embed(tokens)
        layers = []
        for i, layer_state in enumerate(state.layers):
            layer = getattr(self, f"layer_{i}")
            x, layer_state = layer(x, segment_ids, positions, layer_state)
            layers.append(layer_state)
        after = jnp.maximum(state.positions, positions[:, -1] + 1)
        after = jnp.where(real.any(axis=1), after, state.positions)
        return _logits(self._head(x)), DecodeState(tuple(layers), after)

    def _head(self, x: jax.Array) -> Features:
        x = self.final_norm(x)
        if self.cfg.tie_embeddings:
            return self.embed.tied_head(x)
        return self.lm_head(x)


def _logits(features: Features) -> jax.Array:
    wide = jnp.promote_types(features.hidden.dtype, jnp.float32)
    return jnp.dot(*features, preferred_element_type=wide)
