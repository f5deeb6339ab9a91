"""A part of the parameters that is exchanged as a whole: its memory, and its state."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_loco.algorithms import State
from lightning_loco.engine.buckets import Bucket, Part, group_chunks, slice_state
from lightning_loco.engine.settings import PENDING_BUCKETS, RoundSettings
from lightning_loco.parameters.flat import Chunk, FlatLayout


class Fragment:
    """The buckets of a fragment, tied to the parameters and to the memory of messages.

    A fragment whose pending rounds stay under way, or whose messages fit into the bucket, keeps a
    place for every message; others reuse two places, bucket after bucket.

    Args:
        layout: The trainable parameters, cut at the fragment's borders.
        stretches: The fragment's part of the flat vector.
        settings: Prepared.
        state: The algorithm's state; entries of shape ``(P,)`` are shared between fragments.
        residual: What compression remembers, likewise.
        bucket_elements: Longest bucket.
        status_elements: Room for the workers' statuses behind the first bucket: ``status_memory``.
        departure: Where the parameters that left are kept, ``(P,)``, shared between fragments.
            Default: memory of its own.

    Attributes:
        holds: Whether every message has a place of its own.
        buckets: In order, and their ``parts``; replaced by :meth:`tie`.
        tied_to: The layout's chunks that the buckets are tied to.
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
        bucket_elements: int,
        status_elements: int = 0,
        sent_params: Tensor | None = None,
    ) -> None:
        self.layout = layout
        self._stretches = stretches
        self._algorithm = settings.algorithm
        self._compression = settings.compression
        self._is_whole = settings.algorithm.granularity is None
        self._bucket_elements = bucket_elements
        self._status_elements = status_elements
        uncut = {} if self._is_whole else {k: v for k, v in state.items() if not self.is_cut(v)}
        self.has_uncut_state = bool(uncut)
        self.state = {**state, **copy.deepcopy(uncut)}
        self.residual = residual
        groups = self._groups()
        lengths = [sum(map(len, group)) for group in groups] or [0]
        self.holds = settings.is_overlapped or len(groups) <= PENDING_BUCKETS
        if not self.holds:
            lengths = [lengths[0], *[max(lengths)] * (PENDING_BUCKETS - 1)]
        self._places = [layout.empty(n + status_elements * (i == 0)) for i, n in enumerate(lengths)]
        self.status_memory = self._places[0][lengths[0] :]
        self._scratch: Tensor | None = None
        self.sent_params: Tensor | None = None
        if settings.is_overlapped:
            self._scratch = layout.empty(max((len(c) for g in groups for c in g), default=0))
            if settings.merge_policy is not None and settings.merge_policy.keeps_sent_params(
                layout.is_rounded
            ):
                self.sent_params = layout.new_flat() if sent_params is None else sent_params
        self.tie()

    def is_cut(self, value: object) -> bool:
        """Whether an entry of the state has a value for each parameter, and every part a slice."""
        return isinstance(value, Tensor) and value.shape == (self.layout.numel,)

    def _groups(self) -> list[list[Chunk]]:
        chunks = self.layout.chunks()
        own = [c for c in chunks if any(c.start in stretch for stretch in self._stretches)]
        return group_chunks(own, self._bucket_elements)

    def tie(self) -> None:
        """Tie all buckets to their memory; again when the parameters or the state have moved."""
        self.tied_to = self.layout.chunks()
        self.buckets = [self._bucket(index, chunks) for index, chunks in enumerate(self._groups())]
        self.parts = [part for bucket in self.buckets for part in bucket.parts]
        self.sums = self.layout.empty(len(self.parts))

    def _bucket(self, index: int, chunks: list[Chunk]) -> Bucket:
        place = self._places[index % len(self._places)]
        parts: list[Part] = []
        length = 0
        for chunk in chunks:
            parts.append(self._part(chunk, place[length : length + len(chunk)]))
            length += len(chunk)
        return Bucket(place[: length + (0 if index else self._status_elements)], parts)

    def _part(self, chunk: Chunk, message: Tensor) -> Part:
        numel, sent_params = self.layout.numel, self.sent_params
        state = self.state if self._is_whole else slice_state(self.state, numel, chunk)
        residual = slice_state(self.residual, numel, chunk)
        if sent_params is not None:
            sent_params = sent_params[chunk.start : chunk.stop]
        return Part(
            chunk,
            message,
            self._algorithm,
            state,
            sent_params,
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
        """One vector of what belongs to the buckets, in order, in the host's memory."""
        pairs = zip(self.buckets, received, strict=True)
        return torch.cat(
            [self.layout.empty(0).cpu(), *(r[: len(bucket)].cpu() for bucket, r in pairs)]
        )

    def split(self, flat: Tensor) -> list[Tensor]:
        """The share of each part of what :meth:`gather` has put together, in memory of its own."""
        shares = torch.split_with_sizes(flat, [len(part) for part in self.parts])
        return [share.to(self.layout.device, copy=True) for share in shares]

    def messages(self) -> list[Tensor]:
        """Where the messages are, bucket by bucket."""
        return [bucket.wire[: len(bucket)] for bucket in self.buckets]

    def load_pending(self, received: Tensor, messages: Tensor | None) -> list[Tensor]:
        """Cut what a pending round has brought into buckets.

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
        return {"residual": dict(self.residual), "sent_params": self.sent_params}

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
            if self.sent_params is not None:
                self.sent_params[part].copy_(saved["sent_params"][part])
        self.tie()
