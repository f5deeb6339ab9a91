"""``python train.py simulate=true``: many workers in this process, and what their links cost.

The model, the data, the optimizer and the rounds are those of a real run with as many workers.
"""

from __future__ import annotations

import copy
import csv
import dataclasses
import functools
import itertools
import json
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import hydra
import numpy as np
import torch
from lightning.pytorch import seed_everything
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_loco.callbacks.rank_record import drawing
from lightning_loco.checked_settings import SettingsError, codec_of, early_settings, errors_for
from lightning_loco.costs import ENCODINGS, Costs, StepTimes, as_method, estimate
from lightning_loco.demo.data import ByteTextData
from lightning_loco.demo.launch import quieten_lightning
from lightning_loco.demo.model import ByteGPT
from lightning_loco.engine.settings import RoundSettings
from lightning_loco.links import Link, Links, LinkTimes, as_links
from lightning_loco.report.page import write_report
from lightning_loco.report.record import Curve, RunRecord
from lightning_loco.simulation import (
    Failure,
    RemoteOptimizerSimulation,
    Simulation,
    random_failures,
)
from lightning_loco.strategies import RemoteOptimizerStrategy
from lightning_loco.topology import Topology
from lightning_loco.values import check_choice, format_bytes, format_seconds
from lightning_loco.worker import exchanged_parameters

MAX_EVENTS = 20_000
"""Spans of the timeline that the page has."""

AnySimulation = Simulation | RemoteOptimizerSimulation

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Progress:
    """The state of a simulated run after some of its rounds.

    Attributes:
        time_s: Virtual time of the worker that is furthest, in seconds.
        steps: Local steps of a worker, mean over the workers.
        rounds: Rounds that all workers have begun.
        bytes_sent: Bytes that a worker has sent, mean over the workers.
        utilisation: Share of its time that a worker has computed, mean over the workers.
        train_loss: Mean training loss of the local steps since the last report.
        val_loss: Validation loss of the mean of the workers' models, in nats per byte.
    """

    time_s: float
    steps: float
    rounds: int
    bytes_sent: float
    utilisation: float
    train_loss: float
    val_loss: float


class Workers:
    """The models of all workers, and their data.

    Args:
        model: The model with which all start.
        data: The data, which are divided among them.
        num_workers: Number of workers.
        seed: Of the order of the data.

    Attributes:
        models: One model per worker.
    """

    def __init__(self, model: ByteGPT, data: ByteTextData, num_workers: int, seed: int) -> None:
        self.models = [copy.deepcopy(model) for _ in range(num_workers)]
        self._batches = [_batches(data, num_workers, w, seed) for w in range(num_workers)]

    def backward(self, worker: int) -> Tensor:
        """Compute the gradients of the next batch of a worker; return the loss."""
        model = self.models[worker]
        loss = model.loss(next(self._batches[worker]))
        model.zero_grad()
        loss.backward()
        return loss.detach()


class RoundTraining:
    """Trains the workers with an algorithm with rounds.

    Args:
        cfg: The configuration.
        settings: What a round is.
        workers: The models and the data.
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
        settings: RoundSettings,
        workers: Workers,
        links: Links | None,
        steps: StepTimes,
    ) -> None:
        self._own, self._workers = cfg.simulation, workers
        self._clip, self._clip_by = clipping_of(cfg)
        self._optimizers = [_configured(model) for model in workers.models]
        self.simulation = Simulation.from_settings(
            workers.models,
            settings,
            speeds=[1 / step_s for step_s in steps.step_s],
            jitter=self._own.jitter,
            links=links,
            failures=self._failures(len(workers.models), cfg.seed),
            seed=cfg.seed,
        )
        self.name = type(settings.algorithm).__name__
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

    def parts(self) -> Iterator[None]:
        """Train, in about equal parts."""
        own, simulation = self._own, self.simulation
        schedule = simulation.settings.schedule
        every = schedule.sync_every_of(0)
        rounds = None if every is None else own.max_steps * schedule.num_fragments // every
        if rounds == 0:
            raise SettingsError(
                f"simulation.max_steps={own.max_steps} are fewer local steps than the "
                f"{every} of a round. Raise it, or lower algorithm.sync_every."
            )
        if rounds is None:
            for _ in range(own.reports):
                seconds = own.max_steps * own.step_s / own.reports
                simulation.run(self._local_step, seconds=seconds, on_return=self._on_return)
                yield
            return
        for count in _divided(rounds, own.reports):
            simulation.run(self._local_step, count, on_return=self._on_return)
            yield

    def _local_step(self, worker: int) -> Tensor:
        loss = self._workers.backward(worker)
        optimizer, scheduler = self._optimizers[worker]
        if self._clip:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            if self._clip_by == "value":
                torch.nn.utils.clip_grad_value_(params, self._clip)
            else:
                torch.nn.utils.clip_grad_norm_(params, self._clip)
        optimizer.step()
        scheduler.step()
        return loss

    def _on_return(self, worker: int) -> None:
        """A worker that was dead has a new optimizer, at the learning rate of the others."""
        self._optimizers[worker] = _configured(self._workers.models[worker])
        optimizer, scheduler = self._optimizers[worker]
        scheduler.last_epoch = step = self.simulation.steps[worker]
        for group, base, factor in zip(
            optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
        ):
            group["lr"] = base * factor(step)


class RemoteTraining:
    """Trains the workers with a remote optimizer, in 2 tiers; otherwise as :class:`RoundTraining`.

    Args:
        cfg: The configuration.
        strategy: That of a real run, for its settings.
        workers: The models and the data.
        links: The links of the workers.
        steps: How long local steps take.
    """

    name = "RemoteOptimizer"
    topology = None

    def __init__(
        self,
        cfg: DictConfig,
        strategy: RemoteOptimizerStrategy,
        workers: Workers,
        links: Links | None,
        steps: StepTimes,
    ) -> None:
        self._own, self._workers = cfg.simulation, workers
        self._schedulers: list[Any] = []
        clip, clip_by = clipping_of(cfg)
        self.simulation = RemoteOptimizerSimulation(
            workers.models,
            self._make_optimizer,
            num_servers=strategy.counts[1],
            min_workers=strategy.min_workers,
            compression=strategy.compression,
            bucket_bytes=strategy.bucket_bytes,
            gradient_clip_val=clip,
            gradient_clip_algorithm=clip_by,
            speeds=[1 / step_s for step_s in steps.step_s],
            jitter=self._own.jitter,
            links=links,
            seed=cfg.seed,
        )

    def _make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        assert isinstance(model, ByteGPT)
        optimizer, scheduler = _configured(model)
        self._schedulers.append(scheduler)
        made: torch.optim.Optimizer = optimizer
        return made

    def parts(self) -> Iterator[None]:
        """Train, in about equal parts."""
        for count in _divided(self._own.max_steps, self._own.reports):
            self.simulation.run(self._workers.backward, count, after_step=self._after_step)
            yield

    def _after_step(self) -> None:
        for scheduler in self._schedulers:
            scheduler.step()


def remote_strategy(cfg: DictConfig) -> RemoteOptimizerStrategy:
    """Build the strategy of a real run; SettingsError for what a simulated one does not have."""
    given, n = cfg.algorithm, cfg.num_workers
    if (named := given.get("num_workers")) not in (None, n):
        raise SettingsError(
            f"A simulation has num_workers={n}, and algorithm.num_workers is {named}. Drop "
            "algorithm.num_workers."
        )
    if (size := given.get("replica_size", 1)) != 1:
        raise SettingsError(
            f"Simulated workers have one rank each, got algorithm.replica_size={size}. Drop it."
        )
    if cfg.simulation.mean_between_failures_s is not None:
        raise SettingsError(
            "With a remote optimizer a worker that dies ends the run, or is gone for good. Drop "
            "simulation.mean_between_failures_s, or use RemoteOptimizerSimulation with min_workers."
        )
    for group in ("topology", "membership"):
        if cfg[group]._target_:
            raise SettingsError(f"A remote optimizer takes no {group}. Drop {group}=...")
    with errors_for("compression"):
        part = cfg.compression
        chosen = {"compression": codec_of(part)} if part._target_ else {}
    with errors_for("algorithm"):
        # Partial, because Hydra would turn the codec, a dataclass, into a configuration.
        make = hydra.utils.instantiate(given, _partial_=True)
        strategy: RemoteOptimizerStrategy = make(num_workers=n, **chosen)
    return strategy


def clipping_of(cfg: DictConfig) -> tuple[float | None, Literal["norm", "value"]]:
    """Return how the Trainer would clip gradients: up to what, and the norm or each value.

    SettingsError if it could not.
    """
    limit = cfg.trainer.get("gradient_clip_val")
    by = str(cfg.trainer.get("gradient_clip_algorithm") or "norm").lower()
    with errors_for("trainer"):
        check_choice("gradient_clip_algorithm", by, ("norm", "value"))
        is_number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
        if limit is not None and not (is_number and 0 <= limit < math.inf):
            raise ValueError(f"gradient_clip_val must be at least 0 and finite, got {limit!r}.")
    return limit, "value" if by == "value" else "norm"


class SimulatedRun:
    """The workers of a configuration: models, data, optimizers and their simulation.

    Args:
        cfg: ``conf/train.yaml`` with ``simulate=true``.

    Raises:
        SettingsError: If a value cannot work.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self._own = own = cfg.simulation
        n = cfg.num_workers
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise SettingsError(f"num_workers must be at least 1, got {n}.")
        for name in ("max_steps", "reports"):
            if isinstance(own[name], bool) or not isinstance(own[name], int) or own[name] < 1:
                raise SettingsError(f"simulation.{name} must be at least 1, got {own[name]}.")
        if (batches := cfg.trainer.get("accumulate_grad_batches", 1)) != 1:
            raise SettingsError(
                "Simulated workers make a local step for each batch, got "
                f"trainer.accumulate_grad_batches={batches}. Raise data.batch_size instead."
            )
        if (precision := cfg.trainer.get("precision", "32-true")) not in (32, "32", "32-true"):
            raise SettingsError(
                f"Simulated workers train in float32, got trainer.precision={precision}. Add "
                "trainer.precision=32-true, or leave out trainer=gpu or trainer=slurm."
            )
        kind = str(cfg.algorithm.get("_target_")).rpartition(".")[2].removesuffix("Strategy")
        make: Callable[..., RoundTraining | RemoteTraining]
        if kind == RemoteTraining.name:
            make = functools.partial(RemoteTraining, cfg, remote_strategy(cfg))
        elif isinstance(settings := early_settings(cfg), RoundSettings):
            make = functools.partial(RoundTraining, cfg, settings)
        else:
            raise SettingsError(
                f"simulate=true needs an algorithm with rounds or a remote optimizer, got {kind}. "
                "Choose algorithm=gasloc, noloco, diloco, async_diloco, streaming_diloco, "
                "local_sgd or remote_optimizer. The costs of ddp are in the table beside them."
            )
        group = "network" if cfg.network._target_ else "link"
        with errors_for(group):
            self.links = as_links(
                hydra.utils.instantiate(cfg[group]) if cfg[group]._target_ else None
            )
            if self.links is not None:
                self.links.check(n)
        with errors_for("model"):
            length = cfg.model.get("total_steps") or own.max_steps
            model = hydra.utils.instantiate({**cfg.model, "total_steps": length})
        if not isinstance(model, ByteGPT):
            raise SettingsError(f"simulate=true needs a ByteGPT, got {type(model).__name__}.")
        with errors_for("data"):
            data = hydra.utils.instantiate(cfg.data)
            if not isinstance(data, ByteTextData):
                raise ValueError(f"simulate=true needs ByteTextData, got {type(data).__name__}.")
            data.check(n)
        self._validation = [batch.long() for batch in data.val_dataloader()]
        self._evaluated = model
        workers = Workers(model, data, n, cfg.seed)
        with errors_for("simulation"):
            self.steps = StepTimes.of_spread(n, own.step_s, own.spread, own.jitter, cfg.seed)
        with errors_for("algorithm"):
            self._training = make(workers, self.links, self.steps)

    @property
    def name(self) -> str:
        """Name of the algorithm."""
        return self._training.name

    @property
    def topology(self) -> Topology | None:
        """The graph of gossip; None for other algorithms."""
        return self._training.topology

    @property
    def simulation(self) -> AnySimulation:
        """The simulation."""
        return self._training.simulation

    @property
    def num_parameters(self) -> int:
        """Trainable parameters of the model."""
        return sum(p.numel() for p in exchanged_parameters(self._evaluated).values())

    def costs_of_ddp(self, end: Progress) -> Costs:
        """What DDP would cost for as many local steps."""
        return estimate(
            as_method("ddp", encoding=ENCODINGS["none"]),
            self.num_parameters,
            self.steps,
            LinkTimes(self.links or Links(Link(math.inf)), len(self.steps.step_s)),
            max(1, round(end.steps)),
        )

    def train(self) -> Iterator[Progress]:
        """Train, and yield the state after about equal parts of the run."""
        simulation, reported = self.simulation, 0
        for _ in self._training.parts():
            losses = [point.loss for point in simulation.losses[reported:]]
            reported = len(simulation.losses)
            costs = simulation.costs
            yield Progress(
                max(one.time_s for one in costs),
                float(np.mean([one.steps for one in costs])),
                simulation.round_index,
                float(np.mean([one.bytes_sent for one in costs])),
                float(np.mean([one.utilisation for one in costs])),
                float(np.mean(losses)) if losses else math.nan,
                self._validate(),
            )

    @torch.no_grad()
    def _validate(self) -> float:
        params = list(exchanged_parameters(self._evaluated).values())
        sizes = [p.numel() for p in params]
        for p, part in zip(params, self.simulation.consensus().split(sizes), strict=True):
            p.copy_(part.view_as(p))
        losses = [self._evaluated.loss(batch).item() for batch in self._validation]
        weights = [len(batch) for batch in self._validation]
        return float(np.average(losses, weights=weights))


def _configured(model: ByteGPT) -> tuple[Any, Any]:
    """Return the optimizer of a model, and its schedule."""
    made: Any = model.configure_optimizers()
    return made["optimizer"], made["lr_scheduler"]["scheduler"]


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


def run_simulation(cfg: DictConfig) -> float:
    """Simulate as configured, and write the results into the run's folder.

    Returns:
        The validation loss of the mean of the workers' models.

    Raises:
        SettingsError: If a value cannot work.
    """
    quieten_lightning()
    seed_everything(cfg.seed, workers=True, verbose=False)
    if cfg.num_threads is not None:
        torch.set_num_threads(cfg.num_threads)
    run = SimulatedRun(cfg)
    name = run.name
    log.info("%s, %d workers of %s parameters", name, cfg.num_workers, f"{run.num_parameters:,}")
    progress = []
    for state in run.train():
        progress.append(state)
        log.info(
            "round %d, step %.0f: %.1f s, loss %.4f, %s per worker, utilisation %.0f %%",
            state.rounds,
            state.steps,
            state.time_s,
            state.val_loss,
            format_bytes(round(state.bytes_sent)),
            100 * state.utilisation,
        )
    folder, ddp = Path(cfg.run_dir), run.costs_of_ddp(progress[-1])
    text = table(name, progress[-1], ddp)
    (folder / "report.txt").write_text(text + "\n", encoding="utf-8")
    write_files(folder, progress, run.simulation)
    settings: Any = OmegaConf.to_container(cfg, resolve=True)
    write_report(record_of(name, progress, run, ddp, settings), folder)
    print(f"\n{text}\n\nAll files are in {folder}")
    return progress[-1].val_loss


def table(name: str, end: Progress, ddp: Costs) -> str:
    """Return the results as a table, with the costs of DDP for as many local steps."""
    rows = [
        ("", "loss", "virtual time", "sent per worker", "rounds", "utilisation"),
        _row(name, f"{end.val_loss:.4f}", end.time_s, end.bytes_sent, end.rounds, end.utilisation),
        _row(
            "DDP",
            "-",
            float(ddp.time_s.max()),
            float(ddp.bytes_sent.mean()),
            max(1, round(end.steps)),
            float(ddp.utilisation.mean()),
        ),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _row(
    name: str, loss: str, time_s: float, bytes_sent: float, rounds: int, utilisation: float
) -> tuple[str, ...]:
    sent = format_bytes(round(bytes_sent))
    return name, loss, format_seconds(time_s), sent, f"{rounds:,}", f"{utilisation:.1%}"


def write_files(folder: Path, progress: list[Progress], simulation: AnySimulation) -> None:
    """Write the progress and the costs of each worker, as CSV and JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, rows in (
        ("simulation.csv", [dataclasses.asdict(state) for state in progress]),
        (
            "workers.csv",
            [
                {**dataclasses.asdict(one), "utilisation": one.utilisation}
                for one in simulation.costs
            ],
        ),
    ):
        with (folder / file).open("w", newline="", encoding="utf-8") as lines:
            writer = csv.DictWriter(lines, list(rows[0]) if rows else [])
            writer.writeheader()
            writer.writerows(rows)
    last = {**dataclasses.asdict(progress[-1]), "num_workers": simulation.num_workers}
    (folder / "report.json").write_text(json.dumps(last, indent=2) + "\n", encoding="utf-8")


def record_of(
    name: str, progress: list[Progress], run: SimulatedRun, ddp: Costs, settings: dict[str, Any]
) -> RunRecord:
    """Return what the page of the run shows; all times are virtual."""
    simulation, end = run.simulation, progress[-1]
    n, topology = simulation.num_workers, run.topology
    training = Curve("train_loss", "train/loss")
    for point in sorted(simulation.losses, key=lambda point: point.time_s):
        training.add(point.step, point.time_s, None, point.loss)
    validation = Curve("validation", "val/loss")
    for state in progress:
        validation.add(round(state.steps), state.time_s, state.bytes_sent, state.val_loss)
    shares: list[dict[str, float]] = [{} for _ in range(n)]
    for event in simulation.timeline:
        own = shares[event.worker]
        own[event.kind] = own.get(event.kind, 0.0) + event.end_s - event.start_s
    return RunRecord(
        title=f"{name}, {n} simulated workers",
        seconds=end.time_s,
        lanes=[f"worker {worker}" for worker in range(n)],
        curves=[training, validation],
        events=[
            (event.worker, event.kind, event.start_s, event.end_s)
            for event in simulation.timeline[:MAX_EVENTS]
        ],
        shares=shares,
        events_left_out=max(0, len(simulation.timeline) - MAX_EVENTS),
        numbers={"workers": n, "local steps": round(end.steps), "rounds": end.rounds},
        bytes_sent=end.bytes_sent,
        ddp_bytes=float(ddp.bytes_sent.mean()),
        topology=None if topology is None else drawing(topology, n),
        settings=settings,
        notes=[
            "All workers were simulated in one process. Times are virtual: they follow from "
            "simulation.step_s and the links.",
            f"DDP would need {format_seconds(float(ddp.time_s.max()))} for as many local steps.",
        ],
    )
