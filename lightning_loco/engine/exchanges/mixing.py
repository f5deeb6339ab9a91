r"""What a worker of a topology makes of its own message and those of its neighbours.

.. math:: r_i = \sum_j W_{ij} u_j

With compressed messages the mean over all workers stays exact:

.. math:: r_i = \sum_j W_{ij} Q(u_j) + (u_i - Q(u_i))

Each worker adds what the others do not know of its own message. So nothing is lost for the mean,
and no residual is needed. Two messages that are written alike mix no more: workers stay as far
apart as that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_loco.compression import Codec
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

    def apply(
        self,
        message: Tensor,
        written: Tensor,
        inbox: Mapping[int, Tensor],
        codec: Codec | None = None,
    ) -> Tensor:
        """Sum the weighted messages, without a codec in place of the first received one.

        Args:
            message: This worker's own; only read. It is the result if there are no others.
            written: The same as it is written.
            inbox: Those of the others, as they are written.
            codec: How messages are written. Default: as they are.
        """
        if not self.others:
            return message
        if codec is None:
            first, *rest = self.others
            mixed = inbox[first].mul_(self.others[first]).add_(message, alpha=self.own)
            for peer in rest:
                mixed.add_(inbox[peer], alpha=self.others[peer])
            return mixed
        mixed = torch.empty_like(message)
        for part, piece in codec.pieces(mixed):
            own, read = mixed[part], torch.empty_like(mixed[part])
            codec.decode(written[piece], own)
            own.mul_(self.own - 1).add_(message[part])
            for peer, weight in self.others.items():
                own.add_(codec.decode(inbox[peer][piece], read), alpha=weight)
        return mixed


def mix_all(
    topology: Topology, messages: Sequence[Tensor], round_index: int, codec: Codec | None = None
) -> list[Tensor]:
    """What every worker receives, given all messages in order of the workers."""
    written = [message if codec is None else codec.encode(message) for message in messages]
    mixed = []
    for worker, message in enumerate(messages):
        mix = Mix.of(topology, worker, len(messages), round_index)
        inbox = {peer: written[peer].clone() for peer in mix.others}
        mixed.append(mix.apply(message.clone(), written[worker], inbox, codec))
    return mixed
