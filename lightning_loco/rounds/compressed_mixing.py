r"""What a worker of a topology makes of compressed messages: the mean over all workers stays exact.

.. math:: r_i = \sum_j W_{ij} Q(u_j) + (u_i - Q(u_i))

Each worker adds what the others do not know of its own message. So nothing is lost for the mean,
and no residual is needed. Two messages that are written alike mix no more: workers stay as far
apart as that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_loco.codecs import Codec
from lightning_loco.rounds.mixing import Mix
from lightning_loco.topology import Topology


def mix_compressed(
    codec: Codec, mix: Mix, message: Tensor, wire: Tensor, inbox: Mapping[int, Tensor]
) -> Tensor:
    """The mix of one worker, in new memory; its own message if there are no others.

    Args:
        codec: How messages are written.
        mix: Its row of the mixing matrix.
        message: Its own, as it is; only read.
        wire: Its own, as it is written.
        inbox: Those of the others, as they are written.
    """
    if not mix.others:
        return message
    mixed = torch.empty_like(message)
    for part, written in codec.pieces(mixed):
        own, read = mixed[part], torch.empty_like(mixed[part])
        codec.decode(wire[written], own)
        own.mul_(mix.own - 1).add_(message[part])
        for peer, weight in mix.others.items():
            own.add_(codec.decode(inbox[peer][written], read), alpha=weight)
    return mixed


def mix_all_compressed(
    codec: Codec, topology: Topology, messages: Sequence[Tensor], round_index: int
) -> list[Tensor]:
    """What every worker receives, given all messages in order of the workers."""
    wires = [codec.encode(message) for message in messages]
    mixed = []
    for worker, message in enumerate(messages):
        mix = Mix.of(topology, worker, len(messages), round_index)
        inbox = {peer: wires[peer] for peer in mix.others}
        mixed.append(mix_compressed(codec, mix, message.clone(), wires[worker], inbox))
    return mixed
