"""The engine of pairwise gossip: each worker fetches the parameters of a random peer, then blends.

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
from typing import Any

import torch
from torch import Tensor, nn

from lightning_loco.algorithms.pairwise import PairwiseAverage, Tag
from lightning_loco.distributed.devices import device_of
from lightning_loco.distributed.work import WaitTimer
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.distributed.worker_status import WorkerStatus
from lightning_loco.earlier_run import EarlierRun
from lightning_loco.gossip.averaging import ModelAverager, served_layout
from lightning_loco.gossip.fetcher import Received
from lightning_loco.gossip.node import open_node
from lightning_loco.gossip.outlier_filter import MAX_PEER_DISTANCE
from lightning_loco.gossip.settings import PairwiseSettings
from lightning_loco.gossip.snapshots import make_publisher
from lightning_loco.links import LinkLike, as_links
from lightning_loco.parameters.flat import CHUNK_ELEMENTS
from lightning_loco.worker import Worker

_MAX_KEPT = 1000


class PairwiseEngine:
    """Publishes this worker's parameters, and blends in those of random peers.

    Serving and fetching happen in background threads, so a slow or dead peer does not slow down
    training. Only the training thread uses the model, between local steps. Copying it for peers
    takes at most 5 % of the time, so a large model is not published in every local step.
    Floating-point buffers are exchanged together with the trainable parameters.

    Args:
        model: The module to train.
        algorithm: How to average with the parameters of a peer.
        nodes: All nodes including this one, if workers are started one by one: a list of
            ``{name, host, port}``, or a YAML file. Default: the ranks of the default process group.
        name: Which of the nodes this worker is.
        fetch_timeout_s: Longest duration of a fetch in seconds.
        compression: Codec of the parameters on the wire: ``"bf16"``, ``"fp16"``, ``"int8"``, or a
            codec such as ``Int8(block=128)``. Default: no compression.
        key_file: Key file of the job, written by ``lightning-loco keys FILE``; see
            :func:`~lightning_loco.transport.write_certificate`.
        max_peer_distance: Parameters that are this many times further away than usual are not used;
            more than 1. None for no limit. See
            :class:`~lightning_loco.gossip.outlier_filter.OutlierFilter`.
        seed: Seed of the choice of peers, used together with the number of the worker.
        link: Links to emulate, as in :func:`~lightning_loco.links.as_links`. Default: none.
        group: The workers. Default: all ranks of the default process group, in new groups.

    Attributes:
        worker: This worker: its replica of the model, sync points and consensus.
        settings: The settings.
        statistics: Statistics of the communication so far.
        node: Serves and fetches parameters; has the statistics of the fetches.
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
        max_peer_distance: float | None = MAX_PEER_DISTANCE,
        seed: int = 0,
        link: LinkLike | None = None,
        group: WorkerGroup | None = None,
    ) -> None:
        def make_settings() -> PairwiseSettings:
            return PairwiseSettings(
                algorithm or PairwiseAverage(),
                nodes,
                name,
                fetch_timeout_s,
                compression,
                key_file,
                max_peer_distance,
                as_links(link),
            )

        self._set_up(model, make_settings, seed, group)

    @classmethod
    def from_settings(
        cls,
        model: nn.Module,
        settings: PairwiseSettings,
        seed: int,
        group: WorkerGroup,
        optimized: Iterable[Tensor] | None = None,
    ) -> PairwiseEngine:
        """Create an engine from settings; other arguments are those of the class.

        Of the trainable parameters only the ``optimized`` ones are exchanged. Default: all of them.
        """
        engine = cls.__new__(cls)
        engine._set_up(model, lambda: settings, seed, group, optimized)  # noqa: SLF001
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
            self.worker, self.settings = Worker.join(model, make_settings, group, optimized)
            self.algorithm = self.settings.algorithm
            replica = self.worker.replica
            self._buffers = replica.buffers
            self._buffer_sizes = self._buffers.sizes
            layout = served_layout(replica.layout, self._buffers, CHUNK_ELEMENTS)
            own_seed = 1_000_003 * seed + group.worker + self.settings.node_number
            self._averager = ModelAverager(layout, self.algorithm)
            self.node = open_node(self.settings, group, layout, own_seed)
        except BaseException as error:
            group.close(error)
            raise
        self.statistics = self.worker.statistics
        if self.settings.link is not None:
            self.statistics.start_emulation()
        self.factors: list[float] = []
        self.stalenesses: list[float] = []
        self._clock = 0.0
        self._draw = random.Random(own_seed).random
        self._publisher = make_publisher(self.node.snapshots, layout)
        self._fetching = False

    # ------------------------------------------------------------- local steps

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
        if self._publisher.is_due:
            self.worker.check_trainable()
            self._publish()
        self.worker.was_finite = self._publisher.was_finite
        if self._fetching or not self._averager.is_upload_done:
            return
        if self._draw() < self.algorithm.fetch_probability:
            self._fetching = True
            self._update_buffers()
            self._averager.record_fetch_start()
            self.node.start_fetch()

    def _publish(self) -> None:
        if self._publisher.has_loss or not self.algorithm.uses_loss:
            self._update_buffers()
            self._publisher.publish(self._clock)

    def _update_buffers(self) -> None:
        """Use the module's present buffers, which may be other tensors than before."""
        buffers, served = self.worker.replica.buffers, self._averager.layout.tensors
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
        if self._fetching:
            self._fetching = False
            self.node.wait()
        self.node.snapshots.withdraw()
        if self._clock > 0:
            self._publish()
        self.worker.group.gather_objects(None, "the reset of gossip")

    @torch.no_grad()
    def update_wait(self, loss: float | Tensor | None = None) -> float:
        """Wait for the running fetch and blend in its result. Call it after a local step.

        Args:
            loss: This worker's recent training loss; None if it is the same as before.

        Returns:
            The blend factor; 0 if there is nothing to blend in.
        """
        self._record_loss(loss)
        if not self._fetching:
            return 0.0
        self._fetching = False
        before_s = self.statistics.wait_s
        with WaitTimer(self.statistics):
            received = self.node.wait()
        if received is None:
            return 0.0
        if received.emulated_s:
            waited_s = self.statistics.wait_s - before_s
            self.statistics.count_emulated(received.emulated_s, waited_s, received.received_bytes)
        return self._blend(received)

    def step(self) -> bool:
        """Count one local step, and blend in the result of a fetch that has ended. Never waits.

        Returns:
            Whether a fetch had ended.
        """
        self.count_step()
        if not self.is_due:
            return False
        self.make_round()
        return True

    def count_step(self) -> None:
        """Count one local step."""
        self.worker.count_step()

    @property
    def is_due(self) -> bool:
        """Whether a fetch has ended. Never waits."""
        return self._fetching and self.node.has_ended

    @torch.no_grad()
    def make_round(self) -> None:
        """Blend in the result of the fetch, if there is one."""
        loss = self.worker.last_loss
        is_number = isinstance(loss, Tensor) and loss.numel() == 1
        self.update_wait(loss if is_number else None)

    def _record_loss(self, loss: float | Tensor | None) -> None:
        if loss is not None:
            self._publisher.record_loss(loss)
            self.worker.last_loss = loss

    def _blend(self, received: Received) -> float:
        loss = self._publisher.loss
        own, peer = Tag(self._clock, math.nan if loss is None else loss), received.tag
        factor = self.algorithm.blend_factor(own, peer) if self.worker.was_finite else 1.0
        self._update_buffers()
        self._averager.blend(received.params, factor, was_finite=self.worker.was_finite)
        self._clock = self.algorithm.blended_clock(own.clock, peer.clock, factor)
        self._record_blend(factor, own.clock - peer.clock)
        return factor

    def _record_blend(self, factor: float, staleness: float) -> None:
        for kept, value in ((self.factors, factor), (self.stalenesses, staleness)):
            kept.append(value)
            del kept[:-_MAX_KEPT]
        self.worker.steps_since_round = 0
        self.statistics.rounds += 1
        self.statistics.staleness = max(0, round(staleness))
        self.statistics.count_compressed(*self.node.count_sent())

    # ---------------------------------------------------------------- sync points

    def finish(self) -> None:
        """Wait for the other ranks of this job and put the mean of all ranks into the model.

        The parameters are served until all ranks have arrived.

        Raises:
            RuntimeError: If a rank is missing or has failed, no rank has finite parameters, or a
                parameter became trainable after the start.
        """
        self.sync_point("the end of training")
        self.finish_at_sync_point()

    def finish_at_sync_point(self) -> None:
        """Do the rest of :meth:`finish`, when all ranks are at the same sync point."""
        self.worker.check_trainable()
        self.write_consensus("the final consensus")

    @property
    def stop_agreed(self) -> str | None:
        """The reason to stop, once this worker is at the step that all have agreed on."""
        return self.worker.stop_agreed

    def sync_point(self, purpose: str) -> list[WorkerStatus]:
        """Wait until all ranks of this job have reached the same sync point; serve until then.

        Arguments and errors are those of :meth:`lightning_loco.engine.Engine.sync_point`.
        """
        return self.worker.sync_point(purpose)

    @torch.no_grad()
    def show_consensus(self, purpose: str = "the consensus") -> None:
        """Put the mean of all ranks into the model; all ranks must call it.

        :meth:`Worker.show_local` brings the local parameters back.

        Raises:
            RuntimeError: If no rank's parameters are finite, or as in :meth:`sync_point`.
        """
        if not self.worker.replica.shows_consensus:
            self.sync_point(purpose)
            self.write_consensus(purpose)

    def write_consensus(self, purpose: str) -> None:
        """Do what :meth:`show_consensus` does, when all ranks are at the same sync point."""
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
        """Resume from an earlier run, which may have had other settings or more or fewer workers.

        The model must hold the consensus of that run. With another algorithm or number of workers,
        all workers start at it, each with its own clock. Returns what could not be resumed, one
        sentence each; KeyError if the saved state is incomplete.
        """
        state, replica = saved.state, self.worker.replica
        is_same_algorithm = saved.is_of(self.algorithm)
        if is_same_algorithm and saved.fits(self.worker.group.num_workers):
            self.load_state_dict(state)
            return []
        at_consensus = {
            **{name: value for name, value in state.items() if name != "others"},
            "params": replica.layout.new_flat_on_cpu(),
            "buffers": replica.buffers.new_flat_on_cpu(),
            "clock": state["clock"] if is_same_algorithm else float(state["steps"]),
        }
        self.load_state_dict(at_consensus)
        return ["all workers begin at the consensus"] if is_same_algorithm else saved.forgotten()

    def close(self) -> None:
        """Stop serving, end all threads and destroy the groups. Calling it again does nothing."""
        self.node.close()
        self.worker.group.close()
