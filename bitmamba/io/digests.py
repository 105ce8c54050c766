"""Digests of arrays and trees: what a checkpoint is checked against.

A leaf's digest is `dtype[shape]:hex`, with hex the SHA-256 of dtype, shape and the
bytes of the logical array: two leaves with equal digests are equal bit for bit, and
resharding does not change it. Typed PRNG keys are digested by their key data.
"""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

_THREADS = 4
_BLOCK = 1 << 24  # bytes hashed at a time; hashing releases the interpreter lock


def leaves(tree: Any) -> dict[str, Any]:
    """Leaves of any pytree by "a/b/c" path, with field names and indices."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {path_name(path): leaf for path, leaf in flat}


def path_name(path: Any) -> str:
    """A key path as "a/b/c"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def spec(leaf: Any) -> str:
    """`dtype[shape]` of an array, an abstract array or a Python number."""
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def n_bytes(leaf: Any) -> int:
    """Size of a leaf's data."""
    data = jax.random.key_data(leaf) if is_key(leaf) else leaf
    return data.nbytes if hasattr(data, "nbytes") else np.asarray(data).nbytes


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed PRNG key (or an abstract one)."""
    return jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)


def leaf_digest(leaf: Any) -> str:
    """Digest of one leaf: a jax or numpy array, a PRNG key or a Python number."""
    data = jax.random.key_data(leaf) if is_key(leaf) else leaf
    return data_digest(np.asarray(data), spec(leaf))


def data_digest(data: np.ndarray, as_spec: str) -> str:
    """Digest of raw data said to be `as_spec` (for a PRNG key: of its key data)."""
    hasher = hashlib.sha256(f"{as_spec}|".encode())
    raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    for start in range(0, raw.size, _BLOCK):
        hasher.update(raw[start : start + _BLOCK])
    return f"{as_spec}:{hasher.hexdigest()}"


def spec_of(digest: str) -> str:
    """The `dtype[shape]` part of a leaf's digest."""
    return digest.rpartition(":")[0]


def is_key_spec(text: str) -> bool:
    """Whether a spec or digest is that of a typed PRNG key."""
    return text.startswith("key<")


def tree_digests(tree: Any) -> dict[str, str]:
    """Digest of every leaf by path; hashes in a few threads."""
    flat = leaves(tree)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(flat, pool.map(leaf_digest, flat.values()), strict=True))


def combined(digests: Mapping[str, str]) -> str:
    """One digest for a whole table of digests, whatever its order."""
    text = "".join(f"{path}={digest}\n" for path, digest in sorted(digests.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def check_same(
    found: Mapping[str, str], wanted: Mapping[str, str], *, where: str, advice: str
) -> None:
    """Refuse parameters that are not those that something was made from.

    Args:
        found, wanted: digests by path.
        where, advice: beginning and end of the message.

    Raises:
        ValueError: one line naming the first leaf that differs.
    """
    for path in sorted(found.keys() | wanted.keys()):
        if found.get(path) != wanted.get(path):
            raise ValueError(
                f"{where}: {path}: got {found.get(path, 'nothing')}; expected "
                f"{wanted.get(path, 'nothing')}; {advice}"
            )


def changed_leaves(
    arrays: Mapping[str, np.ndarray], digests: Mapping[str, str]
) -> list[str]:
    """Compare arrays as read with the digests saved with them.

    Args:
        arrays: raw arrays by path; PRNG keys as their key data.
        digests: leaf digests of the same paths.

    Returns:
        Paths of changed leaves; empty when all are whole.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        changed = pool.map(lambda p: _changed(arrays[p], digests[p]), digests)
        return [path for path, was in zip(digests, changed, strict=True) if was]


def _changed(array: np.ndarray, digest: str) -> bool:
    as_spec = spec_of(digest)
    if not is_key_spec(as_spec) and spec(array) != as_spec:
        return True
    return data_digest(array, as_spec) != digest
