"""Trains simulated workers with the model, data, optimizer and strategy of a configuration."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_loco._util.checks import check_choice
from lightning_loco.app.configured_strategy import build_method
from lightning_loco.app.demo.data import ByteTextData
from lightning_loco.app.demo.model import ByteGPT
from lightning_loco.app.early_checks import SettingsError, errors_for, inner_sizes
from lightning_loco.costs import Links
from lightning_loco.costs.method_costs import StepTimes
from lightning_loco.simulation import Failure, PairwiseSimulation, Simulation, random_failures
from lightning_loco.strategies import LocoStrategy, PairwiseGossipStrategy
from lightning_loco.topology import Topology

SimulatedStrategy = LocoStrategy | PairwiseGossipStrategy

ROUNDING = 1e-9
"""Share by which a time is longer than its local steps, whose sum is rounded."""


NOT_SIMULATED = {
    "ckpt_path": "continue no run",
    "sample": "generate no text",
    "test": "run no test loop",
}
"""Keys of the configuration, and what a simulation does not do with them."""


def simulated_strategy(cfg: DictConfig) -> SimulatedStrategy:
    """Build the strategy of a real run; SettingsError for what a simulated run does not have."""
    _check_settings(cfg)
    strategy = build_method(cfg, without="link")
    name = type(strategy).__name__.removesuffix("Strategy")
    if not isinstance(strategy, SimulatedStrategy):
        raise SettingsError(
            f"{name} cannot be simulated. Choose another algorithm, or estimate costs without "
            "training with lightning-loco plan."
        )
    if isinstance(strategy, LocoStrategy):
        return strategy
    if cfg.simulation.mean_between_failures_s is not None:
        raise SettingsError(
            f"{name} is simulated without failures. Drop simulation.mean_between_failures_s, or "
            "choose an algorithm with rounds."
        )
    if strategy.settings.nodes is not None:
        raise SettingsError("Simulated workers are those of one job. Drop algorithm.nodes.")
    return strategy


def _check_settings(cfg: DictConfig) -> None:
    for key, instead in NOT_SIMULATED.items():
        if cfg[key]:
            raise SettingsError(f"Simulations {instead}. Drop {key}={cfg[key]}.")
    if (size := cfg.algorithm.get("replica_size", 1)) != 1:
        raise SettingsError(
            f"Simulated workers have one rank each. Drop algorithm.replica_size={size}."
        )
    if inner_sizes(cfg) is not None:
        raise SettingsError(
            "Simulated workers have one rank each. Drop inner.data_parallel_size and "
            "inner.tensor_parallel_size."
        )
    if cfg.membership._target_:
        raise SettingsError(
            "Simulated workers die and come back with simulation.mean_between_failures_s=.... Use "
            "it instead of membership=...."
        )
    if cfg.algorithm.get("link") is not None:
        raise SettingsError("Links of a simulation are those of link=.... Drop algorithm.link.")


class Workers:
    """The models of all workers, their data and their optimizers.

    Args:
        model: The model with which all start.
        data: The data, which are divided among them.
        cfg: The configuration.

    Attributes:
        models: One model per worker.

    Raises:
        SettingsError: If the Trainer could not clip gradients so.
    """

    def __init__(self, model: ByteGPT, data: ByteTextData, cfg: DictConfig) -> None:
        n = cfg.num_workers
        self.models = [copy.deepcopy(model) for _ in range(n)]
        self._clip, self._clip_by = _clipping_of(cfg)
        self._optimizers = [optimizer_and_schedule(model) for model in self.models]
        self._batches = [_batches(data, n, worker, cfg.seed) for worker in range(n)]

    def step(self, worker: int) -> Tensor:
        """Make a local step of a worker, as a Trainer does; return the loss."""
        model = self.models[worker]
        loss = model.loss(next(self._batches[worker]))
        model.zero_grad()
        loss.backward()
        optimizer, scheduler = self._optimizers[worker]
        if self._clip:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            if self._clip_by == "value":
                torch.nn.utils.clip_grad_value_(params, self._clip)
            else:
                torch.nn.utils.clip_grad_norm_(params, self._clip)
        optimizer.step()
        scheduler.step()
        return loss.detach()

    def renew_optimizer(self, worker: int, step: int) -> None:
        """Give a worker a new optimizer, at the learning rate of local step ``step``."""
        self._optimizers[worker] = optimizer_and_schedule(self.models[worker])
        optimizer, scheduler = self._optimizers[worker]
        scheduler.last_epoch = step
        for group, base, factor in zip(
            optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
        ):
            group["lr"] = base * factor(step)


class RoundTraining:
    """Trains the workers with a method that has rounds.

    Args:
        cfg: The configuration.
        strategy: That of a real run.
        workers: The models, data and optimizers.
        links: The links of the workers.
        steps: How long local steps take.

    Attributes:
        name: Of the algorithm.
        simulation: The simulation.
        topology: The graph of gossip; None for other algorithms.
    """

    def __init__(
        self,
        cfg: DictConfig,
        strategy: LocoStrategy,
        workers: Workers,
        links: Links | None,
        steps: StepTimes,
    ) -> None:
        self._own, self._workers = cfg.simulation, workers
        self.simulation = Simulation.from_settings(
            workers.models,
            strategy.settings,
            speeds=[1 / step_s for step_s in steps.step_s],
            jitter=steps.jitter,
            links=links,
            failures=self._failures(len(workers.models), cfg.seed),
            seed=steps.seed,
        )
        self.name = type(strategy.settings.algorithm).__name__
        topology = self.simulation.settings.topology
        self.topology = topology if isinstance(topology, Topology) else None

    def _failures(self, num_workers: int, seed: int) -> list[Failure]:
        own = self._own
        if own.mean_between_failures_s is None:
            return []
        longest_s = 100 * own.max_steps * own.step_s
        with errors_for("simulation"):
            return random_failures(
                num_workers, longest_s, own.mean_between_failures_s, own.mean_away_s, seed
            )

    @property
    def rounds(self) -> int:
        """Rounds that all workers have begun."""
        return self.simulation.round_index

    def parts(self) -> Iterator[None]:
        """Train, in about equal parts."""
        own, simulation = self._own, self.simulation
        schedule = simulation.settings.schedule
        every = schedule.sync_every_of(0)
        if every is None:
            for seconds in _equal_times(own):
                simulation.run(self._workers.step, seconds=seconds, on_return=self._on_return)
                yield
            return
        rounds = own.max_steps * schedule.num_fragments // every
        if rounds == 0:
            raise SettingsError(
                f"simulation.max_steps={own.max_steps} are fewer local steps than the "
                f"{every} of a round. Raise it, or lower algorithm.sync_every."
            )
        for count in _divided(rounds, own.reports):
            simulation.run(self._workers.step, count, on_return=self._on_return)
            yield

    def _on_return(self, worker: int) -> None:
        """A worker that was dead has a new optimizer, at the learning rate of the others."""
        self._workers.renew_optimizer(worker, self.simulation.steps[worker])


class PairwiseTraining:
    """Trains the workers with pairwise gossip; otherwise as :class:`RoundTraining`."""

    topology = None

    def __init__(
        self,
        cfg: DictConfig,
        strategy: PairwiseGossipStrategy,
        workers: Workers,
        links: Links | None,
        steps: StepTimes,
    ) -> None:
        self._own, self._workers = cfg.simulation, workers
        settings = strategy.settings
        self.name = type(settings.algorithm).__name__
        self.simulation = PairwiseSimulation(
            workers.models,
            settings.algorithm,
            speeds=[1 / step_s for step_s in steps.step_s],
            jitter=steps.jitter,
            links=links,
            compression=settings.compression,
            fetch_timeout_s=settings.fetch_timeout_s,
            seed=steps.seed,
        )

    @property
    def rounds(self) -> int:
        """Times that a worker has averaged with a peer, the mean over the workers."""
        costs = self.simulation.costs
        return round(sum(one.rounds for one in costs) / len(costs))

    def parts(self) -> Iterator[None]:
        """Train, in equal parts."""
        for seconds in _equal_times(self._own):
            self.simulation.run(self._workers.step, seconds=seconds)
            yield


Training = RoundTraining | PairwiseTraining


def make_training(
    cfg: DictConfig,
    strategy: SimulatedStrategy,
    workers: Workers,
    links: Links | None,
    steps: StepTimes,
) -> Training:
    """Create the training with a strategy; ValueError if it is invalid for these workers."""
    if isinstance(strategy, LocoStrategy):
        return RoundTraining(cfg, strategy, workers, links, steps)
    return PairwiseTraining(cfg, strategy, workers, links, steps)


def optimizer_and_schedule(model: ByteGPT) -> tuple[Any, Any]:
    """Return the optimizer of a model, and its schedule."""
    made: Any = model.configure_optimizers()
    return made["optimizer"], made["lr_scheduler"]["scheduler"]


def _clipping_of(cfg: DictConfig) -> tuple[float | None, Literal["norm", "value"]]:
    limit = cfg.trainer.get("gradient_clip_val")
    by = str(cfg.trainer.get("gradient_clip_algorithm") or "norm").lower()
    with errors_for("trainer"):
        check_choice("gradient_clip_algorithm", by, ("norm", "value"))
        is_number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
        if limit is not None and not (is_number and 0 <= limit < math.inf):
            raise ValueError(f"gradient_clip_val must be at least 0 and finite, got {limit!r}.")
    return limit, "value" if by == "value" else "norm"


def _equal_times(own: DictConfig) -> Iterator[float]:
    """Yield the seconds of each part of a run."""
    yield from [own.max_steps * own.step_s * (1 + ROUNDING) / own.reports] * own.reports


def _divided(total: int, parts: int) -> Iterator[int]:
    """Divide a number into so many about equal parts, and no more than it."""
    parts = min(parts, total)
    yield from (total * (part + 1) // parts - total * part // parts for part in range(parts))


def _batches(data: ByteTextData, num_workers: int, worker: int, seed: int) -> Iterator[Tensor]:
    """Yield the batches of a worker, epoch by epoch, as Lightning divides them among ranks."""
    dataset = data.train_dataloader().dataset
    sampler: DistributedSampler[Tensor] = DistributedSampler(
        dataset, num_workers, worker, shuffle=True, seed=seed, drop_last=False
    )
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from DataLoader(dataset, data.batch_size, sampler=sampler, drop_last=True)
