"""Asynchronous model averaging: the workers' mean pulls, what was learned meanwhile stays."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from lightning_loco.algorithms.base import Algorithm, State
from lightning_loco.algorithms.merge import KeepProgress
from lightning_loco.topology import Ring

if TYPE_CHECKING:
    from lightning_loco.topology import Topology


@dataclasses.dataclass(frozen=True)
class ModelAverage(Algorithm):
    r"""Go to the mean of the workers' snapshots, and keep what was learned since.

    .. math::
        \theta^i \leftarrow \frac{1}{N} \sum_j s^j + (\theta^i - s^i)

    where :math:`s^i` are the parameters that worker i sent some local steps ago. The local progress
    made meanwhile survives, and the mean over the workers moves by nothing else than that progress.
    If a round ends where it began there is none, and this is plain averaging, Local SGD.

    There is nothing to choose here: when rounds begin and end is a matter of the schedule, and the
    progress is added where a round lands (:class:`~lightning_loco.algorithms.KeepProgress`).

    Source:
        Bagua's Asynchronous Model Average.

    Example:
        >>> import torch
        >>> algorithm = ModelAverage()
        >>> state = algorithm.init(torch.zeros(1))
        >>> message = algorithm.propose(torch.tensor([1.0]), state)  # the snapshot
        >>> algorithm.update(message, torch.tensor([2.0]), state)    # the mean of the snapshots
        tensor([2.])
    """

    exchange: ClassVar[Literal["mean", "neighbors"]] = "mean"
    sends_parameters = True
    merge_policy = KeepProgress()

    def init(self, params: Tensor) -> State:
        """No state is needed."""
        return {}

    def propose(self, params: Tensor, state: State) -> Tensor:
        """The message is the local parameters: the snapshot."""
        return params

    def update(self, params: Tensor, received: Tensor, state: State) -> Tensor:
        """The result of the exchange becomes the local parameters."""
        return received

    def restart(self, state: State) -> Tensor | None:
        """Nothing remembers where the round began: a worker without progress takes the mean."""
        return None


@dataclasses.dataclass(frozen=True)
class NeighborAverage(ModelAverage):
    r"""Asynchronous averaging with the neighbours of a topology instead of all workers.

    .. math::
        \theta^i \leftarrow \sum_j W_{ij} s^j + (\theta^i - s^i)

    A worker without valid parameters goes on from what its last round brought.

    Example:
        >>> NeighborAverage().exchange
        'neighbors'
    """

    exchange = "neighbors"

    def default_topology(self, seed: int) -> Topology:
        """A ring."""
        return Ring()

    def prepare(self, num_workers: int, topology: Topology | None) -> NeighborAverage:
        """Check that averaging on this graph reaches all workers."""
        super().prepare(num_workers, topology)
        assert topology is not None
        topology.check(num_workers)
        return self

    def init(self, params: Tensor) -> State:
        """The state is what the last round brought, at first the common start."""
        return {"start": params}

    def update(self, params: Tensor, received: Tensor, state: State) -> Tensor:
        """The mix of the neighbours becomes the local parameters, and is remembered."""
        start: Tensor = state["start"]
        return start.copy_(received)

    def restart(self, state: State) -> Tensor:
        """The round began at what the last one brought."""
        start: Tensor = state["start"]
        return start
