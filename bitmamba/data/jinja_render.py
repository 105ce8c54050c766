"""The inside of a chat template's process: a foreign program, rendered within limits.

It runs in jinja2's immutable sandbox, and its output, its steps and the size of its
values are limited; `jinja_worker` limits the process. What is trained is what the
template marks with {% generation %} … {% endgeneration %}; without marks, what each
assistant message adds to the rendering of the messages before it (with the opening of
an answer).
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from bitmamba.data.chat import Segment
from bitmamba.data.example import Message, Refused
from bitmamba.data.formats.hybrid import ANSWER_TAG, THOUGHT_TAG

MAX_OUTPUT_CHARS = 4 * 2**20
MAX_STEPS = 1_000_000
_MAX_BITS = 4096  # of a whole number
# Marks of trained spans; refused in content, so they cannot be forged.
_OPEN, _CLOSE = "\ue000\ue001\ue000", "\ue000\ue002\ue000"


class _Generation(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %} puts the marks around its body."""

    tags = frozenset({"generation"})

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = [
            jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)]).set_lineno(line)
            for mark in (_OPEN, _CLOSE)
        ]
        return [marks[0], *body, marks[1]]


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Also refuses to multiply text or lists to a size that fills the memory."""

    intercepted_binops = frozenset({"*", "**", "+"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(v) for v in (left, right) if hasattr(v, "__len__")]
        numbers = [abs(v) for v in (left, right) if isinstance(v, int | float)]
        bits = sum(v.bit_length() for v in numbers if isinstance(v, int))
        too_long = operator == "*" and sizes and numbers and sizes[0] * numbers[0]
        too_big = operator == "**" and any(n > 1000 for n in numbers)
        too_big |= bits > _MAX_BITS
        if too_big or max(too_long or 0, sum(sizes)) > MAX_OUTPUT_CHARS:
            raise jinja2.TemplateError("a value grows too large")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _TooManySteps(Exception):
    """Lines of the compiled template, and calls of what it calls."""


@contextmanager
def _limits() -> Iterator[None]:
    """Interrupts template code at its next line, loops without output included.

    The steps decide which rows are trained: they are the same on every machine. Time
    and memory are the process's affair, and an error: a busy machine must not change
    the data.
    """
    steps = 0
    before = sys.gettrace()

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps > MAX_STEPS:
            raise _TooManySteps
        return trace if frame.f_code.co_filename == "<template>" else None

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class Renderer:
    """A compiled template; the interface is that of `chat.Template`.

    source: of the template. special_tokens: of the tokenizer, refused in content.
    bos, eos: the text of these tokens, or "".

    Raises:
        ValueError: not a template.
    """

    def __init__(
        self, source: str, *, special_tokens: Sequence[str], bos: str, eos: str
    ):
        environment = _Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        # Nothing that differs from run to run: no chance, and no strftime_now, as a
        # prompt that holds today's date is another one tomorrow.
        environment.globals["raise_exception"] = _raise_exception
        del environment.globals["lipsum"], environment.filters["random"]
        try:
            self._template = environment.from_string(source)
        except MemoryError:
            raise
        except Exception as error:  # constants are computed while compiling
            detail = f"{type(error).__name__}: {error}"[:200]
            raise ValueError(f"not a Jinja template ({detail})") from None
        # The tags are ours to write; content may bring them.
        self._forbidden = [
            s for s in special_tokens if s and s not in (THOUGHT_TAG, ANSWER_TAG)
        ] + [_OPEN, _CLOSE]
        self._tokens = {"bos_token": bos, "eos_token": eos}

    def segments(self, messages: Sequence[Message]) -> list[Segment]:
        rendered = self._render(messages)
        if _OPEN in rendered:
            spans = _marked_spans(rendered, messages)
            rendered = rendered.replace(_OPEN, "").replace(_CLOSE, "")
        else:
            spans = self._spans_by_prefix(rendered, messages)
        if not any(start < stop for start, stop in spans):
            raise Refused("no trained span", "the template writes no answer")
        return _cut(rendered, spans)

    def prompt(self, messages: Sequence[Message]) -> list[Segment]:
        text = self._render(messages, add_generation_prompt=True)
        return [
            Segment(text.replace(_OPEN, "").replace(_CLOSE, ""), False, markup=True)
        ]

    def _spans_by_prefix(
        self, rendered: str, messages: Sequence[Message]
    ) -> list[tuple[int, int]]:
        spans = []
        for index, message in enumerate(messages):
            if message.role != "assistant" or not message.trained:
                continue
            before = self._render(messages[:index], add_generation_prompt=True)
            after = self._render(messages[: index + 1])
            if not (after.startswith(before) and rendered.startswith(after)):
                raise Refused(
                    "template rewrites earlier turns",
                    f"message {index + 1}: its rendering is no continuation of the "
                    "messages before it; mark answers with {% generation %}",
                )
            if _content(message).strip() not in after[len(before) :]:
                raise Refused("template drops the answer", f"message {index + 1}")
            spans.append((len(before), len(after)))
        return spans

    def _render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False
    ) -> str:
        turns = [{"role": m.role, "content": _content(m)} for m in messages]
        for turn in turns:
            for token in self._forbidden:
                if token in turn["content"]:
                    raise Refused("spells a special token", repr(token))
        try:
            with _limits():
                pieces, size = [], 0
                for piece in self._template.generate(
                    messages=turns,
                    tools=None,
                    add_generation_prompt=add_generation_prompt,
                    **self._tokens,
                ):
                    size += len(piece)
                    if size > MAX_OUTPUT_CHARS:
                        raise Refused("template writes too much", f"{size} characters")
                    pieces.append(piece)
        except _TooManySteps:
            raise Refused("template too slow", f"over {MAX_STEPS:,} steps") from None
        except (Refused, MemoryError):
            raise
        except Exception as error:  # whatever a foreign program may raise
            detail = f"{type(error).__name__}: {error}"[:200]
            raise Refused("template refuses the row", detail) from None
        text = "".join(pieces)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise Refused("template writes half a character") from None
        return text


def _content(message: Message) -> str:
    if not message.thought:
        return message.content
    return f"{THOUGHT_TAG}{message.thought}{ANSWER_TAG}{message.content}"


def _marked_spans(rendered: str, messages: Sequence[Message]) -> list[tuple[int, int]]:
    """Spans in the rendering without its marks; of trained messages only."""
    spans, removed, at = [], 0, 0
    while (start := rendered.find(_OPEN, at)) >= 0:
        stop = rendered.find(_CLOSE, start)
        inside = start + len(_OPEN)
        if stop < 0 or _OPEN in rendered[inside:stop]:
            raise Refused("no trained span", "{% generation %} blocks are nested")
        removed += len(_OPEN)
        spans.append((inside - removed, stop - removed))
        removed += len(_CLOSE)
        at = stop + len(_CLOSE)
    answers = [m for m in messages if m.role == "assistant"]
    if all(m.trained for m in answers):
        return spans
    if len(spans) != len(answers):
        detail = f"{len(spans)} marked spans for {len(answers)} answers"
        raise Refused("no trained span", detail)
    return [s for s, m in zip(spans, answers, strict=True) if m.trained]


def _cut(text: str, spans: Sequence[tuple[int, int]]) -> list[Segment]:
    made, at = [], 0
    for start, stop in spans:
        made.append(Segment(text[at:start], False, markup=True))
        made.append(Segment(text[start:stop], True, markup=True))
        at = stop
    made.append(Segment(text[at:], False, markup=True))
    return [s for s in made if s.text]
