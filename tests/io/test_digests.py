import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bitmamba.io import digests


def test_digest_is_sha256_of_dtype_shape_and_bytes():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)

    expected = hashlib.sha256(b"float32[2,3]|" + array.tobytes()).hexdigest()
    assert digests.leaf_digest(array) == f"float32[2,3]:{expected}"
    assert digests.leaf_digest(jnp.asarray(array)) == f"float32[2,3]:{expected}"


@pytest.mark.parametrize(
    "other",
    [
        np.arange(6, dtype=np.float32).reshape(3, 2),
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.arange(6, dtype=np.float32).reshape(2, 3).T.copy().T[::-1],
        np.array([[-0.0, 1, 2], [3, 4, 5]], np.float32),
    ],
    ids=["shape", "dtype", "order", "negative_zero"],
)
def test_digest_tells_apart(other):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)

    assert digests.leaf_digest(array) != digests.leaf_digest(other)


def test_layout_in_memory_does_not_matter():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)

    assert digests.leaf_digest(np.asfortranarray(array)) == digests.leaf_digest(array)


def test_keys_are_digested_by_their_data():
    key = jax.random.key(3)

    digest = digests.leaf_digest(key)

    assert digests.spec_of(digest) == "key<fry>[]"
    data = np.asarray(jax.random.key_data(key))
    assert digests.data_digest(data, "key<fry>[]") == digest
    assert digest != digests.leaf_digest(jax.random.key(4))


def test_tree_digests_name_leaves_by_path(toy):
    table = digests.tree_digests(toy.make_trainable(1))

    assert list(table) == ["embed/embedding", "layer_0/A_log", "scale"]
    assert digests.spec_of(table["embed/embedding"]) == "bfloat16[5,4]"
    assert digests.spec_of(table["scale"]) == "float32[]"


def test_combined_ignores_order_and_sees_every_leaf():
    table = {"a": "x", "b": "y"}

    assert digests.combined(table) == digests.combined({"b": "y", "a": "x"})
    assert digests.combined(table) != digests.combined({"a": "y", "b": "x"})


def test_changed_leaves_are_named():
    good = {"a": np.zeros(2, np.float32), "b": np.ones(2, np.float32)}
    table = digests.tree_digests(good)

    assert digests.changed_leaves(good, table) == []
    assert digests.changed_leaves({**good, "a": good["b"]}, table) == ["a"]
    as_int = {**good, "a": np.zeros(2, np.int32)}
    assert digests.changed_leaves(as_int, table) == ["a"]
