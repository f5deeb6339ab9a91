"""The engine of decoupled learners: local steps that never wait for another learner.

In a plain PyTorch loop, with a syncer that ``lightning-loco syncer`` runs::

    engine = LearnerEngine(model, syncer="node7:29600", key_file="run.pem")  # in each process
    engine.start()
    for batch in data:
        train(batch)
        engine.step()
    engine.finish()
    engine.close()
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import socket
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_loco._util.fault_points import reach
from lightning_loco.algorithms.decoupled_diloco import DecoupledDiLoCo, TensorRange
from lightning_loco.compression import Codec
from lightning_loco.costs import LinkLike, as_links
from lightning_loco.distributed.devices import device_of
from lightning_loco.distributed.work import PendingWork
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.distributed.worker_status import WorkerStatus
from lightning_loco.model.participant import LocalParticipant
from lightning_loco.model.whole_fragments import WholeFragments
from lightning_loco.model.worker import EarlierRun, Worker
from lightning_loco.schedules.staggered import split_into_fragments
from lightning_loco.syncer.contract import Contract, describe
from lightning_loco.syncer.learner import Boundary, Learner
from lightning_loco.syncer.learner_thread import LearnerThread
from lightning_loco.syncer.merge_rounds import MergeSettings
from lightning_loco.syncer.service import SyncerClient, SyncerServer
from lightning_loco.syncer.settings import Address, DecoupledSettings
from lightning_loco.syncer.syncer import Syncer
from lightning_loco.transport import (
    JobCertificate,
    address_towards,
    read_certificate,
    text_without_key_file,
)

log = logging.getLogger(__name__)

_LEAVE_S = 30.0
"""Longest wait at the end of training for the last pushes to arrive, in seconds."""

_WHILE_OTHERS_WAIT = 0.8
"""Share of the timeout after which a rank ends a wait, so that others get its error in time."""

_MANY = 3
"""Merges of a fragment that a learner misses at the end of training before a warning."""

_START = "the start of the run"
_READING = "reading a fragment of a worker of several ranks"

_NO_MORE = -1
"""Instead of the number of a fragment: no more are read."""

Read = Callable[[int], Tensor]
"""Returns a worker's parameters of a fragment, ``(P,)``."""

T = TypeVar("T")


class LearnerEngine(LocalParticipant):
    """Trains at its own pace, and exchanges fragments of the model with a syncer.

    A thread in the background asks the syncer what is due, receives fragments and sends
    pseudo-gradients. Only the training thread uses the model, between local steps: it first writes
    the fragments that have arrived, then copies those that are due.

    Without ``syncer`` the learners are the workers of this job, and worker 0 also runs the syncer.
    With it, this job is one learner; other jobs come and go. Then the consensus is what was
    received last, not the mean of the workers.

    In a worker of several ranks, whose gradients the caller averages, the first rank exchanges for
    all of them. If they hold shards, it gathers a fragment from them before it is sent; the others
    receive from it what they hold of a fragment. All ranks call the same methods, and gather one
    number per local step.

    Args:
        model: The module to train.
        algorithm: How the syncer merges.
        rounds: When the syncer merges.
        compression: Codec of pseudo-gradients on the wire, or its name. Default: no compression.
        syncer: ``"HOST:PORT"`` of the syncer, which ``lightning-loco syncer`` runs. Default: within
            worker 0.
        key_file: Key file of the run, written by ``lightning-loco keys FILE``.
        name: Unique name of this learner; with ``syncer`` only. Default: host name and process id.
        link: Links to emulate, as in :func:`~lightning_loco.costs.as_links`. Default: none.
        group: The workers. Default: all ranks of the default process group, in new groups.

    Attributes:
        worker: This worker.
        settings: The settings.
        name: Of the learner, equal on all ranks of this worker.
        statistics: Statistics of the communication so far.
        learner: The part in the background; None on all ranks of a worker but the first.
        run_steps: Local steps that the learners of the run had made on average when this one joined
            it, by the number of merges and ``sync_every``.
        syncer_server: The syncer of this job; None elsewhere.
        has_ended: Whether :meth:`finish` was called since the last :meth:`start`.

    Raises:
        ValueError: If the model or the settings do not fit, on all workers.

    Source:
        "Decoupled DiLoCo for Resilient Distributed Pre-training", arXiv:2604.21428; see
        :class:`~lightning_loco.algorithms.DecoupledDiLoCo`.
    """

    settings: DecoupledSettings

    def __init__(
        self,
        model: nn.Module,
        algorithm: DecoupledDiLoCo | None = None,
        *,
        rounds: MergeSettings | None = None,
        compression: Codec | str | None = None,
        syncer: str | None = None,
        key_file: str | Path | None = None,
        name: str | None = None,
        link: LinkLike | None = None,
        group: WorkerGroup | None = None,
    ) -> None:
        settings = DecoupledSettings(
            algorithm or DecoupledDiLoCo(),
            rounds or MergeSettings(),
            compression,
            syncer,
            key_file,
            name,
            link=as_links(link),
        )
        group = group if group is not None else WorkerGroup.create(device=device_of(model))
        self._set_up(model, settings, group)

    @classmethod
    def from_settings(
        cls,
        model: nn.Module,
        settings: DecoupledSettings,
        group: WorkerGroup,
        optimized: Iterable[Tensor] | None = None,
    ) -> LearnerEngine:
        """Create an engine from settings; only ``optimized`` parameters are exchanged."""
        engine = cls.__new__(cls)
        engine._set_up(model, settings, group, optimized)  # noqa: SLF001
        return engine

    def _set_up(
        self,
        model: nn.Module,
        settings: DecoupledSettings,
        group: WorkerGroup,
        optimized: Iterable[Tensor] | None = None,
    ) -> None:
        try:
            worker, settings = Worker.join(model, lambda: settings, group, optimized)
            with group.errors_shared("the set-up"):
                self._take(worker, settings)
        except BaseException as error:
            group.close(error)
            raise

    @classmethod
    def of_worker(cls, worker: Worker, settings: DecoupledSettings) -> LearnerEngine:
        """Make an engine of a worker that is set up already, as the simulation does.

        Its learner is from :meth:`make_learner`; :meth:`begin` takes the place of :meth:`start`.

        Args:
            worker: Nothing about it is compared with the other workers.
            settings: Prepared.
        """
        engine = cls.__new__(cls)
        engine._take(worker, settings)  # noqa: SLF001
        return engine

    def _take(self, worker: Worker, settings: DecoupledSettings) -> None:
        self.worker, self.settings = worker, settings
        group = worker.group
        self.name = group.gather_inside(settings.learner_name(group.worker), _START)[0]
        self._divide(worker.replica.model)
        self.statistics = worker.statistics
        self.shows_outer = settings.syncer is not None
        self.learner: Learner | None = None
        self._thread: LearnerThread | None = None
        self.syncer_server: SyncerServer | None = None
        self._saved: dict[str, Any] = {}
        self._has_joined = self.has_ended = False
        self._first_epoch = 1
        self.run_steps = 0
        self._tokens = 0.0
        self._agreed_after = self._started_after = 0
        self._is_due = 0.0

    def _divide(self, model: nn.Module) -> None:
        """Divide the parameters into fragments of equal length, and make the contract."""
        parameters = self.worker.replica.parameters
        sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        rounds = self.settings.rounds
        count = min(rounds.fragments, sum(sizes.values()))
        slices = [one for (one,) in split_into_fragments(sizes, count, "even")]
        self._lengths = [len(part) for part in slices]
        self._fragments = fragments = WholeFragments(parameters, slices, self.worker.group)
        if fragments.are_sharded:
            self.worker.replica.use_held_vectors(self.worker.group)
        embeddings = {
            id(parameter)
            for module in model.modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag)
            for parameter in module.parameters(recurse=False)
        }
        is_embedding = [id(parameter) in embeddings for parameter in parameters.values()]
        self.contract = Contract(
            self.settings.algorithm,
            dataclasses.replace(rounds, fragments=count),
            [
                [
                    TensorRange(part.place.start, part.place.stop, is_embedding[part.number])
                    for part in fragments.parts(fragment)
                ]
                for fragment in range(count)
            ],
            {name: describe(parameter) for name, parameter in parameters.items()},
            fragments.dtype,
            self.settings.codec,
        )

    # ---------------------------------------------------------------------- start

    @torch.no_grad()
    def start(self) -> None:
        """Join the run, and take its parameters; all workers must call it.

        Raises:
            RuntimeError: If the syncer does not answer in time or refuses this learner.
        """
        if self._has_joined and not self.has_ended:
            return
        self.has_ended = False
        group = self.worker.group
        address = self._find_syncer()
        generation = int(group.clock.wall_time() * 1000)
        with group.errors_shared(_START), self.statistics.joining():
            make_learner = partial(self.make_learner, generation, str(address))
            if (learner := self._on_first_rank(make_learner)) is not None:
                self._thread = LearnerThread(learner, self._connect(address), group.clock)
                self._thread.start()
                stop, limit_s = self.worker.stop, group.timeout_s
                if group.watchdog is not None:
                    limit_s *= _WHILE_OTHERS_WAIT
                self._thread.wait_until_ready(
                    limit_s, lambda: stop.requested is not None or stop.is_seen
                )
        self.begin()

    def _on_first_rank(self, work: Callable[[Read], T]) -> T | None:
        """Return the result of work on the first rank of this worker, None on others.

        All ranks must call it. The work may read fragments, of which the others may hold shards.
        """
        group, read = self.worker.group, self._fragments.read
        if not self._fragments.are_sharded:
            return work(read) if group.place == 0 else None
        self.worker.replica.reshard()

        def read_together(fragment: int) -> Tensor:
            group.agree([fragment], _READING)
            return read(fragment)

        if group.place == 0:
            try:
                return work(read_together)
            finally:
                group.agree([_NO_MORE], _READING)
        while (fragment := int(group.agree([_NO_MORE], _READING)[0][0])) != _NO_MORE:
            read(fragment)
        return None

    @torch.no_grad()
    def begin(self) -> None:
        """Take the parameters of the run, which have arrived; all workers must call it."""
        self._has_joined, self._saved = True, {}
        self._started_after = self.worker.steps
        self._write(self._meet())
        self.run_steps = round(self.worker.group.agree([self._run_steps()], _START)[0][0])

    def _run_steps(self) -> float:
        versions = () if self.learner is None else self.learner.rounds.received
        merges = max((one.round for one in versions if one is not None), default=0)
        return merges / len(self._lengths) * self.settings.rounds.sync_every

    def _find_syncer(self) -> Address:
        """Return the address of the syncer; of that beside worker 0 if there is no other one."""
        group, certificate = self.worker.group, self._certificate
        if self.settings.syncer is not None:
            return Address.of(self.settings.syncer)
        hosts = group.gather_objects(socket.gethostname(), _START)
        is_local = len(set(hosts)) == 1
        port = 0
        with group.errors_shared(_START):
            if group.worker == group.place == 0:
                state, epoch = self._saved.get("syncer"), self._first_epoch
                syncer = Syncer(self.contract, state=state, first_epoch=epoch)
                host = "127.0.0.1" if is_local else "0.0.0.0"
                self.syncer_server = SyncerServer(
                    lambda contract: syncer, host=host, certificate=certificate
                )
                self.syncer_server.start()
                port = self.syncer_server.server.port
                if not is_local and certificate is None:
                    log.warning("%s", text_without_key_file())
        host = "127.0.0.1" if is_local else address_towards(os.environ.get("MASTER_ADDR", hosts[0]))
        return Address(*group.gather_objects([host, port], _START)[0])

    @property
    def _certificate(self) -> JobCertificate | None:
        path = self.settings.key_file
        return None if path is None else read_certificate(path)

    def make_learner(self, generation: int, address: str, read: Read | None = None) -> Learner:
        """Make the part in the background, which nothing carries out yet.

        Args:
            generation: Of this process: larger than that of an earlier one of this learner.
            address: Of the syncer, for messages.
            read: Returns this worker's parameters of a fragment.
        """
        saved, group = self._saved, self.worker.group
        if "received" in saved:
            received = list(saved["received"].split(self._lengths))
        else:
            received = [*map(read or self._fragments.read, range(len(self._lengths)))]
        self.learner = Learner(
            self.contract,
            self.name,
            generation,
            received,
            address,
            group.clock,
            self._fragments.as_stored if self._fragments.is_rounded else None,
        )
        if "rounds" in saved:
            self.learner.rounds.load_state_dict(saved["rounds"])
        return self.learner

    def _connect(self, address: Address) -> SyncerClient:
        group, settings = self.worker.group, self.settings
        link = settings.link_of(group.worker, group.num_workers)
        return SyncerClient(*address, self._certificate, settings.codec, link=link)

    # ------------------------------------------------------------------ local steps

    def add_tokens(self, count: float) -> None:
        """Count tokens, or samples, of the next local step. Without a call it has one."""
        self._tokens += count

    def count_step(self) -> None:
        """Count one local step."""
        self.worker.count_step()
        if self.learner is not None:
            self.learner.count_step((self._tokens or 1.0) * self.worker.group.replica_size)
        self._tokens = 0.0

    def check_due(self) -> bool:
        """Return whether fragments have arrived or are due. Never waits for the syncer.

        The ranks of a worker must all ask after the same local steps. They gather one number when
        they ask first after a local step.
        """
        group, steps = self.worker.group, self.worker.steps
        is_due = self.learner is not None and self.learner.is_due
        if group.inner is None:
            return is_due
        if steps != self._agreed_after:
            self._agreed_after = steps
            ((self._is_due,), *_) = group.agree([is_due], f"local step {steps}")
        return bool(self._is_due)

    @torch.no_grad()
    def make_round(self) -> None:
        """Write the fragments that have arrived into the model, and answer what is due."""
        self._is_due = 0.0
        boundary = self._meet()
        self._write(boundary)
        if boundary.written and not boundary.is_reset:
            self.worker.steps_since_round = 0
            self.statistics.rounds += len(boundary.written)

    @torch.no_grad()
    def _meet(self) -> Boundary:
        """Answer the syncer, and agree within the worker on what is written."""
        group = self.worker.group
        self.worker.check_trainable()
        boundary = self._on_first_rank(self._answer) or Boundary({})
        if group.inner is None:
            return boundary
        said = [float(fragment in boundary.written) for fragment in range(len(self._lengths))]
        first, *_ = group.agree([*said, boundary.is_reset], f"local step {self.worker.steps}")
        written = {
            fragment: boundary.written.get(fragment, torch.empty(length, dtype=self.contract.dtype))
            for fragment, length in enumerate(self._lengths)
            if first[fragment]
        }
        return Boundary(written, bool(first[-1]))

    def _answer(self, read: Read) -> Boundary:
        return Boundary({}) if self.learner is None else self.learner.at_boundary(read)

    def _write(self, boundary: Boundary) -> None:
        self.worker.was_finite = not boundary.is_reset
        if boundary.written:
            reach("outer step")
        for fragment, params in boundary.written.items():
            self._fragments.write(fragment, params)
        if self.learner is not None:
            sent, whole = self.learner.count_sent()
            self.statistics.count_compressed(sent, whole)
            self.statistics.lost_steps += self.learner.count_lost()

    # ------------------------------------------------------------------ sync points

    def sync_point(self, purpose: str) -> list[WorkerStatus]:
        """Wait until all ranks of this job have reached the same sync point.

        Arguments, result and errors as in :meth:`LocalParticipant.sync_point`.
        """
        return self.worker.sync_point(purpose)

    def write_consensus(self, purpose: str) -> None:
        """Show the consensus as :meth:`show_consensus` does, at a sync point of all ranks.

        With ``shows_outer`` it is what worker 0 has received last.
        """
        outer = self._received_by_worker_0() if self.shows_outer and self._has_joined else None
        self.worker.show_consensus(purpose, outer)

    def _received_by_worker_0(self) -> Tensor:
        """Return this rank's part of the parameters; all ranks must call it."""
        group, replica, state = self.worker.group, self.worker.replica, self._learner_state()
        layout, dtype = replica.layout, self.contract.dtype
        whole = state.get("received", torch.empty(sum(self._lengths), dtype=dtype))
        received = whole.split(self._lengths)
        outer = torch.cat([*itertools.starmap(self._fragments.share, enumerate(received))])
        outer = outer.to(layout.device)
        if group.data is not None:
            work = dist.broadcast(outer, group.ranks[0], group.data, async_op=True)
            PendingWork(group, "the received parameters", [work]).wait()
        return outer if replica.vectors is None else replica.vectors.cut(outer, None)

    def finish_at_sync_point(self) -> None:
        """Leave the consensus in the model, when all ranks are at the same sync point.

        A learner of a syncer elsewhere sends it the progress that it has not sent, and leaves.
        """
        self.worker.check_trainable()
        self.leave()
        self._warn_of_missing_steps()
        self._saved = self._learner_state()
        if self._thread is not None:
            self._thread.close()
            self._thread = self.learner = None
        self.write_consensus("the final consensus")
        self.has_ended = True
        self._disconnect()  # the syncer, which no learner asks any more

    @torch.no_grad()
    def leave(self) -> None:
        """Send a syncer elsewhere the progress that was not sent, and leave; else do nothing.

        It does not wait longer than half a minute. The model must hold the local parameters.
        """
        if self.settings.syncer is not None:
            self._on_first_rank(self._leave)

    def _leave(self, read: Read) -> None:
        limit_s = min(_LEAVE_S, self.worker.group.timeout_s / 2)  # others of this worker wait
        if self._thread is not None and not self._thread.leave(read, limit_s):
            error = None if self.learner is None else self.learner.error
            log.warning(
                "The last local steps of learner %s could not be sent. %s",
                self.name,
                error or "The syncer does not answer.",
            )

    def _warn_of_missing_steps(self) -> None:
        """Warn if what was received last, which becomes the model, has little of the training."""
        if self.learner is None or not self.shows_outer:
            return
        rounds, made = self.learner.rounds, self.worker.steps - self._started_after
        has_nothing = made > 0 and min(rounds.steps) >= made
        if has_nothing or max(rounds.steps) > _MANY * self.settings.rounds.sync_every:
            log.warning(
                "The last %d local steps of learner %s are not in its model, which is what it has "
                "received last: %s. The syncer was away, the link is slow, or merges wait for "
                "min_quorum=%d learners: see `lightning-loco syncer --status`.",
                max(rounds.steps),
                self.name,
                "nothing since its start" if has_nothing else "some of it long ago",
                self.settings.rounds.min_quorum,
            )

    # ------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return parameters, counters, what was received, and of worker 0 also the syncer."""
        return {**self.worker.state_dict(), "learner": self._learner_state()}

    def _learner_state(self) -> dict[str, Any]:
        if self.learner is None:
            return self._saved
        state = self.learner.state_dict()
        if self.syncer_server is not None and self.syncer_server.syncer is not None:
            # All workers wait, so it has every version that one of them has received.
            state["syncer"] = self.syncer_server.syncer.state_dict()
        return state

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a state of :meth:`state_dict` of the same worker, before :meth:`start`."""
        self._disconnect()
        self._has_joined = False
        self.worker.load_state_dict(saved)
        self._saved = saved["learner"]

    def reset(self) -> None:
        """Restart from the present values of the model; all workers must call it.

        RuntimeError in a run with a syncer elsewhere that this learner has joined.
        """
        if not self._has_joined:
            return
        if self.settings.syncer is not None:
            raise RuntimeError(
                "A hook has set weights in a run whose parameters are with a syncer elsewhere. "
                "Set them before the first batch, or start a new run with them."
            )
        self._disconnect()
        self._has_joined = False
        self.worker.group.gather_objects(None, "the reset of the run")
        self._saved = {}
        self.start()

    def resume_from(self, saved: EarlierRun) -> list[str]:
        """Load as much as fits of an earlier run; with other workers, from its saved model."""
        is_same = saved.is_of(self.settings.algorithm) and saved.has_same_workers
        state = dict(saved.state)
        fits = is_same and state["learner"].get("lengths") == self._lengths
        if not fits:
            replica = self.worker.replica
            state = {
                **{name: value for name, value in state.items() if name != "others"},
                "params": replica.layout.new_flat_on_cpu(),
                "buffers": replica.buffers.new_flat_on_cpu(),
                "learner": {},
            }
        self.load_state_dict(state)
        return [] if fits else saved.dropped_by(self.settings.algorithm)

    def _disconnect(self) -> None:
        thread, server = self._thread, self.syncer_server
        if server is not None and server.syncer is not None:
            self._first_epoch = server.syncer.rounds.epoch + 1
        self._thread = self.learner = self.syncer_server = None
        for part in (thread, server):
            if part is not None:
                part.close()

    def close(self) -> None:
        """Stop all threads and destroy the groups; a second call does nothing."""
        self._disconnect()
        self.worker.group.close()
