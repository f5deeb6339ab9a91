"""What travels between two ranks: small notes in words and numbers, and tensors."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.compression import CODECS, Codec, check_compression
from lightning_loco.distributed.notes import MAX_BYTES, read
from lightning_loco.distributed.watchdog import Watchdog
from lightning_loco.parameter_server.buckets import BUCKET_BYTES, Message, plan_messages
from lightning_loco.parameter_server.keep_alive import Meanwhile, Outcome, Waiter

FRAME_BYTES = 512
_FOREVER_S = 10 * 365 * 24 * 3600.0
_POSTED = 64

Sending = tuple[dist.Work, Tensor]
"""What was begun, and the memory that it needs until it is done."""

_runs: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


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
    WAITING = 13  # nothing: what is to come is late because this client waits, too


LAST_WORDS = (Kind.LEAVE, Kind.FAIL)


class Note(NamedTuple):
    """A short message.

    Attributes:
        kind: What is wanted.
        content: Whatever JSON can hold.
    """

    kind: Kind
    content: dict[str, Any]


class Unreachable(RuntimeError):
    """Another rank is gone or too late.

    Attributes:
        rank: Which.
    """

    def __init__(self, text: str, rank: int) -> None:
        super().__init__(text)
        self.rank = rank


class Wire:
    """Messages to and from one other rank.

    Args:
        transport: How the ranks are connected.
        rank: The other one.
        name: Who that is, for error messages.
        run: Number of the run in this group; messages of an earlier one never come into it.
        meanwhile: What a server does while it waits; the connections to other ranks then outlive a
            wait that is too late.

    Attributes:
        bytes_sent: All that has left for the other rank.
        bytes_received: All that has come or will.
        last_sign_s: When the other rank has last asked for patience, on the monotonic clock.
        waiting_too: Servers that wait for this rank while it waits for the other one.
    """

    def __init__(
        self,
        transport: Transport,
        rank: int,
        name: str,
        run: int = 0,
        meanwhile: Meanwhile | None = None,
    ) -> None:
        self.name = name
        self.rank = rank
        self._chosen_group: dist.ProcessGroup | None = transport.process_group
        self._timeout_s = transport.timeout_s
        self._first_tag = run * (max(Lane) + 1)
        self._watchdog = transport.watchdog
        self._waiter = None if meanwhile is None else Waiter(name, meanwhile)
        self._is_given_up = False
        self._posting = threading.Lock()
        self._posted: deque[Sending] = deque(maxlen=_POSTED)
        self.bytes_sent = 0
        self.bytes_received = 0
        self.last_sign_s = -math.inf
        self.waiting_too: list[Wire] = []

    def send(self, tensor: Tensor, lane: Lane) -> dist.Work:
        """Begin to send; ``tensor`` must stay as it is until the work is done."""
        self.bytes_sent += tensor.nbytes
        with self._explained("a message"):
            return self._group.send([tensor], self.rank, self._first_tag + lane)

    def receive(self, tensor: Tensor, lane: Lane) -> dist.Work:
        """Begin to receive into ``tensor``."""
        self.bytes_received += tensor.nbytes
        with self._explained("a message"):
            return self._group.recv([tensor], self.rank, self._first_tag + lane)

    def wait(self, work: dist.Work, what: str) -> None:
        """Wait for what was begun.

        Raises:
            Unreachable: With the name of the other rank, if it is gone or too late.
        """
        self.begin_wait(work, what)()

    def begin_wait(self, work: dist.Work, what: str) -> Callable[[], None]:
        """Begin to wait for what was begun; servers do it in a thread, in the order of the calls.

        Returns:
            What waits for the end of that, as :meth:`wait` does.
        """
        if self._waiter is None:
            return functools.partial(self._finish, work, what, self._timeout_s)
        forever_s = None if self._timeout_s is None else _FOREVER_S
        outcome = self._waiter.begin(functools.partial(self._finish, work, what, forever_s))
        return functools.partial(self._await, self._waiter, outcome, what)

    def _await(self, waiter: Waiter, outcome: Outcome, what: str) -> None:
        try:
            waiter.wait(outcome, self._timeout_s, lambda: self.last_sign_s)
        except TimeoutError as error:
            self._is_given_up = True
            raise Unreachable(_late(self.name, what), self.rank) from error

    def ask(self, note: Note) -> None:
        """Send a request to a server, and wait until it has it if nothing follows."""
        with self._explained("a note"):
            sending = self._post(note, Lane.REQUESTS)
        if self._waiter is None or note.kind in LAST_WORDS:
            for work, _ in sending:
                self.wait(work, "a note")

    def next_request(self) -> Note:
        """Wait for a client's next request in this thread, however long it takes."""

        def wait(work: dist.Work) -> None:
            self._finish(work, "a note", _FOREVER_S)

        return self._receive_note(Lane.REQUESTS, wait)

    def answer(self, content: dict[str, Any]) -> None:
        """Begin to send an answer to a client that may not wait for one yet.

        Raises:
            Unreachable: If the client is gone.
        """
        with self._explained("a note"):
            self._post(Note(Kind.ANSWER, content), Lane.ANSWERS)

    def last_answer(self, content: dict[str, Any]) -> list[Sending]:
        """As :meth:`answer`, without a word if the client is gone, to wait for it."""
        return self._last(Note(Kind.ANSWER, content), Lane.ANSWERS)

    def last_request(self, note: Note) -> list[Sending]:
        """Begin to send a request; what to wait for, which is nothing once a wait was too late."""
        sending = self._last(note, Lane.REQUESTS)
        return [] if self._is_given_up else sending

    def answered(self) -> dict[str, Any]:
        """Wait for a server's answer."""
        return self._receive_note(Lane.ANSWERS, lambda work: self.wait(work, "a note")).content

    def reassure_client(self) -> None:
        """Tell a client that its answer is late because this server waits, too."""
        with suppress(RuntimeError):
            self._post(Note(Kind.ANSWER, {"waiting": True}), Lane.ANSWERS)

    def reassure_server(self) -> None:
        """Tell a server that what it waits for is late because this rank waits, too."""
        with suppress(RuntimeError):
            self._post(Note(Kind.WAITING, {}), Lane.REQUESTS)

    def let_go(self) -> None:
        """Keep the group no longer, nor what holds it: no more messages can be exchanged."""
        self._chosen_group = self._watchdog = None
        self._posted.clear()

    @property
    def _group(self) -> dist.ProcessGroup:
        if self._chosen_group is None:
            raise RuntimeError(
                f"{self.name}: this rank has closed its connection. Make a new RemoteOptimizer."
            )
        return self._chosen_group

    def end(self) -> None:
        """End the thread that waits for the other rank, if there is one, as soon as it can."""
        if self._waiter is not None:
            self._waiter.end()

    def _last(self, note: Note, lane: Lane) -> list[Sending]:
        with suppress(RuntimeError):
            return self._post(note, lane)
        return []

    def _post(self, note: Note, lane: Lane) -> list[Sending]:
        """Begin to send a note; its frames follow each other, whichever thread sends others."""
        with self._posting:
            sending = [self._begin_frame(frame, lane) for frame in _frames(note)]
        self._posted += sending
        return sending

    def _begin_frame(self, frame: bytes, lane: Lane) -> Sending:
        self.bytes_sent += len(frame)
        tensor = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        return self._group.send([tensor], self.rank, self._first_tag + lane), tensor

    def _receive_note(self, lane: Lane, wait: Callable[[dist.Work], object]) -> Note:
        first = self._receive_frame(FRAME_BYTES, lane, wait)
        size, text = int.from_bytes(first[:8], "little"), first[8:]
        if size > MAX_BYTES:
            raise RuntimeError(f"{self.name} has announced a note of {size} bytes.")
        if size > len(text):
            text += self._receive_frame(size - len(text), lane, wait)
        return _as_note(text[:size], self.name)

    def _receive_frame(self, size: int, lane: Lane, wait: Callable[[dist.Work], object]) -> bytes:
        self.bytes_received += size
        memory = bytearray(size)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        with self._explained("a note"):
            work = self._group.recv([tensor], self.rank, self._first_tag + lane)
        wait(work)
        return bytes(memory)

    def _finish(self, work: dist.Work, what: str, timeout_s: float | None) -> None:
        with self._explained(what, timeout_s):
            work.wait() if timeout_s is None else work.wait(timedelta(seconds=timeout_s))

    def _explained(self, what: str, timeout_s: float | None = None) -> AbstractContextManager[None]:
        return explained(self.name, self.rank, what, self._watchdog, timeout_s)


@contextmanager
def explained(
    name: str, rank: int, what: str, watchdog: Watchdog | None, timeout_s: float | None = None
) -> Iterator[None]:
    """Turn a backend's error into one that names the other rank, or whoever has failed.

    Args:
        name: Who the other rank is.
        rank: Which.
        what: What is exchanged.
        watchdog: Knows who has failed, which is then the error.
        timeout_s: Longest wait inside, in seconds: after it the reports of others have come.
    """
    began, failure = time.monotonic(), None
    try:
        yield
    except RuntimeError as error:
        if watchdog is not None:
            is_late = timeout_s is not None and time.monotonic() - began >= timeout_s
            failure = watchdog.failure if is_late else watchdog.wait_for_failure()
        raise Unreachable(failure or _late(name, what), rank) from error


def _late(name: str, what: str) -> str:
    return (
        f"{name}: {what} could not be exchanged. It has ended, or is later than the timeout. Look "
        "into its output first."
    )


def _as_note(text: bytes, sender: str) -> Note:
    match read(text, sender):
        case [int(kind), dict(content)] if type(kind) is int and kind in list(Kind):
            return Note(Kind(kind), content)
        case other:
            raise RuntimeError(f"{sender} has sent no note: {str(other)[:100]}")


def _frames(note: Note) -> list[bytes]:
    """A note as one message of a fixed length, and a second one if it is longer."""
    text = json.dumps([note.kind, note.content]).encode()
    size = len(text).to_bytes(8, "little")
    frames = [(size + text)[:FRAME_BYTES].ljust(FRAME_BYTES), text[FRAME_BYTES - 8 :]]
    return [frame for frame in frames if frame]


@dataclasses.dataclass(frozen=True)
class Transport:
    """How this rank reaches the others; all but ``watchdog`` must be alike on all ranks.

    Args:
        group: All ranks, with gloo. Default: the default process group.
        bucket_bytes: Longest message; smaller parameters travel together.
        compression: How gradients and parameters are written on the wire: ``"bf16"``, ``"fp16"``,
            ``"int8"``, or a codec such as ``Int8(block=128)``; sums and steps keep their precision.
            Default: as they are.
        timeout_s: Longest wait for another rank, in seconds. Default: the group's.
        watchdog: Knows which rank has failed, and why.

    Raises:
        TypeError: If ``compression`` is nothing of the kind.
        ValueError: If it cannot be used here; see :func:`as_codec`.
    """

    group: dist.ProcessGroup | None = None
    bucket_bytes: int = BUCKET_BYTES
    compression: str | Codec | None = None
    timeout_s: float | None = None
    watchdog: Watchdog | None = None

    def __post_init__(self) -> None:
        """Check the compression."""
        as_codec(self.compression)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """``group``, or the default process group."""
        group = self.group if self.group is not None else dist.group.WORLD
        assert group is not None
        return group

    def plan(self, params: Sequence[Tensor]) -> list[Message]:
        """How parameters, and their gradients, are cut into messages."""
        return plan_messages(params, self.bucket_bytes, as_codec(self.compression))

    def next_run(self) -> int:
        """The number of a run, from 0 on; every rank of the group must ask for it once in each."""
        group = self.process_group
        _runs[group] = _runs.get(group, -1) + 1
        return _runs[group]

    def wire(self, rank: int, name: str, run: int = 0, meanwhile: Meanwhile | None = None) -> Wire:
        """A connection to another rank; a server says what to do while it waits for that."""
        return Wire(self, rank, name[0].upper() + name[1:], run, meanwhile)

    def look_around(self) -> None:
        """Raise what another rank has reported before it ended.

        Raises:
            RuntimeError: If one has failed.
        """
        if self.watchdog is not None:
            self.watchdog.raise_if_failed()


def as_codec(given: Any) -> Codec | None:
    """The codec of gradients and parameters.

    Parameters travel too, and a worker may have no part in a step: nothing is remembered from one
    message to the next, and what a codec loses must be small.

    Args:
        given: None or ``"none"``, the name of a codec, or a codec.

    Returns:
        The codec; None if all travels as it is.

    Raises:
        TypeError: If it is none of these.
        ValueError: If the name is unknown, the codec is rough, or an error feedback is asked for.

    Example:
        >>> as_codec("int8")
        Int8(block=256)
    """
    check_compression(given)
    if given is None or given == "none":
        return None
    named = CODECS[given]() if isinstance(given, str) else given
    codec: Codec = named if isinstance(named, Codec) else named.codec
    if codec.is_rough:
        raise ValueError(
            f"{codec} writes too roughly for a remote optimizer, where parameters travel in every "
            'step. Use compression="int8", "bf16" or "fp16", or an algorithm with rounds.'
        )
    if named is not codec:
        raise ValueError(
            f"{named} has nothing to feed back to: under a remote optimizer a worker may miss "
            "messages, so nothing is remembered from one to the next. Give the codec alone: "
            f"compression={codec}."
        )
    return codec
