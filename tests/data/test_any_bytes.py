"""Property: any bytes are rows that are accounted for, or one sentence."""

import gzip
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bitmamba.config import DataConfig
from bitmamba.data import jinja_render
from bitmamba.data.chat import BuiltinTemplate
from bitmamba.data.example import Message, Refused
from bitmamba.data.formats import FORMATS, KNOWN_KEYS, parse_row
from bitmamba.data.loading import Loader
from bitmamba.io.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
BOM = b"\xef\xbb\xbf"

numbers = st.one_of(
    st.integers(-(10**30), 10**30), st.floats(), st.sampled_from([10**400, -100, 2**31])
)
texts = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["[THOUGHT]a[ANSWER]b", "\0", " ", "user", "assistant", "system"]),
)
leaves = st.one_of(st.none(), st.booleans(), numbers, texts)
keys = st.one_of(
    st.sampled_from([*KNOWN_KEYS, "role", "content", "from", "value"]),
    st.text(max_size=4),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=8,
)


@st.composite
def rows(draw):
    """Keys of a format, each with a value of any kind, and perhaps others."""
    known = draw(st.sampled_from([f.keys for f in FORMATS.values()]))
    row = draw(st.dictionaries(keys, values, max_size=3))
    return row | {key: draw(st.one_of(texts, values)) for key in known}


@st.composite
def lines(draw):
    """A row as JSON, whole or spoilt; or any bytes."""
    if draw(st.integers(0, 3)) == 0:
        return draw(st.binary(max_size=40)).replace(b"\n", b"")
    line = json.dumps(draw(rows()), ensure_ascii=draw(st.booleans()))
    line = line.encode("utf-8", "surrogatepass")
    if draw(st.booleans()):
        at = draw(st.integers(0, len(line)))
        line = line[:at] + draw(st.binary(max_size=3)) + line[at + 1 :]
    return line.replace(b"\n", b"")


files = st.builds(
    lambda mark, parts, end: mark + end.join(parts) + end,
    st.sampled_from([b"", b"", BOM, b"\xff\xfe", b"\x1f\x8b"]),
    st.lists(lines(), max_size=5),
    st.sampled_from([b"\n", b"\r\n", b"\n\n"]),
)


def load(path, data, role="sft"):
    """The file's account, or the sentence that it ends in."""
    path.write_bytes(data)
    cfg = DataConfig(window=32, heldout_share=0.3)
    template = BuiltinTemplate(TOKENIZER.special_tokens)
    loader = Loader(cfg, template, TOKENIZER, TOKENIZER.vocab_size)
    try:
        loader.load(str(path), path, role=role)
    except ValueError as error:
        return None, str(error)
    loader.stores()
    return loader.files[0], None


@pytest.mark.parametrize("role", ["sft", "replay"])
@given(data=files)
@settings(max_examples=150, deadline=None, suppress_health_check=[*HealthCheck])
def test_every_line_is_trained_held_out_or_refused(tmp_path_factory, role, data):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"

    account, told = load(path, data, role)

    if told is not None:
        assert str(path) in told
        assert "\n" not in told
        assert "Error" not in told
        return
    expected = [raw for raw in data.removeprefix(BOM).split(b"\n") if raw.strip()]
    assert account.rows == len(expected)
    placed = account.trained + account.held_out + sum(account.refused.values())
    assert placed == account.rows
    for shown in account.examples.values():
        assert all(line.isprintable() and str(path) in line for line in shown)


@given(at=st.integers(0, 300), piece=st.binary(max_size=4), drop=st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_any_gzip_is_read_or_told(tmp_path_factory, at, piece, drop):
    path = tmp_path_factory.getbasetemp() / "any.jsonl.gz"
    rows = b"".join(b'{"text":"row %d"}\n' % (i * i) for i in range(40))
    packed = gzip.compress(rows, mtime=0)
    at %= len(packed)

    account, told = load(path, packed[:at] + piece + packed[at + drop :])

    if told is not None:
        assert str(path) in told
    else:
        assert account.rows <= 41
        account.check()


def outcome(function):
    """What it returns, or the reason why not; nothing else may be raised."""
    try:
        return function(), None
    except Refused as refused:
        return None, refused.reason
    except ValueError as error:
        return None, str(error)


@given(row=st.dictionaries(keys, values, max_size=6))
@settings(max_examples=100, deadline=None)
def test_any_row_is_an_example_or_refused(row):
    found, reason = outcome(lambda: parse_row(row))

    if found is None:
        assert reason.isprintable()
        return
    example = found[1]
    given = (example.messages, example.text, example.ids)
    assert sum(x is not None for x in given) == 1
    assert 0 < example.weight < float("inf")


PIECES = """
{% for m in messages %} | {% endfor %} | {{ m.content }} | {{ m['role'] }} | {% else %}
{% if m.role == 'assistant' %} | {% endif %} | {% generation %} | {% endgeneration %}
{{ messages[0] }} | {{ eos_token | }} | %} | {{ | {% | {# | #} | {% set x = | upper | .
| tojson | __class__ | ( | ) | {% macro f(a) %} | {% endmacro %} | f(x) | x | ~ | [::-1]
| namespace(a=1) | {{ raise_exception('n') }} | {% break %} | add_generation_prompt | é
"""
pieces = st.sampled_from(["|", "\n", *PIECES.replace("\n", " | ").split(" | ")])
TURNS = [Message("user", "q"), Message("assistant", "a", "t"), Message("user", "q")]


@given(source=st.lists(pieces, max_size=12).map("".join))
@settings(max_examples=150, deadline=None)
def test_any_template_renders_is_refused_or_is_none(source):
    settings = {"special_tokens": [], "bos": "", "eos": "<e>"}

    made, told = outcome(lambda: jinja_render.Renderer(source, **settings))
    if made is None:
        assert told.startswith("not a Jinja template")
        return
    segments, reason = outcome(lambda: made.segments(TURNS))

    if segments is None:
        assert reason.startswith(("template ", "no trained span", "spells"))
    else:
        assert any(s.trained and s.text for s in segments)
        "".join(s.text for s in segments).encode("utf-8")
