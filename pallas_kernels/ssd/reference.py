"""The scan token by token: the truth that everything else is compared with."""

import jax
import jax.numpy as jnp
from jax import lax


def wide_dtype(x: jax.Array, dt: jax.Array) -> jnp.dtype:
    """Dtype of decays, sums and states: float32, or float64 for float64 inputs."""
    return jnp.promote_types(jnp.float32, jnp.result_type(x, dt))


def step(x, dt, A, B, C, D, state):
    """One token: x (B, H, P), dt (B, H), B, C (B, G, N), state (B, H, P, N)."""
    wide = jnp.promote_types(wide_dtype(x, dt), state.dtype)
    repeats = x.shape[1] // B.shape[1]
    dt, decay = dt.astype(wide), jnp.exp(dt.astype(wide) * A.astype(wide))
    B = jnp.repeat(B.astype(wide), repeats, axis=1)
    C = jnp.repeat(C.astype(wide), repeats, axis=1)
    x_wide = x.astype(wide)
    added = (dt[..., None] * x_wide)[..., None] * B[:, :, None, :]
    state = decay[..., None, None] * state + added
    y = jnp.einsum("bhpn,bhn->bhp", state, C)
    if D is not None:
        y = y + D.astype(wide) * x_wide
    return y.astype(x.dtype), state


def token_scan(x, dt, A, B, C, D, run, initial_state):
    """The recurrence over (B, L, ...), differentiable by JAX; run as in `documents`."""
    if run is None:
        run = jnp.zeros(x.shape[:2], jnp.int32)
    starts = jnp.pad(run[:, 1:] != run[:, :-1], ((0, 0), (1, 0)))

    def one(state, token):
        x_t, dt_t, B_t, C_t, start = token
        state = jnp.where(start[:, None, None, None], 0, state)
        y, state = step(x_t, dt_t, A, B_t, C_t, D, state)
        return state, y

    tokens = tuple(t.swapaxes(0, 1) for t in (x, dt, B, C, starts))
    state, y = lax.scan(one, initial_state, tokens)
    return y.swapaxes(0, 1), state
