"""Reads files of YAML or JSON that a user has written."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

MAX_ERROR = 500
"""Characters of an error about the content of a file, which may quote a part of it."""


def read_yaml(path: str | Path, what: str) -> Any:
    """Return the content of a user's file of YAML or JSON, which errors call ``what``.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If it cannot be read, is nested too deeply, or is far longer with its aliases
            written out, which an error message would do.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = yaml.safe_load(text)
        if _length(content, {}) > 100_000 + 4 * len(text):
            raise ValueError("its aliases repeat too much. Write the values out")
    except FileNotFoundError:
        raise
    except RecursionError:
        raise ValueError(f"The {what} {str(path)!r} is nested too deeply.") from None
    # Some values of YAML, such as an impossible date, raise errors of Python.
    except (OSError, yaml.YAMLError, ValueError, OverflowError) as error:
        raise ValueError(f"The {what} {str(path)!r} cannot be read: {error}.") from None
    return content


def _length(value: object, known: dict[int, float]) -> float:
    """Return about how long the text of a value is, infinite if it contains itself."""
    if isinstance(value, str):
        return len(value)
    if not isinstance(value, (dict, list, tuple)):
        return 1
    if id(value) not in known:
        known[id(value)] = math.inf
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_length(part, known) for part in parts)
    return known[id(value)]
