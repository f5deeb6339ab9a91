"""Trainings of simulated workers for a given time, whose results are kept in a file."""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_loco import AsyncDiLoCoStrategy, Simulation, StreamingDiLoCoStrategy
from lightning_loco.algorithms import (
    DelayedNesterov,
    DiLoCo,
    EagerDiLoCo,
    KeepProgress,
    ModelAverage,
)
from lightning_loco.app.demo.data import ByteTextData
from lightning_loco.app.demo.model import ByteGPT
from lightning_loco.engine.settings import RoundSettings
from lightning_loco.schedules import EverySteps, Schedule

BATCH, CONTEXT = 8, 64

Make = Callable[[int, int], RoundSettings]


def blocking(algorithm: Any) -> Make:
    """Rounds that all workers wait for."""
    return lambda every, exchange: RoundSettings(algorithm, EverySteps(every))


def whole_phase(algorithm: Any, merge_policy: Any = None) -> Make:
    """Rounds whose result comes with the next one; a phase is at least as long as an exchange."""

    def make(every: int, exchange: int) -> RoundSettings:
        schedule = EverySteps(max(every, exchange), overlap=True)
        return RoundSettings(algorithm, schedule, merge_policy=merge_policy)

    return make


def streaming(fragments: int) -> Make:
    """Fragments that take turns; each result lands as soon as it can be there."""

    def make(every: int, exchange: int) -> RoundSettings:
        delay = math.ceil(exchange / fragments)
        return StreamingDiLoCoStrategy(
            max(every, exchange), fragments, delay, mix=0.25, outer_lr=0.6, outer_momentum=0.8
        ).settings

    return make


def hidden_by_default(every: int, exchange: int) -> RoundSettings:
    """An exchange may take as long as a whole phase."""
    return AsyncDiLoCoStrategy(max(every, exchange)).settings


def back_to_back(every: int, exchange: int) -> RoundSettings:
    """Averages that follow each other without a pause, however long one takes."""
    return RoundSettings(ModelAverage(), EverySteps(max(1, exchange), overlap=True))


METHODS: dict[str, Make | None] = {
    "ddp": None,
    "alone": None,
    "diloco": blocking(DiLoCo(0.9, 0.6)),
    "delayed_nesterov": blocking(DelayedNesterov()),
    "async_diloco": hidden_by_default,
    "a_phase_late": whole_phase(DiLoCo(0.7, 0.0)),
    "kept_progress": whole_phase(DiLoCo(0.7, 0.5), KeepProgress()),
    "eager_diloco": whole_phase(EagerDiLoCo(0.7, 0.0)),
    "streaming_1": streaming(1),
    "streaming_2": streaming(2),
    "streaming_4": streaming(4),
    "async_model_average": back_to_back,
}
HIDDEN = [name for name in METHODS if name not in ("ddp", "alone", "diloco", "delayed_nesterov")]


def cost_of_a_step(schedule: Schedule, exchange: float) -> float:
    """Time of a local step with its share of the rounds, in local steps without rounds.

    Example:
        >>> cost_of_a_step(EverySteps(10), 3.0)
        1.3
        >>> cost_of_a_step(Staggered(10, fragments=2, delay=2), 6.0)  # waits one step in each
        1.2
    """
    every, fragments = schedule.sync_every_of(0), schedule.num_fragments
    hidden = schedule.staleness_of(0) * every
    waits = fragments * max(0.0, exchange / fragments - hidden)
    return max(every + waits, exchange) / every


class Training(NamedTuple):
    """One training of the table.

    Attributes:
        method: Its row.
        ratio: Time of an exchange, divided by the time of a local phase.
        seed: Of weights and batches.
    """

    method: str
    ratio: float
    seed: int

    def plan(self, options: argparse.Namespace) -> tuple[RoundSettings | None, int]:
        """The settings of its rounds, and the number of local steps for which there is time."""
        exchange = self.ratio * options.sync_every
        make = METHODS[self.method]
        if make is None:
            cost = 1.0 if self.method == "alone" else 1.0 + exchange
            return None, int(options.steps / cost)
        settings = make(options.sync_every, math.ceil(exchange))
        cost = cost_of_a_step(settings.schedule, exchange)
        return settings, int(options.steps / cost)

    def key(self, options: argparse.Namespace) -> str:
        """Its key in the file of results: two ratios may have the same training."""
        settings, steps = self.plan(options)
        rounds = None if settings is None else settings.describe()
        model = [options.width, options.layers, options.lr, options.workers, str(options.text)]
        return json.dumps([self.method == "alone", rounds, steps, self.seed, *model], default=str)

    def train(self, options: argparse.Namespace) -> float:
        """The validation loss of the consensus."""
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        settings, steps = self.plan(options)
        data = ByteTextData(path=options.text, batch_size=BATCH, context=CONTEXT)
        data.check(options.workers)
        shares = [
            batches(data, worker, options.workers, self.seed) for worker in range(options.workers)
        ]
        torch.manual_seed(self.seed)
        model = new_model(options, steps)
        if settings is None:
            used = shares[:1] if self.method == "alone" else shares
            train_alone(model, used, steps)
        else:
            models = [new_model(options, steps) for _ in shares]
            models[0].load_state_dict(model.state_dict())
            simulation = train_together(models, shares, settings, steps)
            torch.nn.utils.vector_to_parameters(simulation.consensus(), model.parameters())
        return validate(model, data)


def new_model(
    options: argparse.Namespace, steps: int, optimizer: Literal["adamw", "muon"] = "adamw"
) -> ByteGPT:
    """A GPT whose learning rate ends with the last step."""
    warmup = min(50, max(1, steps // 10))
    return ByteGPT(
        width=options.width,
        num_layers=options.layers,
        lr=options.lr,
        context=CONTEXT,
        total_steps=steps,
        warmup_steps=warmup,
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


def train_alone(
    model: ByteGPT, shares: list[Iterator[Tensor]], steps: int, clip: float = math.inf
) -> None:
    """One model, with the mean gradient of as many batches as there are shares.

    ``clip`` is the largest norm of a gradient.
    """
    made: Any = model.configure_optimizers()
    for _ in range(steps):
        made["optimizer"].zero_grad()
        for share in shares:
            (model.loss(next(share)) / len(shares)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        made["optimizer"].step()
        made["lr_scheduler"]["scheduler"].step()


def train_together(
    models: list[ByteGPT],
    shares: list[Iterator[Tensor]],
    settings: RoundSettings,
    steps: int,
    clip: float = math.inf,
) -> Simulation:
    """All workers by turns, which start from the first one's model."""
    simulation = Simulation.from_settings(models, settings)
    made: list[Any] = [one.configure_optimizers() for one in models]

    def local_step(worker: int) -> None:
        made[worker]["optimizer"].zero_grad()
        models[worker].loss(next(shares[worker])).backward()
        torch.nn.utils.clip_grad_norm_(models[worker].parameters(), clip)
        made[worker]["optimizer"].step()
        made[worker]["lr_scheduler"]["scheduler"].step()

    every, fragments = settings.schedule.sync_every_of(0), settings.schedule.num_fragments
    simulation.run(local_step, num_rounds=steps * fragments // every)
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
    if options.out.exists() and not is_fresh:
        results = json.loads(options.out.read_text())
    missing = {key: one for key, one in wanted.items() if key not in results}
    with ProcessPoolExecutor(options.jobs) as pool:
        under_way = {pool.submit(_timed, one, options): key for key, one in missing.items()}
        for number, future in enumerate(as_completed(under_way), start=1):
            key = under_way[future]
            results[key], seconds = future.result()
            options.out.write_text(json.dumps(results, indent=1) + "\n")
            text = f"{number}/{len(missing)}: {describe(missing[key], results[key])}"
            print(f"{text} after {seconds:.0f} s", flush=True)
    return results


def _timed(training: Any, options: argparse.Namespace) -> tuple[Any, float]:
    started = time.perf_counter()
    return training.train(options), time.perf_counter() - started


@torch.no_grad()
def validate(model: ByteGPT, data: ByteTextData) -> float:
    """Mean loss over the validation windows, in nats per byte."""
    losses = [(float(model.loss(batch)), len(batch)) for batch in data.val_dataloader()]
    return sum(loss * count for loss, count in losses) / sum(count for _, count in losses)
