"""Defects that are put back into the real code, one at a time, to see that they are found."""

from __future__ import annotations
import __future__ as future

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple

from tests.exploration.worlds import WORLDS


class Mutant(NamedTuple):
    """A defect: ``old`` in the source of a function becomes ``new``.

    Attributes:
        name: What is wrong with it.
        function: Its path: the module, the class if it has one, and the name.
        old: A text that occurs once in the source of the function.
        new: What replaces it.
        settings: Settings of the world that it needs, in place of drawn ones.
        lacks: Why it is not found: what the world lacks. Empty if it is found.
    """

    name: str
    function: str
    old: str
    new: str
    settings: dict[str, Any] = {}
    lacks: str = ""

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """A context in which the function has the defect."""
        function = _find(self.function)
        source = textwrap.dedent(inspect.getsource(function))
        if (count := source.count(self.old)) != 1:
            raise ValueError(
                f"Mutant {self.name!r}: its old text occurs {count} times in {self.function}. Has "
                "the function changed? Adapt the mutant to it."
            )
        before = function.__code__
        function.__code__ = _code(source.replace(self.old, self.new), function)
        _forget()
        try:
            yield
        finally:
            function.__code__ = before
            _forget()


def _forget() -> None:
    for world in WORLDS.values():
        world.forget()


def _find(path: str) -> FunctionType:
    """Return a function, also one behind decorators that keep it as ``__wrapped__``."""
    module, names = path.replace(":", "."), list[str]()
    while True:
        try:
            found: Any = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, name = module.rpartition(".")
            names.insert(0, name)
    for name in names:
        found = inspect.getattr_static(found, name)
    if isinstance(found, property):
        found = found.fget
    if isinstance(found, (classmethod, staticmethod)):
        found = found.__func__
    return inspect.unwrap(found)  # type: ignore[no-any-return]


def _code(source: str, function: FunctionType) -> Any:
    """Compile a function from its source, inside what gives it its free variables."""
    tree = ast.parse(source)
    definition = tree.body[0]
    assert isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef))
    definition.decorator_list = []
    free = function.__code__.co_freevars
    if free:
        outer = ast.parse(f"def outer():\n    {' = '.join(free)} = None\n    return None")
        outer.body[0].body[1:1] = [definition]  # type: ignore[attr-defined]
        tree = outer
    ast.fix_missing_locations(tree)
    flags = future.annotations.compiler_flag
    code = compile(tree, function.__code__.co_filename, "exec", flags, dont_inherit=True)
    return next(one for one in _all_in(code) if one.co_name == function.__name__)


def _all_in(code: Any) -> Iterator[Any]:
    yield code
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _all_in(constant)


def all_mutants() -> dict[str, list[Mutant]]:
    """Return the mutants of each world."""
    return {
        world: importlib.import_module(f"tests.exploration.mutants_{world}").MUTANTS
        for world in WORLDS
    }
