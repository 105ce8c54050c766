"""The convolution and its gradient on a GPU: each element is read and written once.

A block walks along the tokens of one stretch with a few channels in registers; what the
convolution looks back at is carried from token to token. No shared memory, no tensor
cores: the operator is bound by memory.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.causal_conv1d.shapes import Blocks
from pallas_kernels.mosaic import pl, plgpu


class _Refs(NamedTuple):
    """window (B, K-1+L, C), weight (K, C); bias (C,) and run (B, K-1+L) or None."""

    window: Any
    weight: Any
    bias: Any
    run: Any


class _Reader(NamedTuple):
    """What one block reads: a row of a batch, `width` channels from `start`."""

    refs: _Refs
    row: Any
    channels: Any
    width: int

    def load(self, ref, *index):
        layout = plgpu.Layout.WG_STRIDED((self.width,), vec_size=self.width // 128)
        part = ref.at[(*index, self.channels)]
        return plgpu.load(part, layout=layout, optimized=False).astype(jnp.float32)

    def at(self, place):
        """(the inputs at a place of the window, the number of its document)."""
        value = self.load(self.refs.window, self.row, place)
        run = self.refs.run
        return value, None if run is None else run[self.row, place]

    def weights(self):
        """The K taps, and the bias or None."""
        n_taps = self.refs.weight.shape[0]
        taps = [self.load(self.refs.weight, k) for k in range(n_taps)]
        bias = self.refs.bias
        return taps, None if bias is None else self.load(bias)

    def zeros(self):
        layout = plgpu.Layout.WG_STRIDED((self.width,), vec_size=self.width // 128)
        return plgpu.layout_cast(jnp.zeros((self.width,), jnp.float32), layout)


def conv_kernel(
    window: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    run: jax.Array | None,
    *,
    activation: str | None,
    blocks: Blocks,
) -> jax.Array:
    """(B, L, C) in window.dtype; C is a multiple of blocks.channels."""
    (batch, places, channels), n_taps = window.shape, weight.shape[0]
    length = places - (n_taps - 1)

    def body(*refs):
        *inputs, y = refs
        reader, first = _open(inputs, bias, run, blocks)
        taps, offset = reader.weights()
        last = jnp.minimum(first + blocks.tokens, length)

        def step(token, seen):
            seen = (*seen, reader.at(token + n_taps - 1))
            total = _weighted(taps, offset, seen)
            if activation == "silu":
                total = total * jax.nn.sigmoid(total)
            y[reader.row, token, reader.channels] = total.astype(window.dtype)
            return seen[1:]

        lax.fori_loop(first, last, step, _before(reader, first, n_taps))

    body.__name__ = "causal_conv1d"
    return _call(
        body,
        (window, weight, bias, run),
        jax.ShapeDtypeStruct((batch, length, channels), window.dtype),
        grid=(batch, pl.cdiv(length, blocks.tokens), channels // blocks.channels),
    )


def conv_gradient_kernel(
    window: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    run: jax.Array | None,
    dy: jax.Array,
    *,
    activation: str | None,
    blocks: Blocks,
) -> tuple[jax.Array, jax.Array]:
    """(dwindow in window.dtype, sums (B, blocks, K+1, C) float32).

    The sums are of the gradients of the taps and of the bias over the tokens of each
    block, to be added up.
    """
    (batch, places, channels), n_taps = window.shape, weight.shape[0]
    length = dy.shape[1]
    n_blocks = pl.cdiv(places, blocks.tokens)

    def body(*refs):
        *inputs, dy_ref, dwindow, sums = refs
        reader, first = _open(inputs, bias, run, blocks)
        taps, offset = reader.weights()
        last = jnp.minimum(first + blocks.tokens, places)
        # Tokens before the block whose windows reach into it: their gradients are
        # computed here once more.
        start = jnp.maximum(first - (n_taps - 1), 0)

        def step(token, carry):
            seen, later, totals = carry
            is_token, is_own = token < length, token >= first
            inside = jnp.minimum(token, length - 1)
            seen = (*seen, reader.at(inside + n_taps - 1))
            dtotal = reader.load(dy_ref, reader.row, inside)
            if activation == "silu":
                total = _weighted(taps, offset, seen)
                gate = jax.nn.sigmoid(total)
                dtotal = dtotal * (gate * (1 + total * (1 - gate)))
            dtotal = jnp.where(is_token, dtotal, reader.zeros())
            later = (*later, (dtotal, seen[-1][1]))
            masked = [*_masked(seen), None]
            own = jnp.where(is_own, dtotal, reader.zeros())
            totals = tuple(
                sum_ + (own if tap is None else own * tap)
                for sum_, tap in zip(totals, masked, strict=True)
            )

            @pl.when(is_own)
            def _():
                here = None if run is None else reader.refs.run[reader.row, token]
                dx = _gathered(taps, later, here)
                dwindow[reader.row, token, reader.channels] = dx.astype(window.dtype)

            return seen[1:], later[1:], totals

        none = (reader.zeros(), None if run is None else jnp.int32(-1))
        carry = (
            _before(reader, start, n_taps),
            (none,) * (n_taps - 1),
            (reader.zeros(),) * (n_taps + 1),
        )
        *_, totals = lax.fori_loop(start, last, step, carry)
        block = lax.axis_index("stretch")
        for k, total in enumerate(totals):
            sums[reader.row, block, k, reader.channels] = total

    body.__name__ = "causal_conv1d_gradient"
    return _call(
        body,
        (window, weight, bias, run, dy),
        (
            jax.ShapeDtypeStruct(window.shape, window.dtype),
            jax.ShapeDtypeStruct((batch, n_blocks, n_taps + 1, channels), jnp.float32),
        ),
        grid=(batch, n_blocks, channels // blocks.channels),
    )


def _call(body, operands, out_type, *, grid):
    return mosaic.kernel(
        body,
        out_type=out_type,
        grid=grid,
        grid_names=("row", "stretch", "channels"),
        compiler_params=mosaic.WRITES_ONLY,
    )(*(t for t in operands if t is not None))


def _open(inputs, bias, run, blocks):
    """(the block's reader, its first place)."""
    window, weight, *rest = inputs
    refs = _Refs(
        window,
        weight,
        None if bias is None else rest.pop(0),
        None if run is None else rest.pop(0),
    )
    start = lax.axis_index("channels") * blocks.channels
    channels = pl.ds(start, blocks.channels)
    reader = _Reader(refs, lax.axis_index("row"), channels, blocks.channels)
    return reader, lax.axis_index("stretch") * blocks.tokens


def _before(reader, first, n_taps):
    """What the first token looks back at, oldest first."""
    return tuple(reader.at(first + k) for k in range(n_taps - 1))


def _masked(seen):
    """Inputs under the taps, zero where they are of another document than the last."""
    here = seen[-1][1]
    if here is None:
        return [value for value, _ in seen]
    return [jnp.where(run == here, value, jnp.zeros_like(value)) for value, run in seen]


def _weighted(taps, offset, seen):
    """Bias plus taps times inputs."""
    parts = [w * x for w, x in zip(taps, _masked(seen), strict=True)]
    return sum(parts[1:], parts[0]) if offset is None else sum(parts, offset)


def _gathered(taps, later, here):
    """What the tokens from K-1 before this place to its own send back to it.

    The last of them, the token of the same number, reads the place by its oldest tap.
    """
    parts = []
    for w, (dtotal, run) in zip(taps[::-1], later, strict=True):
        part = w * dtotal
        if here is not None:
            part = jnp.where(run == here, part, jnp.zeros_like(part))
        parts.append(part)
    return sum(parts[1:], parts[0])
