"""Places in a round at which a worker can be made to die or to freeze, by a signal to itself."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from torchft.process_group import ProcessGroupGloo

from lightning_loco.elastic import handover
from lightning_loco.elastic.carriers import Summing
from lightning_loco.elastic.groups import Groups
from lightning_loco.elastic.link import ElasticLink
from lightning_loco.rounds import Engine
from lightning_loco.rounds.rounds import Rounds
from lightning_loco.strategies import whole_files
from lightning_loco.strategies.side_files import SideFiles


class Point(NamedTuple):
    """A call of something.

    Attributes:
        owner: What has it.
        name: Of the function.
        delay_s: How long after its begin death comes; 0 for before it.
    """

    owner: Any
    name: str
    delay_s: float = 0.0


POINTS = {
    "local step": Point(Engine, "step"),
    "packing": Point(Rounds, "_propose_local"),
    "before sending": Point(ElasticLink, "start"),
    "before the group": Point(Groups, "open"),
    "making the group": Point(ProcessGroupGloo, "configure"),
    "rows": Point(Groups, "begin_gather"),
    "exchange": Point(Groups, "sum"),
    "within the exchange": Point(Groups, "sum", 0.002),
    "confirming": Point(Groups, "confirm"),
    "within the confirmation": Point(Groups, "confirm", 0.0005),
    "outer step": Point(Rounds, "_commit"),
    "copying the state": Point(Summing, "bring"),
    "sending the state": Point(handover.Groups, "send", 0.002),
    "receiving the state": Point(handover.Groups, "receive", 0.002),
    "writing a checkpoint": Point(whole_files, "_replace", 0.002),
    "before the last checkpoint is deleted": Point(SideFiles, "settle"),
}


def die_at(point: str, is_time: Callable[[], bool]) -> None:
    """Die at the first call of a point when it is time."""
    _at(point, is_time, die)


def freeze_at(point: str, is_time: Callable[[], bool]) -> None:
    """Stop at the first call of a point when it is time, until somebody sends SIGCONT."""
    once = iter([True])
    _at(point, lambda: is_time() and next(once, False), freeze)


def lose_confirmation(is_time: Callable[[], bool]) -> None:
    """Let the first confirmation when it is time reach the others, but theirs not this worker."""
    original = Groups.confirm
    once = iter([True])

    def losing(groups: Groups) -> None:
        original(groups)
        if is_time() and next(once, False):
            raise RuntimeError("the others' confirmations are lost")

    Groups.confirm = losing  # type: ignore[method-assign]


def _at(point: str, is_time: Callable[[], bool], end: Callable[[], None]) -> None:
    owner, name, delay_s = POINTS[point]
    original = getattr(owner, name)

    @functools.wraps(original)
    def ending(*args: Any, **settings: Any) -> Any:
        if is_time():
            if delay_s:
                threading.Timer(delay_s, end).start()
            else:
                end()
        return original(*args, **settings)

    setattr(owner, name, ending)


def die() -> None:
    """End at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def freeze() -> None:
    """Stop, as a suspended machine does: by this thread, which would go on a while by another."""
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
