"""What adapters cover, by kind of layer and projection; printed before step 1."""

from collections.abc import Sequence
from typing import NamedTuple

from bitmamba.types import AdapterSite, AdapterSpec


class CoverageRow(NamedTuple):
    """One projection of one kind of layer.

    adapted, there: weights with an adapter, and all of them.
    columns: slices that are adapted, () for the whole weight.
    ranks: the different ranks among them, in order. parameters: of the adapters.
    """

    kind: str
    projection: str
    adapted: int
    there: int
    columns: tuple[str, ...]
    ranks: tuple[int, ...]
    parameters: int


def coverage(
    sites: Sequence[AdapterSite], specs: Sequence[AdapterSpec]
) -> list[CoverageRow]:
    """A row for every projection that exists, adapted or not, in order of the model."""
    groups: dict[tuple[str, str], list[AdapterSite]] = {}
    for site in sites:
        groups.setdefault((site.kind, site.projection), []).append(site)
    rows = []
    for (kind, projection), members in groups.items():
        paths = {site.path for site in members}
        mine = [spec for spec in specs if spec.site in paths]
        slices = [spec.path.removeprefix(spec.site).lstrip("/") for spec in mine]
        rows.append(
            CoverageRow(
                kind=kind,
                projection=projection,
                adapted=len({spec.site for spec in mine}),
                there=len(members),
                columns=tuple(dict.fromkeys(name for name in slices if name)),
                ranks=tuple(sorted({spec.rank for spec in mine})),
                parameters=sum(n_parameters(spec) for spec in mine),
            )
        )
    return rows


def n_parameters(spec: AdapterSpec) -> int:
    """Of one adapter."""
    d_in, d_out = spec.shape
    return spec.rank * (d_in + d_out) + (d_out if spec.magnitude else 0)
