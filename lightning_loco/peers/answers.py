"""What a request is answered with, however it has come."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.peers.model import Model
from lightning_loco.peers.protocol import (
    DATA,
    EMPTY,
    GONE,
    OTHER_MODEL,
    MalformedMessage,
    Reply,
    Request,
    parse_request,
)
from lightning_loco.peers.publications import Publications

log = logging.getLogger(__name__)

MOST_REPLIES_UNDER_WAY = 16
"""Replies that wait for one client. Twice what our own readers ask for."""
LONGEST_REQUEST_BYTES = 1024
"""The longest frame that is taken from a client at all."""

_MOST_LOG_LINES = 20
_NO_TAG = Tag(0.0, 0.0)


class Answers:
    """Reads requests and finds what belongs into their replies; for one thread.

    Args:
        model: What is served; requests for another model, or another compression, are
            refused.
        publications: Where the parameters are.

    Attributes:
        bytes_sent: Bytes of parameters handed out.
        malformed: Messages that were no requests.
    """

    def __init__(self, model: Model, publications: Publications) -> None:
        self.bytes_sent = 0
        self.malformed = 0
        self._model = model
        self._wire_format = model.wire_format
        self._total_bytes = model.total_bytes
        self._publications = publications
        self._warned: set[str] = set()

    def read(self, first: bytes, num_frames: int, address: str, port: int) -> Request | None:
        """Read a message.

        Args:
            first: Its first frame.
            num_frames: How many it has.
            address: Where it has come from.
            port: Where it has come to.

        Returns:
            The request; None if it is none, which is said in the log once for each address.
        """
        try:
            if num_frames > 1:
                raise MalformedMessage("it has more than one frame")
            request = parse_request(first)
            beyond = request.offset + request.length > self._total_bytes
            if beyond and self._is_ours(request):
                raise MalformedMessage("it asks for bytes beyond the end of the model")
        except MalformedMessage as error:
            self.malformed += 1
            self._warn(address, port, error)
            return None
        return request

    def _is_ours(self, request: Request) -> bool:
        ours = (self._model.checksum, self._wire_format)
        return (request.checksum, request.wire_format) == ours

    def _warn(self, address: str, port: int, error: MalformedMessage) -> None:
        if address in self._warned or len(self._warned) >= _MOST_LOG_LINES:
            return
        self._warned.add(address)
        log.warning(
            "Dropped a message from %s on port %d: %s. Further ones from there are dropped "
            "without a line here.",
            address,
            port,
            error,
        )

    def reply(self, request: Request, client: bytes) -> Reply:
        """The reply to a request; if it is data, :meth:`chunk` belongs to it.

        Args:
            request: From :meth:`read`.
            client: Who asks; it keeps the publication that it has begun with.
        """
        if not self._is_ours(request):
            return self._reply(OTHER_MODEL, request)
        if self._publications.latest == 0:
            return self._reply(EMPTY, request)
        with self._publications.reading(request.publication, client) as publication:
            if publication is None:
                return self._reply(GONE, request)
            self.bytes_sent += request.length
            return self._reply(DATA, request)._replace(
                publication=publication.number, length=request.length, tag=publication.tag
            )

    @contextmanager
    def chunk(self, reply: Reply, client: bytes) -> Iterator[memoryview | None]:
        """The bytes of a reply, which stay as they are within the block.

        Args:
            reply: One with data, from :meth:`reply`.
            client: Who has asked.

        Yields:
            The chunk; None if its publication is gone meanwhile.
        """
        with self._publications.reading(reply.publication, client) as publication:
            end = reply.offset + reply.length
            yield None if publication is None else publication.data[reply.offset : end]

    def has_sent(self, reply: Reply, client: bytes) -> None:
        """All of a chunk was sent; who has the last one no longer keeps the publication."""
        if reply.offset + reply.length == self._total_bytes:
            with self._publications.reading(reply.publication, client) as publication:
                if publication is not None:
                    self._publications.release(publication, client)

    def _reply(self, kind: int, request: Request) -> Reply:
        return Reply(
            kind=kind,
            checksum=self._model.checksum,
            wire_format=self._wire_format,
            request_id=request.request_id,
            publication=request.publication,
            offset=request.offset,
            length=0,
            total_bytes=self._total_bytes,
            tag=_NO_TAG,
        )
