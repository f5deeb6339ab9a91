"""Counts the local steps of one worker and runs its rounds when the schedule says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_loco.algorithms import Restart
from lightning_loco.algorithms.algorithm import has_own
from lightning_loco.algorithms.persistence import Products
from lightning_loco.distributed.devices import device_of
from lightning_loco.distributed.work import AllReduceSum
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.distributed.worker_status import (
    IN_ROUND,
    GatheredStatuses,
    KnownStatuses,
    PendingStatuses,
    WorkerStatus,
    is_round,
)
from lightning_loco.engine.exchanges import make_exchange
from lightning_loco.engine.exchanges.exchange import Exchange, Handle
from lightning_loco.engine.fragment_memory import FragmentMemory
from lightning_loco.engine.fragment_sync import FragmentSync, HasArrived, Round
from lightning_loco.engine.link_emulator import LinkEmulator
from lightning_loco.engine.resume import FittingState
from lightning_loco.engine.settings import RoundSettings
from lightning_loco.model.flat import local_tensor
from lightning_loco.model.participant import LocalParticipant
from lightning_loco.model.worker import EarlierRun, Worker
from lightning_loco.schedules import EveryInterval, StepInfo

_END = "the end of training"


class Engine(LocalParticipant):
    """Runs the rounds of one worker when a schedule says so; used like every
    :class:`~lightning_loco.model.participant.Participant`.

    :class:`~lightning_loco.engine.StepEngine` and :class:`~lightning_loco.engine.ClockEngine` are
    made from single arguments.

    Args:
        model: The module to train; its trainable parameters are exchanged.
        make_settings: Makes the settings; may raise, which then happens on all workers.
        group: The workers. Default: all ranks of the default process group, in new groups.
        optimized: Exchange only these trainable parameters. Default: all of them.

    Attributes:
        worker: The worker's group, replica and counters.
        fragments: The rounds of each fragment of the parameters.
        settings: Checked against the number of workers, without ``"auto"``.
        statistics: Bytes, seconds and rounds of communication so far.
        paused: Set it to skip rounds for a while; the same on all workers.
        exchange: How its messages move.

    Raises:
        ValueError: Or TypeError on every worker, if the model or the settings do not fit.
    """

    is_saved_after_failure = True

    def __init__(
        self,
        model: nn.Module,
        make_settings: Callable[[], RoundSettings],
        group: WorkerGroup | None = None,
        optimized: Iterable[Tensor] | None = None,
    ) -> None:
        group = group if group is not None else WorkerGroup.create(device=device_of(model))
        try:
            worker, settings = Worker.join(model, make_settings, group, optimized)
            exchange, hooks = make_exchange_and_hooks(worker, settings)
            self._set_up(worker, settings, exchange, hooks)
        except BaseException as error:
            group.close(error)
            raise

    def _set_up(
        self,
        worker: Worker,
        settings: RoundSettings,
        exchange: Exchange,
        hooks: RoundHooks,
        bucket_elements: int | None = None,
    ) -> None:
        self.worker, self.settings, self.exchange = worker, settings, exchange
        self._hooks = hooks
        self.fragments = make_fragments(worker, settings, exchange, bucket_elements)
        self.statistics = worker.statistics
        self.paused = False
        self.shows_outer = not hooks.shares_sync_points
        self._clock = worker.group.clock
        self._schedule = settings.schedule.of_worker(worker.group.worker)
        self._sync_every = self._schedule.sync_every_of(worker.group.worker)
        self._has_own_weights = has_own(settings.algorithm, "weight")
        self._merge_policy = settings.merge_policy or Restart()
        self._can_measure_consensus = self._sync_every is not None and hooks.shares_sync_points
        self._dues: list[tuple[bool, bool]] = []
        self._unrecorded: PendingStatuses | None = None
        self._dropped: list[Handle] = []
        self.statistics.staleness = self._schedule.staleness_of(worker.group.worker)
        self.buffers_at_start = worker.replica.buffers.new_flat()

    @classmethod
    def from_settings(
        cls,
        model: nn.Module,
        settings: RoundSettings,
        group: WorkerGroup | None = None,
        optimized: Iterable[Tensor] | None = None,
    ) -> Self:
        """Make an engine from settings."""
        Engine.__init__(engine := cls.__new__(cls), model, lambda: settings, group, optimized)
        return engine

    @classmethod
    def of_worker(cls, worker: Worker, settings: RoundSettings, exchange: Exchange) -> Self:
        """Make an engine of a worker that is set up already, as the simulation does.

        Args:
            worker: Nothing about it is compared with the other workers.
            settings: Prepared.
            exchange: How its messages move; each fragment is one bucket.
        """
        engine = cls.__new__(cls)
        whole = max(1, worker.replica.layout.numel)
        engine._set_up(worker, settings, exchange, RoundHooks(), whole)  # noqa: SLF001
        return engine

    def start(self) -> None:
        """Take part in the run, see :meth:`Participant.start`."""
        with self.statistics.joining():
            self._hooks.start(self)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the algorithm and of the schedule."""
        settings = self.settings
        own = settings.algorithm.metrics(self.fragments[0].state)
        return {**own, **settings.schedule.metrics(self.worker.round_index)}

    # ---------------------------------------------------------------- local steps

    def before_optimizer_step(self, parameters: Iterable[Tensor]) -> None:
        """Average the gradients over the workers while rounds by the clock warm up."""
        if self.is_warming_up:
            self.average_gradients(parameters)

    def count_step(self) -> None:
        """Count one local step without running a round."""
        self._dues = []
        self.worker.count_step(self._schedule.positions_in_round(self.worker.round_index))

    def check_due(self) -> bool:
        """Find out whether a round is to begin or to end after the step that was counted last.

        :meth:`make_round` runs what was found. All ranks of a worker must call it: without a number
        of local steps, their clocks differ, and the first one decides.
        """
        self._dues = [] if self.paused else self._find_due()
        return any(begins or ends for begins, ends in self._dues)

    @property
    def _turn(self) -> int:
        """Index of the fragment whose round begins next."""
        return self.worker.round_index % len(self.fragments)

    def _find_due(self) -> list[tuple[bool, bool]]:
        """Return for each fragment whether a round begins, and whether its pending round ends."""
        worker, now_s = self.worker, self._clock.now()
        counts = (worker.steps, worker.steps_since_round, worker.round_index)
        dues = [
            self._schedule.due(
                StepInfo(*counts, index, now_s - fragment.applied_at, fragment.pending)
            )
            for index, fragment in enumerate(self.fragments)
        ]
        if self._sync_every is None and worker.group.inner is not None:
            # Clocks and arrivals differ between the ranks of a worker: the first one decides.
            first = worker.group.agree([float(value) for due in dues for value in due])[0]
            dues = [
                (begins > 0, ends > 0) for begins, ends in zip(first[::2], first[1::2], strict=True)
            ]
        return dues

    # --------------------------------------------------------------------- rounds

    def make_round(self) -> None:
        """Apply pending rounds that are due; begin a round if one is due or none was applied."""
        run_through(self.round_in_parts())

    @torch.no_grad()
    def round_in_parts(self) -> Iterator[HasArrived]:
        """Run what is due as :meth:`make_round` does, in parts, each of which may wait."""
        dues, self._dues = self._dues, []
        if self._hooks.when_due(self):
            dues = []  # they were found in another state
        dues = dues or self._find_due()
        begins = any(begin for begin, _ in dues) or not any(end for _, end in dues)
        for index, (_, ends) in enumerate(dues):
            # The next message of a fragment may need the local steps that the end would overwrite,
            # so the round that begins in its turn ends the one before.
            if ends and not (begins and index == self._turn):
                yield from self.end_in_parts(index)
        if begins:
            if self._unrecorded is not None:
                yield self._unrecorded.has_arrived
            self.record_statuses()
            yield from self.begin_in_parts()

    def begin_in_parts(
        self,
        sync_point: float = IN_ROUND,
        purpose: str | None = None,
        announced: list[WorkerStatus] | None = None,
    ) -> Iterator[HasArrived]:
        """Begin a round, and end it at once if the schedule says so; in parts.

        Args:
            sync_point: Where this worker waits, or ``IN_ROUND``.
            purpose: Purpose of the sync point. Default: there is none.
            announced: Statuses of all workers at a sync point, if some of them run this round.
        """
        worker, began_at_s = self.worker, self._clock.now()
        label = purpose or f"round {worker.round_index}"
        fragment = self.fragments[self._turn]
        self._hooks.before_round(self, fragment)
        worker.check_trainable()
        status = self._prepare(sync_point)
        new = fragment.new_round(worker.round_index, worker.steps, status.weight)
        if announced is None:
            fragment.begin(new, status, label)
        elif self.exchange.is_weighted:  # the others need this worker's weight
            new.statuses = GatheredStatuses(worker.group, self.statistics, status, label)
            new.statuses.wait()
        else:
            new.statuses = KnownStatuses(announced, label)
        self._unrecorded, new.began_at_s = new.statuses, began_at_s
        self._measure_consensus(new)  # now: below the parameters change
        before = fragment.pending
        applied = yield from fragment.run(new, lambda round_: self._hooks.received(self, round_))
        fragment = applied.fragment
        ended = [found for found in (before, new) if found not in (None, fragment.pending)]
        if ended or new.restarts:
            self._share(fragment)
        if before is not None and self._merge_policy.keeps_progress:  # else the message has it
            self._overwrite(before)
        if ended:
            self._record_rounds(fragment, ended)
        self.statistics.rounds += self._sync_every is not None
        fragment.began_at = fragment.fresh_at = worker.steps
        if not worker.was_finite:  # then its BatchNorm statistics hold NaN, too
            worker.replica.restore_buffers(self.buffers_at_start)
        if fragment.pending is None:  # the weights have moved away from the statistics
            worker.replica.running_statistics.record(worker.steps_since_round)
        self.buffers_at_start = worker.replica.buffers.new_flat()
        worker.round_index = applied.index + 1
        worker.begin_interval()
        if new.statuses.has_been_read:  # else later, so as not to wait for them now
            self.record_statuses()

    def _prepare(self, sync_point: float) -> WorkerStatus:
        """Do the local part of the next round, and return this worker's status."""
        worker, fragment = self.worker, self.fragments[self._turn]
        fragment.measure_gradient = self.measure_outer_gradient
        own = self._status(sync_point)
        # Of the round before: this one's is known at its end only.
        norm = math.nan if fragment.gradient_norm is None else fragment.gradient_norm
        is_finite = fragment.prepare(worker.round_index)
        step_s = worker.step_s()  # now: reading that has waited for the device
        # Before anything is sent: with NaN in one shard, no rank's message may have weight.
        places = worker.group.agree([is_finite, own.loss, norm**2], "the start of a round")
        finite, losses, squares = zip(*places, strict=True)
        fragment.is_finite = worker.was_finite = all(finite)
        # Without local steps a mean would pull the others back, except by the clock, where every
        # worker's present parameters count.
        has_moved = worker.steps > fragment.fresh_at or self._sync_every is None
        if not worker.was_finite:
            self._lose(fragment.began_at)
            for other in self.fragments:
                if other is not fragment:
                    own_part = other.holds_finite_params()
                    if not all(part for (part,) in worker.group.agree([own_part])):
                        other.restore_start()
                        self._share(other)
                        self._lose(other.began_at)
        weight = float(worker.was_finite and has_moved)
        if weight and self._has_own_weights:
            weight = self._weight(own.steps)
        return own._replace(
            weight=weight,
            finite=worker.was_finite,
            loss=sum(losses) / len(losses),
            squared_distance=sum_of_known(squares),
            step_s=step_s,
        )

    def _lose(self, since: int, share: float = 1.0) -> None:
        """Note that a fragment has lost its progress since a local step, or a share of it."""
        self.statistics.lost_steps += share * (self.worker.steps - since) / len(self.fragments)

    def _overwrite(self, ended: Round) -> None:
        """Note the local steps of a fragment that the result of a late round has replaced."""
        if ended.finite:  # else it was noted when NaN was found
            self._lose(ended.began_at, 1.0 - self._merge_policy.kept_share)

    def _weight(self, steps: float) -> float:
        """The weight that the algorithm gives this worker's message; RuntimeError if it is none."""
        algorithm = self.settings.algorithm
        weight = algorithm.weight(steps)
        if not 0 <= weight < math.inf:
            raise RuntimeError(
                f"{type(algorithm).__name__}.weight has returned {weight!r} for {steps:.0f} local "
                "steps, but the weight of a message must be finite and at least 0."
            )
        return float(weight)

    def _share(self, fragment: FragmentSync) -> None:
        """Copy the new values of a fragment to the other ranks of this worker."""
        if self.worker.group.inner is None:
            return
        # If a rank is lost now, the others of this worker have different parameters.
        fragment.is_torn = True
        self.worker.replica.share(self.fragments.index(fragment))
        fragment.is_torn = False

    def _status(self, sync_point: float) -> WorkerStatus:
        """This worker's status, without a look at its parameters."""
        fragment = self.fragments[self._turn]
        steps, status = self.worker.steps - fragment.began_at, self.worker.status(sync_point)
        return status._replace(steps=steps, scalars=fragment.scalars())

    def _record_rounds(self, fragment: FragmentSync, ended: Iterable[Round]) -> None:
        """Record rounds of a fragment that have ended: when, and the norm of the outer gradient.

        In a worker of several ranks, also their bytes and seconds on the other ranks.
        """
        statistics, group, now_s = self.statistics, self.worker.group, self._clock.now()
        for pending in ended:
            if pending.began_at_s is not None:
                statistics.record("round", pending.began_at_s, now_s)
        statistics.outer_grad_norm = fragment.gradient_norm
        statistics.persistence = fragment.gradient_products.cosine
        self.add_up(fragment)
        if group.inner is None:
            return
        norm = math.nan if fragment.gradient_norm is None else fragment.gradient_norm
        own = [norm**2, statistics.bytes_sent, statistics.wait_s, *fragment.gradient_products]
        ranks = zip(*group.agree(own, "the end of a round"), strict=True)
        squares, sent, waited, *products = ranks
        statistics.persistence = Products(*map(sum_of_known, products)).cosine
        total = sum_of_known(squares)
        statistics.outer_grad_norm = None if math.isnan(total) else math.sqrt(total)
        statistics.other_ranks_bytes_sent = int(sum(sent)) - statistics.bytes_sent
        statistics.longest_wait_s = max(waited)

    def add_up(self, fragment: FragmentSync) -> None:
        """Add up numbers of the algorithm's state over the ranks of this worker, after a round."""
        own = list(fragment.memory.totals.values())
        if own and self.worker.group.inner is not None:
            ranks = self.worker.group.agree(own, "the end of a round")
            fragment.memory.set_totals([sum(values) for values in zip(*ranks, strict=True)])

    def _measure_consensus(self, pending: Round) -> None:
        """Measure the consensus distance right before a round, if that is wanted."""
        every = self.consensus_every if self._can_measure_consensus else 0
        if every and pending.index % every == 0:
            pending.statuses.wait()  # so that workers at a sync point take part
            self.statistics.consensus_distance = self.worker.measure_consensus(
                self.consensus_elements
            )

    def end_in_parts(self, index: int) -> Iterator[HasArrived]:
        """Apply the pending round of a fragment, if there is one; in parts."""
        fragment, statistics = self.fragments[index], self.statistics
        if (pending := fragment.pending) is None:
            return
        yield fragment.has_received
        fragment.make_writable()
        fragment.apply(self.worker.steps)
        self._overwrite(pending)
        self._share(fragment)
        fragment.applied_at = self._clock.now()
        self._record_rounds(fragment, [pending])
        if not self.worker.was_finite:
            self.worker.replica.restore_buffers(self.buffers_at_start)
        if self._sync_every is None:
            statistics.rounds += 1
            statistics.staleness = self.worker.steps - pending.began_at
        if self._unrecorded is pending.statuses:
            yield pending.statuses.has_arrived
            self.record_statuses()

    @torch.no_grad()
    def apply_all_in_parts(self) -> Iterator[HasArrived]:
        """Apply all pending rounds, in parts as :meth:`round_in_parts`."""
        if self._unrecorded is not None:
            yield self._unrecorded.has_arrived
        self.record_statuses()
        for index in range(len(self.fragments)):
            yield from self.end_in_parts(index)

    def record_statuses(self) -> None:
        """Record the statuses of the last round: losses, workers with NaN, consensus distance."""
        pending, self._unrecorded = self._unrecorded, None
        if pending is None:
            return
        self.worker.record_statuses(statuses := pending.wait())
        self._hooks.recorded(self)
        squares = [s.squared_distance for s in statuses if math.isfinite(s.squared_distance)]
        if squares and self._sync_every is None:
            self.statistics.consensus_distance = math.sqrt(sum(squares) / len(squares))

    # ---------------------------------------------------------------- sync points

    @torch.no_grad()
    def sync_point(self, purpose: str) -> list[WorkerStatus]:
        """Wait until all workers have reached the same sync point; take part in rounds until then.

        Parameters are read only if there is a round to take part in. Arguments, result and errors
        as in :meth:`LocalParticipant.sync_point`.
        """
        sync_point = self.worker.sync_point_id(purpose)
        while True:
            self.record_statuses()
            # No local steps follow for a while, so there is nothing left to hide a result behind.
            if self._schedule.applies_at_sync_points:
                run_through(self.apply_all_in_parts())
            own = self._status(sync_point)
            losses = [loss for (loss,) in self.worker.group.agree([own.loss], purpose)]
            own = own._replace(loss=sum(losses) / len(losses))
            statuses = self.exchange.wait_at_sync_point(own, purpose)
            if statuses is None:
                run_through(self.begin_in_parts(sync_point, purpose))
            elif is_round(statuses):
                run_through(self.begin_in_parts(sync_point, purpose, statuses))
            else:
                self.worker.record_statuses(statuses)
                if self.worker.are_together(statuses, sync_point, purpose):
                    return statuses

    def write_consensus(self, purpose: str) -> None:
        """Do what :meth:`show_consensus` does, when all workers are at the same sync point."""
        outer = self.outer() if self.shows_outer else None
        self.worker.show_consensus(purpose, outer, self.buffers_at_start)

    def outer(self) -> Tensor | None:
        """Return the outer parameters ``(P,)``, equal on all workers; None if there are none."""
        key = self.settings.consensus_key
        return None if key is None else self.fragments[0].state[key]

    # ---------------------------------------------------------- averaging by time

    @property
    def is_warming_up(self) -> bool:
        """Whether :meth:`average_gradients` is to be called in the coming step."""
        schedule = self.settings.schedule
        return isinstance(schedule, EveryInterval) and self.worker.steps < schedule.warmup_steps

    @torch.no_grad()
    def average_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace gradients by their mean over the workers; a missing one counts as zero.

        Args:
            parameters: The same ones, in the same order, on all workers. Those without a gradient
                on any worker stay without.

        Raises:
            RuntimeError: If a worker is missing or has failed.
        """
        group, label = self.worker.group, f"warm-up step {self.worker.steps}"
        trainable = [p for p in parameters if p.requires_grad]
        if group.data is None or not trainable:
            return
        # One all-reduce for all gradients. Behind them it counts who has a gradient of each
        # parameter: one that no worker has must stay None, or the optimizer would decay it.
        wide = torch.promote_types(torch.float32, trainable[0].dtype)
        missing = [p.grad is None for p in trainable]
        for p in trainable:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        gradients = [local_tensor(p.grad) for p in trainable if p.grad is not None]
        present = torch.tensor([not none for none in missing], device=gradients[0].device)
        flat = torch.cat([*(g.reshape(-1).to(wide) for g in gradients), present.to(wide)])
        AllReduceSum(group, self.statistics, flat, label).wait().div_(group.num_workers)
        lengths = [*(g.numel() for g in gradients), len(trainable)]
        *means, counts = torch.split_with_sizes(flat, lengths)
        pairs = zip(trainable, gradients, means, counts.tolist(), strict=True)
        for p, gradient, mean, count in pairs:
            if count > 0:
                gradient.copy_(mean.view(gradient.shape))
            else:
                p.grad = None

    def abort(self) -> None:
        """Stop rounds; all workers must call it, and may call it twice."""
        if not self.paused:
            self.sync_point("abort of the averaging")
            self.paused = True

    def resume(self) -> None:
        """Run rounds again after :meth:`abort`; all workers must call it."""
        if self.paused:
            self.sync_point("resumption of the averaging")
            self.paused = False

    # ---------------------------------------------------------------- end and state

    @torch.no_grad()
    def finish(self) -> None:
        """Leave the mean of the local parameters in the model, on all workers.

        No round is run: a short last one would move the parameters as far as a whole one. Pending
        rounds are waited for and not applied, unless :meth:`drain` was called. Workers that share
        no sync points run a last round, whose outer parameters are the same on all.

        Raises:
            RuntimeError: If a worker is missing or has failed, or no worker is finite.
        """
        if self._hooks.shares_sync_points:
            self.sync_point(_END)
        self.finish_at_sync_point()

    @torch.no_grad()
    def finish_at_sync_point(self) -> None:
        """Do the rest of :meth:`finish`, when all workers are at the same sync point."""
        self._hooks.finish(self)
        for fragment in self.fragments:
            # Not applied; but no group may be closed while others receive from this worker.
            fragment.wait()
        self.record_statuses()
        self.shows_outer = not self._hooks.shares_sync_points
        self.write_consensus("the final consensus")

    @torch.no_grad()
    def drain(self) -> None:
        """Apply all pending rounds; all workers must call it."""
        self.sync_point("the draining of rounds")
        run_through(self.apply_all_in_parts())

    def state_dict(self) -> dict[str, Any]:
        """Return everything that this rank needs to resume exactly, also within a round.

        The entry ``"shared"`` is equal on all workers if the algorithm is replicated. In a worker
        of several ranks, vectors of rounds hold only the elements that this rank owns: see
        ``gather_state``.
        """
        self.record_statuses()
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
        """Load a state of :meth:`state_dict` of the same rank."""
        self.worker.load_state_dict(saved)
        self.buffers_at_start = saved["buffers_at_start"]
        states = zip(saved["shared"], saved["fragments"], saved["began_at"], strict=True)
        for fragment, (shared, own, began_at) in zip(self.fragments, states, strict=True):
            fragment.load_state_dict(shared, own)
            fragment.began_at = fragment.fresh_at = began_at

    @torch.no_grad()
    def resume_from(self, saved: EarlierRun) -> list[str]:
        """Load as much as fits of a run with other settings or another number of workers.

        With another algorithm, training starts from the consensus with a new state. With another
        number of workers too, but state that was equal on all workers, such as outer parameters,
        is kept.
        """
        fitting = FittingState(saved, self.worker, self.settings, self.fragments)
        if (state := fitting.find()) is not None:
            self.load_state_dict(state)
        else:
            fitting.load_counters()
            self.reset()
            fitting.note_reset()
        return fitting.notes

    @torch.no_grad()
    def reset(self) -> None:
        """Start the rounds anew from the present values of the model.

        Outer parameters are the present ones and momentum is zero; pending rounds are dropped, and
        the next round is a whole one. All workers must call it at the same step, and hold the same
        parameters. A worker that shares no sync points calls it alone, and keeps in step with the
        others.
        """
        worker, settings = self.worker, self.settings
        is_shared = self._hooks.shares_sync_points
        start = worker.replica.layout.new_flat()
        own = {"pending": None, "residual": settings.init_residual(start), "sent_params": start}
        self.load_state_dict(
            {
                **worker.state_dict(),
                "steps_since_round": 0 if is_shared else worker.steps_since_round,
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

    def check_whole(self) -> None:
        """Raise RuntimeError if a round has failed while it was being applied."""
        for fragment in self.fragments:
            fragment.check_whole()

    def drop_pending(self) -> None:
        """Forget the rounds that are not applied yet, because this worker ends; none may follow.

        :meth:`state_dict` then waits for no other worker.
        """
        # A group with a collective under way must be aborted: shutting it down would wait for it.
        self.worker.group.failed |= any(fragment.is_receiving for fragment in self.fragments)
        for fragment in self.fragments:
            self._dropped += fragment.drop_pending()
        self._unrecorded = None

    def close(self) -> None:
        """Destroy the process groups and stop all threads; a second call does nothing."""
        self.drop_pending()
        self._hooks.close()
        self.worker.group.close()
        for handle in self._dropped:
            handle.release()
        self._dropped.clear()


class RoundHooks:
    """What else happens around the rounds of an engine; by default nothing.

    Attributes:
        shares_sync_points: Whether all workers wait for each other at sync points. Where they do
            not, the consensus can only be what is equal on all of them without a collective: the
            outer parameters.
    """

    shares_sync_points = True

    def start(self, engine: Engine) -> None:
        """Take part in the run, before the first local step."""

    def when_due(self, engine: Engine) -> bool:
        """Called when a round is to begin or to end; returns whether that may have changed."""
        return False

    def before_round(self, engine: Engine, fragment: FragmentSync) -> None:
        """Called before a round of a fragment begins."""

    def received(self, engine: Engine, received: Round) -> Round:
        """Called when a blocking round has been received; returns the round to apply."""
        return received

    def recorded(self, engine: Engine) -> None:
        """Called when the statuses of a round have been recorded."""

    def finish(self, engine: Engine) -> None:
        """Called after the last local step, before the consensus is left in the model."""

    def close(self) -> None:
        """Called when the engine is closed, perhaps twice."""


@runtime_checkable
class ConnectingMembership(Protocol):
    """A membership that connects engines in separate processes."""

    def connect(self, settings: RoundSettings, group: WorkerGroup) -> tuple[Exchange, RoundHooks]:
        """Make the exchange of an engine, and what else it does around its rounds.

        ValueError if the settings, or the ranks of this job, are not supported.
        """


def sum_of_known(numbers: Iterable[float]) -> float:
    """The sum of the numbers that are not NaN; NaN if all are."""
    known = [number for number in numbers if not math.isnan(number)]
    return sum(known) if known else math.nan


def run_through(parts: Iterator[object]) -> None:
    """Do all parts, one after the other; each waits for its own data."""
    for _ in parts:
        pass


def make_exchange_and_hooks(worker: Worker, settings: RoundSettings) -> tuple[Exchange, RoundHooks]:
    """How an engine exchanges, and what else it does around its rounds, by its membership."""
    if settings.membership is None:
        return make_group_exchange(worker, settings), RoundHooks()
    assert isinstance(settings.membership, ConnectingMembership)
    return settings.membership.connect(settings, worker.group)


def make_group_exchange(worker: Worker, settings: RoundSettings) -> Exchange:
    """The exchange between all ranks, on emulated links if the settings say so.

    An all-reduce carries the statuses only if this worker waits for its end: only a worker that
    waits calls those at a sync point.
    """
    group, schedule = worker.group, settings.schedule
    exchange = make_exchange(
        settings.algorithm,
        group,
        worker.statistics,
        settings.topology,
        settings.compression,
        settings.is_overlapped,
        not settings.is_overlapped or schedule.applies_at_sync_points,
    )
    if settings.link is not None and group.num_workers > 1:
        emulated = settings.link, group, worker.statistics, settings.topology
        return LinkEmulator(exchange, *emulated)
    return exchange


def make_fragments(
    worker: Worker, settings: RoundSettings, exchange: Exchange, bucket_elements: int | None = None
) -> list[FragmentSync]:
    """The fragments of the schedule, which share the memory of vectors ``(P,)``.

    Buckets have up to ``bucket_elements``, by default as many as ``settings.bucket_bytes`` allows.
    """
    layout, algorithm = worker.replica.layout, settings.algorithm
    longest = bucket_elements or settings.bucket_elements(layout.numel, layout.dtype.itemsize)
    start = layout.new_flat()
    residual, state = settings.init_residual(start), algorithm.init(start)
    status_width = WorkerStatus.width(len(algorithm.scalars(state)))
    fragments: list[FragmentSync] = []
    for slices in worker.replica.fragments:
        memory = FragmentMemory(
            layout,
            slices,
            settings,
            state,
            residual,
            longest,
            worker.group.num_workers * status_width if exchange.carries_status else 0,
            fragments[0].memory.sent_params if fragments else None,
        )
        fragments.append(FragmentSync(memory, settings, exchange))
    return fragments
