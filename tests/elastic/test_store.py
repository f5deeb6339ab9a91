"""The store of a member that exits, or freezes, while another member connects to it."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from lightning_loco.elastic.group import MemberGroup, check_alive, connect_store, serve_store
from tests.harness.limits import SOON_S

TIMEOUT_S = 60.0


pytestmark = pytest.mark.usefixtures("wait_for_threads")


def test_a_member_that_ends_during_a_connection_attempt_is_not_waited_for() -> None:
    """A killed process still accepts connections for a moment, and then refuses them."""
    with socket.create_server(("127.0.0.1", 0)) as dying:
        store = f"127.0.0.1:{dying.getsockname()[1]}"
        check_alive(store, "m0")
        threading.Timer(0.5, dying.close).start()
        started = time.monotonic()
        with pytest.raises(RuntimeError, match=r"m0 has ended\."):
            connect_store(store, "m0", TIMEOUT_S)
    assert time.monotonic() - started < SOON_S


def test_a_member_that_does_not_answer_is_waited_for_until_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        store = f"127.0.0.1:{frozen.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(RuntimeError, match=r"m0 has not answered for 2 s"):
            connect_store(store, "m0", 2.0)
        assert 2.0 <= time.monotonic() - started < SOON_S


def accepts_connections(port: int, *addresses: str) -> list[bool]:
    accepted = []
    for address in addresses:
        with socket.socket() as probe:
            accepted.append(probe.connect_ex((address, port)) == 0)
    return accepted


def test_a_store_listens_at_the_address_of_its_host_only() -> None:
    store = serve_store("127.0.0.1")
    assert accepts_connections(store.port, "127.0.0.1", "127.0.0.2") == [True, False]
    store.set("a", "b")
    assert connect_store(f"127.0.0.1:{store.port}", "m0", TIMEOUT_S).get("a") == b"b"


def test_a_store_listens_at_all_addresses_if_its_host_is_elsewhere(monkeypatch: Any) -> None:
    """For example, another machine may forward connections."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("192.0.2.1", 0))])
    store, other = serve_store("127.0.0.1"), serve_store("127.0.0.1")
    assert accepts_connections(store.port, "127.0.0.1", "127.0.0.2") == [True, True]
    store.set("a", "b")
    other.set("a", "c")
    for one, value in ((store, b"b"), (other, b"c")):
        assert connect_store(f"127.0.0.1:{one.port}", "m0", TIMEOUT_S).get("a") == value


def test_the_store_of_a_group_is_reached_at_its_address() -> None:
    group = MemberGroup("127.0.0.1", TIMEOUT_S)
    group.publish_run("a run")
    assert connect_store(group.address, "m0", TIMEOUT_S).get("run") == b"a run"
    group.close()
