"""Checkpoints: asynchronous saves, and a restore that proves what it returns.

A checkpoint directory holds step folders (Orbax items `trainable`, `opt_state` and
`meta`) and, when something is frozen, `frozen-<digest>` with those parameters, saved
once; the directory is self-contained. `README.md` here states the format.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from bitmamba.io import digests, load, meta, shards, steps, store
from bitmamba.io.fingerprints import ANEW, check_fingerprints
from bitmamba.io.load import load_params
from bitmamba.io.peers import ALONE, Peers

__all__ = ["Checkpointer", "Restored", "check_fingerprints", "load_params"]


class Restored(NamedTuple):
    """A verified step, placed like the targets; `frozen` is {} when none was asked."""

    step: int
    trainable: Any
    opt_state: Any
    frozen: Any
    meta: dict[str, Any]


class Checkpointer:
    """Saves steps in the background and restores the newest whole one.

    Saving never raises for a full or broken disk: training goes on, `poll` tells in
    one line, and `close` raises if the last save failed. It holds threads: close it.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int,
        fingerprints: Mapping[str, Any],
        config: Mapping[str, Any],
        peers: Peers = ALONE,
        advice: str = ANEW,
    ):
        """Clean up after a killed save; the first save makes the directory.

        Args:
            directory: of the checkpoints, usually `<workdir>/checkpoints`.
            keep: complete steps that stay; the disk needs room for one more.
            fingerprints: see `check_fingerprints`; compared on every restore.
            config: the resolved configuration, stored in every step.
            peers: all must open, save, restore and close together; the first of them
                names, moves and removes folders.
            advice: what to do when a fingerprint changed.
        """
        self._directory = Path(directory).absolute()
        self._peers = peers
        self._keep = keep
        self._fingerprints = fingerprints
        self._config = config
        self._advice = advice
        for line in peers.first(lambda: steps.tidy(self._directory)):
            logging.info("checkpoint: %s", line)
        self._writer = store.make_writer()
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, Future[None]] | None = None
        self._problems: list[str] = []
        self._last_failure: str | None = None

    def save(
        self,
        step: int,
        *,
        trainable: Any,
        opt_state: Any,
        frozen_digests: Mapping[str, str],
        frozen_source: str | None = None,
        extra: Mapping[str, Any],
    ) -> None:
        """Start to save a step; arrays are copied before this returns.

        Saving a step that exists replaces it once the new one is complete; later
        steps, left from before a rollback, are then removed.

        Args:
            step: optimiser updates done.
            trainable, opt_state: pytrees of arrays.
            frozen_digests: from `save_frozen`; {} when nothing is frozen.
            frozen_source: where the frozen parameters lie when `save_frozen` was not
                called and `frozen_digests` only say which they are.
            extra: run counters, JSON-able.
        """
        self._agree()
        items = {"trainable": trainable, "opt_state": opt_state}
        record = meta.make_meta(
            step=step,
            config=self._config,
            fingerprints=self._fingerprints,
            leaf_digests={
                k: shards.tree_digests(v, self._peers) for k, v in items.items()
            },
            frozen_digests=frozen_digests,
            frozen_source=frozen_source,
            extra=extra,
        )
        need = sum(map(digests.n_bytes, jax.tree.leaves(items)))
        if no_room := self._peers.first(lambda: steps.no_room(self._directory, need)):
            self._fail(step, no_room)
            return
        folder = self._directory / str(step)
        try:
            self._peers.do_first(lambda: steps.make_way(folder))
            store.start_write(self._writer, folder, meta=record, **items)
        except Exception as error:  # Orbax raises many kinds; all mean "not saved"
            self._fail(step, load.one_line(error))
            return
        self._pending = (step, self._waiter.submit(self._writer.wait_until_finished))

    def save_frozen(self, frozen: Any) -> dict[str, str]:
        """Save frozen parameters, unless the same ones lie there whole; blocks.

        Args:
            frozen: dicts of arrays that training will not change; may be empty.

        Returns:
            Their digests, for `save`.

        Raises:
            OSError: they could not be written.
        """
        table = digests.tree_digests(frozen)
        if not table:
            return {}
        folder = self._directory / meta.frozen_folder(table)
        if self._peers.first(lambda: load.is_whole(folder, table)):
            return table
        self._collect()
        if self._peers.count > 1:
            # Every process holds them whole; as numpy arrays the first writes them.
            frozen = jax.tree.map(np.asarray, frozen)
        try:
            store.start_write(self._writer, folder, params=frozen)
            self._writer.wait_until_finished()
        except Exception as error:  # Orbax raises many kinds; all mean "not saved"
            self._start_afresh()
            reason = load.one_line(error)
            raise OSError(f"checkpoint: {folder}: not saved: {reason}") from None
        return table

    def poll(self) -> str | None:
        """What went wrong since the last call, in one line; None if nothing.

        Cheap; call it every step, so that a failed save is told at once.
        """
        if self._pending and self._pending[1].done():
            self._collect()
        problems, self._problems = self._problems, []
        return "; ".join(problems) or None

    def wait(self) -> str | None:
        """Wait for a save in progress, of all processes, then as `poll`."""
        self._agree()
        return self.poll()

    def close(self) -> None:
        """Wait for a save in progress and release the threads.

        Raises:
            OSError: the last save failed; the message names the last good step.
        """
        self._agree()
        self._waiter.shutdown()
        store.close_writer(self._writer)
        if self._last_failure:
            raise OSError(self._last_failure)

    def last_good(self) -> int | None:
        """The newest complete step on disk, from the folder, not from memory."""
        return next(iter(steps.step_folders(self._directory)), None)

    def restore_latest(
        self,
        target_trainable: Any,
        target_opt_state: Any,
        target_frozen: Any = None,
        *,
        prefer: Callable[[int], bool] = lambda step: True,
    ) -> Restored | None:
        """The newest step that is whole, or None when there is none at all.

        Each step is verified by its digests; a damaged one is set aside as
        `<step>.damaged` with one warning line, and the next older is tried. Nothing
        is cast: paths, shapes and dtypes must be those of the targets.

        Args:
            target_trainable, target_opt_state: trees of arrays or of
                `jax.ShapeDtypeStruct`s, or functions that make one of the step's meta;
                results are placed by their shardings.
            target_frozen: likewise; None restores no frozen parameters.
            prefer: steps that are tried first, newest first, before the others.

        Raises:
            ValueError: a fingerprint, shape, dtype or path differs from the saved
                one; or steps exist, but every one is damaged.
        """
        self._collect()
        targets = {"trainable": target_trainable, "opt_state": target_opt_state}
        folders = self._peers.first(lambda: steps.step_names(self._directory))
        # Stable: the newest of the preferred first.
        for step, name in sorted(folders, key=lambda f: prefer(f[0]), reverse=True):
            folder = self._directory / name
            damage, record, placed = self._try_step(folder, targets)
            if damage := next(filter(None, self._peers.gather(damage)), None):
                self._peers.do_first(partial(self._set_aside, step, folder, damage))
                continue
            frozen = self._restore_frozen(record, target_frozen)
            return Restored(step, frozen=frozen, meta=record, **placed)
        if damaged := steps.damaged_folders(self._directory):
            raise ValueError(
                f"checkpoint {self._directory}: {len(damaged)} damaged steps and no "
                "whole one; expected at least one whole step to resume from; remove "
                "the folder to start anew"
            )
        return None

    def _try_step(
        self, folder: Path, targets: Mapping[str, Any]
    ) -> tuple[str | None, dict[str, Any], dict[str, Any]]:
        """(damage found by this process, and what `_restore_step` returns)."""
        try:
            return None, *self._restore_step(folder, targets)
        except load.DamagedError as damage:
            return str(damage), {}, {}

    def _restore_step(
        self, folder: Path, targets: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """(meta, items placed like the targets); DamagedError if not whole."""
        where = f"checkpoint {folder}"
        record = load.read_meta(folder)
        check_fingerprints(
            record["fingerprints"], self._fingerprints, where=where, advice=self._advice
        )
        tables = record["digests"]
        targets = {k: t(record) if callable(t) else t for k, t in targets.items()}
        for name, target in targets.items():
            load.check_target(target, tables[name], f"{where}: {name}")
        placed = {
            name: load.read_placed(folder / name, tables[name], target)
            for name, target in targets.items()
        }
        return record, placed

    def _restore_frozen(self, record: dict[str, Any], target: Any) -> Any:
        if target is None:
            return {}
        table = record["frozen"]["digests"]
        where = f"checkpoint {self._directory}: frozen"
        load.check_target(target, table, where)
        return load.place(load.read_frozen(self._directory, record), target)

    def _set_aside(self, step: int, folder: Path, reason: str) -> None:
        moved = steps.quarantine(folder)
        older = self.last_good()
        then = "no older step" if older is None else f"trying step {older}"
        line = f"step {step}: {reason}; set aside as {moved.name}; {then}"
        logging.warning("checkpoint: %s", line)

    def _agree(self) -> None:
        """`_collect`, and a save that failed for one process failed for all."""
        started = self._pending
        self._collect()
        failures = self._peers.gather(self._last_failure)
        if any(failures) and self._last_failure is None and started:
            number, why = next((i, f) for i, f in enumerate(failures) if f)
            self._fail(started[0], f"process {number}: {why}")

    def _collect(self) -> None:
        """Wait for the save in progress and draw its consequences."""
        if not self._pending:
            return
        (step, future), self._pending = self._pending, None
        try:
            future.result()
        except Exception as error:  # Orbax raises many kinds; all mean "not saved"
            self._fail(step, load.one_line(error))
            return
        self._last_failure = None
        if not self._peers.is_first:
            return
        steps.put_back(self._directory / str(step))
        for line in steps.retire(self._directory, saved=step, keep=self._keep):
            logging.warning("checkpoint: %s", line)

    def _fail(self, step: int, reason: str) -> None:
        self._start_afresh()
        good = self.last_good()
        line = f"checkpoint step {step} not saved: {reason}; " + (
            "no step is saved yet" if good is None else f"last good step: {good}"
        )
        self._last_failure = line
        self._problems.append(line)

    def _start_afresh(self) -> None:
        """After a failure: a writer that failed raises old errors at later saves."""
        store.close_writer(self._writer)
        self._writer = store.make_writer()
        if self._peers.is_first:
            steps.tidy(self._directory)
