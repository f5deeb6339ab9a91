"""The process of an elastic worker on models of threads, sockets, gloo and the lighthouse."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from lightning_loco.elastic import connection, group, lighthouse, rounds
from lightning_loco.elastic.group import MemberGroup
from lightning_loco.elastic.round_request import PendingRound, RoundResult
from lightning_loco.elastic.rounds import RoundThread
from tests.exploration.model_lighthouse import ModelLighthouse
from tests.exploration.model_network import GlooGroup, Network, Prefixed, TimeoutClient
from tests.exploration.model_threads import Threads, wait_in_task
from tests.exploration.scheduler import Scheduler

_log = logging.getLogger("lightning_loco")

LONGER_POLLS = {
    group: {"_POLL_S": 0.5, "_CHECK_EVERY_S": 1.0, "_WATCH_EVERY_S": 2.0, "_OWN_STORE_S": 30.0},
    rounds: {"_CHECK_STOP_S": 2.0},
}
"""Times between two looks at the same condition: each is an event, and none decides anything.

A worker waits longer for its own store, which would not be late on a machine that runs it at all.
"""


@contextmanager
def models(
    scheduler: Scheduler, network: Network, server: ModelLighthouse, make_name: Callable[[], str]
) -> Iterator[None]:
    """Let ``lightning_loco.elastic`` run on models; ``make_name`` makes unique parts of names."""
    threads = Threads(scheduler)

    class TaskPending(PendingRound):
        def result(self, timeout: float | None = None) -> RoundResult:
            wait_in_task(scheduler, self, timeout, str(self.request))
            return super().result(0)

    def start(thread: RoundThread) -> None:
        thread._task = threads.start("rounds", thread.run)  # type: ignore[attr-defined]

    def is_alive(thread: RoundThread) -> bool:
        return not thread._task.is_done  # type: ignore[attr-defined]

    def join(thread: RoundThread, timeout: float) -> None:
        scheduler.wait("the round thread", lambda: not is_alive(thread), timeout)

    def close(closed: MemberGroup, original: Callable[..., None] = MemberGroup.close) -> None:
        address = closed.address
        original(closed)
        network.stores.pop(address, None)  # as the last reference to the server is gone

    replaced: dict[Any, dict[str, Any]] = {
        group: {
            "run_in_thread": threads.run_in_thread,
            "wait": threads.wait,
            "BackgroundThread": threads.background_thread,
            "serve_store": network.serve,
            "TCPStore": lambda host, port, **options: network.connect(host, port, **options),
            "PrefixStore": Prefixed,
            "TimeoutStore": TimeoutClient,
            "with_timeout": lambda work, timeout_s: work(),
            "ProcessGroupGloo": lambda timeout: GlooGroup(network, timeout),
            "socket": network.socket_module(network.probe),
        },
        lighthouse: {
            "LighthouseClient": server.client,
            "ManagerServer": server.manager_server,
            "socket": network.socket_module(server.connection),
        },
        lighthouse.Lighthouse: {"status": lambda self: ""},
        rounds: {
            "run_in_thread": threads.run_in_thread,
            "wait": threads.wait,
            "queue": threads.queue_module(),
        },
        RoundThread: {"start": start, "join": join, "is_alive": is_alive},
        MemberGroup: {"close": close},
        connection: {
            "PendingRound": TaskPending,
            "secrets": SimpleNamespace(**vars(secrets) | {"token_hex": lambda _: make_name()}),
        },
    }
    level = _log.level
    with ExitStack() as stack:
        for patches in (replaced, LONGER_POLLS):
            for owner, values in patches.items():
                for name, value in values.items():
                    stack.enter_context(mock.patch.object(owner, name, value))
        _log.setLevel(logging.CRITICAL)  # thousands of warnings
        stack.callback(_log.setLevel, level)
        yield
