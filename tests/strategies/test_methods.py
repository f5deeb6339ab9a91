"""The table of methods agrees with classes, configurations and pages; a new method adds a row."""

from __future__ import annotations

import dataclasses
import inspect
import os
import pkgutil
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

import lightning_loco as loco
from lightning_loco import algorithms, strategies
from lightning_loco._util.codecs import CODEC_TABLE
from lightning_loco.algorithms import Algorithm
from lightning_loco.algorithms.algorithm import RoundInfo, State
from lightning_loco.compression import CODECS
from lightning_loco.costs.methods import METHOD_TABLE
from lightning_loco.strategies import METHODS
from lightning_loco.topology import Topology
from tests.harness.pages import benchmark_results
from tests.harness.programs import python_path
from tests.harness.sources import ROOT


def test_classes_of_a_row_exist(subtests: pytest.Subtests) -> None:
    assert list(METHODS) == [name for name in METHOD_TABLE if name != "ddp"]
    for name, kind in METHODS.items():
        with subtests.test(name):
            row = METHOD_TABLE[name]
            assert kind.__name__ == row.strategy_name
            assert getattr(loco, row.strategy_name) is getattr(strategies, kind.__name__) is kind
            if row.algorithm is not None:
                algorithm = getattr(algorithms, row.algorithm)
                assert type(kind().settings.algorithm) is algorithm  # type: ignore[attr-defined]
                assert algorithm.exchange == row.exchange
                assert row.topology == (row.defaults.get("topology") or algorithm.default_topology)


def test_a_row_has_the_defaults_of_the_class(subtests: pytest.Subtests) -> None:
    for name, kind in METHODS.items():
        with subtests.test(name):
            row = METHOD_TABLE[name]
            if row.settings is None:
                assert row.exchange == "server"
                continue
            own = dict(inspect.signature(kind).parameters)
            del own["common"]
            assert {key: one.default for key, one in own.items()} == row.defaults
            assert row.demo.keys() <= row.defaults.keys()


def test_the_function_of_a_row_makes_the_settings_of_the_class(subtests: pytest.Subtests) -> None:
    for name, row in METHOD_TABLE.items():
        if row.settings is not None:
            with subtests.test(name):
                make = pkgutil.resolve_name(row.settings)
                assert list(inspect.signature(make).parameters) == list(row.defaults)
                settings = METHODS[name]().settings  # type: ignore[attr-defined]
                assert make(**row.defaults) == settings


def test_a_row_has_a_configuration_and_a_page(subtests: pytest.Subtests) -> None:
    files = {file.stem for file in (ROOT / "conf" / "algorithm").glob("[!_]*.yaml")}
    assert files == METHOD_TABLE.keys()
    for name, kind in METHODS.items():
        with subtests.test(name):
            given = OmegaConf.load(ROOT / "conf" / "algorithm" / f"{name}.yaml")
            assert given._target_ == f"lightning_loco.{kind.__name__}"
            page = (ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")
            assert page.startswith(f"# {METHOD_TABLE[name].title}\n")


def test_measured_gaps_are_those_of_the_benchmark(subtests: pytest.Subtests) -> None:
    ddp = benchmark_results("ddp", "bytes")
    rows = {
        ("decoupled_diloco", ""): "decoupled",
        ("diloco", "sparse"): "diloco_sparse",
        ("gasloc", "ring"): "gasloc_ring",
        ("gasloc", "random_matching"): "gasloc_pairs",
    }
    for name, row in METHOD_TABLE.items():
        for key, gap in row.gaps.items():
            with subtests.test(name, key=key):
                found = benchmark_results(rows.get((name, key), name), "bytes")
                gaps = [100 * (one["loss"] / ddp[seed]["loss"] - 1) for seed, one in found.items()]
                assert gap == round(statistics.fmean(gaps), 1)


def test_rows_of_codecs_are_those_of_their_classes(subtests: pytest.Subtests) -> None:
    files = {file.stem for file in (ROOT / "conf" / "compression").glob("*.yaml")}
    assert files == CODEC_TABLE.keys() == {"none", *CODECS}
    for name, kind in CODECS.items():
        with subtests.test(name):
            row, codec = CODEC_TABLE[name], kind()
            assert row.encoding == (codec.block, codec.row_bytes, codec.is_sparse)
            file = ROOT / "conf" / "compression" / f"{name}.yaml"
            assert row.title in file.read_text(encoding="utf-8")
            given = OmegaConf.load(file)
            assert given._target_ == f"lightning_loco.compression.{kind.__name__}"
            fields = dataclasses.fields(codec)  # type: ignore[arg-type]
            for field in fields:
                assert given[field.name] == getattr(codec, field.name)


# ---------------------------------------------------------------- a new method


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

    def update(
        self,
        local: Tensor | None,
        message: Tensor | None,
        received: Tensor,
        state: State,
        info: RoundInfo,
    ) -> Tensor:
        assert message is not None
        return torch.lerp(message, received, self.part, out=state["start"])


MODULE = f"""
from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from lightning_loco.algorithms.algorithm import Algorithm, RoundInfo, State
from lightning_loco.topology import Topology


{inspect.getsource(Blend)}"""
SETTINGS = '''

def blend(
    topology: Any | None, sync_every: SyncEvery, part: float, kind: Literal["plain", "fancy"]
) -> RoundSettings:
    """Return the settings of BlendStrategy."""
    from lightning_loco.algorithms.blend import Blend

    return RoundSettings(Blend(part, kind), by_steps(sync_every), topology)
'''
STRATEGY = '''

class BlendStrategy(LocoStrategy):
    """Move a part of the way to the mean of the neighbours."""

    def __init__(
        self,
        topology: Topology | str | Any | None = None,
        sync_every: SyncEvery = 100,
        part: float = 0.5,
        kind: Literal["plain", "fancy"] = "plain",
        **common: Unpack[RoundArguments],
    ) -> None:
        from lightning_loco.engine.method_settings import blend

        self._init_rounds(blend(topology, sync_every, part, kind), **common)
'''
ROW = """
METHOD_TABLE["blend"] = KnownMethod(
    title="Blend",
    strategy=f"{_NAMED}.BlendStrategy",
    algorithm="Blend",
    exchange="neighbors",
    defaults={"topology": None, "sync_every": 100, "part": 0.5, "kind": "plain"},
    settings=f"{_ROUNDS}.blend",
    topology="ring",
)
"""
EXPORT = "\nfrom lightning_loco.strategies.named import BlendStrategy\n"
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

assert loco.strategies.METHODS["blend"] is loco.BlendStrategy
for name, start_method in [("blend", "popen"), ("blend_notebook", "fork")]:
    strategy = Trainer(strategy=name, accelerator="cpu", devices=2, logger=False).strategy
    assert type(pickle.loads(pickle.dumps(loco.BlendStrategy()))) is type(strategy)
    assert type(strategy) is loco.BlendStrategy
    assert strategy._start_method == start_method
assert loco.BlendStrategy("star", 5, 0.25, timeout_s=3).settings.topology == "star"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a copy of the package with an additional method."""
    for folder in ("lightning_loco", "conf"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__py*"))
    shutil.copy(ROOT / "train.py", tmp_path)
    package = tmp_path / "lightning_loco"
    (package / "algorithms" / "blend.py").write_text(MODULE)
    (tmp_path / "conf" / "algorithm" / "blend.yaml").write_text(CONFIG)
    for path, text in (
        ("engine/method_settings.py", SETTINGS),
        ("strategies/named.py", STRATEGY),
        ("costs/methods.py", ROW),
        ("__init__.py", EXPORT),
    ):
        file = package / path
        file.write_text(file.read_text(encoding="utf-8") + text, encoding="utf-8")
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
def test_an_algorithm_a_class_a_row_and_a_config_are_enough(checkout: Path) -> None:
    run("-c", USE, cwd=checkout)
    printed = run(
        "train.py", "experiment=smoke", "algorithm=blend", "trainer.devices=1", cwd=checkout
    )
    assert "No topology chosen: BlendStrategy uses its algorithm's." in printed
