"""The memory of one fragment: its buckets, and the state of the algorithm and the compression."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_loco.algorithms import State
from lightning_loco.engine.buckets import Bucket, BucketChunk, group_chunks, slice_state
from lightning_loco.engine.settings import PENDING_BUCKETS, RoundSettings
from lightning_loco.model.flat import Chunk, FlatLayout


class FragmentMemory:
    """The buckets of a fragment and the state of the algorithm and of the compression.

    If rounds are overlapped, or all messages fit ``bucket_bytes``, every bucket has memory of its
    own. Otherwise all buckets use the memory of two in turn.

    Args:
        layout: The trainable parameters, cut where fragments begin.
        slices: The fragment's slices of the flat vector.
        settings: Prepared.
        state: The algorithm's state; fragments share its entries of shape ``(P,)``.
        residual: The compression's state, shared likewise.
        bucket_elements: Longest bucket.
        status_elements: Elements of the table of statuses behind the first bucket.
        sent_params: Memory ``(P,)`` for parameters as they were sent, shared between fragments.
            Default: new memory.

    Attributes:
        holds_all: Whether every bucket has its own memory.
        buckets: In order; :meth:`build` replaces them.
        chunks: Of all buckets, in order.
        sums: Memory for one number per chunk.
        sent_params: The parameters as they were sent or written last, if they are kept.
        has_uncut_state: Whether chunks have copies of some entries of the state.
    """

    def __init__(
        self,
        layout: FlatLayout,
        slices: Sequence[range],
        settings: RoundSettings,
        state: State,
        residual: State,
        bucket_elements: int,
        status_elements: int = 0,
        sent_params: Tensor | None = None,
    ) -> None:
        self.layout = layout
        self._slices = slices
        self._algorithm = settings.algorithm
        self._compression = settings.compression
        self._is_whole = settings.algorithm.granularity is None
        self._is_partial = settings.is_partial
        self._bucket_elements = bucket_elements
        self._status_elements = status_elements
        # Every fragment counts its own rounds; vectors (P,) are shared, each uses its own part.
        uncut = {} if self._is_whole else {k: v for k, v in state.items() if not self.is_cut(v)}
        self.has_uncut_state = bool(uncut)
        self.state = {**state, **copy.deepcopy(uncut)}
        self.residual = residual
        self._summed = settings.algorithm.summed & state.keys()
        groups = self._groups()
        lengths = [sum(map(self._message_length, group)) for group in groups]
        self.holds_all = settings.is_overlapped or len(groups) <= PENDING_BUCKETS
        if not self.holds_all:
            lengths = [lengths[0], *[max(lengths)] * (PENDING_BUCKETS - 1)]
        self._wires = [layout.empty(n + status_elements * (i == 0)) for i, n in enumerate(lengths)]
        reads = settings.algorithm.reads
        # Gossip leaves a message as it is; a mean takes its memory for the result.
        self._own_messages = self._wires if "message" in reads else []
        if self._own_messages and settings.algorithm.exchange == "mean":
            self._own_messages = [layout.empty(length) for length in lengths]
        self._local: Tensor | None = None
        self._scratch: Tensor | None = None
        self.sent_params: Tensor | None = None
        longest = max((len(chunk) for group in groups for chunk in group), default=0)
        if settings.is_overlapped or self._is_partial:
            self._scratch = layout.empty(longest)
        if "local" in reads:
            self._local = layout.empty(longest)
        if settings.is_overlapped:
            policy = settings.merge_policy
            if policy is not None and policy.keeps_sent_params(layout.is_rounded):
                self.sent_params = layout.new_flat() if sent_params is None else sent_params
        self.build()

    def is_cut(self, value: object) -> bool:
        """Whether an entry of the state has one value per parameter, so that chunks get slices."""
        return isinstance(value, Tensor) and value.shape == (self.layout.numel,)

    def _groups(self) -> list[list[Chunk]]:
        chunks = self.layout.chunks()
        own = [c for c in chunks if any(c.start in part for part in self._slices)]
        # A rank that owns nothing of the fragment still sends its status, in an empty bucket.
        return group_chunks(own, self._message_length, self._bucket_elements) or [[]]

    def _message_length(self, chunk: Chunk) -> int:
        return self._algorithm.message_length(len(chunk))

    def build(self) -> None:
        """Make all views; again when the memory of parameters or state has moved."""
        self._built_for = self.layout.chunks()
        self.buckets = [self._bucket(index, group) for index, group in enumerate(self._groups())]
        self.chunks = [chunk for bucket in self.buckets for chunk in bucket.chunks]
        self.sums = self.layout.empty(len(self.chunks))

    def refresh(self) -> None:
        """Make all views again if the memory of parameters has moved."""
        if self.layout.chunks() is not self._built_for:
            self.build()

    def _bucket(self, index: int, group: list[Chunk]) -> Bucket:
        wire, own_message = self._wires[index % len(self._wires)], None
        if self._own_messages:
            own_message = self._own_messages[index % len(self._wires)]
        chunks: list[BucketChunk] = []
        length = 0
        for params in group:
            part = slice(length, length + self._message_length(params))
            own_part = None if own_message is None else own_message[part]
            chunks.append(self._chunk(params, wire[part], own_part))
            length = part.stop
        if own_message is not None:
            own_message = own_message[:length]
        sent = wire[: length + (0 if index else self._status_elements)]
        return Bucket(sent, chunks, own_message)

    def _chunk(self, params: Chunk, message: Tensor, own_message: Tensor | None) -> BucketChunk:
        numel, sent_params = self.layout.numel, self.sent_params
        state = self.state if self._is_whole else slice_state(self.state, numel, params)
        residual = slice_state(self.residual, numel, params)
        if sent_params is not None:
            sent_params = sent_params[params.start : params.stop]
        return BucketChunk(
            params,
            message,
            state,
            residual,
            sent_params,
            own_message,
            self._local,
            self._scratch,
            self._round_start,
        )

    def _round_start(self, chunk: BucketChunk) -> Tensor | None:
        start = self._algorithm.round_start(chunk.state)
        if start is None or self._compression is None:
            return start
        params: Tensor = self._compression.local_params(start, chunk.residual)
        return params

    def take_back_state(self) -> None:
        """Update the state from the first chunk's copies of entries that are not sliced.

        RuntimeError if a round has made or dropped an entry of the state.
        """
        if self._is_whole or not self.chunks:
            return
        seen = self.chunks[0].state
        if seen.keys() != self.state.keys():
            new = ", ".join(sorted(seen.keys() ^ self.state.keys()))
            raise RuntimeError(
                f"{type(self._algorithm).__name__} has made or dropped the state entry {new} in a "
                "round. Make all entries in init, or set granularity to None."
            )
        if self.has_uncut_state:
            self.state.update({k: v for k, v in seen.items() if not self.is_cut(self.state[k])})

    @property
    def totals(self) -> dict[str, float]:
        """Entries of the state that are sums over all slices, by name."""
        return {name: self.state[name] for name in sorted(self._summed)}

    def add_up(self) -> None:
        """Add up what the chunks have set in a round; only once after it."""
        values = [chunk.state[name] for name in sorted(self._summed) for chunk in self.chunks]
        if not self._summed:
            return
        parts = torch.stack(values).tolist() if values else []
        count = len(self.chunks)
        self.set_totals([sum(parts[i * count :][:count]) for i in range(len(self._summed))])

    def set_totals(self, totals: Sequence[float]) -> None:
        """Set the values of :attr:`totals`, in this order, for all chunks."""
        found = dict(zip(sorted(self._summed), totals, strict=True))
        for state in (self.state, *(chunk.state for chunk in self.chunks)):
            state.update(found)

    def gather(self, wires: Sequence[Tensor]) -> Tensor:
        """Concatenate the messages in ``wires``, one per bucket, in the host's memory."""
        pairs = zip(self.buckets, wires, strict=True)
        return torch.cat(
            [self.layout.empty(0).cpu(), *(w[: len(bucket)].cpu() for bucket, w in pairs)]
        )

    def scatter(self, flat: Tensor) -> list[Tensor]:
        """Copy a vector of :meth:`gather` into new memory, one tensor per chunk."""
        parts = torch.split_with_sizes(flat, [len(chunk) for chunk in self.chunks])
        return [part.to(self.layout.device, copy=True) for part in parts]

    @property
    def _kept_messages(self) -> list[Tensor]:
        """This worker's messages, one per bucket; empty if they are not kept."""
        return [b.own_message for b in self.buckets if b.own_message is not None]

    def gather_own_messages(self) -> Tensor | None:
        """Concatenate this worker's messages as :meth:`gather`; None if they are not kept."""
        kept = self._kept_messages
        return self.gather(kept) if kept else None

    def load_pending(self, received: Tensor, messages: Tensor | None) -> list[Tensor]:
        """Cut the result of a pending round, from :meth:`gather`, into buckets.

        ``messages`` are this worker's, from :meth:`gather_own_messages`.
        """
        lengths = [len(bucket) for bucket in self.buckets]
        parts = torch.split_with_sizes(received, lengths)
        if messages is None:
            memory = [bucket.message for bucket in self.buckets]
        else:
            kept = self._kept_messages
            torch._foreach_copy_(kept, list(torch.split_with_sizes(messages, lengths)))
            memory = [torch.empty_like(part) for part in kept]
        torch._foreach_copy_(memory, list(parts))
        return memory

    def state_dict(self) -> dict[str, Any]:
        """The compression's state and the parameters as they were sent."""
        return {"residual": dict(self.residual), "sent_params": self.sent_params}

    def load_state_dict(self, state: State, saved: dict[str, Any]) -> None:
        """Load a state of the algorithm, and a result of :meth:`state_dict`."""
        for own, values in ((self.state, state), (self.residual, saved["residual"])):
            for key in own.keys() - values.keys():
                del own[key]
            for key, value in values.items():
                current = own.get(key)
                if isinstance(current, Tensor) and current.shape == value.shape:
                    current.copy_(value)
                else:
                    own[key] = value
        for part in self._slices:
            elements = slice(part.start, part.stop)
            if self.sent_params is not None:
                self.sent_params[elements].copy_(saved["sent_params"][elements])
        self.build()
