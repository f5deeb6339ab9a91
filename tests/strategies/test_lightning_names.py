"""Only one module uses or overrides private names of Lightning's classes.

Ruff (SLF001) detects ``trainer._x``, but not that ``self._x`` in a subclass of a Lightning
class belongs to Lightning.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import textwrap
from collections.abc import Iterator

import pytest

from lightning_loco import LocalSGDStrategy
from tests.harness.sources import can_import, sources

ALLOWED = "lightning_loco.strategies.lightning_compat"
READERS = {"getattr", "hasattr", "setattr", "delattr"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_attributes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Return line and name of each private attribute of ``self``, including ``getattr`` calls."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                pass
            case ast.Call(
                func=ast.Name(id=reader), args=[_, ast.Constant(value=str(name)), *_]
            ) if reader in READERS:
                pass
            case ast.FunctionDef(name=name):
                pass
            case _:
                continue
        if is_private(name):
            yield node.lineno, name


def names_of_lightning(kind: type) -> frozenset[str]:
    """Return private names in the Lightning classes that a class derives from."""
    found: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.startswith(("lightning.", "pytorch_lightning.")):
            found |= names_in(base)
    return frozenset(found)


@functools.cache
def names_in(kind: type) -> frozenset[str]:
    """Return private names in the source of a class."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    return frozenset(name for _, name in own_attributes(tree))


def violations(module: str, text: str) -> list[str]:
    """Return uses of private names of Lightning's base classes in the classes of a module."""
    found = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            kind = getattr(importlib.import_module(module), node.name)
            theirs = names_of_lightning(kind)
            found += [
                f"{module}:{line}: {name} is Lightning's"
                for line, name in own_attributes(node)
                if name in theirs
            ]
    return found


def test_private_names_of_lightning_are_used_in_one_module_only() -> None:
    modules = {
        name: text
        for name, text in sources().items()
        if name.startswith("lightning_loco.") and name != ALLOWED and can_import(name)
    }
    assert not [line for name, text in modules.items() for line in violations(name, text)]


@pytest.mark.parametrize(
    "line", ["self._layer_sync", "self._ddp_kwargs['x'] = 1", "getattr(self, '_layer_sync', 1)"]
)
def test_a_private_name_of_lightning_is_found(line: str) -> None:
    text = f"class LocalSGDStrategy(DDPStrategy):\n    def run(self):\n        {line}\n"
    module = LocalSGDStrategy.__module__
    assert len(violations(module, text)) == 1


def test_a_name_of_our_own_is_not_found() -> None:
    assert "_engine" not in names_of_lightning(LocalSGDStrategy)
