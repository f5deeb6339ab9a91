"""The members of a group find each other, and find that one is lost.

The lighthouse takes a worker for alive until it has not heard of it for some time, and a process
group waits long for whoever does not come, or has frozen. But the store of a dead worker refuses
connections at once, that of a frozen one does not answer, and who gives up a group says so to those
who still wait in it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from typing import Any, TypeVar

from torch.distributed import PrefixStore
from torchft.process_group import ProcessGroupGloo

from lightning_loco.background import begin
from lightning_loco.comm.store import PromptStore, StoreSilent
from lightning_loco.elastic.plan import Plan
from lightning_loco.elastic.stores import check_alive, connected

T = TypeVar("T")

SILENT_S = 10.0
"""How long a member may be frozen, or unreachable, before the others go on without it."""

COME_S = 8.0
"""How long to wait for one who may not have heard that it takes part: it then asks again."""

_LEFT = "left"
_PAUSE_S, _QUICK_S, _LOOK_S = 0.005, 0.2, 0.5
_LAST_WORDS_S = 1.0
_GRACE_S = 2.0


class Gathering:
    """The members of a plan, on their way into its group and in it.

    They look after each other in a circle, and whoever misses the next one tells all others: the
    store of the donor is where they meet.

    Args:
        plan: Of a new group.
        patience_s: Longest wait for an answer of the others, in seconds.

    Raises:
        RuntimeError: If the member whose store they meet at has died, or does not answer.
    """

    def __init__(self, plan: Plan, patience_s: float) -> None:
        self._plan = plan
        self._come_s = min(COME_S, patience_s)
        self._silent_s = min(SILENT_S, patience_s)
        self._check_alive(plan.donor)
        store = connected(plan.stores[plan.donor], plan.names[plan.donor], patience_s)
        self._store = PromptStore(PrefixStore(plan.group, store))

    def assemble(self) -> None:
        """Wait until all members have come.

        Raises:
            RuntimeError: If one of them has died, has given up, or does not come.
        """
        count, own = len(self._plan.names), self._plan.own
        self._answer_of_donor(lambda: self._store.set(f"came/{own}", "", self._silent_s))
        missing = [place for place in range(count) if place != own]
        deadline = time.monotonic() + self._come_s
        while missing := [place for place in missing if not self._has_come(place)]:
            self._check_left()
            for place in missing:
                self._check_alive(place)
            if time.monotonic() > deadline:
                names = ", ".join(self._plan.names[place] for place in missing)
                raise RuntimeError(f"{names} did not come within {self._come_s:.3g} s.")
            time.sleep(_PAUSE_S)

    def enter(self, connect: Callable[[], ProcessGroupGloo]) -> ProcessGroupGloo:
        """The group, made by all members at the same time; RuntimeError if one is lost meanwhile.

        The call that makes it cannot be ended: it then ends by itself, beside what follows.
        """
        entering = begin(connect)
        try:
            self._stay_with(entering, 0.0)
        except RuntimeError:
            entering.add_done_callback(_discard)
            raise
        return entering.result()

    def attend(self, exchange: Callable[[], T]) -> T:
        """Make an exchange that waits for the members; RuntimeError if one is lost meanwhile.

        What it waits for is then left alone, in a thread. A member that has ended may have sent all
        it had to: so there is a moment for what is still on its way.
        """
        exchanging = begin(exchange)
        try:
            self._stay_with(exchanging, _GRACE_S)
            return exchanging.result()
        finally:
            del exchanging  # a circle, from the error's frames back to the error

    def leave(self) -> None:
        """Tell the others that this member does not come, or is there no longer."""
        with suppress(RuntimeError):
            self._check_alive(self._plan.donor)
            self._store.set(_LEFT, self._plan.names[self._plan.own], _LAST_WORDS_S)
        self._store.close()

    def _stay_with(self, work: Future[Any], grace_s: float) -> None:
        """Wait for the end of something, or for the loss of a member and a moment more."""
        if len(self._plan.names) == 1:
            wait([work])
        if wait([work], _QUICK_S).done:
            return
        is_over = threading.Event()
        loss: Future[Any] = begin(lambda: self._watch(is_over))
        try:
            wait([work, loss], return_when=FIRST_COMPLETED)
            is_over.set()
            if not wait([work], grace_s).done:
                loss.result()
        finally:
            del loss, work

    def _watch(self, is_over: threading.Event) -> None:
        plan = self._plan
        following = (plan.own + 1) % len(plan.names)
        while not is_over.is_set():
            self._check_left()
            self._check_alive(following)
            connected(plan.stores[following], plan.names[following], self._silent_s)
            is_over.wait(_LOOK_S)

    def _has_come(self, place: int) -> bool:
        return self._has(f"came/{place}")

    def _check_left(self) -> None:
        if self._has(_LEFT):
            who = self._answer_of_donor(lambda: self._store.get(_LEFT, self._silent_s))
            raise RuntimeError(f"{who.decode()} has given up.")

    def _has(self, key: str) -> bool:
        return self._answer_of_donor(lambda: self._store.check([key], self._silent_s))

    def _answer_of_donor(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except StoreSilent:
            donor = self._plan.names[self._plan.donor]
            raise RuntimeError(f"{donor} has not answered for {self._silent_s:.3g} s.") from None

    def _check_alive(self, place: int) -> None:
        check_alive(self._plan.stores[place], self._plan.names[place])


def _discard(future: Future[ProcessGroupGloo]) -> None:
    if future.exception() is None:
        future.result().abort(errored=False)
