"""Settings as plain values, which can be compared, printed and written as JSON."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any


def plain(value: Any) -> Any:
    """Convert a setting to numbers, strings, lists and dictionaries that can be compared.

    Functions are compared by module and name only: two lambdas of one module are equal, whatever
    they compute. Use ``functools.partial`` for arguments that shall be compared.

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
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return [type(value).__qualname__, plain(fields)]
    has_own_text = "__repr__" in {name for kind in type(value).__mro__[:-1] for name in vars(kind)}
    return repr(value) if has_own_text else [type(value).__qualname__, plain(vars(value))]
