"""One chunk of the scan, forward and backward; README.md derives the formulas.

Arguments: x, dy (B, Q, H, P); dt (B, Q, H); A (H,); B, C (B, Q, G, N); D (H, P) or
None; state (B, H, P, N); all in the wide dtype already. Inside, heads come before
tokens and are split by group, (B, G, R, Q, P) with R = H/G: then every product is a
batch of plain matrix products and no operand is transposed twice.

Three habits make XLA:CPU fast here: sums are products with ones (its reductions fuse
badly), barriers keep a factor from being recomputed inside a product's operand, and the
two transposed inputs are made once. Barriers change no value.
"""

import functools

import jax.numpy as jnp
from jax import lax

from pallas_kernels.ssd.decays import Decays, keep, lower, make_decays

_exact_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def _by_group(t, groups):
    """(B, H, ...) -> (B, G, R, ...)."""
    return t.reshape(t.shape[0], groups, -1, *t.shape[2:])


def _by_head(t):
    """(B, G, R, ...) -> (B, H, ...)."""
    return t.reshape(t.shape[0], -1, *t.shape[3:])


def _heads_first(t, groups):
    """(B, Q, H, ...) -> (B, G, R, Q, ...)."""
    return _by_group(t.swapaxes(1, 2), groups)


def _tokens_first(t):
    """(B, G, R, Q, ...) -> (B, Q, H, ...)."""
    return _by_head(t).swapaxes(1, 2)


def _sum_last(t):
    return _exact_einsum("...p,p->...", t, jnp.ones(t.shape[-1], t.dtype))


def _sum_heads(t):
    """(B, G, R, Q, N) -> (B, G, Q, N)."""
    b, g, r, q, n = t.shape
    flat = t.reshape(b, g, r, q * n)
    return _exact_einsum("r,bgrz->bgz", jnp.ones(r, t.dtype), flat).reshape(b, g, q, n)


def _prepare(x, dt, A, B, C, masks):
    """What both directions need, heads first: x, dt, B, C, decays and scores."""
    groups = B.shape[2]
    decays = Decays(*(_by_group(t, groups) for t in make_decays(dt, A, masks)))
    B, C = B.swapaxes(1, 2), C.swapaxes(1, 2)
    scores = jnp.einsum("bgin,bgjn->bgij", C, B)
    scores = jnp.where(masks.pair[:, None], scores, 0)[:, :, None]
    return _heads_first(x, groups), _heads_first(dt, groups), B, C, decays, scores


def chunk_forward(state, x, dt, A, B, C, D, masks):
    """One chunk: (state leaving it, y)."""
    shape, groups = state.shape, B.shape[2]
    x_given = x
    x, dt, B, C, decays, scores = _prepare(x, dt, A, B, C, masks)
    state = _by_group(state, groups)
    # dt goes into the weights, not onto x: the weights of foreign tokens are exact
    # zeros, and x is finite where dt·x may not be.
    weights = scores * decays.pair * dt[..., None, :]
    x = lax.optimization_barrier(x)
    y = jnp.einsum("bgrij,bgrjp->bgrip", weights, x)
    seen = jnp.einsum("bgin,bgrpn->bgrip", C, state) * decays.from_start[..., None]
    y = _tokens_first(y + keep(masks.from_start, seen, axis=3))
    if D is not None:
        y = y + D * x_given

    left = (dt * decays.to_end)[..., None] * x
    added = jnp.einsum("bgrjp,bgjn->bgrpn", left, B)
    passed = keep(masks.through, state * decays.through[..., None, None])
    return (passed + added).reshape(shape), y


def chunk_backward(dstate, state, dy, x, dt, A, B, C, D, masks):
    """One chunk, given the state entering it and the gradient of the one leaving it.

    Returns:
        (gradient of the entering state, (dx, ddt, dB, dC), (dA, dD)).
    """
    shape, groups = state.shape, B.shape[2]
    dD = None if D is None else (dy * x).sum((0, 1))
    x, dt, B, C, decays, scores = _prepare(x, dt, A, B, C, masks)
    state, dstate = _by_group(state, groups), _by_group(dstate, groups)
    x, dy = lax.optimization_barrier((x, _heads_first(dy, groups)))

    u, dB, dC, pairs = _inside(dy, x, dt, B, C, decays, scores, masks)
    heard = lax.optimization_barrier(decays.from_start[..., None] * dy)
    dC_heads = jnp.einsum("bgrip,bgrpn->bgrin", heard, state)
    dC_heads = keep(masks.from_start, dC_heads, axis=3)
    dC = dC + _sum_heads(dC_heads)
    from_start = _sum_last(dC_heads * C[:, :, None])

    left = lax.optimization_barrier((dt * decays.to_end)[..., None] * x)
    dB_heads = jnp.einsum("bgrjp,bgrpn->bgrjn", left, dstate)
    dB_heads = keep(masks.to_end, dB_heads, axis=3)
    dB = dB + _sum_heads(dB_heads)
    v = jnp.einsum("bgjn,bgrpn->bgrjp", B, dstate) * decays.to_end[..., None]
    v = keep(masks.to_end, v, axis=3)
    u = u + v
    to_end = dt * _sum_last(x * v)

    through = decays.through * _sum_last(_sum_last(dstate * state))
    through = keep(masks.through, through)
    passed = keep(masks.through, dstate * decays.through[..., None, None])
    dstate_in = jnp.einsum("bgrip,bgin->bgrpn", heard, C) + passed

    da = _log_decay_gradient(pairs, from_start, to_end, through, masks)
    ddt = _sum_last(x * u) + A.reshape(groups, -1, 1) * da
    dx = dt[..., None] * u
    if D is not None:
        dx = dx + _by_group(D[None], groups)[:, :, :, None] * dy
    dA = _sum_last(dt * da).sum(0).reshape(A.shape)
    dB, dC = dB.swapaxes(1, 2), dC.swapaxes(1, 2)
    tokens = (_tokens_first(dx), _tokens_first(ddt), dB, dC)
    return dstate_in.reshape(shape), tokens, (dA, dD)


def _inside(dy, x, dt, B, C, decays, scores, masks):
    """Gradients between tokens of the chunk.

    Returns:
        (u = dL/d(dt·x), dB, dC, R_ij = dL/d(l_i - l_j) for j <= i).
    """
    u = jnp.einsum("bgrij,bgrip->bgrjp", scores * decays.pair, dy)
    dweights = jnp.einsum("bgrip,bgrjp->bgrij", dy, x)
    dscores_heads = dweights * (decays.pair * dt[..., None, :])
    # An overflow between foreign tokens is replaced, not multiplied, by zero.
    pairs = jnp.where(masks.pair[:, None, None], dscores_heads * scores, 0)
    dscores = jnp.where(masks.pair[:, None], _sum_heads(dscores_heads), 0)
    dC = jnp.einsum("bgij,bgjn->bgin", dscores, B)
    dB = jnp.einsum("bgij,bgin->bgjn", dscores, C)
    return u, dB, dC, pairs


def _log_decay_gradient(pairs, from_start, to_end, through, masks):
    """dL/d(dt_k·A): everything that crosses token k, in sums where nothing cancels.

    sum_{i>=k>j} R_ij + sum_{i>=k} from_start_i + sum_{j<k} to_end_j + through.
    """
    size, wide = pairs.shape[-1], pairs.dtype
    after, before = masks.pair, masks.pair & ~jnp.eye(size, dtype=bool)
    left_of = _exact_einsum("bgrij,kj->bgrik", pairs, lower(size, wide, strict=True))
    left_of = lax.optimization_barrier(left_of)
    crossing = jnp.where(after[:, None, None], left_of, 0)
    crossing = _exact_einsum("i,bgrik->bgrk", jnp.ones(size, wide), crossing)
    return (
        crossing
        + _sums(after.swapaxes(1, 2), from_start, masks)
        + _sums(before, to_end, masks)
        + through[..., None]
    )


def _sums(chosen, values, masks):
    """sum_i chosen_ki · values_i for chosen (B or 1, Q, Q) and values (B, G, R, Q).

    Between documents a zero weight must also silence an overflowed neighbour: bad
    values are left out of the product and put back where they belong.
    """
    weights = chosen.astype(values.dtype)
    weights = jnp.broadcast_to(weights, (values.shape[0], *chosen.shape[1:]))
    product = functools.partial(_exact_einsum, "bki,bgri->bgrk", weights)
    if masks.from_start is None:
        return product(values)
    good = jnp.isfinite(values)
    spoilt = product((~good).astype(values.dtype)) > 0
    return jnp.where(spoilt, jnp.nan, product(jnp.where(good, values, 0)))
