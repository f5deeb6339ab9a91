"""Numbers of command lines: types for argparse, whose errors show how to write the number."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable


def whole_number(text: str) -> int:
    """Convert a number such as 124e6 to an integer.

    Raises:
        argparse.ArgumentTypeError: If it is none.

    Example:
        >>> whole_number("124e6")
        124000000
    """
    with contextlib.suppress(ValueError):
        if (number := float(text)).is_integer():
            return int(number)
    raise argparse.ArgumentTypeError(f"must be a whole number, such as 124e6, got {text!r}")


def number_of(unit: str, example: str) -> Callable[[str], float]:
    """Return a type for numbers without a unit in their text.

    Args:
        unit: What is counted, for the error.
        example: A number as text, for the error.

    Example:
        >>> number_of("seconds", "0.5")("2e-3")
        0.002
    """

    def convert(text: str) -> float:
        with contextlib.suppress(ValueError):
            return float(text)
        raise argparse.ArgumentTypeError(
            f"must be a number of {unit}, such as {example}, got {text!r}"
        )

    return convert
