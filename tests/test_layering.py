"""Imports go downwards only, and private names of the hosts stay in the modules meant for them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "lightning_loco"

# From the bottom to the top; "" is lightning_loco/__init__.py. A room may import from itself and
# from the floors below; rooms on one floor do not know each other.
FLOORS = (
    ("__about__", "background", "values"),
    ("topology", "algorithms", "codecs", "schedules"),
    ("comm",),
    ("rounds", "peers", "remote"),
    ("simulation", "elastic"),
    ("strategies", "callbacks", "demo"),
    ("",),
    ("chosen_strategy",),
    ("cli", "doctor"),
)
# Who may look at a neighbour on the same floor, one way only.
NEIGHBORS = {
    ("algorithms", "topology"),  # settings that fit the graph
    ("callbacks", "strategies"),  # what a strategy counts, and whether it is one of ours
    ("codecs", "algorithms"),  # the type of a state
    ("demo", "strategies"),  # what its report tells of a run
}
# What each room may import besides the standard library; rooms not named here are free.
FOREIGN = {
    "__about__": set(),
    "background": set(),
    "values": set(),
    "topology": {"networkx", "numpy", "torch"},
    "algorithms": {"torch"},
    "codecs": {"torch"},
    "schedules": set(),
    "comm": {"torch"},
    "rounds": {"torch", "typing_extensions"},
    "peers": {"torch", "yaml", "zmq"},
    "remote": {"torch"},
    "simulation": {"torch"},
    "elastic": {"torch", "torchft"},
    "doctor": set(),
}
# Modules that may import more than their room, when it is installed.
EXTRA = {
    "lightning_loco.topology.draw": {"matplotlib"},
    "lightning_loco.comm.links": {"yaml"},
    # Looks at many values in one thread, without Python's lock; torch would start more threads.
    "lightning_loco.peers.transfer": {"numpy"},
    "lightning_loco.peers.nearness": {"numpy"},
}
# Modules that may use private names of other packages.
MAY_USE_PRIVATE = {
    "lightning_loco.strategies.lightning_private",
    "lightning_loco.comm.groups",
    "lightning_loco.comm.parting",
    "lightning_loco.comm.waiting",
}
# Fused operations on lists of tensors, which the whole of PyTorch's optimizers is built on.
# And the counter of a tensor's changes in place, which autograd's error messages speak of.
PUBLIC_IN_PRACTICE = ("_foreach_", "_version")


def module_name(path: Path) -> str:
    parts = ("lightning_loco", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str, str | None]]:
    """Line, module and name (None for `import module`) of every import, nested ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                yield node.lineno, base, alias.name


def room_of(module: str) -> str:
    return (module.split(".") + [""])[1]


def floor_of(room: str) -> int | None:
    """Number of the floor, from below; None for a room that is not in the table."""
    return next((number for number, rooms in enumerate(FLOORS) if room in rooms), None)


def may_import(room: str, other: str) -> bool:
    """Whether a room may import from another one that is in the table."""
    below = floor_of(other) < floor_of(room)
    return room == other or below or (room, other) in NEIGHBORS


def is_private(name: str) -> bool:
    dunder = name.startswith("__") and name.endswith("__")
    return name.startswith("_") and not dunder and not name.startswith(PUBLIC_IN_PRACTICE)


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    """A sentence for each import or private name in source that its room does not allow."""
    tree = ast.parse(source)
    room = room_of(module)
    if floor_of(room) is None:
        return [f"{module}: room {room!r} has no place in tests/test_layering.py"]
    found = []
    foreign_names = set()
    package = module if is_package else module.rpartition(".")[0]
    for line, target, name in imports(tree, package):
        where = f"{module}:{line}"
        top = target.split(".")[0]
        if top == "lightning_loco":
            is_room = target == "lightning_loco" and name and floor_of(name) is not None
            full = f"{target}.{name}" if is_room else target
            if floor_of(room_of(full)) is None:
                found.append(f"{where}: {full} has no place in tests/test_layering.py")
            elif not may_import(room, room_of(full)):
                found.append(f"{where}: {room or top} must not import {full}")
        elif top not in sys.stdlib_module_names:
            foreign_names |= bound_names(tree, line)
            if top not in FOREIGN.get(room, {top}) | EXTRA.get(module, set()):
                found.append(f"{where}: {room} must not import {top}")
            if module not in MAY_USE_PRIVATE:
                parts = [*target.split("."), *([name] if name else [])]
                found += [f"{where}: private name {part}" for part in parts if is_private(part)]
    if module not in MAY_USE_PRIVATE:
        found += private_attributes(tree, module, foreign_names)
    return found


def bound_names(tree: ast.AST, line: int) -> set[str]:
    """Names that the import statement at this line makes."""
    return {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom) and node.lineno == line
        for alias in node.names
    }


def private_attributes(tree: ast.AST, module: str, foreign: set[str]) -> list[str]:
    """Uses such as torch.distributed._private, where torch was imported from outside."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in foreign:
                found.append(f"{module}:{node.lineno}: private name {ast.unparse(node)}")
    return found


def all_violations() -> list[str]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        is_package = path.name == "__init__.py"
        found += violations(module_name(path), path.read_text(encoding="utf-8"), is_package)
    return found


def test_imports_go_downwards() -> None:
    assert not (found := all_violations()), "\n".join(found)


def test_every_room_of_the_table_exists() -> None:
    rooms = {room_of(module_name(path)) for path in PACKAGE.rglob("*.py")}
    assert rooms == {room for floor in FLOORS for room in floor}


def test_every_pair_of_neighbors_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(NEIGHBORS)
    monkeypatch.setattr(sys.modules[__name__], "NEIGHBORS", set())
    needed = set()
    for text in all_violations():
        room, _, target = text.partition(": ")[2].partition(" must not import ")
        needed.add((room, room_of(target)))
    assert needed == before


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("comm.engine", "from lightning_loco.strategies.loco import LocoStrategy", "strategies"),
        ("comm.engine", "from lightning_loco import strategies", "strategies"),
        ("comm.engine", "from lightning_loco import LocoStrategy", "lightning_loco"),
        ("comm.engine", "from ..callbacks import x", "callbacks"),
        ("rounds.engine", "from lightning_loco.peers import x", "rounds must not import"),
        ("peers.engine", "from lightning_loco.rounds.engine import Engine", "peers must not"),
        ("remote.site", "from lightning_loco import rounds", "lightning_loco.rounds"),
        ("topology.base", "from lightning_loco.algorithms import DiLoCo", "algorithms"),
        ("algorithms.diloco", "from lightning_loco.codecs import Codec", "codecs"),
        ("schedules.base", "from lightning_loco.algorithms import DiLoCo", "schedules must not"),
        ("schedules.base", "import torch", "schedules must not import torch"),
        ("strategies.base", "from lightning_loco.callbacks import x", "callbacks"),
        ("callbacks.x", "from lightning_loco.demo import x", "demo"),
        ("topology.ring", "import matplotlib", "topology must not import matplotlib"),
        ("topology.base", "def f():\n    import lightning_loco.algorithms", "algorithms"),
        ("topology.base", "if TYPE_CHECKING:\n    import lightning", "topology must not import"),
        ("simulation", "from lightning.pytorch import Trainer", "simulation must not import"),
        ("strategies.base", "from lightning.fabric import _private", "private name _private"),
        ("strategies.base", "from torch._utils import x", "private name _utils"),
        ("comm.flat", "import torch.distributed as dist\ndist._get()", "private name dist._get"),
        ("callbacks.a", "import torch\ntorch.cuda._sleep(1)", "private name torch.cuda._sleep"),
        ("doctor.facts", "import torch", "doctor must not import torch"),
        ("helpers.a", "import torch", "no place"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str, expected: str) -> None:
    found = violations(f"lightning_loco.{module}", source)
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("algorithms.gasloc", "from lightning_loco.topology import Ring"),
        ("comm.engine", "from .flat import Chunk"),
        ("comm.flat", "import torch\ntorch._foreach_copy_([], [])\ntorch.__version__"),
        ("comm.groups", "import torch.distributed as dist\ndist._get()"),
        ("strategies.lightning_private", "from lightning.pytorch import _private"),
        ("strategies.base", "from lightning.pytorch import Trainer\nself._private = 1"),
        ("cli", "import lightning_loco"),
        ("callbacks.x", "from lightning_loco.strategies import LocoStrategy"),
        ("simulation", "from lightning_loco.rounds import settings"),
        ("topology.draw", "import matplotlib"),
    ],
)
def test_a_right_import_is_not(module: str, source: str) -> None:
    assert violations(f"lightning_loco.{module}", source) == []
