"""From what the user asked to the adapters of a model; nothing matches silently."""

import difflib
import math
from collections.abc import Sequence
from typing import NamedTuple

from bitmamba.config import LoraConfig, LoraRule
from bitmamba.paths import first_match
from bitmamba.types import AdapterSite, AdapterSpec

# Layer kinds of each preset; "all" is every projection of every layer.
PRESETS = {
    "attention": ("attention",),
    "ssm": ("mamba2", "bitmamba2"),
    "mlp": ("mlp",),
    "all": ("attention", "mamba2", "bitmamba2", "mlp"),
}
NEXTN = "nextn"


class Place(NamedTuple):
    """A whole weight, or a slice of its columns, that could have an adapter."""

    path: str
    site: AdapterSite
    start: int
    width: int

    @property
    def name(self) -> str:
        """As in `LoraConfig.place`: "in_proj", or "in_proj.dt" for a slice."""
        part = self.path.removeprefix(self.site.path).lstrip("/")
        return f"{self.site.projection}.{part}" if part else self.site.projection


def place_adapters(
    cfg: LoraConfig, sites: Sequence[AdapterSite]
) -> tuple[AdapterSpec, ...]:
    """The adapters that a config asks for, in order of the model.

    Args:
        cfg: presets, names, switches and rules.
        sites: every weight that can be adapted.

    Returns:
        At least one spec, unless `cfg` trains something else (see `LoraConfig`).

    Raises:
        ValueError: a preset, name or rule that places nothing; a weight adapted whole
            and by slices; no adapter at all. The message lists what exists.
    """
    everything = [place for site in sites for place in _places(site)]
    places = [place for place in everything if not _skipped(cfg, place.site)]
    chosen = _by_rules(cfg, _asked(cfg, places, everything), everything)
    specs = tuple(_spec(cfg, place, rule) for place, rule in chosen)
    if not specs and not cfg.train and not cfg.state_offset:
        raise ValueError(
            "config.lora: got no adapter at all; expected at least one; the model has "
            + _existing(everything)
        )
    _check_overlaps(specs)
    _check_dora(specs)
    return specs


def check_ranks(specs: Sequence[AdapterSpec], sites: Sequence[AdapterSite]) -> None:
    """Refuse to train a rank that its projection cannot have.

    A slice is measured by its whole projection: one rank serves slices of all widths.
    What others trained may have such ranks (PEFT adds those of slices up).

    Raises:
        ValueError: a rank above the smaller side, naming projection and sizes.
    """
    shapes = {site.path: site.shape for site in sites}
    for spec in specs:
        d_in, d_out = shapes[spec.site]
        if spec.rank > min(d_in, d_out):
            raise ValueError(
                f"config.lora: rank: got {spec.rank} for {spec.site} ({d_in} x "
                f"{d_out}); expected at most {min(d_in, d_out)}, its smaller side; "
                "lower config.lora.rank, or give it a rule with a rank of its own"
            )


def _places(site: AdapterSite) -> list[Place]:
    whole = Place(site.path, site, 0, site.shape[1])
    slices = [
        Place(f"{site.path}/{name}", site, start, stop - start)
        for name, start, stop in site.slices
    ]
    return [whole, *slices]


def _skipped(cfg: LoraConfig, site: AdapterSite) -> bool:
    ssm = cfg.skip_ssm and site.kind in PRESETS["ssm"]
    return ssm or (cfg.skip_nextn and site.path.startswith(NEXTN))


def _asked(
    cfg: LoraConfig, places: Sequence[Place], everything: Sequence[Place]
) -> list[Place]:
    """Places that presets and names ask for; each name must find some.

    Without any name the rules alone place; a pattern that fits a whole weight is then
    not about its slices as well.
    """
    if not cfg.place:
        patterns = [rule.pattern for rule in cfg.rules]
        return [
            place
            for place in places
            if place.path == place.site.path
            or first_match(place.path, patterns)
            != first_match(place.site.path, patterns)
        ]
    asked = set()
    for i, name in enumerate(cfg.place):
        found = [place.path for place in places if _is_named(name, place)]
        if not found:
            where = f"config.lora.place[{i}]"
            raise ValueError(_nothing(where, name, cfg, everything))
        asked.update(found)
    return [place for place in places if place.path in asked]


def _is_named(name: str, place: Place) -> bool:
    if name in PRESETS:
        return place.path == place.site.path and place.site.kind in PRESETS[name]
    return name == place.name


def _by_rules(
    cfg: LoraConfig, asked: Sequence[Place], everything: Sequence[Place]
) -> list[tuple[Place, LoraRule]]:
    """Each adapter that stands, with its rule; every rule must decide somewhere."""
    patterns = [rule.pattern for rule in cfg.rules]
    rules = [*cfg.rules, LoraRule(pattern=".*", rank=None if cfg.place else 0)]
    index = [first_match(place.path, [r.pattern for r in rules]) for place in asked]
    for i, pattern in enumerate(patterns):
        if i not in index:
            where = f"config.lora.rules[{i}].pattern"
            raise ValueError(_nothing(where, pattern, cfg, everything))
    chosen = [(place, rules[i]) for place, i in zip(asked, index, strict=True)]
    return [(place, rule) for place, rule in chosen if rule.rank != 0]


def _spec(cfg: LoraConfig, place: Place, rule: LoraRule) -> AdapterSpec:
    rank = cfg.rank if rule.rank is None else rule.rank
    alpha = cfg.alpha if rule.alpha is None else rule.alpha
    dropout = cfg.dropout if rule.dropout is None else rule.dropout
    return AdapterSpec(
        path=place.path,
        site=place.site.path,
        shape=(place.site.shape[0], place.width),
        start=place.start,
        rank=rank,
        scale=alpha / (math.sqrt(rank) if cfg.rslora else rank),
        dropout=dropout,
        magnitude=cfg.dora,
    )


def _check_overlaps(specs: Sequence[AdapterSpec]) -> None:
    whole = {spec.path for spec in specs if spec.path == spec.site}
    for spec in specs:
        if spec.path != spec.site and spec.site in whole:
            raise ValueError(
                f"config.lora: {spec.site} is adapted whole and by its slice "
                f"{spec.path}; expected one of the two; name the slices alone in "
                "config.lora.place, or give the whole a rule with rank=0"
            )


def _check_dora(specs: Sequence[AdapterSpec]) -> None:
    for spec in specs:
        if spec.magnitude and "/" not in spec.path:
            raise ValueError(
                f"config.lora.dora: {spec.path} cannot learn column lengths; expected "
                "projections of layers only; leave it out of config.lora.place"
            )


def _nothing(
    where: str, name: str, cfg: LoraConfig, everything: Sequence[Place]
) -> str:
    is_rule = where.endswith("pattern")
    names = [place.path if is_rule else place.name for place in everything]
    known = dict.fromkeys(names if is_rule else [*PRESETS, *names])
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    kept = any(_skipped(cfg, place.site) for place in everything)
    why = " (skip_ssm or skip_nextn leaves some out)" if kept else ""
    if name in known:  # spelt right: the model has none, or a switch takes all
        hint = ""
        if not is_rule and any(_is_named(name, place) for place in everything):
            switch = "skip_ssm" if cfg.skip_ssm else "skip_nextn"
            why = f": config.lora.{switch}=True removes all it names; drop one of them"
    why += " (nothing matches, or earlier rules take all)" if is_rule else ""
    return (
        f"{where}: {name!r} places no adapter{why}{hint}; expected something that "
        f"exists: {_existing(everything)}"
    )


def _existing(places: Sequence[Place]) -> str:
    """ "mamba2: in_proj, in_proj.z, …; attention: …" """
    by_kind: dict[str, dict[str, None]] = {}
    for place in places:
        by_kind.setdefault(place.site.kind, {})[place.name] = None
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in by_kind.items())
