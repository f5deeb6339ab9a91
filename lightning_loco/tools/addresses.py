"""Addresses on a command line."""

from __future__ import annotations

import socket


def read_address(option: str, text: str, example: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``; ValueError, which names the option, if it is not."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ValueError(f"{option} must be HOST:PORT, such as {example}, got {text!r}.")
    return host.strip("[]"), int(port)


def check_bind(text: str, example: str) -> tuple[str, int]:
    """Return host and port of ``--bind``; ValueError if this machine cannot listen there."""
    host, port = read_address("--bind", text, example)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except UnicodeError:
        raise ValueError(f"--bind: {host!r} is no host name.") from None
    except OSError as error:
        raise ValueError(f"--bind cannot listen at {text}: {error.strerror}.") from None
    return host, port
