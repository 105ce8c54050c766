"""Any one file of a step damaged: exact weights of a real step, or a refusal."""

import shutil
from pathlib import Path

import pytest

from bitmamba.io import steps
from bitmamba.io.checkpoint import Checkpointer, load_params
from bitmamba.io.runs import load_run

pytestmark = pytest.mark.newest


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]


DAMAGES = {
    "delete": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "half": lambda file: file.write_bytes(
        file.read_bytes()[: file.stat().st_size // 2]
    ),
    "flip": lambda file: file.write_bytes(flip(file.read_bytes())),
}


@pytest.fixture(scope="module")
def two_steps(toy, tmp_path_factory):
    """A checkpoints folder with steps 1 and 2; not to be changed."""
    directory = tmp_path_factory.mktemp("two_steps")
    checkpointer = Checkpointer(
        directory, keep=2, fingerprints=toy.FINGERPRINTS, config=toy.CONFIG
    )
    for step in (1, 2):
        toy.save(checkpointer, step)
    checkpointer.close()
    return directory


def files_of(folder: Path) -> list[Path]:
    return sorted(f.relative_to(folder) for f in folder.rglob("*") if f.is_file())


def damaged_copy(two_steps, tmp_path, name, damage):
    """A copy of the checkpoints with one file of step 2 damaged."""
    directory = tmp_path / "checkpoints"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(two_steps, directory)
    DAMAGES[damage](directory / "2" / name)
    return directory


@pytest.mark.parametrize("damage", DAMAGES)
def test_restore_ends_on_a_real_step(
    toy, two_steps, tmp_path, open_checkpointer, damage
):
    """OWN-2: never silently wrong, whichever file is hit."""
    used = []
    checkpointer = open_checkpointer()
    for name in files_of(two_steps / "2"):
        directory = damaged_copy(two_steps, tmp_path, name, damage)

        restored = toy.restore(checkpointer)

        toy.assert_is_step(restored, restored.step)
        used.append(restored.step)
        expected = ["1", "2"] if restored.step == 2 else ["1", "2.damaged"]
        assert sorted(f.name for f in directory.iterdir()) == expected
    assert 1 in used
    assert set(used) <= {1, 2}


@pytest.mark.parametrize("damage", DAMAGES)
def test_load_params_ends_on_a_real_step(toy, two_steps, tmp_path, damage):
    names = [n for n in files_of(two_steps / "2") if n.parts[0] != "opt_state"]
    for name in names:
        directory = damaged_copy(two_steps, tmp_path, name, damage)

        params, record = load_params(tmp_path)

        expected = toy.as_loaded(toy.make_trainable(record["step"]))
        toy.assert_same_bits(params, expected)
        assert sorted(f.name for f in directory.iterdir()) == ["1", "2"]


def test_one_line_says_which_step_and_why(
    toy, two_steps, tmp_path, open_checkpointer, caplog
):
    damaged_copy(two_steps, tmp_path, "meta/metadata", "flip")

    toy.restore(open_checkpointer())

    (line,) = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert line.startswith("checkpoint: step 2: meta: ")
    assert line.endswith("set aside as 2.damaged; trying step 1")
    assert "\n" not in line


def test_weights_of_an_older_step_are_told_once(two_steps, tmp_path, caplog):
    damaged_copy(two_steps, tmp_path, "meta/metadata", "flip")

    load_run(tmp_path)

    (line,) = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert "/checkpoints/2: meta: " in line
    assert line.endswith("; used instead: step 1")


def test_all_damaged_is_refused_not_started_over(
    toy, two_steps, tmp_path, open_checkpointer
):
    directory = damaged_copy(two_steps, tmp_path, "meta/metadata", "empty")
    (directory / "1" / "meta" / "metadata").unlink()

    for _ in range(2):  # the second start sees only what was set aside
        with pytest.raises(ValueError, match="2 damaged steps and no whole one"):
            toy.restore(open_checkpointer())


def test_a_damaged_step_asked_for_by_name_is_refused(two_steps, tmp_path):
    directory = damaged_copy(two_steps, tmp_path, "meta/metadata", "flip")

    with pytest.raises(ValueError, match=r"checkpoint .*/2: meta: .*a whole step"):
        load_params(directory / "2")


def test_the_same_step_damaged_twice(toy, two_steps, tmp_path, open_checkpointer):
    directory = damaged_copy(two_steps, tmp_path, "meta/metadata", "empty")
    checkpointer = open_checkpointer()
    toy.restore(checkpointer)
    toy.save(checkpointer, 2)
    checkpointer.wait()
    (directory / "2" / "meta" / "metadata").write_bytes(b"")

    assert toy.restore(checkpointer).step == 1
    found = [f.name for f in steps.damaged_folders(directory)]
    assert found == ["2.damaged", "2.damaged-2"]
