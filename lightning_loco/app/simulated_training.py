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
from lightning_loco.costs.method_costs import StepTimes
from lightning_loco.simulation import Failure, SimulatedSettings, Simulation, random_failures

ROUNDING = 1e-9
"""Share by which a time is longer than its local steps, whose sum is rounded."""

NOT_SIMULATED = {
    "ckpt_path": "continue no run",
    "sample": "generate no text",
    "test": "run no test loop",
}
"""Keys of the configuration that a simulation refuses, and the reason."""


def simulated_settings(cfg: DictConfig) -> SimulatedSettings:
    """Return the settings of a real run; SettingsError for settings that a simulation lacks."""
    _check_settings(cfg)
    strategy = build_method(cfg)
    settings = getattr(strategy, "settings", None)
    if not isinstance(settings, SimulatedSettings):
        name = type(strategy).__name__.removesuffix("Strategy")
        raise SettingsError(
            f"{name} cannot be simulated. Choose another algorithm, or estimate costs without "
            "training with lightning-loco plan."
        )
    return settings


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


class Workers:
    """The models of all workers, their data and their optimizers.

    All start with ``model``, and ``data`` are divided among them. SettingsError if the Trainer
    could not clip gradients as ``cfg`` says.
    """

    def __init__(self, model: ByteGPT, data: ByteTextData, cfg: DictConfig) -> None:
        n = cfg.num_workers
        self.models = [copy.deepcopy(model) for _ in range(n)]
        self._clip, self._clip_by = _clipping_of(cfg)
        self._optimizers = [optimizer_and_schedule(model) for model in self.models]
        self._batches = [_batches(data, n, worker, cfg.seed) for worker in range(n)]

    def step(self, worker: int) -> Tensor:
        """Take a local step of a worker, as a Trainer does; return the loss."""
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


def make_simulation(
    cfg: DictConfig, settings: SimulatedSettings, models: list[ByteGPT], steps: StepTimes
) -> Simulation:
    """Create the simulation of a strategy's settings; ValueError if they do not suit the workers.

    Args:
        cfg: The configuration.
        settings: Those of a real run.
        models: One per worker.
        steps: How long local steps take.
    """
    own, speeds = cfg.simulation, [1 / step_s for step_s in steps.step_s]
    failures: list[Failure] = []
    if own.mean_between_failures_s is not None:
        longest_s = 100 * own.max_steps * own.step_s
        with errors_for("simulation"):
            failures = random_failures(
                len(models), longest_s, own.mean_between_failures_s, own.mean_away_s, cfg.seed
            )
    return Simulation.from_settings(
        models, settings, speeds=speeds, jitter=steps.jitter, failures=failures, seed=steps.seed
    )


def train_parts(simulation: Simulation, workers: Workers, own: DictConfig) -> Iterator[None]:
    """Train in ``own.reports`` nearly equal parts: of the time, or of the rounds if steps count.

    SettingsError if the run is shorter than a round.
    """

    def run(num_rounds: int | None = None, seconds: float | None = None) -> None:
        simulation.run(workers.step, num_rounds, seconds=seconds, on_return=on_return)

    def on_return(worker: int) -> None:
        workers.renew_optimizer(worker, simulation.steps[worker])

    every = simulation.sync_every
    if every is None:
        for _ in range(own.reports):
            run(seconds=float(own.max_steps * own.step_s * (1 + ROUNDING) / own.reports))
            yield
        return
    rounds = own.max_steps * simulation.settings.schedule.num_fragments // every
    if rounds == 0:
        raise SettingsError(
            f"simulation.max_steps={own.max_steps} are fewer local steps than the "
            f"{every} of a round. Raise it, or lower algorithm.sync_every."
        )
    parts = min(own.reports, rounds)
    for part in range(parts):
        run(rounds * (part + 1) // parts - rounds * part // parts)
        yield


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


def _batches(data: ByteTextData, num_workers: int, worker: int, seed: int) -> Iterator[Tensor]:
    """Yield the batches of a worker, epoch by epoch, as Lightning divides them among ranks."""
    dataset = data.train_dataloader().dataset
    sampler: DistributedSampler[Tensor] = DistributedSampler(
        dataset, num_workers, worker, shuffle=True, seed=seed, drop_last=False
    )
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from DataLoader(dataset, data.batch_size, sampler=sampler, drop_last=True)
