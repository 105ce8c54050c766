"""What `fuzz_readers.py` feeds: each target takes any bytes, and may refuse them.

A target raises nothing but an `AssertionError`, and that for a fault of ours.
"""

import functools
import re
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path

_FOLDER = Path(tempfile.gettempdir()) / "bitmamba-fuzz"
_TEMPLATE_BYTES = 2**30


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
        segments = made.segments(turns)
        assert any(s.trained and s.text for s in segments), "nothing is trained"
        for segment in [*segments, *made.prompt(turns[:1])]:
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
    most = pages * resource.getpagesize() + _TEMPLATE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _write(name: str, data: bytes) -> Path:
    path = _FOLDER / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def _check_sentence(error: Exception, where: str) -> None:
    assert where in str(error), f"does not name {where}: {error}"
    assert len(str(error)) < 2000, f"{len(str(error))} characters"
