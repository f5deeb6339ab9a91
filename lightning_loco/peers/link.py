"""What the reader needs of a connection to a peer, however it is made."""

from __future__ import annotations

from typing import Protocol

from lightning_loco.peers.directory import Peer
from lightning_loco.peers.protocol import Reply
from lightning_loco.peers.transfer import Transfer


class LinkBroken(ConnectionError):
    """The peer refused the connection, closed it, or sends what makes it useless."""


class Link(Protocol):
    """A connection that is made once: when it breaks, a new link is needed."""

    @property
    def peer(self) -> Peer:
        """Whom it leads to."""
        ...

    def check(self) -> None:
        """See whether the connection still stands, without waiting, while nothing is asked for.

        Raises:
            LinkBroken: If it does not, or the peer sends what nobody has asked for.
        """
        ...

    def wait(self, timeout_s: float) -> None:
        """Return when something has come, or after a while.

        Raises:
            LinkBroken: If the link broke, and nothing has come, or what comes does not end.
        """
        ...

    def send(self, request: bytes) -> None:
        """Send a request.

        Raises:
            LinkBroken: If there is no connection that would take it.
        """
        ...

    def receive(self, transfer: Transfer) -> Reply | None:
        """Take one reply, and put its chunk into its place.

        Args:
            transfer: Says which replies are expected; is not told of the reply.

        Returns:
            The reply, or None if none has come.

        Raises:
            MalformedMessage: If what has come is none, or not expected; it is dropped.
            LinkBroken: If the connection is of no use any more.
        """
        ...

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        ...
