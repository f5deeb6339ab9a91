"""Trainings of simulated workers, whose results are kept in a file.

The workers are those of :class:`lightning_loco.Simulation`, with the numbers of real processes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_loco import Simulation
from lightning_loco.app.demo.data import ByteTextData
from lightning_loco.app.demo.model import ByteGPT
from lightning_loco.engine.settings import RoundSettings

BATCH = 8

OnStep = Callable[[Simulation], None]
"""Looks at a simulation before each local step of worker 0."""


class Task(NamedTuple):
    """A GPT, and how long it is trained. ``clip`` is the largest norm of a gradient."""

    steps: int
    width: int = 64
    layers: int = 3
    lr: float = 3e-3
    context: int = 64
    clip: float = math.inf


def new_model(task: Task, optimizer: Literal["adamw", "muon"] = "adamw") -> ByteGPT:
    """A GPT whose learning rate ends with the last step."""
    return ByteGPT(
        width=task.width,
        num_layers=task.layers,
        lr=task.lr,
        context=task.context,
        total_steps=task.steps,
        warmup_steps=min(50, max(1, task.steps // 10)),
        optimizer=optimizer,
    )


def batches(data: ByteTextData, worker: int, num_workers: int, seed: int) -> Iterator[Tensor]:
    """The batches of one worker, for ever: its share of each epoch's order."""
    windows = data.train_windows
    assert windows is not None
    epoch = 0
    while True:
        order = np.random.default_rng([seed, epoch]).permutation(len(windows))[worker::num_workers]
        for first in range(0, len(order) - BATCH + 1, BATCH):
            yield torch.stack([windows[int(i)] for i in order[first : first + BATCH]])
        epoch += 1


class LocalSteps:
    """Takes local steps of models, with their own optimizers and learning-rate schedules."""

    def __init__(self, models: list[ByteGPT], clip: float) -> None:
        self._models, self._clip = models, clip
        self._made: list[Any] = [model.configure_optimizers() for model in models]

    def __call__(self, worker: int, windows: list[Tensor]) -> None:
        """Take a step with the mean gradient of these batches."""
        model, made = self._models[worker], self._made[worker]
        made["optimizer"].zero_grad()
        for batch in windows:
            (model.loss(batch) / len(windows)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), self._clip)
        made["optimizer"].step()
        made["lr_scheduler"]["scheduler"].step()


class TimedSteps:
    """Takes local steps whose learning rate follows the virtual time."""

    def __init__(self, models: Sequence[ByteGPT], task: Task, seconds: float) -> None:
        self._models, self._task, self._seconds = models, task, seconds
        made: Any = new_model(task).configure_optimizers()
        self._factor: Callable[[int], float] = made["lr_scheduler"]["scheduler"].lr_lambdas[0]
        self._optimizers = [self._optimizer(model) for model in models]

    def _optimizer(self, model: ByteGPT) -> torch.optim.Optimizer:
        made: Any = model.configure_optimizers()
        optimizer: torch.optim.Optimizer = made["optimizer"]
        return optimizer

    def renew(self, worker: int) -> None:
        """Give a worker a new optimizer."""
        self._optimizers[worker] = self._optimizer(self._models[worker])

    def take(self, worker: int, batch: torch.Tensor, time_s: float) -> None:
        """Take a local step that ends at a time."""
        model, optimizer = self._models[worker], self._optimizers[worker]
        lr = self._task.lr * self._factor(int(self._task.steps * time_s / self._seconds))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        model.loss(batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), self._task.clip)
        optimizer.step()


def train_alone(model: ByteGPT, shares: list[Iterator[Tensor]], task: Task) -> None:
    """One model, with the mean gradient of a batch of each share."""
    take = LocalSteps([model], task.clip)
    for _ in range(task.steps):
        take(0, [next(share) for share in shares])


def train_together(
    models: list[ByteGPT],
    shares: list[Iterator[Tensor]],
    settings: RoundSettings,
    task: Task,
    on_step: OnStep = lambda simulation: None,
) -> Simulation:
    """All workers by turns, which start from the first one's model."""
    simulation = Simulation.from_settings(models, settings)
    take = LocalSteps(models, task.clip)

    def local_step(worker: int) -> None:
        if worker == 0:
            on_step(simulation)
        take(worker, [next(shares[worker])])

    every, fragments = settings.schedule.sync_every_of(0), settings.schedule.num_fragments
    simulation.run(local_step, num_rounds=task.steps * fragments // every)
    if settings.is_overlapped:  # a blocking round has just ended, and the next one has no steps
        for _ in range(fragments):
            simulation.make_round()
        simulation.drain()
    return simulation


def train_missing(
    wanted: Mapping[str, Any],
    describe: Callable[[Any, Any], str],
    options: argparse.Namespace,
    is_fresh: bool = False,
) -> dict[str, Any]:
    """The results by key of all trainings in the file ``options.out``; makes those that it lacks.

    Args:
        wanted: Trainings by key, whose ``train(options)`` returns what JSON can hold.
        describe: One line about a training and its result.
        options: ``out``, ``jobs``, and what the trainings need.
        is_fresh: Whether to make all again.
    """
    results: dict[str, Any] = {}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.out.exists() and not is_fresh:
        results = json.loads(options.out.read_text())
    missing = {key: one for key, one in wanted.items() if key not in results}
    for key, result in train_all(missing, describe, options):
        results[key] = result
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    return results


def train_all(
    missing: Mapping[str, Any],
    describe: Callable[[Any, Any], str],
    options: argparse.Namespace,
) -> Iterator[tuple[str, Any]]:
    """Train in ``options.jobs`` processes; yield the key and the result of each when it is done."""
    began = time.perf_counter()
    with ProcessPoolExecutor(options.jobs) as pool:
        under_way = {pool.submit(_timed, one, options): key for key, one in missing.items()}
        for number, future in enumerate(as_completed(under_way), start=1):
            key = under_way[future]
            result, seconds = future.result()
            yield key, result
            left = (time.perf_counter() - began) * (len(missing) / number - 1) / 60
            text = f"{number}/{len(missing)}: {describe(missing[key], result)}"
            print(f"{text} after {seconds:.0f} s, about {left:.0f} min left", flush=True)


def _timed(training: Any, options: argparse.Namespace) -> tuple[Any, float]:
    started = time.perf_counter()
    return training.train(options), time.perf_counter() - started


@torch.no_grad()
def validate(model: ByteGPT, data: ByteTextData) -> float:
    """Mean loss over the validation windows, in nats per byte."""
    losses = [(float(model.loss(batch)), len(batch)) for batch in data.val_dataloader()]
    return sum(loss * count for loss, count in losses) / sum(count for _, count in losses)
