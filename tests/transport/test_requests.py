"""Requests and replies: contents, deadlines, errors, eviction and cleanup."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path

import pytest

from lightning_loco._util.background import run_in_thread
from lightning_loco.transport import (
    MAX_HEADER_BYTES,
    Client,
    MalformedMessage,
    Request,
    Server,
    address_towards,
    read_certificate,
)
from lightning_loco.transport import request_server as server_module
from lightning_loco.transport.connection import Connection
from tests.harness.guards import open_files, threads_named
from tests.harness.limits import HARNESS_S, LONG_S, SOON_S, wait_until
from tests.harness.manual_clock import ManualClock
from tests.harness.programs import free_ports
from tests.harness.sockets import (
    HOST,
    asking,
    message,
    new_certificate,
    raw_connection,
    raw_server,
    serving,
    wait_until_closed,
)


def test_headers_and_bodies_are_transferred(subtests: pytest.Subtests) -> None:
    with serving() as server, asking(server) as client:
        for header, size in ((b"", 0), (b"x", 1), (bytes(MAX_HEADER_BYTES), 5_000_000), (b"y", 0)):
            with subtests.test(header=len(header), size=size):
                body = memoryview(bytearray(b"z" * size))
                reply = client.request(header, body, timeout_s=20)
                assert (reply.header, reply.body_bytes) == (header, size)
                memory = memoryview(bytearray(size))
                for start in range(0, size, 700_000):
                    reply.receive_into(memory[start : start + 700_000], timeout_s=20)
                assert memory == body
                with pytest.raises(ValueError, match="has 0 bytes left, not 1"):
                    reply.receive_into(memoryview(bytearray(1)), timeout_s=1)
        with pytest.raises(ValueError, match="at most 1024 bytes, this has 1025"):
            client.request(bytes(MAX_HEADER_BYTES + 1), timeout_s=1)


def test_body_is_received_into_memory_of_the_server() -> None:
    memory = bytearray(1_000_000)

    def keep(request: Request) -> None:
        if request.body_bytes != len(memory):
            raise MalformedMessage("another length")
        for start in range(0, len(memory), 300_000):
            request.receive_into(memoryview(memory)[start : start + 300_000])
        request.reply(b"kept")

    with serving(keep) as server, asking(server) as client:
        assert client.request(b"push", b"\1" * len(memory), timeout_s=20).header == b"kept"
        assert memory == b"\1" * len(memory)
        with pytest.raises(OSError, match=r"closed|reset|pipe"):
            client.request(b"push", b"\1" * (len(memory) + 1), timeout_s=20)
        wait_until(lambda: server.malformed == 1, "the malformed message was not counted")
        assert client.request(b"push", b"\2" * len(memory), timeout_s=20).header == b"kept"


def test_client_reconnects_if_a_body_was_not_received() -> None:
    with serving() as server, asking(server) as client:
        for number in range(5):
            reply = client.request(b"%d" % number, bytes(100_000), timeout_s=20)
            assert reply.header == b"%d" % number


def reply_twice(request: Request) -> None:
    request.reply(b"")
    request.reply(b"")


def reply_before_the_body(request: Request) -> None:
    request.reply(b"")


def raise_an_error(request: Request) -> None:
    raise ArithmeticError("no dice")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (reply_twice, "answered once"),
        (reply_before_the_body, "after its whole body has been received"),
        (raise_an_error, "no dice"),
    ],
)
def test_error_of_a_handler_is_logged_and_the_server_continues(
    answer: Callable[[Request], None], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(answer) as server, asking(server) as client:
        for count in (1, 2):
            with contextlib.suppress(OSError):
                client.request(b"head", b"body", timeout_s=20)
                client.request(b"head", b"body", timeout_s=20)
            wait_until(lambda c=count: caplog.text.count(text) >= c, "it was not logged")
    assert "could not be answered" in caplog.text


def test_errors_of_a_handler_are_logged_20_times_only(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise a client that causes errors could fill the log."""
    num_calls = 0

    def fail(request: Request) -> None:
        nonlocal num_calls
        num_calls += 1
        raise ArithmeticError("no dice")

    with serving(fail) as server, asking(server) as client:
        while num_calls < 25:
            with contextlib.suppress(OSError):
                client.request(b"head", timeout_s=20)
    errors = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(errors) == 20
    assert [text.endswith("No more failures are logged.") for text in errors] == [False] * 19 + [
        True
    ]


def test_a_refused_thread_costs_one_connection(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server:
        default = threading.stack_size(2**47)  # more memory than a process can allocate
        try:
            with asking(server) as client, pytest.raises(ConnectionError):
                client.request(b"head", timeout_s=60)
        finally:
            threading.stack_size(default)
        assert "can't start new thread" in caplog.text
        with asking(server) as client:
            assert client.request(b"head", timeout_s=60).header == b"head"


def test_unanswered_request_closes_the_connection() -> None:
    with serving(lambda request: None) as server, asking(server) as client:
        with pytest.raises(OSError, match=r"closed|reset"):
            client.request(b"head", timeout_s=LONG_S)
        wait_until(lambda: server.malformed == 1, "the malformed message was not counted")


def test_client_reconnects_to_a_restarted_server() -> None:
    (port,) = free_ports()
    client = Client(HOST, port)
    for _ in range(3):
        with serving(port=port):
            assert client.request(b"head", timeout_s=20).header == b"head"
        with pytest.raises(ConnectionRefusedError):
            client.request(b"head", timeout_s=LONG_S)
    client.close()


def test_unknown_host_raises_immediately() -> None:
    with pytest.raises(OSError, match=r"not known|resolution"):
        Client("no-such-host.invalid", 1).request(b"head", timeout_s=LONG_S)


def interrupt(client: Client, clock: ManualClock, request: Future[object], abort: bool) -> None:
    """Abort a request or let its deadline pass, and check the error."""
    if abort:
        client.abort()
    else:
        # Header and body have a deadline each, and that of the body may only start now.
        while not wait([request], timeout=0.1).done and clock.now() < 110:
            clock.advance(11)
    with pytest.raises(ConnectionAbortedError if abort else TimeoutError):
        request.result(HARNESS_S)


@pytest.mark.parametrize("has_certificate", [False, True])
@pytest.mark.parametrize("data", [b"", message(b"head")[:10], message(b"head", b"body")[:-2]])
def test_request_to_a_silent_server_ends_with_its_timeout_or_an_abort(
    has_certificate: bool, data: bytes, tmp_path: Path
) -> None:
    certificate = read_certificate(new_certificate(tmp_path)) if has_certificate else None
    (port,) = free_ports()
    with raw_server(port, b"" if has_certificate else data):
        for abort in (False, True):
            clock = ManualClock()
            client = Client(HOST, port, certificate, clock)

            def ask(client: Client = client) -> None:
                reply = client.request(b"head", timeout_s=5)
                reply.receive_into(memoryview(bytearray(reply.body_bytes)), timeout_s=5)

            request = run_in_thread(ask)
            clock.wait_until_read()
            assert not request.done()
            interrupt(client, clock, request, abort)
            if abort:
                with pytest.raises(ConnectionAbortedError):
                    client.request(b"head", timeout_s=5)
            client.close()


def test_abort_or_timeout_ends_a_connection_attempt() -> None:
    """The queue of the listener is full, so the connection is never accepted."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind((HOST, 0))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        clock = ManualClock()
        for abort in (False, True):
            client = Client(HOST, listener.getsockname()[1], clock=clock)
            request = run_in_thread(lambda client=client: client.request(b"head", timeout_s=5))
            clock.wait_until_read()
            interrupt(client, clock, request, abort)


def test_unrequested_message_closes_the_connection() -> None:
    """Bytes after a reply are never read as the next reply."""
    (port,) = free_ports()
    with raw_server(port, message(b"first") + message(b"false")):
        client = Client(HOST, port)
        for _ in range(3):
            assert client.request(b"head", timeout_s=20).header == b"first"
            time.sleep(0.01)
        client.close()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        message(b"head", magic=b"LOCO\0\0\0\1"),
        message(bytes(MAX_HEADER_BYTES + 1)),
    ],
)
def test_server_with_another_protocol_raises_immediately(data: bytes) -> None:
    (port,) = free_ports()
    with raw_server(port, data):
        client = Client(HOST, port)
        with pytest.raises(MalformedMessage, match=r"does not start like|a header of 1025 bytes"):
            client.request(b"head", timeout_s=LONG_S)


def test_idle_connections_are_evicted_first() -> None:
    with serving(max_connections=5) as server, contextlib.ExitStack() as stack:

        def is_open(connection: socket.socket) -> bool:
            with contextlib.suppress(OSError):
                connection.sendall(message(b"head"))
                return len(connection.recv(len(message(b"head")))) > 0
            return False

        first = [stack.enter_context(raw_connection(server.port)) for _ in range(5)]
        assert is_open(first[0])
        assert is_open(first[2])
        second = [stack.enter_context(raw_connection(server.port)) for _ in range(2)]
        assert is_open(second[1])
        found = [is_open(each) for each in [*first, *second]]
        assert found == [True, False, True, False, True, True, True]
        third = stack.enter_context(raw_connection(server.port))
        assert is_open(third)  # all have sent requests; the one of first[0] is the oldest
        assert [is_open(first[index]) for index in (0, 2)] == [False, True]
        assert len(threads_named("loco-server")) == 6


def test_slow_clients_are_disconnected_and_idle_ones_are_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(server_module, "_HANDSHAKE_S", 0.2)
    monkeypatch.setattr(server_module, "_HEADER_S", 0.2)
    certificate = read_certificate(new_certificate(tmp_path))
    body = bytes(50_000_000)

    def send_much(request: Request) -> None:
        request.receive_into(memoryview(bytearray(request.body_bytes)))
        request.reply(b"", body)

    with serving(send_much, timeout_s=0.5) as server, raw_connection(server.port) as idle:
        for data in (message(b"head")[:1], message(b"head")[:-1], message(b"head", b"body")[:-1]):
            with raw_connection(server.port) as slow:
                slow.sendall(data)
                wait_until_closed(slow)
        with raw_connection(server.port) as unread:
            unread.sendall(message(b"head"))
            wait_until(
                lambda: len(threads_named("loco-server")) == 2, "its connection is still open"
            )
        idle.sendall(message(b"head"))
        assert idle.recv(1)
    with serving(certificate=certificate) as server, raw_connection(server.port) as silent:
        wait_until_closed(silent)


def test_single_bytes_do_not_extend_a_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "_HEADER_S", 0.3)
    with serving() as server, raw_connection(server.port) as slow:
        started = time.monotonic()
        with contextlib.suppress(OSError):
            for byte in message(bytes(1000)):
                slow.sendall(bytes([byte]))
                time.sleep(0.05)
        assert time.monotonic() - started < SOON_S  # otherwise it would be 51 s


def test_close_ends_all_threads_and_frees_the_port() -> None:
    (port,) = free_ports()
    for runs in (False, True, True):
        before = open_files()
        server = Server(lambda request: request.reply(b"", bytes(50_000_000)), port=port)
        with contextlib.ExitStack() as stack:
            if runs:
                server.start()
                for data in (b"", message(b"head"), message(b"head")[:3]):
                    stack.enter_context(raw_connection(port)).sendall(data)
                wait_until(
                    lambda: len(threads_named("loco-server")) == 4,
                    "the connections were not accepted",
                )
            started = time.monotonic()
            server.close()
            server.close()
            assert time.monotonic() - started < SOON_S
            assert threads_named("loco-server") == []
        socket.create_server((HOST, port)).close()
        assert open_files() <= before


def test_close_waits_for_threads_whose_client_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    is_ending, close = threading.Event(), Connection.close

    def close_slowly(connection: Connection) -> None:
        is_ending.set()
        time.sleep(0.2)
        close(connection)

    monkeypatch.setattr(Connection, "close", close_slowly)
    with serving() as server:
        with raw_connection(server.port):
            pass
        assert is_ending.wait(SOON_S)
        server.close()
        assert threads_named("loco-server") == []


def test_errors_name_a_taken_port_and_an_unknown_host() -> None:
    (port,) = free_ports()
    before = open_files()
    with (
        socket.create_server((HOST, port)),
        pytest.raises(RuntimeError, match=f"Port {port} of {HOST} is taken.*End"),
    ):
        Server(print, port=port)
    with pytest.raises(RuntimeError, match="Cannot listen on port 0 of '192.0.2.1'.*0.0.0.0"):
        Server(print, host="192.0.2.1")
    assert open_files() == before


def test_malformed_messages_are_logged_once_per_address(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server:
        for count in range(1, 4):
            with raw_connection(server.port) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                wait_until_closed(connection)
            wait_until(
                lambda c=count: server.malformed == c, "the malformed message was not counted"
            )
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert f"Dropped a message from 127.0.0.1 on port {server.port}: it" in record.getMessage()


def test_concurrent_clients_receive_their_own_replies() -> None:
    with serving(timeout_s=HARNESS_S) as server:
        wrong: list[object] = []

        def ask(number: int) -> None:
            with asking(server) as client:
                for count in range(50):
                    header = b"%d %d" % (number, count)
                    body = header * 1000
                    reply = client.request(header, body, timeout_s=HARNESS_S)
                    memory = bytearray(reply.body_bytes)
                    reply.receive_into(memoryview(memory), timeout_s=HARNESS_S)
                    if (reply.header, memory) != (header, body):
                        wrong.append(header)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_the_address_towards_this_machine_is_loopback() -> None:
    assert address_towards("localhost") in ("127.0.0.1", "::1")
