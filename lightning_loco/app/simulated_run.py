"""``python train.py simulate=true``: many workers in this process, and the cost of their links.

The model, the data, the optimizer and the rounds are the same as in a real run.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
from lightning.pytorch import seed_everything
from omegaconf import DictConfig, OmegaConf

from lightning_loco._util.text import format_bytes, format_seconds
from lightning_loco.app.demo.data import ByteTextData
from lightning_loco.app.demo.model import ByteGPT
from lightning_loco.app.early_checks import SettingsError, errors_for
from lightning_loco.app.launch import quieten_lightning
from lightning_loco.app.simulated_training import (
    Workers,
    make_simulation,
    simulated_settings,
    train_parts,
)
from lightning_loco.callbacks.rank_record import drawing
from lightning_loco.costs import Link, Links, LinkTimes
from lightning_loco.costs.method_costs import ENCODINGS, Costs, StepTimes, as_method, estimate
from lightning_loco.model.worker import exchanged_parameters
from lightning_loco.report.page import write_report
from lightning_loco.report.record import Curve, RunRecord
from lightning_loco.simulation import Goodput, Simulation
from lightning_loco.topology import Topology

MAX_EVENTS = 20_000
"""Spans of the timeline that the page has."""

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Progress:
    """The state of a simulated run after some of its rounds.

    Attributes:
        time_s: Virtual time of the worker that is furthest, in seconds.
        steps: Local steps of a worker, mean over the workers.
        rounds: Rounds that all workers have begun; with pairwise gossip averages of a worker, the
            mean over the workers.
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


class SimulatedRun:
    """The workers of a configuration: models, data, optimizers and their simulation.

    Args:
        cfg: ``conf/train.yaml`` with ``simulate=true``.

    Attributes:
        name: Name of the algorithm.
        topology: The graph of gossip; None for other algorithms.
        links: Links of the workers; None if messages take no time.
        steps: How long local steps take.
        simulation: The simulation.

    Raises:
        SettingsError: If a value cannot work.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self._own = own = cfg.simulation
        n, step_s = cfg.num_workers, own.step_s
        for name, value in (
            ("num_workers", n),
            ("simulation.max_steps", own.max_steps),
            ("simulation.reports", own.reports),
        ):
            if type(value) is not int or value < 1:
                raise SettingsError(f"{name} must be at least 1, got {value}.")
        if type(step_s) not in (int, float) or not 0 < step_s < math.inf:
            raise SettingsError(f"simulation.step_s are seconds, more than 0, got {step_s}.")
        if (batches := cfg.trainer.get("accumulate_grad_batches", 1)) != 1:
            raise SettingsError(
                "Simulated workers take a local step for each batch, got "
                f"trainer.accumulate_grad_batches={batches}. Raise data.batch_size instead."
            )
        if (precision := cfg.trainer.get("precision", "32-true")) not in (32, "32", "32-true"):
            raise SettingsError(
                f"Simulated workers train in float32, got trainer.precision={precision}. Add "
                "trainer.precision=32-true, or leave out trainer=gpu or trainer=slurm."
            )
        settings = simulated_settings(cfg)
        self.name, self.links = type(settings.algorithm).__name__, settings.link
        if self.links is not None:
            with errors_for("link"):
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
        self._workers = Workers(model, data, cfg)
        with errors_for("simulation"):
            self.steps = StepTimes.of_spread(n, step_s, own.spread, own.jitter, cfg.seed)
        with errors_for("algorithm"):
            self.simulation = make_simulation(cfg, settings, self._workers.models, self.steps)
        self.topology: Topology | None = self.simulation.settings.topology

    @property
    def num_parameters(self) -> int:
        """Trainable parameters of the model."""
        return sum(p.numel() for p in exchanged_parameters(self._evaluated).values())

    def costs_of_ddp(self, end: Progress) -> Costs:
        """Return what the same number of local steps would cost with DDP."""
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
        for _ in train_parts(simulation, self._workers, self._own):
            losses = [point.loss for point in simulation.losses[reported:]]
            reported = len(simulation.losses)
            costs = simulation.costs
            yield Progress(
                max(one.time_s for one in costs),
                float(np.mean([one.steps for one in costs])),
                simulation.round_index or round(float(np.mean([one.rounds for one in costs]))),
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
    text = "\n".join([table(name, progress[-1], ddp), *merge_lines(run.simulation)])
    (folder / "report.txt").write_text(text + "\n", encoding="utf-8")
    write_files(folder, progress, run.simulation)
    settings: Any = OmegaConf.to_container(cfg, resolve=True)
    write_report(record_of(name, progress, run, ddp, settings), folder)
    print(f"\n{text}\n\nAll files are in {folder}")
    return progress[-1].val_loss


def table(name: str, end: Progress, ddp: Costs) -> str:
    """Return the results as a table, with the costs of DDP for the same number of steps."""
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


def merge_lines(simulation: Simulation) -> list[str]:
    """Return lines on the merges of a syncer, and on what the time of its learners was for."""
    if (found := simulation.merge_summary) is None:
        return []
    mean = Goodput(*(float(np.mean(shares)) for shares in zip(*simulation.goodput, strict=True)))
    shares = ", ".join(f"{share:.1%} {name}" for name, share in mean._asdict().items() if share)
    return [
        f"{found.merges} merges: of each fragment every {found.sync_every:.1f} local steps, with "
        f"{found.pushes:.1f} pushes of age {found.age:.2f}",
        f"time of a worker: {shares}",
    ]


def _row(
    name: str, loss: str, time_s: float, bytes_sent: float, rounds: int, utilisation: float
) -> tuple[str, ...]:
    sent = format_bytes(round(bytes_sent))
    return name, loss, format_seconds(time_s), sent, f"{rounds:,}", f"{utilisation:.1%}"


def write_files(folder: Path, progress: list[Progress], simulation: Simulation) -> None:
    """Write the progress and the costs of each worker, as CSV and JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    goodput, merges = simulation.goodput, simulation.merge_summary
    for file, rows in (
        ("simulation.csv", [dataclasses.asdict(state) for state in progress]),
        (
            "workers.csv",
            [
                {
                    **dataclasses.asdict(one),
                    "utilisation": one.utilisation,
                    **(goodput[one.worker]._asdict() if goodput else {}),
                }
                for one in simulation.costs
            ],
        ),
    ):
        with (folder / file).open("w", newline="", encoding="utf-8") as lines:
            writer = csv.DictWriter(lines, list(rows[0]) if rows else [])
            writer.writeheader()
            writer.writerows(rows)
    last = {**dataclasses.asdict(progress[-1]), "num_workers": simulation.num_workers}
    last |= {} if merges is None else {"merges": merges._asdict()}
    (folder / "report.json").write_text(json.dumps(last, indent=2) + "\n", encoding="utf-8")


def record_of(
    name: str, progress: list[Progress], run: SimulatedRun, ddp: Costs, settings: dict[str, Any]
) -> RunRecord:
    """Return the record for the page of the run; all times are virtual."""
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
        goodput=[one.parts for one in simulation.goodput],
        events_left_out=max(0, len(simulation.timeline) - MAX_EVENTS),
        numbers={"workers": n, "local steps": round(end.steps), "rounds": end.rounds},
        bytes_sent=end.bytes_sent,
        ddp_bytes=float(ddp.bytes_sent.mean()),
        topology=None if topology is None else drawing(topology, n),
        settings=settings,
        notes=[
            "All workers were simulated in one process. Times are virtual: they follow from "
            "simulation.step_s and the links.",
            f"DDP would need {format_seconds(float(ddp.time_s.max()))} for the same number of "
            "local steps.",
            *merge_lines(simulation),
        ],
    )
