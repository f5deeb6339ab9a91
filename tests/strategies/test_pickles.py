"""The package's messages contain no pickles: its source cannot read one, and no fit does."""

from __future__ import annotations

import ast
import copy
import functools
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy

from lightning_loco import PairwiseGossipStrategy, RemoteOptimizerStrategy
from tests.cases import CASES
from tests.harness.pool import Pool
from tests.harness.small_model import ValidatedModule, make_loader
from tests.harness.sources import PACKAGE, sources
from tests.strategies.families import fit_with

COLLECTIVES = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
)
"""Functions of torch.distributed that pickle their arguments and unpickle received bytes."""

# ------------------------------------------------------------------------------ the source

PICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
OBJECTS = {*COLLECTIVES, "send_pyobj", "recv_pyobj", "allow_pickle"}

GIVES_TO_LIGHTNING = {
    "lightning_loco.callbacks.worker_logs",
    "lightning_loco.integrations.fabric",
    "lightning_loco.strategies.worker_strategy",
}
"""Allowed callers of Lightning's ``Strategy.broadcast``, which pickles: see docs/security.md."""


def findings(module: str, source: str) -> Iterator[str]:
    """Return the expressions that read a pickle, or may, with their lines."""
    for node in ast.walk(ast.parse(source)):
        if any((_imports(node), _reads(node), _loads(node), _gives(module, node))):
            yield f"{module}:{node.lineno}: {ast.unparse(node)}"  # type: ignore[attr-defined]


def _imports(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        names = {node.module or "", *(alias.name for alias in node.names)}
        return bool(names & (PICKLERS | OBJECTS))
    roots = {a.name.partition(".")[0] for a in node.names} if isinstance(node, ast.Import) else ()
    return bool(PICKLERS.intersection(roots))


def _reads(node: ast.AST) -> bool:
    if isinstance(node, ast.keyword):
        return node.arg in OBJECTS
    return isinstance(node, ast.Attribute) and node.attr in OBJECTS


def _loads(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or ast.unparse(node.func) != "torch.load":
        return False
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    return given.get("weights_only") != "True"


def _gives(module: str, node: ast.AST) -> bool:
    is_broadcast = isinstance(node, ast.Attribute) and node.attr == "broadcast"
    of_tensors = is_broadcast and ast.unparse(node).startswith("dist.")  # type: ignore[arg-type]
    return is_broadcast and not of_tensors and module not in GIVES_TO_LIGHTNING


def test_nothing_in_the_source_reads_a_pickle() -> None:
    found = [one for module, source in sources().items() for one in findings(module, source)]
    assert not found, "\n".join(found)


def test_allowances_are_still_needed() -> None:
    texts = sources()
    for module in GIVES_TO_LIGHTNING:
        assert list(findings("elsewhere", texts[module]))


def test_a_way_to_read_one_is_found(subtests: pytest.Subtests) -> None:
    for line in [
        "import pickle",
        "import torch, dill",
        "from pickle import loads",
        "from torch.distributed import all_gather_object",
        "dist.broadcast_object_list(values)",
        "torch.distributed.distributed_c10d.gather_object(value)",
        "socket.recv_pyobj()",
        "numpy.load(path, allow_pickle=True)",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "trainer.strategy.broadcast(value)",
    ]:
        with subtests.test(line):
            assert list(findings("lightning_loco.distributed.worker_group", line))


def test_tensors_and_weights_are_none() -> None:
    assert not list(findings("elsewhere", "dist.broadcast(x, 0)\ntorch.load(f, weights_only=True)"))


# ------------------------------------------------------------------------------- every fit


class Call(NamedTuple):
    """A call of a function that pickles: its name, and the file of the caller."""

    name: str
    file: str

    @property
    def is_ours(self) -> bool:
        return PACKAGE in Path(self.file).parents


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """Record all calls that write or read a pickle, and execute them."""
    calls: list[Call] = []

    def recording(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls.append(Call(name, sys._getframe(1).f_code.co_filename))
            return original(*args, **kwargs)

        return wrapper

    class Unpickler(pickle.Unpickler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            calls.append(Call("Unpickler", sys._getframe(1).f_code.co_filename))
            super().__init__(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            replaced = recording(name, getattr(dist, name))
            patch.setattr(dist, name, replaced)
            patch.setattr(dist.distributed_c10d, name, replaced)
        for name in ("load", "loads"):
            patch.setattr(pickle, name, recording(name, getattr(pickle, name)))
        patch.setattr(pickle, "Unpickler", Unpickler)
        yield calls


def fit(rank: int, world: int, strategy: Strategy, folder: Path) -> list[Call]:
    """Train with validations and checkpoints, and resume where the same group allows it."""
    with recorded() as calls:
        for number in (1, 2):
            saves = ModelCheckpoint(folder / str(number), monitor="val_loss", filename="saved")
            fit_with(
                copy.deepcopy(strategy),
                ValidatedModule(),
                make_loader(rank, 6),
                make_loader(rank, 2),
                ckpt_path=None if number == 1 else str(folder / "1" / "saved.ckpt"),
                max_epochs=number,
                callbacks=[saves],
                enable_checkpointing=True,
            )
            if isinstance(strategy, RemoteOptimizerStrategy):
                break
    return calls


STRATEGIES: dict[str, Strategy] = {
    **{
        name: CASES[name].strategy(2)
        for name in ("diloco", "streaming_diloco", "gasloc", "async_model_average")
    },
    "pairwise_gossip": PairwiseGossipStrategy(timeout_s=30),
    "remote_optimizer": RemoteOptimizerStrategy(2, timeout_s=20),
}


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.soak] if name in ("diloco", "async_model_average") else [],
        )
        for name in STRATEGIES
    ],
)
def test_a_fit_sends_and_reads_no_pickle_but_those_of_lightning(
    pool: Pool, tmp_path: Path, name: str
) -> None:
    results = pool.run(fit, STRATEGIES[name], tmp_path, world=3)
    for calls in results:
        assert not [call for call in calls if call.is_ours]
    # Lightning loads from a path; the record is kept.
    assert "broadcast_object_list" in {call.name for call in results[0]}


CALLS = """
import io, pickle
import torch.distributed as dist

def call(world):
    found = [None] * world
    dist.all_gather_object(found, 3)
    dist.distributed_c10d.broadcast_object_list(found, 0)
    pickle.loads(pickle.dumps(found))
    pickle.Unpickler(io.BytesIO(pickle.dumps(found))).load()
"""


def call_from(rank: int, world: int, file: str) -> list[Call]:
    names: dict[str, Any] = {}
    exec(compile(CALLS, file, "exec"), names)
    with recorded() as calls:
        names["call"](world)
    return calls


def test_a_pickle_of_ours_would_be_seen(pool: Pool) -> None:
    ours, theirs = str(PACKAGE / "engine" / "new.py"), "/elsewhere/lightning_loco.py"
    names = ["all_gather_object", "broadcast_object_list", "loads", "Unpickler"]
    for file in (ours, theirs):
        for calls in pool.run(call_from, file, world=2):
            own = [call for call in calls if call.file == file]
            assert [call.name for call in own] == names
            assert {call.is_ours for call in own} == {file == ours}
