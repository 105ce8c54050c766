"""adapter_config.json of a PEFT folder: every value that we use is checked.

No name in it is opened: `base_model_name_or_path` and the like are for people.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

from bitmamba.io.json_file import read_json
from bitmamba.io.peft import CONFIG

MAX_BYTES = 4 * 2**20
MAX_PATTERNS = 10_000
# Patterns are regular expressions of others, and matching one may take for ever: with
# so few repetitions and groups, and no group repeated, it ends soon on any name.
_MAX_REGEXES, _MAX_PATTERN_CHARS, _MAX_REPEATS, _MAX_CHOICES = 16, 100, 2, 3
_REPEAT = re.compile(r"(?<![\\(])[*+{?]")
_GROUP = re.compile(r"(?<!\\)\(")
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_PLAIN_NAME = re.compile(r"[\w.\-]*")

# Settings that change what the tensors mean, and the values that leave it as it is.
_PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "modules_to_save": (None, []),
    "lora_bias": (False,),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
    # Others (pissa, olora, loftq, ...) have changed the base's weights as well.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}


class Settings(NamedTuple):
    """The checked values.

    r, lora_alpha: of modules without a pattern of their own; None if not given.
    ranks, alphas: (pattern, value) pairs, the first that matches wins.
    targets: names that must have tensors; () if a regular expression selects them.
    """

    file: Path
    r: int | None
    lora_alpha: float | None
    ranks: tuple[tuple[re.Pattern, int], ...]
    alphas: tuple[tuple[re.Pattern, float], ...]
    targets: tuple[str, ...]
    dropout: float
    rslora: bool
    dora: bool

    def rank(self, module: str) -> int:
        """The module's rank, by the rule of PEFT's patterns."""
        return self._value("r", self.ranks, self.r, module)

    def alpha(self, module: str) -> float:
        """The module's alpha, by the same rule."""
        return self._value("lora_alpha", self.alphas, self.lora_alpha, module)

    def _value(self, name: str, patterns: Any, default: Any, module: str) -> Any:
        value = next((v for p, v in patterns if p.match(module)), default)
        if value is None:
            raise ValueError(f"{self.file}: {name}: missing; expected a number")
        return value


def read_settings(folder: Path) -> Settings:
    """Read and check a PEFT folder's configuration.

    Raises:
        ValueError: one line naming file and setting: missing, not JSON, a value of a
            wrong kind or range, or one that would change what the tensors mean.
    """
    file = folder / CONFIG
    if not file.is_file():
        raise ValueError(f"{folder}: {CONFIG} is missing; expected a PEFT folder")
    settings = read_json(file, max_bytes=MAX_BYTES)
    if not isinstance(settings, dict) or "peft_type" not in settings:
        raise ValueError(f"{file}: got no peft_type; expected a PEFT configuration")
    for name, plain in _PLAIN.items():
        if name in settings and settings[name] not in plain:
            raise ValueError(
                f"{file}: {name}: got {short(settings[name])}; expected {plain[0]!r}: "
                "other values change what the tensors mean, and are not supported"
            )
    return Settings(
        file=file,
        r=_number(file, settings, "r", whole=True),
        lora_alpha=_number(file, settings, "lora_alpha"),
        ranks=_patterns(file, settings, "rank_pattern", whole=True),
        alphas=_patterns(file, settings, "alpha_pattern"),
        targets=_targets(file, settings.get("target_modules")),
        dropout=_dropout(file, settings),
        rslora=_flag(file, settings, "use_rslora"),
        dora=_flag(file, settings, "use_dora"),
    )


def _number(file: Path, table: Any, name: str, *, whole: bool = False) -> Any:
    """A number > 0; None if there is none."""
    value = table.get(name)
    if value is None:
        return None
    kind = int if whole else int | float
    if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < 2**31:
        expected = "a whole number > 0" if whole else "a finite number > 0"
        raise ValueError(f"{file}: {name}: got {short(value)}; expected {expected}")
    return value if whole else float(value)


def _patterns(file: Path, settings: Any, name: str, *, whole: bool = False) -> Any:
    table = settings.get(name) or {}
    if not isinstance(table, dict) or len(table) > MAX_PATTERNS:
        raise ValueError(
            f"{file}: {name}: got {short(table)}; expected at most {MAX_PATTERNS:,} "
            "numbers by pattern"
        )
    expressions = [p for p in table if not _PLAIN_NAME.fullmatch(p)]
    if len(expressions) > _MAX_REGEXES:
        raise ValueError(
            f"{file}: {name}: got {len(expressions)} regular expressions; expected at "
            f"most {_MAX_REGEXES}, the others plain names"
        )
    return tuple(
        (_compiled(f"{file}: {name}", p), _number(file, {p: v}, p, whole=whole))
        for p, v in table.items()
        if v is not None
    )


def _compiled(where: str, pattern: str) -> re.Pattern:
    """A pattern by PEFT's rule, if it is one that ends soon on any name."""
    if not _PLAIN_NAME.fullmatch(pattern):
        repeats = len(_REPEAT.findall(pattern))
        choices = repeats + len(_GROUP.findall(pattern))
        slow = len(pattern) > _MAX_PATTERN_CHARS or repeats > _MAX_REPEATS
        if slow or choices > _MAX_CHOICES or _REPEATED_GROUP.search(pattern):
            raise ValueError(
                f"{where}: got {short(pattern)}; expected at most {_MAX_REPEATS} "
                f"repetitions, none of a group, {_MAX_CHOICES} with the groups, in "
                f"{_MAX_PATTERN_CHARS} characters; name the modules instead"
            )
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(
            f"{where}: got {short(pattern)}; expected a regular expression ({error})"
        ) from None


def _targets(file: Path, value: Any) -> tuple[str, ...]:
    if value is None or isinstance(value, str):
        return ()
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise ValueError(
            f"{file}: target_modules: got {short(value)}; expected names or a pattern"
        )
    return tuple(value)


def _dropout(file: Path, settings: Any) -> float:
    value = settings.get("lora_dropout") or 0.0
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value < 1:
        raise ValueError(
            f"{file}: lora_dropout: got {short(value)}; expected a number in [0, 1)"
        )
    return float(value)


def _flag(file: Path, settings: Any, name: str) -> bool:
    value = settings.get(name)
    if value not in (None, True, False):
        raise ValueError(f"{file}: {name}: got {short(value)}; expected true or false")
    return bool(value)


def short(value: Any) -> str:
    """As much of a foreign value as a line can hold."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # thousands of digits, or of levels
        text = type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."
