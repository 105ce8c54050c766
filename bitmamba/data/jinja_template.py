"""Chat templates of others, in Jinja, each in a process of its own.

A template is a program from elsewhere. jinja2's sandbox keeps it from our objects, but
not from filling the memory or computing for ever in one expression; a process with
limits does. `jinja_worker` is that process, `jinja_render` what it does.
"""

import contextlib
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from typing import Any

from bitmamba.data.chat import DataTokenizer, Segment
from bitmamba.data.example import Message, Refused

MAX_SOURCE_BYTES = 256 * 1024
MEMORY_BYTES = 512 * 2**20
TIMEOUT_S = 10  # of computing, for one row
# It cannot wait, only compute; beyond this the machine itself stands still.
_WAIT_S = 600.0
_WORKER = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from bitmamba.data.jinja_worker import main
main()
"""


class JinjaTemplate:
    """A chat template file; see the module.

    source: the file's bytes. where: its name, for messages.

    Raises:
        ValueError: too large, not a template, or over its limits when compiled.
    """

    name = "jinja"

    def __init__(self, source: bytes, tokenizer: DataTokenizer, *, where: str):
        if len(source) > MAX_SOURCE_BYTES:
            raise ValueError(
                f"{where}: {len(source)} bytes; expected at most {MAX_SOURCE_BYTES}"
            )
        try:
            text = source.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: not a Jinja template ({error})") from None
        bos = tokenizer.bos_id
        self._first = {
            "source": text,
            "special_tokens": list(tokenizer.special_tokens),
            "bos": "" if bos is None else tokenizer.decode([bos]),
            "eos": tokenizer.decode([tokenizer.eot_id]),
        }
        self._where = where
        self.fingerprint = hashlib.sha256(source).hexdigest()
        self._process: subprocess.Popen | None = None
        self._end: Any = None
        self._start()

    def segments(self, messages: Sequence[Message]) -> list[Segment]:
        """The pieces of a conversation.

        Raises:
            Refused: the template cannot write it, or over its steps or its output.
            ValueError: over the limits of time or memory.
        """
        return self._ask("segments", messages)

    def prompt(self, messages: Sequence[Message]) -> list[Segment]:
        """The conversation so far and the opening of the answer; as `segments`."""
        return self._ask("prompt", messages)

    def close(self) -> None:
        """End the process; it is started again when needed."""
        if self._end is not None:
            self._end()
        self._process = None

    def _start(self) -> None:
        kept = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # no tokens, no settings
        environment = {k: os.environ[k] for k in kept if k in os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _WORKER, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment | {"OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,  # signals of the terminal are not for it
        )
        self._end = weakref.finalize(self, _end, self._process)
        limits = {"memory_bytes": MEMORY_BYTES, "timeout_s": TIMEOUT_S}
        self._exchange(limits, self._first)

    def _ask(self, call: str, messages: Sequence[Message]) -> list[Segment]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._start()
        answer = self._exchange({"call": call, "messages": [list(m) for m in messages]})
        if "refused" in answer:
            raise Refused(*answer["refused"])
        return [Segment(*segment) for segment in answer["segments"]]

    def _exchange(self, *requests: dict[str, Any]) -> dict[str, Any]:
        """Send, and read one answer."""
        process = self._process
        line = b""
        with contextlib.suppress(BrokenPipeError):  # told by its exit code
            for request in requests:
                process.stdin.write(json.dumps(request).encode("ascii") + b"\n")
            process.stdin.flush()
            if select.select([process.stdout], [], [], _WAIT_S)[0]:
                line = process.stdout.readline()
        if not line.endswith(b"\n"):
            raise ValueError(f"{self._where}: {self._why_it_ended()}")
        answer = json.loads(line)
        if "error" in answer:
            self.close()
            raise ValueError(f"{self._where}: {answer['error']}")
        return answer

    def _why_it_ended(self) -> str:
        process = self._process
        if process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        code = process.poll()
        self.close()
        if code is None:
            return f"no answer within {_WAIT_S:g} s"
        if code == -signal.SIGXCPU:
            return f"over {TIMEOUT_S} s of computing for one row"
        return f"its process ended with exit code {code}; expected it to render the row"


def _end(process: subprocess.Popen) -> None:
    """Also when the template is forgotten: no process is left behind."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            pipe.close()
    process.wait()
