"""The table of methods, which registry, costs, planner, early checks and pages read.

It is read before PyTorch and Lightning are imported, so classes and functions are import paths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class KnownMethod:
    """A row of the table of methods.

    Attributes:
        title: Its name in tables.
        strategy: Its class, as an import path.
        algorithm: Name of a class in ``lightning_loco.algorithms``, which a round computes.
        exchange: How messages move.
        defaults: The strategy's own arguments with their defaults.
        demo: Arguments that ``conf/algorithm`` has instead of the defaults, because the demo is
            short.
        settings: Function that checks the own arguments and returns the settings, as an import
            path. It gets the ones of ``defaults`` that are its arguments.
        costs: How the cost model runs its rounds: after every local step, as blocking rounds, or
            as fragments of async or of streaming DiLoCo. None if it does not know the method.
        topology: Name of the default topology, if workers exchange with neighbors.
        elastic: Whether workers may join and leave (``membership``).
        gaps: Measured loss relative to DDP, in percent, by the name of the codec or of the
            topology; ``""`` for all others (docs/results/low_communication.md).
    """

    title: str
    strategy: str
    algorithm: str | None
    exchange: Literal["mean", "neighbors", "pull", "server", "syncer"]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    demo: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settings: str | None = None
    costs: Literal["every_step", "blocking", "async", "streaming"] | None = None
    topology: str | None = None
    elastic: bool = False
    gaps: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def strategy_name(self) -> str:
        """Name of the strategy's class, under which ``lightning_loco`` exports it."""
        return self.strategy.rpartition(".")[2]


_NAMED = "lightning_loco.strategies.named"
_ROUNDS = "lightning_loco.engine.method_settings"

METHOD_TABLE = {
    "ddp": KnownMethod(
        title="DDP",
        strategy="lightning.pytorch.strategies.DDPStrategy",
        algorithm=None,
        exchange="mean",
        costs="every_step",
    ),
    "local_sgd": KnownMethod(
        title="Local SGD",
        strategy=f"{_NAMED}.LocalSGDStrategy",
        algorithm="LocalSGD",
        exchange="mean",
        defaults={"sync_every": 100},
        demo={"sync_every": 10},
        settings=f"{_ROUNDS}.local_sgd",
        costs="blocking",
        elastic=True,
        gaps={"": 8.6},
    ),
    "sparta": KnownMethod(
        title="SPARTA",
        strategy=f"{_NAMED}.SPARTAStrategy",
        algorithm="SPARTA",
        exchange="mean",
        defaults={"sync_every": 1, "fraction": 0.005, "seed": 0},
        settings=f"{_ROUNDS}.sparta",
    ),
    "diloco": KnownMethod(
        title="DiLoCo",
        strategy=f"{_NAMED}.DiLoCoStrategy",
        algorithm="DiLoCo",
        exchange="mean",
        defaults={
            "sync_every": 100,
            "outer_lr": 0.7,
            "outer_momentum": "auto",
            "nesterov": True,
            "outer_optimizer": None,
            "aggregate": "mean",
        },
        demo={"sync_every": 10},
        settings=f"{_ROUNDS}.diloco",
        costs="blocking",
        elastic=True,
        gaps={"": 3.0, "sparse": 6.6},
    ),
    "async_diloco": KnownMethod(
        title="Async DiLoCo",
        strategy=f"{_NAMED}.AsyncDiLoCoStrategy",
        algorithm="DiLoCo",
        exchange="mean",
        defaults={
            "sync_every": 100,
            "outer_lr": 0.7,
            "outer_momentum": None,
            "nesterov": True,
            "outer_optimizer": None,
            "warm_start": None,
            "fragments": "auto",
            "delay": None,
            "mix": None,
        },
        demo={"sync_every": 10},
        settings=f"{_ROUNDS}.async_diloco",
        costs="async",
        elastic=True,
    ),
    "streaming_diloco": KnownMethod(
        title="Streaming DiLoCo",
        strategy=f"{_NAMED}.StreamingDiLoCoStrategy",
        algorithm="DiLoCo",
        exchange="mean",
        defaults={
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
        demo={"sync_every": 10, "fragments": 2, "delay": 1},
        settings=f"{_ROUNDS}.streaming_diloco",
        costs="streaming",
        elastic=True,
    ),
    "eager_diloco": KnownMethod(
        title="Eager DiLoCo",
        strategy=f"{_NAMED}.EagerDiLoCoStrategy",
        algorithm="EagerDiLoCo",
        exchange="mean",
        defaults={
            "sync_every": 100,
            "outer_lr": 0.7,
            "outer_momentum": 0.0,
            "nesterov": True,
            "warm_start": True,
        },
        demo={"sync_every": 10},
        settings=f"{_ROUNDS}.eager_diloco",
    ),
    "delayed_nesterov": KnownMethod(
        title="Delayed Nesterov",
        strategy=f"{_NAMED}.DelayedNesterovStrategy",
        algorithm="DelayedNesterov",
        exchange="mean",
        defaults={
            "sync_every": 100,
            "outer_lr": 1.4,
            "outer_momentum": 0.5,
            "every": 2,
            "between": 0.0,
        },
        demo={"sync_every": 10},
        settings=f"{_ROUNDS}.delayed_nesterov",
        elastic=True,
    ),
    "gasloc": KnownMethod(
        title="GASLoC",
        strategy=f"{_NAMED}.GASLoCStrategy",
        algorithm="GASLoC",
        exchange="neighbors",
        defaults={
            "topology": "ring",
            "sync_every": 100,
            "outer_lr": 0.7,
            "gossip_step": "auto",
            "momentum": "auto",
            "momentum_on": "gossiped",
        },
        demo={"sync_every": 10},
        settings=f"{_ROUNDS}.gasloc",
        costs="blocking",
        topology="ring",
        gaps={"ring": 8.9, "random_matching": 10.8},
    ),
    "noloco": KnownMethod(
        title="NoLoCo",
        strategy=f"{_NAMED}.NoLoCoStrategy",
        algorithm="NoLoCo",
        exchange="neighbors",
        defaults={
            "topology": None,
            "sync_every": 100,
            "outer_momentum": 0.5,
            "outer_lr": 0.7,
            "gossip_step": None,
        },
        demo={"sync_every": 10},
        settings=f"{_ROUNDS}.noloco",
        costs="blocking",
        topology="random_matching",
        gaps={"random_matching": 9.3},
    ),
    "async_model_average": KnownMethod(
        title="Asynchronous model average",
        strategy=f"{_NAMED}.AsyncModelAverageStrategy",
        algorithm="ModelAverage",
        exchange="mean",
        defaults={
            "interval_s": 0.5,
            "warmup_steps": 0,
            "topology": None,
            "compression": None,
            "link": None,
        },
        settings=f"{_ROUNDS}.async_model_average",
    ),
    "pairwise_gossip": KnownMethod(
        title="Pairwise gossip",
        strategy="lightning_loco.strategies.pairwise_gossip.PairwiseGossipStrategy",
        algorithm="PairwiseAverage",
        exchange="pull",
        defaults={
            "fetch_probability": 0.1,
            "interpolation": "constant",
            "factor": 0.3,
            "divergence_threshold": 0.0,
            "fetch_timeout_s": 2.5,
            "nodes": None,
            "name": None,
            "key_file": None,
            "compression": None,
            "keep_progress": True,
            "config_file": None,
            "link": None,
        },
        settings="lightning_loco.gossip.settings.pairwise_gossip",
    ),
    "decoupled_diloco": KnownMethod(
        title="Decoupled DiLoCo",
        strategy="lightning_loco.strategies.decoupled_diloco.DecoupledDiLoCoStrategy",
        algorithm="DecoupledDiLoCo",
        exchange="syncer",
        defaults={
            "sync_every": 24,
            "fragments": 24,
            "delay": 2,
            "min_quorum": 1,
            "outer_lr": 0.7,
            "outer_momentum": "auto",
            "nesterov": True,
            "outer_optimizer": None,
            "aggregate": "radial",
            "weight": "tokens",
            "mix": 0.0,
            "correction": None,
            "grace": 0.8,
            "keep_late": True,
            "syncer": None,
            "key_file": None,
            "name": None,
            "count_tokens": None,
            "compression": None,
            "link": None,
        },
        settings="lightning_loco.syncer.settings.decoupled_diloco",
        gaps={"": 4.4},
    ),
    "remote_optimizer": KnownMethod(
        title="Remote optimizer",
        strategy="lightning_loco.strategies.remote_optimizer.RemoteOptimizerStrategy",
        algorithm=None,
        exchange="server",
        costs="every_step",
    ),
}
"""The methods by name: of ``Trainer(strategy=...)``, ``algorithm=...`` and their files and pages.

``ddp`` is Lightning's own, the baseline.
"""
