import copy
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from bitmamba.io import load, steps


def test_round_trip_is_exact(toy, open_checkpointer):
    checkpointer = open_checkpointer()

    toy.save(checkpointer, 7)

    toy.assert_is_step(toy.restore(checkpointer), 7)


def test_nothing_to_restore(toy, open_checkpointer):
    assert toy.restore(open_checkpointer()) is None


def test_meta_holds_what_the_run_depends_on(toy, open_checkpointer):
    checkpointer = open_checkpointer()

    toy.save(checkpointer, 2)
    record = toy.restore(checkpointer).meta

    assert record["step"] == 2
    assert record["config"] == toy.CONFIG
    assert record["fingerprints"]["model"]["layers"] == ["mamba2", "mlp"]
    assert record["extra"] == {"bad_steps": 2}
    assert set(record["digests"]) == {"trainable", "opt_state"}
    assert {"python", "jax", "orbax-checkpoint"} <= set(record["versions"])


def test_abstract_targets_will_do(toy, open_checkpointer):
    checkpointer = open_checkpointer()
    toy.save(checkpointer, 1)
    target = jax.eval_shape(lambda: toy.make_trainable(0))

    restored = checkpointer.restore_latest(target, toy.make_opt_state(0))

    toy.assert_same_bits(restored.trainable, toy.make_trainable(1))


@pytest.mark.parametrize("opt_state", [(), optax.EmptyState(), None], ids=str)
def test_optimiser_without_state(toy, open_checkpointer, opt_state):
    checkpointer = open_checkpointer()
    trainable = toy.make_trainable(1)

    checkpointer.save(
        1, trainable=trainable, opt_state=opt_state, frozen_digests={}, extra={}
    )
    restored = checkpointer.restore_latest(trainable, opt_state)

    assert checkpointer.poll() is None
    assert restored.opt_state == opt_state


def test_resume_equals_unbroken_run(toy, open_checkpointer, users_level):
    tx = optax.adam(1e-2)

    @functools.partial(jax.jit, compiler_options=users_level)
    def update(weights, opt_state, key):
        grads = jax.tree.map(lambda w: w + jax.random.normal(key, w.shape), weights)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(weights, updates), opt_state

    def run(weights, opt_state, key, start, stop):
        for step in range(start, stop):
            weights, opt_state = update(
                weights, opt_state, jax.random.fold_in(key, step)
            )
        return weights, opt_state

    weights = {"w": jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)}
    key = jax.random.key(5)
    unbroken = run(weights, tx.init(weights), key, 0, 6)

    half, state = run(weights, tx.init(weights), key, 0, 3)
    first = open_checkpointer()
    first.save(3, trainable=half, opt_state=(state, key), frozen_digests={}, extra={})
    first.close()
    second = open_checkpointer()
    restored = second.restore_latest(weights, (tx.init(weights), jax.random.key(0)))
    state, key = restored.opt_state
    resumed = run(restored.trainable, state, key, restored.step, 6)

    toy.assert_same_bits(resumed, unbroken)


def test_arrays_may_be_donated_while_they_are_written(toy, open_checkpointer):
    checkpointer = open_checkpointer()
    double = jax.jit(lambda w: w * 2, donate_argnums=0)
    weights = double(jnp.ones((512, 512)))

    for step in range(1, 4):
        checkpointer.save(
            step, trainable={"w": weights}, opt_state=(), frozen_digests={}, extra={}
        )
        weights = double(double(weights))
        restored = checkpointer.restore_latest({"w": jnp.ones((512, 512))}, ())

        assert restored.step == step
        np.testing.assert_array_equal(restored.trainable["w"], 2 * 4.0 ** (step - 1))


def test_keeps_the_newest(toy, open_checkpointer, tmp_path):
    checkpointer = open_checkpointer(keep=2)

    for step in (1, 2, 3, 10):
        toy.save(checkpointer, step)
    checkpointer.wait()

    assert list(steps.step_folders(tmp_path / "checkpoints")) == [10, 3]
    toy.assert_is_step(toy.restore(checkpointer), 10)


def test_a_step_can_be_saved_again_after_a_rollback(toy, open_checkpointer, tmp_path):
    """B053: neither the step itself nor an older one is skipped without a word."""
    checkpointer = open_checkpointer()
    for step in (10, 20):
        toy.save(checkpointer, step)

    toy.save(checkpointer, 12)
    assert checkpointer.wait() is None
    assert list(steps.step_folders(tmp_path / "checkpoints")) == [12, 10]

    other = jax.tree.map(lambda w: w + 1, toy.make_trainable(12))
    toy.save(checkpointer, 12, trainable=other)
    assert checkpointer.wait() is None
    toy.assert_same_bits(toy.restore(checkpointer).trainable, other)
    assert not list((tmp_path / "checkpoints").glob("*.old"))


def test_kill_while_a_step_is_saved_again(toy, open_checkpointer, tmp_path):
    checkpointer = open_checkpointer()
    toy.save(checkpointer, 5)
    checkpointer.close()
    directory = tmp_path / "checkpoints"
    steps.set_aside(directory / "5")
    (directory / "5.orbax-checkpoint-tmp").mkdir()

    second = open_checkpointer()

    assert [f.name for f in directory.iterdir()] == ["5"]
    toy.assert_is_step(toy.restore(second), 5)


def test_left_overs_of_a_killed_save(toy, open_checkpointer, tmp_path, caplog):
    """B055: reported with their size, removed, and the step can be saved."""
    left = tmp_path / "checkpoints" / "30.orbax-checkpoint-tmp" / "trainable"
    left.mkdir(parents=True)
    (left / "part").write_bytes(b"x" * 1234)
    with caplog.at_level(logging.INFO, logger="absl"):
        checkpointer = open_checkpointer()

    assert not left.parent.exists()
    assert "1,234 bytes of an unfinished save" in caplog.text
    toy.save(checkpointer, 30)
    toy.assert_is_step(toy.restore(checkpointer), 30)


CASTS = {
    "int8": lambda w: w.astype(jnp.int8),
    "bfloat16": lambda w: w.astype(jnp.bfloat16),
    "shape": lambda w: w[:2],
}


@pytest.mark.parametrize("name", CASTS)
def test_nothing_is_cast(toy, open_checkpointer, name):
    """OWN-8: a target of another dtype or shape is refused by name."""
    checkpointer = open_checkpointer()
    toy.save(checkpointer, 1)
    target = toy.make_trainable(0)
    target["layer_0"]["A_log"] = CASTS[name](target["layer_0"]["A_log"])

    with pytest.raises(ValueError, match=r"/layer_0/A_log: got .*float32\[3\]"):
        checkpointer.restore_latest(target, toy.make_opt_state(0))

    assert checkpointer.last_good() == 1


def test_missing_and_new_leaves_are_refused(toy, open_checkpointer):
    checkpointer = open_checkpointer()
    toy.save(checkpointer, 1)
    more = {**toy.make_trainable(0), "z": jnp.zeros(1)}
    fewer = copy.copy(toy.make_trainable(0))
    del fewer["scale"]

    with pytest.raises(ValueError, match=r"trainable/z: got .*expected no such leaf"):
        checkpointer.restore_latest(more, toy.make_opt_state(0))
    with pytest.raises(ValueError, match="trainable/scale: got no such leaf"):
        checkpointer.restore_latest(fewer, toy.make_opt_state(0))


def test_meta_must_be_json(toy, open_checkpointer):
    checkpointer = open_checkpointer()

    with pytest.raises(ValueError, match=r"checkpoint meta: object .* is not JSON"):
        checkpointer.save(
            1, trainable={}, opt_state=(), frozen_digests={}, extra={"x": object()}
        )


FROZEN = {"body": {"w": jnp.arange(6.0).reshape(2, 3)}}


def test_frozen_parameters_are_saved_once(toy, open_checkpointer, tmp_path):
    checkpointer = open_checkpointer()
    table = checkpointer.save_frozen(FROZEN)
    (folder,) = (tmp_path / "checkpoints").glob("frozen-*")
    written = folder.stat().st_mtime_ns

    assert checkpointer.save_frozen(FROZEN) == table
    assert folder.stat().st_mtime_ns == written
    for step in (1, 2):
        toy.save(checkpointer, step, frozen_digests=table)
    zeros = jax.tree.map(jnp.zeros_like, FROZEN)
    restored = toy.restore(checkpointer, target_frozen=zeros)

    toy.assert_is_step(restored, 2)
    toy.assert_same_bits(restored.frozen, FROZEN)


def test_nothing_frozen(open_checkpointer, tmp_path):
    assert open_checkpointer().save_frozen({}) == {}
    assert not (tmp_path / "checkpoints").exists()


def test_damaged_frozen_parameters_are_saved_again(open_checkpointer, tmp_path):
    table = open_checkpointer().save_frozen(FROZEN)
    (folder,) = (tmp_path / "checkpoints").glob("frozen-*")
    (file,) = [f for f in (folder / "params" / "d").iterdir()]
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])

    assert open_checkpointer().save_frozen(FROZEN) == table
    assert (tmp_path / "checkpoints" / f"{folder.name}.damaged").is_dir()
    assert load.read_whole(folder / "params", table).keys() == {"body/w"}


def test_plain_orbax_reads_what_we_wrote(toy, open_checkpointer, tmp_path):
    checkpointer = open_checkpointer()
    toy.save(checkpointer, 3)
    checkpointer.wait()

    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, toy.make_trainable(0))
    with ocp.StandardCheckpointer() as reader:
        folder = tmp_path / "checkpoints" / "3" / "trainable"
        restored = reader.restore(folder, target)

    toy.assert_same_bits(restored, toy.make_trainable(3))
