"""The process group of the present members: torchft's, which can be made anew for others."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Work
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions
from torchft.process_group import ProcessGroupGloo

from lightning_loco.background import BackgroundThread, begin
from lightning_loco.distributed.store import StoreTimeout, TimeoutStore, with_timeout
from lightning_loco.elastic.quorum import Plan
from lightning_loco.elastic.store import check_alive, connected, serve
from lightning_loco.fault_points import reach

T = TypeVar("T")

SILENT_S = 10.0
"""How long a member may be frozen, or unreachable, before the others go on without it."""

COME_S = 8.0
"""How long to wait for one who may not have heard that it takes part: it then asks again."""

_LEFT = "left"
_PAUSE_S, _QUICK_S, _LOOK_S = 0.005, 0.2, 0.5
_LAST_WORDS_S = 1.0
_GRACE_S = 2.0

_END, _CAME = 2**20, 2**20 + 1  # tags of single bytes

CONNECT_S = 20.0
"""Longest wait for the members of a new group: one of them may have died meanwhile."""


_RUN, _FINISHED = "run", "finished"
_GOODBYE_S, _OWN_S = 6.0, 3.0


class Gathering:
    """The members of a plan, on their way into its group and in it.

    They look after each other in a circle, and whoever misses the next one tells all others: the
    store of the donor is where they meet. The lighthouse takes a worker for alive until it has not
    heard of it for some time, and a process group waits long for whoever does not come, or has
    frozen. But the store of a dead worker refuses connections at once, that of a frozen one does
    not answer, and who gives up a group says so to those who still wait in it.

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
        self._store = TimeoutStore(PrefixStore(plan.group, store))

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
        except StoreTimeout:
            donor = self._plan.names[self._plan.donor]
            raise RuntimeError(f"{donor} has not answered for {self._silent_s:.3g} s.") from None

    def _check_alive(self, place: int) -> None:
        check_alive(self._plan.stores[place], self._plan.names[place])


def _discard(future: Future[ProcessGroupGloo]) -> None:
    if future.exception() is None:
        future.result().abort(errored=False)


def move(
    group: ProcessGroupGloo,
    sent: Mapping[int, Sequence[Tensor]],
    received: Mapping[int, Sequence[Tensor]],
    timeout: timedelta,
) -> None:
    """Send and receive several tensors to and from several members, by their places.

    Gloo leaves those waiting whose messages are cut off in the middle by the death of the other
    end, but not those who wait for a message that has not begun. So two single bytes are waited
    for: one follows the tensors, and one comes back once all of them are there.

    Args:
        group: That of the members; it stays the same to the end, also when this worker has left it.
        sent: To each; empty ones do not travel.
        received: From each, into these.
        timeout: Longest wait for one of them.

    Raises:
        RuntimeError: If one of the members is lost.
    """
    moved: list[Work] = []
    ends: list[Work] = []
    came: list[Work] = []
    try:
        for source, tensors in received.items():
            moved += _start(group.recv, tensors, source)
            ends.append(group.recv([one_byte()], source, _END))
        came += [group.recv([one_byte()], receiver, _CAME) for receiver in sent]
        for receiver, tensors in sent.items():
            moved += _start(group.send, tensors, receiver)
            moved.append(group.send([one_byte()], receiver, _END))
        _wait(ends, timeout)
        moved += [group.send([one_byte()], source, _CAME) for source in received]
        _wait(came, timeout)
        _wait(moved, timeout)
    finally:
        for works in (moved, ends, came):
            works.clear()  # or they would keep the group's connections open after a failure


def one_byte() -> Tensor:
    """The shortest message."""
    return torch.zeros(1, dtype=torch.uint8)


def _start(
    start: Callable[[list[Tensor], int, int], Work], tensors: Sequence[Tensor], peer: int
) -> list[Work]:
    full = (tensor for tensor in tensors if tensor.numel())
    return [start([tensor.view(torch.uint8)], peer, tag) for tag, tensor in enumerate(full)]


def _wait(works: list[Work], timeout: timedelta) -> None:
    while works:
        works.pop(0).wait(timeout)


class Groups:
    """This worker's part in the group of those who exchange at present.

    Args:
        host: Under which the other members reach this machine.
        timeout_s: Longest wait for what another member sends, in seconds.

    Attributes:
        name: Of the open group; empty if there is none.
        address: ``"host:port"`` of the store that this worker serves.
    """

    def __init__(self, host: str, timeout_s: float) -> None:
        self.name = ""
        self._timeout = timedelta(seconds=timeout_s)
        self._store = serve(host)
        self.address = f"{host}:{self._store.port}"
        self._own_words = TimeoutStore(self._store)
        self._group: ProcessGroupGloo | None = None
        self._gathering: Gathering | None = None
        self._plan: Plan | None = None

    def describe(self, run: str) -> None:
        """Keep what this worker's run is, for those who want to know why theirs is another."""
        self._own_words.set(_RUN, run)

    def ask(self, store: str, who: str) -> str:
        """What another worker's run is; RuntimeError if it does not say."""
        asked = connected(store, who, self._connect_s)
        return with_timeout(lambda: asked.get(_RUN), self._connect_s).decode()

    @property
    def finished(self) -> int:
        """How many of those who took part with this worker have finished since."""
        try:
            return self._own_words.add(_FINISHED, 0)
        except RuntimeError:  # something has cut the connection to this worker's own store
            self._own_words.close()
            self._own_words = TimeoutStore(connected(self.address, "This worker's store", _OWN_S))
            return self._own_words.add(_FINISHED, 0, _OWN_S)

    def living(self) -> list[str]:
        """Those who took part last with this worker, and have not ended as far as it can see."""
        plan = self._plan
        if plan is None:
            return []
        members = enumerate(zip(plan.stores, plan.names, strict=True))
        return [name for place, (store, name) in members if place != plan.own and _lives(store)]

    def say_finished(self) -> None:
        """Tell those who took part last that this worker has finished, if they are there still."""
        plan = self._plan
        if plan is None:
            return
        members = list(zip(plan.stores, plan.names, strict=True))
        others = members[: plan.own] + members[plan.own + 1 :]
        wait([begin(functools.partial(_say_finished, *other)) for other in others], _GOODBYE_S)

    def open(self, plan: Plan) -> None:
        """Have the group of a plan; made anew if it is another one.

        Raises:
            RuntimeError: If a member does not come.
        """
        reach("before the group")
        if not plan.is_new:
            return
        self.drop()
        gathering = Gathering(plan, self._connect_s)
        try:
            gathering.assemble()
            group = gathering.enter(lambda: self._connect(plan))
        except RuntimeError:
            gathering.leave()
            raise
        self._group, self._gathering = group, gathering
        self._plan, self.name = plan, plan.group

    def _connect(self, plan: Plan) -> ProcessGroupGloo:
        group = ProcessGroupGloo(timeout=timedelta(seconds=self._connect_s))
        store = f"{plan.stores[plan.donor]}/{plan.group}"
        reach("making the group")
        group.configure(store, plan.names[plan.own], plan.own, len(plan.names))
        return group

    @property
    def _connect_s(self) -> float:
        return min(CONNECT_S, self._timeout.total_seconds() / 3)

    def sum(self, flat: Tensor) -> None:
        """Add a flat tensor up over all members, in place."""
        reach("exchange")
        options = AllreduceOptions()
        options.timeout = self._timeout
        group = self._open
        self._attend(lambda: group.allreduce([flat], options).wait())

    def gather(self, status: Tensor) -> Tensor:
        """The statuses ``(members, width)`` of all members; RuntimeError if one is lost."""
        return self.begin_gather(status)()

    def begin_gather(self, status: Tensor) -> Callable[[], Tensor]:
        """Begin to :meth:`gather`, beside what follows; what is returned waits for the end."""
        reach("rows")
        group = self._open
        table = status.new_empty(group.size(), len(status))
        options = AllgatherOptions()
        options.timeout = self._timeout
        gathering = group.allgather([list(table)], [status], options)

        def end() -> Tensor:
            self._attend(gathering.wait)
            return table

        return end

    def confirm(self) -> None:
        """Say that this member has received, and wait until all have; RuntimeError if not."""
        reach("confirming")
        self.gather(one_byte())
        reach("after confirming")

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        """Send tensors to one member, which receives as many; empty ones do not travel.

        Raises:
            RuntimeError: If that member is lost.
        """
        self._move({to: tensors}, {})

    def receive(self, tensors: Sequence[Tensor], source: int) -> None:
        """Receive what a member sends, into tensors; RuntimeError if it is lost."""
        self._move({}, {source: tensors})

    def swap(self, sent: Mapping[int, Tensor], inbox: Mapping[int, Tensor]) -> None:
        """Send each member its message, while those of others arrive in their places of an inbox.

        Raises:
            RuntimeError: If one of them is lost.
        """
        reach("exchange")
        messages = {to: [message] for to, message in sent.items()}
        memories = {source: [memory] for source, memory in inbox.items()}
        self._move(messages, memories)

    def _move(
        self, sent: Mapping[int, Sequence[Tensor]], received: Mapping[int, Sequence[Tensor]]
    ) -> None:
        group, timeout = self._open, self._timeout
        self._attend(lambda: move(group, sent, received, timeout))

    @property
    def _open(self) -> ProcessGroupGloo:
        if self._group is None:
            raise RuntimeError("There is no open group.")
        return self._group

    def _attend(self, exchange: Callable[[], object]) -> None:
        if self._gathering is None:
            raise RuntimeError("There is no open group.")
        self._gathering.attend(exchange)

    def drop(self) -> None:
        """Leave the open group without waiting for what is under way."""
        groups, gathering = [self._group], self._gathering
        self._group, self._gathering, self.name = None, None, ""
        if gathering is not None:
            BackgroundThread("loco-left-group", functools.partial(_abort, groups)).start()
            gathering.leave()

    def close(self) -> None:
        """Leave the group, and stop serving the store."""
        self.drop()
        self._own_words.close()
        del self._store, self._own_words


def _abort(groups: list[ProcessGroupGloo | None]) -> None:
    """End what is under way in the only group of a list, and the group: both may take a while."""
    if groups[0] is not None:
        groups[0].abort(errored=False)
    groups.clear()


def _lives(store: str) -> bool:
    try:
        check_alive(store, "")
    except RuntimeError:
        return False
    return True


def _say_finished(store: str, who: str) -> None:
    check_alive(store, who)
    connected(store, who, _GOODBYE_S).add(_FINISHED, 1)
