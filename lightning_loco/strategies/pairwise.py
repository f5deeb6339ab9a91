"""PairwiseGossipStrategy: no rounds, every worker pulls from random peers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Unpack

from lightning_loco.algorithms import PairwiseAverage
from lightning_loco.algorithms.pairwise import Interpolation
from lightning_loco.compression import Codec
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.earlier_run import EarlierRun
from lightning_loco.gossip import Peer, read_nodes
from lightning_loco.gossip.engine import PairwiseEngine
from lightning_loco.gossip.outlier_filter import MAX_PEER_DISTANCE
from lightning_loco.gossip.settings import PairwiseSettings
from lightning_loco.links.links import LinkLike, as_links
from lightning_loco.strategies.arguments import CommonArguments, spelled_out
from lightning_loco.strategies.base import EngineStrategy
from lightning_loco.strategies.local_training import optimized_by


class PairwiseGossipStrategy(EngineStrategy):
    """Serve this worker's parameters and blend in those of random peers; nobody waits for anybody.

    Before a local step the parameters are served as they are, and a fetch from a random peer
    starts; after the first local step that it was complete in, the peer's parameters are blended
    in. See :class:`~lightning_loco.algorithms.PairwiseAverage` for the formula and the factors, and
    :class:`~lightning_loco.PairwiseEngine` for what happens when.

    Workers are the ranks of one job, or Trainers of their own that are started one by one
    (``nodes``), may be killed, come late and come back. In the second case each Trainer validates
    and saves its own model; give all the same seed, so that they start from the same parameters.

    Args:
        fetch_probability: Chance that a local step starts a fetch, in [0, 1].
        interpolation: ``"constant"``, ``"clock"``, ``"loss"``, or a callable
            ``(clock, peer_clock, loss, peer_loss) -> factor``. The loss comes from
            ``training_step``.
        factor: The constant factor of the peer's parameters, in [0, 1].
        divergence_threshold: Loss below which models may drift apart; 0 is off.
        fetch_timeout_s: Longest time for a fetch, in seconds.
        nodes: All peers, if the workers are Trainers of their own: a list of
            ``{name, host, port}``, or a YAML file in the form of dpwa, of which only the nodes are
            read (:meth:`from_file` reads the settings, too).
        name: Which of the nodes this Trainer is.
        key_file: Of the job: only peers that hold it can read or serve parameters; write one with
            ``lightning-loco keys FILE``.
        compression: How parameters are written on the wire: ``"bf16"``, ``"fp16"``, ``"int8"``, or
            a codec such as ``Int8(block=128)``; rough ones are refused. Default: as they are.
        keep_progress: Blend what the parameters were when the fetch began, and keep what was
            learned since; off is dpwa's rule.
        max_peer_distance: How many times as far as usual a peer's parameters may be from one's own,
            more than 1; those further away are not used, and counted by ``PeerMonitor``. None for
            no limit.
        link: A slower link to emulate, as in :class:`LocoStrategy`; a fetch takes as long as it
            would there, and fails after ``fetch_timeout_s``.
        evaluate: As in :class:`LocoStrategy`, like all arguments that follow.

    Raises:
        ValueError: If a value is out of range, at construction or before training starts.
        TypeError: If a value has the wrong type or an argument is unknown.

    Example::

        Trainer(strategy=PairwiseGossipStrategy(interpolation="loss"), devices=8)
        Trainer(strategy=PairwiseGossipStrategy(nodes="nodes.yaml", name="w1"), devices=1)
    """

    settings: PairwiseSettings

    @spelled_out(EngineStrategy._init_with)  # noqa: SLF001
    def __init__(
        self,
        fetch_probability: float = 1.0,
        interpolation: Literal["constant", "clock", "loss"] | Interpolation = "constant",
        factor: float = 0.5,
        divergence_threshold: float = 0.0,
        fetch_timeout_s: float = 2.5,
        nodes: str | Path | Sequence[Peer | Mapping[str, object]] | None = None,
        name: str | None = None,
        key_file: str | Path | None = None,
        *,
        compression: Codec | str | None = None,
        keep_progress: bool = False,
        max_peer_distance: float | None = MAX_PEER_DISTANCE,
        link: LinkLike | None = None,
        **common: Unpack[CommonArguments],
    ) -> None:
        algorithm = PairwiseAverage(
            fetch_probability, interpolation, factor, divergence_threshold, keep_progress
        )
        settings = PairwiseSettings(
            algorithm,
            nodes=nodes,
            name=name,
            fetch_timeout_s=fetch_timeout_s,
            compression=compression,
            key_file=key_file,
            max_peer_distance=max_peer_distance,
            link=as_links(link),
        )
        self._has_told_loss = False
        self._init_with(settings, **common)

    @classmethod
    def from_file(cls, path: str | Path, name: str) -> PairwiseGossipStrategy:
        """Take nodes and settings from a YAML file in the form of dpwa.

        Args:
            path: With the keys ``nodes``, ``fetch_probability``, ``timeout_ms``, ``interpolation``,
                ``divergence_threshold`` and ``constant``; all but the first may be missing.
            name: Which of the nodes this Trainer is.

        Raises:
            ValueError: If the file says something that is not understood.
        """
        nodes, settings = read_nodes(path)
        return cls(nodes=nodes, name=name, **settings)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Share the training data between the nodes, if they are Trainers of their own."""
        if not self.settings.peers:
            return super().distributed_sampler_kwargs
        return {
            "num_replicas": len(self.settings.peers),
            "rank": self.settings.node_number,
        }

    def setup(self, trainer: pl.Trainer) -> None:
        """Refuse several ranks in a Trainer that is one of the nodes."""
        if self.settings.peers and self.world_size > 1:
            raise ValueError(
                f"nodes are Trainers of one worker each, but this one has {self.world_size} ranks. "
                "Use devices=1, or leave nodes out to gossip between the ranks."
            )
        super().setup(trainer)

    def make_engine(self, group: WorkerGroup) -> PairwiseEngine:
        """An engine that fetches the parameters of one peer at a time, without rounds."""
        assert self.lightning_module is not None
        seed = torch.initial_seed() % 2**31
        model, optimized = self.lightning_module, optimized_by(self.optimizers)
        return PairwiseEngine.from_settings(model, self.settings, seed, group, optimized)

    def reset(self) -> None:
        """Serve the parameters in the model; wait until all workers do so."""
        assert isinstance(self._engine, PairwiseEngine)
        self._engine.reset()

    def resume_from(self, saved: EarlierRun) -> list[str]:
        """Serve what another run has saved; wait until all workers do so."""
        assert isinstance(self._engine, PairwiseEngine)
        notes = self._engine.resume_from(saved)
        self._engine.reset()
        return notes

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step; refuse one that tells no loss if the factor may depend on it."""
        output = super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        may_skip = self._has_told_loss or self.lightning_module.automatic_optimization
        self._has_told_loss = self._has_told_loss or self._known_loss is not None
        if not self._has_told_loss and not may_skip and self.settings.algorithm.uses_loss:
            raise MisconfigurationException(
                "training_step returned no loss, but interpolation="
                f"{self.settings.algorithm.interpolation!r} with divergence_threshold="
                f"{self.settings.algorithm.divergence_threshold:g} may need it. Return the loss, "
                "or {'loss': ...}, or use interpolation='constant' or 'clock'."
            )
        return output

    def prepare_step(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Serve the present parameters and start to fetch a peer's, once in a local step."""
        engine = self._engine
        assert isinstance(engine, PairwiseEngine)
        if self._steps.is_next(optimizer):
            engine.update_send(self._known_loss)
        return closure

    @property
    def _known_loss(self) -> Tensor | float | None:
        """The loss that ``training_step`` has returned last, if it was one number."""
        loss = self._loss
        return None if isinstance(loss, float) and math.isnan(loss) else loss
