"""Private names stay where they are defined; those of the hosts in one module that says so.

An attribute such as ``trainer._x`` does not tell whose name ``_x`` is. What is safe to say:

- ``self._x`` is this package's if the class or a base class in the package defines it, and no base
  class outside of the package does;
- ``other._x`` is the module's own business if the module defines ``_x``, unless ``other`` is
  reached through something that is called like an object of a host;
- ``Base._x`` in a class that builds on ``Base`` is like ``self._x``.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pytest

from tests.conftest import ROOT
from tests.test_layering import MAY_USE_PRIVATE, PACKAGE, is_private, module_name

# Still to go: what is used, and in which module.
HOSTS = {"trainer", "_trainer", "lightning_module", "pl_module", "fit_loop", "epoch_loop"}
"""What objects of Lightning are called in this package."""

READERS = {"getattr", "hasattr", "setattr", "delattr"}


def is_hidden(name: str) -> bool:
    """Private, and not a documented name such as those of a NamedTuple or Hydra's ``_target_``."""
    documented = name in ("_asdict", "_fields", "_make", "_replace")
    return is_private(name) and not name.endswith("_") and not documented


@dataclass
class Owner:
    """A class: what it is called, what it defines, and on what it builds."""

    name: str
    module: str
    bases: list[str]
    defines: set[str] = field(default_factory=set)


def defined_names(tree: ast.AST) -> set[str]:
    """All hidden names that are made anywhere in a class or module."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        ):
            found.add(node.attr)
    return {name for name in found if is_hidden(name)}


def owners_of(module: str, tree: ast.AST) -> list[Owner]:
    """The classes of a module."""
    return [
        Owner(
            node.name,
            module,
            [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases],
            defined_names(node),
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]


@functools.cache
def foreign_names(kind: type) -> frozenset[str]:
    """Hidden names that base classes outside of the package define."""
    found: set[str] = set()
    for base in kind.__mro__:
        if not base.__module__.startswith("lightning_loco") and base is not object:
            found |= {name for name in vars(base) if is_hidden(name)}
            try:
                found |= defined_names(ast.parse(textwrap.dedent(inspect.getsource(base))))
            except (OSError, TypeError):
                continue  # written in C
    return frozenset(found)


class Package:
    """All classes of some modules, found by their name.

    Args:
        sources: The text of each module, by its name.
        importable: Whether the classes can be asked for their bases outside of the package.
    """

    def __init__(self, sources: dict[str, str], importable: bool = True) -> None:
        self.trees = {module: ast.parse(source) for module, source in sources.items()}
        self._importable = importable
        self._owners: dict[str, list[Owner]] = {}
        for module, tree in self.trees.items():
            for owner in owners_of(module, tree):
                self._owners.setdefault(owner.name, []).append(owner)

    def ancestors(self, owner: Owner) -> list[Owner]:
        """A class and those in the package that it builds on."""
        found = [owner]
        for base in owner.bases:
            for other in self._owners.get(base, []):
                if other is not owner:
                    found += self.ancestors(other)
        return found

    def own_names(self, owner: Owner) -> set[str]:
        """What a class and its bases in the package define."""
        return {name for ancestor in self.ancestors(owner) for name in ancestor.defines}

    def host_names(self, owner: Owner) -> frozenset[str]:
        """What its bases outside of the package define."""
        if not self._importable or owner.module == "train":
            return frozenset()
        kind = getattr(importlib.import_module(owner.module), owner.name, None)
        return foreign_names(kind) if isinstance(kind, type) else frozenset()

    def findings(self, modules: Iterable[str]) -> Iterator[tuple[str, str, int]]:
        """Module, expression and line of each private name that is used where it does not belong.

        Args:
            modules: Those to look at.
        """
        for module in modules:
            local = defined_names(self.trees[module])
            for use in uses(self.trees[module]):
                owners = [o for o in self._owners.get(use.inside, []) if o.module == module]
                if owners and use.target in {"self", "cls", *map(_name, self.ancestors(owners[0]))}:
                    is_own = use.name in self.own_names(owners[0])
                    fine = is_own and use.name not in self.host_names(owners[0])
                else:
                    fine = use.name in local and not use.words & HOSTS
                if not fine:
                    yield module, f"{use.target}.{use.name}", use.line


def _name(owner: Owner) -> str:
    return owner.name


@dataclass
class Use:
    """A private attribute that is looked at, by a dot or with getattr.

    Attributes:
        inside: Name of the class around it.
        target: The object, as it is written.
        words: All names in that.
        name: The attribute.
        line: Where.
    """

    inside: str
    target: str
    words: set[str]
    name: str
    line: int


def uses(node: ast.AST, inside: str = "") -> Iterator[Use]:
    """Every use of a private attribute below a node."""
    if isinstance(node, ast.Attribute) and is_hidden(node.attr):
        yield _use(inside, node.value, node.attr)
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in READERS
        and isinstance(node.args[1], ast.Constant)
        and is_hidden(node.args[1].value)
    ):
        yield _use(inside, node.args[0], node.args[1].value)
    if isinstance(node, ast.ClassDef):
        inside = node.name
    for child in ast.iter_child_nodes(node):
        yield from uses(child, inside)


def _use(inside: str, target: ast.expr, name: str) -> Use:
    nodes = list(ast.walk(target))
    words = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    words |= {n.id for n in nodes if isinstance(n, ast.Name)}
    return Use(inside, ast.unparse(target), words, name, target.lineno)


def sources() -> dict[str, str]:
    texts = {module_name(path): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    return {**texts, "train": (ROOT / "train.py").read_text(encoding="utf-8")}


@functools.cache
def all_findings() -> list[tuple[str, str, int]]:
    texts = sources()
    return list(Package(texts).findings(sorted(texts)))


def test_private_names_stay_where_they_are_defined() -> None:
    found = [
        f"{module}:{line}: {what}"
        for module, what, line in all_findings()
        if module not in MAY_USE_PRIVATE
    ]
    assert not found, "\n".join(found)


def test_allowances_are_still_needed() -> None:
    assert {module for module, _, _ in all_findings()} >= MAY_USE_PRIVATE


STRATEGY = """
class Strategy(DDPStrategy):
    def __init__(self):
        super().__init__()
        self._mine = self._trainer = None

    def _help(self):
        return self._mine, self._help, other._mine, Strategy._help

class Child(Strategy):
    def run(self, trainer):
        {}
"""


@pytest.mark.parametrize(
    "line",
    [
        "trainer._x",
        "trainer._mine",  # looks like one of ours, and is a host's
        "self._trainer.fit_loop._y",
        "self.trainer.strategy._mine",
        "self.lightning_module._trainer",
        "self._layer_sync",
        "self._get_process_group_backend()",
        "self._ddp_kwargs['process_group'] = 1",
        "trainer.strategy._ddp_kwargs",
        "getattr(trainer, '_x', None)",
        "hasattr(self, '_layer_sync')",
        "exchange._group",  # of another module
        "tensor._base",
        "[loop._x for loop in trainer.loops]",
    ],
)
def test_a_private_name_of_others_is_found(line: str) -> None:
    package = Package({"lightning_loco.strategies.x": STRATEGY.format(line)}, importable=False)
    assert len(list(package.findings(["lightning_loco.strategies.x"]))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "self._mine",
        "self._help()",
        "other._mine",
        "Strategy._help(self)",
        "self.config._target_",
        "row._fields, row._replace(x=1)",
        "torch._foreach_copy_([], [])",
        "self.__dict__",
        "getattr(self, name, None)",
    ],
)
def test_a_name_of_ones_own_is_not(line: str) -> None:
    package = Package({"lightning_loco.strategies.x": STRATEGY.format(line)}, importable=False)
    assert list(package.findings(["lightning_loco.strategies.x"])) == []


def test_a_name_that_a_host_defines_too_is_the_hosts() -> None:
    """An attribute of Lightning's class that ours would overwrite is not ours, whoever sets it."""
    from lightning_loco import LocalSGDStrategy

    names = foreign_names(LocalSGDStrategy)
    assert {"_layer_sync", "_ddp_kwargs", "_get_process_group_backend"} <= names
    assert "_engine" not in names
