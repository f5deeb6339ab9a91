"""What a worker of a topology makes of its own message and those of its neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from lightning_loco.topology import Topology


class Mix(NamedTuple):
    """One worker's row of a round's mixing matrix.

    Attributes:
        own: Weight of its own message.
        others: Weights of the messages that it hears, in the order in which they are added up.

    Example:
        >>> from lightning_loco.topology import Complete
        >>> Mix.of(Complete(), worker=1, num_workers=2, round_index=0)
        Mix(own=0.5, others={0: 0.5})
    """

    own: float
    others: dict[int, float]

    @classmethod
    def of(cls, topology: Topology, worker: int, num_workers: int, round_index: int) -> Mix:
        """The row of a worker."""
        others = dict(topology.weights(worker, num_workers, round_index))
        return cls(others.pop(worker, 0.0), others)

    def apply(self, message: Tensor, inbox: Mapping[int, Tensor]) -> Tensor:
        """Sum the weighted messages in place of the first received one.

        Args:
            message: This worker's own; only read. It is the result if there are no others.
            inbox: The messages of the others.
        """
        if not self.others:
            return message
        first, *rest = self.others
        mixed = inbox[first].mul_(self.others[first]).add_(message, alpha=self.own)
        for peer in rest:
            mixed.add_(inbox[peer], alpha=self.others[peer])
        return mixed


def mix_all(topology: Topology, messages: Sequence[Tensor], round_index: int) -> list[Tensor]:
    """What every worker receives, given all messages in order of the workers."""
    mixed = []
    for worker, message in enumerate(messages):
        mix = Mix.of(topology, worker, len(messages), round_index)
        inbox = {peer: messages[peer].clone() for peer in mix.others}
        mixed.append(mix.apply(message.clone(), inbox))
    return mixed
