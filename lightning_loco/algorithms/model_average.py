"""Asynchronous model averaging: the workers' mean pulls, what was learned meanwhile stays."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_loco.algorithms.base import Algorithm, State


@dataclasses.dataclass(frozen=True)
class ModelAverage(Algorithm):
    r"""Go to the mean of the workers' snapshots, and keep what was learned since.

    .. math::
        \theta^i \leftarrow \frac{1}{N} \sum_j s^j + (\theta^i - s^i)

    where :math:`s^i` are the parameters that worker i sent some local steps ago. If nothing has
    happened since, this is plain averaging; otherwise the local progress made meanwhile survives,
    and the mean over the workers moves by nothing else than that progress.

    There is nothing to choose here: when rounds begin and end is a matter of the engine
    (:class:`~lightning_loco.ClockEngine`), which puts the progress into the state.

    Source:
        Bagua's Asynchronous Model Average.

    Example:
        >>> import torch
        >>> algorithm = ModelAverage()
        >>> state = algorithm.init(torch.zeros(1))
        >>> message = algorithm.propose(torch.tensor([1.0]), state)  # the snapshot
        >>> state["progress"].fill_(0.25)                            # a local step later
        tensor([0.2500])
        >>> received = torch.tensor([2.0])                           # the mean of the snapshots
        >>> algorithm.update(message, received, state)
        tensor([2.2500])
    """

    exchange: ClassVar[Literal["mean", "neighbors"]] = "mean"

    def init(self, params: Tensor) -> State:
        """The progress made while a message is under way: zero unless the engine says otherwise."""
        return {"progress": torch.zeros_like(params)}

    def propose(self, params: Tensor, state: State) -> Tensor:
        """The message is the local parameters: the snapshot."""
        return params

    def update(self, params: Tensor, received: Tensor, state: State) -> Tensor:
        """What was received, plus the progress."""
        return received.add_(state["progress"])

    def restart(self, params: Tensor, state: State) -> None:
        """Zero: a worker without valid parameters has weight 0 and takes over the mean."""
        params.zero_()


@dataclasses.dataclass(frozen=True)
class NeighborAverage(ModelAverage):
    r"""Asynchronous averaging with the neighbours of a topology instead of all workers.

    .. math::
        \theta^i \leftarrow \sum_j W_{ij} s^j + (\theta^i - s^i)

    A worker without valid parameters goes on from those it had at the end of its last round.

    Example:
        >>> NeighborAverage().exchange
        'neighbors'
    """

    exchange = "neighbors"

    def init(self, params: Tensor) -> State:
        """The progress, and the parameters at the end of the last round."""
        return {**super().init(params), "start": params}

    def update(self, params: Tensor, received: Tensor, state: State) -> Tensor:
        """The mix of the neighbours, plus the progress."""
        start: Tensor = state["start"]
        return torch.add(received, state["progress"], out=start)

    def restart(self, params: Tensor, state: State) -> None:
        """The last round ended at the start."""
        params.copy_(state["start"])
