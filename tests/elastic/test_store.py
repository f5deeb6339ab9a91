"""The store of a member that ends, or freezes, while another one connects with it."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from lightning_loco.elastic.group import Groups
from lightning_loco.elastic.store import check_alive, connected, serve
from tests.limits import SOON_S

PATIENCE_S = 60.0


pytestmark = pytest.mark.usefixtures("wait_for_threads")


def test_who_ends_while_one_connects_is_not_waited_for() -> None:
    """A process that is killed still takes connections for a moment, and then takes no more."""
    with socket.create_server(("127.0.0.1", 0)) as dying:
        store = f"127.0.0.1:{dying.getsockname()[1]}"
        check_alive(store, "m0")
        threading.Timer(0.5, dying.close).start()
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"m0 has ended\."):
            connected(store, "m0", PATIENCE_S)
    assert time.monotonic() - began < SOON_S


def test_who_does_not_answer_is_waited_for_so_long() -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        store = f"127.0.0.1:{frozen.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"m0 has not answered for 2 s"):
            connected(store, "m0", 2.0)
        assert 2.0 <= time.monotonic() - began < SOON_S


def listens_at(port: int, *addresses: str) -> list[bool]:
    found = []
    for address in addresses:
        with socket.socket() as line:
            found.append(line.connect_ex((address, port)) == 0)
    return found


def test_a_store_listens_at_its_host_only() -> None:
    store = serve("127.0.0.1")
    assert listens_at(store.port, "127.0.0.1", "127.0.0.2") == [True, False]
    store.set("a", "b")
    assert connected(f"127.0.0.1:{store.port}", "m0", PATIENCE_S).get("a") == b"b"


def test_a_store_listens_everywhere_if_its_host_is_not_here(monkeypatch: Any) -> None:
    """As where another machine forwards what comes there."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("192.0.2.1", 0))])
    store = serve("127.0.0.1")
    assert listens_at(store.port, "127.0.0.1", "127.0.0.2") == [True, True]


def test_a_store_that_is_served_is_reached() -> None:
    groups = Groups("127.0.0.1", PATIENCE_S)
    groups.describe("a run")
    assert connected(groups.address, "m0", PATIENCE_S).get("run") == b"a run"
    groups.close()
