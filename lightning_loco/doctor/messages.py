"""Messages between machines: one line of JSON each, read strictly and within a time limit.

Anybody who reaches a port may send anything. What is read has exactly the fields and the types of a
dataclass, with short texts that can be printed, or is an error.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

LONGEST_TEXT = 2000
"""Characters of one text that are read; those that cannot be printed are read as ``?``."""

TIMEOUTS = (TimeoutError, asyncio.TimeoutError)
"""They are one class since Python 3.11."""

_LARGEST = 2**53

T = TypeVar("T")


class BadMessageError(ValueError):
    """What has come is no message of the kinds that are expected."""


def encode(message: Any) -> bytes:
    """A dataclass as one line: its name and its fields."""
    named = {type(message).__name__: dataclasses.asdict(message)}
    return json.dumps(named, allow_nan=False).encode() + b"\n"


def decode(line: bytes, *kinds: type[T]) -> T:
    """The message of a line.

    Args:
        line: As :func:`encode` makes it.
        kinds: Dataclasses of which it may be one.

    Raises:
        BadMessageError: If it is anything else.
    """
    try:
        ((name, value),) = json.loads(line.decode()).items()
        kind = next(kind for kind in kinds if kind.__name__ == name)
    except (ValueError, AttributeError, RecursionError, StopIteration) as error:
        raise BadMessageError(f"no {' or '.join(kind.__name__ for kind in kinds)}") from error
    message: T = _checked(kind, value)
    return message


async def receive(reader: asyncio.StreamReader, limit_s: float, *kinds: type[T]) -> T:
    """The next message of a connection.

    Args:
        reader: Of the connection; its own limit bounds the length of a line.
        limit_s: Longest wait.
        kinds: Dataclasses of which it may be one.

    Raises:
        BadMessageError: If it is something else, or longer than the reader's limit.
        TimeoutError: If no whole line comes in time.
        ConnectionError: If the connection ends before.
    """
    try:
        line = await asyncio.wait_for(reader.readline(), max(limit_s, 0))
    except TIMEOUTS as error:
        raise TimeoutError from error
    except ValueError as error:
        raise BadMessageError("a line that is too long") from error
    if not line.endswith(b"\n"):
        raise ConnectionResetError("the connection has ended")
    return decode(line, *kinds)


_types_of_fields = functools.cache(get_type_hints)


def _checked(kind: Any, value: Any) -> Any:
    """A value of JSON as what a field is declared to be."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        types = _types_of_fields(kind)
        if isinstance(value, dict) and value.keys() == types.keys():
            return kind(**{name: _checked(one, value[name]) for name, one in types.items()})
    elif get_origin(kind) is tuple and isinstance(value, list):
        return tuple(_checked(get_args(kind)[0], one) for one in value)
    elif get_origin(kind) is dict and isinstance(value, dict):
        return {_checked(str, key): _checked(str, one) for key, one in value.items()}
    elif kind is str and type(value) is str:
        return "".join(one if one.isprintable() else "?" for one in value[:LONGEST_TEXT])
    elif kind is int and type(value) is int and abs(value) <= _LARGEST:
        return value
    elif kind is float and type(value) in (int, float) and abs(value) <= _LARGEST:
        return float(value)
    raise BadMessageError(f"{str(value)[:100]!r} where {kind} is expected")
