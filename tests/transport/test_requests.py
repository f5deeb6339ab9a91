"""Requests and replies: what is sent comes back, in time or not at all, and nothing is left."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from lightning_loco.background import begin
from lightning_loco.transport import (
    MAX_NOTE_BYTES,
    Client,
    MalformedMessage,
    Request,
    Server,
    read_certificate,
)
from lightning_loco.transport import server as server_module
from tests.limits import HARNESS_S, LONG_S, SOON_S
from tests.manual_clock import ManualClock
from tests.programs import free_ports
from tests.transport.helpers import (
    HOST,
    asking,
    message,
    new_certificate,
    open_files,
    saying,
    serving,
    stranger,
    transport_threads,
    wait_until,
    wait_until_closed,
)


def test_notes_and_bodies_come_back(subtests: pytest.Subtests) -> None:
    with serving() as server, asking(server) as client:
        for note, size in ((b"", 0), (b"x", 1), (bytes(MAX_NOTE_BYTES), 5_000_000), (b"y", 0)):
            with subtests.test(note=len(note), size=size):
                body = memoryview(bytearray(b"z" * size))
                reply = client.request(note, body, timeout_s=20)
                assert (reply.note, reply.body_bytes) == (note, size)
                memory = memoryview(bytearray(size))
                for start in range(0, size, 700_000):
                    reply.receive_into(memory[start : start + 700_000], timeout_s=20)
                assert memory == body
                with pytest.raises(ValueError, match="has 0 bytes left, not 1"):
                    reply.receive_into(memoryview(bytearray(1)), timeout_s=1)
        with pytest.raises(ValueError, match="at most 1024 bytes, this has 1025"):
            client.request(bytes(MAX_NOTE_BYTES + 1), timeout_s=1)


def test_a_body_is_received_where_the_server_wants_it() -> None:
    kept = bytearray(1_000_000)

    def keep(request: Request) -> None:
        if request.body_bytes != len(kept):
            raise MalformedMessage("another length")
        for start in range(0, len(kept), 300_000):
            request.receive_into(memoryview(kept)[start : start + 300_000])
        request.reply(b"kept")

    with serving(keep) as server, asking(server) as client:
        assert client.request(b"push", b"\1" * len(kept), timeout_s=20).note == b"kept"
        assert kept == b"\1" * len(kept)
        with pytest.raises(OSError, match=r"closed|reset|pipe"):
            client.request(b"push", b"\1" * (len(kept) + 1), timeout_s=20)
        wait_until(lambda: server.malformed == 1, "it was not counted")
        assert client.request(b"push", b"\2" * len(kept), timeout_s=20).note == b"kept"


def test_a_body_that_was_not_received_costs_the_connection_and_nothing_else() -> None:
    with serving() as server, asking(server) as client:
        for number in range(5):
            reply = client.request(b"%d" % number, bytes(100_000), timeout_s=20)
            assert reply.note == b"%d" % number


def wrong_twice(request: Request) -> None:
    request.reply(b"")
    request.reply(b"")


def wrong_before_the_body(request: Request) -> None:
    request.reply(b"")


def wrong_value(request: Request) -> None:
    raise ArithmeticError("no dice")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (wrong_twice, "answered once"),
        (wrong_before_the_body, "when its body was received"),
        (wrong_value, "no dice"),
    ],
)
def test_a_wrong_handler_is_logged_and_the_server_goes_on(
    answer: Callable[[Request], None], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(answer) as server, asking(server) as client:
        for count in (1, 2):
            with contextlib.suppress(OSError):
                client.request(b"note", b"body", timeout_s=20)
                client.request(b"note", b"body", timeout_s=20)
            wait_until(lambda c=count: caplog.text.count(text) >= c, "it was not logged")
    assert "could not be answered" in caplog.text


def test_who_is_not_answered_is_told_by_the_end_of_the_connection() -> None:
    with serving(lambda request: None) as server, asking(server) as client:
        with pytest.raises(OSError, match=r"closed|reset"):
            client.request(b"note", timeout_s=LONG_S)
        wait_until(lambda: server.malformed == 1, "it was not counted")


def test_a_server_that_has_gone_is_found_again() -> None:
    (port,) = free_ports()
    client = Client(HOST, port)
    for _ in range(3):
        with serving(port=port):
            assert client.request(b"note", timeout_s=20).note == b"note"
        with pytest.raises(ConnectionRefusedError):
            client.request(b"note", timeout_s=LONG_S)
    client.close()


def test_a_name_that_nobody_knows_is_an_error_at_once() -> None:
    with pytest.raises(OSError, match=r"not known|resolution"):
        Client("no-such-host.invalid", 1).request(b"note", timeout_s=LONG_S)


def give_up(client: Client, clock: ManualClock, asked: Future[object], is_aborted: bool) -> None:
    """Abort a request under way, or let its time pass; it fails as it should."""
    if is_aborted:
        client.abort()
    else:
        clock.advance(11)
    with pytest.raises(ConnectionAbortedError if is_aborted else TimeoutError):
        asked.result(HARNESS_S)


@pytest.mark.parametrize("has_certificate", [False, True])
@pytest.mark.parametrize("words", [b"", message(b"note")[:10], message(b"note", b"body")[:-2]])
def test_a_server_that_says_nothing_more_costs_the_timeout_or_the_time_until_abort(
    has_certificate: bool, words: bytes, tmp_path: Path
) -> None:
    certificate = read_certificate(new_certificate(tmp_path)) if has_certificate else None
    (port,) = free_ports()
    with saying(port, b"" if has_certificate else words):
        for is_aborted in (False, True):
            clock = ManualClock()
            client = Client(HOST, port, certificate, clock)

            def ask(client: Client = client) -> None:
                reply = client.request(b"note", timeout_s=5)
                reply.receive_into(memoryview(bytearray(reply.body_bytes)), timeout_s=5)

            asked = begin(ask)
            clock.wait_until_read()
            assert not asked.done()
            give_up(client, clock, asked, is_aborted)
            if is_aborted:
                with pytest.raises(ConnectionAbortedError):
                    client.request(b"note", timeout_s=5)
            client.close()


def test_an_abort_ends_a_connection_that_is_being_made() -> None:
    """To a listener whose queue is full, so that nobody answers."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind((HOST, 0))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        clock = ManualClock()
        for is_aborted in (False, True):
            client = Client(HOST, listener.getsockname()[1], clock=clock)
            asked = begin(lambda client=client: client.request(b"note", timeout_s=5))
            clock.wait_until_read()
            give_up(client, clock, asked, is_aborted)


def test_what_was_not_asked_for_costs_the_connection() -> None:
    """Bytes after a reply are never taken for the next one."""
    (port,) = free_ports()
    with saying(port, message(b"first") + message(b"false")):
        client = Client(HOST, port)
        for _ in range(3):
            assert client.request(b"note", timeout_s=20).note == b"first"
            time.sleep(0.01)
        client.close()


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        message(b"note", magic=b"LOCO\0\0\0\1"),
        message(bytes(MAX_NOTE_BYTES + 1)),
    ],
)
def test_a_server_that_speaks_otherwise_is_an_error_at_once(words: bytes) -> None:
    (port,) = free_ports()
    with saying(port, words):
        client = Client(HOST, port)
        with pytest.raises(MalformedMessage, match=r"does not begin like|a note of 1025 bytes"):
            client.request(b"note", timeout_s=LONG_S)


def test_of_too_many_the_ones_that_never_asked_go_first_and_the_oldest_of_them() -> None:
    with serving(max_connections=5) as server, contextlib.ExitStack() as stack:

        def is_open(connection: socket.socket) -> bool:
            with contextlib.suppress(OSError):
                connection.sendall(message(b"note"))
                return len(connection.recv(len(message(b"note")))) > 0
            return False

        first = [stack.enter_context(stranger(server.port)) for _ in range(5)]
        assert is_open(first[0])
        assert is_open(first[2])
        second = [stack.enter_context(stranger(server.port)) for _ in range(2)]
        assert is_open(second[1])
        found = [is_open(each) for each in [*first, *second]]
        assert found == [True, False, True, False, True, True, True]
        third = stack.enter_context(stranger(server.port))
        assert is_open(third)  # all had asked, the first one the longest ago
        assert [is_open(first[index]) for index in (0, 2)] == [False, True]
        assert len(transport_threads()) == 6


def test_who_is_too_slow_loses_the_connection_and_who_is_idle_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(server_module, "_HANDSHAKE_S", 0.2)
    monkeypatch.setattr(server_module, "_NOTE_S", 0.2)
    certificate = read_certificate(new_certificate(tmp_path))
    body = bytes(50_000_000)

    def send_much(request: Request) -> None:
        request.receive_into(memoryview(bytearray(request.body_bytes)))
        request.reply(b"", body)

    with serving(send_much, timeout_s=0.5) as server, stranger(server.port) as idle:
        for words in (message(b"note")[:1], message(b"note")[:-1], message(b"note", b"body")[:-1]):
            with stranger(server.port) as slow:
                slow.sendall(words)
                wait_until_closed(slow)
        with stranger(server.port) as unread:
            unread.sendall(message(b"note"))
            wait_until(lambda: len(transport_threads()) == 2, "its connection is still there")
        idle.sendall(message(b"note"))
        assert idle.recv(1)
    with serving(certificate=certificate) as server, stranger(server.port) as silent:
        wait_until_closed(silent)


def test_a_byte_now_and_then_does_not_prolong_a_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "_NOTE_S", 0.3)
    with serving() as server, stranger(server.port) as slow:
        started = time.monotonic()
        with contextlib.suppress(OSError):
            for byte in message(bytes(1000)):
                slow.sendall(bytes([byte]))
                time.sleep(0.05)
        assert time.monotonic() - started < SOON_S  # it would be 51 s


def test_close_ends_all_threads_and_frees_the_port_whether_it_ran_or_not() -> None:
    (port,) = free_ports()
    for runs in (False, True, True):
        before = open_files()
        server = Server(lambda request: request.reply(b"", bytes(50_000_000)), port=port)
        with contextlib.ExitStack() as stack:
            if runs:
                server.start()
                for words in (b"", message(b"note"), message(b"note")[:3]):
                    stack.enter_context(stranger(port)).sendall(words)
                wait_until(lambda: len(transport_threads()) == 4, "they have not come")
            started = time.monotonic()
            server.close()
            server.close()
            assert time.monotonic() - started < SOON_S
            assert transport_threads() == []
        socket.create_server((HOST, port)).close()
        assert open_files() <= before


def test_a_taken_port_and_a_foreign_host_are_named() -> None:
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


def test_strangers_have_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server:
        for count in range(1, 4):
            with stranger(server.port) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                wait_until_closed(connection)
            wait_until(lambda c=count: server.malformed == c, "it was not counted")
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert f"Dropped a message from 127.0.0.1 on port {server.port}: it" in record.getMessage()


def test_many_ask_at_once_and_none_is_mistaken_for_another() -> None:
    with serving(timeout_s=HARNESS_S) as server:
        wrong: list[object] = []

        def ask(number: int) -> None:
            with asking(server) as client:
                for count in range(50):
                    note = b"%d %d" % (number, count)
                    body = note * 1000
                    reply = client.request(note, body, timeout_s=HARNESS_S)
                    memory = bytearray(reply.body_bytes)
                    reply.receive_into(memoryview(memory), timeout_s=HARNESS_S)
                    if (reply.note, memory) != (note, body):
                        wrong.append(note)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
