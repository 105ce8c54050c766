"""Every layer once more, token by token, for one document, in the caller's precision.

Written from the equations and not from the models, with none of their code; the tests
run it in float64 and take its derivatives with autodiff. A document is (L, D); packed
rows are made by running the documents alone.
"""

import jax
import jax.numpy as jnp
import numpy as np


def lm(params, tokens, cfg, margins=None):
    """(L,) tokens -> (L, V) logits. margins collects distances from rounding ties."""
    table = params["embed"]["embedding"]
    for _, scale, a, b, _ in params["embed"].get("lora", ()):
        table = table + scale * a @ b
    x = table[tokens]
    for i, name in enumerate(cfg.layers):
        layer = params[f"layer_{i}"]
        h = x
        if cfg.norm_placement == "block":
            h = norm(x, layer["norm"]["scale"], cfg.norm_eps)
        x = x + MIXERS[name](layer.get("mixer", {}), h, cfg, margins)
    x = norm(x, params["final_norm"]["scale"], cfg.norm_eps)
    if cfg.tie_embeddings:
        return x @ table.T
    return project(params["lm_head"], x, cfg, margins)


def norm(x, scale, eps, n_groups=1):
    parts = jnp.split(x, n_groups, axis=-1)
    parts = [p / jnp.sqrt((p**2).mean(-1, keepdims=True) + eps) for p in parts]
    return jnp.concatenate(parts, -1) * scale


def project(p, x, cfg, margins=None):
    if "norm" in p:
        x = norm(x, p["norm"]["scale"], cfg.norm_eps)
    w = p["kernel"]
    if cfg.linear == "dense":
        return x @ adapted(w, p.get("lora", ()))
    xq, wq = quantised_input(x, cfg.bitlinear, margins), quantised_weight(w, margins)
    x = x + jax.lax.stop_gradient(xq - x)
    w = w + jax.lax.stop_gradient(wq - w)
    return x @ w


def adapted(w, lora):
    """The weight itself with (first column, scale, a, b, magnitude) merged into it."""
    for start, scale, a, b, magnitude in lora:
        stop = start + b.shape[1]
        columns = w[:, start:stop] + scale * a @ b
        if magnitude is not None:
            length = jax.lax.stop_gradient(jnp.sqrt((columns**2).sum(0)))
            columns = magnitude * columns / length
        w = jnp.concatenate([w[:, :start], columns, w[:, stop:]], axis=1)
    return w


def quantised_input(x, bit, margins=None):
    largest = jnp.abs(x).max(-1, keepdims=True)
    largest = jnp.maximum(largest, 1e-5) if bit.act_eps == "max" else largest + 1e-5
    scale = 127 / largest
    scaled = x * scale
    _note(scaled, margins)
    if bit.rounding == "away":
        whole = jnp.sign(scaled) * jnp.floor(jnp.abs(scaled) + 0.5)
    else:
        whole = jnp.round(scaled)
    return jnp.clip(whole, -128, 127) / scale


def quantised_weight(w, margins=None):
    scale = 1 / jnp.maximum(jnp.abs(w).mean(), 1e-5)
    _note(jnp.clip(w * scale, -1, 1), margins)
    return jnp.clip(jnp.round(w * scale), -1, 1) / scale


def _note(scaled, margins):
    if margins is not None:
        margins.append(jnp.abs(scaled - jnp.floor(scaled) - 0.5).min())


def conv_silu(p, x):
    kernel, bias = p["kernel"], p["bias"]
    taps = kernel.shape[0]
    out = jnp.zeros_like(x) + bias
    for k in range(taps):
        back = taps - 1 - k
        shifted = jnp.pad(x, ((back, 0), (0, 0)))[: x.shape[0]]
        out = out + kernel[k] * shifted
    return out / (1 + jnp.exp(-out))


def recurrence(x, dt, A, B, C, D):
    """x (L, H, P), dt (L, H), A (H,), B and C (L, H, N), D (H, P)."""

    def token(h, now):
        x, dt, B, C = now
        h = jnp.exp(dt * A)[:, None, None] * h
        h = h + (dt[:, None] * x)[:, :, None] * B[:, None, :]
        return h, (h * C[:, None, :]).sum(-1) + D * x

    start = jnp.zeros((*x.shape[1:], B.shape[-1]), x.dtype)
    return jax.lax.scan(token, start, (x, dt, B, C))[1]


def mamba2(p, u, cfg, margins=None):
    m = cfg.mamba2
    d, n = m.expand * cfg.d_model, m.n_groups * m.d_state
    heads = d // m.headdim
    y = project(p["in_proj"], u, cfg, margins)
    z, mixed, dt = y[:, :d], y[:, d : 2 * d + 2 * n], y[:, 2 * d + 2 * n :]
    mixed = conv_silu(p["conv1d"], mixed)
    x, B, C = mixed[:, :d], mixed[:, d : d + n], mixed[:, d + n :]
    dt = jnp.clip(jnp.log1p(jnp.exp(dt + p["dt_bias"])), *m.dt_limit)
    by_head = [
        jnp.repeat(t.reshape(-1, m.n_groups, m.d_state), heads // m.n_groups, axis=1)
        for t in (B, C)
    ]
    D = jnp.repeat(p["D"][:, None], m.headdim, axis=1)
    x = x.reshape(-1, heads, m.headdim)
    y = recurrence(x, dt, -jnp.exp(p["A_log"]), *by_head, D)
    y = y + (p.get("state_offset", 0.0) * by_head[1][:, :, None]).sum(-1)
    y = y.reshape(-1, d)
    y = y * z / (1 + jnp.exp(-z))
    if "norm" in p:
        y = norm(y, p["norm"]["scale"], cfg.norm_eps, m.n_groups)
    return project(p["out_proj"], y, cfg, margins)


def bitmamba2(p, u, cfg, margins=None):
    heads = cfg.bitmamba2.n_heads
    d = cfg.bitmamba2.expand * cfg.d_model
    y = project(p["in_proj"], u, cfg, margins)
    z, x, rest = y[:, :d], y[:, d : 2 * d], y[:, 2 * d :]
    B, C, dt = rest[:, :heads], rest[:, heads : 2 * heads], rest[:, 2 * heads :]
    x = conv_silu(p["conv1d"], x).reshape(-1, heads, d // heads)
    dt = jnp.log1p(jnp.exp(dt + p["dt_bias"]))

    def token(h, now):
        x, B, C, dt = now
        decay = jnp.exp(-jnp.exp(p["A_log"]) * dt)
        h = decay[:, None] * h + x * (B * dt)[:, None]
        return h, C[:, None] * h + p["D"].reshape(heads, -1) * x

    y = jax.lax.scan(token, jnp.zeros_like(x[0]), (x, B, C, dt))[1]
    if "state_offset" in p:
        y = y + C[:, :, None] * p["state_offset"][:, :, 0]
    y = y.reshape(-1, d) * z / (1 + jnp.exp(-z))
    if "norm" in p:
        y = norm(y, p["norm"]["scale"], cfg.norm_eps)
    return project(p["out_proj"], y, cfg, margins)


def attention(p, u, cfg, margins=None):
    a = cfg.attention
    names = {"q_proj": a.n_heads, "k_proj": a.n_kv_heads, "v_proj": a.n_kv_heads}
    q, k, v = (
        project(p[name], u, cfg, margins).reshape(len(u), heads, a.headdim)
        for name, heads in names.items()
    )
    if a.rope_theta:
        q, k = _turned(q, a.rope_theta), _turned(k, a.rope_theta)
    out = []
    for head in range(a.n_heads):
        kv = head // (a.n_heads // a.n_kv_heads)
        e = jnp.exp(q[:, head] @ k[:, kv].T / np.sqrt(a.headdim))
        e = jnp.tril(e)
        out.append(e / e.sum(-1, keepdims=True) @ v[:, kv])
    return project(p["o_proj"], jnp.concatenate(out, -1), cfg, margins)


def _turned(x, theta):
    """Pairs (i, i + P/2) as complex numbers, multiplied by exp(i · angle)."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None, None] * theta ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return jnp.concatenate([z.real, z.imag], -1)


def mlp(p, u, cfg, margins=None):
    gate = project(p["gate_proj"], u, cfg, margins)
    up = project(p["up_proj"], u, cfg, margins)
    return project(p["down_proj"], gate / (1 + jnp.exp(-gate)) * up, cfg, margins)


MIXERS = {"mamba2": mamba2, "bitmamba2": bitmamba2, "attention": attention, "mlp": mlp}
