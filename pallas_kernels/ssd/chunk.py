"""One chunk of the scan, forward and backward; README.md derives the formulas.

Shapes: x, dy (B, Q, H, P); dt (B, Q, H); A (H,); B, C (B, Q, G, N); D (H, P) or None;
state (B, H, P, N). Everything is in the wide dtype already.
"""

import functools

import jax.numpy as jnp

from pallas_kernels.ssd.decays import keep, lower, make_decays


def _per_group(t, groups):
    """(B, Q, H, P) -> (B, G, Q, H/G·P)."""
    b, q, h, p = t.shape
    return t.reshape(b, q, groups, h // groups * p).swapaxes(1, 2)


def _per_head(t, heads):
    """(B, G, Q, H/G·P) -> (B, Q, H, P)."""
    b, _, q, _ = t.shape
    return t.swapaxes(1, 2).reshape(b, q, heads, -1)


def _spread(t, heads):
    """(B, G, Q, Q) -> (B, H, Q, Q)."""
    return jnp.repeat(t, heads // t.shape[1], axis=1)


def _state_groups(state, groups):
    """(B, H, P, N) -> (B, G, H/G·P, N)."""
    b, h, p, n = state.shape
    return state.reshape(b, groups, h // groups * p, n)


def chunk_forward(state, x, dt, A, B, C, D, masks):
    """One chunk: (state leaving it, y)."""
    heads, groups = x.shape[2], B.shape[2]
    decays = make_decays(dt, A, masks)
    scores = jnp.einsum("bign,bjgn->bgij", C, B)
    scores = jnp.where(masks.pair[:, None], scores, 0)
    # dt goes into the weights, not onto x: the weights of foreign tokens are exact
    # zeros, and x is finite where dt·x may not be.
    weights = _spread(scores, heads) * decays.pair * dt.swapaxes(1, 2)[:, :, None]
    y = jnp.einsum("bhij,bhjp->bhip", weights, x.swapaxes(1, 2)).swapaxes(1, 2)

    seen = jnp.einsum("bign,bgen->bgie", C, _state_groups(state, groups))
    seen = _per_head(seen, heads) * decays.from_start[..., None]
    y = y + keep(masks.from_start, seen)
    if D is not None:
        y = y + D * x

    left = _per_group((dt * decays.to_end)[..., None] * x, groups)
    added = jnp.einsum("bgie,bign->bgen", left, B).reshape(state.shape)
    state = keep(masks.through, state * decays.through[..., None, None]) + added
    return state, y


def chunk_backward(dstate, state, dy, x, dt, A, B, C, D, masks):
    """One chunk, given the state entering it and the gradient of the one leaving it.

    Returns:
        (gradient of the entering state, (dx, ddt, dB, dC), (dA, dD)).
    """
    heads, groups = x.shape[2], B.shape[2]
    wide = x.dtype
    decays = make_decays(dt, A, masks)
    scores = jnp.einsum("bign,bjgn->bgij", C, B)
    scores = jnp.where(masks.pair[:, None], scores, 0)
    scores_h = _spread(scores, heads)
    dy_h = dy.swapaxes(1, 2)
    x_h = (dt[..., None] * x).swapaxes(1, 2)

    # Inside the chunk.
    u = jnp.einsum("bhij,bhip->bhjp", scores_h * decays.pair, dy_h).swapaxes(1, 2)
    dscores_h = jnp.einsum("bhip,bhjp->bhij", dy_h, x_h) * decays.pair
    pairs = jnp.where(masks.pair[:, None], dscores_h * scores_h, 0)
    b, _, q, _ = dscores_h.shape
    dscores = dscores_h.reshape(b, groups, heads // groups, q, q).sum(2)
    dscores = jnp.where(masks.pair[:, None], dscores, 0)
    dC = jnp.einsum("bgij,bjgn->bign", dscores, B)
    dB = jnp.einsum("bgij,bign->bjgn", dscores, C)

    # Through the state entering the chunk.
    heard_h = (decays.from_start[..., None] * dy).swapaxes(1, 2)
    dC_h = keep_rows(masks.from_start, jnp.einsum("bhip,bhpn->bhin", heard_h, state))
    n = B.shape[-1]
    dC = dC + dC_h.reshape(b, groups, -1, q, n).sum(2).swapaxes(1, 2)
    C_h = jnp.repeat(C.swapaxes(1, 2), heads // groups, axis=1)
    from_start = (dC_h * C_h).sum(-1).swapaxes(1, 2)
    # Through the state leaving it.
    dstate_g = _state_groups(dstate, groups)
    v = jnp.einsum("bjgn,bgen->bgje", B, dstate_g)
    v = keep(masks.to_end, _per_head(v, heads) * decays.to_end[..., None])
    u = u + v
    to_end = dt * (x * v).sum(-1)
    left = _per_group((dt * decays.to_end)[..., None] * x, groups)
    dB_end = jnp.einsum("bgie,bgen->bign", left, dstate_g)
    dB = dB + keep(masks.to_end, dB_end)
    through = keep(masks.through, decays.through * (dstate * state).sum((-2, -1)))
    heard = _per_group(heard_h.swapaxes(1, 2), groups)
    dstate_in = jnp.einsum("bgie,bign->bgen", heard, C).reshape(state.shape)
    dstate_in += keep(masks.through, dstate * decays.through[..., None, None])

    # Log decays: sums of terms of which none cancels another.
    after, before = masks.pair, masks.pair & ~jnp.eye(q, dtype=bool)
    crossing = jnp.einsum("bhij,kj->bhik", pairs, lower(q, wide, strict=True))
    crossing = jnp.where(after[:, None], crossing, 0).sum(2).swapaxes(1, 2)
    da = (
        crossing
        + _sums(after.swapaxes(1, 2), from_start, masks)
        + _sums(before, to_end, masks)
        + through[:, None]
    )
    dx = dt[..., None] * u
    ddt = (x * u).sum(-1) + A * da
    dA = (dt * da).sum((0, 1))
    dD = None
    if D is not None:
        dx = dx + D * dy
        dD = (dy * x).sum((0, 1))
    return dstate_in, (dx, ddt, dB, dC), (dA, dD)


def _sums(chosen, values, masks):
    """sum_i chosen_ki · values_i for chosen (B or 1, Q, Q) and values (B, Q, H).

    Between documents a zero weight must also silence an overflowed neighbour: bad
    values are left out of the product and put back where they belong.
    """
    weights = jnp.broadcast_to(
        chosen.astype(values.dtype), (values.shape[0], *chosen.shape[1:])
    )
    product = functools.partial(jnp.einsum, "bki,bih->bkh", weights)
    if masks.from_start is None:
        return product(values)
    good = jnp.isfinite(values)
    spoilt = product((~good).astype(values.dtype)) > 0
    return jnp.where(spoilt, jnp.nan, product(jnp.where(good, values, 0)))


def keep_rows(mask, t):
    """Mask (B, Q) over the token axis of (B, H, Q, N)."""
    return t if mask is None else jnp.where(mask[:, None, :, None], t, 0)
