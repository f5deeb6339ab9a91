"""The table of methods: a name for ``Trainer(strategy="gasloc")`` and ``algorithm=gasloc`` each."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from functools import partial
from typing import Any, ClassVar, NoReturn, get_type_hints

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_loco.algorithms import Algorithm
from lightning_loco.strategies.arguments import (
    RoundArguments,
    common_parameters,
    parameters_of,
    with_signature,
)
from lightning_loco.strategies.loco import LocoStrategy
from lightning_loco.strategies.model_parallel import LocoModelParallelStrategy
from lightning_loco.strategies.named import (
    AsyncDiLoCoStrategy,
    AsyncModelAverageStrategy,
    DiLoCoStrategy,
    EagerDiLoCoStrategy,
    GASLoCStrategy,
    LocalSGDStrategy,
    StreamingDiLoCoStrategy,
)
from lightning_loco.strategies.pairwise import PairwiseGossipStrategy
from lightning_loco.strategies.parameter_server import RemoteOptimizerStrategy

MODEL_PARALLEL = "loco_model_parallel"
"""Name of the strategy that takes a method, and is none itself."""

PACKAGE = "lightning_loco.strategies"
"""Module of the classes, from which pickle imports them by name."""

_DOCSTRING = """{summary}

See :class:`~{algorithm}` for the formula and its arguments, and :class:`LocoStrategy` for
``topology``, ``sync_every`` and the arguments that all strategies share.
"""


class AlgorithmStrategy(LocoStrategy):
    """Base class of the strategies that :func:`of_algorithm` makes."""

    algorithm_type: ClassVar[type[Algorithm]]
    """The algorithm that the strategy runs."""


def of_algorithm(module: str, name: str, sync_every: int = 100) -> type[AlgorithmStrategy]:
    """Make the strategy class of an algorithm, the dataclass ``name``, called ``<name>Strategy``.

    Its arguments are ``topology`` (if the algorithm exchanges with neighbours), ``sync_every``, the
    fields of the algorithm except those that ``prepare`` sets, and the common ones; the default of
    ``sync_every`` is that given here. TypeError if a field has no default;
    ``Trainer(strategy="...")`` gives no arguments.
    """
    algorithm: type[Algorithm] = getattr(importlib.import_module(module), name)
    fields = _fields(algorithm)
    has_topology = algorithm.exchange == "neighbors"
    general = {parameter.name: parameter for parameter in parameters_of(LocoStrategy.__init__)}
    general["sync_every"] = general["sync_every"].replace(default=sync_every)
    before = ["topology", "sync_every"] if has_topology else ["sync_every"]
    parameters = [
        general["self"],
        *(general[one].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for one in before),
        *fields,
        *common_parameters(RoundArguments, LocoStrategy.__init__),
    ]
    parameters.sort(key=lambda parameter: parameter.kind)
    own = {field.name for field in fields}

    def __init__(self: LocoStrategy, **given: Any) -> None:
        values = {key: given.pop(key) for key in own & given.keys()}
        LocoStrategy.__init__(self, algorithm(**values), **{"sync_every": sync_every, **given})

    __init__.__qualname__ = f"{name}Strategy.__init__"
    summary = (algorithm.__doc__ or name).partition("\n")[0]
    namespace = {
        "__init__": with_signature(parameters)(__init__),
        "__module__": PACKAGE,
        "__doc__": _DOCSTRING.format(summary=summary, algorithm=f"{module}.{name}"),
        "algorithm_type": algorithm,
    }
    return type(f"{name}Strategy", (AlgorithmStrategy,), namespace)


def _fields(algorithm: type[Algorithm]) -> list[inspect.Parameter]:
    """Return the hyper-parameters that a user may set."""
    hints = get_type_hints(algorithm)
    prepared = {
        field.name for field in dataclasses.fields(algorithm) if field.metadata.get("prepared")
    }
    parameters = [
        parameter.replace(annotation=hints[name])
        for name, parameter in inspect.signature(algorithm).parameters.items()
        if name not in prepared
    ]
    for parameter in parameters:
        if parameter.default is parameter.empty:
            raise TypeError(
                f"{algorithm.__name__}.{parameter.name} needs a default, because "
                "Trainer(strategy='...') makes the strategy without arguments."
            )
    return parameters


# Each name is also that of a file in conf/algorithm/. An algorithm without arguments of its own for
# the strategy is one line: "noloco": of_algorithm("lightning_loco.algorithms.noloco", "NoLoCo").
METHODS: dict[str, type[DDPStrategy]] = {
    "local_sgd": LocalSGDStrategy,
    "sparta": of_algorithm("lightning_loco.algorithms.sparta", "SPARTA", sync_every=1),
    "diloco": DiLoCoStrategy,
    "async_diloco": AsyncDiLoCoStrategy,
    "streaming_diloco": StreamingDiLoCoStrategy,
    "eager_diloco": EagerDiLoCoStrategy,
    "delayed_nesterov": of_algorithm(
        "lightning_loco.algorithms.delayed_nesterov", "DelayedNesterov"
    ),
    "gasloc": GASLoCStrategy,
    "noloco": of_algorithm("lightning_loco.algorithms.noloco", "NoLoCo"),
    "async_model_average": AsyncModelAverageStrategy,
    "pairwise_gossip": PairwiseGossipStrategy,
    "remote_optimizer": RemoteOptimizerStrategy,
}

# The classes that of_algorithm has made, by name.
ALGORITHM_STRATEGIES = {
    strategy.__name__: strategy
    for strategy in METHODS.values()
    if issubclass(strategy, AlgorithmStrategy)
}

NAMES_ELSEWHERE = {
    "async": "'async_model_average', the algorithm of Bagua, or 'async_diloco', that of PCCL",
    "model_average": "'async_model_average', the algorithm of Bagua",
}
"""Names of methods in other libraries, and what to write instead."""


def _refuse(name: str, instead: str) -> NoReturn:
    raise ValueError(f"There is no strategy={name!r}. Did you mean {instead}?")


def register_strategies() -> None:
    """Register every strategy with Lightning once.

    Methods are also registered as ``<name>_spawn`` and ``<name>_fork``. ``loco_model_parallel`` is
    DiLoCo of workers that shard the model. Names of other libraries raise a ValueError that
    suggests ours.
    """
    for name, instead in NAMES_ELSEWHERE.items():
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, partial(_refuse, name, instead))
    if MODEL_PARALLEL not in StrategyRegistry:
        StrategyRegistry.register(
            MODEL_PARALLEL,
            LocoModelParallelStrategy,
            description="LocoModelParallelStrategy with DiLoCoStrategy()",
        )
    for name, strategy in METHODS.items():
        for suffix, start_method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork")):
            if name + suffix not in StrategyRegistry:
                StrategyRegistry.register(
                    name + suffix,
                    strategy,
                    description=f"{strategy.__name__} with start_method {start_method!r}",
                    start_method=start_method,
                )
