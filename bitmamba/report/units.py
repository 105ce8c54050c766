"""Numbers as people read them."""

import math


def count(number: float) -> str:
    """1234567 -> "1,234,567"."""
    return f"{number:,.0f}"


def size(n_bytes: float) -> str:
    """Bytes in binary units: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(n_bytes) < 1024:
            return f"{n_bytes:,.0f} B" if unit == "B" else f"{n_bytes:,.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:,.2f} GiB"


def duration(seconds: float) -> str:
    """75 -> "1m15s"."""
    seconds = round(seconds)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


def loss(value: float | None) -> str:
    """A loss to four places; a value that is not finite by its name."""
    if value is None:
        return "-"
    return f"{value:.4f}" if math.isfinite(value) else str(value)


def percent(share: float) -> str:
    """0.123 -> "12.3 %"."""
    return f"{100 * share:.1f} %"
