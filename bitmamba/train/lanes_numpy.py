"""Common operations in numpy: one at a time, XLA would compile each of them first.

OPERATIONS: primitive -> function(arrays, params) -> array, or list of arrays where the
primitive has several results. What is missing here is left to JAX.
"""

import numpy as np


def _dot_general(arrays, params):
    (a_sum, b_sum), (a_batch, b_batch) = params["dimension_numbers"]
    a, b = arrays
    a_free = [i for i in range(a.ndim) if i not in (*a_sum, *a_batch)]
    b_free = [i for i in range(b.ndim) if i not in (*b_sum, *b_batch)]
    batch = [a.shape[i] for i in a_batch]
    a_rows, b_rows = [a.shape[i] for i in a_free], [b.shape[i] for i in b_free]
    n_sum = int(np.prod([a.shape[i] for i in a_sum], dtype=int))
    left = a.transpose(*a_batch, *a_free, *a_sum)
    right = b.transpose(*b_batch, *b_sum, *b_free)
    left = left.reshape(*batch, int(np.prod(a_rows, dtype=int)), n_sum)
    right = right.reshape(*batch, n_sum, int(np.prod(b_rows, dtype=int)))
    dtype = params["preferred_element_type"] or np.result_type(a, b)
    wide = np.promote_types(dtype, np.float32) if dtype.kind != "i" else dtype
    product = np.matmul(left.astype(wide), right.astype(wide))
    return product.reshape(*batch, *a_rows, *b_rows).astype(dtype)


def _broadcast_in_dim(arrays, params):
    (x,) = arrays
    shape = [1] * len(params["shape"])
    for axis, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
        shape[axis] = size
    return np.broadcast_to(x.reshape(shape), params["shape"])


def _slice(arrays, params):
    starts, limits = params["start_indices"], params["limit_indices"]
    strides = params["strides"] or (1,) * len(starts)
    return arrays[0][tuple(map(slice, starts, limits, strides))]


def _select_n(arrays, params):
    which, *cases = arrays
    if len(cases) == 2:
        return np.where(which, cases[1], cases[0])
    return np.choose(np.broadcast_to(which, cases[0].shape), cases)


def _iota(arrays, params):
    shape, axis = params["shape"], params["dimension"]
    lengths = np.arange(shape[axis], dtype=params["dtype"])
    return np.broadcast_to(
        lengths.reshape([-1 if i == axis else 1 for i in range(len(shape))]), shape
    )


def _split(arrays, params):
    edges = np.cumsum(params["sizes"])[:-1]
    return list(np.split(arrays[0], edges, axis=params["axis"]))


def _logistic(arrays, params):
    x = arrays[0]
    z = np.exp(-np.abs(x))  # never overflows
    return np.where(x >= 0, 1 / (1 + z), z / (1 + z)).astype(x.dtype)


def _elementwise(function):
    return lambda arrays, params: function(*arrays)


def _reduction(function):
    return lambda arrays, params: function(arrays[0], axis=tuple(params["axes"]))


_UFUNCS = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "floor": np.floor,
    "sqrt": np.sqrt,
    "square": np.square,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "is_finite": np.isfinite,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
}

OPERATIONS = {
    **{name: _elementwise(ufunc) for name, ufunc in _UFUNCS.items()},
    "reduce_sum": lambda a, p: a[0].sum(axis=tuple(p["axes"]), dtype=a[0].dtype),
    "reduce_max": _reduction(np.max),
    "reduce_min": _reduction(np.min),
    "reduce_and": _reduction(np.all),
    "reduce_or": _reduction(np.any),
    "dot_general": _dot_general,
    "broadcast_in_dim": _broadcast_in_dim,
    "slice": _slice,
    "select_n": _select_n,
    "iota": _iota,
    "split": _split,
    "logistic": _logistic,
    "rsqrt": lambda a, p: (1 / np.sqrt(a[0])).astype(a[0].dtype),
    "integer_pow": lambda a, p: a[0] ** p["y"],
    "reshape": lambda a, p: a[0].reshape(p["new_sizes"]),
    "squeeze": lambda a, p: a[0].squeeze(tuple(p["dimensions"])),
    "expand_dims": lambda a, p: np.expand_dims(a[0], tuple(p["dimensions"])),
    "transpose": lambda a, p: a[0].transpose(p["permutation"]),
    "convert_element_type": lambda a, p: a[0].astype(p["new_dtype"]),
    "concatenate": lambda a, p: np.concatenate(a, axis=p["dimension"]),
    "stop_gradient": lambda a, p: a[0],
    "copy": lambda a, p: a[0],
    "optimization_barrier": lambda a, p: list(a),
}
