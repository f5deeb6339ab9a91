"""Members on their way into a group, one of which is lost before it is made."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from lightning_loco.elastic.group import Gathering, Groups
from lightning_loco.elastic.quorum import Plan
from tests.limits import SOON_S

PATIENCE_S = 60.0


def plans(*members: Groups) -> list[Plan]:
    """One for each member; the first one's store is where they meet."""
    stores = tuple(member.address for member in members)
    names = tuple(f"m{place}" for place in range(len(stores)))
    group = f"{time.monotonic()}/{len(names)}"
    return [Plan(group, names, own, stores, True, 0, (), 0, 0) for own in range(len(names))]


def test_who_gives_up_is_not_waited_for() -> None:
    first, second = Groups("127.0.0.1", PATIENCE_S), Groups("127.0.0.1", PATIENCE_S)
    here, there = plans(first, second)
    began = time.monotonic()
    threading.Timer(0.3, Gathering(there, PATIENCE_S).leave).start()
    with pytest.raises(RuntimeError, match="m1 has given up"):
        first.open(here)
    assert time.monotonic() - began < SOON_S
    first.close()
    second.close()


@pytest.mark.usefixtures("wait_for_threads")
def test_who_ends_while_the_group_is_made_is_not_waited_for() -> None:
    first, second = Groups("127.0.0.1", PATIENCE_S), Groups("127.0.0.1", PATIENCE_S)
    here, there = plans(first, second)
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(first.open, here)
        other = Gathering(there, PATIENCE_S)
        other.assemble()
        second.close()
        with pytest.raises(RuntimeError, match="m1 has ended"):
            opening.result()
        other.leave()
    assert time.monotonic() - began < SOON_S
    first.close()


def test_members_find_each_other() -> None:
    groups = [Groups("127.0.0.1", PATIENCE_S) for _ in range(3)]
    made = plans(*groups)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(Groups.open, groups, made))
    assert [group.name for group in groups] == [made[0].group] * 3
    for group in groups:
        group.close()


def sockets() -> Iterator[socket.socket]:
    """Those of this process for TCP."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
            if found.family != socket.AF_UNIX:
                yield found


def cut_connections_to(port: int) -> int:
    """End those of this process, as a network that fails does; how many."""
    count = 0
    for connection in sockets():
        with suppress(OSError):  # one that only listens
            if connection.getpeername()[1] == port:
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def test_members_that_have_finished_are_counted_over_a_cut_connection() -> None:
    groups, other = Groups("127.0.0.1", PATIENCE_S), Groups("127.0.0.1", PATIENCE_S)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(Groups.open, (groups, other), plans(groups, other)))
    assert groups.finished == 0
    assert cut_connections_to(int(groups.address.rpartition(":")[2]))
    assert groups.finished == 0
    other.say_finished()
    assert groups.finished == 1
    groups.close()
    other.close()
