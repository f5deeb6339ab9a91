"""The fetching thread: a fetch is handed over once, in time, and closing never waits long."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.peers import NodeDirectory, Peer, StoreDirectory
from lightning_loco.peers.directory import Directory
from lightning_loco.peers.fetching import FetchingThread
from lightning_loco.peers.flow import FlowControl
from lightning_loco.peers.protocol import Request
from lightning_loco.peers.reader import Reader
from tests.limits import LONG_S, SOON_S
from tests.peers.helpers import (
    MODEL,
    answering,
    open_files,
    peer_threads,
    peers,
    right_answer,
    serving,
    silent,
)


def make(directory: Directory, fetch_timeout_s: float = 5.0) -> FetchingThread:
    flow = FlowControl(directory.names, seed=0)
    reader = Reader(MODEL, directory, flow, fetch_timeout_s=fetch_timeout_s)
    return FetchingThread(reader)


@contextlib.contextmanager
def fetching(nodes: list[Peer], fetch_timeout_s: float = 5.0) -> Iterator[FetchingThread]:
    thread = make(NodeDirectory(nodes, nodes[0].name), fetch_timeout_s)
    thread.start()
    try:
        yield thread
    finally:
        thread.close()


def wait_for_end(thread: FetchingThread, patience_s: float = 5.0) -> None:
    deadline = time.monotonic() + patience_s
    while not thread.has_ended:
        assert time.monotonic() < deadline, "the fetch has not ended"
        time.sleep(0.001)


def test_without_a_fetch_nothing_is_waited_for() -> None:
    with fetching(peers(2)) as thread:
        assert thread.has_ended
        assert thread.wait() is None


def test_what_a_fetch_brought_is_handed_over_once() -> None:
    nodes = peers(2)
    with serving(nodes[1], 3.0), fetching(nodes) as thread:
        thread.start_fetch()
        received = thread.wait()
        assert received is not None
        assert received.params.tolist() == [3.0] * 1000
        assert thread.has_ended
        assert thread.wait() is None
        assert thread.counts.fetches == 1


def test_what_nobody_has_taken_is_gone_when_the_next_fetch_starts() -> None:
    nodes = peers(2)
    with serving(nodes[1], 1.0) as (_, publications), fetching(nodes) as thread:
        thread.start_fetch()
        wait_for_end(thread)
        publications.publish(torch.full((1000,), 2.0), Tag(2, 2))
        thread.start_fetch()
        received = thread.wait()
        assert received is not None
        assert received.tag.clock == 2
        assert thread.wait() is None


def test_a_short_wait_leaves_the_fetch_to_be_waited_for_again() -> None:
    released = threading.Event()

    def answer(request: Request) -> Iterator[list[bytes]]:
        released.wait(LONG_S)
        yield right_answer(request, MODEL.total_bytes, 3.0)

    nodes = peers(2)
    with answering(nodes[1].port, answer), fetching(nodes, fetch_timeout_s=LONG_S) as thread:
        started = time.monotonic()
        thread.start_fetch()
        for _ in range(3):
            assert thread.wait(0.02) is None
            assert not thread.has_ended
        assert time.monotonic() - started < SOON_S
        released.set()
        received = thread.wait()
        assert received is not None
        assert received.params.tolist() == [3.0] * 1000


def test_a_wait_for_a_silent_peer_ends_with_the_timeout() -> None:
    nodes = peers(2)
    with silent(nodes[1]), fetching(nodes, fetch_timeout_s=0.2) as thread:
        started = time.monotonic()
        thread.start_fetch()
        assert thread.wait(0.02) is None
        assert thread.wait() is None
        assert 0.19 < time.monotonic() - started < SOON_S
        wait_for_end(thread)
        assert thread.counts.timeouts == 1


def test_a_wait_ends_with_the_timeout_even_if_the_directory_hangs() -> None:
    released = threading.Event()

    class Slow(StoreDirectory):
        def find(self, name: str) -> Peer | None:
            released.wait(LONG_S)
            return super().find(name)

    thread = make(Slow(torch.distributed.HashStore(), 0, 2), fetch_timeout_s=0.2)
    thread.start()
    thread.start_fetch()
    started = time.monotonic()
    assert thread.wait() is None
    assert time.monotonic() - started < SOON_S
    assert not thread.has_ended
    released.set()
    thread.close()


def test_a_broken_flow_ends_the_thread_with_a_line_and_waits_end_in_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(FlowControl):
        def choose(self, without: object = ()) -> str | None:
            raise ArithmeticError("no dice")

    directory = NodeDirectory(peers(2), "p0")
    flow = Broken(directory.names, seed=0)
    thread = FetchingThread(Reader(MODEL, directory, flow, fetch_timeout_s=0.2))
    thread.start()
    thread.start_fetch()
    assert thread.wait() is None
    thread.join(5)
    assert not thread.is_alive()
    assert "no longer read from peers" in caplog.text
    assert "no dice" in caplog.text
    thread.close()


def test_close_gives_up_the_fetch_under_way_and_ends_a_wait() -> None:
    nodes = peers(2)
    with silent(nodes[1]):
        started = time.monotonic()
        with fetching(nodes, fetch_timeout_s=LONG_S) as thread:
            thread.start_fetch()
            assert thread.wait(0.1) is None
        assert not thread.is_alive()
        assert thread.wait() is None
        assert time.monotonic() - started < SOON_S
        assert not thread.has_ended
        assert thread.counts.timeouts == 0


@pytest.mark.parametrize("runs", [False, True])
def test_after_close_no_thread_and_no_file_is_left(runs: bool) -> None:
    nodes = peers(2)
    for _ in range(2):  # the first may load what stays
        before = open_files()
        thread = make(NodeDirectory(nodes, "p0"))
        if runs:
            thread.start()
        thread.close()
        thread.close()
        assert peer_threads() == []
    assert open_files() <= before
