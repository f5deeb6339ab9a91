"""Defects put back into the code one at a time, to measure when exploration finds them."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple


class Mutant(NamedTuple):
    """A change of the text of one function.

    Attributes:
        name: What is wrong with it, in words.
        world: Name of the world that is to find it.
        function: Where it is: ``"package.module:Class.method"``.
        old: A part of its source, which occurs once, as it is indented in the file.
        new: What stands there instead.
        settings: Settings of the world that it needs, in place of drawn ones.
    """

    name: str
    world: str
    function: str
    old: str
    new: str
    settings: dict[str, Any] = {}


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Run with a changed function, wherever it is referred to."""
    function = _find(mutant.function)
    source = inspect.getsource(function)
    if source.count(mutant.old) != 1:
        raise ValueError(
            f"Mutant {mutant.name!r}: its old text occurs {source.count(mutant.old)} times in "
            f"{mutant.function}. Has the function changed? Adapt the mutant to it."
        )
    before = function.__code__
    function.__code__ = _compile(function, source.replace(mutant.old, mutant.new))
    try:
        yield
    finally:
        function.__code__ = before


def _find(place: str) -> FunctionType:
    module, _, names = place.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = inspect.getattr_static(found, name)
    if isinstance(found, (classmethod, staticmethod)):
        found = found.__func__
    if isinstance(found, property):
        found = found.fget
    found = inspect.unwrap(found)  # of torch.no_grad, say
    assert isinstance(found, FunctionType)
    return found


def _compile(function: FunctionType, source: str) -> Any:
    """Compile a changed source to code that fits the function, with the same free variables."""
    source = textwrap.dedent(source)
    lines = source.splitlines()
    while not lines[0].startswith(("def ", "async def ")):  # without its decorators
        lines.pop(0)
    free = function.__code__.co_freevars
    text = "\n".join(lines)
    if free:  # such as __class__, for super()
        names = "\n".join(f"    {name} = None" for name in free)
        body = f"{names}\n{textwrap.indent(text, '    ')}\n    return {function.__name__}"
        text = f"def _outer():\n{body}"
    future = "from __future__ import annotations\n"
    namespace: dict[str, Any] = {}
    exec(compile(future + text, inspect.getsourcefile(function) or "", "exec"), namespace)
    made = namespace["_outer"]() if free else namespace[function.__name__]
    return made.__code__.replace(co_firstlineno=function.__code__.co_firstlineno)
