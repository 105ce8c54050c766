"""Chat templates of others: what is trained, and what they may not do.

What the process around them keeps them from is in test_jinja_process.
"""

import sys

import pytest

from bitmamba.data import jinja_render
from bitmamba.data.encode import encode_examples, encode_prompt
from bitmamba.data.example import Message, Refused
from bitmamba.data.formats import parse_row
from bitmamba.io.tokenizer import ByteTokenizer

CHATML = """{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MARKED = """{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}\
{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}Q:{{ m.content }}\
{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"""
FOUR = {
    "messages": [
        {"role": role, "content": content}
        for role, content in (
            ("user", "q1"),
            ("assistant", "a1"),
            ("user", "q2"),
            ("assistant", "a2"),
        )
    ]
}
PAIR = {"prompt": "q", "completion": "a"}


def template(source, tokenizer=None):
    """As the template's process makes it."""
    tokenizer = tokenizer or ByteTokenizer()
    return jinja_render.Renderer(
        source,
        special_tokens=list(tokenizer.special_tokens),
        bos="" if tokenizer.bos_id is None else "<|bos|>",
        eos="<|endoftext|>",
    )


def trained(template, row):
    """The trained pieces of a row's rendering, and all of it."""
    _, example = parse_row(row)
    segments = template.segments(example.messages)
    return [s.text for s in segments if s.trained], "".join(s.text for s in segments)


def test_b021_without_marks_answers_are_found_by_rendering_prefixes():
    answers, whole = trained(template(CHATML), FOUR)

    assert answers == ["a1<|im_end|>\n", "a2<|im_end|>\n"]
    assert whole.startswith("<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1")


def test_generation_blocks_are_what_is_trained():
    answers, whole = trained(template(MARKED), FOUR)

    assert answers == ["a1<|endoftext|>", "a2<|endoftext|>"]
    assert whole == "Q:q1A:a1<|endoftext|>Q:q2A:a2<|endoftext|>"


@pytest.mark.parametrize("source", [CHATML, MARKED], ids=["prefixes", "marks"])
def test_only_trained_messages_are_trained(source):
    row = {
        "prompt": FOUR["messages"][:3],
        "completion": FOUR["messages"][3:],
    }

    answers, _ = trained(template(source), row)

    assert len(answers) == 1
    assert answers[0].startswith("a2")


@pytest.mark.parametrize("source", [CHATML, MARKED], ids=["chatml", "own end"])
def test_b018_the_document_ends_in_one_trained_end_of_text(source):
    tokenizer = ByteTokenizer()
    _, example = parse_row(PAIR)

    (document,) = encode_examples(
        [example], template=template(source), tokenizer=tokenizer
    )

    assert list(document.tokens).count(tokenizer.eot_id) == 1
    assert document.tokens[-1] == tokenizer.eot_id
    assert document.weights[-1] == 1


@pytest.mark.parametrize("source", [CHATML, "{{ bos_token }}" + CHATML, MARKED])
def test_b025_one_bos_whoever_writes_it(source):
    tokenizer = ByteTokenizer(bos=True)
    made = template(source, tokenizer)
    _, example = parse_row(PAIR)

    (document,) = encode_examples([example], template=made, tokenizer=tokenizer)

    assert list(document.tokens).count(tokenizer.bos_id) == 1
    assert document.tokens[0] == tokenizer.bos_id
    prompt = encode_prompt(made.prompt([Message("user", "q")]), tokenizer)
    assert document.tokens[: len(prompt)].tolist() == prompt


def test_a_template_that_rewrites_earlier_turns_is_refused():
    source = (
        "{% for m in messages %}{{ m.role }}{{ m.content if loop.last }}{% endfor %}"
    )

    with pytest.raises(Refused) as refused:
        trained(template(source), FOUR)

    assert refused.value.reason == "template rewrites earlier turns"


@pytest.mark.parametrize("more", ["", "|"])
def test_marks_around_nothing_are_refused(more):
    """Found by a property: only the end of text would have been trained."""
    source = more + "{% generation %}{% endgeneration %}"

    with pytest.raises(Refused) as refused:
        trained(template(source), PAIR)

    assert refused.value.reason == "no trained span"


def test_a_template_that_drops_the_answer_is_refused():
    with pytest.raises(Refused) as refused:
        trained(template("{% for m in messages %}{{ m.role }};{% endfor %}"), FOUR)

    assert refused.value.reason == "template drops the answer"


@pytest.mark.parametrize("text", ["<|endoftext|>", jinja_render._OPEN])
def test_content_cannot_forge_markup(text):
    with pytest.raises(Refused) as refused:
        trained(template(MARKED), {"prompt": text, "completion": "a"})

    assert refused.value.reason == "spells a special token"


def test_thoughts_are_tagged():
    answers, _ = trained(
        template(MARKED), {"prompt": "q", "thought": "t", "answer": "a"}
    )

    assert answers == ["[THOUGHT]t[ANSWER]a<|endoftext|>"]


@pytest.mark.parametrize(
    "body",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no') }}",
        "{{ strftime_now('%Y') }}",
        "{{ undefined_thing.x }}",
        "{{ 'x' * 1000000000 }}",
        "{{ 10 ** 100000000 }}",
        "{% include '/etc/hostname' %}",
        "{{ range(10000000) | list }}",
        "{% set n = namespace(x=3) %}{% for i in range(20) %}"
        "{% set n.x = n.x * n.x %}{% endfor %}",
        "{{ lipsum() }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_the_sandbox_refuses(body):
    with pytest.raises(Refused) as refused:
        trained(template(body + MARKED), PAIR)

    assert refused.value.reason == "template refuses the row"


LOOPS = "{% for a in range(9999) %}{% for b in range(9999) %}BODY{% endfor %}"
LOOPS += "{% endfor %}"


@pytest.mark.parametrize(
    ("body", "reason"),
    [("", "template too slow"), ("x", "template writes too much")],
)
def test_output_and_steps_are_limited(monkeypatch, body, reason):
    monkeypatch.setattr(jinja_render, "MAX_STEPS", 20_000)
    monkeypatch.setattr(jinja_render, "MAX_OUTPUT_CHARS", 1_000)
    tracer = sys.gettrace()

    with pytest.raises(Refused) as refused:
        trained(template(LOOPS.replace("BODY", body)), PAIR)

    assert refused.value.reason == reason
    assert sys.gettrace() is tracer


def test_calls_are_steps(monkeypatch):
    """Work in filters, which are no lines of the template."""
    monkeypatch.setattr(jinja_render, "MAX_STEPS", 20_000)
    body = "{% set x = range(9999) | map('center', 9) | list | length %}"

    with pytest.raises(Refused) as refused:
        trained(template(body * 20 + MARKED), PAIR)

    assert refused.value.reason == "template too slow"


def test_half_a_character_is_refused():
    with pytest.raises(Refused) as refused:
        trained(template('{{ "\\ud800" }}' + MARKED), PAIR)

    assert refused.value.reason == "template writes half a character"


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ x|random }}", "{% macro %}", "{%" * 9]
)
def test_what_is_no_template_is_told(source):
    with pytest.raises(ValueError, match="not a Jinja template"):
        template(source)
