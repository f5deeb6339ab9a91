"""Common arguments: defined once, accepted by every strategy, refused if misspelt."""

from __future__ import annotations

import dataclasses
import inspect
import pydoc
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

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
    NoLoCoStrategy,
    PairwiseGossipStrategy,
    RemoteOptimizerStrategy,
)
from lightning_loco.costs import LINKS, Links
from lightning_loco.costs.methods import METHOD_TABLE
from lightning_loco.engine.settings import RoundOptions, RoundSettings
from lightning_loco.strategies import METHODS
from lightning_loco.strategies.arguments import (
    CommonArguments,
    RoundArguments,
    WorkerArguments,
    argument_names,
)
from lightning_loco.strategies.engine_strategy import EngineStrategy
from tests.harness.pool import Pool
from tests.harness.small_model import TinyModule, quiet_trainer

WITH_WORKERS = [kind for kind in METHODS.values() if issubclass(kind, EngineStrategy)]


def table_of(kind: type) -> Any:
    """Return the table of common arguments that a strategy's signature refers to."""
    *own, common = inspect.signature(kind).parameters.values()
    assert all(one.kind is not inspect.Parameter.VAR_KEYWORD for one in own)
    assert common.kind is inspect.Parameter.VAR_KEYWORD
    (table,) = get_args(get_type_hints(kind.__init__)[common.name])  # type: ignore[misc]
    return table


def types_of(function: Any) -> dict[str, Any]:
    """Return the types of the keyword-only arguments of a function."""
    hints = get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    return {one.name: hints[one.name] for one in parameters if one.kind is one.KEYWORD_ONLY}


def test_the_tables_have_the_names_and_types_of_what_takes_them() -> None:
    worker, common = get_type_hints(WorkerArguments), get_type_hints(CommonArguments)
    assert types_of(EngineStrategy._init_worker) == worker
    assert types_of(EngineStrategy._init_with) | worker == common
    options = get_type_hints(RoundOptions)
    assert common | options == get_type_hints(RoundArguments)
    fields = {field.name: field for field in dataclasses.fields(RoundSettings)}
    assert options.keys() == fields.keys() - {
        "algorithm", "schedule", "topology", "merge_policy", "num_workers",
    }  # fmt: skip


def test_none_of_a_table_is_required(subtests: pytest.Subtests) -> None:
    for table in (WorkerArguments, CommonArguments, RoundOptions, RoundArguments):
        with subtests.test(table.__name__):
            assert table.__optional_keys__ == get_type_hints(table).keys()


def test_every_strategy_takes_the_common_arguments(subtests: pytest.Subtests) -> None:
    for name, kind in METHODS.items():
        with subtests.test(name):
            expected = RoundArguments
            if METHOD_TABLE[name].exchange == "server":
                expected = WorkerArguments
            elif (
                METHOD_TABLE[name].exchange in ("pull", "syncer")
                or kind is AsyncModelAverageStrategy
            ):
                expected = CommonArguments
                assert "link" in argument_names(kind)
            assert table_of(kind) is expected
            own = set(inspect.signature(kind).parameters) - {"common"}
            assert argument_names(kind) == own | get_type_hints(expected).keys()
    assert table_of(LocoStrategy) is RoundArguments


def test_help_shows_the_own_arguments_and_names_the_table() -> None:
    text = pydoc.plain(pydoc.render_doc(DiLoCoStrategy))
    signature = text[text.index("DiLoCoStrategy(") : text.index(" -> None")]
    assert "outer_momentum: 'OuterMomentum' = 'auto'" in signature
    assert "**common: 'Unpack[RoundArguments]'" in signature


def test_help_of_the_table_explains_every_argument() -> None:
    text = pydoc.plain(pydoc.render_doc(RoundArguments))
    assert "Longest wait for another worker, in seconds. Default: 600." in text
    for name in get_type_hints(RoundArguments):
        assert re.search(rf"^ \|      {name}: \S", text, re.MULTILINE), name


def test_other_arguments_are_refused(subtests: pytest.Subtests) -> None:
    rows: list[tuple[type[Any], dict[str, Any]]] = [
        (DiLoCoStrategy, {"timeout": 3}),
        (DiLoCoStrategy, {"sync_evry": 3}),
        (DiLoCoStrategy, {"overlap": True}),
        (DiLoCoStrategy, {"topology": "ring"}),
        (DiLoCoStrategy, {"settings": 1}),
        (DiLoCoStrategy, {"ddp_arguments": {}}),
        (NoLoCoStrategy, {"algorithm": 1}),
        (AsyncModelAverageStrategy, {"bucket_bytes": 1}),
        (PairwiseGossipStrategy, {"common": {}}),
        (RemoteOptimizerStrategy, {"evaluate": "local"}),
        (LocoStrategy, {"algorithm": LocalSGD(), "sync_evry": 3}),
    ]
    for kind, arguments in rows:
        *_, name = arguments
        named = pytest.raises(TypeError, match=f"argument.*'{name}'")
        with subtests.test(kind.__name__, arguments=arguments), named:
            kind(**arguments)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'algorithm'"):
        LocoStrategy(sync_every=3)  # type: ignore[call-arg]


def test_only_a_strategys_own_arguments_may_be_given_by_position() -> None:
    with pytest.raises(TypeError, match="takes from 1 to 7 positional arguments but 8 were given"):
        DiLoCoStrategy(10, 0.7, 0.9, True, None, "mean", "average")  # type: ignore[misc, arg-type]
    with pytest.raises(TypeError, match="multiple values for argument 'sync_every'"):
        DiLoCoStrategy(10, sync_every=20)  # type: ignore[misc]


def test_common_arguments_are_in_the_settings(subtests: pytest.Subtests) -> None:
    options: dict[str, Any] = {
        "compression": "int8",
        "bucket_bytes": 2**20,
        "outer_device": "cpu",
    }
    for name, kind in METHODS.items():
        if table_of(kind) is RoundArguments:
            with subtests.test(name):
                settings = kind(**options, link="wan").settings  # type: ignore[attr-defined]
                assert {key: getattr(settings, key) for key in options} == options
                assert settings.link == Links(LINKS["wan"])
                left = dataclasses.replace(
                    settings, **dict.fromkeys(("compression", "link", "outer_device"))
                )
                assert left == dataclasses.replace(kind().settings, bucket_bytes=2**20)


USER = """
import lightning_loco as loco

loco.DiLoCoStrategy(
    50, outer_lr=0.5, timeout_s=30, compression="int8", start_method="fork", outer_device="cpu"
)
loco.NoLoCoStrategy("ring", sync_every=5, evaluate="local")
loco.SPARTAStrategy(fraction=0.1)
loco.DelayedNesterovStrategy(every=3)
loco.PairwiseGossipStrategy(timeout_s=3, replica_size="node")
loco.RemoteOptimizerStrategy(2, timeout_s=3)
loco.LocoStrategy(loco.NoLoCo(), sync_every=[3, 4], link="wan")
"""
WRONG = {
    "loco.DiLoCoStrategy(timeout=30)": 'did you mean "timeout_s"?',
    "loco.DiLoCoStrategy(timeout_s='30')": 'incompatible type "str"; expected "float"',
    "loco.DiLoCoStrategy(sync_evry=3)": 'did you mean "sync_every"?',
    "loco.DiLoCoStrategy(overlap=True)": 'Unexpected keyword argument "overlap"',
    "loco.NoLoCoStrategy(gossip_step='x')": 'incompatible type "str"; expected "float | None"',
    "loco.PairwiseGossipStrategy(bucket_bytes=3)": 'Unexpected keyword argument "bucket_bytes"',
    "loco.DiLoCoStrateg()": 'has no attribute "DiLoCoStrateg"',
    "loco.LocoStrategy(loco.LocalSGD(), start_method='frok')": "expected \"Literal['popen', ",
}


@pytest.mark.soak
def test_a_type_checker_knows_the_arguments(tmp_path: Path) -> None:
    api = pytest.importorskip("mypy.api")
    file = tmp_path / "user.py"
    file.write_text("\n".join([USER.lstrip(), *WRONG, ""]))
    options = [
        "--strict",
        "--follow-imports=silent",
        f"--cache-dir={tmp_path}/cache",
        "--no-pretty",
    ]
    printed, errors, _ = api.run([*options, str(file)])
    assert not errors
    found = [line for line in printed.splitlines() if ": error: " in line]
    assert len(found) == len(WRONG), printed
    for line, text in zip(found, WRONG.values(), strict=True):
        assert text in line


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


def test_lightning_cli_takes_common_arguments(command_line: CommandLine) -> None:
    strategy = command_line(
        "--trainer.accelerator=cpu",
        "--trainer.strategy=DiLoCoStrategy",
        "--trainer.strategy.timeout_s=30",
        "--trainer.strategy.compression=int8",
        "--trainer.strategy.replica_size=2",
        "--trainer.devices=2",
    ).trainer.strategy
    assert type(strategy) is DiLoCoStrategy
    assert (strategy.timeout_s, strategy.replica_size) == (30, 2)
    assert strategy.settings == DiLoCoStrategy(compression="int8").settings


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
    for name in inspect.signature(DiLoCoStrategy).parameters.keys() - {"common"}:
        assert f" {name}:" in printed
    assert " timeout_s: 60" in printed
    for name in argument_names(DiLoCoStrategy):
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
                rf"Use {kind.__name__}\(start_method='fork'\), or "
                rf"Trainer\(strategy='{name}_notebook'\)"
            )
            for strategy in (kind(), name):
                with pytest.raises(MisconfigurationException, match=advice):
                    quiet_trainer(strategy=strategy, devices=2)
            quiet_trainer(strategy=f"{name}_notebook", devices=2)
    with pytest.raises(MisconfigurationException, match=r"start_method='fork'\)\.$"):
        quiet_trainer(strategy=LocoStrategy(LocalSGD()), devices=2)
    with pytest.raises(MisconfigurationException, match=r"has none\. Run it as a script\.$"):
        quiet_trainer(strategy="loco_model_parallel", devices=2)


def make_forked(rank: int, world: int) -> str:
    with pytest.raises(MisconfigurationException) as caught:
        quiet_trainer(strategy="diloco_notebook", devices=2)
    return str(caught.value)


def test_a_process_with_a_group_is_not_forked(pool: Pool) -> None:
    assert all("from an earlier run" in text for text in pool.run(make_forked, world=2))
