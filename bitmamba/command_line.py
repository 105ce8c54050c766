"""How every command starts and ends: flags, one-line mistakes, exit codes.

Exit codes: 0 done, 1 failed (the last save, no memory left on the device, or a fault of
ours), 2 the user's mistake, 3 numbers went bad, 130 Ctrl-C where nothing is to be
saved, 141 nobody reads the output any more, 143 told to stop (and saved).
"""

import contextlib
import difflib
import importlib.util
import os
import re
import select
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags, logging

_MAX_LINE = 2000
DONE, FAILED, MISTAKE, BAD_NUMBERS, STOPPED = 0, 1, 2, 3, 143
INTERRUPTED, UNREAD = 130, 141  # 128 + SIGINT, + SIGPIPE, as a shell names them


def run(main: Callable[[], Any], argv: Sequence[str] | None = None) -> None:
    """Parse the flags, call main(), exit with the code it returns (None is 0).

    --help shows the command's docstring and its flags instead.
    main may return a function to be called last instead: what cannot be the user's
    mistake any more, so that its errors keep their tracebacks.
    """
    argv = list(sys.argv if argv is None else argv)
    with quiet_ends():
        if {"--help", "-h"} & set(argv[1:]):
            print(sys.modules["__main__"].__doc__)
            print(flags.FLAGS.main_module_help())
            sys.exit(DONE)
        with memory_in_one_line():
            with one_line_mistakes():
                parse_flags(argv)
                code = main()
            if callable(code):
                code = code()
        sys.exit(code or DONE)


@contextlib.contextmanager
def quiet_ends() -> Iterator[None]:
    """Ctrl-C, and output that nobody reads (`… | head`), end without a traceback.

    What saves when told to stop has handlers of its own (`bitmamba.train.signals`).
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # else a closed pipe is only told at the very end
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        unread = _unread_outputs()
        if not unread:
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for output in unread:  # what they still hold is flushed once more at the end
            os.dup2(nowhere, output)
        sys.exit(UNREAD)


def _unread_outputs() -> list[int]:
    """Of stdout and stderr those that are pipes without a reader."""
    poll = select.poll()
    for output in (1, 2):
        poll.register(output, 0)
    return [output for output, event in poll.poll(0) if event & select.POLLERR]


@contextlib.contextmanager
def one_line_mistakes() -> Iterator[None]:
    """A user's mistake (ValueError, NotImplementedError) becomes a line and exit 2.

    `--verbosity=1` shows the traceback instead.
    """
    try:
        yield
    except (ValueError, NotImplementedError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _unread_outputs():
            raise
        if _wants_tracebacks():
            raise
        # Messages quote files, which may hold what acts on a terminal, and much of it.
        line = " ".join(str(error).split())[:_MAX_LINE]
        line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
        print("error: " + line, file=sys.stderr)
        sys.exit(MISTAKE)


@contextlib.contextmanager
def memory_in_one_line() -> Iterator[None]:
    """A device that runs out of memory ends the command in a line and exit 1.

    `--verbosity=1` shows the traceback instead.
    """
    try:
        yield
    except RuntimeError as error:
        # JAX's error, known by its code: JAX itself is not imported here.
        said = str(error).strip()
        if not said.startswith("RESOURCE_EXHAUSTED") or _wants_tracebacks():
            raise
        print(
            f"error: the device is out of memory ({said.splitlines()[0][:200]}); "
            "another program may hold a part of it; the start shows what a step needs, "
            "bitmamba/train/MEMORY.md what makes it less",
            file=sys.stderr,
        )
        sys.exit(FAILED)


def _wants_tracebacks() -> bool:
    return flags.FLAGS.is_parsed() and logging.get_verbosity() >= logging.DEBUG


def parse_flags(argv: list[str]) -> None:
    """Parse absl flags and --config overrides.

    Raises:
        ValueError: unknown flag or setting, value of a wrong type, missing config
            file, or anything on the line that is not a flag.
    """
    if "config" in flags.FLAGS:
        check_overrides(argv)
    try:
        left = flags.FLAGS(argv)[1:]
    except flags.Error as error:
        raise ValueError(_first_sentence(str(error))) from None
    if left:
        hint = f"; did you mean --{left[0]}?" if "=" in left[0] else ""
        raise ValueError(
            f"command line: got {left[0]!r}; expected only flags (--name=value){hint}"
        )


def check_overrides(argv: Sequence[str]) -> None:
    """Refuse a missing config file, and overrides of settings it does not have."""
    path = _flag_value(argv, "config")
    if path is None:
        return
    known = _leaf_paths(load_config(path))
    for arg in argv[1:]:
        match = re.match(r"--config\.([^=\s]+)", arg)
        if match and match[1] not in known:
            near = difflib.get_close_matches(match[1], known, n=1, cutoff=0.0)
            raise ValueError(
                f"--config.{match[1]}: unknown setting; "
                f"did you mean --config.{near[0]}?"
            )


def load_config(path: str) -> Any:
    """Run FILE's get_config, with the part after ":" of "FILE:ARGUMENT"."""
    file, _, argument = path.partition(":")
    if not Path(file).is_file():
        found = sorted(str(p) for p in Path("configs").glob("*.py"))
        known = f"; found here: {', '.join(found)}" if found else ""
        raise ValueError(f"--config: got {file!r}; expected a Python file{known}")
    spec = importlib.util.spec_from_file_location("_checked_config", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"--config: got {file!r}; expected a file that ends in .py")
    # Configs import one another as `configs.base`, also when a script asks for one.
    root = str(Path(file).resolve().parent.parent)
    if root not in sys.path:
        sys.path.append(root)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ValueError(f"--config: {file!r} has no get_config(); see configs/sft.py")
    return module.get_config(*([argument] if argument else []))


def _flag_value(argv: Sequence[str], name: str) -> str | None:
    for i, arg in enumerate(argv[1:], start=1):
        if re.match(rf"--?{name}=", arg):
            return arg.split("=", 1)[1]
        if arg in (f"--{name}", f"-{name}") and i + 1 < len(argv):
            return argv[i + 1]
    return None


def _leaf_paths(config: Mapping[str, Any], prefix: str = "") -> list[str]:
    paths = []
    for key in config:
        value = config[key]
        if hasattr(value, "keys"):
            paths += _leaf_paths(value, f"{prefix}{key}.")
        else:
            paths.append(prefix + key)
    return paths


def _first_sentence(text: str) -> str:
    """absl's message without its list of help flags."""
    return text.split("\nPass --help")[0].strip()
