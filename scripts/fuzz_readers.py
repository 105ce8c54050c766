"""Feed the readers of foreign files with inputs that a coverage-guided fuzzer makes.

    python scripts/fuzz_readers.py --seconds=600
    python scripts/fuzz_readers.py --seconds=60 --targets=rows,peft --corpus=runs/corpus

Each target gets its share of the time, in a process of its own. A target takes any
bytes and may refuse them in one sentence; whatever else it raises, ten seconds for one
input, or two GiB of memory is a finding: the input lies in --findings.
Needs atheris (pip install bitmamba[fuzz]).

Exit codes: 0 no finding, 1 findings, 2 the user's mistake.
"""

import hashlib
import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from absl import flags

if __name__ == "__main__" and str(Path(__file__).parents[1]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parents[1]))

from bitmamba import command_line
from scripts.fuzz_seeds import SEEDS
from scripts.fuzz_targets import TARGETS

_SECONDS = flags.DEFINE_integer("seconds", 60, "Of fuzzing, all targets together.", 1)
_TARGETS = flags.DEFINE_list("targets", [], "Some of them; the default is all.")
_CORPUS = flags.DEFINE_string("corpus", None, "Where inputs are kept between runs.")
_FINDINGS = flags.DEFINE_string("findings", "runs/fuzz", "Where findings go.")
_ONE = flags.DEFINE_string(
    "one", None, "Fuzz this target here, for the command itself."
)

INPUT_TIMEOUT_S, MEMORY_MIB, MAX_INPUT = 10, 2048, 4096
INSTRUMENTED = ("bitmamba.data", "bitmamba.io", "bitmamba.quant", "jinja2")


def main() -> int:
    """Fuzz every target in a process, then say what was found."""
    unknown = sorted({*_TARGETS.value, _ONE.value or "rows"} - set(TARGETS))
    if unknown:
        raise ValueError(
            f"--targets: got {unknown[0]!r}; expected some of {', '.join(TARGETS)}"
        )
    if importlib.util.find_spec("atheris") is None:
        raise ValueError("atheris is not installed; expected it: bitmamba[fuzz]")
    if _ONE.value:
        _fuzz_here(_ONE.value)
    chosen = _TARGETS.value or list(TARGETS)
    found = 0
    for name in chosen:
        found += _fuzz(name, max(1, _SECONDS.value // len(chosen)))
    return command_line.FAILED if found else command_line.DONE


def _fuzz(name: str, seconds: int) -> int:
    """Run one target; print a line; return the number of findings."""
    corpus = Path(_CORPUS.value or tempfile.mkdtemp(prefix="bitmamba-corpus-")) / name
    corpus.mkdir(parents=True, exist_ok=True)
    for seed in SEEDS[name]:
        (corpus / hashlib.sha1(seed).hexdigest()).write_bytes(seed)
    findings = Path(_FINDINGS.value).absolute()
    findings.mkdir(parents=True, exist_ok=True)
    before = set(findings.iterdir())
    done = subprocess.run(
        [
            sys.executable,
            __file__,
            f"--one={name}",
            f"--seconds={seconds}",
            f"--corpus={corpus}",
            f"--findings={findings}/{name}-",
        ],
        capture_output=True,
        text=True,
        errors="replace",
    )
    print(f"{name}: {_summary(done.stderr)}", flush=True)
    new = sorted(set(findings.iterdir()) - before)
    for path in new:
        print(f"  finding: {path} ({path.stat().st_size} bytes)\n{_reason(done)}")
    if not new and done.returncode:
        print(f"  ended with exit code {done.returncode}\n{done.stderr[-2000:]}")
    return len(new) or bool(done.returncode)


def _summary(log: str) -> str:
    """Executions and coverage, from what libFuzzer prints."""
    points = re.findall(r"#(\d+)\s+(\w+)\s+cov: (\d+) ft: (\d+) corp: (\d+)", log)
    if not points:
        return "no coverage told"
    first = next((p for p in points if p[1] == "INITED"), points[0])
    last = points[-1]
    return (
        f"{int(last[0]):,} executions; coverage {first[2]} -> {last[2]} places, "
        f"{first[3]} -> {last[3]} features; corpus {first[4]} -> {last[4]} inputs"
    )


def _reason(done: subprocess.CompletedProcess) -> str:
    """The traceback, or what libFuzzer says of time and memory."""
    lines = done.stderr.splitlines()
    marks = [i for i, line in enumerate(lines) if "Uncaught Python" in line]
    start = (
        marks[0]
        if marks
        else next((i for i, line in enumerate(lines) if "ERROR: libFuzzer" in line), 0)
    )
    return "\n".join(f"    {line}" for line in lines[start : start + 25])


def _fuzz_here(name: str) -> None:
    """Never returns: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=list(INSTRUMENTED)):
        import bitmamba.data.jinja_render
        import bitmamba.data.loading
        import bitmamba.io.load
        import bitmamba.io.peft_read
        import bitmamba.io.tokenizer  # noqa: F401
    arguments = [
        sys.argv[0],
        f"-max_total_time={_SECONDS.value}",
        f"-timeout={INPUT_TIMEOUT_S}",
        f"-rss_limit_mb={MEMORY_MIB}",
        f"-max_len={MAX_INPUT}",
        f"-artifact_prefix={_FINDINGS.value}",
        "-print_final_stats=1",
        _CORPUS.value,
    ]
    atheris.Setup(arguments, TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    command_line.run(main)
