"""Where the messages of simulated workers meet."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_loco.rounds.exchange import Exchange
from lightning_loco.rounds.parcels import Parcel, group_chunks


class Hub:
    """Collects the messages of all workers, and hands out what the exchange makes of them.

    A worker's message is one parcel here, and is exchanged as the parcels that processes send.

    Args:
        exchange: Its ``simulate`` says what each worker receives.
        num_workers: Number of workers N.
        parcel_elements: The longest parcel of a process.
        has_feedback: Whether what is lost of messages is fed back.
    """

    def __init__(
        self,
        exchange: Exchange,
        num_workers: int,
        parcel_elements: int,
        has_feedback: bool = False,
    ) -> None:
        self._exchange = exchange
        self._num_workers = num_workers
        self._parcel_elements = parcel_elements
        self.has_feedback = has_feedback
        self._rounds: dict[tuple[int, int], HubRound] = {}

    def of_worker(self, worker: int) -> HubExchange:
        """The exchange as one worker sees it."""
        return HubExchange(self, worker)

    def simulate(self, messages: Sequence[Tensor], round_index: int) -> list[Tensor]:
        """Return what each worker receives, given all messages in order of the workers."""
        return self._exchange.simulate(messages, round_index)

    def round_of(self, parcel: Parcel, index: int) -> HubRound:
        """Where this parcel's messages of a round are; earlier rounds are forgotten."""
        key = (index, parcel.slices[0].start)
        if key not in self._rounds:
            self._rounds = {k: r for k, r in self._rounds.items() if k[0] == index}
            self._rounds[key] = HubRound(self, self._num_workers, index, self._lengths(parcel))
        return self._rounds[key]

    def _lengths(self, parcel: Parcel) -> list[int]:
        groups = group_chunks([part.chunk for part in parcel.parts], self._parcel_elements)
        return [sum(map(len, group)) for group in groups]


class HubRound:
    """The messages of one parcel in one round.

    Args:
        hub: Says what each worker receives.
        num_workers: How many messages to wait for.
        index: Number of the round.
        lengths: Of the parcels that processes would send.
    """

    def __init__(self, hub: Hub, num_workers: int, index: int, lengths: Sequence[int]) -> None:
        self._hub = hub
        self._num_workers = num_workers
        self._index = index
        self._lengths = list(lengths)
        self._messages: dict[int, Tensor] = {}
        self._received: list[Tensor] = []

    @property
    def is_complete(self) -> bool:
        """Whether the messages of all workers are here."""
        return len(self._messages) == self._num_workers

    def put(self, worker: int, message: Tensor) -> None:
        """Take a copy of one worker's message."""
        self._messages[worker] = message.clone()

    def get(self, worker: int) -> Tensor:
        """What one worker receives.

        Raises:
            RuntimeError: If a message is missing.
        """
        if not self.is_complete:
            raise RuntimeError("A simulated round ends before all workers have begun it.")
        if not self._received:
            workers, lengths = range(self._num_workers), self._lengths
            messages = [torch.split_with_sizes(self._messages[w], lengths) for w in workers]
            parcels = zip(*messages, strict=True)
            received = [self._hub.simulate(parcel, self._index) for parcel in parcels]
            self._received = [torch.cat(parts) for parts in zip(*received, strict=True)]
        return self._received[worker]

    def lost(self, worker: int) -> Tensor | None:
        """What is lost of a worker's message, if it is fed back."""
        return self._messages[worker] if self._hub.has_feedback else None


class HubExchange:
    """One worker's access to the hub; what it receives is divided by the weights already.

    Args:
        hub: Shared by all workers.
        worker: Number of this one.
    """

    is_weighted = False
    can_carry_rows = False

    def __init__(self, hub: Hub, worker: int) -> None:
        self._hub = hub
        self._worker = worker

    def start(self, parcel: Parcel, round_index: int) -> HubHandle:
        """Leave a worker's message at the hub."""
        hub_round = self._hub.round_of(parcel, round_index)
        hub_round.put(self._worker, parcel.wire)
        return HubHandle(hub_round, self._worker)

    def simulate(self, messages: Sequence[Tensor], round_index: int) -> list[Tensor]:
        """Return what each worker receives, given all messages in order of the workers."""
        return self._hub.simulate(messages, round_index)


class HubHandle:
    """A parcel that has been left at the hub.

    Args:
        hub_round: The round that it belongs to.
        worker: Number of the worker that has left it.
    """

    def __init__(self, hub_round: HubRound, worker: int) -> None:
        self._round = hub_round
        self._worker = worker

    @property
    def lost(self) -> Tensor | None:
        """What is lost of the worker's message."""
        return self._round.lost(self._worker)

    def has_arrived(self) -> bool:
        """Whether all workers have left their messages."""
        return self._round.is_complete

    def wait(self) -> Tensor:
        """What this worker receives."""
        return self._round.get(self._worker)

    def release(self) -> None:
        """Do nothing: the hub's memory is not used again."""
