"""Counts the local steps of one worker and makes its rounds when the schedule says so."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_loco.distributed.devices import device_of
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.distributed.worker_status import (
    IN_ROUND,
    PendingStatuses,
    SeparateStatuses,
    StatusCarrier,
    WorkerStatus,
)
from lightning_loco.engine.exchanges.all_reduce import StatusesWithBucket
from lightning_loco.engine.exchanges.base import Exchange, make_exchange
from lightning_loco.engine.fragment import Fragment
from lightning_loco.engine.fragment_sync import FragmentSync, PendingRound
from lightning_loco.engine.link_emulator import LinkEmulator
from lightning_loco.engine.membership import Link
from lightning_loco.engine.settings import RoundSettings
from lightning_loco.schedules import Now
from lightning_loco.worker import Worker


class Engine:
    """One worker's part in the training of all.

    Args:
        model: The module to train; its trainable parameters are exchanged.
        make_settings: Makes the settings; may raise, on all workers then.
        group: The workers. Default: all ranks of the default process group, with groups of its own.
        optimized: Exchange only those trainable parameters. Default: all of them.

    Attributes:
        worker: What is this worker's whatever its schedule: place, replica, sync points, consensus.
        fragments: The rounds of each part of the parameters that the schedule exchanges by itself.
        settings: Checked against the number of workers, without ``"auto"``.
        statistics: What communication cost so far.
        paused: Set it to make no rounds for a while; the same on all workers.
        consensus_every: Measure the consensus distance every that many rounds; 0 for never.
        consensus_elements: How many elements to look at.
        link: Connects with members that come and go; None if all ranks take part all the time.
        measure_outer_gradient: Whether rounds measure its norm (one more pass over memory).

    Raises:
        ValueError: Or TypeError on every worker, if the model or the settings do not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        make_settings: Callable[[], RoundSettings],
        group: WorkerGroup | None = None,
        optimized: Iterable[Tensor] | None = None,
    ) -> None:
        group = group if group is not None else WorkerGroup.create(device=device_of(model))
        try:
            self.worker, self.settings = Worker.join(model, make_settings, group, optimized)
            made = make_fragments(self.worker, self.settings)
        except BaseException as error:
            group.close(error)
            raise
        self.fragments, self._carriers, exchange, self.link = made
        self.statistics = self.worker.statistics
        self.paused = self.measure_outer_gradient = False
        self.consensus_every, self.consensus_elements = 0, 8192
        self._schedule = self.settings.schedule.of_worker(group.worker)
        self._sync_every = self._schedule.sync_every_of(group.worker)
        self._is_weighted = exchange.is_weighted
        self._takes_part = False
        self._unread: PendingStatuses | None = None
        self.statistics.staleness = self._schedule.staleness_of(group.worker)
        self.buffers_at_start = self.worker.replica.buffers.new_flat()
        self.worker.engine = self
        self.worker.shows_outer = self.link is not None

    @classmethod
    def from_settings(
        cls,
        model: nn.Module,
        settings: RoundSettings,
        group: WorkerGroup | None = None,
        optimized: Iterable[Tensor] | None = None,
    ) -> Self:
        """An engine of settings that are made already."""
        Engine.__init__(engine := cls.__new__(cls), model, lambda: settings, group, optimized)
        return engine

    def join(self) -> None:
        """Where workers come and go: take part, before the first step, in the run's state."""
        if self.link is not None:
            self.link.join(self)

    def step(self) -> bool:
        """Count one local step and make the rounds that are due.

        Returns:
            Whether a round has begun or ended.

        Raises:
            RuntimeError: If a worker is missing or has failed, or no worker is finite.
        """
        self.count_step()
        if due := self.is_due:
            self.make_round()
        return due

    def count_step(self) -> None:
        """Count one local step without making a round."""
        self.worker.count_step(self._schedule.places_in(self.worker.round_index))

    @property
    def is_due(self) -> bool:
        """Whether a round is to begin or to end after the step that was counted last."""
        return not self.paused and any(begin or end for begin, end in self._due())

    @property
    def _turn(self) -> int:  # the fragment that the next round moves
        return self.worker.round_index % len(self.fragments)

    def _due(self) -> list[tuple[bool, bool]]:
        worker, now_s = self.worker, time.monotonic()
        counts = (worker.steps, worker.steps_since_round, worker.round_index)
        fragments = enumerate(self.fragments)
        nows = [
            Now(*counts, i, now_s - fragment.applied_at, fragment.pending)
            for i, fragment in fragments
        ]
        return [self._schedule.due(now) for now in nows]

    @torch.no_grad()
    def make_round(self) -> None:
        """End the rounds that have come to their end and begin what is due; at least begin one."""
        if self.link is not None:
            self._settle()
        dues = self._due()
        begins = any(begin for begin, _ in dues) or not any(end for _, end in dues)
        for index, (_, end) in enumerate(dues):
            if end and not (begins and index == self._turn):
                self._apply(index)
        if begins:
            self._settle()
            self._begin(IN_ROUND, f"round {self.worker.round_index}")

    def _begin(self, place: float, words: str, unread: PendingStatuses | None = None) -> None:
        """Begin a round, and end it in the same turn if the schedule says so.

        ``place`` and ``words`` say where this worker is; ``unread`` are the workers' statuses, if
        they are under way already.
        """
        worker, turn = self.worker, self._turn
        for index in range(len(self.fragments)) if self.link is not None else ():
            if index != turn:
                self._apply(index)  # newcomers get the state as it is between two rounds
        fragment = self.fragments[turn]
        worker.check_trainable()
        if unread is None:
            status = self._look(place)
            unread = self._carriers[turn].carry(self.statistics, status, words)
            if self._is_weighted:
                unread.complete = lambda: self.worker.send_status(status, words).wait()
        self._unread = unread
        every = self.consensus_every if self._sync_every is not None and self.link is None else 0
        if every and worker.round_index % every == 0:
            unread.wait()
            self.statistics.consensus_distance = worker.measure_consensus(self.consensus_elements)
        before = fragment.pending
        pending = PendingRound(worker.round_index, unread, self._takes_part, worker.steps)
        if self._schedule.is_overlapped(worker.round_index):
            fragment.begin(pending)
        elif self.link is None:
            fragment.make(pending)
        else:
            fragment.begin(pending, is_overlapped=False)
            self.link.catch_up()
            fragment = self.fragments[self._turn]
            fragment.apply()
        is_blocking = fragment.pending is None
        if before is not None or is_blocking:
            self.statistics.outer_grad_norm = fragment.gradient_norm
        self.statistics.rounds += self._sync_every is not None
        fragment.began_at = fragment.fresh_at = worker.steps
        if not worker.was_finite:
            worker.replica.put_back_buffers(self.buffers_at_start)
        if is_blocking:
            worker.replica.running.note(worker.steps_since_round)
        self.buffers_at_start = worker.replica.buffers.new_flat()
        worker.round_index += 1
        worker.steps_since_round = 0
        if unread.has_been_read:
            self._settle()

    def _look(self, place: float) -> WorkerStatus:
        """Look at the parameters, and say what the others should know of them."""
        worker, fragment = self.worker, self.fragments[self._turn]
        fragment.measure_gradient = self.measure_outer_gradient
        worker.was_finite = finite = fragment.look()
        moved = worker.steps > fragment.fresh_at or self._sync_every is None
        self._takes_part = finite and moved
        if not finite:
            for rounds in self.fragments:
                if rounds is not fragment:
                    rounds.go_back()
        spread = math.nan if fragment.gradient_norm is None else fragment.gradient_norm**2
        return self._status(place)._replace(weight=self._takes_part, finite=finite, spread=spread)

    def _status(self, place: float) -> WorkerStatus:
        """Where this worker is, without a look at its parameters."""
        algorithm, fragment = self.settings.algorithm, self.fragments[self._turn]
        numbers = algorithm.scalars(fragment.fragment.state) if algorithm.num_scalars else ()
        steps = self.worker.steps - fragment.began_at
        return self.worker.status(place)._replace(steps=steps, scalars=tuple(map(float, numbers)))

    def _apply(self, index: int) -> None:
        """End the pending round of a fragment, if there is one."""
        fragment, statistics = self.fragments[index], self.statistics
        if (pending := fragment.pending) is None:
            return
        fragment.apply()
        fragment.applied_at = time.monotonic()
        statistics.outer_grad_norm = fragment.gradient_norm
        if not self.worker.was_finite:
            self.worker.replica.put_back_buffers(self.buffers_at_start)
        if self._sync_every is None:
            statistics.rounds += 1
            statistics.staleness = self.worker.steps - pending.began_at
        if self._unread is pending.statuses:
            self._settle()

    def _settle(self) -> None:
        """Take note of what the workers said with the last round, at the end of a local step."""
        unread, self._unread = self._unread, None
        if unread is None:
            return
        self.worker.record_statuses(statuses := unread.wait())
        if self.link is not None:
            self.link.catch_up()
        spreads = [status.spread for status in statuses if math.isfinite(status.spread)]
        if spreads and self._sync_every is None:
            self.statistics.consensus_distance = math.sqrt(sum(spreads) / len(spreads))

    def rest(self) -> None:
        """Bring to an end what cannot wait until after a sync point."""
        self._settle()
        for index in range(len(self.fragments)) if self._schedule.applies_at_sync_points else ():
            self._apply(index)

    def statuses_at_sync_point(self, place: float, words: str) -> list[WorkerStatus] | None:
        """Tell the others that this worker is at a sync point; None after a round with them."""
        unread = self._carriers[self._turn].sync_point(self.statistics, self._status(place), words)
        if unread is None:
            self._begin(place, words)
            return None
        if self._is_weighted:
            unread.complete = lambda: self.worker.send_status(self._look(place), words).wait()
        statuses = unread.wait()
        if any(status.sync_point == IN_ROUND for status in statuses):
            if not self._is_weighted:
                self._look(place)
            self._begin(place, words, unread)
            return None
        self.worker.record_statuses(statuses)
        return statuses

    def outer(self) -> Tensor | None:
        """The outer parameters ``(P,)``; None if the algorithm has none that all workers share."""
        key = self.settings.consensus_key
        return None if key is None else self.fragments[0].fragment.state[key]

    @torch.no_grad()
    def finish(self, purpose: str = "the end of training") -> None:
        """Leave the mean of the local parameters in the model, on all workers.

        No round is made: a short last one would move the parameters as far as a whole one. What is
        under way is waited for and not applied, unless :meth:`drain` was called. Members that come
        and go make a last round, whose outer parameters are the same on all.

        Raises:
            RuntimeError: If a worker is missing or has failed, or no worker is finite.
        """
        if self.link is not None:
            self._make_last_rounds(purpose)
        else:
            self.worker.sync_point(purpose)
            for fragment in self.fragments:
                fragment.wait()
            self._settle()
            self.worker.shows_outer = False
        self.worker.show_consensus("the final consensus")

    def _make_last_rounds(self, purpose: str) -> None:
        assert self.link is not None
        self.link.finish()
        for _ in self.fragments:
            statuses = self.worker.sync_point(purpose)
            if self._sync_every is not None and any(status.steps > 0 for status in statuses):
                self._begin(IN_ROUND, f"round {self.worker.round_index}")
            elif len(self.fragments) > 1:
                self.worker.round_index += 1
        self._apply_all()

    def _apply_all(self) -> None:
        self._settle()
        for index in range(len(self.fragments)):
            self._apply(index)

    @torch.no_grad()
    def drain(self) -> None:
        """Wait for all that is under way and apply it; all workers must call it.

        Raises:
            RuntimeError: If a worker is missing or has failed.
        """
        self.worker.sync_point("the draining of rounds")
        self._apply_all()

    def state_dict(self) -> dict[str, Any]:
        """Everything this worker needs to go on exactly, also in the middle of a round.

        What stands under ``"shared"`` is equal on all workers if the algorithm is replicated.
        """
        self._settle()
        shared, own = zip(*(fragment.state_dict() for fragment in self.fragments), strict=True)
        return {
            **self.worker.state_dict(),
            "buffers_at_start": self.buffers_at_start,
            "began_at": [fragment.began_at for fragment in self.fragments],
            "shared": list(shared),
            "fragments": list(own),
        }

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from a state of :meth:`state_dict` of the same worker."""
        self.worker.load_state_dict(saved)
        self.buffers_at_start = saved["buffers_at_start"]
        states = zip(saved["shared"], saved["fragments"], saved["began_at"], strict=True)
        for fragment, (shared, own, began_at) in zip(self.fragments, states, strict=True):
            fragment.load_state_dict(shared, own)
            fragment.began_at = fragment.fresh_at = began_at

    @torch.no_grad()
    def reset(self) -> None:
        """Make what the model holds now the start of the rounds, as if there had been none before.

        Outer parameters are the present ones and momentum is zero; what a pending round
        brings is dropped, and the next round is a whole one. All workers must call it at the same
        place, and hold the same parameters. A member of a run whose workers come and go calls it
        alone, and keeps in step with the others.
        """
        worker, settings = self.worker, self.settings
        start = worker.replica.layout.new_flat()
        own = {"pending": None, "residual": settings.init_residual(start), "sent_params": start}
        self.load_state_dict(
            {
                **worker.state_dict(),
                "steps_since_round": 0 if self.link is None else worker.steps_since_round,
                "running": {},
                "buffers_at_start": worker.replica.buffers.new_flat(),
                "began_at": [worker.steps for _ in self.fragments],
                "shared": [
                    {"state": settings.algorithm.init(start.clone()), "received": None}
                    for _ in self.fragments
                ],
                "fragments": [own for _ in self.fragments],
            }
        )

    def close(self) -> None:
        """Destroy the process groups and stop all threads; a second call does nothing."""
        self.worker.group.failed |= any(fragment.is_under_way for fragment in self.fragments)
        handles = [handle for fragment in self.fragments for handle in fragment.give_up()]
        self._unread = self.worker.engine = None
        if self.link is not None:
            self.link.close()
        self.worker.group.close()
        for handle in handles:
            handle.release()


def make_fragments(
    worker: Worker, settings: RoundSettings
) -> tuple[list[FragmentSync], list[StatusCarrier], Exchange, Link | None]:
    """The fragments of an engine, how statuses travel with each, the exchange of all, and the link
    if any.

    Rows ride with a round's first bucket where the exchange can carry them and somebody attends to
    the round until it ends: those at a sync point must be called when it is late.
    """
    group, layout, algorithm = worker.group, worker.replica.layout, settings.algorithm
    membership = settings.membership
    link = None if membership is None else membership.connect(settings, group)
    exchange = link or make_exchange(
        algorithm,
        group,
        worker.statistics,
        settings.topology,
        settings.compression,
        settings.is_overlapped,
    )
    if settings.link is not None and group.num_workers > 1:
        slow = settings.link, group, worker.statistics, settings.topology
        exchange = LinkEmulator(exchange, *slow)
    is_attended = not settings.is_overlapped or settings.schedule.applies_at_sync_points
    rides = exchange.can_carry_status and is_attended
    width = WorkerStatus.width(algorithm.num_scalars)
    status_elements = group.num_workers * width if rides else 0
    longest = settings.bucket_elements(layout.numel, layout.dtype.itemsize)
    start = layout.new_flat()
    residual = settings.init_residual(start)
    state = algorithm.init(start)
    fragments: list[FragmentSync] = []
    carriers: list[StatusCarrier] = []
    for stretches in settings.schedule.fragment_slices(layout.sizes):
        sent_params = fragments[0].fragment.sent_params if fragments else None
        fragment = Fragment(
            layout, stretches, settings, state, residual, longest, status_elements, sent_params
        )
        rounds = FragmentSync(fragment, settings, exchange)
        fragments.append(rounds)
        table = fragment.status_memory.view(-1, width)
        rider = (
            StatusesWithBucket(group, table, rounds.send_first, settings.is_overlapped)
            if rides
            else None
        )
        carriers.append(link or rider or SeparateStatuses(group))
    return fragments, carriers, exchange, link
