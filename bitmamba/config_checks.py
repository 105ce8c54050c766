"""Ranges and combinations of a resolved `Config`: one ValueError line per mistake."""

import math
import re
from collections.abc import Sequence
from typing import Any

from bitmamba.config import (
    LAYER_SYMBOLS,
    Config,
    GuardConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
)
from bitmamba.config_mesh import check_distributed, check_mesh

_MAX_WINDOW = 2**24
_MAX_LR = 1e30  # products with it stay finite in float32


def check(config: Config) -> None:
    """Raise ValueError at the first value that cannot work; return None otherwise."""
    _choice("config.kernels", config.kernels, ("auto", "reference", "pallas"))
    _text("config.workdir", config.workdir)
    _at_least("config.seed", config.seed, 0)
    if config.memory_gb is not None:
        _above("config.memory_gb", config.memory_gb, 0.0)
    _check_model(config.model)
    _check_data(config)
    _check_optim(config.optim)
    _check_masters(config)
    _check_train(config)
    _check_lora(config)
    _check_loss(config)
    _check_guard(config.guard)
    check_mesh(config.mesh)
    check_distributed(config.distributed)


def _check_model(model: ModelConfig) -> None:
    where = "config.model"
    for name in ("vocab_size", "d_model"):
        _at_least(f"{where}.{name}", getattr(model, name), 1)
    if not model.layers:
        raise ValueError(f"{where}.layers: got no layer; expected at least one")
    for i, kind in enumerate(model.layers):
        _choice(f"{where}.layers[{i}]", kind, tuple(LAYER_SYMBOLS.values()))
    _choice(f"{where}.linear", model.linear, ("bit", "dense"))
    _choice(f"{where}.norm_placement", model.norm_placement, ("block", "linear"))
    _choice(f"{where}.dtype", model.dtype, ("float32", "bfloat16"))
    _choice(f"{where}.bitlinear.act_eps", model.bitlinear.act_eps, ("max", "add"))
    _choice(f"{where}.bitlinear.rounding", model.bitlinear.rounding, ("even", "away"))
    _above(f"{where}.norm_eps", model.norm_eps, 0.0)
    if model.norm_placement == "linear" and model.linear != "bit":
        raise ValueError(
            f'{where}.norm_placement: got "linear" with linear="dense"; expected '
            '"block" (only BitLinear has an inner norm); set norm_placement="block"'
        )
    _check_mixers(model)


def _check_mixers(model: ModelConfig) -> None:
    for kind in ("mamba2", "bitmamba2"):
        mixer = getattr(model, kind)
        where = f"config.model.{kind}"
        for name in ("expand", "d_conv", "chunk_size"):
            _at_least(f"{where}.{name}", getattr(mixer, name), 1)
        if not 0 < mixer.dt_min <= mixer.dt_max < math.inf:
            raise ValueError(
                f"{where}.dt_min: got {mixer.dt_min:g} with dt_max {mixer.dt_max:g}; "
                "expected 0 < dt_min <= dt_max"
            )
    used = set(model.layers)
    m, b, a = model.mamba2, model.bitmamba2, model.attention
    if "mamba2" in used:
        _divides(m.headdim, m.expand * model.d_model, "mamba2.headdim", "d_inner")
        heads = m.expand * model.d_model // m.headdim
        _divides(m.n_groups, heads, "mamba2.n_groups", "n_heads")
        _at_least("config.model.mamba2.d_state", m.d_state, 1)
    if "bitmamba2" in used:
        _divides(b.n_heads, b.expand * model.d_model, "bitmamba2.n_heads", "d_inner")
    if "attention" in used:
        _divides(a.n_kv_heads, a.n_heads, "attention.n_kv_heads", "n_heads")
        if a.rope_theta and a.headdim % 2:
            raise ValueError(
                f"config.model.attention.headdim: got {a.headdim}; expected an even "
                "number for rotary positions; or set rope_theta=0"
            )
        _not_negative("config.model.attention.rope_theta", a.rope_theta)
    if "mlp" in used:
        _at_least("config.model.mlp.d_ff", model.mlp.d_ff, 1)


def _check_data(config: Config) -> None:
    data, where = config.data, "config.data"
    if not data.sft and not data.replay:
        raise ValueError(
            f"{where}.sft: got no training files, and {where}.replay is empty too; "
            "expected at least one JSONL file"
        )
    if not 0 <= data.replay_share < 1:
        raise ValueError(
            f"{where}.replay_share: got {data.replay_share:g}; expected 0 <= share < 1 "
            "(0.1 is SFT:replay 9:1)"
        )
    if not 0 <= data.heldout_share < 1:
        raise ValueError(
            f"{where}.heldout_share: got {data.heldout_share:g}; expected 0 <= x < 1"
        )
    if not 0 <= data.max_refused_share <= 1:
        raise ValueError(
            f"{where}.max_refused_share: got {data.max_refused_share:g}; "
            "expected 0 <= x <= 1"
        )
    if not 0 <= data.balance <= 1:
        raise ValueError(f"{where}.balance: got {data.balance:g}; expected 0 <= x <= 1")
    _at_least(f"{where}.window", data.window, 2)
    if data.window > _MAX_WINDOW:
        raise ValueError(
            f"{where}.window: got {str(data.window)[:20]} tokens; expected at "
            f"most {_MAX_WINDOW:,}"
        )
    if data.min_score is not None and not math.isfinite(data.min_score):
        raise ValueError(
            f"{where}.min_score: got {data.min_score}; expected a finite number, or "
            "None to keep every row"
        )
    _at_least(f"{where}.seed", data.seed, 0)
    _choice(f"{where}.long_examples", data.long_examples, ("truncate", "refuse"))
    _choice(f"{where}.records", data.records, ("text", "json"))
    if data.sft and data.replay_share > 0 and not data.replay:
        raise ValueError(
            f"{where}.replay_share: got {data.replay_share:g} without replay text; "
            f"expected files in {where}.replay, or set {where}.replay_share=0"
        )


def _check_optim(optim: OptimConfig) -> None:
    where = "config.optim"
    _choice(f"{where}.name", optim.name, ("adafactor", "adamw"))
    _choice(f"{where}.norm", optim.norm, ("l2", "inf"))
    for name in ("gradient_dtype", "master_dtype"):
        _choice(f"{where}.{name}", getattr(optim, name), ("float32", "bfloat16"))
    _choice(
        f"{where}.schedule", optim.schedule, ("constant", "cosine", "linear", "wsd")
    )
    _choice(f"{where}.adafactor.rule", optim.adafactor.rule, ("torch", "optax"))
    _above(f"{where}.lr", optim.lr, 0.0)
    if optim.lr > _MAX_LR:
        raise ValueError(
            f"{where}.lr: got {optim.lr:g}; expected at most {_MAX_LR:g}, as updates "
            "are float32"
        )
    _at_least(f"{where}.warmup_steps", optim.warmup_steps, 0)
    _not_negative(f"{where}.weight_decay", optim.weight_decay)
    for name in ("clamp", "max_norm"):
        if getattr(optim, name) is not None:
            _above(f"{where}.{name}", getattr(optim, name), 0.0)
    for name in ("decay_share", "final_lr_share"):
        if not 0 <= getattr(optim, name) <= 1:
            raise ValueError(
                f"{where}.{name}: got {getattr(optim, name):g}; expected 0 <= x <= 1"
            )
    for name in ("b1", "b2"):
        if not 0 <= getattr(optim.adamw, name) < 1:
            raise ValueError(
                f"{where}.adamw.{name}: got {getattr(optim.adamw, name):g}; "
                "expected 0 <= x < 1"
            )
    _above(f"{where}.adamw.eps", optim.adamw.eps, 0.0)
    _above(f"{where}.adafactor.eps2", optim.adafactor.eps2, 0.0)
    _above(f"{where}.adafactor.clip_threshold", optim.adafactor.clip_threshold, 0.0)
    _above(f"{where}.adafactor.beta2_decay", optim.adafactor.beta2_decay, 0.0)
    if optim.adafactor.eps1 is not None:
        _not_negative(f"{where}.adafactor.eps1", optim.adafactor.eps1)
    for i, rule in enumerate(optim.rules):
        _not_negative(f"{where}.rules[{i}].lr_mult", rule.lr_mult)
        _pattern(f"{where}.rules[{i}].pattern", rule.pattern)


def _check_masters(config: Config) -> None:
    where = "config.optim.master_dtype: got bfloat16"
    if config.optim.master_dtype == "float32":
        return
    if config.train.mode != "full":
        raise ValueError(
            f"{where} with train.mode={config.train.mode}; expected train.mode=full "
            "(little else trains, and that in float32); set it to float32"
        )
    if config.loss.pull:
        raise ValueError(
            f"{where} with loss.pull={config.loss.pull:g}; expected no pull (its steps "
            "would be lost to rounding); set one of them back"
        )


def _check_train(config: Config) -> None:
    train = config.train
    _choice("config.train.mode", train.mode, ("full", "head_only", "lora"))
    for name in ("steps", "batch_size", "accumulation", "max_bad_steps"):
        _at_least(f"config.train.{name}", getattr(train, name), 1)
    for name in ("every", "max_windows"):
        _at_least(f"config.eval.{name}", getattr(config.eval, name), 1)
    _at_least("config.eval.sample_tokens", config.eval.sample_tokens, 1)
    for name in ("every", "keep"):
        _at_least(f"config.checkpoint.{name}", getattr(config.checkpoint, name), 1)
    if train.mode == "head_only" and config.model.tie_embeddings:
        raise ValueError(
            'config.train.mode: got "head_only" with tie_embeddings=True; expected an '
            "untied head (training it would change the embedding too); set "
            "config.model.tie_embeddings=False or train.mode=full"
        )


def _check_lora(config: Config) -> None:
    lora, where = config.lora, "config.lora"
    _at_least(f"{where}.rank", lora.rank, 1)
    _above(f"{where}.alpha", lora.alpha, 0.0)
    _share(f"{where}.dropout", lora.dropout)
    _choice(f"{where}.codes", lora.codes, ("compute", "int8"))
    for i, rule in enumerate(lora.rules):
        _pattern(f"{where}.rules[{i}].pattern", rule.pattern)
        if rule.rank is not None:
            _at_least(f"{where}.rules[{i}].rank", rule.rank, 0)
        if rule.alpha is not None:
            _above(f"{where}.rules[{i}].alpha", rule.alpha, 0.0)
        if rule.dropout is not None:
            _share(f"{where}.rules[{i}].dropout", rule.dropout)
    for i, pattern in enumerate(lora.train):
        _pattern(f"{where}.train[{i}]", pattern)
    frozen = [i for i, rule in enumerate(config.optim.rules) if rule.freeze]
    if config.train.mode == "lora" and frozen:
        raise ValueError(
            f"config.optim.rules[{frozen[0]}].freeze: got True with train.mode=lora; "
            "expected no freezing rule (all but config.lora.place and "
            "config.lora.train is frozen); remove it"
        )
    if config.train.mode != "lora" and lora != LoraConfig():
        raise ValueError(
            f"{where}: got settings with train.mode={config.train.mode}, which has no "
            "adapters; expected train.mode=lora; set it, or leave config.lora alone"
        )


def _check_loss(config: Config) -> None:
    loss = config.loss
    _not_negative("config.loss.tmkl", loss.tmkl)
    _choice("config.loss.direction", loss.direction, ("forward", "reverse"))
    _choice("config.loss.base_logits", loss.base_logits, ("copy", "cached"))
    _at_least("config.loss.top_k", loss.top_k, 1)
    if loss.is_cached and loss.top_k > config.model.vocab_size:
        raise ValueError(
            f"config.loss.top_k: got {loss.top_k}; expected at most "
            f"{config.model.vocab_size} (model.vocab_size)"
        )
    if not 0 <= loss.pull <= 1:
        raise ValueError(
            f"config.loss.pull: got {loss.pull:g}; expected 0 <= pull <= 1"
        )


def _check_guard(guard: GuardConfig) -> None:
    where = "config.guard"
    for name in ("spike_sigmas", "spike_rise", "stuck_s"):
        _not_negative(f"{where}.{name}", getattr(guard, name))
    _at_least(f"{where}.max_rollbacks", guard.max_rollbacks, 0)
    if not 0 < guard.lr_cut <= 1:
        raise ValueError(f"{where}.lr_cut: got {guard.lr_cut:g}; expected 0 < cut <= 1")
    if not 1 <= guard.stop_code <= 255 or guard.stop_code in (1, 2, 3):
        raise ValueError(
            f"{where}.stop_code: got {guard.stop_code}; expected 4 to 255 (1, 2 and 3 "
            "have their own meaning)"
        )


def _share(where: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{where}: got {value:g}; expected 0 <= share < 1")


def _pattern(where: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"{where}: got {pattern!r}; expected a regular expression ({error})"
        ) from None


def _choice(where: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{where}: got {value!r}; expected one of {', '.join(known)}")


def _text(where: str, value: str) -> None:
    if not value.strip():
        raise ValueError(f"{where}: got {value!r}; expected a folder")


def _at_least(where: str, value: int, low: int) -> None:
    if value < low:
        raise ValueError(f"{where}: got {value}; expected at least {low}")


def _above(where: str, value: float, low: float) -> None:
    if not low < value < math.inf:
        raise ValueError(f"{where}: got {value:g}; expected a number above {low:g}")


def _not_negative(where: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{where}: got {value:g}; expected a number >= 0")


def _divides(part: int, whole: int, name: str, of: str) -> None:
    if part < 1 or whole % part:
        raise ValueError(
            f"config.model.{name}: got {part}; expected a divisor of {of} = {whole}"
        )
