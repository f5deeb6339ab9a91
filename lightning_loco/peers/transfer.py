"""Reading one publication in chunks, several of which are asked for at the same time."""

from __future__ import annotations

import secrets

import numpy as np
import torch

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.peers.model import Model
from lightning_loco.peers.nearness import Nearness
from lightning_loco.peers.protocol import (
    DATA,
    LATEST,
    MAX_CHUNK_BYTES,
    OTHER_MODEL,
    MalformedMessage,
    Reply,
    Request,
    pack_request,
    parse_reply,
)

CHUNK_BYTES = 3 * 2**18  # benchmarks/fetch.py is fastest so, among 256 KiB to 4 MiB
WINDOW = 8
"""Most chunks that are asked for at the same time, and how many are by default."""


class Assembly:
    """The parameters of one peer, put together from chunks in memory that is made once.

    With a codec each chunk is decoded when it has come.

    Args:
        model: What is received, and how it is written.
        nearness: Measures how far away they are. Default: only whether they are finite.
        pinned: Whether a GPU copies from :attr:`params`.

    Attributes:
        params: The received parameters ``(P,)``.
        nearness: Of what has come since the last :meth:`clear`.
    """

    def __init__(
        self, model: Model, nearness: Nearness | None = None, *, pinned: bool = False
    ) -> None:
        is_plain = model.codec is None
        self._model = model
        self._wire = torch.zeros(
            model.total_bytes, dtype=torch.uint8, pin_memory=pinned and is_plain
        )
        self._bytes = self._wire.numpy()
        if is_plain:
            self.params = self._wire.view(model.dtype)
        else:
            self.params = torch.empty(model.numel, dtype=model.dtype, pin_memory=pinned)
        self.nearness = nearness or Nearness(model)

    def clear(self) -> None:
        """Forget what was received."""
        self.nearness.clear()

    def place(self, offset: int, chunk: memoryview) -> None:
        """Copy a chunk from the wire; NumPy lets other threads of Python run meanwhile."""
        np.copyto(self._bytes[offset : offset + len(chunk)], np.frombuffer(chunk, np.uint8))

    def room(self, offset: int, length: int) -> memoryview:
        """Where a chunk belongs, to be received there."""
        return self._bytes.data[offset : offset + length]

    def convert(self, offset: int, length: int) -> None:
        """Decode a chunk that has just come, and measure it while the cache has it."""
        part = self._model.elements(offset, length)
        values = self._model.read(self._wire, part.start, self.params[part])
        self.nearness.add(part.start, values)


class Transfer:
    """Which chunks of a publication are there, asked for, or still to ask for.

    Only replies to a request that is under way are accepted: each has a random number, and its
    offset and length must come back with it. So replays and strays change nothing.

    Args:
        model: What is read; the peer must have the same.
        assembly: Where the chunks go.
        chunk_bytes: Length of a chunk, a multiple of 8 up to 4 MiB; as many whole rows as it has
            room for are asked for, at least one. The last chunk may be shorter.
        window: Chunks that are asked for at the same time, 1 to 8.

    Attributes:
        chunk_bytes: The longest chunk that is asked for.
        tag: Clock and loss of the publication.
        received_bytes: How much is there.

    Raises:
        ValueError: If ``chunk_bytes`` or ``window`` is out of range.
    """

    def __init__(self, model: Model, assembly: Assembly, chunk_bytes: int, window: int) -> None:
        if not 0 < chunk_bytes <= MAX_CHUNK_BYTES or chunk_bytes % 8:
            raise ValueError(
                f"chunk_bytes must be a multiple of 8 up to {MAX_CHUNK_BYTES}, got {chunk_bytes}."
            )
        if not 1 <= window <= WINDOW:
            raise ValueError(f"window must be 1 to {WINDOW}, got {window}.")
        self._model = model
        self._wire_format = model.wire_format
        self._total_bytes = model.total_bytes
        self._assembly = assembly
        self.chunk_bytes = max(chunk_bytes // model.row_bytes, 1) * model.row_bytes
        self._window = window
        self.restart()

    def restart(self) -> None:
        """Begin anew with the latest publication."""
        self.tag = Tag(0.0, 0.0)
        self.received_bytes = 0
        self._publication = LATEST
        self._asked_bytes = 0
        self._under_way: dict[int, tuple[int, int]] = {}
        self._assembly.clear()

    @property
    def is_done(self) -> bool:
        """Whether everything is there."""
        return self.received_bytes == self._total_bytes

    def requests(self) -> list[bytes]:
        """The requests to send now: several at a time, which wakes the peer less often.

        The first goes alone, since its reply names the publication.
        """
        window = 1 if self._publication == LATEST else self._window
        if len(self._under_way) > window // 2:
            return []
        requests = []
        while len(self._under_way) < window and self._asked_bytes < self._total_bytes:
            offset = self._asked_bytes
            length = min(self.chunk_bytes, self._total_bytes - offset)
            number = secrets.randbits(64)
            self._under_way[number] = (offset, length)
            self._asked_bytes += length
            request = Request(
                self._model.checksum, self._wire_format, number, self._publication, offset, length
            )
            requests.append(pack_request(request))
        return requests

    def expects(self, reply: Reply) -> bool:
        """Whether this is the reply to a request that is under way."""
        asked = self._under_way.get(reply.request_id)
        if asked is None or asked[0] != reply.offset:
            return False
        if reply.kind == OTHER_MODEL:
            return True
        if reply.checksum != self._model.checksum or reply.wire_format != self._wire_format:
            return False
        if reply.kind != DATA:
            return reply.publication == self._publication
        return (
            reply.length == asked[1]
            and reply.total_bytes == self._total_bytes
            and reply.publication != LATEST
            and self._publication in (LATEST, reply.publication)
        )

    def read(self, header: bytes, has_more: bool) -> Reply:
        """Read the first frame of a reply.

        Args:
            header: The frame.
            has_more: Whether another one comes after it.

        Raises:
            MalformedMessage: If it is none, or not expected.
        """
        reply = parse_reply(header)
        if not self.expects(reply):
            raise MalformedMessage("it answers none of the requests under way")
        if has_more != (reply.kind == DATA):
            raise MalformedMessage("it has another number of frames than it says")
        return reply

    def place(self, reply: Reply, chunk: memoryview) -> None:
        """Put the chunk of an expected reply into its place."""
        self._assembly.place(reply.offset, chunk)

    def room(self, reply: Reply) -> memoryview:
        """Where the chunk of an expected reply belongs, instead of :meth:`place`."""
        return self._assembly.room(reply.offset, reply.length)

    def accept(self, reply: Reply) -> None:
        """The chunk of an expected reply is in its place."""
        del self._under_way[reply.request_id]
        self._publication = reply.publication
        self.tag = reply.tag
        self.received_bytes += reply.length
        self._assembly.convert(reply.offset, reply.length)
