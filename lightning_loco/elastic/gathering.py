"""The members of a new group find each other, or find that one is lost meanwhile.

The lighthouse takes a worker for alive until it has not heard of it for some time, and a process
group waits long for whoever does not come. But the store of a dead worker refuses connections at
once, and who gives up a group says so to those who still wait in it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torchft.process_group import ProcessGroupGloo

from lightning_loco.background import begin
from lightning_loco.elastic.plan import Plan

_LEFT = "left"
_PAUSE_S, _LOOK_S = 0.005, 0.2
_LONGEST_PROBE_S = 1.0


class Gathering:
    """The way of all members of a plan into its group.

    Args:
        plan: Of a new group.
        patience_s: Longest wait, in seconds.

    Raises:
        RuntimeError: If the member whose store they meet at has died.
    """

    def __init__(self, plan: Plan, patience_s: float) -> None:
        self._plan = plan
        self._patience_s = patience_s
        self._deadline = time.monotonic() + patience_s
        self._others = [place for place in range(len(plan.names)) if place != plan.own]
        check_alive(plan, plan.donor)
        store = connected(plan.stores[plan.donor], patience_s)
        self._store = PrefixStore(plan.group, store)

    def assemble(self) -> None:
        """Wait until all members have come.

        Raises:
            RuntimeError: If one of them has died, has given up, or does not come.
        """
        self._store.set(f"came/{self._plan.own}", "")
        missing = self._others
        while missing := [place for place in missing if not self._store.check([f"came/{place}"])]:
            self._check(missing)
            if time.monotonic() > self._deadline:
                names = ", ".join(self._plan.names[place] for place in missing)
                raise RuntimeError(f"{names} did not come within {self._patience_s:g} s.")
            time.sleep(_PAUSE_S)

    def enter(self, connect: Callable[[], ProcessGroupGloo]) -> ProcessGroupGloo:
        """The group, made by all members at the same time; RuntimeError if one is lost meanwhile.

        The call that makes it cannot be ended: it then ends by itself, beside what follows.
        """
        future = begin(connect)
        while not wait([future], _LOOK_S).done:
            try:
                self._check(self._others)
            except RuntimeError:
                future.add_done_callback(_discard)
                raise
        return future.result()

    def leave(self) -> None:
        """Tell the others that this member does not come."""
        with suppress(RuntimeError):
            check_alive(self._plan, self._plan.donor)
            self._store.set(_LEFT, self._plan.names[self._plan.own])

    def _check(self, places: list[int]) -> None:
        if self._store.check([_LEFT]):
            raise RuntimeError(f"{self._store.get(_LEFT).decode()} has given up.")
        for place in places:
            check_alive(self._plan, place)


def _discard(future: Future[ProcessGroupGloo]) -> None:
    if future.exception() is None:
        future.result().abort(errored=False)


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
