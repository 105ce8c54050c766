"""The whole configuration as frozen dataclasses; every default is stated here.

`bitmamba.config_read.from_config_dict` makes a `Config` from what the user typed.
Each part of the program receives only its own dataclass.
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


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which rows are trained, how they become tokens, and how windows are packed.

    Paths are relative to the working directory; "assets:NAME" is a bundled file.

    sft: JSONL files of examples; the format of each row is recognised by its keys.
    replay: JSONL files of plain text, mixed in so that the model does not forget.
        Without sft they are the training data (plain-text training).
    heldout_replay: plain text never trained on; retention is measured on it.
    replay_share: share of replay in the training *tokens*; 0.1 is SFT:replay 9:1.
    heldout_share: share of the SFT examples kept for evaluation, by row hash.
    balance: 1 keeps the categories' natural shares, 0 makes them equal;
        between, shares are proportional to n_tokens ** balance.
    min_score: drop rows of the scored format below this; None keeps all.
    thought: train the [THOUGHT] part of hybrid rows, or leave it out.
    template: Jinja chat template file; None is the built-in one.
    window: tokens in a packed window.
    long_examples: "truncate" (from the end of the answer) or "refuse" examples
        longer than the window. Plain text is always split.
    max_refused_share: more refused rows than this stop the run before step 1.
    """

    sft: tuple[str, ...] = ()
    replay: tuple[str, ...] = ()
    heldout_replay: tuple[str, ...] = ()
    tokenizer: str = "assets:tokenizer.json"
    replay_share: float = 0.1
    heldout_share: float = 0.1
    balance: float = 0.5
    min_score: float | None = None
    thought: bool = True
    template: str | None = None
    window: int = 512
    long_examples: str = "truncate"
    max_refused_share: float = 0.2
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Settings of the parameters whose whole path matches `pattern`; first wins.

    name: of the group in tables and metrics; None is "rule<index>", or "rest" for
        a rule ".*" ("all" if it is the only one).
    lr_mult: multiplies the step after the preconditioner.
    decay: whether `OptimConfig.weight_decay` applies.
    freeze: not trained at all; no gradient, no optimiser state.
    optional: may decide for no parameter (a rule for layers this model may lack).
    """

    pattern: str
    name: str | None = None
    lr_mult: float = 1.0
    decay: bool = True
    freeze: bool = False
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class AdafactorConfig:
    """See `bitmamba.optim.adafactor` for the rules.

    rule: "torch" (epsilon is a floor on the denominator) or "optax" (added to g²).
    eps1: None is finfo(parameter dtype).eps under "torch", 1e-30 under "optax".
    eps2: lower bound of the parameter scale; scale_parameter=False drops the scale.
    relative_step: multiply lr by min(1, 1 / (lr * sqrt(t))), PyTorch's rule.
    """

    rule: str = "torch"
    eps1: float | None = None
    eps2: float = 1e-3
    clip_threshold: float = 1.0
    beta2_decay: float = 0.8
    scale_parameter: bool = True
    relative_step: bool = True


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """Adam's moments; the decay is `OptimConfig.weight_decay`."""

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """One chain in a fixed order: clamp, norm clip, `name`, decay, rules, schedule.

    schedule: "constant", "cosine", "linear" or "wsd" (decays in the last
        `decay_share` of the steps), each after `warmup_steps`; all but "constant"
        end at lr * `final_lr_share`.
    clamp: element-wise limit of the gradient; None is none.
    max_norm, norm: clip the gradient's "l2" or "inf" norm; None is none.
    """

    name: str = "adafactor"
    lr: float = 1e-3
    schedule: str = "cosine"
    warmup_steps: int = 10
    decay_share: float = 0.2
    final_lr_share: float = 0.1
    weight_decay: float = 0.0
    clamp: float | None = None
    max_norm: float | None = 1.0
    norm: str = "l2"
    rules: tuple[Rule, ...] = (Rule(pattern=".*"),)
    adafactor: AdafactorConfig = field(default_factory=AdafactorConfig)
    adamw: AdamWConfig = field(default_factory=AdamWConfig)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, how much at once, and what.

    mode: "full", or "head_only" (the head and its norm; no clamp, no backward
        pass through the body).
    steps: optimiser updates. batch_size: windows per micro-batch.
    accumulation: micro-batches per update, weighted exactly by their tokens.
    max_bad_steps: stop after this many non-finite updates in a row.
    """

    mode: str = "full"
    steps: int = 100
    batch_size: int = 4
    accumulation: int = 1
    max_bad_steps: int = 3


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation every `every` steps, before the first and after the last one.

    max_windows: of held-out SFT and of held-out replay text each.
    prompts: continued before and after training, to be read; sampled with
        temperature 0.7, top_p 0.9 and the run's seed.
    sample_tokens: at most, per prompt.
    """

    every: int = 50
    max_windows: int = 64
    prompts: tuple[str, ...] = ()
    sample_tokens: int = 60


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving every `every` steps and at the end, the newest `keep` stay.

    init_from: a checkpoint folder of another run, a step folder in one, or
        "assets:base"; only its parameters are taken. None starts from scratch.
    """

    every: int = 50
    keep: int = 2
    init_from: str | None = None


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run depends on; saved in the work directory and checkpoints.

    kernels: "auto", "reference" or "pallas".
    memory_gb: budget that the memory plan is compared with; None is no budget.
    """

    name: str
    workdir: str
    seed: int = 0
    kernels: str = "auto"
    memory_gb: float | None = None
    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
