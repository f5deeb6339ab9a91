"""A new algorithm is one module, one configuration and one line of the table of methods."""

from __future__ import annotations

import dataclasses
import inspect
import os
import pickle
import pydoc
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_loco import LocoStrategy, strategies
from lightning_loco.algorithms import Algorithm
from lightning_loco.algorithms.base import RoundInfo, State
from lightning_loco.schedules import SyncEvery
from lightning_loco.strategies import registry
from lightning_loco.strategies.registry import AlgorithmStrategy, of_algorithm
from lightning_loco.topology import Topology
from tests.conftest import ROOT
from tests.pool import Pool, make_trainer
from tests.programs import python_path
from tests.small_model import TinyModule, flat, make_loader


@dataclasses.dataclass(frozen=True)
class Blend(Algorithm):
    """Move a part of the way to the mean of the neighbours.

    Args:
        part: How far, in (0, 1]; 1 is
            the mean itself.
        kind: ``"plain"``, or ``"fancy"`` for nothing else.
        num_neighbors: Set by :meth:`prepare`.

    Source:
        This is not documented.
    """

    part: float = 0.5
    kind: Literal["plain", "fancy"] = "plain"
    num_neighbors: int = dataclasses.field(default=0, metadata={"prepared": True})
    is_loud: bool = dataclasses.field(default=False, kw_only=True)

    exchange = "neighbors"
    start_key = "start"
    default_topology = "ring"

    def __post_init__(self) -> None:
        if not 0 < self.part <= 1:
            raise ValueError(f"part must be in (0, 1], got {self.part}.")

    def prepare(
        self, num_workers: int, topology: Topology | None, *, is_late: bool = False
    ) -> Blend:
        return dataclasses.replace(self, num_neighbors=num_workers - 1)

    def init(self, params: Tensor) -> State:
        return {"start": params}

    def propose(self, params: Tensor, state: State, info: RoundInfo) -> Tensor:
        return params

    def update(self, params: Tensor, received: Tensor, state: State, info: RoundInfo) -> Tensor:
        return torch.lerp(params, received, self.part, out=state["start"])


@dataclasses.dataclass(frozen=True)
class MeanBlend(Blend):
    exchange = "mean"


@dataclasses.dataclass(frozen=True)
class Undecided(Blend):
    much: float = dataclasses.field(kw_only=True)


@pytest.fixture
def blend(monkeypatch: pytest.MonkeyPatch) -> type[AlgorithmStrategy]:
    """Make the strategy, and add it to the package as the registry does."""
    made = of_algorithm(__name__, "Blend")
    monkeypatch.setattr(strategies, "BlendStrategy", made, raising=False)
    return made


def test_its_arguments_are_those_of_the_algorithm_and_the_common_ones(
    blend: type[AlgorithmStrategy],
) -> None:
    parameters = inspect.signature(blend).parameters
    general = inspect.signature(LocoStrategy).parameters
    for name, annotation, default in (
        ("topology", general["topology"].annotation, None),
        ("sync_every", SyncEvery, 100),
        ("part", float, 0.5),
        ("kind", Literal["plain", "fancy"], "plain"),
        ("is_loud", bool, False),
    ):
        assert (parameters[name].annotation, parameters[name].default) == (annotation, default)
    positional = ["topology", "sync_every", "part", "kind"]
    assert list(parameters)[:4] == positional
    for name, parameter in parameters.items():
        keyword_only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert keyword_only == (name not in positional)
    assert parameters.keys() - {*positional, "is_loud"} == general.keys() - {
        "algorithm", "sync_every", "overlap", "warm_start", "topology",
    }  # fmt: skip


def test_an_exchange_without_neighbours_has_no_topology() -> None:
    parameters = inspect.signature(of_algorithm(__name__, "MeanBlend")).parameters
    assert list(parameters)[:2] == ["sync_every", "part"]
    assert "topology" not in parameters


def test_its_values_are_in_the_settings(blend: type[AlgorithmStrategy]) -> None:
    strategy = blend("star", 5, 0.25, is_loud=True, timeout_s=3)
    assert isinstance(strategy, LocoStrategy)
    assert strategy.settings.algorithm == Blend(0.25, is_loud=True)
    assert (strategy.settings.topology, strategy.settings.schedule.sync_every) == ("star", 5)
    assert strategy.timeout_s == 3
    assert blend().settings == LocoStrategy(Blend()).settings


def test_other_arguments_are_refused(
    blend: type[AlgorithmStrategy], subtests: pytest.Subtests
) -> None:
    hints = {"prat": ". Did you mean part?", "num_neighbors": "", "overlap": "", "algorithm": ""}
    for name, hint in hints.items():
        with subtests.test(name):
            with pytest.raises(TypeError) as caught:
                blend(**{name: 1})
            text = f"BlendStrategy.__init__() got an unexpected keyword argument '{name}'"
            assert str(caught.value) == text + hint


def test_values_are_checked_at_construction(blend: type[AlgorithmStrategy]) -> None:
    with pytest.raises(ValueError, match="part must be in"):
        blend(part=2.0)
    with pytest.raises(ValueError, match="timeout_s must be positive"):
        blend(timeout_s=0)


def test_a_field_needs_a_default() -> None:
    with pytest.raises(TypeError, match="Undecided.much needs a default"):
        of_algorithm(__name__, "Undecided")


def test_help_shows_the_arguments(blend: type[AlgorithmStrategy]) -> None:
    assert blend.__doc__ is not None
    assert blend.__doc__.startswith("Move a part of the way to the mean of the neighbours.\n\nSee")
    assert f":class:`~{__name__}.Blend` for the formula" in blend.__doc__
    text = pydoc.plain(pydoc.render_doc(blend))
    signature = text[text.index("BlendStrategy(") : text.index(" -> None")]
    assert "part: float = 0.5" in signature
    assert "timeout_s: float = 600.0" in signature


def test_it_can_be_sent_to_other_processes(blend: type[AlgorithmStrategy]) -> None:
    strategy = blend("star", part=0.25)
    copy = pickle.loads(pickle.dumps(strategy))
    assert type(copy) is blend
    assert copy.settings == strategy.settings


def test_a_trainer_accepts_it(blend: type[AlgorithmStrategy]) -> None:
    trainer = Trainer(strategy=blend(sync_every=7), accelerator="cpu", devices=2, logger=False)
    assert type(trainer.strategy) is blend
    assert trainer.strategy.num_workers == 2


def train(rank: int, world: int, made: bool) -> list[float]:
    strategy: LocoStrategy
    if made:
        strategy = of_algorithm(__name__, "Blend")("ring", 2, part=0.25)
    else:
        strategy = LocoStrategy(Blend(0.25), topology="ring", sync_every=2)
    module = TinyModule()
    trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module, make_loader(rank, 6))
    return flat(module).tolist()


def test_it_trains_like_the_composed_strategy(pool: Pool) -> None:
    assert pool.run(train, True, world=2) == pool.run(train, False, world=2)


# --------------------------------------------------------- one module, one config, one line

MODULE = f"""
from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from lightning_loco.algorithms.base import Algorithm, RoundInfo, State
from lightning_loco.topology import Topology


{inspect.getsource(Blend)}"""
LINE = '    "blend": of_algorithm("lightning_loco.algorithms.blend", "Blend"),\n'
CONFIG = """
_target_: lightning_loco.BlendStrategy
_convert_: all
sync_every: 2
part: 0.25
start_method: popen
"""
USE = """
import pickle

from lightning.pytorch import Trainer
import lightning_loco as loco
from lightning_loco import Blend, BlendStrategy, algorithms, strategies

for package, names in [
    (loco, {"Blend", "BlendStrategy"}), (algorithms, {"Blend"}), (strategies, {"BlendStrategy"})
]:
    assert names <= set(package.__all__) <= set(dir(package)), package
    assert len(set(package.__all__)) == len(package.__all__)
assert algorithms.Blend is Blend
assert strategies.BlendStrategy is BlendStrategy
assert strategies.METHODS["blend"] is BlendStrategy
for name, start_method in [("blend", "popen"), ("blend_spawn", "spawn"), ("blend_fork", "fork")]:
    strategy = Trainer(strategy=name, accelerator="cpu", devices=2, logger=False).strategy
    assert type(pickle.loads(pickle.dumps(BlendStrategy()))) is type(strategy) is BlendStrategy
    assert strategy._start_method == start_method
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the package with one more algorithm."""
    for folder in ("lightning_loco", "conf"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__py*"))
    shutil.copy(ROOT / "train.py", tmp_path)
    (tmp_path / "lightning_loco" / "algorithms" / "blend.py").write_text(MODULE)
    (tmp_path / "conf" / "algorithm" / "blend.yaml").write_text(CONFIG)
    table = tmp_path / "lightning_loco" / "strategies" / "registry.py"
    before, row, after = table.read_text().partition('    "async_model_average": ')
    table.write_text(before + LINE + row + after)
    return tmp_path


def run(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": python_path(cwd), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.soak
@pytest.mark.process
def test_a_module_a_config_and_a_line_are_enough(checkout: Path) -> None:
    run("-c", USE, cwd=checkout)
    printed = run(
        "train.py", "experiment=smoke", "algorithm=blend", "trainer.devices=1", cwd=checkout
    )
    assert "No topology chosen: BlendStrategy uses that of its algorithm." in printed


def test_every_strategy_of_the_table_is_in_the_package() -> None:
    for kind in registry.METHODS.values():
        found: Any = getattr(strategies, kind.__name__)
        assert found is kind
