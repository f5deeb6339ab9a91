"""Numbers as text: seconds, and values of curves."""

from __future__ import annotations


def format_seconds(seconds: float) -> str:
    """Format a duration, such as 12.3 s, 4 min 5 s or 2 h 30 min."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def format_value(value: float) -> str:
    """Format a value of a curve with four significant digits."""
    return f"{value:.4g}"
