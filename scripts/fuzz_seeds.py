"""Whole inputs that `fuzz_readers.py` begins from, small and of every kind."""

import json
import struct
from typing import Any

_ROWS = [
    {"messages": [{"role": "user", "content": "q"}, {"role": "gpt", "content": "a"}]},
    {
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "gpt", "value": "[THOUGHT]t[ANSWER]a"},
        ],
        "category": "c",
        "weight": 0.5,
    },
    {"input_ids": [9, 10, 11], "loss_mask": [0, 1, 0.5]},
    {"input_ids": [9, 10, 11], "labels": [-100, 10, 11]},
    {"prompt": "q", "answer": "a", "thought": "t", "system": "s"},
    {"prompt": "q", "teacher_response": "a", "score": 0.5},
    {"prompt": [{"role": "user", "content": "q"}], "completion": "a"},
    {"prompt": "\ud83c\udf78", "completion": "a\u2028"},
    {"instruction": "q", "input": "i", "output": "a"},
    {"text": "plain text that is longer than a window of thirty-two tokens"},
]
_TEMPLATES = [
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "{%- set ns = namespace(n=0) -%}{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m.content|trim }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ loop.index0 ~ m.content }}"
    "{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}",
    "{% macro f(x, y=2) %}{{ x * y }}{% endmacro %}{{ f('a') }}{{ messages[::-1] }}",
    "{{ raise_exception('no') }}{{ messages|tojson(indent=2) }}{{ '%s' % bos_token }}",
    "{% if messages is not none and messages|length > 1 %}{{ messages[0].role.upper()."
    "split('S')|join(',') }}{% break %}{% endif %}",
]
_SETTINGS: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["in_proj"],
    "rank_pattern": {r".*\.(in|out)_proj": 2},
    "alpha_pattern": {"in_proj": 3.0},
    "lora_dropout": 0.1,
    "use_rslora": True,
}
_DIGEST = "float32[2]:" + "0" * 64
_META: dict[str, Any] = {
    "format": 1,
    "step": 3,
    "config": {"model": {"d_model": 4}},
    "fingerprints": {"data": {"a": "1"}},
    "digests": {"trainable": {"a/b": _DIGEST}, "opt_state": {"0": _DIGEST}},
    "frozen": {"folder": None, "source": "x", "digests": {"c": _DIGEST}},
    "versions": {},
    "extra": {"bad_in_row": 0},
}


def _safetensors(tensors: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += raw
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return struct.pack("<Q", len(text)) + text + data


def _floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


_MODULE = "base_model.model.backbone.layers.0.mixer.in_proj"
_ADAPTER = _safetensors(
    {
        f"{_MODULE}.lora_A.weight": ("F32", [2, 2], _floats(1, 2, 3, 4)),
        f"{_MODULE}.lora_B.weight": ("F32", [3, 2], _floats(1, 2, 3, 4, 5, 6)),
    }
)
_DORA = _safetensors(
    {
        f"{_MODULE}.lora_A.weight": ("F16", [2, 2], b"\0" * 8),
        f"{_MODULE}.lora_B.weight": ("BF16", [3, 2], b"\0" * 12),
        f"{_MODULE}.lora_magnitude_vector": ("F32", [3], _floats(1, 1, 1)),
    }
)
_BASE = _safetensors(
    {
        "w/kernel.codes": ("U8", [2, 1], b"\x55\xa9"),
        "w/kernel.columns": ("I32", [], struct.pack("<i", 4)),
        "w/kernel.scale": ("F32", [], _floats(0.5)),
        "embed/embedding": ("F16", [2, 2], b"\0" * 8),
    }
)
_TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {
            "id": 0,
            "content": "</s>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ],
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
    "post_processor": None,
    "decoder": {"type": "ByteLevel"},
    "model": {
        "type": "BPE",
        "vocab": {"</s>": 0, "a": 1, "b": 2, "ab": 3, "Ġ": 4},
        "merges": [["a", "b"]],
    },
}
_TOKENIZER_2 = _TOKENIZER | {
    "normalizer": {
        "type": "Sequence",
        "normalizers": [
            {"type": "Replace", "pattern": {"Regex": " +"}, "content": "_"},
            {"type": "Lowercase"},
        ],
    },
    "pre_tokenizer": {
        "type": "Split",
        "pattern": {"Regex": "\\p{L}+|."},
        "behavior": "Isolated",
        "invert": False,
    },
    "model": {
        "type": "WordLevel",
        "vocab": {"</s>": 0, "ab": 1},
        "unk_token": "</s>",
    },
}

SEEDS: dict[str, list[bytes]] = {
    "rows": [
        *[b"s" + json.dumps(row).encode() + b"\n" for row in _ROWS],
        b"s\xef\xbb\xbf" + b"\r\n".join(json.dumps(r).encode() for r in _ROWS),
        b"r" + json.dumps(_ROWS[-1]).encode() * 2 + b"\n\n[1]\nNaN",
    ],
    "template": [source.encode() for source in _TEMPLATES],
    "peft": [
        json.dumps(_SETTINGS).encode() + b"\0\n\0" + _ADAPTER,
        json.dumps({**_SETTINGS, "use_dora": True}).encode() + b"\0\n\0" + _DORA,
    ],
    "base": [_BASE],
    "meta": [
        json.dumps(_META).encode(),
        json.dumps(
            {**_META, "frozen": {"folder": None, "source": None, "digests": {}}}
        ).encode(),
    ],
    "tokenizer": [json.dumps(_TOKENIZER).encode(), json.dumps(_TOKENIZER_2).encode()],
}
