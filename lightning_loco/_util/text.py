"""Numbers and suggestions in messages: bytes, seconds, the name that was meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def format_bytes(num_bytes: float) -> str:
    """Format a number of bytes with a decimal unit, such as 12.3 MB."""
    value, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:,.{0 if unit == 'B' else 1}f} {unit}"


def names_of_entries(keys: Iterable[str]) -> str:
    """List state entries in a message, each once with what belongs to it: its parts have a dot.

    Example:
        >>> names_of_entries(["persistence.sent", "momentum", "persistence"])
        'momentum, persistence'
    """
    return ", ".join(sorted({key.partition(".")[0] for key in keys}))


def format_seconds(seconds: float) -> str:
    """Format a duration: minutes from 3 min on, hours from 3 h on, days from 3 d on.

    Example:
        >>> [format_seconds(seconds) for seconds in (0.0123, 0.5, 12.34, 179)]
        ['12.3 ms', '0.5 s', '12.3 s', '179 s']
        >>> [format_seconds(seconds) for seconds in (245, 9000, 40_000, 1e6)]
        ['4.1 min', '150.0 min', '11.1 h', '11.6 d']
    """
    for factor, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 3 * factor:
            return f"{seconds / factor:,.1f} {unit}"
    return f"{1000 * seconds:.3g} ms" if 0 < seconds < 0.1 else f"{seconds:.3g} s"


def suggestion(name: str, known: Iterable[str], form: str = "{}") -> str:
    """Suggest the known name that is most similar to ``name``, or else those that contain it.

    Args:
        name: What the user has written.
        known: The known names.
        form: Format of a suggestion.

    Returns:
        A question with a space before it; empty if no name is similar.

    Example:
        >>> suggestion("rign", ["ring", "star"], "topology={}")
        ' Did you mean topology=ring?'
    """
    names = sorted(known)
    close = get_close_matches(name, names, 1) or [one for one in names if f"_{name}_" in f"_{one}_"]
    return f" Did you mean {' or '.join(map(form.format, close))}?" if close else ""
