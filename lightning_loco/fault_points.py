"""Named places that the package comes to, at which a test can make a process fail.

Nothing happens there unless :func:`on_reach` says so; then, in all threads of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

POINTS = {
    # Local steps and rounds.
    "local step": "a local step has been made and is to be counted",
    "packing": "before a message is made of parameters or gradients",
    "before sending": "before a message leaves",
    "after sending": "a message has left, and those of others are still to come",
    "after receiving": "all that a message waits for has come; nothing has changed yet",
    "outer step": "before what has come is applied",
    # Members that come and go.
    "before the group": "before the group of a plan is opened, which may be open already",
    "making the group": "before a new group is made by torchft",
    "statuses": "before the statuses of the members are gathered",
    "exchange": "before messages move between the members",
    "confirming": "before a member says that it has received",
    "after confirming": "all members have said that they have received",
    "before the state is sent": "a newcomer waits for the state, which has been copied",
    "sending the state": "a description of the state has been sent, the state not",
    "receiving the state": "a description of the state has been received, the state not",
    # Ranks that serve.
    "connecting the ranks": "before gloo connects those that train and those that serve",
    "asking for a step": "before a worker asks one of the servers for a step",
    "summing": "before a server adds up the gradients of a message",
    "server step": "before a server has the step made",
    # Checkpoints.
    "writing a checkpoint": "before one file of a checkpoint is written",
    "before a file is in its place": "it has been written, and has not replaced the one before",
    "before the main file is in its place": "all workers agree that the save is complete",
    "before the last checkpoint is deleted": "the next one is complete",
}
"""Each point, and when it is reached."""

_act: Callable[[str], object] | None = None


def reach(point: str) -> None:
    """Call the function that was set by :func:`on_reach`, if there is one.

    Args:
        point: The place at which this is called, one of :data:`POINTS`.
    """
    if _act is not None:
        _act(point)


@contextmanager
def on_reach(act: Callable[[str], object]) -> Iterator[None]:
    """Have a function called with the name of each point that is reached, by the thread that does.

    Args:
        act: May raise, end the process or stop it.
    """
    global _act
    before, _act = _act, act
    try:
        yield
    finally:
        _act = before
