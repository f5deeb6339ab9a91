"""The connections of a reader: one to each peer, made when it is first wanted."""

from __future__ import annotations

import zmq

from lightning_loco.peers.curve_link import CurveLink
from lightning_loco.peers.directory import Directory, Peer
from lightning_loco.peers.keys import Keys
from lightning_loco.peers.link import Link, LinkBroken
from lightning_loco.peers.protocol import MAX_CHUNK_BYTES
from lightning_loco.peers.tcp_link import TcpLink


class Links:
    """At most one link to each peer, made when it is first wanted; for one thread.

    Args:
        directory: Where the peers are.
        keys: The job's keys, if it has any.
        chunk_bytes: The longest chunk that is asked for.
    """

    def __init__(
        self, directory: Directory, keys: Keys | None, chunk_bytes: int = MAX_CHUNK_BYTES
    ) -> None:
        self._directory = directory
        self._chunk_bytes = chunk_bytes
        self._keys = keys
        self._zmq = zmq.Context() if keys is not None else None
        self._links: dict[str, Link] = {}

    def get(self, name: str) -> tuple[Link | None, bool]:
        """The connection to a peer: the one from before if it still stands, else a new one.

        Returns:
            The link, or None while nobody knows where the peer is; and whether it is a new one.
        """
        link = self._links.get(name)
        if link is not None:
            try:
                link.check()
                return link, False
            except LinkBroken:
                self.drop(name)
        peer = self._directory.find(name)
        if peer is None:
            return None, True
        link = self._links[name] = self._make(peer)
        return link, True

    def _make(self, peer: Peer) -> Link:
        if self._zmq is None or self._keys is None:
            return TcpLink(peer, self._chunk_bytes)
        return CurveLink(self._zmq, peer, self._keys, self._chunk_bytes)

    def __len__(self) -> int:
        return len(self._links)

    def look(self) -> None:
        """Drop the links that broke, or over which comes what nobody has asked for."""
        for name, link in list(self._links.items()):
            try:
                link.check()
            except LinkBroken:
                self.drop(name)

    def drop(self, name: str) -> None:
        """Close the connection to a peer, and look anew where it is the next time."""
        link = self._links.pop(name, None)
        if link is not None:
            link.close()
        self._directory.forget(name)

    def close(self) -> None:
        """Close all connections; a second call does nothing."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        if self._zmq is not None:
            self._zmq.term()
