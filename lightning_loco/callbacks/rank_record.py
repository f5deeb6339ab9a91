"""Records of single ranks, merged at the end of the run."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_loco.__about__ import __version__
from lightning_loco._util.plain import plain
from lightning_loco.distributed import Statistics, json_messages
from lightning_loco.distributed.statistics import IN_BACKGROUND, Span, Spans
from lightning_loco.engine import Engine
from lightning_loco.report.record import Curve, Drawing, RunRecord, round_to
from lightning_loco.strategies.engine_strategy import EngineStrategy
from lightning_loco.strategies.summary import bytes_of_ddp, errors_as_warnings, parts_of_time
from lightning_loco.strategies.worker_strategy import WorkerStrategy, worker_and_place
from lightning_loco.topology import Topology, spectral_gap

MAX_POINTS, MAX_SPANS = 32_000, 16_000
"""Points of training losses, and spans of time, of all ranks together; each has at least 100."""

MAX_UNREAD = 1000
"""Losses that wait to be read, for a Trainer that logs nothing."""

MAX_SOLVED = 512
"""Workers of a topology whose spectral gap is computed, which takes their number cubed."""

Position = tuple[int, float, float | None]
"""Step, seconds since the start of training, and bytes sent so far if they are known."""

STEPS = "local steps"
"""Name of their number in a record."""

NOT_MEASURED = (
    "The consensus distance was not measured in rounds: the callback ConsensusMonitor does that."
)
OF_DDP = (
    "DDP's bytes are for a ring all-reduce of all gradients in every step: 2 (N - 1) / N "
    "times their size, if each of the N workers were one rank."
)
WAITS_IN_STEPS = (
    "This strategy waits for other ranks inside its steps, which the timeline shows as computing."
)
ONLY_OWN = "The run has ended early: what the other ranks have recorded is not known."


class RankRecord:
    """Records one rank while it trains, and merges the records of all ranks.

    It is created when training starts. Times are from ``time.monotonic``.

    Attributes:
        spans: When this rank waited, validated and so on.
        validation_began_s: When the last validation began.
        settings: Of the strategy, the module and the Trainer, as plain values.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._started_s, self._started = time.monotonic(), time.time()
        self.validation_began_s = self._started_s
        self._first_step = trainer.global_step
        strategy, world = trainer.strategy, trainer.world_size
        worker, self._place = worker_and_place(strategy)
        self.spans = Spans(max(100, min(1000, MAX_SPANS // world)))
        if isinstance(strategy, WorkerStrategy):
            self._name = f"worker {worker}"
            if strategy.replica_size > 1:
                self._name += f", place {self._place}"
            strategy.statistics.spans = self.spans
        else:
            self._name = f"rank {worker}"
        most = max(100, min(1000, MAX_POINTS // world)) // 2 * 2
        self._losses = Curve("train_loss", f"training, {self._name}", max_points=most)
        self._unread: list[tuple[Position, int, Tensor]] = []
        self._rates: dict[str, Curve] = {}
        self._metrics: dict[str, Curve] = {}
        self._consensus = Curve("consensus", "consensus distance")
        self._last_distance: float | None = None
        module = trainer.lightning_module
        trained = [p for p in module.parameters() if p.requires_grad]
        self._num_bytes = sum(p.numel() * p.element_size() for p in trained)
        self.settings: dict[str, Any] = {}
        with errors_as_warnings("The report has no settings of the module and the Trainer."):
            self.settings = describe(trainer)

    @property
    def _statistics(self) -> Statistics | None:
        strategy = self._trainer.strategy
        return strategy.statistics if isinstance(strategy, WorkerStrategy) else None

    @contextlib.contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """A context whose time is a span."""
        started_s = time.monotonic()
        yield
        self.spans.add(kind, started_s, time.monotonic())

    # ------------------------------------------------------------------- while training

    def position(self) -> Position:
        """Return the step, the seconds and the bytes sent so far, which may not be known."""
        step, statistics = self._trainer.global_step, self._statistics
        num_bytes: float | None = None
        if statistics is not None:
            num_bytes = statistics.worker_bytes_sent
        elif isinstance(self._trainer.strategy, DDPStrategy):
            num_bytes = bytes_of_ddp(self._trainer.world_size, self._num_bytes, step)
        return step, time.monotonic() - self._started_s, num_bytes

    def keep_loss(self, loss: Any, factor: int) -> None:
        """Keep ``factor`` times a loss; it is read later, with the others."""
        if self._place == 0 and isinstance(loss, Tensor) and loss.numel() == 1:
            self._unread.append((self.position(), factor, loss.detach().reshape(())))
        if len(self._unread) == MAX_UNREAD:
            self.read_losses()

    def read_losses(self) -> None:
        """Read the losses since the last call: once, for all of them."""
        unread, self._unread = self._unread, []
        if not unread:
            return
        values = torch.stack([loss for *_, loss in unread]).tolist()
        for (position, factor, _), value in zip(unread, values, strict=True):
            self._losses.add(*position, factor * value)

    def record_rates(self) -> None:
        """Record the learning rates, on rank 0."""
        if not self._trainer.is_global_zero:
            return
        for optimizer in self._trainer.optimizers:
            for number, group in enumerate(optimizer.param_groups):
                name = type(optimizer).__name__
                if len(optimizer.param_groups) > 1:
                    name += f", group {number}"
                curve = self._rates.setdefault(name, Curve("learning_rate", name))
                curve.add(*self.position(), float(group["lr"]))

    def record_consensus(self) -> None:
        """Record the consensus distance if another one has been measured."""
        statistics = self._statistics
        distance = None if statistics is None else statistics.consensus_distance
        if distance is not None and distance is not self._last_distance:  # also an equal one
            self._last_distance = distance
            self._consensus.add(*self.position(), distance)

    def record_metrics(self, metrics: Mapping[str, Tensor]) -> None:
        """Record the metrics of a validation."""
        for name, value in metrics.items():
            kind = "validation" if "loss" in name else "metric"
            curve = self._metrics.setdefault(name, Curve(kind, name))  # type: ignore[arg-type]
            curve.add(*self.position(), float(value))

    # --------------------------------------------------------------------------- the end

    def to_json(self) -> dict[str, Any]:
        """Return the record of this rank for rank 0, as plain values."""
        self.read_losses()
        statistics, end_s = self._statistics, time.monotonic()
        if statistics is not None:
            statistics.spans = None
        spans, seconds = self.spans, end_s - self._started_s
        shares = {"compute": seconds - min(spans.busy_s, seconds), **spans.seconds}
        kept = [*computing(spans, self._started_s, end_s), *spans.kept()]
        # Seconds since 1970: clocks of different machines have nothing else in common.
        shift_s = self._started - self._started_s
        return {
            "name": self._name,
            "seconds": seconds,
            "events": [[kind, start + shift_s, end + shift_s] for kind, start, end in kept],
            "shares": shares,
            "left_out": spans.left_out,
            "losses": self._losses.to_json() if self._place == 0 else None,
            "bytes": self.position()[2],
            "wait_s": statistics and statistics.wait_s - statistics.resumed_wait_s,
            "goodput": parts_of_time(statistics) if statistics is not None else {},
        }

    def record_of_run(
        self, ranks: list[dict[str, Any]], settings: dict[str, Any], ended: str
    ) -> RunRecord:
        """Merge the records of some or all ranks, the first one first."""
        trainer, strategy = self._trainer, self._trainer.strategy
        curves, texts = [], dict[str, int]()
        for lane, rank in enumerate(ranks):
            if rank["losses"] is not None:
                curve = Curve.from_json(rank["losses"])
                curve.lane = lane
                curves.append(curve)
            for text, count in rank["warnings"].items():
                texts[text] = texts.get(text, 0) + count
        sent = [rank["bytes"] for rank in ranks if rank["losses"] is not None]
        is_known = bool(sent) and None not in sent
        step = trainer.global_step
        notes_of_run = [OF_DDP] if self._ddp_bytes(step) is not None else []
        if trainer.world_size > 1 and not isinstance(strategy, WorkerStrategy):
            notes_of_run.append(WAITS_IN_STEPS)
        if ended and trainer.world_size > len(ranks):
            notes_of_run.append(ONLY_OWN)
        numbers: dict[str, Any] = {STEPS: step}
        if self._first_step:
            numbers["resumed at step"] = self._first_step
        if self._statistics is not None:
            numbers["rounds"] = self._statistics.rounds
            if self._statistics.straggler is not None:
                numbers["straggler"] = str(self._statistics.straggler)
        if isinstance(strategy, EngineStrategy) and not self._consensus.points:
            notes_of_run.append(NOT_MEASURED)
            if (distance := strategy.statistics.consensus_distance) is not None:
                numbers["consensus distance"] = round_to(distance, 4)
        waits = [rank["wait_s"] for rank in ranks if rank["wait_s"] is not None]
        return RunRecord(
            title=title(trainer),
            started=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self._started)),
            ended=f"Ended early. {ended}" if ended else "",
            seconds=ranks[0]["seconds"],
            lanes=[rank["name"] for rank in ranks],
            curves=[*curves, *self._metrics.values(), *self._rates.values(), self._consensus],
            events=[
                (lane, kind, start - self._started, end - self._started)
                for lane, rank in enumerate(ranks)
                for kind, start, end in rank["events"]
            ],
            shares=[rank["shares"] for rank in ranks],
            goodput=[rank["goodput"] for rank in ranks if rank["goodput"]],
            events_left_out=sum(rank["left_out"] for rank in ranks),
            numbers=numbers,
            bytes_sent=sum(sent) / len(sent) if is_known else None,
            ddp_bytes=self._ddp_bytes(step),
            wait_s=sum(waits) / len(waits) if waits else None,
            topology=drawing_of(trainer),
            settings={**self.settings_of_strategy(), **settings},
            versions=versions(trainer),
            warnings=texts,
            notes=notes_of_run,
        )

    def settings_of_strategy(self) -> dict[str, Any]:
        """Return the settings of the strategy, of its engine if it has one."""
        strategy = self._trainer.strategy
        found = {"class": type(strategy).__name__}
        if isinstance(strategy, WorkerStrategy) and strategy.participant is not None:
            found |= strategy.participant.describe()
        return {"strategy": found}

    def _ddp_bytes(self, steps: int) -> float | None:
        strategy = self._trainer.strategy
        if not isinstance(strategy, WorkerStrategy) or strategy.statistics.members is not None:
            return None
        return bytes_of_ddp(strategy.num_workers, self._num_bytes, steps) or None


def computing(spans: Spans, start_s: float, end_s: float) -> Iterator[Span]:
    """Yield the time that no span covers: the rank computed, or loaded data.

    Nothing is known about the time of the spans that were left out.
    """
    kept = spans.kept()
    others = [(start, end) for kind, start, end in kept if kind not in IN_BACKGROUND]
    if spans.left_out:  # between the ends of the last one before and the first one after them
        others.append((kept[spans.limit - 1][2], kept[spans.limit][2]))
    free_from = start_s
    for start, end in sorted(others):
        if start > free_from:
            yield "compute", free_from, start
        free_from = max(free_from, end)
    if end_s > free_from:
        yield "compute", free_from, end_s


def gather(trainer: pl.Trainer, value: Any) -> list[Any]:
    """Return the values of all ranks that train: text, numbers, None, lists and dictionaries.

    All of them must call it. RuntimeError, as in every collective, if one does not.
    """
    strategy, label = trainer.strategy, "the report of the run"
    if isinstance(strategy, WorkerStrategy):
        return strategy.gather(value, label)
    group = dist.group.WORLD
    if trainer.world_size == 1 or group is None:
        return [value]
    names = [f"Rank {rank}" for rank in range(trainer.world_size)]
    messages = json_messages.all_gather(json_messages.write(value), group, names)
    return [json_messages.read(*pair) for pair in zip(messages, names, strict=True)]


# ------------------------------------------------------------------------ facts of a run


def title(trainer: pl.Trainer) -> str:
    """Return the heading of the page: the method and the number of workers."""
    strategy = trainer.strategy
    name, count = type(strategy).__name__.removesuffix("Strategy"), trainer.world_size
    if not isinstance(strategy, WorkerStrategy):
        return f"{name}, {count} rank{'s' if count > 1 else ''}"
    if isinstance(strategy, EngineStrategy) and strategy.engine is not None:
        if type(strategy).__name__ in ("LocoStrategy", "LocoModelParallelStrategy"):
            name = type(strategy.engine.settings.algorithm).__name__
        count = strategy.statistics.members or strategy.num_workers
    else:
        count = strategy.num_workers
    text = f"{name}, {count} worker{'s' if count > 1 else ''}"
    return text + (f" of {size} ranks" if (size := strategy.replica_size) > 1 else "")


def describe(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the settings of the module and the Trainer, as plain values."""
    module = trainer.lightning_module
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    names = ["max_steps", "max_epochs", "accumulate_grad_batches", "gradient_clip_val", "precision"]
    names += ["num_devices", "num_nodes", "num_training_batches", "val_check_interval"]
    return {
        "module": {
            "class": type(module).__name__,
            "trainable parameters": trained,
            **{str(name): str(plain(value))[:300] for name, value in module.hparams.items()},
        },
        "trainer": {name: plain(getattr(trainer, name)) for name in names},
    }


def versions(trainer: pl.Trainer) -> dict[str, str]:
    """Return the versions of programs, and the machine of rank 0."""
    device = trainer.strategy.root_device
    found = {
        "lightning_loco": __version__,
        "torch": torch.__version__,
        "lightning": pl.__version__,
        "Python": platform.python_version(),
        "machine": platform.platform(),
    }
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
    return found


def drawing_of(trainer: pl.Trainer) -> Drawing | None:
    """Return the topology of a run that has one."""
    strategy = trainer.strategy
    engine = strategy.engine if isinstance(strategy, EngineStrategy) else None
    topology = engine.settings.topology if isinstance(engine, Engine) else None
    if not isinstance(topology, Topology) or engine is None:
        return None
    return drawing(topology, engine.worker.group.num_workers)


def drawing(topology: Topology, workers: int) -> Drawing:
    """Return the drawing of a topology of ``workers`` workers."""
    period = topology.period(workers)
    edges = {
        (min(worker, other), max(worker, other))
        for round_index in range(min(period or 1, 64))
        for worker in range(workers)
        for other in topology.weights(worker, workers, round_index)
        if other != worker
    }
    note = ""
    if period is None:
        note = "Who exchanges with whom is drawn at random for each round; this is the first one."
    elif period > 1:
        note = f"The rounds repeat after {period}; these are the pairs of all of them."
    gap = spectral_gap(topology, workers) if workers <= MAX_SOLVED else None
    return Drawing(topology.name, workers, tuple(sorted(edges)), gap, note)
