"""A chat template in its process: whatever it does ends in one sentence."""

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bitmamba.data import jinja_template
from bitmamba.data.chat import load_template
from bitmamba.data.example import Message, Refused
from bitmamba.io.tokenizer import ByteTokenizer

pytestmark = pytest.mark.newest

PAIR = [Message("user", "q"), Message("assistant", "a")]
ANSWER = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
ANSWER += "{% if add_generation_prompt %}assistant{% endif %}"
DOUBLED = "{% set n = namespace(x='x' * 1000) %}{% for i in range(60) %}"
NESTED = "{% set n = namespace(a=[1], b=[1]) %}{% for i in range(60) %}"
NESTED += "{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}"


@pytest.fixture
def template(tmp_path):
    made = []

    def template(source):
        path = tmp_path / "template.jinja"
        path.write_bytes(source if isinstance(source, bytes) else source.encode())
        made.append(load_template(str(path), ByteTokenizer()))
        return made[-1]

    yield template
    for one in made:
        one.close()


def texts(segments):
    return [(s.text, s.trained) for s in segments]


def test_it_renders_is_closed_and_renders_again(template):
    one = template(ANSWER)

    before = one.segments(PAIR)
    one.close()

    assert texts(before) == [("userqassistant", False), ("a", True)]
    assert all(s.markup for s in before)
    assert one.segments(PAIR) == before
    assert texts(one.prompt(PAIR[:1])) == [("userqassistant", False)]


def test_a_refusal_arrives_with_reason_and_detail(template):
    with pytest.raises(Refused) as refused:
        template("{{ raise_exception('no \\u00e9') }}").segments(PAIR)

    assert refused.value.reason == "template refuses the row"
    assert "no é" in refused.value.detail


@pytest.mark.parametrize(
    "body",
    [
        DOUBLED + "{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{{ messages[0].content|center(999999999) }}",
        "{{ '%999999999d' % 1 }}",
        "{% set s = 'a' * 9999 %}{{ s.replace('a', s).replace('a', s) }}",
    ],
    ids=["doubling", "filter", "constant", "replace"],
)
def test_memory_is_limited(template, monkeypatch, body):
    monkeypatch.setattr(jinja_template, "MEMORY_BYTES", 64 * 2**20)

    with pytest.raises(ValueError, match=r"jinja: over 64 MiB of memory") as error:
        template(body + ANSWER).segments(PAIR)
    assert "\n" not in str(error.value)


def test_time_is_limited_inside_one_expression(template, monkeypatch):
    """No line and no call is between the operands of this comparison."""
    monkeypatch.setattr(jinja_template, "TIMEOUT_S", 1)

    with pytest.raises(ValueError, match=r"jinja: over 1 s of computing for one row"):
        template(NESTED + "{{ n.a == n.b }}" + ANSWER).segments(PAIR)


OUTSIDE = """
import os, socket
from bitmamba.data.jinja_worker import _give_up
_give_up(2**29)
for name, attempt in (
    ("write", lambda: open("stolen", "w")),
    ("read", lambda: open("/etc/hostname")),
    ("connect", socket.socket),
):
    try:
        attempt()
        print(name, "worked")
    except OSError as error:
        print(name, "failed")
os.write(1, b"run\\n")
os.execv("/bin/sh", ["sh", "-c", "echo worked"])
"""


def test_outside_the_sandbox_there_is_nothing(tmp_path):
    """What code could do that got out of the sandbox, in the process as it is then."""
    root = str(Path(__file__).parents[2])

    done = subprocess.run(
        [sys.executable, "-c", OUTSIDE],
        cwd=tmp_path,
        env={"PYTHONPATH": root, "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
    )

    assert done.stdout.split("\n")[:4] == [
        "write failed",
        "read failed",
        "connect failed",
        "run",
    ], done.stderr
    assert done.returncode == 127  # no shell without its libraries
    assert list(tmp_path.iterdir()) == []


UNDER_LIMITS = """
import resource
for what, most in ((resource.RLIMIT_CPU, 300), (resource.RLIMIT_AS, 2**31)):
    resource.setrlimit(what, (most, most))
from bitmamba.data.example import Message
from bitmamba.data.jinja_template import JinjaTemplate
from bitmamba.io.tokenizer import ByteTokenizer
one = JinjaTemplate(b"{{ messages[0].content }}", ByteTokenizer(), where="here")
print(one.prompt([Message("user", "hi")])[0].text)
"""


def test_limits_of_the_users_shell_are_kept(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", UNDER_LIMITS],
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )

    assert done.stdout == "hi\n", done.stderr


def test_no_process_is_left_behind(template):
    one = template(ANSWER)
    process = one._process

    one.segments(PAIR)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGTERM)  # as a cluster's signal to all processes
    process.wait(10)
    assert texts(one.segments(PAIR))[-1] == ("a", True)

    process = one._process
    one.close()
    assert process.poll() is not None


def test_a_forgotten_template_ends_its_process(tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text(ANSWER)
    one = load_template(str(path), ByteTokenizer())
    process = one._process

    del one
    gc.collect()

    assert process.poll() is not None


def test_the_source_is_limited_and_must_be_a_template(template):
    with pytest.raises(ValueError, match="at most 262"):
        template("x" * 300_000)
    with pytest.raises(ValueError, match=r"template\.jinja: not a Jinja template"):
        template("{% for %}")
    with pytest.raises(ValueError, match="not a Jinja template"):
        template(b"\xff")
    with pytest.raises(ValueError, match="no such file"):
        load_template("nowhere.jinja", ByteTokenizer())
