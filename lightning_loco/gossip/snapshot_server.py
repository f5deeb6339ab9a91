"""Serves the latest snapshot of this worker's parameters to its peers."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Iterator

from lightning_loco._util.clock import REAL_CLOCK, Clock
from lightning_loco.gossip.protocol import (
    NOTHING_PUBLISHED,
    OTHER_MODEL,
    PARAMETERS,
    ModelId,
    ReplyHeader,
    WireFormat,
    pack_reply,
    parse_request,
)
from lightning_loco.gossip.snapshots import Snapshot, Snapshots
from lightning_loco.transport import JobCertificate, MalformedMessage, Request, Server

_SPARE_CONNECTIONS = 32
_FILES_PER_CONNECTION = 8


class SnapshotServer(Server):
    """A server that answers requests for parameters with the latest snapshot.

    Requests for another model or another encoding are refused. The server keeps at most two
    connections for each peer and 32 more, and at most an eighth of the files that this process may
    open. A peer has ``timeout_s`` seconds to read a reply. ``bytes_sent`` counts bytes of
    parameters. Other arguments and errors as in :class:`~lightning_loco.transport.Server`.
    """

    def __init__(
        self,
        wire_format: WireFormat,
        snapshots: Snapshots,
        *,
        num_peers: int,
        timeout_s: float,
        host: str = "127.0.0.1",
        port: int = 0,
        certificate: JobCertificate | None = None,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        self.bytes_sent = 0
        self._bytes_lock = threading.Lock()
        self._model_id = wire_format.model_id
        self._snapshots = snapshots
        super().__init__(
            self._send_snapshot,
            host=host,
            port=port,
            certificate=certificate,
            max_connections=max_connections(num_peers),
            timeout_s=timeout_s,
            clock=clock,
        )

    def _send_snapshot(self, request: Request) -> None:
        content = request.header, request.body_bytes
        with answering(*content, self._model_id, self._snapshots) as (header, snapshot):
            if snapshot is None:
                request.reply(header)
                return
            # Counted before it is sent, so that a peer which has it finds it counted.
            with self._bytes_lock:
                self.bytes_sent += len(snapshot.data)
            request.reply(header, snapshot.data)


@contextlib.contextmanager
def answering(
    header: bytes, body_bytes: int, model_id: ModelId, snapshots: Snapshots
) -> Iterator[tuple[bytes, Snapshot | None]]:
    """Yield the header of the reply to a request, and the snapshot that follows it or None.

    The snapshot is not overwritten within the context, which must end when the peer is too slow:
    the next snapshots need the memory. MalformedMessage if the request is not valid.
    """
    requested = parse_request(header)
    if body_bytes:
        raise MalformedMessage("a request for parameters with a body")
    if requested != model_id:
        yield pack_reply(ReplyHeader(OTHER_MODEL, model_id)), None
        return
    with snapshots.reading() as snapshot:
        if snapshot is None:
            yield pack_reply(ReplyHeader(NOTHING_PUBLISHED, model_id)), None
        else:
            yield pack_reply(ReplyHeader(PARAMETERS, model_id, snapshot.tag)), snapshot


def max_connections(num_peers: int) -> int:
    """Return how many connections a server keeps, so that enough open files are left."""
    wanted = 2 * num_peers + _SPARE_CONNECTIONS
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, files // _FILES_PER_CONNECTION))
