"""A user's mistake at the command line: one clear line, exit code 2, no traceback."""

import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from bitmamba import command_line

ROOT = Path(__file__).resolve().parents[1]


def train(*flags, config="configs/sft.py", cwd=ROOT):
    command = [sys.executable, str(ROOT / "train.py")]
    command += [f"--config={config}"] if config else []
    return subprocess.run(
        [*command, *flags], cwd=cwd, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        # B097, B098 and the contract: typos, unknown keys, wrong values.
        (["--config.optim.lrr=1"], "--config.optim.lr?"),
        (["--config.optm.lr=1"], "--config.optm.lr: unknown setting"),
        (["--config.learning_rate=1"], "--config.learning_rate: unknown setting"),
        (["--dry_rnu"], "Unknown command line flag 'dry_rnu'"),
        (["config.optim.lr=1e-4"], "did you mean --config.optim.lr=1e-4?"),
        (["--config.train.steps=1e3"], "--config.train.steps=1e3"),
        (["--config.train.steps=-5"], "config.train.steps: got -5"),
        (["--config.optim.lr=nan"], "config.optim.lr: got nan"),
        (["--config.optim.lr=1e39"], "config.optim.lr: got 1e+39; expected at most"),
        (["--config.train.mode=lora"], "start from --config=configs/lora.py"),
        (["--config.data.sft=nowhere.jsonl"], "nowhere.jsonl"),
        (["--config.data.tokenizer=nowhere.json"], "nowhere.json"),
        (["--config.checkpoint.init_from=nowhere"], "init_from: got 'nowhere'"),
        (["--config.data.window=2"], "window"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_exit_2(flags, message, tmp_path):
    done = train(*flags, f"--config.workdir={tmp_path / 'run'}")

    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert message in line
    assert "Traceback" not in done.stdout + done.stderr
    assert not (tmp_path / "run").exists()


def test_an_unknown_preset_and_a_missing_config_file_name_what_exists():
    preset = train(config="configs/sft.py:tinny")
    missing = train(config="configs/stf.py")

    assert (preset.returncode, missing.returncode) == (2, 2)
    assert "expected one of tiny, bitmamba2_255m" in preset.stderr
    assert "configs/sft.py" in missing.stderr
    assert len(missing.stderr.strip().splitlines()) == 1


def test_an_empty_data_set_is_told(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"")

    done = train(f"--config.data.sft={empty}", "--config.data.replay_share=0")

    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "empty.jsonl" in done.stderr


def test_a_message_does_nothing_to_the_terminal_and_ends(capsys):
    """It may quote a file of somebody else."""
    with pytest.raises(SystemExit) as ended, command_line.one_line_mistakes():
        raise ValueError("a.jsonl: got '\x1b[2J\u202e'" + "x" * 10_000)

    told = capsys.readouterr().err
    assert ended.value.code == command_line.MISTAKE
    assert told.startswith(r"error: a.jsonl: got '\x1b[2J\u202e'")
    assert told.rstrip("\n").isprintable()
    assert len(told) < 3000


# Output as of generate.py: for ever, each piece flushed. In a shell's background Ctrl-C
# is ignored, by what the tests start too.
ENDLESS = """
import itertools, signal
from bitmamba import command_line
signal.signal(signal.SIGINT, signal.default_int_handler)
def main():
    for i in itertools.count():
        print(i, flush={flush})
command_line.run(main, ["endless"])
"""


def endless(*, flush):
    command = [sys.executable, "-c", ENDLESS.format(flush=flush)]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_ctrl_c_is_one_line():
    with endless(flush=True) as child:
        child.stdout.readline()
        child.send_signal(signal.SIGINT)
        _, told = child.communicate(timeout=60)

    assert (child.returncode, told) == (command_line.INTERRUPTED, "\nstopped\n")


@pytest.mark.parametrize("flush", [True, False])
def test_output_that_nobody_reads_ends_the_command_without_a_word(flush):
    with endless(flush=flush) as child:
        child.stdout.readline()
        child.stdout.close()
        told = child.stderr.read()

    assert (child.returncode, told) == (command_line.UNREAD, "")


def test_what_is_left_to_print_at_the_end_may_be_unread_too():
    short = "import sys; from bitmamba import command_line as c; sys.stdin.read(); "
    short += "c.run(lambda: print('done'), ['short'])"
    with subprocess.Popen(
        [sys.executable, "-c", short],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        child.stdout.close()
        child.stdin.close()
        told = child.stderr.read()

    assert (child.returncode, told) == (command_line.UNREAD, "")


def test_a_broken_pipe_that_is_not_the_output_is_told(capsys):
    with pytest.raises(SystemExit) as ended, command_line.one_line_mistakes():
        raise BrokenPipeError("a worker is gone")

    assert ended.value.code == command_line.MISTAKE
    assert "a worker is gone" in capsys.readouterr().err


NO_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.\nmore"


@pytest.mark.parametrize("at", ["once", "later"])
def test_a_device_without_memory_is_one_line(capsys, at):
    def fail():
        raise jax.errors.JaxRuntimeError(NO_MEMORY)

    with pytest.raises(SystemExit) as ended:
        command_line.run(fail if at == "once" else lambda: fail, ["some_command"])

    told = capsys.readouterr().err
    assert ended.value.code == command_line.FAILED
    assert told.count("\n") == 1
    assert "out of memory (RESOURCE_EXHAUSTED: Out of memory while trying" in told


def test_other_faults_of_the_device_keep_their_traceback():
    def fail():
        raise jax.errors.JaxRuntimeError("INTERNAL: something broke")

    with pytest.raises(jax.errors.JaxRuntimeError, match="something broke"):
        command_line.run(fail, ["some_command"])
