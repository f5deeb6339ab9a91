"""No rounds at all: every worker pulls the parameters of a random peer and blends them in.

The engine in a plain PyTorch loop, in the manner of dpwa::

    engine = PairwiseEngine(model, nodes="nodes.yaml", name="w1")  # every worker for itself
    for batch in data:
        engine.update_send(loss)      # serve the present parameters, start to fetch a peer's
        loss = train(batch)
        engine.update_wait(loss)      # blend them in
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
from lightning_loco.gossip.averaging import Blending, served_layout
from lightning_loco.gossip.fetcher import Received
from lightning_loco.gossip.node import open_node
from lightning_loco.gossip.outlier_filter import MAX_PEER_DISTANCE
from lightning_loco.gossip.posting import Upload, make_posting
from lightning_loco.gossip.settings import PairwiseSettings
from lightning_loco.links.links import LinkLike, as_links
from lightning_loco.parameters.flat import CHUNK_ELEMENTS
from lightning_loco.worker import Worker

_KEPT = 1000


class PairwiseEngine:
    """Serve this worker's parameters, and blend in those of random peers.

    Serving and fetching happen in threads of their own: a peer that is slow or dead costs nothing
    but its own parameters. The model is touched by the training thread only, between local steps.
    Copying it for others takes at most 5 % of the time, so that of a large model not every local
    step is published. Floating-point buffers travel with the trainable parameters.

    Args:
        model: The module to train.
        algorithm: How much of a peer's parameters to take.
        nodes: All peers, if the workers are started one by one: a list of ``{name, host, port}``
            or a YAML file. Default: the ranks of the default process group.
        name: Which of the nodes this worker is.
        fetch_timeout_s: Longest time for a fetch, in seconds.
        compression: How parameters are written on the wire: ``"bf16"``, ``"fp16"``, ``"int8"``, or
            a codec such as ``Int8(block=128)``. Default: as they are.
        key_file: Of the job, from ``lightning-loco keys FILE``; see
            :func:`~lightning_loco.transport.write_certificate`.
        max_peer_distance: How many times as far as usual a peer's parameters may be from one's own,
            more than 1; None for no limit. See
            :class:`~lightning_loco.gossip.outlier_filter.Nearness`.
        seed: For the choice of peers, together with the number of the worker.
        link: Links that fetches are to take as long as on, as in
            :func:`~lightning_loco.links.links.as_links`. Default: those that there are.
        group: The workers. Default: all ranks of the default process group, with groups of its own.

    Attributes:
        worker: What is this worker's whatever it pulls: place, replica, sync points, consensus.
        settings: Checked.
        statistics: What communication cost so far.
        node: This worker among its peers, with the statistics of the fetches.
        factors: The last blend factors, at most 1000.
        stalenesses: By how much the peers' clocks were behind one's own, at most 1000.

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
        """An engine of settings that are made already, for some trainable parameters or all."""
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
            self._blending = Blending(layout, self.algorithm)
            self.node = open_node(self.settings, group, layout, own_seed)
        except BaseException as error:
            group.close(error)
            raise
        self.statistics = self.worker.statistics
        if self.settings.link is not None:
            self.statistics.begin_emulation()
        self.factors: list[float] = []
        self.stalenesses: list[float] = []
        self._clock = 0.0
        self._draw = random.Random(own_seed).random
        self._posting = make_posting(self.node, self._blending)
        self._upload = Upload(layout.device)
        self._fetching = False

    # ------------------------------------------------------------- local steps

    @torch.no_grad()
    def update_send(self, loss: float | Tensor | None = None) -> None:
        """Before a local step: serve the present parameters, perhaps start to fetch a peer's.

        Args:
            loss: This worker's recent training loss, one number; None if it has none. Without one
                nothing is served as long as the factor may depend on it.

        Raises:
            RuntimeError: If a parameter became trainable after the start.
        """
        self._clock += 1
        self._note_loss(loss)
        if self._posting.is_due:
            self.worker.check_trainable()
            self._serve()
        self.worker.was_finite = self._posting.was_finite
        if self._fetching or not self._upload.is_done:
            return
        if self._draw() < self.algorithm.fetch_probability:
            self._fetching = True
            self._find_buffers()
            self._blending.note_fetch()
            self.node.start_fetch()

    def _serve(self) -> None:
        if self._posting.has_loss or not self.algorithm.uses_loss:
            self._find_buffers()
            self._posting.send(self._clock)

    def _find_buffers(self) -> None:
        """Let the buffers that the module holds now be served and blended."""
        buffers, served = self.worker.replica.buffers, self._blending.layout.tensors
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
        """Serve nothing older than what the model holds now; all ranks of the job must call it.

        A fetch under way is waited for and dropped.
        """
        if self._fetching:
            self._fetching = False
            self.node.wait()
        self.node.withdraw()
        if self._clock > 0:
            self._serve()
        self.worker.group.gather_objects(None, "a new start")

    @torch.no_grad()
    def update_wait(self, loss: float | Tensor | None = None) -> float:
        """After a local step: wait for the fetch under way and blend in what it has brought.

        Args:
            loss: This worker's recent training loss; None if there is no later one than before.

        Returns:
            The factor of the peer's parameters; 0 if there are none.
        """
        self._note_loss(loss)
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
        """Count one local step, and blend in what a fetch has brought meanwhile.

        Returns:
            Whether a fetch has ended.
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
        """Whether a fetch has ended; never waits."""
        return self._fetching and self.node.has_ended

    @torch.no_grad()
    def make_round(self) -> None:
        """Blend in what the fetch has brought, if anything."""
        loss = self.worker.last_loss
        is_number = isinstance(loss, Tensor) and loss.numel() == 1
        self.update_wait(loss if is_number else None)

    def _note_loss(self, loss: float | Tensor | None) -> None:
        if loss is not None:
            self._posting.note_loss(loss)
            self.worker.last_loss = loss

    def _blend(self, received: Received) -> float:
        loss = self._posting.loss
        own, peer = Tag(self._clock, math.nan if loss is None else loss), received.tag
        factor = self.algorithm.blend_factor(own, peer) if self.worker.was_finite else 1.0
        self._find_buffers()
        self._blending.blend(received.params, factor, was_finite=self.worker.was_finite)
        self._upload.note()
        self._clock = self.algorithm.blended_clock(own.clock, peer.clock, factor)
        self._note_blend(factor, own.clock - peer.clock)
        return factor

    def _note_blend(self, factor: float, staleness: float) -> None:
        for kept, value in ((self.factors, factor), (self.stalenesses, staleness)):
            kept.append(value)
            del kept[:-_KEPT]
        self.worker.steps_since_round = 0
        self.statistics.rounds += 1
        self.statistics.staleness = max(0, round(staleness))
        self.statistics.count_compressed(*self.node.count_sent())

    # ---------------------------------------------------------------- sync points

    def finish(self, purpose: str = "the end of training") -> None:
        """Wait for the ranks of this job and leave their mean in the model; serve until then.

        Raises:
            RuntimeError: If a rank is missing or has failed, none is finite, or a parameter became
                trainable after the start.
        """
        self.worker.check_trainable()
        self.sync_point(purpose)
        self.show_consensus("the final consensus")

    @property
    def stop_agreed(self) -> str | None:
        """The reason to stop, once this worker is at the step that all have agreed on."""
        return self.worker.stop_agreed

    def sync_point(self, purpose: str) -> list[WorkerStatus]:
        """Wait until all ranks of this job have reached the same sync point; serve until then.

        Args:
            purpose: What it is for, in words that are equal on all ranks.

        Raises:
            RuntimeError: If a rank is missing or has failed, or waits at another sync point.
            StopAgreed: If the others have stopped, as agreed, before they came here.
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
            self.worker.show_consensus(purpose)

    def state_dict(self) -> dict[str, Any]:
        """The parameters, buffers, counters and the clock; not the draws and not the scores."""
        return {**self.worker.state_dict(), "clock": self._clock}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from a state of :meth:`state_dict` of the same worker."""
        self.worker.load_state_dict(saved)
        self._clock = saved["clock"]

    @torch.no_grad()
    def resume_from(self, saved: EarlierRun) -> list[str]:
        """Go on from what another run has saved, as far as that fits.

        With another algorithm or number of workers all begin at the consensus, with their own
        clocks.

        Args:
            saved: What this engine, a new one whose model holds the consensus of that run, is to go
                on from.

        Returns:
            What is dropped or begun anew, in words.

        Raises:
            KeyError: If something is missing in what was saved.
        """
        state, replica = saved.state, self.worker.replica
        is_of_pairs = saved.is_of(self.algorithm)
        if is_of_pairs and saved.fits(self.worker.group.num_workers):
            self.load_state_dict(state)
            return []
        at_consensus = {
            **{name: value for name, value in state.items() if name != "others"},
            "params": replica.layout.set_aside(),
            "buffers": replica.buffers.set_aside(),
            "clock": state["clock"] if is_of_pairs else float(state["steps"]),
        }
        self.load_state_dict(at_consensus)
        return ["all workers begin at the consensus"] if is_of_pairs else saved.forgotten()

    def close(self) -> None:
        """Stop serving, end the threads and destroy the groups; a second call does nothing."""
        self.node.close()
        self.worker.group.close()
