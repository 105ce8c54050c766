"""Target-masked KL of logits in float64 numpy, and random logits to try it on."""

import numpy as np

LOWEST = -1e30


def log_softmax(logits):
    with np.errstate(divide="ignore"):
        shifted = logits - logits.max()
        return np.maximum(shifted - np.log(np.exp(shifted).sum()), LOWEST)


def reference_row(base, adapted, target, direction):
    """KL and gradient of one token in float64, on the entries beside the target."""
    base, adapted = np.asarray(base, np.float64), np.asarray(adapted, np.float64)
    gradient = np.zeros(base.size)
    rest = np.arange(base.size) != target
    if base[rest].max() == -np.inf or adapted[rest].max() == -np.inf:
        return 0.0, gradient
    log_p, log_q = log_softmax(base[rest]), log_softmax(adapted[rest])
    p, q = np.exp(log_p), np.exp(log_q)
    if direction == "forward":
        kl = (p * (log_p - log_q)).sum()
        gradient[rest] = q - p
    else:
        kl = (q * (log_q - log_p)).sum()
        # q_v sum_u q_u (r_v - r_u), r = log q/p: no difference of large means.
        ratio = log_q - log_p
        gradient[rest] = q * ((ratio[:, None] - ratio) @ q)
    return kl, gradient


def reference(base, adapted, targets, direction):
    rows = [
        reference_row(b, a, t, direction)
        for b, a, t in zip(base, adapted, targets, strict=True)
    ]
    return np.array([kl for kl, _ in rows]), np.stack([g for _, g in rows])


def logits_case(tokens=12, vocab_size=37, dtype=np.float32):
    rng = np.random.default_rng(tokens + vocab_size)
    base = 3 * rng.standard_normal((tokens, vocab_size))
    adapted = base + rng.standard_normal((tokens, vocab_size))
    targets = rng.integers(0, vocab_size, tokens).astype(np.int32)
    weights = rng.uniform(0, 2, tokens).astype(np.float32)
    return base.astype(dtype), adapted.astype(dtype), targets, weights


ln = np.log
