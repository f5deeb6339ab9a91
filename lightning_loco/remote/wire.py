"""What travels between two ranks: small notes in words and numbers, and tensors."""

from __future__ import annotations

import enum
import json
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.comm.watchdog import Watchdog

FRAME_BYTES = 512
_FOREVER_S = 10 * 365 * 24 * 3600.0


class Lane(enum.IntEnum):
    """Kinds of traffic: what is in one lane arrives in order, whatever travels in the others."""

    REQUESTS = 1
    ANSWERS = 2
    GRADIENTS = 3
    WEIGHTS = 4
    STATE = 5


class Kind(enum.IntEnum):
    """What a client asks for, or that it is a server's answer."""

    ANSWER = 0
    WEIGHTS = 1  # the parameters, at the start
    STEP = 2  # gradients follow; all about them is in this note
    STREAM = 3  # gradients follow while the backward pass runs; then a note of kind CALL
    CALL = 4
    FINITE = 5  # whether all workers have finite gradients
    MEET = 6  # wait until no worker makes steps
    STATE = 7  # the optimizer's state
    LOAD_STATE = 8  # a state for the optimizer follows
    PARAMETERS = 9  # the parameters in full precision
    LOAD_PARAMETERS = 10  # other parameters follow, in full precision
    LEAVE = 11
    FAIL = 12  # leave because of an error


class Note(NamedTuple):
    """A short message.

    Attributes:
        kind: What is wanted.
        content: Whatever JSON can hold.
    """

    kind: Kind
    content: dict[str, Any]


Sending = tuple[dist.Work, Tensor]
"""What was begun, and the memory that it needs until it is done."""


class Wire:
    """Messages to and from one other rank.

    Args:
        rank: The other one, in ``group``.
        name: Who that is, for error messages.
        group: Default: the default process group.
        timeout_s: Longest wait, in seconds. Default: that of the group.
        watchdog: Knows who has failed.
    """

    def __init__(
        self,
        rank: int,
        name: str,
        group: dist.ProcessGroup | None = None,
        timeout_s: float | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.name = name
        self.rank = rank
        chosen = group if group is not None else dist.group.WORLD
        assert chosen is not None
        self._group = chosen
        self._timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        self._watchdog = watchdog
        self.bytes_sent = 0
        self.bytes_received = 0

    def send(self, tensor: Tensor, lane: Lane) -> dist.Work:
        """Begin to send; ``tensor`` must stay as it is until the work is done."""
        self.bytes_sent += tensor.nbytes
        with self._explained("a message"):
            return self._group.send([tensor], self.rank, lane)

    def receive(self, tensor: Tensor, lane: Lane) -> dist.Work:
        """Begin to receive into ``tensor``."""
        self.bytes_received += tensor.nbytes
        with self._explained("a message"):
            return self._group.recv([tensor], self.rank, lane)

    def wait(self, work: dist.Work, what: str) -> None:
        """Wait for what was begun.

        Raises:
            RuntimeError: That names the other rank, if it is gone or too late.
        """
        with self._explained(what):
            work.wait() if self._timeout is None else work.wait(self._timeout)

    def ask(self, note: Note) -> None:
        """Send a request to a server."""
        self._send_note(note, Lane.REQUESTS)

    def next_request(self) -> Note:
        """Wait for a client's next request, however long it takes."""
        return self._receive_note(Lane.REQUESTS, timedelta(seconds=_FOREVER_S))

    def answer(self, content: dict[str, Any]) -> None:
        """Send an answer to a client."""
        self._send_note(Note(Kind.ANSWER, content), Lane.ANSWERS)

    def answer_later(self, content: dict[str, Any]) -> list[Sending]:
        """Begin to send an answer to a client that may not wait for one yet."""
        frames = _frames(Note(Kind.ANSWER, content))
        return [self._begin_frame(frame, Lane.ANSWERS) for frame in frames]

    def answered(self) -> dict[str, Any]:
        """Wait for a server's answer."""
        return self._receive_note(Lane.ANSWERS, self._timeout).content

    def _send_note(self, note: Note, lane: Lane) -> None:
        for frame in _frames(note):
            work, _ = self._begin_frame(frame, lane)
            self.wait(work, "a note")

    def _begin_frame(self, frame: bytes, lane: Lane) -> Sending:
        self.bytes_sent += len(frame)
        tensor = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        with self._explained("a note"):
            return self._group.send([tensor], self.rank, lane), tensor

    def _receive_note(self, lane: Lane, timeout: timedelta | None) -> Note:
        first = self._receive_frame(FRAME_BYTES, lane, timeout)
        size, text = int.from_bytes(first[:8], "little"), first[8:]
        if size > len(text):
            text += self._receive_frame(size - len(text), lane, self._timeout)
        kind, content = json.loads(text[:size])
        return Note(Kind(kind), content)

    def _receive_frame(self, size: int, lane: Lane, timeout: timedelta | None) -> bytes:
        self.bytes_received += size
        memory = bytearray(size)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        with self._explained("a note"):
            work = self._group.recv([tensor], self.rank, lane)
            work.wait() if timeout is None else work.wait(timeout)
        return bytes(memory)

    def _explained(self, what: str) -> _Explained:
        return _Explained(self.name, what, self._watchdog)


class _Explained:
    """Turns a backend's error into one that names the other rank, or whoever has failed."""

    def __init__(self, name: str, what: str, watchdog: Watchdog | None) -> None:
        self._name = name
        self._what = what
        self._watchdog = watchdog

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not isinstance(error, RuntimeError):
            return
        failure = None if self._watchdog is None else self._watchdog.wait_for_failure()
        raise RuntimeError(
            failure
            or f"{self._name}: {self._what} could not be exchanged. It has ended, or is later than "
            "the timeout. Look into its output first."
        ) from error


def _frames(note: Note) -> list[bytes]:
    """A note as one message of a fixed length, and a second one if it is longer."""
    text = json.dumps([note.kind, note.content]).encode()
    size = len(text).to_bytes(8, "little")
    frames = [(size + text)[:FRAME_BYTES].ljust(FRAME_BYTES), text[FRAME_BYTES - 8 :]]
    return [frame for frame in frames if frame]
