"""The network interfaces of this machine and their addresses, as the system lists them."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

_IS_UP = 1


@dataclass(frozen=True)
class Interface:
    """One address of a network interface that is up; an interface may have several.

    Attributes:
        name: As ``GLOO_SOCKET_IFNAME`` takes it.
        address: IPv4 or IPv6.
    """

    name: str
    address: str

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine itself reaches it."""
        return ip_address(self.address).is_loopback


class _Entry(ctypes.Structure):
    """``struct ifaddrs``, whose first fields are the same on Linux and macOS."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def interfaces() -> list[Interface]:
    """All addresses, in the order in which gloo and NCCL see them.

    Raises:
        OSError: If the system does not tell.
    """
    system = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Entry)()
    if system.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs has failed")
    try:
        return list(_read(first))
    finally:
        system.freeifaddrs(first)


def interface_of(address: str, own: list[Interface]) -> str:
    """Name of the interface with an address; empty if there is none."""
    plain = address.removeprefix("::ffff:")
    if any(one.address == plain for one in own):
        return next(one.name for one in own if one.address == plain)
    if plain and ip_address(plain).is_loopback:
        return next((one.name for one in own if one.is_loopback), "")
    return ""


def _read(entry: Any) -> Iterator[Interface]:
    """From a pointer to the first entry of the system's list."""
    while entry:
        one = entry.contents
        if one.address and one.flags & _IS_UP:
            address = _text(one.address)
            if address:
                yield Interface(os.fsdecode(one.name), address)
        entry = one.next


def _text(address: int) -> str:
    """The address in a ``struct sockaddr``; empty if it is of another family."""
    head = ctypes.string_at(address, 2)
    family = head[1] if sys.platform == "darwin" else int.from_bytes(head, sys.byteorder)
    if family == socket.AF_INET:
        return socket.inet_ntop(family, ctypes.string_at(address + 4, 4))
    if family == socket.AF_INET6:
        return socket.inet_ntop(family, ctypes.string_at(address + 8, 16))
    return ""
