"""Common arguments: defined once, shown by every strategy, refused when misspelt."""

from __future__ import annotations

import inspect
import pydoc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins import AsyncCheckpointIO, Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import get_type_hints

from lightning_loco import (
    AsyncModelAverageStrategy,
    DiLoCoStrategy,
    Link,
    LocalSGD,
    LocoStrategy,
    PairwiseGossipStrategy,
)
from lightning_loco.links import LINKS, Links
from lightning_loco.strategies import METHODS
from lightning_loco.strategies.arguments import CommonArguments, RoundArguments
from lightning_loco.strategies.base import EngineStrategy
from tests.pool import Pool
from tests.small_model import TinyModule, quiet_trainer

WITH_WORKERS = [kind for kind in METHODS.values() if issubclass(kind, EngineStrategy)]


def parameters_of(kind: type) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(kind).parameters)


def test_the_table_has_the_names_and_types_of_the_constructor() -> None:
    table = get_type_hints(RoundArguments)
    shown = parameters_of(LocoStrategy)
    assert {name: shown[name].annotation for name in table} == table
    own = {"algorithm", "sync_every", "overlap", "warm_start", "topology"}
    assert shown.keys() - own == table.keys()
    common = inspect.signature(LocoStrategy._init_with).parameters.keys() - {"self", "settings"}
    assert (
        common
        == table.keys() - {"bucket_bytes", "compression", "membership", "link", "outer_device"}
        == get_type_hints(CommonArguments).keys()
    )


def test_every_strategy_shows_the_common_arguments(subtests: pytest.Subtests) -> None:
    expected = parameters_of(LocoStrategy)
    common = {*get_type_hints(CommonArguments), "link"}
    for kind in WITH_WORKERS:
        with subtests.test(kind.__name__):
            shown = parameters_of(kind)
            assert {name: shown.get(name) for name in common} == {
                name: expected[name] for name in common
            }
            assert all(shown[name].kind is inspect.Parameter.KEYWORD_ONLY for name in common)
            if "sync_every" in shown:
                for name in ("bucket_bytes", "outer_device"):
                    assert shown[name] == expected[name]


def test_annotations_are_types_and_not_strings(subtests: pytest.Subtests) -> None:
    for kind in (LocoStrategy, *WITH_WORKERS):
        with subtests.test(kind.__name__):
            shown = parameters_of(kind)
            assert [name for name, one in shown.items() if isinstance(one.annotation, str)] == []
            assert get_type_hints(kind.__init__).keys() == shown.keys()


def test_help_shows_every_argument() -> None:
    text = pydoc.plain(pydoc.render_doc(DiLoCoStrategy))
    signature = text[text.index("DiLoCoStrategy(") : text.index(" -> None")]
    for name in ("outer_momentum: float = 0.9", "timeout_s: float = 600.0", "start_method"):
        assert name in signature
    assert "common" not in signature


def test_other_arguments_are_refused(subtests: pytest.Subtests) -> None:
    unexpected = "got an unexpected keyword argument"
    rows: list[tuple[type[Any], dict[str, Any], str]] = [
        (DiLoCoStrategy, {"timeout": 3}, f"{unexpected} 'timeout'. Did you mean timeout_s?"),
        (DiLoCoStrategy, {"sync_evry": 3}, f"{unexpected} 'sync_evry'. Did you mean sync_every?"),
        (DiLoCoStrategy, {"overlap": True}, f"{unexpected} 'overlap'"),
        (DiLoCoStrategy, {"settings": 1}, f"{unexpected} 'settings'"),
        (AsyncModelAverageStrategy, {"bucket_bytes": 1}, f"{unexpected} 'bucket_bytes'"),
        (PairwiseGossipStrategy, {"common": {}}, f"{unexpected} 'common'"),
        (LocoStrategy, {"sync_evry": 3}, "missing a required argument: 'algorithm'"),
        (LocoStrategy, {}, "missing a required argument: 'algorithm'"),
    ]
    for kind, arguments, message in rows:
        with subtests.test(kind.__name__, arguments=arguments):
            with pytest.raises(TypeError) as caught:
                kind(**arguments)
            assert str(caught.value) == f"{kind.__name__}.__init__() {message}"


def test_only_a_strategys_own_arguments_may_be_given_by_position() -> None:
    with pytest.raises(TypeError, match="too many positional arguments"):
        DiLoCoStrategy(10, 0.7, 0.9, True, None, "mean", "average")  # type: ignore[misc]
    with pytest.raises(TypeError, match="multiple values for argument 'sync_every'"):
        DiLoCoStrategy(10, sync_every=20)  # type: ignore[misc]


def test_arguments_of_ddp_are_passed_on(subtests: pytest.Subtests) -> None:
    for kind in WITH_WORKERS:
        with subtests.test(kind.__name__):
            given = {
                "accelerator": CPUAccelerator(),
                "cluster_environment": LightningEnvironment(),
                "checkpoint_io": AsyncCheckpointIO(),
                "precision_plugin": Precision(),
            }
            strategy = kind(**given, process_group_backend="gloo", timeout_s=7)
            assert {name: getattr(strategy, name) for name in given} == given
            assert (strategy.process_group_backend, strategy.timeout_s) == ("gloo", 7)


# ---------------------------------------------------------------------------- LightningCLI


CommandLine = Callable[..., LightningCLI]


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """Return a function that runs a user's script with these arguments."""
    # Lightning uses a deprecated name of jsonargparse.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")

    def run(*arguments: str) -> LightningCLI:
        monkeypatch.setattr(sys, "argv", ["script.py", "--trainer.logger=false", *arguments])
        return LightningCLI(
            TinyModule, save_config_callback=None, seed_everything_default=False, run=False
        )

    return run


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(
        """
trainer:
  devices: 2
  accelerator: cpu
  strategy:
    class_path: lightning_loco.DiLoCoStrategy
    init_args: {sync_every: 5, timeout_s: 60, outer_optimizer: torch.optim.AdamW}
"""
    )
    return file


def test_lightning_cli_builds_a_strategy(command_line: CommandLine, config: Path) -> None:
    made = command_line(f"--config={config}", "--trainer.strategy.init_args.outer_lr=0.5")
    strategy = made.trainer.strategy
    assert type(strategy) is DiLoCoStrategy
    assert isinstance(made.model, LightningModule)
    assert strategy.settings.schedule.sync_every == 5
    assert strategy.timeout_s == 60
    assert strategy.settings.algorithm.outer_lr == 0.5


def test_lightning_cli_takes_links(command_line: CommandLine, config: Path) -> None:
    for given, link in (("dsl", LINKS["dsl"]), ("{mbit_per_s: 7}", Link(7))):
        option = f"--trainer.strategy.init_args.link={given}"
        strategy = command_line(f"--config={config}", option).trainer.strategy
        assert strategy.settings.link == Links(link)


def test_lightning_cli_refuses_a_misspelt_argument(
    command_line: CommandLine, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(config.read_text().replace("sync_every", "sync_evry"))
    with pytest.raises(SystemExit):
        command_line(f"--config={config}")
    assert "'sync_evry' is not accepted" in capsys.readouterr().err


def test_lightning_cli_prints_all_arguments(
    command_line: CommandLine, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command_line(f"--config={config}", "--print_config")
    printed = capsys.readouterr().out
    with pytest.raises(SystemExit):
        command_line("--trainer.strategy.help=lightning_loco.DiLoCoStrategy")
    explained = capsys.readouterr().out
    for name in parameters_of(DiLoCoStrategy):
        assert f" {name}:" in printed
        assert f"--trainer.strategy.{name}" in explained
    assert "Longest wait for another worker, in seconds." in explained


def test_lightning_cli_builds_the_composed_strategy(command_line: CommandLine) -> None:
    strategy = command_line(
        "--trainer.strategy=lightning_loco.LocoStrategy",
        "--trainer.strategy.algorithm=lightning_loco.LocalSGD",
        "--trainer.strategy.sync_every=[2,3]",
        "--trainer.accelerator=cpu",
    ).trainer.strategy
    assert type(strategy) is LocoStrategy
    assert strategy.settings.algorithm == LocalSGD()
    assert strategy.settings.schedule.sync_every == [2, 3]


def test_a_notebook_is_told_what_works_in_it(
    monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    kinds = {kind.__name__: (kind, name) for name, kind in METHODS.items()}
    for kind, name in kinds.values():
        with subtests.test(name):
            advice = (
                rf"Use {kind.__name__}\(start_method='fork'\), or Trainer\(strategy='{name}_fork'"
            )
            for strategy in (kind(), name):
                with pytest.raises(MisconfigurationException, match=advice):
                    quiet_trainer(strategy=strategy, devices=2)
            quiet_trainer(strategy=f"{name}_fork", devices=2)
    with pytest.raises(MisconfigurationException, match=r"start_method='fork'\)\.$"):
        quiet_trainer(strategy=LocoStrategy(LocalSGD()), devices=2)
    with pytest.raises(MisconfigurationException, match=r"has none\. Run it as a script\.$"):
        quiet_trainer(strategy="loco_model_parallel", devices=2)


def make_forked(rank: int, world: int) -> str:
    with pytest.raises(MisconfigurationException) as caught:
        quiet_trainer(strategy="diloco_fork", devices=2)
    return str(caught.value)


def test_a_process_with_a_group_is_not_forked(pool: Pool) -> None:
    assert all("from an earlier run" in text for text in pool.run(make_forked, world=2))
