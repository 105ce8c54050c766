"""Inputs and the float64 truth for the tests of the scan."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import backend, ssd
from pallas_kernels.ssd.reference import token_scan

NAMES = ("x", "dt", "A", "B", "C", "D", "initial_state")


def make_inputs(shape, seed=0, *, dt=(1e-3, 0.1), A=(1.0, 16.0), skip="channel"):
    """Float64 numpy inputs by name; shape is (B, L, H, P, G, N)."""
    b, length, h, p, g, n = shape
    rng = np.random.default_rng(seed)
    D = {"none": None, "head": rng.normal(size=h), "channel": rng.normal(size=(h, p))}
    return {
        "x": rng.normal(size=(b, length, h, p)),
        "dt": rng.uniform(*dt, size=(b, length, h)),
        "A": -rng.uniform(*A, size=h),
        "B": rng.normal(size=(b, length, g, n)),
        "C": rng.normal(size=(b, length, g, n)),
        "D": D[skip],
        "initial_state": rng.normal(size=(b, h, p, n)),
    }


def make_cotangents(shape, seed=1):
    """Random float64 gradients of y and of the final state."""
    b, length, h, p, _, n = shape
    rng = np.random.default_rng(seed)
    return rng.normal(size=(b, length, h, p)), rng.normal(size=(b, h, p, n))


def cut(length, cuts):
    """(1, length) ids of documents that start at 0 and at each of `cuts`."""
    starts = np.zeros((1, length), np.int32)
    starts[0, [c for c in cuts if 0 < c < length]] = 1
    return np.cumsum(starts, axis=1, dtype=np.int32)


def segments(*lengths):
    """(1, L) ids 0, 1, ... of documents of these lengths."""
    return np.repeat(np.arange(len(lengths)), lengths)[None].astype(np.int32)


def cast(inputs, dtype):
    """Inputs as jax arrays: x, B, C in `dtype`; the others at least float32."""
    wide = jnp.promote_types(jnp.float32, dtype)
    return {
        k: v if v is None else jnp.asarray(v, dtype if k in "xBC" else wide)
        for k, v in inputs.items()
    }


def _truth_scan(inputs, segment_ids):
    D = inputs["D"]
    if D is not None and D.ndim == 1:
        D = jnp.broadcast_to(D[:, None], inputs["x"].shape[2:])
    args = [inputs[k] for k in NAMES[:5]]
    return token_scan(*args, D, segment_ids, inputs["initial_state"])


def _with_gradients(function, inputs, cotangents):
    out, pullback = jax.vjp(function, inputs)
    y, final_state = out
    dy, dfinal = (jnp.asarray(c) for c in cotangents)
    grads = pullback((dy.astype(y.dtype), dfinal.astype(final_state.dtype)))
    named = {f"d{k}": v for k, v in grads[0].items() if v is not None}
    return {"y": y, "final_state": final_state, **named}


def _chunked(inputs, cotangents, segment_ids, chunk_size, implementation="reference"):
    """Outputs and all gradients of the public function."""

    def run(i):
        args = [i[k] for k in NAMES[:5]]
        rest = {"D": i["D"], "initial_state": i["initial_state"]}
        rest |= {"chunk_size": chunk_size, "implementation": implementation}
        return tuple(ssd(*args, **rest, segment_ids=segment_ids))

    return _with_gradients(run, inputs, cotangents)


def compile_chunked(options=None):
    """chunked(inputs, cotangents, segment_ids, chunk_size[, implementation]), compiled
    with options."""
    static = ("chunk_size", "implementation")
    return jax.jit(_chunked, static_argnames=static, compiler_options=options)


chunked = compile_chunked()


@jax.jit
def _truth(inputs, cotangents, segment_ids):
    return _with_gradients(lambda i: _truth_scan(i, segment_ids), inputs, cotangents)


def truth(inputs, cotangents, segment_ids=None):
    """Outputs and gradients of the recurrence in float64, as numpy.

    segment_ids must number the documents 0, 1, ... (the truth takes run numbers).
    """
    with jax.enable_x64(True):
        wide = {
            k: v if v is None else jnp.asarray(np.asarray(v, np.float64))
            for k, v in inputs.items()
        }
        return jax.tree.map(np.asarray, _truth(wide, cotangents, segment_ids))


def relative_error(got, want):
    """Largest error over the largest true value (an all-zero truth wants zeros)."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    error = np.abs(got - want).max()
    return error / np.abs(want).max() if want.any() else error


def assert_close(got, want, tolerance):
    """Every output and gradient finite and within tolerance (one, or one by name)."""
    assert got.keys() == want.keys()
    limits = tolerance if isinstance(tolerance, dict) else {}
    for name, value in got.items():
        assert np.isfinite(np.asarray(value, np.float64)).all(), name
        error = relative_error(value, want[name])
        limit = limits.get(name, limits.get("all")) if limits else tolerance
        assert error <= limit, f"{name}: relative error {error:.2e} > {limit:.0e}"


# Operands of the products are rounded to 8 bits, 2^-9 relative each. dA is a sum of
# terms of both signs over all tokens and may be small beside them.
_BFLOAT16 = {"all": 5e-3, "dA": 1e-2}
# Operands have 16 bits in two parts; the product of the two small parts is left out.
_FLOAT32 = {"all": 2e-5, "dA": 2e-4}
KERNEL_LIMITS = {jnp.bfloat16: _BFLOAT16, jnp.float32: _FLOAT32}


def make_rounded(shape, dtype, **options):
    """(inputs, cotangents), rounded to dtype as the function receives them."""
    inputs = cast(make_inputs(shape, **options), dtype)
    dy, dstate = make_cotangents(shape)
    return inputs, (rounded(dy, dtype), dstate)


def rounded(t, dtype):
    """Float64 numbers that dtype has."""
    return np.float64(jnp.asarray(t, dtype))


# The form is no part of the key of what is compiled.
_by_form = {form: compile_chunked() for form in backend.PRODUCTS}


def by_kernels(inputs, cotangents, segment_ids, chunked=None, *, form="mma"):
    """Outputs and gradients of the kernels in one form of products, interpreted."""
    with backend.products_by(form):
        function = chunked or _by_form[form]
        return function(inputs, cotangents, segment_ids, 64, "pallas")
