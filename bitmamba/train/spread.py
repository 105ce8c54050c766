"""A step's gradients and an evaluation's sums over many devices, each with its rows.

Every device runs the program of one device on its own rows (kernels and the chunked
loss need no change), on parameters gathered where they are read; sums over devices
follow. A gathered leaf's gradient comes back cut, by the gather's own transpose.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from bitmamba.train.layout import AXES, DATA, FSDP, Layout
from bitmamba.train.step import gradients


def spread_gradients(layout: Layout) -> Callable:
    """`bitmamba.train.step.gradients` over a mesh; the same sums up to rounding.

    Random draws (dropout) are each device's own, so they depend on their number.
    """

    def compute(loss_fn, trainable, frozen, batch, *, key, ready=None, **settings):
        cut, held = layout.specs(trainable), layout.specs(frozen)
        if ready is not None:
            shapes = jax.eval_shape(ready, trainable, frozen)
            kept = layout.specs(shapes)

        def whole_loss(trainable, frozen, micro, key, *made):
            made = [gather(one, kept) for one in made]
            whole = gather(trainable, cut), gather(frozen, held)
            return loss_fn(*whole, micro, key, *made)

        def own_ready(trainable, frozen):
            # Of whole leaves, so to the bit that of one device; kept in parts.
            return own(ready(gather(trainable, cut), gather(frozen, held)), kept)

        def local(trainable, frozen, batch, key):
            key = jax.random.fold_in(key, lax.axis_index(AXES))
            grads, *sums = gradients(
                whole_loss,
                trainable,
                frozen,
                batch,
                key=key,
                ready=own_ready if ready is not None else None,
                over=AXES,
                **settings,
            )
            return (
                jax.tree.map(lambda g, s: lax.psum(g, _missing(s)), grads, cut),
                *lax.psum(tuple(sums), AXES),
            )

        spread = jax.shard_map(
            local,
            mesh=layout.mesh,
            in_specs=(cut, held, P(None, AXES), P()),
            out_specs=(cut, P(), P()),
            check_vma=False,
        )
        return spread(trainable, frozen, batch, key)

    return compute


def spread_eval(eval_step: Callable, layout: Layout) -> Callable:
    """An eval_step whose rows are spread; its sums are those of all rows."""

    def compute(trainable, frozen, batch):
        cut, held = layout.specs(trainable), layout.specs(frozen)

        def local(trainable, frozen, batch):
            sums = eval_step(gather(trainable, cut), gather(frozen, held), batch)
            return lax.psum(sums, AXES)

        spread = jax.shard_map(
            local,
            mesh=layout.mesh,
            in_specs=(cut, held, P(AXES)),
            out_specs=P(),
            check_vma=False,
        )
        return spread(trainable, frozen, batch)

    return compute


def gather(tree: Any, specs: Any) -> Any:
    """Whole leaves from their parts along `fsdp`."""

    def one(part, spec):
        if FSDP not in spec:
            return part
        return lax.all_gather(part, FSDP, axis=spec.index(FSDP), tiled=True)

    return jax.tree.map(one, tree, specs)


def own(tree: Any, specs: Any) -> Any:
    """This device's parts of whole leaves; `gather` undoes it."""

    def one(leaf, spec):
        if FSDP not in spec:
            return leaf
        axis = spec.index(FSDP)
        size = leaf.shape[axis] // lax.axis_size(FSDP)
        start = lax.axis_index(FSDP) * size
        return lax.dynamic_slice_in_dim(leaf, start, size, axis)

    return jax.tree.map(one, tree, specs)


def _missing(spec: P) -> str | tuple[str, ...]:
    """Axes over which a gradient is not yet summed."""
    return DATA if FSDP in spec else AXES
