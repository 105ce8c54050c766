"""The process that a chat template runs in; `jinja_template` starts it and asks it.

One JSON object a line, on standard input and output: the limits, the template to be
compiled, then conversations to be rendered. After the first the process has given up
what a program that got out of jinja2's sandbox would want: it can open no file and no
connection, write nothing, and (unless it is root's) start no process.
"""

import contextlib
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any, BinaryIO

from bitmamba.data.example import Message, Refused
from bitmamba.data.jinja_render import Renderer


def main() -> None:
    """Answer requests until the input ends."""
    requests, answers = _pipes()
    limits = json.loads(requests.readline())
    _load_all()
    _give_up(limits["memory_bytes"])
    renderer = None
    for line in requests:
        _allow(limits["timeout_s"])
        request = json.loads(line)
        try:
            if renderer is None:
                renderer = Renderer(**request)
                answer: dict[str, Any] = {}
            else:
                answer = _render(renderer, **request)
        except Refused as refused:
            answer = {"refused": [refused.reason, refused.detail]}
        except MemoryError:
            limit = f"{limits['memory_bytes'] / 2**20:g} MiB"
            answer = {"error": f"over {limit} of memory for one row"}
        except ValueError as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer).encode("ascii") + b"\n")
        answers.flush()


def _render(
    renderer: Renderer, *, call: str, messages: list[list[Any]]
) -> dict[str, Any]:
    turns = [Message(*message) for message in messages]
    return {"segments": [list(s) for s in getattr(renderer, call)(turns)]}


_EVERYTHING = r"""
{%- macro f(x=1) %}{{ x }}{% endmacro -%}
{{ "\u00e9\n" ~ f(x=2) ~ ("%s" % 1) ~ "{}".format(1) }}
{{ messages|tojson }}{{ messages|pprint }}{{ "<a>"|e|striptags|urlize }}
{{ messages|map(attribute="role")|list|sort|join(",") }}{{ raise_exception("") }}
"""


def _load_all() -> None:
    """What Python and jinja2 load when first used; later no file can be opened."""
    with contextlib.suppress(ValueError):
        Renderer("{% for %}", special_tokens=(), bos="", eos="")
    everything = Renderer(_EVERYTHING, special_tokens=(), bos="", eos="")
    with contextlib.suppress(Refused):
        everything.prompt([Message("user", "")])


def _pipes() -> tuple[BinaryIO, BinaryIO]:
    """What is printed goes nowhere; answers have a pipe of their own."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return sys.stdin.buffer, answers


def _give_up(memory_bytes: int) -> None:
    """Files, connections, processes; and memory beyond what is used already."""
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 0,
        resource.RLIMIT_NPROC: 0,
    }
    with contextlib.suppress(OSError):  # Linux has it; others do not limit memory
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + memory_bytes
    for what, most in limits.items():
        _lower(what, most, hard=True)


def _allow(timeout_s: int) -> None:
    """The kernel ends the process when its next seconds of computing are over."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    end = int(used.ru_utime + used.ru_stime) + timeout_s + 1
    _lower(resource.RLIMIT_CPU, end, hard=False)


def _lower(what: int, most: int, *, hard: bool) -> None:
    """Set a limit, or keep the one that the user's shell has set, if it is lower."""
    highest = resource.getrlimit(what)[1]
    if highest != resource.RLIM_INFINITY:
        most = min(most, highest)
    resource.setrlimit(what, (most, most if hard else highest))
