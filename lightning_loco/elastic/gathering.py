"""The members of a new group find each other, or find that one has died meanwhile.

The lighthouse takes a worker for alive until it has not heard of it for some time, and a process
group waits long for whoever does not come. But the store of a dead worker refuses connections at
once.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore

from lightning_loco.elastic.plan import Plan

_PAUSE_S = 0.02
_LONGEST_PROBE_S = 1.0


def assemble(plan: Plan, patience_s: float) -> None:
    """Wait until all members of a plan have come to the donor's store.

    Args:
        plan: Of a new group.
        patience_s: Longest wait, in seconds.

    Raises:
        RuntimeError: If a member has died, or does not come.
    """
    deadline = time.monotonic() + patience_s
    check_alive(plan, plan.donor)
    store = PrefixStore(plan.group, connected(plan.stores[plan.donor], patience_s))
    store.set(f"came/{plan.own}", "")
    missing = [place for place in range(len(plan.names)) if place != plan.own]
    while missing := [place for place in missing if not store.check([f"came/{place}"])]:
        for place in missing:
            check_alive(plan, place)
        if time.monotonic() > deadline:
            names = ", ".join(plan.names[place] for place in missing)
            raise RuntimeError(f"{names} did not come within {patience_s:g} s.")
        time.sleep(_PAUSE_S)


def check_alive(plan: Plan, place: int) -> None:
    """RuntimeError if a member has ended; that a network is slow or silent is no proof of it."""
    host, port = _parts(plan.stores[place])
    try:
        socket.create_connection((host, port), timeout=_LONGEST_PROBE_S).close()
    except ConnectionRefusedError as error:
        raise RuntimeError(f"{plan.names[place]} has ended.") from error
    except OSError:
        return


def connected(store: str, patience_s: float) -> TCPStore:
    """A store that another worker serves."""
    host, port = _parts(store)
    patience = timedelta(seconds=patience_s)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience)


def _parts(store: str) -> tuple[str, int]:
    host, _, port = store.rpartition(":")
    return host, int(port)
