"""The training that all libraries share: model, data, local steps, and what is measured."""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from harness import Worker
from torch import Tensor, nn
from torch.optim import Optimizer

from libraries.counters import bytes_sent, forget_peak, peak_bytes
from libraries.library import Job, Library
from lightning_loco.app.demo.data import ByteTextData
from lightning_loco.app.demo.model import ByteGPT

LR = 1e-3
WARMUP_STEPS = 20
MAX_BYTES, VAL_BYTES = 4_000_000, 32_768


class Span(NamedTuple):
    """A time in seconds.

    Attributes:
        wall_s: On the clock.
        waited_s: Of that, how long the training thread had no processor.
    """

    wall_s: float
    waited_s: float

    def __add__(self, other: Any) -> Span:
        return Span(self.wall_s + other.wall_s, self.waited_s + other.waited_s)


@dataclass
class Result:
    """What one worker measured.

    Attributes:
        rounds: The library's own time in each counted phase.
        steps: The local steps that end no phase, with all that the library does in them.
        bytes_sent: In all counted rounds, of this worker.
        wall_s: Of all counted rounds.
        peak_bytes: Highest memory while training.
        val_loss: Of this worker's model at the end.
        every_step: Whether the library communicates in every step.
    """

    rounds: list[Span] = field(default_factory=list)
    steps: list[Span] = field(default_factory=list)
    bytes_sent: float = math.nan
    wall_s: float = math.nan
    peak_bytes: float = math.nan
    val_loss: float = math.nan
    every_step: bool = False


class Clock:
    """Splits each step in two: until the optimizer has taken the local step, and the time after it.

    The workers wait for each other between the two at the end of a phase, so that what comes after
    is the cost of the round and not of a slower worker's batch. Its hook has to be the optimizer's
    first.

    Args:
        optimizer: That takes the local steps.
        worker: This worker, which waits for the others.
    """

    def __init__(self, optimizer: Optimizer, worker: Worker) -> None:
        self._worker = worker
        self._ends_phase = False
        self._began = self._local_s = (0.0, 0.0)
        self.local = Span(0.0, 0.0)
        optimizer.register_step_post_hook(self._local_step_made)

    def start(self, ends_phase: bool) -> None:
        """A step begins."""
        self._ends_phase = ends_phase
        self._began = _now()

    def _local_step_made(self, *_: object) -> None:
        self.local = self._since()
        if self._ends_phase:
            self._worker.wait_for_all()
        self._began = _now()

    def stop(self) -> Span:
        """What came after the local step."""
        return self._since()

    def _since(self) -> Span:
        (wall, processor), (began, processor_then) = _now(), self._began
        return Span(wall - began, wall - began - (processor - processor_then))


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.thread_time()


def train(worker: Worker, job: Job, adapter: str) -> Result:
    """One worker's training from the same start as all others, and what it cost."""
    with Path(job.folder, f"{job.entry}-{worker.rank}.log").open("w") as log:
        for stream in (1, 2):  # what the libraries print
            os.dup2(log.fileno(), stream)
    logging.basicConfig(level=logging.WARNING)
    module, _, name = adapter.partition(":")
    kind: type[Library] = getattr(importlib.import_module(f"libraries.{module}"), name)
    num_steps = (1 + job.rounds) * job.sync_every + kind.extra_steps
    torch.manual_seed(job.seed)
    model = ByteGPT(**job.size, lr=LR, warmup_steps=WARMUP_STEPS, total_steps=num_steps)
    made: Any = model.configure_optimizers()
    batches, validation = read_data(worker, job, num_steps)
    clock = Clock(made["optimizer"], worker)
    with worker.process_group() if kind.needs_group else contextlib.nullcontext():
        library = kind(job, worker, model, made["optimizer"])
        result = Result(every_step=kind.every_step)
        run_steps(worker, job, library, made, batches, clock, result)
        with torch.no_grad():
            losses = [loss_of(model, batch).item() for batch in validation]
            result.val_loss = statistics.fmean(losses)
        worker.wait_for_all()
        library.close()
    return result


def run_steps(
    worker: Worker,
    job: Job,
    library: Library,
    made: dict[str, Any],
    batches: list[Tensor],
    clock: Clock,
    result: Result,
) -> None:
    """Take all local steps, and write what they cost into the result."""
    phase, warm, sent, started = Span(0.0, 0.0), False, math.nan, math.nan
    for index, batch in enumerate(batches, 1):
        count = index - library.extra_steps
        ends_phase = count > 0 and count % job.sync_every == 0
        clock.start(ends_phase)
        made["optimizer"].zero_grad()
        loss = loss_of(library.module, batch)
        loss.backward()
        library.step(loss.item())
        after = clock.stop()
        made["lr_scheduler"]["scheduler"].step()
        phase += after
        if warm and ends_phase:
            result.rounds.append(phase)
        elif warm:
            result.steps.append(clock.local + after)
        if ends_phase:
            phase = Span(0.0, 0.0)
        if ends_phase and not warm:  # the first round only warms up
            warm = True
            worker.wait_for_all()
            forget_peak()
            sent, started = bytes_sent(job.interface), time.perf_counter()
            worker.wait_for_all()
    worker.wait_for_all()
    result.wall_s = time.perf_counter() - started
    result.bytes_sent = bytes_sent(job.interface) - sent
    if job.is_shared:
        result.bytes_sent /= worker.num_workers
    result.peak_bytes = peak_bytes()


def loss_of(module: nn.Module, windows: Tensor) -> Tensor:
    """ByteGPT.loss, through a wrapper of the model."""
    windows = windows.long()
    return F.cross_entropy(module(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def read_data(worker: Worker, job: Job, num_steps: int) -> tuple[list[Tensor], list[Tensor]]:
    """This worker's batches, and the batches of the validation, which are the same for all."""
    data = ByteTextData(
        batch_size=job.batch_size,
        context=job.size["context"],
        max_bytes=MAX_BYTES,
        val_bytes=VAL_BYTES,
    )
    data.check(worker.num_workers)
    windows = data.train_windows
    assert windows is not None
    shuffled = torch.randperm(len(windows), generator=torch.Generator().manual_seed(job.seed))
    own = shuffled[worker.rank :: worker.num_workers].tolist()
    batches = [
        torch.stack([windows[own[(first + i) % len(own)]] for i in range(job.batch_size)])
        for first in range(0, num_steps * job.batch_size, job.batch_size)
    ]
    return batches, list(data.val_dataloader())
