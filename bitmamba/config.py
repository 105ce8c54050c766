"""The whole configuration as frozen dataclasses; every default is stated here.

`bitmamba.config_read.from_config_dict` makes a `Config` from what the user typed.
Each part of the program receives only its own dataclass.
"""

from dataclasses import dataclass, field

from bitmamba.config_guard import CheckpointConfig, GuardConfig
from bitmamba.config_mesh import DistributedConfig, MeshConfig
from bitmamba.config_model import (
    LAYER_SYMBOLS,
    AttentionConfig,
    BitLinearConfig,
    BitMamba2Config,
    Mamba2Config,
    MLPConfig,
    ModelConfig,
)

__all__ = [
    "LAYER_SYMBOLS",
    "AdafactorConfig",
    "AdamWConfig",
    "AttentionConfig",
    "BitLinearConfig",
    "BitMamba2Config",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DistributedConfig",
    "EvalConfig",
    "GuardConfig",
    "LoraConfig",
    "LoraRule",
    "LossConfig",
    "MLPConfig",
    "Mamba2Config",
    "MeshConfig",
    "ModelConfig",
    "OptimConfig",
    "Rule",
    "TrainConfig",
]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which rows are trained, how they become tokens, and how windows are packed.

    Paths are relative to the working directory; "assets:NAME" is a bundled file.

    sft: JSONL files of examples; the format of each row is recognised by its keys.
    replay: JSONL files of plain text, mixed in so that the model does not forget.
        Without sft they are the training data (plain-text training). Large text: a
        pattern as "/corpus/*.array_record", .parquet or .jsonl (`data/SHARDS.md`).
    heldout_replay: plain text never trained on; retention is measured on it.
    records: what a record of an .array_record file is: "text", or "json", a row as in
        JSONL. text_column: of .parquet files.
    token_cache: folder for the tokens of large text; None is `tokens` beside the work
        directory.
    replay_share: share of replay in the training *tokens*; 0.1 is SFT:replay 9:1.
    heldout_share: share of the SFT examples kept for evaluation, by row hash.
    balance: 1 keeps the categories' natural shares, 0 makes them equal;
        between, shares are proportional to n_tokens ** balance.
    min_score: refuse SFT rows with a `score` below this; None keeps all.
    thought: train the [THOUGHT] part of hybrid rows, or leave it out.
    template: Jinja chat template file; None is the built-in one.
    window: tokens in a packed window.
    long_examples: "truncate" (from the end of the answer) or "refuse" examples
        longer than the window. Plain text is always split.
    max_refused_share: more refused rows than this, of those of sft, of replay or of
        heldout_replay, stop the run before step 1.
    """

    sft: tuple[str, ...] = ()
    replay: tuple[str, ...] = ()
    heldout_replay: tuple[str, ...] = ()
    records: str = "text"
    text_column: str = "text"
    token_cache: str | None = None
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
class LoraRule:
    """Settings of the adapters whose whole place matches `pattern`; first wins.

    pattern: over places as "layer_0/mixer/in_proj", "layer_0/mixer/in_proj/dt" (a
        slice), "embed", "lm_head". Every rule must place at least one adapter.
    rank: None is `LoraConfig.rank`; 0 places none there.
    alpha, dropout: None is `LoraConfig`'s.
    """

    pattern: str
    rank: int | None = None
    alpha: float | None = None
    dropout: float | None = None


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Where adapters stand, how large they are, and what trains beside them.

    place: presets "attention", "ssm", "mlp", "all" (the projections of those layers;
        never embedding or head) and projection names as "in_proj", "lm_head", "embed"
        or a slice "in_proj.dt". Each must exist in the model.
    skip_ssm: no adapters on state-space layers. skip_nextn: none on next-n heads.
    rules: finer settings of what `place` names; with place=() they alone place.
    rank, alpha: scale is alpha / rank, or alpha / sqrt(rank) with rslora.
    dropout: share of the branch's inputs dropped in training.
    dora: also learn the length of each adapted column (projections only).
    train: patterns of base parameters trained directly, as ".*/(A_log|D|dt_bias)".
    state_offset: also train an offset of each SSM layer's state (H, P, N).
    codes: how frozen ternary weights stay in memory: "compute" (model.dtype: no
        conversion in any step) or "int8" (smaller; a GPU multiplies it as int8).
    """

    place: tuple[str, ...] = ("all",)
    skip_ssm: bool = False
    skip_nextn: bool = True
    rules: tuple[LoraRule, ...] = ()
    rank: int = 16
    alpha: float = 32.0
    rslora: bool = False
    dropout: float = 0.0
    dora: bool = False
    train: tuple[str, ...] = ()
    state_offset: bool = False
    codes: str = "compute"


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What keeps the base's knowledge, beside replay: target-masked KL (TMKL).

    tmkl: weight of KL(base || adapted), both without the target token; 0 is none.
    direction: "forward" KL(base || adapted) or "reverse" KL(adapted || base).
    pull: strength of the pull of what trains towards its start after each update,
        pull · (1 + tmkl of the batch); 0 is none. It needs no gradient through KL.
    base_logits: where the base's logits come from. "copy": one more forward pass in
        each step, of the frozen weights and a copy of the first values of what trains
        beside adapters (in full training: of the whole model). "cached": the `top_k`
        largest of each token of the plan, computed before step 1 and kept in the work
        directory (8 · top_k bytes a token); no copy, no pass. KL is then among those
        entries, renormalised: odds against all others are left free.
    top_k: entries of the vocabulary kept for each token; the vocabulary's size is all.
    """

    tmkl: float = 0.0
    direction: str = "forward"
    pull: float = 0.0
    base_logits: str = "copy"
    top_k: int = 64

    @property
    def compares(self) -> bool:
        """Whether steps compare the model with its base at all."""
        return bool(self.tmkl or self.pull)

    @property
    def is_cached(self) -> bool:
        """Whether steps read the base's logits with their batches."""
        return self.compares and self.base_logits == "cached"


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
    gradient_dtype: "bfloat16" keeps the gradients of matrices so, their sums over
        micro-batches, and updates until they are added: half of their memory.
    master_dtype: "bfloat16" keeps the kernels of projections and of the head so, in
        full training; updates are rounded stochastically. A micro-batch's gradients
        of them are bfloat16 then. What both cost: bitmamba/optim/README.md.
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
    gradient_dtype: str = "float32"
    master_dtype: str = "float32"
    rules: tuple[Rule, ...] = (Rule(pattern=".*"),)
    adafactor: AdafactorConfig = field(default_factory=AdafactorConfig)
    adamw: AdamWConfig = field(default_factory=AdamWConfig)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, how much at once, and what.

    mode: "full", "head_only" (the head and its norm; no clamp, no backward pass
        through the body) or "lora" (adapters and what `LoraConfig` names).
    steps: optimiser updates. batch_size: windows per micro-batch.
    accumulation: micro-batches per update, weighted exactly by their tokens.
    max_bad_steps: go back to the last good checkpoint after this many bad steps in a
        row; see `GuardConfig`.
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
class Config:
    """Everything a run depends on; saved in the work directory and checkpoints.

    kernels: "auto", "reference" or "pallas".
    memory_gb: budget (GiB) of a step; None is what the device has, where it says so.
    """

    name: str
    workdir: str
    seed: int = 0
    kernels: str = "auto"
    memory_gb: float | None = None
    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
