"""Which processes a run has, told by settings and by schedulers' environments."""

import pytest

from bitmamba.config import DistributedConfig
from bitmamba.train.cluster import Place, find_place, first_host

SLURM = {
    "SLURM_JOB_ID": "4100",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
}
AT = "10.0.0.1:8476"


def place(environment=None, **settings):
    return find_place(DistributedConfig(**settings), environment or {})


def test_one_process_is_the_default():
    assert place() is None
    # A pod of an indexed Job, and a task of a step, may well be a run of its own.
    assert place({"JOB_COMPLETION_INDEX": "3"}) is None
    assert place(SLURM | {"SLURM_STEP_NUM_TASKS": "1"}) is None
    assert place(SLURM, detect=False) is None
    # A shell inside an allocation is in no step.
    assert place({"SLURM_JOB_ID": "4100", "SLURM_PROCID": "0"}) is None


def test_settings_say_all():
    assert place(coordinator=AT, processes=4, process_id=3) == Place(AT, 4, 3)
    assert place(SLURM, coordinator=AT, processes=3, process_id=0) == Place(AT, 3, 0)


def test_slurm_says_all():
    assert place(SLURM) == Place("gpu07:61444", 2, 1)


def test_an_indexed_job_says_which():
    found = place({"JOB_COMPLETION_INDEX": "2"}, coordinator=AT, processes=4)

    assert found == Place(AT, 4, 2)


@pytest.mark.parametrize(
    ("environment", "settings", "message"),
    [
        ({}, {"coordinator": AT}, "processes: got none"),
        ({}, {"coordinator": AT, "processes": 2}, "process_id: got none"),
        ({}, {"processes": 2}, r"coordinator: got none with processes=2"),
        (
            {"JOB_COMPLETION_INDEX": "2"},
            {"coordinator": AT, "processes": 2},
            "got 2 for process 2",
        ),
    ],
)
def test_what_is_missing_is_named(environment, settings, message):
    with pytest.raises(ValueError, match=message):
        place(environment, **settings)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu07", "gpu07"),
        ("gpu[003-005,9],cpu1", "gpu003"),
        ("a1,b[2-3]", "a1"),
        ("rack[1-2]-n,other", "rack1-n"),
    ],
)
def test_the_first_host_of_slurms_list(nodes, first):
    assert first_host(nodes) == first
