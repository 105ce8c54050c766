"""Several processes: the bits of one, stops that all agree on, and lost ones told.

All on this machine: gloo between processes, eight virtual devices in all. Compiled with
little effort: every layout gets the same, and bits are compared among them alone.
"""

import signal
import socket
import time

import pytest

STEPS = 10
RUN = {
    "train__steps": STEPS,
    "checkpoint__every": 4,
    "eval__every": 5,
    "train__batch_size": 8,
    "eval__max_windows": 8,
    "model__layers": "-",
    "model__vocab_size": 304,
    "mesh__data": 2,
    "mesh__fsdp": 4,
    "mesh__min_size": 1,
}
DEVICES = 8
pytestmark = pytest.mark.xdist_group("processes")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def together(jobs, workdir, count, *, each=lambda index: {}, **settings):
    """Start a run of `count` processes that share eight devices."""
    flags = (
        f"--xla_force_host_platform_device_count={DEVICES // count} "
        "--xla_backend_optimization_level=0"
    )
    address = f"127.0.0.1:{free_port()}"
    return [
        jobs.start(
            workdir,
            label=f".{index}",
            environment={"XLA_FLAGS": flags},
            distributed__coordinator=address,
            distributed__processes=count,
            distributed__process_id=index,
            **{**RUN, **settings, **each(index)},
        )
        for index in range(count)
    ]


def ends(processes):
    codes = [process.end() for process in processes]
    return codes, "\n".join(process.shown for process in processes)


@pytest.fixture(scope="module")
def unbroken(jobs, tmp_path_factory):
    """The work directory of a run in one process with all devices."""
    workdir = tmp_path_factory.mktemp("processes") / "unbroken"
    codes, shown = ends(together(jobs, workdir, 1, wait_s=0))
    assert codes == [0], shown
    return workdir


@pytest.mark.once
def test_two_one_and_two_processes_are_one_run(jobs, unbroken, tmp_path):
    # B047, B048, promises 4, 9 and 11: one process is told to stop, both do.
    workdir = tmp_path / "run"

    first = together(jobs, workdir, 2, wait_s=0.2)
    first[0].wait_for(jobs.is_at(2))
    first[1].process.send_signal(signal.SIGTERM)
    codes, shown = ends(first)
    assert codes == [143, 143], shown
    assert "SIGTERM: saved step" in first[0].shown
    # Only one of them shows the run.
    assert "evaluates every" in first[0].shown
    assert "step " not in first[1].shown
    done = max(row["step"] for row in jobs.rows(workdir))
    assert done < STEPS - 2

    second = together(jobs, workdir, 1, wait_s=0.2, guard__stop_code=99)
    second[0].wait_for(jobs.is_at(done + 1))
    assert second[0].send(signal.SIGUSR1) == 99, second[0].shown
    assert max(row["step"] for row in jobs.rows(workdir)) < STEPS

    codes, shown = ends(together(jobs, workdir, 2, wait_s=0))
    assert codes == [0, 0], shown
    assert jobs.final(workdir, STEPS) == jobs.final(unbroken, STEPS)


@pytest.mark.slow
def test_four_processes_are_one_run_and_one_that_is_told_stops_all(
    jobs, unbroken, tmp_path
):
    workdir = tmp_path / "run"
    first = together(jobs, workdir, 4, wait_s=0.3)
    first[0].wait_for(jobs.is_at(2))

    first[2].process.send_signal(signal.SIGTERM)
    codes, shown = ends(first)

    assert codes == [143] * 4, shown
    assert "SIGTERM: saved step" in first[0].shown
    done = max(row["step"] for row in jobs.rows(workdir))
    assert 2 <= done < STEPS - 2

    codes, shown = ends(together(jobs, workdir, 4, wait_s=0))
    assert codes == [0] * 4, shown
    assert jobs.final(workdir, STEPS) == jobs.final(unbroken, STEPS)


@pytest.mark.slow
def test_the_loss_of_one_of_four_processes_is_told_by_the_others(jobs, tmp_path):
    workdir = tmp_path / "run"
    processes = together(jobs, workdir, 4, wait_s=0.3)
    processes[0].wait_for(jobs.is_at(5))

    processes[0].send(signal.SIGKILL)
    before = time.monotonic()
    codes = [process.end() for process in processes[1:]]

    assert time.monotonic() - before <= 30
    assert codes == [1] * 3
    for process in processes[1:]:
        (line,) = [x for x in process.shown.splitlines() if "error:" in x]
        assert line.startswith("error: process 0 of 4 is gone: ")


LOST = {
    "killed 1": (1, signal.SIGKILL, "process 1 of 2"),
    "killed 0": (0, signal.SIGKILL, "process 0 of 2 is gone: "),
    "frozen 0": (0, signal.SIGSTOP, "process 0 of 2 "),
}


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "how", "who"), LOST.values(), ids=LOST)
def test_a_lost_process_is_told_in_one_line_and_the_run_goes_on(
    jobs, unbroken, tmp_path, lost, how, who
):
    # Process 0 too, whose end would make JAX abort the others without a word of ours.
    workdir = tmp_path / "run"
    processes = together(jobs, workdir, 2, wait_s=0.3)
    processes[0].wait_for(jobs.is_at(5))

    processes[lost].process.send_signal(how)
    before = time.monotonic()
    other = processes[1 - lost]
    code = other.end()
    seconds = time.monotonic() - before
    processes[lost].process.kill()
    processes[lost].end()

    assert code == 1, other.shown
    assert seconds <= 30
    (line,) = [x for x in other.shown.splitlines() if "error:" in x]
    assert line.startswith(f"error: {who}")
    assert "; step 4 is saved; start all processes again" in line
    assert "coordination" not in other.shown
    codes, shown = ends(together(jobs, workdir, 1, wait_s=0))
    assert codes == [0], shown
    assert jobs.final(workdir, STEPS) == jobs.final(unbroken, STEPS)


@pytest.mark.slow
def test_other_data_in_one_process_are_refused_by_its_number(jobs, examples, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text((examples / "examples.jsonl").read_text().replace("What", "How"))

    codes, shown = ends(
        together(
            jobs,
            tmp_path / "run",
            2,
            each=lambda index: {"data__sft": other} if index else {},
        )
    )

    assert codes == [2, 2], shown
    assert "process 1 of 2: " in shown
    assert "expected" in shown


@pytest.mark.slow
def test_a_process_that_does_not_come_is_told(jobs, tmp_path):
    # B100: how long to wait is a setting.
    processes = together(jobs, tmp_path / "run", 3, distributed__start_timeout_s=8)
    processes[2].send(signal.SIGKILL)

    codes = [process.end() for process in processes[:2]]

    assert codes == [1, 1]
    for index, process in enumerate(processes[:2]):
        assert f"error: process {index} of 3" in process.shown
        assert "start all processes, or raise" in process.shown
    # The other may look just after process 0 has given up.
    assert "another process has not come" in processes[0].shown
