"""Members create a group, and one of them is lost before the group is complete."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from lightning_loco.elastic.group import MemberGroup, MemberMonitor
from lightning_loco.elastic.quorum import QuorumPlan
from tests.harness.limits import SOON_S

TIMEOUT_S = 60.0


def plans(*members: MemberGroup) -> list[QuorumPlan]:
    """Return one plan for each member; the first member is the donor."""
    stores = tuple(member.address for member in members)
    names = tuple(f"m{rank}" for rank in range(len(stores)))
    group = f"{time.monotonic()}/{len(names)}"
    return [QuorumPlan(group, names, rank, stores, True, 0, (), 0, 0) for rank in range(len(names))]


def test_a_member_that_gives_up_is_not_waited_for() -> None:
    first, second = MemberGroup("127.0.0.1", TIMEOUT_S), MemberGroup("127.0.0.1", TIMEOUT_S)
    here, there = plans(first, second)
    started = time.monotonic()
    threading.Timer(0.3, MemberMonitor(there, TIMEOUT_S).leave).start()
    with pytest.raises(RuntimeError, match="m1 has given up"):
        first.open(here)
    assert time.monotonic() - started < SOON_S
    first.close()
    second.close()


@pytest.mark.usefixtures("wait_for_threads")
def test_a_member_that_ends_while_the_group_is_created_is_not_waited_for() -> None:
    first, second = MemberGroup("127.0.0.1", TIMEOUT_S), MemberGroup("127.0.0.1", TIMEOUT_S)
    here, there = plans(first, second)
    started = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(first.open, here)
        other = MemberMonitor(there, TIMEOUT_S)
        other.rendezvous()
        second.close()
        with pytest.raises(RuntimeError, match="m1 has ended"):
            opening.result()
        other.leave()
    assert time.monotonic() - started < SOON_S
    first.close()


def test_all_members_open_the_same_group() -> None:
    groups = [MemberGroup("127.0.0.1", TIMEOUT_S) for _ in range(3)]
    of_members = plans(*groups)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(MemberGroup.open, groups, of_members))
    assert [group.name for group in groups] == [of_members[0].group] * 3
    for group in groups:
        group.close()


def sockets() -> Iterator[socket.socket]:
    """Return the TCP sockets of this process."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
            if found.family != socket.AF_UNIX:
                yield found


def cut_connections_to(port: int) -> int:
    """Shut down connections of this process, like a failing network; return their number."""
    count = 0
    for connection in sockets():
        with suppress(OSError):  # a listening socket
            if connection.getpeername()[1] == port:
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def test_finished_members_are_counted_after_a_connection_was_cut() -> None:
    group, other = MemberGroup("127.0.0.1", TIMEOUT_S), MemberGroup("127.0.0.1", TIMEOUT_S)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(MemberGroup.open, (group, other), plans(group, other)))
    assert group.count_finished() == 0
    assert cut_connections_to(int(group.address.rpartition(":")[2]))
    assert group.count_finished() == 0
    other.announce_finished()
    assert group.count_finished() == 1
    group.close()
    other.close()
