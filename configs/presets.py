"""Named architectures: the arguments of `bitmamba.config.ModelConfig` as plain data.

get_model(NAME) gives every field, so that each can be overridden on the command line,
as `--config.model.mamba2.d_state=64`. Parameter counts are asserted in the tests.
"""

import ml_collections

_DEFAULTS = {
    "vocab_size": 50257,
    "d_model": 1024,
    "layers": "B",
    "linear": "bit",
    "norm_placement": "block",
    "norm_eps": 1e-5,
    "tie_embeddings": False,
    "dtype": "bfloat16",
    "remat": False,
    "bitlinear": {"act_eps": "max", "rounding": "even"},
    "mamba2": {
        "expand": 2,
        "headdim": 64,
        "n_groups": 1,
        "d_state": 128,
        "d_conv": 4,
        "chunk_size": 64,
        "dt_min": 0.001,
        "dt_max": 0.1,
        "dt_init_floor": 1e-4,
        "dt_limit": (0.0, float("inf")),
    },
    "bitmamba2": {
        "expand": 2,
        "n_heads": 16,
        "d_conv": 4,
        "chunk_size": 64,
        "dt_min": 0.001,
        "dt_max": 0.1,
        "dt_init_floor": 1e-4,
    },
    "attention": {
        "n_heads": 4,
        "n_kv_heads": 2,
        "headdim": 64,
        "rope_theta": 10_000.0,
    },
    "mlp": {"d_ff": 512},
}

# What differs from the defaults above. Layers: M mamba2, B bitmamba2, * attention,
# - mlp.
PRESETS = {
    # 4,415,840 parameters: the bundled base; trains on a CPU.
    "tiny": {
        "vocab_size": 4096,
        "d_model": 256,
        "layers": "MM*-MM",
        "dtype": "float32",
        "mamba2": {"d_state": 64},
    },
    # The public BitMamba-2 models: 255,472,384 and 1,018,439,680 parameters.
    "bitmamba2_255m": {
        "d_model": 1024,
        "layers": "B" * 24,
        "norm_placement": "linear",
        "norm_eps": 1e-6,
        "bitmamba2": {"n_heads": 16},
    },
    "bitmamba2_1b": {
        "d_model": 2048,
        "layers": "B" * 32,
        "norm_placement": "linear",
        "norm_eps": 1e-6,
        "bitmamba2": {"n_heads": 32},
    },
    # A ternary Mamba-2: 1,446,620,160 parameters.
    "student_1b4": {"d_model": 2048, "layers": "M" * 48},
}


def get_model(name: str) -> ml_collections.ConfigDict:
    """All model fields of a preset.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in PRESETS:
        raise ValueError(f"presets: got {name!r}; expected one of {', '.join(PRESETS)}")
    model = ml_collections.ConfigDict(_DEFAULTS)
    model.update(ml_collections.ConfigDict(PRESETS[name]))
    return model
