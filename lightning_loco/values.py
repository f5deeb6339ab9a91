"""Values that users set: whether they are in range, and how they are compared and stored."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import pickle
from collections.abc import Sequence
from types import CodeType
from typing import Any


def check_bytes(name: str, value: int) -> None:
    """Refuse what is no number of bytes.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If it is not positive.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}.")
    if value <= 0:
        raise ValueError(f"{name} must be positive and finite, got {value!r}.")


def check_common_arguments(timeout_s: float, start_method: str) -> None:
    """Refuse what no strategy can work with.

    Raises:
        TypeError: If a number has the wrong type.
        ValueError: If one is out of range, or the start method is unknown.
    """
    check_choice("start_method", start_method, ("popen", "spawn", "fork", "forkserver"))
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)):
        raise TypeError(f"timeout_s must be a number, got {timeout_s!r}.")
    if not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s must be positive and finite, got {timeout_s!r}.")


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Refuse a word that is none of the allowed ones.

    Raises:
        ValueError: With those that are.
    """
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.")


def plain(value: Any) -> Any:
    """A value that a user has set, as numbers, strings and lists that tell other values apart.

    Functions are told by their name and code, objects without a text of their own by their pickle.

    Example:
        >>> plain(functools.partial(max, key=3))
        ['partial', 'builtins.max', [], {'key': 3}]
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, functools.partial):
        return ["partial", plain(value.func), plain(value.args), plain(value.keywords)]
    if callable(value) and hasattr(value, "__qualname__"):
        code = getattr(value, "__code__", None)
        closure = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        name = f"{value.__module__}.{value.__qualname__}"
        if code is None or "<" not in name:
            return name
        return [name, *_plain_code(code), plain(value.__defaults__), plain(closure)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return [type(value).__qualname__, plain(held)]
    has_own_text = "__repr__" in {name for kind in type(value).__mro__[:-1] for name in vars(kind)}
    if has_own_text:
        return repr(value)
    return f"{type(value).__qualname__} {hashlib.blake2b(pickle.dumps(value)).hexdigest()[:16]}"


def _plain_code(code: CodeType) -> list[Any]:
    """What a function does: without the addresses and files that its own text would show."""
    inner = [_plain_code(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    return [code.co_code.hex(), list(code.co_names), inner]
