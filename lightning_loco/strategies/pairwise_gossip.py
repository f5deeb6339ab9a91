"""PairwiseGossipStrategy: workers read the parameters of random peers, without rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import Unpack

from lightning_loco.algorithms.pairwise_average import Interpolation
from lightning_loco.compression import Codec
from lightning_loco.costs import LinkLike
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.gossip import Peer
from lightning_loco.gossip.engine import PairwiseEngine
from lightning_loco.gossip.settings import PairwiseSettings, pairwise_gossip
from lightning_loco.strategies.arguments import CommonArguments
from lightning_loco.strategies.engine_strategy import EngineStrategy


class PairwiseGossipStrategy(EngineStrategy, DDPStrategy):
    """Serve this worker's parameters and blend in random peers' parameters, without waiting.

    Before a local step the present parameters are published, and a fetch from a random peer is
    started. The peer's parameters are blended in after the first local step at whose end the fetch
    is complete. See :class:`~lightning_loco.algorithms.PairwiseAverage` for the formula and the
    factors, and :class:`~lightning_loco.PairwiseEngine` for the details.

    The workers are the ranks of one job, or separate Trainers (``nodes``), which may be started one
    by one, be killed, and join again. In the second case each Trainer validates and saves its own
    model. Use the same seed for all, so that they start from the same parameters.

    With ``replica_size=k`` a worker is k consecutive ranks, which average their gradients in every
    step as DDP does; with ``nodes`` the ranks of each Trainer are one such worker. The first rank
    serves, fetches and blends, and sends the result to the others. Whether there is something to
    blend, and the loss, are agreed by one gather of a few numbers per local step, within the worker
    only.

    Args:
        fetch_probability: Probability in [0, 1] that a local step starts a fetch.
        interpolation: ``"constant"``, ``"clock"``, ``"loss"``, or a callable
            ``(clock, peer_clock, loss, peer_loss) -> factor``. The loss is the one returned by
            ``training_step``.
        factor: The factor of ``"constant"``: share of the peer's parameters in [0, 1].
        divergence_threshold: Loss below which models may drift apart; 0 turns it off.
        fetch_timeout_s: Longest duration of a fetch in seconds.
        nodes: All nodes including this one, if the workers are separate Trainers: a list of
            ``{name, host, port}``, or a YAML file of them.
        name: Which of the nodes this Trainer is.
        key_file: Key file of the job: only peers that have it can read or serve parameters. Write
            one with ``lightning-loco keys FILE``.
        compression: Codec of the parameters on the wire: ``"bf16"``, ``"fp16"``, ``"int8"``, or a
            codec such as ``Int8(block=128)``. Rough codecs are refused. Default: no compression.
        keep_progress: Blend the parameters from the start of the fetch, and add the progress made
            since. False is dpwa's rule.
        config_file: A YAML file in the format of dpwa: the nodes, and any of ``fetch_probability``,
            ``timeout_ms``, ``interpolation``, ``divergence_threshold`` and ``constant``.
        link: A slower link to emulate, as in :class:`LocoStrategy`. A fetch takes as long as on
            that link, and fails after ``fetch_timeout_s``.
        common: The arguments that strategies with workers share, :class:`CommonArguments`.

    Raises:
        ValueError: If a value is out of range, at construction or before training starts.
        TypeError: If a value has the wrong type or an argument is unknown.

    Example::

        Trainer(strategy=PairwiseGossipStrategy(interpolation="loss"), devices=8)
        Trainer(strategy=PairwiseGossipStrategy(nodes="nodes.yaml", name="w1"), devices=1)
    """

    settings: PairwiseSettings
    _has_returned_loss = False

    def __init__(
        self,
        fetch_probability: float = 0.1,
        interpolation: Literal["constant", "clock", "loss"] | Interpolation = "constant",
        factor: float = 0.3,
        divergence_threshold: float = 0.0,
        fetch_timeout_s: float = 2.5,
        nodes: str | Path | Sequence[Peer | Mapping[str, object]] | None = None,
        name: str | None = None,
        key_file: str | Path | None = None,
        *,
        compression: Codec | str | None = None,
        keep_progress: bool = True,
        config_file: str | Path | None = None,
        link: LinkLike | None = None,
        **common: Unpack[CommonArguments],
    ) -> None:
        settings = pairwise_gossip(
            fetch_probability,
            interpolation,
            factor,
            divergence_threshold,
            fetch_timeout_s,
            nodes,
            name,
            key_file,
            compression,
            keep_progress,
            config_file,
            link,
        )
        self._init_with(settings, **common)

    @classmethod
    def from_file(cls, path: str | Path, name: str) -> PairwiseGossipStrategy:
        """Create a strategy with the nodes and settings of a YAML file in the format of dpwa.

        The same as ``PairwiseGossipStrategy(config_file=path, name=name)``, which takes also other
        arguments. FileNotFoundError if the file does not exist; ValueError if a key or value of it
        is invalid.
        """
        return cls(config_file=path, name=name)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of the sampler: with nodes, each of them gets a share of the data."""
        if not self.settings.peers:
            return super().distributed_sampler_kwargs
        size = self.replica_size
        return {
            "num_replicas": len(self.settings.peers) * size,
            "rank": self.settings.node_number * size + self.place,
        }

    def setup(self, trainer: pl.Trainer) -> None:
        """Set up training. Raises ValueError if a node of the list has several workers."""
        if self.settings.peers and self.num_workers > 1:
            raise ValueError(
                f"nodes are Trainers of one worker each, but this one has {self.num_workers}. Use "
                f"devices=1, make its {self.world_size} ranks one worker with "
                f"replica_size={self.world_size}, or leave nodes out to gossip between the ranks."
            )
        super().setup(trainer)

    def engine_of(
        self, model: nn.Module, group: WorkerGroup, optimized: Sequence[Tensor] | None
    ) -> PairwiseEngine:
        """Make an engine of a model from the settings."""
        seed = torch.initial_seed() % 2**31
        return PairwiseEngine.from_settings(model, self.settings, seed, group, optimized)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step. Raises if the factor may need a loss and none is returned."""
        output = super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        self._engine.worker.last_loss = self._steps.loss
        may_skip = self._has_returned_loss or self.lightning_module.automatic_optimization
        self._has_returned_loss = self._has_returned_loss or self._steps.known_loss is not None
        if not self._has_returned_loss and not may_skip and self.settings.algorithm.uses_loss:
            raise MisconfigurationException(
                "training_step returned no loss, but interpolation="
                f"{self.settings.algorithm.interpolation!r} with divergence_threshold="
                f"{self.settings.algorithm.divergence_threshold:g} may need it. Return the loss, "
                "or {'loss': ...}, or use interpolation='constant' or 'clock'."
            )
        return output
