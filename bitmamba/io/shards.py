"""Arrays that lie on the devices of several processes."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bitmamba.io import digests
from bitmamba.io.peers import Peers


def whole(leaf: Any) -> Any:
    """An array of which this process can read everything; all processes must ask."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_replicated:
        return leaf
    return _replicate(NamedSharding(leaf.sharding.mesh, P()))(leaf)


def tree_digests(tree: Any, peers: Peers) -> dict[str, str]:
    """Digest of every leaf by path; each leaf is hashed by one process, in turn.

    They are those of the logical arrays, as one process makes them, so a checkpoint is
    the same for any number of processes. Leaf after leaf is gathered onto the devices
    and copied to one host: no host holds more than one.
    """
    if peers.count == 1:
        return digests.tree_digests(tree)
    leaves = digests.leaves(tree)
    mine = {}
    for number, (path, leaf) in enumerate(leaves.items()):
        gathered = whole(leaf)
        if number % peers.count == peers.index:
            mine[path] = digests.leaf_digest(np.asarray(gathered))
    found = {path: made for one in peers.gather(mine) for path, made in one.items()}
    return {path: found[path] for path in leaves}


def _replicate(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """One jitted function a mesh, so that each shape compiles once."""
    if sharding not in _REPLICATES:
        _REPLICATES[sharding] = jax.jit(lambda x: x, out_shardings=sharding)
    return _REPLICATES[sharding]


_REPLICATES: dict[NamedSharding, Callable[[jax.Array], jax.Array]] = {}
