"""Estimates the costs of each method on a cluster, and chooses one.

For every method the smallest number of local steps per round is searched with which the workers
compute for most of the time: more local steps than necessary cost quality. Among the methods whose
loss can be predicted, the one with the lowest expected loss is chosen; of those with equal losses
and bytes, the fastest. The remote optimizer is only shown: it trains as DDP does and needs one more
machine. Decoupled learners never wait: for them it is the links that decide the local steps.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from bisect import bisect_left

from lightning_loco._util.codecs import Encoding
from lightning_loco.costs import Links, LinkTimes
from lightning_loco.costs.method_costs import (
    ENCODINGS,
    ExchangeKind,
    StepTimes,
    Traffic,
    as_method,
    estimate,
)
from lightning_loco.costs.methods import METHOD_TABLE
from lightning_loco.costs.syncer_times import IN_FLIGHT, SyncerTimes
from lightning_loco.tools.plan.loss import MAX_SHORT_DELAY, NO_GAP, LossGap, diloco_gap
from lightning_loco.topology import RandomMatching, Ring, Topology

SYNC_EVERY = (30, 40, 50, 60, 80, 100, 150, 200, 300, 400, 500)
"""Local steps per round that are tried, as in published runs."""

MIN_SYNC_EVERY = 10
"""Local steps per round in runs too short for ``MIN_ROUNDS`` of the smallest of ``SYNC_EVERY``."""

MIN_ROUNDS = 100
"""A run needs about as many rounds; with 60 and 12 the loss was measured to be far higher."""

MAX_WORKERS = 100_000
"""More would take longer than a few seconds."""

BACKWARD_SHARE = 2 / 3
"""Share of a local step that the backward pass takes, behind which DDP hides its all-reduce."""

EQUAL_PERCENT = 0.1
"""Smaller differences between expected losses are no reason to choose a method."""

_MUCH_FASTER = 0.95
"""Share of the time that an option must take at most to be shown as faster."""

_LITTLE_SLOWER = 1.25
"""Share of the time that an option may take at most to be shown as better."""

_COUNTED_ROUNDS = 4
"""Rounds of which the mean time is computed, since the latency of links may vary."""


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A run to be planned.

    Args:
        num_parameters: Parameters of the model that are trained.
        num_workers: Number of workers N.
        links: Links of the workers.
        step_s: Seconds of a local step of a worker.
        tokens_per_step: Tokens of a local step of a worker.
        tokens: Tokens of the whole run, of all workers together.
        bytes_per_gradient: 4 or 2: bytes of a value that DDP sends.
        utilisation: Share of the time that workers shall compute.

    Raises:
        ValueError: If a value is out of range, or the links do not fit the number of workers.
    """

    num_parameters: int
    num_workers: int
    links: Links
    step_s: float
    tokens_per_step: int
    tokens: int
    bytes_per_gradient: int = 4
    utilisation: float = 0.9

    def __post_init__(self) -> None:
        for name in ("num_parameters", "step_s", "tokens_per_step", "tokens"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                option = {"num_parameters": "parameters"}.get(name, name).replace("_", "-")
                raise ValueError(f"--{option} must be positive and finite, got {value:g}.")
        if not 2 <= self.num_workers <= MAX_WORKERS:
            raise ValueError(
                f"--workers must be from 2 to {MAX_WORKERS:,}, got {self.num_workers}. A single "
                "worker exchanges nothing."
            )
        if not 0 < self.utilisation < 1:
            raise ValueError(
                f"--utilisation is a share of the time between 0 and 1, got {self.utilisation:g}."
            )
        if self.steps < MIN_SYNC_EVERY:
            raise ValueError(
                f"The run has {self.steps} local steps of each worker: {self.tokens:,} tokens of "
                f"{self.num_workers} workers with {self.tokens_per_step:,} in a step. Give more "
                "--tokens, or fewer --workers."
            )
        self.links.check(self.num_workers)

    @property
    def steps(self) -> int:
        """Local steps of each worker."""
        return math.ceil(self.tokens / (self.num_workers * self.tokens_per_step))

    @property
    def one_worker_s(self) -> float:
        """How long a single worker needs for all tokens, in seconds."""
        return self.tokens / self.tokens_per_step * self.step_s

    @functools.cached_property
    def times(self) -> LinkTimes:
        """How long messages take."""
        return LinkTimes(self.links, self.num_workers)

    @functools.cached_property
    def step_times(self) -> StepTimes:
        """How long local steps take."""
        return StepTimes([self.step_s] * self.num_workers)

    @property
    def sync_every(self) -> list[int]:
        """Local steps per round that may be tried, so that there are enough rounds."""
        few_enough = [every for every in SYNC_EVERY if every <= self.steps // MIN_ROUNDS]
        return few_enough or [MIN_SYNC_EVERY]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A method to be tried.

    Attributes:
        method: Its name on the command line.
        compression: Name of the codec; ``"none"`` is float32.
        topology: Name of the topology, for gossip.
    """

    method: str
    compression: str = "none"
    topology: str = ""

    @property
    def title(self) -> str:
        """Its name in tables."""
        words = [METHOD_TABLE[self.method].title]
        if self.topology:
            words.append(TOPOLOGY_TITLES[self.topology])
        if self.compression != "none":
            words.append(self.compression)
        return ", ".join(words)

    @property
    def measured(self) -> float | None:
        """Loss relative to DDP in the benchmark, in percent; None if it was not measured."""
        gaps = METHOD_TABLE[self.method].gaps
        return gaps.get(self.compression, gaps.get(self.topology))


TOPOLOGY_TITLES = {"random_matching": "random pairs", "ring": "ring"}

CANDIDATES = (
    Candidate("ddp"),
    Candidate("remote_optimizer"),
    Candidate("local_sgd"),
    *(Candidate("diloco", one) for one in ("none", "int8", "e3m0")),
    *(Candidate("streaming_diloco", one) for one in ("none", "int8", "e3m0")),
    Candidate("diloco", "sparse"),
    *(Candidate("async_diloco", one) for one in ("none", "int8", "e3m0")),
    *(Candidate("noloco", one, "random_matching") for one in ("none", "int8")),
    *(Candidate("gasloc", one, "random_matching") for one in ("none", "int8")),
    Candidate("gasloc", "none", "ring"),
    *(Candidate("decoupled_diloco", one) for one in ("none", "int8")),
)
"""In the order in which equal ones are preferred: fewer parts first."""

FRAGMENTS = (3, 6, 12)
"""Numbers of fragments that are tried for streaming DiLoCo; a model needs as many layers."""


@dataclasses.dataclass(frozen=True)
class Option:
    """The costs of a method with its best settings.

    Attributes:
        candidate: The method.
        sync_every: Local steps per round of the whole model.
        fragments: In how many parts the model is exchanged.
        delay: Local steps after which a result is applied; 0 waits for it.
        exchange_s: Seconds of the exchange of a fragment, if nothing else is sent.
        step_s: Mean seconds from one local step to the next, with all waiting.
        utilisation: Share of the time that the workers compute.
        round_bytes: Bytes that a worker sends per exchange of the whole model.
        total_bytes: Bytes that a worker sends in the run.
        time_s: Seconds of the run.
        gap: Expected loss relative to DDP; None if not known.
    """

    candidate: Candidate
    sync_every: int
    fragments: int
    delay: int
    exchange_s: float
    step_s: float
    utilisation: float
    round_bytes: float
    total_bytes: float
    time_s: float
    gap: LossGap | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """All options, and the chosen one.

    Attributes:
        job: The run.
        options: One for each candidate.
        chosen: One of them.
        reason: Why.
    """

    job: PlannedRun
    options: tuple[Option, ...]
    chosen: Option
    reason: str

    @property
    def faster(self) -> list[Option]:
        """Options that take far less time: one as good as the chosen one, one that may not be.

        The first has about the same expected loss. The loss of the second is not known, and it is
        faster than all others. Either may be missing.
        """
        assert self.chosen.gap is not None
        limit = self.chosen.gap.percent + EQUAL_PERCENT
        known = [one for one in self.options if one.gap is not None and one.gap.percent <= limit]
        most = self.job.sync_every[-1]
        unknown = [one for one in self.options if one.gap is None and one.sync_every <= most]
        found, time_s = [], _MUCH_FASTER * self.chosen.time_s
        for options in (known, unknown):
            shortest_s = min(one.time_s for one in options)
            if shortest_s < time_s:
                found.append(next(one for one in options if one.time_s < 1.01 * shortest_s))
                time_s = _MUCH_FASTER * shortest_s
        return found

    @property
    def better(self) -> Option | None:
        """The fastest option with a lower expected loss, if it takes little more time."""
        assert self.chosen.gap is not None
        limit = self.chosen.gap.percent - EQUAL_PERCENT
        lower = [one for one in self.options if one.gap is not None and one.gap.percent < limit]
        best = min(lower, key=lambda one: one.time_s, default=None)
        if best is None or best.time_s > _LITTLE_SLOWER * self.chosen.time_s:
            return None
        return best


def make_plan(job: PlannedRun) -> Plan:
    """Estimate the costs of all candidates, and choose one.

    Example:
        >>> from lightning_loco.costs import as_links
        >>> job = PlannedRun(124_000_000, 2, as_links("lan"), 0.5, 16_384, 2_480_000_000)
        >>> make_plan(job).chosen.candidate.title
        'Streaming DiLoCo, int8'
    """
    options = tuple(_best(candidate, job) for candidate in CANDIDATES)
    known = [
        (one, one.gap)
        for one in options
        if one.gap is not None and one.candidate.method != "remote_optimizer"
    ]
    busy = [(one, gap) for one, gap in known if one.utilisation >= job.utilisation]
    share = f"{100 * job.utilisation:g} %"
    if busy:
        lowest = min(gap.percent for _, gap in busy)
        equal = [one for one, gap in busy if gap.percent <= lowest + EQUAL_PERCENT]
        chosen = equal[0]
        reason = f"the lowest expected loss among those that compute {share} of the time or more"
        sent = chosen.total_bytes
        equal = [one for one in equal if math.isclose(one.total_bytes, sent, rel_tol=0.01)]
        shortest_s = min(one.time_s for one in equal)
        if shortest_s <= _MUCH_FASTER * chosen.time_s:
            chosen = next(one for one in equal if one.time_s < 1.01 * shortest_s)
            reason += ", and the fastest of those that send as much"
        if chosen.candidate.method == "ddp":
            reason = f"it computes {share} of the time or more, and nothing is lost"
        return Plan(job, options, chosen, reason)
    chosen, _ = max(known, key=lambda pair: pair[0].utilisation)
    reason = f"no method with a known loss computes {share} of the time; this one comes closest"
    return Plan(job, options, chosen, reason)


def _best(candidate: Candidate, job: PlannedRun) -> Option:
    """Return the candidate with the fewest local steps per round that suffice."""
    if METHOD_TABLE[candidate.method].costs == "every_step":
        return _every_step(candidate, job)
    if METHOD_TABLE[candidate.method].exchange == "syncer":
        return _learners(candidate, job)
    tried, options = job.sync_every, dict[int, Option]()
    is_streaming = METHOD_TABLE[candidate.method].costs == "streaming"

    def utilisation(every: int) -> float:
        parts = [one for one in FRAGMENTS if one <= every]
        for fragments in parts if is_streaming else [None]:
            option = _cost(candidate, job, every, fragments)
            if every not in options or option.utilisation > options[every].utilisation + 0.01:
                options[every] = option
            if options[every].utilisation >= job.utilisation:
                break
        return options[every].utilisation

    found = min(bisect_left(tried, job.utilisation, key=utilisation), len(tried) - 1)
    utilisation(tried[found])
    return options[tried[found]]


def _cost(candidate: Candidate, job: PlannedRun, sync_every: int, fragments: int | None) -> Option:
    """Return the costs of a method with these settings."""
    encoding = ENCODINGS[candidate.compression]
    topologies: dict[str, Topology | None] = {
        "": None,
        "ring": Ring(),
        "random_matching": RandomMatching(),
    }
    topology = topologies[candidate.topology]
    delay = None
    if fragments is not None:
        exchange_s = _exchange_s("mean", job, encoding, fragments, None)
        longest = max(1, min(MAX_SHORT_DELAY, sync_every // fragments))
        delay = min(max(1, math.ceil(exchange_s / job.step_s)), longest)
    method = as_method(candidate.method, sync_every, topology, encoding, fragments, delay)
    count = method.schedule.num_fragments
    applied = 0
    if method.schedule.is_overlapped(0):
        applied = sync_every // count if delay is None else delay
    rounds = _COUNTED_ROUNDS * count
    costs = estimate(
        method, job.num_parameters, job.step_times, job.times, rounds, 2 * count if applied else 0
    )
    gap = None
    is_diloco = METHOD_TABLE[candidate.method].algorithm == "DiLoCo"
    if is_diloco and candidate.compression != "sparse":
        per_parameter = job.tokens / job.num_parameters
        gap = diloco_gap(job.num_parameters, job.num_workers, sync_every, per_parameter, applied)
    step_s = float(costs.time_s.mean()) / costs.steps
    round_bytes = costs.bytes_per_round * count
    return Option(
        candidate,
        sync_every,
        count,
        applied,
        _exchange_s(method.kind, job, encoding, count, topology),
        step_s,
        float(costs.utilisation.mean()),
        round_bytes,
        round_bytes * (job.steps // sync_every),
        step_s * job.steps,
        gap,
    )


def _exchange_s(
    kind: ExchangeKind,
    job: PlannedRun,
    encoding: Encoding,
    fragments: int,
    topology: Topology | None,
) -> float:
    """Return the seconds of the exchange of a fragment, of the slowest worker in round 0."""
    numel = job.num_parameters // fragments
    traffic = Traffic.of(kind, numel, job.num_workers, encoding)
    busy_s, latency_s = traffic.seconds(job.times, topology, 0)
    return float((busy_s + latency_s).max())


def _every_step(candidate: Candidate, job: PlannedRun) -> Option:
    """Return the costs of an exchange of gradients in every step.

    DDP hides its all-reduce behind the backward pass if possible.
    """
    method = as_method(candidate.method, encoding=Encoding(1, job.bytes_per_gradient))
    costs = estimate(method, job.num_parameters, job.step_times, job.times, _COUNTED_ROUNDS)
    exchange_s = costs.seconds_per_round - job.step_s
    hidden_s = BACKWARD_SHARE * job.step_s if candidate.method == "ddp" else 0.0
    step_s = job.step_s + max(0.0, exchange_s - hidden_s)
    sent = costs.bytes_per_round
    utilisation, time_s = job.step_s / step_s, step_s * job.steps
    return Option(
        candidate, 1, 1, 0, exchange_s, step_s, utilisation, sent, sent * job.steps, time_s, NO_GAP
    )


def _learners(candidate: Candidate, job: PlannedRun) -> Option:
    """Return the costs of learners that never wait: with the fewest local steps that links carry.

    If a link is always busy, a push waits for what was fetched before, about as long as a fragment
    takes, and then for those that are exchanged with it.
    """
    defaults = METHOD_TABLE[candidate.method].defaults
    least = min(defaults["sync_every"], job.sync_every[0])
    fragments = min(defaults["fragments"], least, job.num_parameters)
    numel = -(-job.num_parameters // fragments)
    push_bytes = ENCODINGS[candidate.compression].num_bytes(numel)
    syncer = SyncerTimes(job.times, push_bytes, ENCODINGS["none"].num_bytes(numel))
    carried = math.ceil(fragments * syncer.pace_s / job.step_s)
    exchange_s = syncer.exchange_s
    late_s = exchange_s if carried <= least else (IN_FLIGHT + 1) * syncer.pace_s
    sync_every, sent = max(least, carried), float(fragments * push_bytes)
    return Option(
        candidate,
        sync_every,
        fragments,
        max(1, math.ceil(late_s / job.step_s)),
        exchange_s,
        job.step_s,
        1.0,
        sent,
        sent * (job.steps // sync_every),
        job.step_s * job.steps,
        None,
    )
