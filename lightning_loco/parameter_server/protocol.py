"""Messages and tensors between two ranks: the transport, its connections and its message format."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.compression import CODECS, Codec, check_compression
from lightning_loco.costs.server_times import BUCKET_BYTES
from lightning_loco.distributed.json_messages import MAX_BYTES, read, write
from lightning_loco.distributed.watchdog import Watchdog, WorkerFailure, capitalized
from lightning_loco.distributed.worker_group import is_of_a_signal
from lightning_loco.parameter_server.buckets import ParamBucket, plan_buckets
from lightning_loco.parameter_server.keep_alive import KeepAlive, WaitResult, WaitThread

FRAME_BYTES = 64
_UNLIMITED_S = 10 * 365 * 24 * 3600.0
_MAX_PENDING_SENDS = 64

Hyperparameters = list[dict[str, Any]]
"""One entry per parameter group: name and number, boolean or list of these."""

# Weak keys, so that a group that is destroyed can be freed.
_runs: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


class MessageTag(enum.IntEnum):
    """Tags of point-to-point messages; messages with the same tag arrive in order."""

    REQUESTS = 1
    REPLIES = 2
    GRADIENTS = 3
    WEIGHTS = 4
    STATE = 5


class MessageKind(enum.IntEnum):
    """The kind of a client's request, or a server's reply."""

    REPLY = 0
    WEIGHTS = 1  # the parameters, at the start
    STEP = 2  # a step with the gradients that follow; without a StepRequest they are streamed
    STEP_REQUEST = 3  # the StepRequest of a streamed step, after its gradients
    MEAN_GRADIENT = 4  # the mean of the gradients that follow, without a step
    FINITE = 5  # whether all workers have finite gradients
    SYNC_POINT = 6  # a reply once no worker takes steps
    STATE = 7  # the optimizer's state
    LOAD_STATE = 8  # load the optimizer state that follows
    PARAMETERS = 9  # the parameters in full precision
    LOAD_PARAMETERS = 10  # load the parameters that follow, in full precision
    LEAVE = 11  # no more requests follow: this client has ended or, with a failure, has failed
    KEEP_ALIVE = 12  # nothing: this client is alive, and late because it waits for another rank


class Message(NamedTuple):
    """A short message of plain values.

    Attributes:
        kind: Kind of the message.
        content: Values that JSON supports.
    """

    kind: MessageKind
    content: dict[str, Any]

    def to_frames(self) -> list[bytes]:
        """Return the message as a frame of fixed length, and a second one if it is longer."""
        text = write([self.kind, self.content])
        size = len(text).to_bytes(8, "little")
        # gloo's receiver must know the length before: the first frame says that of the second.
        frames = [(size + text)[:FRAME_BYTES].ljust(FRAME_BYTES), text[FRAME_BYTES - 8 :]]
        return [frame for frame in frames if frame]

    @property
    def tag(self) -> MessageTag:
        """Tag with which the message is sent."""
        return MessageTag.REPLIES if self.kind == MessageKind.REPLY else MessageTag.REQUESTS

    @classmethod
    def from_text(cls, text: bytes, sender: str) -> Message:
        """Read the text of a message; RuntimeError, which names the sender, if it is invalid."""
        match read(text, sender):
            case [int(kind), dict(content)] if type(kind) is int and kind in list(MessageKind):
                return cls(MessageKind(kind), content)
            case other:
                raise RuntimeError(f"{sender} has sent an invalid message: {str(other)[:100]}")


class ClippingSettings(NamedTuple):
    """How to clip the mean gradient before the step.

    Attributes:
        by: ``"norm"``, of all gradients together, or ``"value"``, of each element.
        limit: Positive.
    """

    by: Literal["norm", "value"]
    limit: float


class StepRequest(NamedTuple):
    """A worker's request for one step, besides its gradients.

    Attributes:
        missing: Indices of the parameters without a gradient.
        hyperparameters: Learning rates and other numbers, if this worker has changed them.
        clip: How to clip.
        stop: Why all workers should stop after this step, if this one was asked to.
        changed: Checksum of this worker's parameters, if they were changed outside the optimizer.
    """

    missing: tuple[int, ...] = ()
    hyperparameters: Hyperparameters | None = None
    clip: ClippingSettings | None = None
    stop: str | None = None
    changed: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are not empty."""
        return {name: value for name, value in self._asdict().items() if value}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> StepRequest:
        """Read what :meth:`to_dict` has made."""
        request = cls(**content)
        clip = None if request.clip is None else ClippingSettings(*request.clip)
        return request._replace(missing=tuple(request.missing), clip=clip)

    @classmethod
    def merge(cls, requests: Sequence[StepRequest]) -> StepRequest:
        """Combine the requests of all workers; where they differ, the first one counts.

        A parameter is left out of the step if no worker has a gradient for it.
        """
        missing = set(requests[0].missing).intersection(*(r.missing for r in requests))

        def first(name: str) -> Any:
            return next((value for r in requests if (value := getattr(r, name))), None)

        return cls(tuple(sorted(missing)), first("hyperparameters"), first("clip"), first("stop"))


class Unreachable(WorkerFailure):
    """Another rank has ended, or has not responded within the timeout; the message says which."""


@dataclasses.dataclass(frozen=True)
class Transport:
    """How ranks are connected; all fields except ``watchdog`` must be equal on all ranks.

    Args:
        group: All ranks, with gloo. Default: the default process group.
        bucket_bytes: Size of a bucket in bytes; smaller parameters share a bucket.
        compression: How gradients and parameters are encoded when they are sent: ``"bf16"``,
            ``"fp16"``, ``"int8"``, or a codec such as ``Int8(block=128)``. Sums and steps use full
            precision. Default: not encoded.
        timeout_s: Longest wait for another rank, in seconds. Default: the group's timeout.
        watchdog: Reports which rank has failed, and why.

    Raises:
        TypeError: If ``compression`` is not a name or a codec.
        ValueError: If it cannot be used here; see :func:`as_codec`.
    """

    group: dist.ProcessGroup | None = None
    bucket_bytes: int = BUCKET_BYTES
    compression: str | Codec | None = None
    timeout_s: float | None = None
    watchdog: Watchdog | None = None

    def __post_init__(self) -> None:
        as_codec(self.compression)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """``group``, or the default process group."""
        group = self.group if self.group is not None else dist.group.WORLD
        assert group is not None
        return group

    def plan_buckets(self, params: Sequence[Tensor]) -> list[ParamBucket]:
        """Return the buckets in which parameters, and their gradients, are sent."""
        return plan_buckets(params, self.bucket_bytes, as_codec(self.compression))

    def next_run(self) -> int:
        """Return the number of the next run in the group, from 0; call it once per run and rank."""
        group = self.process_group
        _runs[group] = _runs.get(group, -1) + 1
        return _runs[group]

    def connect(
        self, rank: int, name: str, run: int = 0, keep_alive: KeepAlive | None = None
    ) -> RankConnection:
        """Return a connection to another rank; servers pass ``keep_alive``."""
        return RankConnection(self, rank, capitalized(name), run, keep_alive)

    def raise_if_failed(self) -> None:
        """Raise the WorkerFailure that another rank has reported before it ended, if any."""
        if self.watchdog is not None:
            self.watchdog.raise_if_failed()


def as_codec(given: Any) -> Codec | None:
    """Return the codec for gradients and parameters; None if nothing is encoded.

    Parameters are encoded as well, so the loss of precision must be small. A worker may skip a
    step, so a codec must not depend on earlier messages. ``"none"`` is None.

    Raises:
        TypeError: If it is no name and no codec.
        ValueError: If the name is unknown, the codec is too lossy, or it uses error feedback.

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
            f"{codec} writes too roughly for a remote optimizer, where parameters are sent in "
            'every step. Use compression="int8", "bf16" or "fp16", or an algorithm with rounds.'
        )
    if named is not codec:
        raise ValueError(
            f"{named} cannot be used with a remote optimizer: a worker may miss messages, so no "
            "residual can be kept from one message to the next. Give the codec alone: "
            f"compression={codec}."
        )
    return codec


class RankConnection:
    """Sends and receives messages and tensors to and from one other rank.

    Args:
        transport: How the ranks are connected.
        rank: The other rank.
        name: Name of the other rank for error messages.
        run: Number of the run in this group; selects the tags, so that messages of an earlier run
            are not received.
        keep_alive: Sends keep-alives while a server waits. Its waits then run in a thread, so that
            connections to other ranks survive a timeout. None on workers.

    Attributes:
        bytes_sent: All bytes sent to the other rank.
        bytes_received: All bytes received, or expected.
        last_keep_alive_s: When the other rank has last sent a keep-alive, on the monotonic clock.
        other_servers: Servers that receive a keep-alive when the server at the other end sends one
            to this rank.
    """

    def __init__(
        self,
        transport: Transport,
        rank: int,
        name: str,
        run: int = 0,
        keep_alive: KeepAlive | None = None,
    ) -> None:
        self.name = name
        self.rank = rank
        self._group_or_none: dist.ProcessGroup | None = transport.process_group
        self._timeout_s = transport.timeout_s
        # Tensors that a run has left unreceived must not be taken for those of the next one.
        self._first_tag = run * (max(MessageTag) + 1)
        self._watchdog = transport.watchdog
        self._wait_thread = None if keep_alive is None else WaitThread(name, keep_alive)
        self._has_timed_out = False
        # On a GPU a thread sends requests, while the main thread sends keep-alives.
        self._send_lock = threading.Lock()
        self._pending_sends: deque[dist.Work] = deque(maxlen=_MAX_PENDING_SENDS)
        self.bytes_sent = 0
        self.bytes_received = 0
        self.last_keep_alive_s = -math.inf
        self.other_servers: list[RankConnection] = []

    # ----------------------------------------------------------------- tensors

    def send(self, tensor: Tensor, tag: MessageTag) -> dist.Work:
        """Start to send a tensor, which must not change until the work is done."""
        self.bytes_sent += tensor.nbytes
        with self._explain_errors("a tensor"):
            return self._group.send([tensor], self.rank, self._first_tag + tag)

    def receive(self, tensor: Tensor, tag: MessageTag, label: str = "a tensor") -> dist.Work:
        """Start to receive into a tensor."""
        self.bytes_received += tensor.nbytes
        with self._explain_errors(label):
            return self._group.recv([tensor], self.rank, self._first_tag + tag)

    def wait(self, work: dist.Work, label: str) -> None:
        """Wait until a send or receive is done; Unreachable, which names the rank, if it fails."""
        self.start_wait(work, label)()

    def start_wait(self, work: dist.Work, label: str) -> Callable[[], None]:
        """Start to wait for a send or receive; on servers in a thread, in the order of the calls.

        Returns a function that waits for the end, as :meth:`wait` does.
        """
        if self._wait_thread is None:
            return functools.partial(self._finish, work, label, self._timeout_s)
        # A gloo wait that times out closes the connections to all ranks: the thread's has no limit.
        unlimited_s = None if self._timeout_s is None else _UNLIMITED_S
        finish = functools.partial(self._finish, work, label, unlimited_s)
        result = self._wait_thread.submit(finish)
        return functools.partial(self._wait_for_result, self._wait_thread, result, label)

    def _wait_for_result(self, wait_thread: WaitThread, result: WaitResult, label: str) -> None:
        try:
            wait_thread.wait(result, self._timeout_s, lambda: self.last_keep_alive_s)
        except TimeoutError as error:
            self._has_timed_out = True
            raise Unreachable(_unreachable_text(self.name, label)) from error

    def _finish(self, work: dist.Work, label: str, timeout_s: float | None) -> None:
        with self._explain_errors(label, timeout_s):
            work.wait() if timeout_s is None else work.wait(timedelta(seconds=timeout_s))

    def send_all(self, tensors: Iterable[Tensor], label: str) -> None:
        """Send tensors in full precision one after another, without empty ones, and wait."""
        for tensor in tensors:
            if tensor.numel():
                values = tensor.detach().cpu().contiguous()
                self.wait(self.send(values.view(-1), MessageTag.STATE), label)

    def receive_all(self, like: Iterable[Tensor], label: str) -> Iterator[Tensor]:
        """Receive what :meth:`send_all` sends: tensors of these shapes and dtypes."""
        for tensor in like:
            memory = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            if memory.numel():
                self.wait(self.receive(memory.view(-1), MessageTag.STATE), label)
            yield memory

    # ---------------------------------------------------------------- messages

    def send_request(self, message: Message) -> None:
        """Send a request to a server; workers, and all in the last one, wait until it is sent."""
        with self._explain_errors("a message"):
            sends = self._send_message(message)
        # A server would wait here for a rank that may be lost; the last message must arrive.
        if self._wait_thread is None or message.kind == MessageKind.LEAVE:
            for work in sends:
                self.wait(work, "a message")

    def receive_request(self) -> Message:
        """Wait for a client's next request in this thread, without a timeout."""

        def wait(work: dist.Work) -> None:
            self._finish(work, "a message", _UNLIMITED_S)

        return self._receive_message(MessageTag.REQUESTS, wait)

    def send_reply(self, content: dict[str, Any]) -> None:
        """Start to send a reply to a client, which may not wait for it yet."""
        with self._explain_errors("a message"):
            self._send_message(Message(MessageKind.REPLY, content))

    def receive_reply(self) -> dict[str, Any]:
        """Wait for a server's reply."""
        return self._receive_message(
            MessageTag.REPLIES, lambda work: self.wait(work, "a message")
        ).content

    def try_send(self, kind: MessageKind, content: dict[str, Any]) -> list[dist.Work]:
        """Start to send a message; return the sends, or none if the other rank is unreachable."""
        with suppress(RuntimeError):
            sends = self._send_message(Message(kind, content))
            return [] if self._has_timed_out else sends
        return []

    def _send_message(self, message: Message) -> list[dist.Work]:
        """Start to send a message; no other thread's frames come between its frames."""
        sends = []
        with self._send_lock:
            for frame in message.to_frames():
                self.bytes_sent += len(frame)
                tensor = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
                sends.append(self._group.send([tensor], self.rank, self._first_tag + message.tag))
        self._pending_sends += sends  # a send needs its work, which has the memory, to complete
        return sends

    def _receive_message(self, tag: MessageTag, wait: Callable[[dist.Work], object]) -> Message:
        first = self._receive_frame(FRAME_BYTES, tag, wait)
        size, text = int.from_bytes(first[:8], "little"), first[8:]
        if size > MAX_BYTES:  # before memory is allocated for it
            raise RuntimeError(f"{self.name} has announced a message of {size} bytes.")
        if size > len(text):
            text += self._receive_frame(size - len(text), tag, wait)
        return Message.from_text(text[:size], self.name)

    def _receive_frame(
        self, size: int, tag: MessageTag, wait: Callable[[dist.Work], object]
    ) -> bytes:
        memory = bytearray(size)
        wait(self.receive(torch.frombuffer(memory, dtype=torch.uint8), tag, "a message"))
        return bytes(memory)

    # --------------------------------------------------------------------- end

    def release(self) -> None:
        """Drop the references to the process group; nothing can be sent or received afterwards."""
        self._group_or_none = self._watchdog = None
        self._pending_sends.clear()

    def close(self) -> None:
        """End the thread that waits for the other rank, if there is one."""
        if self._wait_thread is not None:
            self._wait_thread.close()

    @property
    def _group(self) -> dist.ProcessGroup:
        if self._group_or_none is None:
            raise RuntimeError(
                f"{self.name}: this rank has closed its connection. Make a new RemoteOptimizer."
            )
        return self._group_or_none

    def _explain_errors(
        self, label: str, timeout_s: float | None = None
    ) -> AbstractContextManager[None]:
        return explain_unreachable(self.name, label, self._watchdog, timeout_s)


@contextmanager
def explain_unreachable(
    name: str, label: str, watchdog: Watchdog | None, timeout_s: float | None = None
) -> Iterator[None]:
    """Turn a backend's error into one that names the rank to blame.

    The report of a watchdog becomes the error. After a wait of ``timeout_s`` seconds all reports
    have arrived, and are not waited for.
    """
    start, failure = time.monotonic(), None
    try:
        yield
    except RuntimeError as error:
        if is_of_a_signal(error):
            raise
        if watchdog is not None:
            is_timeout = timeout_s is not None and time.monotonic() - start >= timeout_s
            failure = watchdog.failure if is_timeout else watchdog.wait_for_failure()
        raise Unreachable(failure or _unreachable_text(name, label)) from error


def _unreachable_text(name: str, label: str) -> str:
    return (
        f"{name}: {label} could not be exchanged. It has ended, or is later than the timeout. "
        "Check its output first."
    )
