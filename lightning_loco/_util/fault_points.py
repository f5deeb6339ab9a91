"""Named points in the code at which a test can make a process fail.

Reaching a point does nothing, unless a test has set a function by :func:`on_reach`, which is then
called in all threads of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

POINTS = {
    # Local steps and rounds.
    "local step": "after a local step, before it is counted",
    "packing": "before parameters or gradients are packed into a message",
    "before sending": "before a message is sent",
    "after sending": "a message was sent, and no other message has been received yet",
    "after receiving": "the result of an exchange was received, and nothing has changed yet",
    "outer step": "before the received result is applied",
    # Elastic members.
    "before the group": "before the process group of a plan is opened, unless it is open already",
    "making the group": "before torchft makes a new process group",
    "statuses": "before the statuses of the members are gathered",
    "exchange": "before messages are exchanged between the members",
    "confirming": "before a member confirms that it has received",
    "after confirming": "all members have confirmed that they have received",
    "copying the state": "before a member copies its state for a newcomer",
    "before the state is sent": "a newcomer waits for the state, which was copied already",
    "sending the state": "a description of the state was sent, the state was not",
    "receiving the state": "a description of the state was received, the state was not",
    # Server ranks.
    "connecting the ranks": "before gloo connects workers and servers",
    "requesting a step": "before a worker requests a step from one of the servers",
    "summing": "before a server adds up the gradients of a message",
    "server step": "before a server takes the optimizer step",
    # Checkpoints.
    "writing a checkpoint": "before one file of a checkpoint is written",
    "before a file is in its place": "it was written, and has not replaced the previous one yet",
    "before the main file is in its place": "all workers agree that the checkpoint is complete",
    "before the last checkpoint is deleted": "the new checkpoint is complete",
}
"""The name of each point, and when it is reached."""

_function: Callable[[str], object] | None = None


def reach(point: str) -> None:
    """Call the function that :func:`on_reach` has set, if any, with one of :data:`POINTS`."""
    if _function is not None:
        _function(point)


@contextmanager
def on_reach(function: Callable[[str], object]) -> Iterator[None]:
    """Call a function with the name of each point that is reached, in the thread that reaches it.

    It may raise an error, or end or stop the process.
    """
    global _function
    before, _function = _function, function
    try:
        yield
    finally:
        _function = before
