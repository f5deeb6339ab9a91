"""Costs of rounds in seconds and bytes, from sizes, speeds and links alone.

Nothing is trained: the schedule of a real run says when rounds begin and end, and all workers are
one NumPy vector of times. So 100,000 workers with 100 billion parameters take seconds. The
simulation takes bytes and the times of local steps from here, and PyTorch is not imported.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from lightning_loco._util.codecs import CODEC_TABLE, Encoding
from lightning_loco.costs import Array, LinkTimes, TransferTimes, draw, messages_of
from lightning_loco.costs.methods import METHOD_TABLE
from lightning_loco.costs.server_times import ServerTimes
from lightning_loco.schedules import (
    EverySteps,
    Schedule,
    StepInfo,
    hidden_rounds,
    streaming_rounds,
)
from lightning_loco.topology import Topology

ExchangeKind = Literal["mean", "gather", "neighbors", "server"]
"""All-reduce, all-gather, messages to the neighbors in a topology, or to a server and back."""

ENCODINGS = {name: row.encoding for name, row in CODEC_TABLE.items()}
"""The sizes of messages by the names of codecs; ``"none"`` is float32."""


class Traffic(NamedTuple):
    """The messages of each worker in an exchange.

    Attributes:
        kind: How messages move.
        num_bytes: Of all messages of a worker in a mean or gather; otherwise of one message.
        hops: Messages that follow each other, each of which adds a latency.
    """

    kind: ExchangeKind
    num_bytes: int
    hops: int

    @classmethod
    def of(cls, kind: ExchangeKind, numel: int, num_workers: int, encoding: Encoding) -> Traffic:
        r"""Return the traffic of ``numel`` values.

        With B encoded bytes and N workers, a mean sends :math:`2 B (N - 1) / N` in
        :math:`2 (N - 1)` hops of a ring, or in 2 hops if it is compressed; a sparse one sends
        :math:`B (N - 1)` in one hop. A gather sends :math:`B (N - 1)` in :math:`N - 1` hops of a
        ring; neighbors and a server get B each.

        Example:
            >>> Traffic.of("mean", 1000, 4, ENCODINGS["none"])
            Traffic(kind='mean', num_bytes=6000, hops=6)
        """
        n, size = num_workers, encoding.num_bytes(numel)
        if kind in ("neighbors", "server"):
            return cls(kind, size, 1)
        if n == 1:
            return cls(kind, 0, 0)
        if kind == "gather":
            return cls(kind, (n - 1) * size, n - 1)
        if encoding.block == 1:
            return cls(kind, 2 * (n - 1) * size // n, 2 * (n - 1))
        if encoding.is_sparse:
            return cls(kind, (n - 1) * size, 1)
        shard = -(-encoding.num_bytes(numel) // encoding.row_bytes // n) * encoding.row_bytes
        return cls(kind, size + (n - 2) * shard, 2)

    def bytes_sent(self, num_messages: int) -> int:
        """Return the bytes that a worker with ``num_messages`` receivers sends."""
        return self.num_bytes * num_messages if self.kind == "neighbors" else self.num_bytes

    def seconds(self, times: LinkTimes, topology: Topology | None, index: int) -> TransferTimes:
        """Return how long a mean, a gather or gossip takes for each worker in round ``index``.

        ValueError if gossip has no topology, or for a server, whose times :class:`ServerTimes` has.
        """
        if self.kind == "server":
            raise ValueError("The times of a server depend on when workers send. Use ServerTimes.")
        if self.kind == "neighbors":
            if topology is None:
                raise ValueError("An exchange with neighbors needs a topology, such as Ring().")
            return times.all_neighbors(self.num_bytes, topology, index)
        busy_s, latency_s = times.mean(self.num_bytes, self.hops, index)
        n = times.num_workers
        return TransferTimes(np.full(n, busy_s), np.full(n, latency_s))


@dataclasses.dataclass(frozen=True)
class StepTimes:
    r"""How long each local step of each worker takes.

    Step k of worker w takes :math:`s_w (1 + j\,u_{w k})` seconds, with u uniform in [-1, 1], drawn
    from the seed, the step and the worker.

    Args:
        step_s: Mean seconds of a local step, of each worker.
        jitter: j, from 0 to less than 1.
        seed: Of the jitter.

    Raises:
        TypeError: If the seed is not an integer.
        ValueError: If a value is out of range.

    Example:
        >>> StepTimes([1.0, 2.0]).of_step(0)
        array([1., 2.])
    """

    step_s: Sequence[float]
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "step_s", tuple(map(float, self.step_s)))
        if not all(0 <= one < math.inf for one in self.step_s):
            raise ValueError("step_s are the seconds of local steps: at least 0, and finite.")
        if not 0 <= self.jitter < 1:
            raise ValueError(
                f"jitter is the largest part by which a local step is longer or shorter, from 0 to "
                f"less than 1, got {self.jitter!r}."
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed of the jitter must be an integer, got {self.seed!r}.")

    @classmethod
    def of_spread(
        cls, num_workers: int, step_s: float, spread: float, jitter: float = 0.0, seed: int = 0
    ) -> StepTimes:
        """Return times around ``step_s``: each worker's mean differs by up to ``spread`` of it."""
        if not 0 <= spread < 1:
            raise ValueError(f"spread must be from 0 to less than 1, got {spread!r}.")
        draws = np.random.default_rng(seed).random(num_workers)
        return cls((step_s * (1 + spread * (2 * draws - 1))).tolist(), jitter, seed)

    @functools.cached_property
    def mean_s(self) -> Array:
        """The mean seconds of a local step, by worker."""
        return np.array(self.step_s)

    def seconds(self, worker: int, step: int) -> float:
        """Return the seconds of a step of one worker."""
        if not self.jitter:
            return self.step_s[worker]
        return float(self.of_step(step)[worker])

    def of_step(self, step: int) -> Array:
        """Return the seconds of a step of each worker, counted from 0."""
        if not self.jitter:
            return self.mean_s
        draws = 2 * draw(self.seed, step, len(self.step_s)) - 1
        return self.mean_s * (1 + self.jitter * draws)


@dataclasses.dataclass(frozen=True)
class Method:
    """The rounds of a method.

    Args:
        schedule: When rounds begin and end, by local steps and the same for all workers.
        kind: How messages move.
        topology: Who sends to whom, if ``kind`` is ``"neighbors"``.
        encoding: How messages are encoded.

    Raises:
        ValueError: If rounds follow the clock or differ between workers, or a topology is missing.
    """

    schedule: Schedule
    kind: ExchangeKind = "mean"
    topology: Topology | None = None
    encoding: Encoding = ENCODINGS["none"]

    def __post_init__(self) -> None:
        every = getattr(self.schedule, "sync_every", None)
        if every is None or (isinstance(every, Sequence) and len(set(every)) > 1):
            raise ValueError(
                "Costs are of rounds after a number of local steps that is the same for all "
                f"workers, got {self.schedule}. Use Simulation for others."
            )
        if (self.kind == "neighbors") != (self.topology is not None):
            raise ValueError(
                f"A topology belongs to kind='neighbors', got kind={self.kind!r} and "
                f"topology={self.topology}."
            )


METHODS = {name: row for name, row in METHOD_TABLE.items() if row.costs is not None}
"""Methods whose costs :func:`as_method` knows."""


def as_method(
    name: str,
    sync_every: int = 100,
    topology: Topology | None = None,
    encoding: Encoding = ENCODINGS["none"],
    fragments: int | None = None,
    delay: int | None = None,
) -> Method:
    """Return the rounds of a method of :data:`METHODS`, as its strategy runs them by default.

    Args:
        name: A name of :data:`METHODS`. ``"ddp"`` averages after every step, after the backward
            pass: what DDP hides behind the backward pass is not subtracted. So does
            ``"remote_optimizer"``, on a server where worker 0 is.
        sync_every: Local steps between rounds H.
        topology: For ``"gasloc"`` and ``"noloco"``.
        encoding: How messages are encoded.
        fragments: For ``"async_diloco"`` and ``"streaming_diloco"``. Default: the strategy's.
        delay: As ``fragments``: local steps until a result is applied.

    Raises:
        ValueError: If the name is unknown, or a value is out of range or does not fit the method.

    Example:
        >>> as_method("streaming_diloco", sync_every=30).schedule.num_fragments
        3
    """
    if name not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {name!r}.")
    row = METHODS[name]
    assert row.exchange != "pull"
    assert row.exchange != "syncer"
    if (fragments, delay) != (None, None) and row.costs not in ("async", "streaming"):
        raise ValueError(f"{name} has neither fragments nor a delay. Drop them.")
    schedule: Schedule
    if row.costs == "async":
        schedule = hidden_rounds(sync_every, fragments or "auto", delay)
    elif row.costs == "streaming":
        schedule = streaming_rounds(
            sync_every, fragments or "auto", "auto" if delay is None else delay
        )
    else:
        schedule = EverySteps(1 if row.costs == "every_step" else sync_every)
    return Method(schedule, row.exchange, topology, encoding)


@dataclasses.dataclass(frozen=True)
class Costs:
    """The costs of a run.

    Attributes:
        rounds: Rounds that were begun.
        steps: Local steps of each worker.
        time_s: When each worker was through, ``(N,)``, in seconds.
        compute_s: How long each has computed, ``(N,)``, in seconds.
        bytes_sent: Bytes that each worker has sent, ``(N,)``.
    """

    rounds: int
    steps: int
    time_s: Array
    compute_s: Array
    bytes_sent: Array

    @property
    def utilisation(self) -> Array:
        """Share of its time that each worker has computed, ``(N,)``."""
        return self.compute_s / np.maximum(self.time_s, 1e-300)

    @property
    def seconds_per_round(self) -> float:
        """Mean seconds from the start of a round to the start of the next one."""
        return float(self.time_s.mean()) / self.rounds

    @property
    def bytes_per_round(self) -> float:
        """Mean bytes that a worker sends in a round; of one fragment, if there are several."""
        return float(self.bytes_sent.mean()) / self.rounds


@dataclasses.dataclass
class _Sent:
    """A round that has begun.

    Attributes:
        began_at: Local steps when it began.
        begun_s: When each worker has begun it.
        known_s: When all messages for a worker have been sent.
        sending_s: Until when its link sends its own message, if it waits for no other worker.
        link_free_s: When its link is free again, if nothing else is sent.
        arrives_s: When the result is there.
    """

    began_at: int
    begun_s: Array
    known_s: Array
    sending_s: Array
    link_free_s: Array
    arrives_s: Array

    def has_arrived(self) -> bool:
        """Never: schedules by local steps do not ask."""
        return False


def estimate(
    method: Method,
    num_parameters: int,
    steps: StepTimes,
    times: LinkTimes,
    num_rounds: int = 10,
    skipped_rounds: int = 0,
) -> Costs:
    """Compute what rounds cost: the times of :class:`~lightning_loco.Simulation`, without models.

    Workers wait as in the engine: for the statuses of all workers before the next round begins, for
    the result when the schedule applies it, and for their link while it sends an earlier message.

    Args:
        method: Schedule, messages and encoding of the rounds.
        num_parameters: Number of parameters P; fragments are equal parts of them.
        steps: How long local steps take.
        times: How long messages take.
        num_rounds: Rounds to count; each exchanges one fragment.
        skipped_rounds: Rounds before these that are not counted, such as the first ones of
            overlapped rounds, which wait for nothing.

    Raises:
        ValueError: If there are not as many ``steps`` as workers, or there are no rounds.

    Example:
        >>> from lightning_loco.costs import Link, Links
        >>> times = LinkTimes(Links(Link(mbit_per_s=80)), num_workers=2)
        >>> costs = estimate(as_method("diloco", 10), 1_000_000, StepTimes([0.1, 0.1]), times)
        >>> round(costs.seconds_per_round, 9), costs.bytes_per_round
        (1.4, 4000000.0)
    """
    n, schedule = times.num_workers, method.schedule.of_worker(0)
    if len(steps.step_s) != n:
        raise ValueError(f"steps are of {len(steps.step_s)} workers, and the links of {n}.")
    if num_rounds < 1:
        raise ValueError(f"num_rounds must be at least 1, got {num_rounds}.")
    count = schedule.num_fragments
    borders = [num_parameters * part // count for part in range(count + 1)]
    traffics = [
        Traffic.of(method.kind, end - begin, n, method.encoding)
        for begin, end in zip(borders, borders[1:], strict=False)
    ]
    now, compute_s, sent_bytes = np.zeros(n), np.zeros(n), np.zeros(n)
    pending: list[_Sent | None] = [None] * count
    last: list[_Sent] = []
    start = Costs(0, 0, now, compute_s, sent_bytes)
    made = since = index = 0
    while True:
        step_s = steps.of_step(made)
        now, compute_s, made, since = now + step_s, compute_s + step_s, made + 1, since + 1
        turn = index % count
        dues = [
            schedule.due(StepInfo(made, since, index, part, math.inf, sent))
            for part, sent in enumerate(pending)
        ]
        begins = any(begin for begin, _ in dues)
        for part, (_, ends) in enumerate(dues):
            if ends and not (begins and part == turn):
                sent, pending[part] = pending[part], None
                assert sent is not None
                now = np.maximum(now, sent.arrives_s)
                if last and sent is last[-1]:
                    now = np.maximum(now, sent.begun_s.max())
        if not begins:
            continue
        if last:
            now = np.maximum(now, last[-1].begun_s.max())
        begun_s = now
        if (before := pending[turn]) is not None:
            now = np.maximum(now, before.arrives_s)
        link_free_s = now
        for sent in last:
            free_s = np.where(sent.known_s <= now, sent.link_free_s, sent.sending_s)
            link_free_s = np.maximum(link_free_s, free_s)
        sent = _send(method, traffics[turn], times, index, made, begun_s, link_free_s)
        last = [*last[-count:], sent]
        sent_bytes = sent_bytes + _bytes_sent(method, traffics[turn], n, index)
        pending[turn] = sent
        if not schedule.is_overlapped(index):
            now = np.maximum(now, sent.arrives_s)
            pending[turn] = None
        index, since = index + 1, 0
        if index == skipped_rounds:
            start = Costs(index, made, now, compute_s, sent_bytes)
        if index == skipped_rounds + num_rounds:
            break
    return Costs(
        num_rounds,
        made - start.steps,
        now - start.time_s,
        compute_s - start.compute_s,
        sent_bytes - start.bytes_sent,
    )


def _send(
    method: Method,
    traffic: Traffic,
    times: LinkTimes,
    index: int,
    began_at: int,
    begun_s: Array,
    sent_s: Array,
) -> _Sent:
    """Return when what all send at ``sent_s`` arrives."""
    if traffic.kind == "server":
        is_plain = method.encoding == ENCODINGS["none"]
        server = ServerTimes(times, traffic.num_bytes, adds_to_first=is_plain)
        known_s = float(server.gradients(sent_s, index).max())
        arrives_s = server.parameters(known_s, index)
        known = np.full_like(sent_s, known_s)
        return _Sent(began_at, begun_s, known, arrives_s, arrives_s, arrives_s)
    if method.topology is None:
        last_s = np.full_like(sent_s, sent_s.max())
    else:
        senders, receivers = messages_of(method.topology, times.num_workers, index)
        last_s = sent_s.copy()
        np.maximum.at(last_s, receivers, sent_s[senders])
    busy_s, latency_s = traffic.seconds(times, method.topology, index)
    free_s = last_s + busy_s
    return _Sent(began_at, begun_s, last_s, sent_s + busy_s, free_s, free_s + latency_s)


def _bytes_sent(method: Method, traffic: Traffic, num_workers: int, index: int) -> Array:
    if method.topology is None:
        return np.full(num_workers, float(traffic.num_bytes))
    senders, _ = messages_of(method.topology, num_workers, index)
    return traffic.num_bytes * np.bincount(senders, minlength=num_workers).astype(np.float64)
