"""Asynchronous model averaging: parameters are averaged while local steps continue."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from torch import Tensor

from lightning_loco.algorithms.algorithm import Algorithm, RoundInfo, State
from lightning_loco.algorithms.merge_policy import KeepProgress
from lightning_loco.topology import Topology


@dataclasses.dataclass(frozen=True)
class ModelAverage(Algorithm):
    r"""Replaces the parameters by the mean of the workers' snapshots, and keeps later progress.

    .. math::
        \theta^i \leftarrow \frac{1}{N} \sum_j s^j + (\theta^i - s^i)

    where the snapshot :math:`s^i` is the parameters that worker i sent some local steps ago. The
    progress made since then is kept, and the mean over the workers changes by that progress only.
    In a blocking round there is no such progress, and this is Local SGD.

    It has no settings. The schedule decides when rounds begin and end, and the merge policy
    :class:`~lightning_loco.algorithms.KeepProgress` adds the progress.

    Source:
        Bagua's Asynchronous Model Average.

    Example:
        >>> import torch
        >>> algorithm = ModelAverage()
        >>> state = algorithm.init(torch.zeros(1))
        >>> snapshot = algorithm.propose(torch.tensor([1.0]), state, RoundInfo())
        >>> mean = torch.tensor([2.0])  # of the workers' snapshots
        >>> algorithm.update(None, None, mean, state, RoundInfo())
        tensor([2.])
    """

    exchange: ClassVar[Literal["mean", "neighbors"]] = "mean"
    sends_parameters = True
    merge_policy = KeepProgress()

    def init(self, params: Tensor) -> State:
        """Return an empty state."""
        return {}

    def propose(self, params: Tensor, state: State, info: RoundInfo) -> Tensor:
        """Return the local parameters: the snapshot."""
        return params

    def update(
        self,
        local: Tensor | None,
        message: Tensor | None,
        received: Tensor,
        state: State,
        info: RoundInfo,
    ) -> Tensor:
        """Return the result of the exchange."""
        return received


@dataclasses.dataclass(frozen=True)
class NeighborAverage(ModelAverage):
    r"""Asynchronous averaging with the neighbours of a topology instead of all workers.

    .. math::
        \theta^i \leftarrow \sum_j W_{ij} s^j + (\theta^i - s^i)

    A worker without valid parameters continues from the result of its last round.

    Example:
        >>> NeighborAverage().exchange
        'neighbors'
    """

    exchange = "neighbors"
    start_key = "start"
    default_topology = "ring"

    def prepare(
        self, num_workers: int, topology: Topology | None, *, is_late: bool = False
    ) -> NeighborAverage:
        """Check that averaging on this graph reaches all workers."""
        super().prepare(num_workers, topology, is_late=is_late)
        assert topology is not None
        topology.check(num_workers)
        return self

    def init(self, params: Tensor) -> State:
        """Return the result of the last round, which is the common start at first."""
        return {"start": params}

    def update(
        self,
        local: Tensor | None,
        message: Tensor | None,
        received: Tensor,
        state: State,
        info: RoundInfo,
    ) -> Tensor:
        """Return the weighted mean of the neighbours, and keep it in the state."""
        start: Tensor = state["start"]
        return start.copy_(received)
