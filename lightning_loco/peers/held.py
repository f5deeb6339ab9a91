"""What a connection has brought and ZeroMQ has not handed over: messages that do not end.

A message is handed over when all of its frames are there. ZeroMQ bounds the length of a frame and
not their number, so that an endless message would fill the memory unseen. But the operating system
counts the bytes of every connection (on Linux; elsewhere nothing is limited here).
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from contextlib import suppress

if sys.platform != "win32":
    import fcntl
    import termios

_CAN_COUNT = sys.platform == "linux"
_TCP_INFO_BYTES = 136
_BYTES_RECEIVED_AT = 128  # tcpi_bytes_received of struct tcp_info, since Linux 4.1
_SHORT = 255
_CURVE_BYTES = 33  # of every encrypted frame: command name, nonce, authentication and flags


def wire_bytes(length: int) -> int:
    """What a frame of so many bytes takes on a connection, encrypted.

    Example:
        >>> wire_bytes(48), wire_bytes(300)
        (83, 342)
    """
    length += _CURVE_BYTES
    return length + (2 if length <= _SHORT else 9)


class Held:
    """Count what one connection with keys holds back, and close it if that is too much.

    Args:
        descriptor: That of the connection, as the events of its socket tell it. A duplicate is
            kept, since the number may soon mean another file.

    Raises:
        OSError: If it is no connection any more, or there are too many open files.
    """

    def __init__(self, descriptor: int) -> None:
        self._taken = 0
        duplicate = os.dup(descriptor)
        try:
            self._connection = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)
            raise

    @property
    def own_port(self) -> int:
        """The port of this side; 0 if it is no connection over a network."""
        name = self._connection.getsockname()
        return int(name[1]) if isinstance(name, tuple) and len(name) > 1 else 0

    def take(self, length: int) -> None:
        """A frame was handed over."""
        self._taken += wire_bytes(length)

    @property
    def received_bytes(self) -> int:
        """What has come and was not handed over, read by ZeroMQ or not; cheap."""
        if not _CAN_COUNT:
            return 0
        try:
            info = self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except OSError:
            return 0
        if len(info) < _TCP_INFO_BYTES:
            return 0
        (received,) = struct.unpack_from("Q", info, _BYTES_RECEIVED_AT)
        return int(received) - self._taken

    @property
    def bytes(self) -> int:
        """What ZeroMQ has read and not handed over."""
        received = self.received_bytes
        if received <= 0:
            return 0
        unread = fcntl.ioctl(self._connection, termios.FIONREAD, bytes(4))
        return received - int(struct.unpack("i", unread)[0])

    def exceeds(self, most: int) -> bool:
        """Whether :attr:`bytes` are more than so many; cheap if not even that many have come."""
        return self.received_bytes > most and self.bytes > most

    def cut(self) -> None:
        """Close the connection for both sides; ZeroMQ then drops what it holds of it."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self.close()

    def close(self) -> None:
        """Let go of the connection, which belongs to ZeroMQ."""
        self._connection.close()
