"""Rows that are token ids already: input_ids, and loss_mask or labels."""

from typing import Any

from bitmamba.data.example import Example, Refused
from bitmamba.data.records import MAX_WEIGHT, MIN_WEIGHT, is_weight

NO_LOSS = -100
_MAX_ID = 2**31 - 1


def parse(row: dict[str, Any]) -> Example:
    """input_ids; loss_mask (numbers >= 0) or labels (-100: no loss), else all trained.

    Labels stand where the token itself stands, as Hugging Face has them.
    """
    ids = row["input_ids"]
    if not _is_list_of(ids, int) or not ids:
        raise Refused("not token ids", "'input_ids': expected integers, at least one")
    if min(ids) < 0 or max(ids) > _MAX_ID:
        detail = f"'input_ids' has {min(ids)}, {max(ids)}; expected 0 to {_MAX_ID}"
        raise Refused("not token ids", detail)
    mask = [1.0] * len(ids)
    if "loss_mask" in row and "labels" in row:
        raise Refused("two masks", "both 'loss_mask' and 'labels'; expected one")
    if "loss_mask" in row:
        mask = _mask(row["loss_mask"], len(ids))
    if "labels" in row:
        mask = _mask_of_labels(row["labels"], ids)
    return Example(ids=tuple(ids), mask=tuple(mask))


def _is_list_of(value: Any, kind: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(v, kind) and not isinstance(v, bool) for v in value
    )


def _mask(value: Any, n: int) -> list[float]:
    if isinstance(value, list) and all(isinstance(v, bool) for v in value):
        value = [int(v) for v in value]
    if not _is_list_of(value, int | float) or len(value) != n:
        raise Refused("not a loss mask", f"'loss_mask': expected {n} numbers")
    if not all(map(is_weight, value)):
        expected = f"expected 0 or {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
        raise Refused("not a loss mask", f"'loss_mask': {expected}")
    return [float(v) for v in value]


def _mask_of_labels(value: Any, ids: list[int]) -> list[float]:
    if not _is_list_of(value, int) or len(value) != len(ids):
        raise Refused("not labels", f"'labels': expected {len(ids)} integers")
    for index, (label, token) in enumerate(zip(value, ids, strict=True)):
        if label not in (NO_LOSS, token):
            raise Refused(
                "not labels",
                f"label {index + 1} is {label}, the token there is {token}; expected "
                f"the token itself or {NO_LOSS} (labels are not shifted)",
            )
    return [0.0 if label == NO_LOSS else 1.0 for label in value]
