"""The key-value stores that members serve, as the others reach them: every wait for one ends."""

from __future__ import annotations

import re
import socket
import threading
import time
from concurrent.futures import wait
from datetime import timedelta

from torch.distributed import TCPStore

from lightning_loco.background import begin

_LABEL = r"[A-Za-z0-9_:%\[\]-]{1,63}"
_ADDRESS = re.compile(rf"(?=.{{1,260}}$){_LABEL}(\.{_LABEL})*\.?:\d{{1,5}}")

_LOOK_S, _LONGEST_PROBE_S = 0.2, 1.0
_FIRST_ATTEMPT_S, _LAST_ATTEMPT_S = 0.5, 5.0


def is_address(text: str) -> bool:
    """Whether it is ``"host:port"`` with a host that can be looked up."""
    return _ADDRESS.fullmatch(text) is not None and _parts(text)[1] < 2**16


def serve(host: str) -> TCPStore:
    """A store that listens at the address of a host, or at all addresses if it has not that one."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family)
    except OSError:
        return TCPStore(host, 0, is_master=True, wait_for_workers=False)
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def check_alive(store: str, who: str) -> None:
    """RuntimeError if a member has ended; that a network is slow or silent is no proof of it."""
    try:
        socket.create_connection(_parts(store), timeout=_LONGEST_PROBE_S).close()
    except ConnectionRefusedError as error:
        raise RuntimeError(f"{who} has ended.") from error
    except OSError:
        return


def connected(store: str, who: str, patience_s: float) -> TCPStore:
    """A store that a member serves, which answers.

    PyTorch goes on trying for a long time when nobody serves it any more. That is left to a thread,
    and given up as soon as it has no point.

    Args:
        store: ``"host:port"``.
        who: Serves it, for messages.
        patience_s: Longest wait for an answer, and for those of later calls, in seconds.

    Raises:
        RuntimeError: If that member has ended, or does not answer.
    """
    deadline = time.monotonic() + patience_s
    has_no_point = threading.Event()
    connecting = begin(
        lambda: _connect(store, patience_s, deadline, has_no_point), parting_s=_LAST_ATTEMPT_S
    )
    try:
        while not wait([connecting], _LOOK_S).done:
            check_alive(store, who)
            if time.monotonic() > deadline:
                raise RuntimeError(f"{who} has not answered for {patience_s:.3g} s.")
        return connecting.result()
    finally:
        has_no_point.set()
        del connecting  # a circle, from the error's frames back to the error


def _connect(
    store: str, patience_s: float, deadline: float, has_no_point: threading.Event
) -> TCPStore:
    """Try for longer each time: what is under way when it has no point any more ends soon."""
    host, port = _parts(store)
    attempt_s = _FIRST_ATTEMPT_S
    while True:
        limit = timedelta(seconds=min(attempt_s, patience_s))
        try:
            found = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        except RuntimeError:
            if has_no_point.is_set() or time.monotonic() > deadline:
                raise
            attempt_s *= 2
        else:
            found.set_timeout(timedelta(seconds=patience_s))
            return found


def _parts(store: str) -> tuple[str, int]:
    host, _, port = store.rpartition(":")
    return host, int(port)
