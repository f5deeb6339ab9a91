"""Records as lines of JSON, read strictly: never a pickle, no unknown field, no endless text.

Whoever reaches a port of the doctor may send what they like. What is read is either a record of
exactly the fields and types of its class, or an error.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import types
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

LONGEST_TEXT = 500
"""Characters of one text in a record."""

_LARGEST = 2**53

T = TypeVar("T")


class GarbledError(ValueError):
    """What came is no record of the kinds that are allowed here."""


def write(record: Any) -> bytes:
    """A record as one line: its name, and its fields."""
    named = {type(record).__name__: dataclasses.asdict(record)}
    return json.dumps(named, allow_nan=False).encode() + b"\n"


def read(line: bytes, *kinds: type[T]) -> T:
    """The record of a line.

    Args:
        line: As :func:`write` makes it.
        kinds: Classes of which it may be one.

    Raises:
        GarbledError: If it is anything else.
    """
    try:
        named = json.loads(line.decode(), parse_constant=_refuse, parse_int=_whole_number)
        ((name, value),) = named.items()
        kind = next(kind for kind in kinds if kind.__name__ == name)
    except (ValueError, TypeError, AttributeError, RecursionError, StopIteration) as error:
        raise GarbledError(f"no {' or '.join(kind.__name__ for kind in kinds)}") from error
    record: T = _checked(kind, value)
    return record


async def receive(reader: asyncio.StreamReader, limit_s: float, *kinds: type[T]) -> T:
    """The next record of a connection.

    Args:
        reader: Of the connection; its own limit bounds the length of a line.
        limit_s: Longest wait.
        kinds: Classes of which it may be one.

    Raises:
        GarbledError: If it is something else, or longer than the reader's limit.
        TimeoutError: If nothing comes in time.
        ConnectionError: If the connection ends before.
    """
    try:
        line = await asyncio.wait_for(reader.readline(), max(limit_s, 0))
    except asyncio.TimeoutError as error:
        raise TimeoutError from error
    except ValueError as error:
        raise GarbledError("a line without end") from error
    if not line.endswith(b"\n"):
        raise ConnectionResetError("the connection has ended")
    return read(line, *kinds)


def printable(text: str) -> str:
    """A text that :func:`read` takes, whatever it has come from."""
    return "".join(one if one.isprintable() else "?" for one in text)[:LONGEST_TEXT]


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _whole_number(digits: str) -> int:
    if len(digits) > len(str(_LARGEST)):
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _checked(kind: Any, value: Any) -> Any:
    """A value of JSON as what a field is declared to be."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        if not isinstance(value, dict) or value.keys() != hints.keys():
            raise GarbledError(f"no {kind.__name__}")
        return kind(**{name: _checked(hint, value[name]) for name, hint in hints.items()})
    origin = get_origin(kind)
    if origin is tuple:
        (item, _) = get_args(kind)
        if isinstance(value, list):
            return tuple(_checked(item, one) for one in value)
    elif origin is dict:
        if isinstance(value, dict):
            return {_checked(str, key): _checked(str, one) for key, one in value.items()}
    elif origin in (types.UnionType, Union):
        (item,) = (one for one in get_args(kind) if one is not types.NoneType)
        return None if value is None else _checked(item, value)
    elif _is_plain(kind, value):
        return kind(value)
    raise GarbledError(f"{str(value)[:100]!r} where {kind} is expected")


def _is_plain(kind: type, value: Any) -> bool:
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    if kind is int:
        return type(value) is int and abs(value) <= _LARGEST
    return kind is str and type(value) is str and value == printable(value)
