"""The public API: names, defaults, registry strings, version, types."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import pickle
import re
import runpy
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

import lightning_loco as loco
from lightning_loco.strategies import METHODS, registry
from lightning_loco.strategies.arguments import argument_names
from lightning_loco.strategies.engine_strategy import EngineStrategy

# Stable arguments and defaults; further ones may follow.
STRATEGIES = {
    "LocalSGDStrategy": ("local_sgd", {"sync_every": 100}),
    "DiLoCoStrategy": (
        "diloco",
        {
            "sync_every": 100,
            "outer_lr": 0.7,
            "outer_momentum": "auto",
            "nesterov": True,
            "outer_optimizer": None,
        },
    ),
    "AsyncDiLoCoStrategy": (
        "async_diloco",
        {
            "sync_every": 100,
            "outer_lr": 0.7,
            "outer_momentum": None,
            "warm_start": None,
            "fragments": "auto",
            "delay": None,
            "mix": None,
        },
    ),
    "StreamingDiLoCoStrategy": (
        "streaming_diloco",
        {
            "sync_every": 100,
            "fragments": "auto",
            "delay": "auto",
            "mix": 0.25,
            "outer_lr": 0.7,
            "outer_momentum": "auto",
            "nesterov": True,
            "outer_optimizer": None,
            "pattern": "strided",
        },
    ),
    "GASLoCStrategy": (
        "gasloc",
        {
            "topology": "ring",
            "sync_every": 100,
            "outer_lr": 0.7,
            "gossip_step": "auto",
            "momentum": "auto",
            "momentum_on": "gossiped",
        },
    ),
}
LOCO_DEFAULTS = {
    "sync_every": 100,
    "overlap": False,
    "topology": None,
}
COMMON = {"evaluate": "average", "finalize": "average", "timeout_s": 600}


def test_all_names_exist() -> None:
    assert len(set(loco.__all__)) == len(loco.__all__)
    assert [name for name in loco.__all__ if not hasattr(loco, name)] == []
    assert {"LocoStrategy", *STRATEGIES, "LocalSGD", "DiLoCo", "GASLoC"} <= set(loco.__all__)


def test_every_public_class_has_a_docstring() -> None:
    classes = filter(inspect.isclass, (getattr(loco, name) for name in loco.__all__))
    assert [cls.__name__ for cls in classes if not cls.__dict__.get("__doc__")] == []


def test_version_is_that_of_the_distribution() -> None:
    assert loco.__version__ == importlib.metadata.version("lightning-loco")


def test_types_are_shipped() -> None:
    assert Path(loco.__file__).with_name("py.typed").is_file()


def test_arguments_and_defaults(subtests: pytest.Subtests) -> None:
    for name, (_, expected) in STRATEGIES.items():
        with subtests.test(name):
            parameters = inspect.signature(getattr(loco, name)).parameters
            assert {key: parameters[key].default for key in expected} == expected
            kinds = {key: parameter.kind for key, parameter in parameters.items()}
            assert inspect.Parameter.VAR_POSITIONAL not in kinds.values()
            assert list(kinds)[-1] == "common"
            assert argument_names(getattr(loco, name)) >= COMMON.keys()


def test_arguments_and_defaults_of_the_composed_strategy() -> None:
    first, *others, _ = inspect.signature(loco.LocoStrategy).parameters.values()
    assert first.name == "algorithm"
    assert {parameter.kind for parameter in others} == {inspect.Parameter.KEYWORD_ONLY}
    defaults = {parameter.name: parameter.default for parameter in others}
    assert {key: defaults[key] for key in LOCO_DEFAULTS} == LOCO_DEFAULTS
    strategy = loco.LocoStrategy(loco.LocalSGD())
    assert {key: getattr(strategy, key) for key in COMMON} == COMMON


def test_misspelt_arguments_are_refused(subtests: pytest.Subtests) -> None:
    for name in STRATEGIES:
        words = f"{name} has no argument 'sync_evry'. Did you mean sync_every?"
        with subtests.test(name), pytest.raises(TypeError, match=re.escape(words)):
            getattr(loco, name)(sync_evry=3)


def test_strategies_can_be_sent_to_other_processes(subtests: pytest.Subtests) -> None:
    for name in STRATEGIES:
        with subtests.test(name):
            strategy = getattr(loco, name)(sync_every=7)
            assert isinstance(strategy, DDPStrategy)
            assert isinstance(strategy, EngineStrategy)
            assert type(pickle.loads(pickle.dumps(strategy))) is type(strategy)


def test_a_trainer_takes_the_registry_string(subtests: pytest.Subtests) -> None:
    for cls, (name, _) in STRATEGIES.items():
        with subtests.test(name):
            trainer = Trainer(strategy=name, accelerator="cpu", devices=2, logger=False)
            assert type(trainer.strategy) is getattr(loco, cls)
            assert trainer.strategy.launcher.is_interactive_compatible is False


def test_the_variable_of_the_commands_does_not_unregister_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For example in a child process, or for a user who has set the variable."""
    registered: list[str] = []
    monkeypatch.setattr(registry, "register_strategies", lambda: registered.append(process))
    for process in (str(os.getpid()), "1", str(os.getppid())):
        monkeypatch.setenv("LIGHTNING_LOCO_LAZY", process)
        runpy.run_path(str(loco.__file__))
    assert registered == ["1", str(os.getppid())]


def test_names_for_notebooks_fork(subtests: pytest.Subtests) -> None:
    for cls, (name, _) in STRATEGIES.items():
        with subtests.test(name):
            trainer = Trainer(
                strategy=f"{name}_notebook", accelerator="cpu", devices=2, logger=False
            )
            assert type(trainer.strategy) is getattr(loco, cls)
            assert trainer.strategy.launcher._start_method == "fork"


def test_the_registry_has_a_name_and_one_for_notebooks_of_each_method() -> None:
    ours = {
        name
        for name, entry in StrategyRegistry.items()
        if entry["strategy"].__module__.startswith("lightning_loco.")
    }
    assert ours == {*METHODS, *(f"{name}_notebook" for name in METHODS), "loco_model_parallel"}
