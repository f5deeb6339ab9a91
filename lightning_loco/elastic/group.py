"""The process group of the members of a quorum: a new one of torchft whenever they change."""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore, Work
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions
from torchft.process_group import ProcessGroupGloo

from lightning_loco._util.background import BackgroundThread, run_in_thread
from lightning_loco._util.clock import REAL_CLOCK, Clock
from lightning_loco._util.fault_points import reach
from lightning_loco.distributed.store import StoreTimeout, TimeoutStore, with_timeout
from lightning_loco.elastic.quorum import QuorumPlan

T = TypeVar("T")

CONNECT_S = 20.0
"""Longest wait for the members of a new group, one of which may have died since the quorum."""

RENDEZVOUS_S = 8.0
"""Longest wait for a member that may not know that it takes part: it then asks for a new quorum."""

UNRESPONSIVE_S = 10.0
"""How long a member may be frozen or unreachable before the others continue without it."""

_DONE_TAG, _RECEIVED_TAG = 2**20, 2**20 + 1  # of single bytes
_RUN_KEY, _FINISHED_KEY, _LEFT_KEY = "run", "finished", "left"
_POLL_S, _WATCH_AFTER_S, _WATCH_EVERY_S, _GRACE_S = 0.005, 0.2, 0.5, 2.0
_LEAVE_S, _ANNOUNCE_S, _OWN_STORE_S = 1.0, 6.0, 3.0
_CHECK_EVERY_S, _MAX_PROBE_S, _FIRST_ATTEMPT_S, _LAST_ATTEMPT_S = 0.2, 1.0, 0.5, 5.0


class MemberGroup:
    """This worker's process group with the other members, and the key-value store that it serves.

    All collectives raise RuntimeError if a member is lost.

    Args:
        host: Name or address under which the other members reach this host.
        timeout_s: Longest wait for data from another member, in seconds.
        clock: Clock for its waits.

    Attributes:
        name: Name of the open group; empty if there is none.
        address: ``"host:port"`` of this worker's store.
    """

    def __init__(self, host: str, timeout_s: float, *, clock: Clock = REAL_CLOCK) -> None:
        self.name = ""
        self._clock = clock
        self._timeout = timedelta(seconds=timeout_s)
        # A round that fails because of a lost member is to be repeated within its timeout.
        self._connect_s = min(CONNECT_S, timeout_s / 3)
        self._server = serve_store(host)
        self.address = f"{host}:{self._server.port}"
        self._own_store = TimeoutStore(self._server, clock=clock)
        self._group: ProcessGroupGloo | None = None
        self._monitor: MemberMonitor | None = None
        self._plan: QuorumPlan | None = None

    # -------------------------------------------------------------- open and close

    def open(self, plan: QuorumPlan) -> None:
        """Open a plan's group, a new one for other members; RuntimeError if one does not join."""
        reach("before the group")
        if not plan.is_new:
            return
        self.abort()
        # The connection of gloo cannot be cancelled, and waits long for a member that does not
        # come. So the members meet at the store of the donor first.
        monitor = MemberMonitor(plan, self._connect_s, clock=self._clock)
        try:
            monitor.rendezvous()
            group = monitor.create_group(lambda: self._create(plan))
        except RuntimeError:
            monitor.leave()
            raise
        self._group, self._monitor = group, monitor
        self._plan, self.name = plan, plan.group

    def _create(self, plan: QuorumPlan) -> ProcessGroupGloo:
        group = ProcessGroupGloo(timeout=timedelta(seconds=self._connect_s))
        store = f"{plan.stores[plan.donor]}/{plan.group}"
        reach("making the group")
        group.configure(store, plan.names[plan.rank], plan.rank, len(plan.names))
        return group

    def abort(self) -> None:
        """Leave the open group without waiting for its pending work."""
        groups, monitor = [self._group], self._monitor
        self._group, self._monitor, self.name = None, None, ""
        if monitor is not None:
            # Gloo waits for transfers under way, while a new group can be made already.
            BackgroundThread("loco-left-group", functools.partial(_abort, groups)).start()
            monitor.leave()

    def close(self) -> None:
        """Leave the group and stop serving the store."""
        self.abort()
        self._own_store.close()
        # The server of a store ends with the last reference to it.
        del self._server, self._own_store

    # ----------------------------------------------------------------- collectives

    def all_reduce(self, flat: Tensor) -> None:
        """Sum a flat tensor over all members, in place."""
        reach("exchange")
        options = AllreduceOptions()
        options.timeout = self._timeout
        group, monitor = self._opened()
        # The timeout of gloo ends the whole group, so it is the last resort: the monitor finds a
        # lost member before.
        monitor.watch(lambda: group.allreduce([flat], options).wait())

    def all_gather(self, row: Tensor) -> Tensor:
        """Return the rows ``(members, width)`` of all members."""
        return self.start_all_gather(row)()

    def start_all_gather(self, row: Tensor) -> Callable[[], Tensor]:
        """Start :meth:`all_gather`; the returned function waits for its result."""
        reach("statuses")
        group, monitor = self._opened()
        table = row.new_empty(group.size(), len(row))
        options = AllgatherOptions()
        options.timeout = self._timeout
        work = group.allgather([list(table)], [row], options)

        def finish() -> Tensor:
            monitor.watch(work.wait)
            return table

        return finish

    def confirm(self) -> None:
        """Confirm that this member received all messages, and wait for all others to do so."""
        reach("confirming")
        self.all_gather(_one_byte())
        reach("after confirming")

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        """Send tensors to one member, skipping empty ones."""
        self._send_receive({to: tensors}, {})

    def receive(self, tensors: Sequence[Tensor], source: int) -> None:
        """Receive tensors of one member, in place."""
        self._send_receive({}, {source: tensors})

    def swap(self, sent: Mapping[int, Tensor], inbox: Mapping[int, Tensor]) -> None:
        """Send each of some members, by rank, a tensor, and receive one of each into ``inbox``."""
        reach("exchange")
        outgoing = {to: [tensor] for to, tensor in sent.items()}
        incoming = {source: [tensor] for source, tensor in inbox.items()}
        self._send_receive(outgoing, incoming)

    def _send_receive(
        self, sent: Mapping[int, Sequence[Tensor]], received: Mapping[int, Sequence[Tensor]]
    ) -> None:
        group, monitor = self._opened()
        monitor.watch(lambda: send_receive(group, sent, received, self._timeout))

    def _opened(self) -> tuple[ProcessGroupGloo, MemberMonitor]:
        if self._group is None or self._monitor is None:
            raise RuntimeError("There is no open group.")
        return self._group, self._monitor

    # ---------------------------------------------------------------------- stores

    def publish_run(self, run: str) -> None:
        """Publish the description of this worker's run, for workers whose run differs."""
        self._own_store.set(_RUN_KEY, run)

    def read_run(self, store: str, member: str) -> str:
        """Return the description of another worker's run; RuntimeError if it does not answer."""
        client = connect_store(store, member, self._connect_s, clock=self._clock)
        return with_timeout(lambda: client.get(_RUN_KEY), self._connect_s).decode()

    def live_members(self) -> list[str]:
        """Return the names of the members of the last group that still accept connections."""
        return [name for store, name in self._last_others() if _is_alive(store)]

    def count_finished(self) -> int:
        """Return how many members have announced to this worker that they have finished."""
        try:
            return self._own_store.add(_FINISHED_KEY, 0)
        except RuntimeError:  # the connection with this worker's own store was cut
            self._own_store.close()
            client = connect_store(
                self.address, "This worker's store", _OWN_STORE_S, clock=self._clock
            )
            self._own_store = TimeoutStore(client, clock=self._clock)
            return self._own_store.add(_FINISHED_KEY, 0, _OWN_STORE_S)

    def announce_finished(self) -> None:
        """Announce to the members of the last group that this worker has finished."""
        others = self._last_others()
        wait(
            [run_in_thread(functools.partial(_announce, *other, self._clock)) for other in others],
            _ANNOUNCE_S,
        )

    def _last_others(self) -> list[tuple[str, str]]:
        """Return store and name of the other members of the last group."""
        plan = self._plan
        if plan is None:
            return []
        members = list(zip(plan.stores, plan.names, strict=True))
        return members[: plan.rank] + members[plan.rank + 1 :]


def _abort(groups: list[ProcessGroupGloo | None]) -> None:
    """Abort the pending work of the only group in a list, then drop it: both may take a while."""
    if groups[0] is not None:
        groups[0].abort(errored=False)
    groups.clear()


def _announce(store: str, member: str, clock: Clock) -> None:
    check_alive(store, member)
    connect_store(store, member, _ANNOUNCE_S, clock=clock).add(_FINISHED_KEY, 1)


def send_receive(
    group: ProcessGroupGloo,
    sent: Mapping[int, Sequence[Tensor]],
    received: Mapping[int, Sequence[Tensor]],
    timeout: timedelta,
) -> None:
    """Send and receive several tensors to and from several members, by rank.

    If a member dies, gloo never ends the wait for a tensor that was received in part, but it does
    end the wait for one that has not begun. So the waits are for single bytes: one follows the
    tensors, and one is returned once all of them were received. Empty tensors are skipped.

    ``timeout`` limits the wait for one tensor; RuntimeError if a member is lost. This call
    continues to use the group when this worker has left it.
    """
    tensors_moved: list[Work] = []
    all_sent: list[Work] = []
    all_received: list[Work] = []
    try:
        for source, tensors in received.items():
            tensors_moved += _start_all(group.recv, tensors, source)
            all_sent.append(group.recv([_one_byte()], source, _DONE_TAG))
        all_received += [group.recv([_one_byte()], to, _RECEIVED_TAG) for to in sent]
        for to, tensors in sent.items():
            tensors_moved += _start_all(group.send, tensors, to)
            tensors_moved.append(group.send([_one_byte()], to, _DONE_TAG))
        _wait_all(all_sent, timeout)
        tensors_moved += [group.send([_one_byte()], source, _RECEIVED_TAG) for source in received]
        _wait_all(all_received, timeout)
        _wait_all(tensors_moved, timeout)
    finally:
        for works in (tensors_moved, all_sent, all_received):
            works.clear()  # after a failure they would keep the group's connections open


def _start_all(
    start: Callable[[list[Tensor], int, int], Work], tensors: Sequence[Tensor], rank: int
) -> list[Work]:
    full = (tensor for tensor in tensors if tensor.numel())
    return [start([tensor.view(torch.uint8)], rank, tag) for tag, tensor in enumerate(full)]


def _wait_all(works: list[Work], timeout: timedelta) -> None:
    while works:
        works.pop(0).wait(timeout)


def _one_byte() -> Tensor:
    return torch.zeros(1, dtype=torch.uint8, device="cpu")


class MemberMonitor:
    """Detects members that are lost while a group is created and used.

    The members watch each other in a ring, and the first one that detects a loss notifies all
    others through the store of the donor. This is needed because the lighthouse considers a worker
    alive until its heartbeats have been missing for some time, and a process group waits long for a
    member that never connects or is frozen. In contrast, the store of a dead worker refuses
    connections at once, and the store of a frozen one does not answer within ``timeout_s`` seconds.
    RuntimeError if this is so with the store of the donor, which is used.
    """

    def __init__(self, plan: QuorumPlan, timeout_s: float, *, clock: Clock = REAL_CLOCK) -> None:
        self._clock = clock
        self._plan = plan
        self._rendezvous_s = min(RENDEZVOUS_S, timeout_s)
        self._unresponsive_s = min(UNRESPONSIVE_S, timeout_s)
        self._check_alive(plan.donor)
        client = connect_store(
            plan.stores[plan.donor], plan.names[plan.donor], timeout_s, clock=clock
        )
        self._store = TimeoutStore(PrefixStore(plan.group, client), clock=clock)

    def rendezvous(self) -> None:
        """Wait until all members are ready; RuntimeError if one has died, given up or is late."""
        plan = self._plan
        self._ask_donor(lambda: self._store.set(_ready_key(plan.rank), "", self._unresponsive_s))
        missing = [rank for rank in range(len(plan.names)) if rank != plan.rank]
        deadline = self._clock.now() + self._rendezvous_s
        while missing := [rank for rank in missing if not self._has(_ready_key(rank))]:
            self._check_left()
            for rank in missing:
                self._check_alive(rank)
            if self._clock.now() > deadline:
                names = ", ".join(plan.names[rank] for rank in missing)
                raise RuntimeError(
                    f"{names} did not join the group within {self._rendezvous_s:.3g} s."
                )
            self._clock.sleep(_POLL_S)

    def create_group(self, create: Callable[[], ProcessGroupGloo]) -> ProcessGroupGloo:
        """Create the group on all members at once; RuntimeError if one is lost meanwhile.

        The call that creates it cannot be cancelled: after a loss it ends in the background.
        """
        creating = run_in_thread(create)
        try:
            self._wait_or_raise(creating, 0.0)
        except RuntimeError:
            creating.add_done_callback(_discard)
            raise
        return creating.result()

    def watch(self, exchange: Callable[[], T]) -> T:
        """Run an exchange with the members; RuntimeError if one is lost meanwhile.

        After a loss the exchange is left alone, in its thread. A member that has ended may have
        sent everything before, so the exchange gets a moment for data that is still on its way.
        """
        running = run_in_thread(exchange)
        try:
            self._wait_or_raise(running, _GRACE_S)
            return running.result()
        finally:
            del running  # a reference cycle, from the error's frames back to the error

    def leave(self) -> None:
        """Notify the others that this member has left the group, or does not join it."""
        with suppress(RuntimeError):
            self._check_alive(self._plan.donor)
            self._store.set(_LEFT_KEY, self._plan.names[self._plan.rank], _LEAVE_S)
        self._store.close()

    def _wait_or_raise(self, work: Future[Any], grace_s: float) -> None:
        """Wait for some work; if a member is lost, raise unless it ends within ``grace_s``."""
        # No other member can be lost.
        if len(self._plan.names) == 1:
            wait([work])
        # Most exchanges end before; to watch needs connections to other members.
        if wait([work], _WATCH_AFTER_S).done:
            return
        is_over = threading.Event()
        loss: Future[Any] = run_in_thread(lambda: self._watch_next(is_over))
        try:
            wait([work, loss], return_when=FIRST_COMPLETED)
            is_over.set()
            if not wait([work], grace_s).done:
                loss.result()
        finally:
            del loss, work

    def _watch_next(self, is_over: threading.Event) -> None:
        """Check the next member in the ring until it is lost or the work is over."""
        plan = self._plan
        rank = (plan.rank + 1) % len(plan.names)
        while not is_over.is_set():
            self._check_left()
            self._check_alive(rank)
            # A frozen process still accepts connections, by its kernel, but its store does not
            # answer.
            connect_store(
                plan.stores[rank], plan.names[rank], self._unresponsive_s, clock=self._clock
            )
            self._clock.wait(is_over, _WATCH_EVERY_S)

    def _check_left(self) -> None:
        if self._has(_LEFT_KEY):
            member = self._ask_donor(lambda: self._store.get(_LEFT_KEY, self._unresponsive_s))
            raise RuntimeError(f"{member.decode()} has given up.")

    def _has(self, key: str) -> bool:
        return self._ask_donor(lambda: self._store.check([key], self._unresponsive_s))

    def _ask_donor(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except StoreTimeout:
            donor = self._plan.names[self._plan.donor]
            message = f"{donor} has not answered for {self._unresponsive_s:.3g} s."
            raise RuntimeError(message) from None

    def _check_alive(self, rank: int) -> None:
        check_alive(self._plan.stores[rank], self._plan.names[rank])


def _ready_key(rank: int) -> str:
    return f"came/{rank}"


def _discard(future: Future[ProcessGroupGloo]) -> None:
    if future.exception() is None:
        future.result().abort(errored=False)


def serve_store(host: str) -> TCPStore:
    """Serve a key-value store at the address of a host, or at all addresses if it is elsewhere."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        # The store itself would listen at all addresses of this host.
        listener = socket.create_server(address[:2], family=family)
    except OSError:
        return TCPStore(host, 0, is_master=True, wait_for_workers=False)
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def connect_store(
    store: str, member: str, timeout_s: float, *, clock: Clock = REAL_CLOCK
) -> TCPStore:
    """Connect to the store ``"host:port"`` of a member, and check that it answers.

    PyTorch retries for a long time if the server is gone. It does so in a thread, which is given up
    as soon as the member is known to have ended. RuntimeError if it has ended, or has not answered
    for ``timeout_s`` seconds, which also limit later calls.
    """
    deadline = clock.now() + timeout_s
    is_given_up = threading.Event()
    connecting = run_in_thread(
        lambda: _connect(store, timeout_s, deadline, is_given_up, clock),
        exit_timeout_s=_LAST_ATTEMPT_S,
    )
    try:
        while not wait([connecting], _CHECK_EVERY_S).done:
            check_alive(store, member)
            if clock.now() > deadline:
                raise RuntimeError(f"{member} has not answered for {timeout_s:.3g} s.")
        return connecting.result()
    finally:
        is_given_up.set()
        del connecting  # a reference cycle, from the error's frames back to the error


def _connect(
    store: str, timeout_s: float, deadline: float, is_given_up: threading.Event, clock: Clock
) -> TCPStore:
    """Make attempts of increasing length, so that one that is given up early ends soon."""
    host, port = _split_address(store)
    attempt_s = _FIRST_ATTEMPT_S
    while True:
        limit = timedelta(seconds=min(attempt_s, timeout_s))
        try:
            client = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        except RuntimeError:
            if is_given_up.is_set() or clock.now() > deadline:
                raise
            attempt_s *= 2
        else:
            client.set_timeout(timedelta(seconds=timeout_s))
            return client


def check_alive(store: str, member: str) -> None:
    """Raise RuntimeError if a member has ended; a slow or silent network does not prove that."""
    try:
        socket.create_connection(_split_address(store), timeout=_MAX_PROBE_S).close()
    # The store was there, so a host that refuses the connection has no such process any more.
    except ConnectionRefusedError as error:
        raise RuntimeError(f"{member} has ended.") from error
    except OSError:
        return


def _is_alive(store: str) -> bool:
    try:
        check_alive(store, "")
    except RuntimeError:
        return False
    return True


def _split_address(store: str) -> tuple[str, int]:
    host, _, port = store.rpartition(":")
    return host, int(port)
