"""A key-value store whose server is a process of its own, which a test may freeze or kill."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

import torch.distributed as dist

from lightning_loco._util.clock import REAL_CLOCK, Clock
from lightning_loco.distributed.store import TimeoutStore
from tests.harness.pool import PRELOADED


def _host(connection: Connection) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send(server.port)
    connection.poll(None)


@contextmanager
def server_in_a_process(clock: Clock = REAL_CLOCK) -> Iterator[tuple[TimeoutStore, int]]:
    """A connection to a server in a process of its own, and the number of that process."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(PRELOADED)
    ours, theirs = processes.Pipe()
    process = processes.Process(target=_host, args=(theirs,))
    process.start()
    client = dist.TCPStore("127.0.0.1", ours.recv(), is_master=False, wait_for_workers=False)
    store = TimeoutStore.from_clone(client, 10.0, clock=clock)
    assert process.pid is not None
    try:
        yield store, process.pid
    finally:
        with suppress(ProcessLookupError):  # a test may have ended it
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        store.close()
        ours.close()
