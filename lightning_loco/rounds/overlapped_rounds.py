"""Rounds whose result arrives during the next local phase and is applied at its end."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_loco.algorithms import Algorithm, State
from lightning_loco.comm.flat import Chunk, FlatLayout
from lightning_loco.rounds.exchange import Exchange, Handle
from lightning_loco.rounds.parcels import Parcel, Part
from lightning_loco.rounds.rounds import BlockingRounds


class OverlappedRounds(BlockingRounds):
    """Rounds whose result is applied one round late.

    At a boundary, per chunk: the pseudo-gradient is taken against the outer parameters as they are,
    the previous mean is applied to them, local parameters restart from them, and the new message
    leaves. The messages need memory of the model's size while they travel.

    Args:
        layout: The trainable parameters.
        algorithm: What to compute; must support overlap.
        exchange: How messages move.
        state: The algorithm's state.
        parcel_elements: Longest parcel.
        warm_start: Make the first round a blocking one.
    """

    staleness = 1

    def __init__(
        self,
        layout: FlatLayout,
        algorithm: Algorithm,
        exchange: Exchange,
        state: State,
        parcel_elements: int,
        warm_start: bool,
    ) -> None:
        self._messages = torch.empty(layout.numel, dtype=layout.dtype, device=layout.device)
        super().__init__(layout, algorithm, exchange, state, parcel_elements)
        self._warm_start = warm_start
        self._handles: list[Handle] | None = None
        self._total_weight: Callable[[], float] = lambda: 1.0

    def _slot_lengths(self, extra_elements: int) -> list[int]:
        longest = max((len(chunk) for chunk in self._layout.chunks()), default=0)
        return [longest, longest]

    def _make_parcel(self, index: int, chunks: list[Chunk]) -> Parcel:
        slot = self._slots[0]
        return Parcel(
            self._messages[chunks[0].start : chunks[-1].stop],
            [Part(c, slot[: len(c)], self._algorithm, self.state) for c in chunks],
        )

    def load(self) -> bool:
        """Look at the parameters; nothing is prepared, since results come back first."""
        self._make_parcels()
        return self._layout.is_finite()

    def run(self, round_index: int, progress: bool, total_weight: Callable[[], float]) -> None:
        """Apply the previous result and send the new messages."""
        previous, self._handles = self._handles, []
        weight = 1.0 if previous is None else self._total_weight()
        for index, parcel in enumerate(self._parcels):
            if previous is not None:
                previous[index].wait(1.0)
            for part, message in parcel.split(parcel.message):
                self._propose_part(part, progress)
                fresh = self._slots[1][: len(part)]
                if previous is not None:
                    self._update(part, fresh, message, weight)
                else:
                    self._algorithm.restart(fresh, part.state)
                    part.unpack(fresh)
                message.copy_(part.params)
            self._handles.append(self._exchange.start(parcel.message, round_index))
        self._total_weight = total_weight
        if self._warm_start and round_index == 0:
            self.drain()
        self._finish_norm()

    def drain(self) -> None:
        """Wait for the messages under way and apply them."""
        if self._handles is None:
            return
        weight = self._total_weight()
        for parcel, handle in zip(self._parcels, self._handles, strict=True):
            for part, received in parcel.split(handle.wait(1.0)):
                self._update(part, part.params, received, weight)
        self._handles = None
        self._finish_norm()

    def pending(self) -> Tensor | None:
        """Wait for the messages under way and return the mean ``(P,)`` to be applied next."""
        if self._handles is None:
            return None
        for handle in self._handles:
            handle.wait(1.0)
        self._exchange.normalize(self._messages, self._total_weight())
        self.restore_pending(self._messages)
        return self._messages.clone()

    def restore_pending(self, received: Tensor | None) -> None:
        """Take back what :meth:`pending` has returned."""
        self._handles = None
        if received is None:
            return
        self._messages.copy_(received)
        self._total_weight = lambda: 1.0
        self._handles = [_Arrived(parcel.message) for parcel in self._parcels]


class _Arrived:
    """A handle whose wait is over."""

    def __init__(self, received: Tensor) -> None:
        self._received = received

    def wait(self, total_weight: float) -> Tensor:
        return self._received
