"""Named architectures: what differs from the defaults of `bitmamba.config`.

Parameter counts are asserted in tests/models/test_presets.py.
"""

from bitmamba.config import BitMamba2Config, Mamba2Config, ModelConfig

# Layers: M mamba2, B bitmamba2, * attention, - mlp.
PRESETS = {
    # 4.4 M parameters: the bundled base; trains on a CPU.
    "tiny": {
        "vocab_size": 4096,
        "d_model": 256,
        "layers": "MM*-MM",
        "dtype": "float32",
        "mamba2": Mamba2Config(d_state=64),
    },
    # The public BitMamba-2 models: 255,472,384 and 1,018,439,680 parameters.
    "bitmamba2_255m": {
        "vocab_size": 50257,
        "d_model": 1024,
        "layers": "B" * 24,
        "norm_placement": "linear",
        "norm_eps": 1e-6,
        "bitmamba2": BitMamba2Config(n_heads=16),
    },
    "bitmamba2_1b": {
        "vocab_size": 50257,
        "d_model": 2048,
        "layers": "B" * 32,
        "norm_placement": "linear",
        "norm_eps": 1e-6,
        "bitmamba2": BitMamba2Config(n_heads=32),
    },
    # A ternary Mamba-2: 1,446,620,160 parameters.
    "student_1b4": {"vocab_size": 50257, "d_model": 2048, "layers": "M" * 48},
}


def get_model(name: str) -> ModelConfig:
    """The model of a preset; `layers` is still a pattern string, as flags type it.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in PRESETS:
        raise ValueError(f"preset: got {name!r}; expected one of {', '.join(PRESETS)}")
    return ModelConfig(**PRESETS[name])
