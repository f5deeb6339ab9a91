"""Threads of the package do not overwrite names that threading itself uses."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
import threading
from collections.abc import Iterator

import pytest

from tests.harness.sources import PACKAGE, can_import, module_name

# Names of Python 3.10 to 3.14, so that all versions refuse the same ones, and names for callers.
PUBLIC = {"daemon", "getName", "ident", "isDaemon", "is_alive", "join", "name", "native_id"}
PUBLIC |= {"setDaemon", "setName", "start"}
HIDDEN = {"_after_fork", "_args", "_block", "_bootstrap", "_bootstrap_inner", "_context"}
HIDDEN |= {"_daemonic", "_delete", "_handle", "_ident", "_initialized", "_invoke_excepthook"}
HIDDEN |= {"_is_stopped", "_kwargs", "_name", "_native_id", "_note", "_os_thread_handle"}
HIDDEN |= {"_reset_internal_locks", "_set_ident", "_set_native_id", "_set_os_name"}
HIDDEN |= {"_set_tstate_lock", "_started", "_stderr", "_stop", "_target", "_tstate_lock"}
HIDDEN |= {"_wait_for_tstate_lock"}
MEANT_TO_BE_REPLACED = {"__init__", "__doc__", "__module__", "run"}


def names_of(kind: type) -> set[str]:
    """Return the names that a class defines, or sets on ``self``."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    found = set(vars(kind))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return found - {name for name in found if name.startswith("__") and name != "__init__"}


def threads() -> Iterator[type[threading.Thread]]:
    """Return all kinds of threads in the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if "Thread" in path.read_text(encoding="utf-8") and can_import(module_name(path)):
            importlib.import_module(module_name(path))
    kinds = list(threading.Thread.__subclasses__())
    for kind in kinds:
        kinds += kind.__subclasses__()
    yield from (kind for kind in kinds if kind.__module__.startswith("lightning_loco"))


def test_no_thread_shadows_a_name_of_threading(subtests: pytest.Subtests) -> None:
    reserved = PUBLIC | HIDDEN | names_of(threading.Thread)
    for kind in threads():
        with subtests.test(kind.__name__):
            assert names_of(kind) & reserved <= MEANT_TO_BE_REPLACED


class Shadowing(threading.Thread):
    def __init__(self) -> None:
        super().__init__()
        self._handle = None

    def run(self) -> None:
        """Override a method that is meant to be overridden."""


def test_a_shadowed_name_is_found() -> None:
    assert names_of(Shadowing) & (PUBLIC | HIDDEN) == {"_handle"}


def test_the_names_of_this_python_are_in_the_table() -> None:
    assert names_of(threading.Thread) - MEANT_TO_BE_REPLACED <= PUBLIC | HIDDEN
