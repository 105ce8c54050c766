"""Where a run's arrays lie: one mesh of devices, with the axes `data` and `fsdp`.

Rows of a batch are spread over both axes; parameters and optimiser state are cut along
`fsdp`. A run on one device has no layout (None), and its programs know nothing of it.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bitmamba.config import Config
from bitmamba.data import rows_of_process
from bitmamba.io.shards import whole
from bitmamba.train.state import TrainState
from bitmamba.types import Batch, BatchWithBase

DATA, FSDP = AXES = ("data", "fsdp")


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, and which leaves are cut over it.

    min_size: a leaf with fewer elements lies whole on every device.
    """

    mesh: Mesh
    min_size: int

    @property
    def whole(self) -> NamedSharding:
        """The same on every device."""
        return NamedSharding(self.mesh, P())

    @property
    def rows(self) -> NamedSharding:
        """Of (B, …): each device has its rows."""
        return NamedSharding(self.mesh, P(AXES))

    @property
    def micro_rows(self) -> NamedSharding:
        """Of (M, B, …)."""
        return NamedSharding(self.mesh, P(None, AXES))

    def spec(self, leaf: Any) -> P:
        """How a leaf is cut: along its largest axis that `fsdp` divides, or not.

        Vectors are not: the factors of Adafactor, cut along an axis that their matrix
        is not, would have it cut anew in each step.
        """
        n, shape = self.mesh.shape[FSDP], leaf.shape
        fits = [i for i, d in enumerate(shape) if d and d % n == 0]
        is_vector = sum(d > 1 for d in shape) < 2
        small = is_vector or math.prod(shape) < self.min_size
        if n == 1 or small or not fits:
            return P()
        axis = max(fits, key=lambda i: shape[i])
        return P(*(FSDP if i == axis else None for i in range(axis + 1)))

    def specs(self, tree: Any) -> Any:
        """`spec` of every leaf."""
        return jax.tree.map(self.spec, tree)

    def shardings(self, tree: Any) -> Any:
        """The same as shardings."""
        return jax.tree.map(lambda x: NamedSharding(self.mesh, self.spec(x)), tree)

    def shapes(self, tree: Any) -> Any:
        """ShapeDtypeStructs that say where each leaf lies."""
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            tree,
            self.shardings(tree),
        )

    def n_bytes(self, tree: Any) -> int:
        """Of the leaves' parts on one device."""
        cut = jax.tree.map(
            lambda x, s: math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize,
            tree,
            self.shardings(tree),
        )
        return sum(jax.tree.leaves(cut))

    def state_shardings(self, state: TrainState) -> TrainState:
        """Counters and the loss history lie whole everywhere."""
        everywhere = jax.tree.map(lambda _: self.whole, state)
        return everywhere._replace(
            trainable=self.shardings(state.trainable),
            opt_state=self.shardings(state.opt_state),
        )

    def place(self, tree: Any) -> Any:
        """Lay out a tree that every process holds whole; what is laid out stays."""
        return jax.tree.map(_put, tree, self.shardings(tree))

    def place_state(self, state: TrainState) -> TrainState:
        """`place`, of a training state."""
        return jax.tree.map(_put, state, self.state_shardings(state))

    def put(self, batch: Batch | BatchWithBase) -> Batch | BatchWithBase:
        """A training batch (M, B, L) of which this process holds its own rows."""
        return _from_rows(batch, self.micro_rows)

    def put_whole(self, batch: Batch) -> Batch:
        """A batch (B, L) that every process holds whole."""
        own = rows_of_process(
            jax.tree.map(lambda x: np.asarray(x)[None], batch),
            index=jax.process_index(),
            count=jax.process_count(),
        )
        return _from_rows(jax.tree.map(lambda x: x[0], own), self.rows)

    def line(self) -> str:
        """For the start screen."""
        sizes = " x ".join(f"{name} {n}" for name, n in self.mesh.shape.items())
        n, processes = self.mesh.size, jax.process_count()
        kind = self.mesh.devices.flat[0].device_kind
        where = f" in {processes} processes" if processes > 1 else ""
        return f"mesh: {sizes} = {n} devices ({kind}){where}; memory is of one device"


def make_layout(config: Config) -> Layout | None:
    """The layout of a run; None if it is one process with one device.

    Raises:
        ValueError: the mesh does not fit the devices, or the batch the mesh.
    """
    data, fsdp = config.mesh.data, config.mesh.fsdp
    if data == fsdp == 1 and not jax.distributed.is_initialized():
        return None
    there, processes = jax.device_count(), jax.process_count()
    data = data or max(1, there // fsdp)
    n = data * fsdp
    here = f"{there} devices" + (f" in {processes} processes" if processes > 1 else "")
    if n > there or (processes > 1 and n != there):
        wanted = f"exactly {there}" if processes > 1 else f"at most {there}"
        raise ValueError(
            f"config.mesh: got data {data} x fsdp {fsdp} = {n} devices, but there are "
            f"{here}; expected {wanted}; data=0 takes as many as there are"
        )
    if n == processes == 1:
        return None
    if config.train.batch_size % n:
        raise ValueError(
            f"config.train.batch_size: got {config.train.batch_size} for {n} devices "
            f"(config.mesh: data {data} x fsdp {fsdp}); expected a multiple of {n}: "
            "every device takes as many windows"
        )
    # In order of process and device: a process's rows lie together.
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))[:n]
    mesh = Mesh(np.array(devices).reshape(data, fsdp), AXES)
    return Layout(mesh, config.mesh.min_size)


def on_host(tree: Any) -> Any:
    """Any tree as numpy arrays; every process must ask, leaf by leaf they come."""
    return jax.tree.map(lambda leaf: np.asarray(whole(leaf)), tree)


def on_one_device(tree: Any) -> Any:
    """Any tree as arrays of this process's first device; every process must ask."""
    return jax.tree.map(lambda leaf: whole(leaf).addressable_data(0), tree)


def _put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
        return leaf
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda i: host[i])


def _from_rows(batch: Any, sharding: NamedSharding) -> Any:
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, x), batch
    )
