"""One worker: its copy of the model, its place among the others, and where all meet."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from lightning_loco.distributed.devices import CPU, device_of
from lightning_loco.distributed.graceful_stop import StopAgreed, StopAgreement
from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.work import AllReduceSum
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.distributed.worker_status import (
    PendingStatuses,
    WorkerStatus,
    start_statuses,
    sync_point_id,
)
from lightning_loco.fault_points import reach
from lightning_loco.links.links import Links
from lightning_loco.parameters.averaged_copies import AveragedCopies
from lightning_loco.parameters.flat import Cuts, are_finite, longest_chunk
from lightning_loco.parameters.replica import Replica, average
from lightning_loco.parameters.schema import (
    check_carries,
    check_model,
    check_same_schema,
    check_same_settings,
    check_same_tensors,
    share_from_worker_0,
)
from lightning_loco.values import plain

log = logging.getLogger(__name__)

_NO_CONSENSUS = (
    "The parameters hold NaN or infinity on every worker, so there is no consensus. Lower the "
    "learning rate, or go back to the last checkpoint."
)


class Settings(Protocol):
    """What an engine is told by its user."""

    def prepare(self, num_workers: int, seed: int) -> Any:
        """Check everything against the number of workers and resolve ``"auto"`` settings."""

    def cuts(self, sizes: Mapping[str, int], itemsize: int, longest: int) -> Cuts:
        """How to cut parameters of these names and sizes into chunks; after :meth:`prepare`.

        ``longest``: elements of a chunk that the device works on best.
        """

    def describe(self) -> dict[str, Any]:
        """Everything as plain values, for a comparison between workers."""

    @property
    def link(self) -> Links | None:
        """Links that are emulated, the same on all workers; of no meaning to a checkpoint."""

    @property
    def outer_device(self) -> Literal["cpu"] | None:
        """Where messages are made, likewise; None: where the parameters are."""


S = TypeVar("S", bound=Settings)


class Engine(Protocol):
    """What a worker asks of its engine at a sync point."""

    def rest(self) -> None:
        """Bring to an end what cannot wait until after the sync point."""

    def statuses_at_sync_point(self, place: float, words: str) -> list[WorkerStatus] | None:
        """Tell the others this worker's status; None if they had a round to make, which is done."""

    def outer(self) -> Tensor | None:
        """The outer parameters ``(P,)``, or None if there are none that all workers share."""


class Worker:
    """Everything of a worker that does not depend on when and how it exchanges.

    Args:
        group: The workers.
        replica: This worker's copy of the model.
        checksum: Of the initial model, equal on all workers.

    Attributes:
        statistics: What communication cost so far.
        stop: This worker's part in the agreement to stop.
        engine: Who makes rounds for this worker; without one, sync points are all there is.
        steps: Local steps so far.
        steps_since_round: Local steps since the last round began.
        round_index: Rounds begun.
        shows_outer: Whether the consensus is the engine's outer parameters, if it has any, instead
            of the mean of the local ones.
        was_finite: Whether this worker's parameters were finite when it last looked.
        companions: What belongs to the consensus beside the replica.
    """

    def __init__(self, group: WorkerGroup, replica: Replica, checksum: int) -> None:
        self.group = group
        self.replica = replica
        self.checksum = checksum
        self.averaged_copies = AveragedCopies(replica.model)
        self.statistics = Statistics()
        self.stop = StopAgreement(group)
        self.engine: Engine | None = None
        self.steps = 0
        self.steps_since_round = 0
        self.round_index = 0
        self.was_finite = True
        self.shows_outer = False
        self._last_loss: float | Tensor = math.nan

    @classmethod
    def join(
        cls,
        model: nn.Module,
        make_settings: Callable[[], S],
        group: WorkerGroup,
        optimized: Iterable[Tensor] | None = None,
    ) -> tuple[Worker, S]:
        """Check model and settings on all workers, and share the start of worker 0.

        Of the parameters that require gradients, those in ``optimized`` are exchanged, or all.
        A ValueError or TypeError is raised on every worker if anything does not fit on one of them.
        """
        seed = group.gather_objects(torch.initial_seed(), "the set-up")[0] % 2**31
        with group.errors_shared("the set-up"), warnings.catch_warnings():
            if group.worker != 0:
                warnings.simplefilter("ignore")
            check_model(model)
            settings: S = make_settings().prepare(group.num_workers, seed)
            chosen = None if optimized is None else {id(p) for p in optimized}
            required = {n: p for n, p in model.named_parameters() if p.requires_grad}
            kept = {n: p for n, p in required.items() if chosen is None or id(p) in chosen}
            trainable = kept or required
            itemsize = max(4, *(p.element_size() for p in trainable.values()))
            outer = None if settings.outer_device is None else CPU
            check_carries(group, settings.outer_device)
            longest = longest_chunk(outer or device_of(model))
            cuts = settings.cuts({n: p.numel() for n, p in trainable.items()}, itemsize, longest)
            replica = Replica(model, cuts, trainable.values(), outer)
            replica.layout.chunks()
        here = {"link": plain(settings.link), "outer_device": settings.outer_device}
        check_same_settings({**settings.describe(), **here}, group)
        check_same_schema(replica.layout, group)
        check_same_tensors(model, group.gather_objects)
        return cls(group, replica, share_from_worker_0(model, group)), settings

    def check_trainable(self) -> None:
        """Raise RuntimeError if a parameter became trainable or was replaced after the start."""
        self.replica.places.check()
        for name, parameter in self.replica.frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"Parameter {name!r} became trainable during fit, but only parameters that "
                    "require gradients at its start are exchanged. Unfreeze before fit, or call "
                    "fit again after unfreezing."
                )

    @property
    def last_loss(self) -> float | Tensor:
        """Set it to the last training loss, to have it travel with the rounds."""
        return self._last_loss

    @last_loss.setter
    def last_loss(self, loss: float | Tensor) -> None:
        self._last_loss = loss.detach() if isinstance(loss, Tensor) else loss

    @property
    def stop_agreed(self) -> str | None:
        """The reason to stop, once this worker is at the step that all have agreed on."""
        return self.stop.agreed

    def count_step(self, sync_every: int | None = None) -> None:
        """Count one local step, and see whether to stop after it.

        ``sync_every``: local steps of this worker between rounds, if rounds go by steps.
        """
        reach("local step")
        self.steps += 1
        self.steps_since_round += 1
        watchdog = self.group.watchdog
        if watchdog is not None and sync_every is not None:
            watchdog.position = (self.round_index, self.steps_since_round, sync_every)
        if self.stop.requested is not None or (watchdog is not None and watchdog.stop_seen):
            self.stop.note(self.round_index, self.steps_since_round, sync_every)

    def status(self, place: float) -> WorkerStatus:
        """Where this worker is, for the others."""
        loss = float(self.last_loss)
        return WorkerStatus(place, self.round_index, self.steps_since_round, loss=loss)

    def send_status(self, status: WorkerStatus, words: str) -> PendingStatuses:
        """Send this worker's status by itself."""
        return start_statuses(self.group, self.statistics, status, words)

    # ---------------------------------------------------------------- sync points

    @torch.no_grad()
    def sync_point(self, purpose: str) -> list[WorkerStatus]:
        """Wait until all workers have come to the same place, taking part in rounds meanwhile.

        The parameters are looked at only if there is a round to take part in. ``purpose`` says
        where, in words that are equal on all workers. Returns what every worker said on arrival.

        Raises:
            RuntimeError: If a worker is missing or has failed, or waits somewhere else.
            StopAgreed: If the others have stopped, as agreed, before they came here.
        """
        place = sync_point_id(purpose)
        while True:
            if self.engine is not None:
                self.engine.rest()
                statuses = self.engine.statuses_at_sync_point(place, purpose)
            else:
                statuses = self.send_status(self.status(place), purpose).wait()
            if statuses is None:
                continue
            if all(status.sync_point == place for status in statuses):
                return statuses
            self._part(purpose)

    def _part(self, purpose: str) -> None:
        """Leave a sync point that cannot take place, because some workers wait elsewhere."""
        if self.stop.agreed is None and self.stop.catch_up():
            raise StopAgreed(self.stop.agreed)
        if self.stop.agreed is not None:
            return
        places = self.group.gather_objects(f"{purpose} after {self.steps} local steps", purpose)
        raise RuntimeError(
            "Workers wait for each other in different places: "
            + "; ".join(f"worker {i} in {where}" for i, where in enumerate(places))
            + ". They have different numbers of batches, or not all do the same in their hooks. "
            "Give every worker the same number of batches "
            "(Trainer(limit_train_batches=...)), or validate and save at the end of epochs only."
        )

    def record_statuses(self, statuses: list[WorkerStatus]) -> None:
        """Take note of what the workers said; RuntimeError if no parameters are finite."""
        self.statistics.losses = [status.loss for status in statuses]
        broken = [worker for worker, status in enumerate(statuses) if status.finite == 0]
        if len(broken) == len(statuses):
            raise RuntimeError(_NO_CONSENSUS)
        if broken and self.group.worker == 0:
            log.warning(
                "NaN or infinity in the parameters of worker %s at round %d: left out of the "
                "exchange; it goes on from the start of the round.",
                ", ".join(map(str, broken)),
                statuses[0].round_index,
            )

    # --------------------------------------------------------------- consensus

    @torch.no_grad()
    def show_consensus(self, purpose: str = "the consensus") -> None:
        """Put the consensus into the model; :meth:`show_local` brings the local parameters back.

        The consensus is the mean over the workers whose parameters are finite, or the outer
        parameters (see :attr:`shows_outer`). All workers must call it.

        Raises:
            RuntimeError: If no worker's parameters are finite, or as in :meth:`sync_point`.
        """
        replica, group, statistics = self.replica, self.group, self.statistics
        if replica.shows_consensus:
            return
        self.sync_point(purpose)
        valid = are_finite(replica.layout.chunks())
        status = self.status(sync_point_id(purpose))
        status = status._replace(finite=float(valid), scalars=self.averaged_copies.look())
        statuses = self.send_status(status, purpose).wait()
        num_valid = round(sum(status.finite for status in statuses))
        if num_valid == 0:
            raise RuntimeError(_NO_CONSENSUS)
        replica.keep_local()
        replica.running.leave_since_round()
        others, buffers = replica.find_differing(group)
        outer = self.engine.outer() if self.engine is not None and self.shows_outer else None
        if outer is not None:
            replica.layout.write(outer)
        else:
            average(replica.layout, group, statistics, valid, num_valid)
        average(buffers, group, statistics, valid, num_valid)
        average(others, group, statistics, valid, num_valid)
        self.averaged_copies.agree(statuses, group, statistics)

    @torch.no_grad()
    def show_local(self) -> None:
        """Put the local parameters back into the model."""
        self.replica.show_local()

    def measure_consensus(self, max_elements: int) -> float:
        """Root mean square distance to the mean, from a sample of elements, the same everywhere."""
        sample = self.replica.sample(max_elements, self.round_index)
        n = self.group.num_workers
        sums = torch.cat([sample, sample.square().sum().view(1)])
        AllReduceSum(self.group, self.statistics, sums, "the consensus distance").wait()
        variance = (sums[-1] / n - (sums[:-1] / n).square().sum()).clamp_(min=0)
        return math.sqrt(float(variance) * self.replica.layout.numel / max(sample.numel(), 1))

    def state_dict(self) -> dict[str, Any]:
        """Where this worker is, and its local parameters and buffers."""
        params, buffers = self.replica.local()
        return {
            "round_index": self.round_index,
            "steps": self.steps,
            "steps_since_round": self.steps_since_round,
            "params": params,
            "buffers": buffers,
            "others": self.replica.local_others(),
            "running": self.replica.running.state_dict(),
            "statistics": self.statistics.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from a state of :meth:`state_dict` of the same worker."""
        self.go_on_counting(saved)
        self.replica.set_local(saved["params"], saved["buffers"])
        if "others" in saved:
            self.replica.others.load(*saved["others"])
        self.replica.running.load_state_dict(saved.get("running", {}))

    def go_on_counting(self, saved: dict[str, Any]) -> None:
        """Take the counters alone from a state of :meth:`state_dict`."""
        self.round_index = saved["round_index"]
        self.steps = saved["steps"]
        self.steps_since_round = saved["steps_since_round"]
        self.statistics.load_state_dict(saved["statistics"])
