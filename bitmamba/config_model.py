"""The architecture's settings: one dataclass a mixer, and the stack of them.

`bitmamba.config` has everything else and re-exports these.
"""

from dataclasses import dataclass, field

LAYER_SYMBOLS = {"M": "mamba2", "B": "bitmamba2", "*": "attention", "-": "mlp"}


@dataclass(frozen=True, kw_only=True)
class BitLinearConfig:
    """Ternary linear layers: int8 activations, ternary weights, straight through.

    act_eps: "max" is 127 / max(absmax, 1e-5) (training); "add" is
        127 / (absmax + 1e-5) (the public C and C++ engines).
    rounding: "even" (training) or "away" from zero (the engines).
    """

    act_eps: str = "max"
    rounding: str = "even"


@dataclass(frozen=True, kw_only=True)
class Mamba2Config:
    """The standard Mamba-2 mixer: n_heads = expand * d_model / headdim."""

    expand: int = 2
    headdim: int = 64
    n_groups: int = 1
    d_state: int = 128
    d_conv: int = 4
    chunk_size: int = 64
    dt_min: float = 0.001
    dt_max: float = 0.1
    dt_init_floor: float = 1e-4
    dt_limit: tuple[float, float] = (0.0, float("inf"))


@dataclass(frozen=True, kw_only=True)
class BitMamba2Config:
    """The public BitMamba-2 mixer: one scalar state per channel (N = 1, G = H)."""

    expand: int = 2
    n_heads: int = 16
    d_conv: int = 4
    chunk_size: int = 64
    dt_min: float = 0.001
    dt_max: float = 0.1
    dt_init_floor: float = 1e-4


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Causal grouped-query attention; rope_theta = 0 means no rotary positions."""

    n_heads: int = 4
    n_kv_heads: int = 2
    headdim: int = 64
    rope_theta: float = 10_000.0


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """Gated MLP: down(silu(gate(x)) * up(x))."""

    d_ff: int = 512


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A stack of blocks x + mixer(norm(x)), one mixer a layer.

    layers: mixer names, or a pattern string over LAYER_SYMBOLS, as "MM*-".
    linear: "bit" (ternary BitLinear) or "dense" projections and head.
    norm_placement: "block" norms before each mixer (and Mamba-2's gated norm);
        "linear" puts a learned norm inside every BitLinear instead, the head's
        included (the public model).
    dtype: of the computation; parameters are always float32.
    remat: recompute each block in the backward pass (less memory, more time).
    """

    vocab_size: int
    d_model: int
    layers: tuple[str, ...]
    linear: str = "bit"
    norm_placement: str = "block"
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    dtype: str = "bfloat16"
    remat: bool = False
    bitlinear: BitLinearConfig = field(default_factory=BitLinearConfig)
    mamba2: Mamba2Config = field(default_factory=Mamba2Config)
    bitmamba2: BitMamba2Config = field(default_factory=BitMamba2Config)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    mlp: MLPConfig = field(default_factory=MLPConfig)
