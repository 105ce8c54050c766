"""Feed the readers of foreign files with inputs that a coverage-guided fuzzer makes.

    python scripts/fuzz_readers.py --seconds=600
    python scripts/fuzz_readers.py --seconds=60 --targets=rows,peft --corpus=out/corpus

Each target gets its share of the time, in a process of its own. A target takes any
bytes and may refuse them in one sentence; whatever else it raises, ten seconds for one
input, or two GiB of memory is a finding: the input, made smaller, lies in --findings.
Needs atheris (pip install bitmamba[fuzz]).

Exit codes: 0 no finding, 1 findings, 2 the user's mistake.
"""

import functools
import hashlib
import importlib.util
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from absl import flags

if __name__ == "__main__" and str(Path(__file__).parents[1]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parents[1]))

from bitmamba import command_line

_SECONDS = flags.DEFINE_integer("seconds", 60, "Of fuzzing, all targets together.", 1)
_TARGETS = flags.DEFINE_list("targets", [], "Some of them; the default is all.")
_CORPUS = flags.DEFINE_string("corpus", None, "Where inputs are kept between runs.")
_FINDINGS = flags.DEFINE_string("findings", "out/findings", "Where findings go.")
_ONE = flags.DEFINE_string(
    "one", None, "Fuzz this target here, for the command itself."
)

INPUT_TIMEOUT_S, MEMORY_MIB, MAX_INPUT = 10, 2048, 4096
INSTRUMENTED = ("bitmamba.data", "bitmamba.io", "bitmamba.quant", "jinja2")
_FOLDER = Path(tempfile.gettempdir()) / "bitmamba-fuzz"


def rows(data: bytes) -> None:
    """A JSONL file (or gzip), read, encoded and accounted for."""
    from bitmamba.config import DataConfig
    from bitmamba.data.chat import BuiltinTemplate
    from bitmamba.data.loading import Loader
    from bitmamba.io.tokenizer import ByteTokenizer

    path = _write("rows.jsonl", data[1:])
    tokenizer = ByteTokenizer(bos=bool(data[:1] < b"\x80"))
    loader = Loader(
        DataConfig(window=32, heldout_share=0.3),
        BuiltinTemplate(tokenizer.special_tokens),
        tokenizer,
        tokenizer.vocab_size,
    )
    try:
        loader.load(str(path), path, role="sft" if data[:1] != b"r" else "replay")
    except ValueError as error:
        _check_sentence(error, str(path))
        return
    loader.files[0].check()
    loader.stores()


def template(data: bytes) -> None:
    """A chat template, as its process compiles and renders it."""
    from bitmamba.data import jinja_render
    from bitmamba.data.example import Message, Refused

    jinja_render.MAX_STEPS, jinja_render.MAX_OUTPUT_CHARS = 5000, 20_000
    _limit_memory()
    turns = [Message("user", "q"), Message("assistant", "a", "t"), Message("user", "r")]
    try:
        made = jinja_render.Renderer(
            data.decode("utf-8", "replace"), special_tokens=["<s>"], bos="", eos="</s>"
        )
        for segment in [*made.segments(turns), *made.prompt(turns[:1])]:
            segment.text.encode("utf-8")
    except (ValueError, Refused) as error:
        _check_sentence(error, "")
    except MemoryError:  # its process has a limit for that
        pass


def peft(data: bytes) -> None:
    """A PEFT folder: settings up to the first NUL, then the weights."""
    from bitmamba.io.peft_read import read_peft
    from bitmamba.types import AdapterSite

    settings, _, weights = data.partition(b"\0\n\0")
    folder = _write("peft/adapter_config.json", settings).parent
    _write("peft/adapter_model.safetensors", weights)
    site = AdapterSite("layer_0/mixer/in_proj", "mamba2", "in_proj", (2, 3))
    try:
        found = read_peft(folder, sites=[site])
    except ValueError as error:
        _check_sentence(error, str(folder))
        return
    assert {leaf.shape[-1] for leaf in found.flat.values()} <= {1, 2, 3, 4, 5}


def base(data: bytes) -> None:
    """A base model's file: a safetensors file of packed ternary weights."""
    from bitmamba.io.base import load_base

    file = _write("base/model.safetensors", data)
    try:
        load_base(file.parent)
    except ValueError as error:
        _check_sentence(error, str(file))


def meta(data: bytes) -> None:
    """A step's JSON, whose own digest an attacker has made right."""
    from bitmamba.io import load
    from bitmamba.io import meta as step_meta
    from bitmamba.io.json_file import parse_json

    try:
        body = parse_json(data)
    except ValueError as error:
        _check_sentence(error, "")
        return
    if not isinstance(body, dict):
        return
    body["digest"] = step_meta._own_digest({k: body[k] for k in body if k != "digest"})
    try:
        record = step_meta.verified(body)
    except (ValueError, NotImplementedError) as error:
        _check_sentence(error, "")
        return
    name = record["frozen"].get("folder")
    assert name is None or re.fullmatch("frozen-[0-9a-f]{16}", name), name
    try:
        load.read_frozen(_FOLDER, record)
    except load.DamagedError as error:
        _check_sentence(error, "")


def tokenizer(data: bytes) -> None:
    """A tokenizer.json and a text to encode."""
    from bitmamba.io.tokenizer import JsonTokenizer

    try:
        made = JsonTokenizer(data, where="here")
        made.decode(made.encode_content(["ab \n é"])[0] + made.encode("</s>"))
    except ValueError as error:
        _check_sentence(error, "here")


TARGETS: dict[str, Callable[[bytes], None]] = {
    "rows": rows,
    "template": template,
    "peft": peft,
    "base": base,
    "meta": meta,
    "tokenizer": tokenizer,
}


@functools.cache
def _limit_memory() -> None:
    """As a template's process does, so that filling it is a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_MIB * 2**19
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _write(name: str, data: bytes) -> Path:
    path = _FOLDER / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def _check_sentence(error: Exception, where: str) -> None:
    assert where in str(error), f"does not name {where}: {error}"
    assert len(str(error)) < 2000, f"{len(str(error))} characters"


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
    for seed in seeds(name):
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


def seeds(name: str) -> list[bytes]:
    """Whole inputs for a target to begin from."""
    from scripts.fuzz_seeds import SEEDS

    return SEEDS[name]


if __name__ == "__main__":
    command_line.run(main)
