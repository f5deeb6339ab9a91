"""A part of the parameters that is exchanged as a whole: its memory, and its state."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_loco.algorithms import State
from lightning_loco.engine.buckets import Parcel, Part, group_chunks, slice_state
from lightning_loco.engine.settings import PARCELS_UNDER_WAY, RoundSettings
from lightning_loco.parameters.flat import Chunk, FlatLayout


class Lane:
    """The parcels of a lane, tied to the parameters and to the memory of messages.

    A lane whose flights stay under way, or whose messages fit into the bucket, keeps a place for
    every message; others reuse two places, parcel after parcel.

    Args:
        layout: The trainable parameters, cut at the lane's borders.
        stretches: The lane's part of the flat vector.
        settings: Prepared.
        state: The algorithm's state; entries of shape ``(P,)`` are shared between lanes.
        residual: What compression remembers, likewise.
        parcel_elements: Longest parcel.
        rows_elements: Room for the workers' rows behind the first parcel: ``rows_memory``.
        departure: Where the parameters that left are kept, ``(P,)``, shared between lanes. Default:
            memory of its own.

    Attributes:
        holds: Whether every message has a place of its own.
        parcels: In order, and their ``parts``; replaced by :meth:`tie`.
        tied_to: The layout's chunks that the parcels are tied to.
        departure: The parameters that left, or were written last, if they are kept; else None.
        has_uncut_state: Whether slices have copies of some entries of the state.
    """

    def __init__(
        self,
        layout: FlatLayout,
        stretches: Sequence[range],
        settings: RoundSettings,
        state: State,
        residual: State,
        parcel_elements: int,
        rows_elements: int = 0,
        departure: Tensor | None = None,
    ) -> None:
        self.layout = layout
        self._stretches = stretches
        self._algorithm = settings.algorithm
        self._compression = settings.compression
        self._is_whole = settings.algorithm.granularity is None
        self._parcel_elements = parcel_elements
        self._rows_elements = rows_elements
        uncut = {} if self._is_whole else {k: v for k, v in state.items() if not self.is_cut(v)}
        self.has_uncut_state = bool(uncut)
        self.state = {**state, **copy.deepcopy(uncut)}
        self.residual = residual
        groups = self._groups()
        lengths = [sum(map(len, group)) for group in groups] or [0]
        self.holds = settings.stays or len(groups) <= PARCELS_UNDER_WAY
        if not self.holds:
            lengths = [lengths[0], *[max(lengths)] * (PARCELS_UNDER_WAY - 1)]
        self._places = [layout.empty(n + rows_elements * (i == 0)) for i, n in enumerate(lengths)]
        self.rows_memory = self._places[0][lengths[0] :]
        self._scratch: Tensor | None = None
        self.departure: Tensor | None = None
        if settings.stays:
            self._scratch = layout.empty(max((len(c) for g in groups for c in g), default=0))
            if settings.landing is not None and settings.landing.keeps_what_left(layout.is_rounded):
                self.departure = layout.new_flat() if departure is None else departure
        self.tie()

    def is_cut(self, value: object) -> bool:
        """Whether an entry of the state has a value for each parameter, and every part a slice."""
        return isinstance(value, Tensor) and value.shape == (self.layout.numel,)

    def _groups(self) -> list[list[Chunk]]:
        chunks = self.layout.chunks()
        own = [c for c in chunks if any(c.start in stretch for stretch in self._stretches)]
        return group_chunks(own, self._parcel_elements)

    def tie(self) -> None:
        """Tie all parcels to their memory; again when the parameters or the state have moved."""
        self.tied_to = self.layout.chunks()
        self.parcels = [self._parcel(index, chunks) for index, chunks in enumerate(self._groups())]
        self.parts = [part for parcel in self.parcels for part in parcel.parts]
        self.sums = self.layout.empty(len(self.parts))

    def _parcel(self, index: int, chunks: list[Chunk]) -> Parcel:
        place = self._places[index % len(self._places)]
        parts: list[Part] = []
        length = 0
        for chunk in chunks:
            parts.append(self._part(chunk, place[length : length + len(chunk)]))
            length += len(chunk)
        return Parcel(place[: length + (0 if index else self._rows_elements)], parts)

    def _part(self, chunk: Chunk, message: Tensor) -> Part:
        numel, departure = self.layout.numel, self.departure
        state = self.state if self._is_whole else slice_state(self.state, numel, chunk)
        residual = slice_state(self.residual, numel, chunk)
        if departure is not None:
            departure = departure[chunk.start : chunk.stop]
        return Part(
            chunk,
            message,
            self._algorithm,
            state,
            departure,
            self._scratch,
            self._compression,
            residual,
        )

    def take_back_state(self) -> None:
        """Learn from the first part what has become of entries that are not cut."""
        if self._is_whole:
            return
        seen = self.parts[0].state
        if seen.keys() != self.state.keys():
            new = ", ".join(sorted(seen.keys() ^ self.state.keys()))
            raise RuntimeError(
                f"{type(self._algorithm).__name__} has made or dropped the state entry {new} in a "
                "round. Make all entries in init, or set granularity to None."
            )
        self.state.update({k: v for k, v in seen.items() if not self.is_cut(self.state[k])})

    def gather(self, received: Sequence[Tensor]) -> Tensor:
        """One vector of what belongs to the parcels, in order, in the host's memory."""
        pairs = zip(self.parcels, received, strict=True)
        return torch.cat(
            [self.layout.empty(0).cpu(), *(r[: len(parcel)].cpu() for parcel, r in pairs)]
        )

    def split(self, flat: Tensor) -> list[Tensor]:
        """The share of each part of what :meth:`gather` has put together, in memory of its own."""
        shares = torch.split_with_sizes(flat, [len(part) for part in self.parts])
        return [share.to(self.layout.device, copy=True) for share in shares]

    def messages(self) -> list[Tensor]:
        """Where the messages are, parcel by parcel."""
        return [parcel.wire[: len(parcel)] for parcel in self.parcels]

    def take_flight(self, received: Tensor, messages: Tensor | None) -> list[Tensor]:
        """Cut what a flight has brought into parcels.

        Args:
            received: As :meth:`gather` has put it together.
            messages: Those that left, for algorithms that need them; without, what was received
                takes their places.
        """
        places = self.messages()
        lengths = [place.numel() for place in places]
        if messages is None:
            torch._foreach_copy_(places, list(torch.split_with_sizes(received, lengths)))
            return places
        torch._foreach_copy_(places, list(torch.split_with_sizes(messages, lengths)))
        pairs = zip(places, torch.split_with_sizes(received, lengths), strict=True)
        return [torch.empty_like(place).copy_(share) for place, share in pairs]

    def state_dict(self) -> dict[str, Any]:
        """What compression remembers, and the parameters that left last."""
        return {"residual": dict(self.residual), "departure": self.departure}

    def load_state_dict(self, state: State, saved: dict[str, Any]) -> None:
        """Take over a state of the algorithm and what :meth:`state_dict` has given."""
        for own, values in ((self.state, state), (self.residual, saved["residual"])):
            for key in own.keys() - values.keys():
                del own[key]
            for key, value in values.items():
                current = own.get(key)
                if isinstance(current, Tensor) and current.shape == value.shape:
                    current.copy_(value)
                else:
                    own[key] = value
        for stretch in self._stretches:
            part = slice(stretch.start, stretch.stop)
            if self.departure is not None:
                self.departure[part].copy_(saved["departure"][part])
        self.tie()
