"""The engine of pairwise gossip: each worker blends in the parameters of random peers.

There are no rounds. In a plain PyTorch loop, with the two calls of dpwa::

    engine = PairwiseEngine(model, nodes="nodes.yaml", name="w1")  # in each worker's process
    for batch in data:
        engine.update_send(loss)      # publish the present parameters, start to fetch a peer's
        loss = train(batch)
        engine.update_wait(loss)      # wait for the peer's parameters and blend them in
    engine.finish()
    engine.close()
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_loco.algorithms.pairwise_average import PairwiseAverage, Tag
from lightning_loco.costs import LinkLike, as_links
from lightning_loco.distributed.devices import device_of
from lightning_loco.distributed.work import WaitTimer
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.distributed.worker_status import WorkerStatus
from lightning_loco.gossip.averaging import ModelAverager, served_layout
from lightning_loco.gossip.fetcher import Received
from lightning_loco.gossip.node import PeerNode, open_node
from lightning_loco.gossip.peer_selection import peer_seed
from lightning_loco.gossip.settings import PairwiseSettings
from lightning_loco.gossip.snapshots import (
    DevicePublisher,
    Publisher,
    Snapshots,
    make_publisher,
)
from lightning_loco.model.flat import CHUNK_ELEMENTS, FlatLayout
from lightning_loco.model.participant import LocalParticipant
from lightning_loco.model.same_model import broadcast_inside
from lightning_loco.model.worker import EarlierRun, Worker

_MAX_KEPT = 1000
_SHARING = "sharing a blend between the ranks of a worker"


class Node(Protocol):
    """Serves and fetches parameters: a :class:`PeerNode`, or a simulated one."""

    @property
    def snapshots(self) -> Snapshots:
        """The published parameters."""

    def start_fetch(self) -> None:
        """Start to fetch from a peer."""

    @property
    def has_ended(self) -> bool:
        """Whether no fetch is running."""

    def wait(self) -> Received | None:
        """Wait until the fetch has ended; None if no peer has sent usable parameters."""

    def count_sent(self) -> tuple[int, int]:
        """Return the bytes sent since the last call, and their number without compression."""

    def close(self) -> None:
        """Stop serving."""


class PeerExchange(NamedTuple):
    """The parts that exchange parameters with peers, on the first rank of a worker only.

    Attributes:
        node: Serves and fetches parameters.
        publisher: Copies the parameters of the model for peers.
        averager: Blends the parameters of a peer into the model.
    """

    node: Node
    publisher: Publisher | DevicePublisher
    averager: ModelAverager


class RankReport(NamedTuple):
    """Report of one rank of a worker after a local step, so that all its ranks blend together.

    Attributes:
        has_loss: 1 if it has a training loss, else 0.
        loss: The training loss, which may be NaN.
        clock: Its clock.
        has_peer: 1 if the parameters of a peer have arrived here, else 0.
        peer_clock: The peer's clock.
        peer_loss: The peer's loss.
        finite: 0 if the parameters held NaN or infinity when they were read last, else 1.
    """

    has_loss: float
    loss: float
    clock: float
    has_peer: float
    peer_clock: float
    peer_loss: float
    finite: float

    @classmethod
    def of(cls, loss: float | Tensor, clock: float, peer: Tag | None, finite: bool) -> Self:
        """Make the report of a rank. A float ``loss`` is NaN if the loss is not known."""
        has_loss = isinstance(loss, Tensor) or not math.isnan(loss)
        tag = Tag(math.nan, math.nan) if peer is None else peer
        return cls(has_loss, float(loss), clock, peer is not None, *tag, finite)

    @property
    def peer(self) -> Tag | None:
        """Clock and loss of the peer whose parameters have arrived; None without."""
        return Tag(self.peer_clock, self.peer_loss) if self.has_peer else None

    def gather(self, group: WorkerGroup, label: str) -> tuple[Self, float | None]:
        """Return the report of the first rank, and the mean loss; all ranks must call it.

        The mean is over the ranks that have a loss; None if none has. RuntimeError if a rank is
        missing or has failed; the message names it.
        """
        reports = [type(self)(*numbers) for numbers in group.agree(self, label)]
        losses = [report.loss for report in reports if report.has_loss]
        return reports[0], sum(losses) / len(losses) if losses else None


class PairwiseEngine(LocalParticipant):
    """Publishes this worker's parameters, and blends in the parameters of random peers.

    Serving and fetching happen in background threads, so a slow or dead peer does not slow down
    training. Only the training thread uses the model, between local steps. Copying it for peers
    takes at most 5 % of the time, so a large model is not published in every local step.
    Floating-point buffers are exchanged together with the trainable parameters.

    In a worker of several ranks, whose gradients the caller averages, the first rank serves,
    fetches and blends for all of them. All ranks call the same methods. They gather a few numbers
    once per local step, in :meth:`check_due`: their losses, and whether parameters have arrived at
    the first rank. If so, the other ranks receive the blended parameters and buffers from it.

    Args:
        model: The module to train.
        algorithm: How to average with the parameters of a peer.
        nodes: All nodes including this one, if workers are started one by one: a list of
            ``{name, host, port}``, or a YAML file. Default: the ranks of the default process group.
        config_file: A YAML file in the format of dpwa, with the nodes and settings of ``algorithm``
            and the timeout: see :func:`~lightning_loco.gossip.read_nodes`.
        name: Which of the nodes this worker is.
        fetch_timeout_s: Longest duration of a fetch in seconds.
        compression: Codec of the parameters on the wire: ``"bf16"``, ``"fp16"``, ``"int8"``, or a
            codec such as ``Int8(block=128)``. Default: no compression.
        key_file: Key file of the job, written by ``lightning-loco keys FILE``; see
            :func:`~lightning_loco.transport.write_certificate`.
        seed: Seed of the choice of peers, used together with the number of the worker.
        link: Links to emulate, as in :func:`~lightning_loco.costs.as_links`. Default: none.
        group: The workers. Default: all ranks of the default process group, in new groups, each of
            which is a worker.

    Attributes:
        worker: This worker: its replica of the model, sync points and consensus.
        settings: The settings.
        statistics: Statistics of the communication so far.
        factors: The last 1000 blend factors.
        stalenesses: By how many local steps the clocks of the last 1000 peers were behind this
            worker's clock.

    Raises:
        ValueError: If the model, the settings or the nodes do not fit, or the port is taken.

    Source:
        dpwa; see :class:`~lightning_loco.algorithms.PairwiseAverage`.
    """

    def __init__(
        self,
        model: nn.Module,
        algorithm: PairwiseAverage | None = None,
        *,
        nodes: Any | None = None,
        name: str | None = None,
        fetch_timeout_s: float = 2.5,
        compression: Any | None = None,
        key_file: str | Path | None = None,
        seed: int = 0,
        link: LinkLike | None = None,
        group: WorkerGroup | None = None,
        config_file: str | Path | None = None,
    ) -> None:
        def make_settings() -> PairwiseSettings:
            return PairwiseSettings(
                algorithm or PairwiseAverage(),
                nodes,
                name,
                fetch_timeout_s,
                compression,
                key_file,
                as_links(link),
                config_file,
            )

        self._set_up(model, make_settings, seed, group)

    @classmethod
    def from_file(
        cls,
        model: nn.Module,
        path: str | Path,
        name: str,
        *,
        key_file: str | Path | None = None,
        seed: int = 0,
    ) -> PairwiseEngine:
        """Create an engine with the nodes and settings of a YAML file in the format of dpwa.

        ``path`` is the ``config_file`` of the class; other arguments and errors are described
        there. FileNotFoundError if the file does not exist.
        """
        return cls(model, name=name, config_file=path, key_file=key_file, seed=seed)

    @classmethod
    def from_settings(
        cls,
        model: nn.Module,
        settings: PairwiseSettings,
        seed: int,
        group: WorkerGroup,
        optimized: Iterable[Tensor] | None = None,
    ) -> PairwiseEngine:
        """Create an engine from settings; other arguments are described in the class.

        Only trainable parameters in ``optimized`` are exchanged. Default: all of them.
        """
        engine = cls.__new__(cls)
        engine._set_up(model, lambda: settings, seed, group, optimized)  # noqa: SLF001
        return engine

    @classmethod
    def of_worker(
        cls,
        worker: Worker,
        settings: PairwiseSettings,
        connect: Callable[[FlatLayout], tuple[Node, Publisher | DevicePublisher]],
        draw: Callable[[], float],
    ) -> PairwiseEngine:
        """Make an engine of a worker that is set up already, as the simulation does.

        Args:
            worker: Nothing about it is compared with the other workers.
            settings: Prepared.
            connect: Makes the node that serves and fetches vectors of a layout, and its publisher.
            draw: Returns a number from 0 to 1 in each local step, to decide whether to fetch.
        """
        engine = cls.__new__(cls)
        engine._start(worker, settings, connect, draw)  # noqa: SLF001
        return engine

    def _set_up(
        self,
        model: nn.Module,
        make_settings: Callable[[], PairwiseSettings],
        seed: int,
        group: WorkerGroup | None,
        optimized: Iterable[Tensor] | None = None,
    ) -> None:
        group = group if group is not None else WorkerGroup.create(device=device_of(model))
        try:
            worker, settings = Worker.join(model, make_settings, group, optimized)
            own_seed = peer_seed(seed, group.worker + settings.node_number)

            def connect(layout: FlatLayout) -> tuple[Node, Publisher | DevicePublisher]:
                node = open_node(settings, group, layout, own_seed)
                return node, make_publisher(node.snapshots, layout, group.clock)

            self._start(worker, settings, connect, random.Random(own_seed).random)
        except BaseException as error:
            group.close(error)
            raise

    def _start(
        self,
        worker: Worker,
        settings: PairwiseSettings,
        connect: Callable[[FlatLayout], tuple[Node, Publisher | DevicePublisher]],
        draw: Callable[[], float],
    ) -> None:
        self.worker, self.settings, self.algorithm = worker, settings, settings.algorithm
        replica = worker.replica
        self._buffers = replica.buffers
        self._buffer_sizes = self._buffers.sizes
        self._served = layout = served_layout(replica.layout, self._buffers, CHUNK_ELEMENTS)
        self._exchange: PeerExchange | None = None
        if worker.group.place == 0:
            averager = ModelAverager(layout, self.algorithm, replica.layout.num_held)
            self._exchange = PeerExchange(*connect(layout), averager)
        self.statistics = worker.statistics
        self.factors: list[float] = []
        self.stalenesses: list[float] = []
        self._clock = 0.0
        self._draw = draw
        self._fetching = False
        self._fetch_began_s = 0.0
        self._received: Received | None = None
        self._peer: Tag | None = None
        self._mean_loss: float | None = None
        self._agreed_after = 0

    @property
    def node(self) -> PeerNode:
        """Serves and fetches parameters, and counts the fetches.

        RuntimeError on all ranks of a worker but the first.
        """
        if self._exchange is None:
            raise RuntimeError(
                f"Place {self.worker.group.place} of a worker has no node: the first rank serves "
                "and fetches for all ranks. Use the node of place 0."
            )
        assert isinstance(self._exchange.node, PeerNode)  # else it is simulated
        return self._exchange.node

    @property
    def _agrees_on_loss(self) -> bool:
        """Whether the loss is used, and is the mean over several ranks."""
        return self.worker.group.inner is not None and self.algorithm.uses_loss

    # ------------------------------------------------------------- local steps

    def before_step(self, loss: float | Tensor | None = None) -> None:
        """Publish the present parameters and maybe start a fetch, as :meth:`update_send`."""
        self.update_send(loss)

    @torch.no_grad()
    def update_send(self, loss: float | Tensor | None = None) -> None:
        """Publish the present parameters and maybe start a fetch. Call it before a local step.

        Args:
            loss: This worker's recent training loss, one number; None if it has none. If the factor
                may depend on the loss, nothing is published before the first loss is known.

        Raises:
            RuntimeError: If a parameter became trainable after the start.
        """
        self._clock += 1
        self._record_loss(loss)
        if self._exchange is None:
            return
        node, publisher, averager = self._exchange
        if publisher.is_due:
            self.worker.check_trainable()
            self._publish(publisher)
        self.worker.was_finite = publisher.was_finite
        # Drawn in every local step, so that the draws do not depend on how long fetches take.
        is_chosen = self._draw() < self.algorithm.fetch_probability
        is_free = not self._fetching and self._received is None and averager.is_upload_done
        if is_chosen and is_free:
            self._fetching = True
            self._update_buffers()
            averager.record_fetch_start()
            self._fetch_began_s = self.worker.group.clock.now()
            node.start_fetch()

    def _publish(self, publisher: Publisher | DevicePublisher) -> None:
        if publisher.has_loss or not self.algorithm.uses_loss:
            self._update_buffers()
            publisher.publish(self._clock)

    def _update_buffers(self) -> None:
        """Use the module's present buffers, which may be other tensors than before."""
        buffers, served = self.worker.replica.buffers, self._served.tensors
        if buffers is self._buffers:
            return
        if buffers.sizes != self._buffer_sizes:
            name = next(n for n, size in buffers.sizes.items() if size != self._buffer_sizes[n])
            raise RuntimeError(
                f"Buffer {name!r} has {buffers.sizes[name]} elements now and had "
                f"{self._buffer_sizes[name]} when training began, but peers fetch buffers of one "
                "size only. Give it that size before training (run one forward pass in "
                "configure_model), or register it with persistent=False."
            )
        served[len(served) - len(buffers.tensors) :] = buffers.tensors
        self._buffers = buffers

    @torch.no_grad()
    def reset(self) -> None:
        """Replace the published parameters by the present ones. All ranks of the job must call it.

        A running fetch is waited for and its result is dropped.
        """
        self._received = self._peer = None
        if self._exchange is not None:
            node, publisher, _ = self._exchange
            if self._fetching:
                self._fetching = False
                node.wait()
            # Without a loss the present parameters are not published yet, but the old ones must not
            # be fetched any more.
            node.snapshots.withdraw()
            if self._clock > 0:
                self._publish(publisher)
        # Until all have withdrawn theirs, a fetch could still get the old parameters of a peer.
        self.worker.group.gather_objects(None, "the reset of gossip")

    @torch.no_grad()
    def update_wait(self, loss: float | Tensor | None = None) -> float:
        """Wait for the running fetch and blend in its result. Call it after a local step.

        All ranks of a worker must call it.

        Args:
            loss: This worker's recent training loss; None if it is the same as before.

        Returns:
            The blend factor; 0 if there is nothing to blend in.
        """
        self._record_loss(loss)
        if self._peer is None:
            self._take()
            self._agree()
        return self._blend()

    def _take(self) -> None:
        """Wait for the running fetch, if this rank has one, and keep its result."""
        if not self._fetching or self._exchange is None:
            return
        self._fetching = False
        with WaitTimer(self.statistics):
            self._received = self._exchange.node.wait()
        self.statistics.record("round", self._fetch_began_s, self.worker.group.clock.now())

    def _agree(self) -> None:
        """Decide with the other ranks of this worker whether there is a peer to blend in.

        A worker of one rank decides alone. Among several ranks the loss is the mean; clock, peer,
        and whether the parameters were finite come from the first rank.
        """
        worker, received = self.worker, self._received
        self._peer = None if received is None else received.tag
        if worker.group.inner is None:
            return
        # Whoever asks again after this step, to blend, must not gather again.
        self._agreed_after = worker.steps
        last_loss = worker.last_loss if self._agrees_on_loss else math.nan
        own = RankReport.of(last_loss, self._clock, self._peer, worker.was_finite)
        first, loss = own.gather(worker.group, f"local step {worker.steps}")
        self._clock, self._peer = first.clock, first.peer
        worker.was_finite = bool(first.finite)
        if loss is not None:
            self._mean_loss = loss
            if self._exchange is not None:
                self._exchange.publisher.record_loss(loss)

    def count_step(self) -> None:
        """Count one local step."""
        self.worker.count_step()

    def check_due(self) -> bool:
        """Return whether a fetch has ended. Never waits for a peer.

        In a worker of several ranks, which must all ask after the same local steps: whether one has
        ended with a result. They gather a few numbers when they ask first after a local step.
        """
        exchange = self._exchange
        has_ended = self._fetching and exchange is not None and exchange.node.has_ended
        if self.worker.group.inner is None:
            return has_ended
        if self.worker.steps != self._agreed_after:
            if has_ended:
                self._take()
            self._agree()
        return self._peer is not None

    @torch.no_grad()
    def make_round(self) -> None:
        """Blend in the result of the fetch, if there is one."""
        self.update_wait(self._known_loss)

    @property
    def _known_loss(self) -> float | Tensor | None:
        """The last training loss; None if it is not known, or not one number."""
        loss = self.worker.last_loss
        is_known = loss.numel() == 1 if isinstance(loss, Tensor) else not math.isnan(loss)
        return loss if is_known else None

    def _record_loss(self, loss: float | Tensor | None) -> None:
        if loss is None:
            return
        self.worker.last_loss = loss
        if self._exchange is not None and not self._agrees_on_loss:
            self._exchange.publisher.record_loss(loss)

    def _blend(self) -> float:
        """Blend in the result of a fetch, if there is one; on other ranks, receive the blend."""
        peer, received = self._peer, self._received
        self._peer = self._received = None
        if peer is None:
            return 0.0
        group, was_finite = self.worker.group, self.worker.was_finite
        loss = self._mean_loss
        if group.inner is None and self._exchange is not None:
            loss = self._exchange.publisher.loss
        own = Tag(self._clock, math.nan if loss is None else loss)
        # A model with NaN takes the parameters of the peer in place of its own.
        factor = self.algorithm.blend_factor(own, peer) if was_finite else 1.0
        if not was_finite:
            self.statistics.lost_steps += self.worker.steps_since_round
        self._update_buffers()
        if self._exchange is not None and received is not None:
            self._exchange.averager.blend(received.params, factor, was_finite=was_finite)
        self._share()
        self._clock = self.algorithm.blended_clock(own.clock, peer.clock, factor)
        self._record_blend(factor, own.clock - peer.clock)
        return factor

    def _share(self) -> None:
        """Copy parameters and buffers from the first rank of this worker, chunk by chunk."""
        group, layout = self.worker.group, self._served
        for chunk in layout.chunks() if group.inner is not None else ():
            flat = torch.empty(len(chunk), dtype=layout.dtype, device=layout.device)
            if group.place == 0:
                chunk.pack(flat)
            broadcast_inside([flat], group, _SHARING)
            if group.place > 0:
                chunk.unpack(flat)

    def _record_blend(self, factor: float, staleness: float) -> None:
        for kept, value in ((self.factors, factor), (self.stalenesses, staleness)):
            kept.append(value)
            del kept[:-_MAX_KEPT]
        self.worker.steps_since_round = 0
        self.statistics.rounds += 1
        self.statistics.staleness = max(0, round(staleness))
        if self._exchange is not None:
            self.statistics.count_compressed(*self._exchange.node.count_sent())

    # ---------------------------------------------------------------- sync points

    def finish_at_sync_point(self) -> None:
        """Put the mean of all ranks into the model, when all are at the same sync point.

        RuntimeError if no rank has finite parameters, or a parameter became trainable after the
        start.
        """
        self.worker.check_trainable()
        self.write_consensus("the final consensus")

    def sync_point(self, purpose: str) -> list[WorkerStatus]:
        """Wait until all ranks of this job have reached the same sync point; serve until then.

        Arguments, result and errors as in :meth:`LocalParticipant.sync_point`.
        """
        return self.worker.sync_point(purpose)

    def write_consensus(self, purpose: str) -> None:
        """Show the consensus as :meth:`show_consensus` does, at a sync point of all ranks."""
        self.worker.show_consensus(purpose)

    def state_dict(self) -> dict[str, Any]:
        """Return parameters, buffers, counters and the clock, without random states and scores."""
        return {**self.worker.state_dict(), "clock": self._clock}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a state from :meth:`state_dict` of the same worker."""
        self.worker.load_state_dict(saved)
        self._clock = saved["clock"]

    @torch.no_grad()
    def resume_from(self, saved: EarlierRun) -> list[str]:
        """Load as much as fits of an earlier run, and publish it.

        With another algorithm or number of workers, all workers start from the consensus, each with
        its own clock.
        """
        state, replica = saved.state, self.worker.replica
        is_same_algorithm = saved.is_of(self.algorithm)
        is_same = is_same_algorithm and saved.has_same_workers
        if not is_same:
            state = {
                **{name: value for name, value in state.items() if name != "others"},
                "params": replica.layout.new_flat_on_cpu(),
                "buffers": replica.buffers.new_flat_on_cpu(),
                "clock": state["clock"] if is_same_algorithm else float(state["steps"]),
            }
        self.load_state_dict(state)
        self.reset()
        return [] if is_same else saved.dropped_by(self.algorithm)

    def close(self) -> None:
        """Stop serving, end all threads and destroy the groups. Calling it again does nothing."""
        if self._exchange is not None:
            self._exchange.node.close()
        self.worker.group.close()
