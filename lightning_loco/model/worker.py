"""One worker: its group, its copy of the model, its counters, and the consensus of all."""

from __future__ import annotations

import dataclasses
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from lightning_loco._util.fault_points import reach
from lightning_loco._util.plain import plain
from lightning_loco._util.text import names_of_entries
from lightning_loco.costs import Links
from lightning_loco.distributed.devices import CPU, device_of
from lightning_loco.distributed.graceful_stop import StopAgreed, StopAgreement
from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.distributed.worker_status import GatheredStatuses, WorkerStatus, sync_point_id
from lightning_loco.model.consensus import AveragedCopies, average, consensus_distance
from lightning_loco.model.flat import Cuts, are_finite, longest_chunk
from lightning_loco.model.ownership import (
    Ownership,
    check_shards,
    check_sliceable,
    find_ownership,
)
from lightning_loco.model.replica import Replica
from lightning_loco.model.same_model import (
    broadcast_model,
    check_model,
    check_outer_device,
    check_same_blocks,
    check_same_schema,
    check_same_settings,
    check_same_tensors,
)

log = logging.getLogger(__name__)

_NO_CONSENSUS = (
    "The parameters hold NaN or infinity on every worker, so there is no consensus. Lower the "
    "learning rate, or go back to the last checkpoint."
)


class Method(Protocol):
    """What a worker must know of an algorithm."""

    @property
    def granularity(self) -> int | None:
        """The length of a slice is a multiple of this number; None for the whole vector."""

    @property
    def whole_tensors(self) -> bool:
        """Whether no slice ends within a tensor."""


class Settings(Protocol):
    """The settings of an engine."""

    @property
    def algorithm(self) -> Method:
        """The algorithm."""

    def prepare(self, num_workers: int, seed: int) -> Any:
        """Check everything against the number of workers and resolve ``"auto"`` settings."""

    @property
    def granularity(self) -> int | None:
        """Slices are cut at multiples of it; None if the vector must not be cut."""

    def fragment_slices(self, sizes: Mapping[str, int]) -> list[list[range]]:
        """The slices of the vector of parameters of these sizes that have rounds of their own."""

    def cuts(
        self, numel: int, itemsize: int, longest: int, boundaries: tuple[int, ...] = ()
    ) -> Cuts:
        """Where to cut ``numel`` elements into chunks of ``longest``; always at boundaries."""

    def describe(self) -> dict[str, Any]:
        """All settings as plain values, to compare them between workers."""

    @property
    def link(self) -> Links | None:
        """Links to emulate, equal on all workers; not part of a checkpoint."""

    @property
    def outer_device(self) -> Literal["cpu"] | None:
        """Device of messages, equal on all workers; None for the parameters' device."""


S = TypeVar("S", bound=Settings)


class Worker:
    """One worker, independent of the engine that decides when and how it exchanges.

    Attributes:
        checksum: Checksum of the initial model, equal on all workers.
        statistics: Bytes, seconds and rounds of communication so far.
        stop: This worker's part in the agreement to stop.
        steps: Local steps so far.
        steps_since_round: Local steps since the last round began.
        round_index: Rounds begun.
        was_finite: Whether this worker's parameters were finite when they were read last.
        averaged_copies: Averaged copies of the model and pruning masks, part of the consensus.
    """

    def __init__(self, group: WorkerGroup, replica: Replica, checksum: int) -> None:
        self.group = group
        self.replica = replica
        self.checksum = checksum
        self.averaged_copies = AveragedCopies(replica.model)
        self.statistics = Statistics(clock=group.clock)
        self.stop = StopAgreement(group)
        self.steps = 0
        self.begin_interval()
        self.round_index = 0
        self.was_finite = True
        self._last_loss: float | Tensor = math.nan
        self._first_step: tuple[float, int] | None = None

    @classmethod
    def join(
        cls,
        model: nn.Module,
        make_settings: Callable[[], S],
        group: WorkerGroup,
        optimized: Iterable[Tensor] | None = None,
    ) -> tuple[Worker, S]:
        """Check model and settings on all workers, and broadcast the model of worker 0.

        ``make_settings`` may raise. Of the parameters that require gradients only the ``optimized``
        ones are exchanged, by default all. ValueError or TypeError on every worker if anything does
        not fit on one of them.
        """
        seed = group.gather_objects(torch.initial_seed(), "the set-up")[0] % 2**31
        seed = int(group.agree([seed], "the set-up")[0][0])
        with group.errors_shared("the set-up"), warnings.catch_warnings():
            if group.worker != 0:
                warnings.simplefilter("ignore")
            check_model(model)
            check_shards(model.named_parameters(), group)
            settings: S = make_settings().prepare(group.num_workers, seed)
            check_outer_device(group, settings.outer_device)
            named = exchanged_parameters(model, optimized)
            granularity = None if settings.algorithm.whole_tensors else settings.granularity
            check_sliceable(named, granularity)
            slices = settings.fragment_slices({n: p.numel() for n, p in named.items()})
        ownership = find_ownership(named, slices, granularity, group)
        with group.errors_shared("the set-up"):
            replica = make_replica(model, settings, named, ownership)
        emulated = {"link": plain(settings.link), "outer_device": settings.outer_device}
        check_same_settings({**settings.describe(), **emulated}, group)
        with group.errors_shared("the set-up"):
            check_same_schema(replica.layout, group)
            check_same_tensors(model, group.gather_objects)
            check_same_blocks(model, group.gather_objects)
        replica.connect(group)
        return cls(group, replica, broadcast_model(model, group)), settings

    def check_trainable(self) -> None:
        """Raise RuntimeError if a parameter became trainable or was replaced after the start."""
        self.replica.check_owners()
        for name, parameter in self.replica.frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"Parameter {name!r} became trainable during fit, but only parameters that "
                    "require gradients at its start are exchanged. Unfreeze before fit, or call "
                    "fit again after unfreezing."
                )

    @property
    def last_loss(self) -> float | Tensor:
        """The last training loss; set it to send it with the rounds."""
        return self._last_loss

    @last_loss.setter
    def last_loss(self, loss: float | Tensor) -> None:
        self._last_loss = loss.detach() if isinstance(loss, Tensor) else loss

    @property
    def stop_agreed(self) -> str | None:
        """The reason to stop, once this worker is at the step that all have agreed on."""
        return self.stop.agreed

    def count_step(self, sync_every: int | None = None) -> None:
        """Count one local step, and check whether to stop after it.

        ``sync_every`` is the number of steps between rounds, if rounds start by steps. If not, all
        workers stop after the same number of local steps, unless one is far behind.
        """
        reach("local step")
        self.steps += 1
        self.statistics.steps += 1
        self.steps_since_round += 1
        position = 0, self.steps, 1
        if sync_every is not None:
            position = self.round_index, self.steps_since_round, sync_every
        watchdog = self.group.watchdog
        if watchdog is not None:
            watchdog.position = position
            if sync_every is None:
                watchdog.step_s = self._measure_step()
        if self.stop.requested is not None or self.stop.is_seen:
            self.stop.check(*position)

    def _measure_step(self) -> float:
        """Return the mean seconds of a local step since the first one; 0 right after that one."""
        now_s = self.group.clock.now()
        if self._first_step is None:
            self._first_step = now_s, self.steps
        began_s, first = self._first_step
        return (now_s - began_s) / max(1, self.steps - first)

    def begin_interval(self) -> None:
        """Count local steps, and their time, from here on: a round has begun."""
        self.steps_since_round = 0
        spent = self.statistics
        self._interval = self.group.clock.now() - spent.wait_s, spent.steps

    def step_s(self) -> float:
        """Return the mean seconds of a local step in this interval, without waits; 0 without one.

        The device must have finished these steps.
        """
        (began_s, first), spent = self._interval, self.statistics
        seconds, made = self.group.clock.now() - spent.wait_s - began_s, spent.steps - first
        return seconds / made if made > 0 else 0.0

    def status(self, sync_point: float) -> WorkerStatus:
        """This worker's status: its round, its steps and its loss."""
        loss = float(self.last_loss)
        return WorkerStatus(sync_point, self.round_index, self.steps_since_round, loss=loss)

    # -------------------------------------------------------------- sync points

    @torch.no_grad()
    def sync_point(self, purpose: str) -> list[WorkerStatus]:
        """Wait until all workers have reached the same sync point; for engines without rounds.

        Arguments, result and errors are as in ``Participant.sync_point``.
        """
        sync_point = self.sync_point_id(purpose)
        while True:
            status = self.status(sync_point)
            statuses = GatheredStatuses(self.group, self.statistics, status, purpose).wait()
            if self.are_together(statuses, sync_point, purpose):
                return statuses

    def sync_point_id(self, purpose: str) -> float:
        """The id of a sync point for this worker.

        A worker that stops saves at a sync point of its own kind. Without that, others that save at
        the end of their data would meet it there, go on, and wait for it at the next sync point.
        """
        stops = self.stop.agreed is not None
        return sync_point_id(f"{purpose} after a stop" if stops else purpose)

    def are_together(self, statuses: list[WorkerStatus], sync_point: float, purpose: str) -> bool:
        """Whether all workers are at this sync point; False if they are to try again.

        RuntimeError if some wait at another one; StopAgreed if the others have stopped, as agreed,
        before they came here.
        """
        if all(status.sync_point == sync_point for status in statuses):
            return True
        if self.stop.agreed is None and self.stop.catch_up():
            raise StopAgreed(self.stop.agreed)
        if self.stop.agreed is not None:
            return False
        own = f"{purpose} after {self.steps} local steps"
        found = self.group.gather_objects(own, purpose)
        raise RuntimeError(
            "Workers wait for each other at different sync points: "
            + "; ".join(f"worker {i} at {where}" for i, where in enumerate(found))
            + ". They have different numbers of batches, or not all do the same in their hooks. "
            "Give every worker the same number of batches "
            "(Trainer(limit_train_batches=...)), or validate and save at the end of epochs only."
        )

    def record_statuses(self, statuses: list[WorkerStatus]) -> None:
        """Record the workers' numbers and warn of those with NaN; RuntimeError if all have NaN."""
        self.statistics.losses = [status.loss for status in statuses]
        weights = [status.weight for status in statuses if not math.isnan(status.weight)]
        if weights:  # else it is no round
            self.statistics.participation = sum(one > 0 for one in weights) / len(weights)
            self.statistics.step_times.append([status.step_s for status in statuses])
        broken = [worker for worker, status in enumerate(statuses) if status.finite == 0]
        if len(broken) == len(statuses):
            raise RuntimeError(_NO_CONSENSUS)
        if broken and self.group.worker == self.group.place == 0:
            log.warning(
                "NaN or infinity in the parameters of worker %s at round %d: left out of the "
                "exchange; it continues from the start of the round.",
                ", ".join(map(str, broken)),
                statuses[0].round_index,
            )

    # --------------------------------------------------------------- consensus

    @torch.no_grad()
    def show_consensus(
        self,
        purpose: str = "the consensus",
        outer: Tensor | None = None,
        buffers_at_start: Tensor | None = None,
    ) -> None:
        """Put the consensus into the model, at a sync point; all workers must call it.

        The consensus is the mean over the workers whose parameters are finite, or ``outer``
        ``(P,)``, equal on all. :meth:`show_local` brings the local parameters back. If no worker's
        parameters are finite, ``outer`` is shown with the buffers of the start of the round;
        without it, that is a RuntimeError, as if a worker is missing or has failed.
        """
        replica, group, statistics = self.replica, self.group, self.statistics
        if replica.shows_consensus:
            return
        places = group.agree([are_finite(replica.layout.chunks())], purpose)
        valid = all(finite for (finite,) in places)
        status = self.status(sync_point_id(purpose))
        status = status._replace(finite=float(valid), scalars=self.averaged_copies.prepare())
        statuses = GatheredStatuses(group, statistics, status, purpose).wait()
        num_valid = round(sum(status.finite for status in statuses))
        if num_valid == 0 and outer is None:
            raise RuntimeError(_NO_CONSENSUS)
        replica.keep_local()
        replica.running_statistics.remove_before_round()
        others, buffers = replica.compare_unexchanged(group)
        if outer is not None:
            replica.layout.write(outer)
        else:
            average(replica.layout, group, statistics, valid, num_valid)
        replica.share()
        if num_valid > 0:
            average(buffers, group, statistics, valid, num_valid)
            average(others, group, statistics, valid, num_valid)
        elif buffers_at_start is not None:
            replica.restore_buffers(buffers_at_start)
        replica.share_unexchanged(group)
        self.averaged_copies.synchronize(statuses, group, statistics)

    @torch.no_grad()
    def show_local(self) -> None:
        """Put the local parameters back into the model."""
        self.replica.show_local()

    def measure_consensus(self, max_elements: int) -> float:
        """Return the consensus distance, estimated from at most ``max_elements``."""
        sample = self.replica.sample(max_elements, self.round_index)
        numel, group = self.replica.layout.numel, self.group
        own = consensus_distance(sample, numel, group, self.statistics)
        return math.hypot(*(distance for (distance,) in group.agree([own])))

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, and the local parameters and buffers."""
        params, buffers = self.replica.local()
        return {
            "round_index": self.round_index,
            "steps": self.steps,
            "steps_since_round": self.steps_since_round,
            "params": params,
            "buffers": buffers,
            "others": self.replica.local_unexchanged(),
            "running": self.replica.running_statistics.state_dict(),
            "statistics": self.statistics.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a state of :meth:`state_dict` of the same worker."""
        self.load_counters(saved)
        self.replica.set_local(saved["params"], saved["buffers"])
        if "others" in saved:
            self.replica.unexchanged.load(*saved["others"])
        self.replica.running_statistics.load_state_dict(saved["running"])

    def load_counters(self, saved: dict[str, Any]) -> None:
        """Load the counters of a state of :meth:`state_dict`."""
        self.round_index = saved["round_index"]
        self.steps = saved["steps"]
        self.statistics.load_state_dict(saved["statistics"])
        self.begin_interval()
        self.steps_since_round = saved["steps_since_round"]


def exchanged_parameters(
    model: nn.Module, optimized: Iterable[Tensor] | None = None
) -> Mapping[str, Tensor]:
    """The parameters to exchange, by name.

    Of those that require gradients only the ``optimized`` ones, by default all.
    """
    chosen = None if optimized is None else {id(p) for p in optimized}
    required = {n: p for n, p in model.named_parameters() if p.requires_grad}
    kept = {n: p for n, p in required.items() if chosen is None or id(p) in chosen}
    return kept or required


def make_replica(
    model: nn.Module, settings: Settings, named: Mapping[str, Tensor], ownership: Ownership
) -> Replica:
    """Make the copy of a model that prepared settings ask for; ValueError if it cannot be cut."""
    required, slices = settings.algorithm.granularity or 1, ownership.fragment_slices()
    if any(part.start % required for fragment in slices for part in fragment):
        raise ValueError(
            f"{type(settings.algorithm).__name__} is made of slices of {required} parameters, and "
            "what a rank of this worker owns of the fragments does not begin at multiples of it. "
            "Use fragments=None."
        )
    itemsize = max(4, *(p.element_size() for p in named.values()))
    outer = None if settings.outer_device is None else CPU
    longest = longest_chunk(outer or device_of(model))
    cuts = settings.cuts(ownership.most, itemsize, longest, ownership.boundaries)
    replica = Replica(model, cuts, named.values(), outer, ownership)
    replica.layout.chunks()
    return replica


@dataclasses.dataclass(frozen=True)
class EarlierRun:
    """The state of an earlier run: one with other settings, or other workers.

    Attributes:
        state: State that this worker has saved; worker 0's if this worker is new.
        algorithm: Name of the class of its algorithm.
        settings: Its settings, as plain values.
        has_same_workers: Whether it had as many workers, and each has its own state.
    """

    state: dict[str, Any]
    algorithm: str
    settings: dict[str, Any]
    has_same_workers: bool

    def is_of(self, algorithm: object) -> bool:
        """Return whether it was written by an algorithm of the same class."""
        return self.algorithm == type(algorithm).__name__

    @property
    def has_pending(self) -> bool:
        """Whether a round was pending."""
        return any(fragment["pending"] for fragment in self.state.get("fragments", ()))

    def dropped_by(self, algorithm: object) -> list[str]:
        """Describe the state that is dropped if all workers start from the consensus."""
        notes = ["all workers start from the consensus"]
        states = [shared["state"] for shared in self.state.get("shared", ())]
        names = names_of_entries(set().union(*states))
        if names and not self.is_of(algorithm):
            notes.append(f"the state of {self.algorithm} ({names}) is dropped")
        return notes + ["a pending round is dropped"] * self.has_pending
