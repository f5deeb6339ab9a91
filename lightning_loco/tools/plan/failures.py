r"""What failures cost: the goodput of restarts, of elastic members and of decoupled learners.

Goodput is the share of the workers' time in local steps whose progress counts. Every worker lives
for an exponential time of mean M, and is replaced after a restart. How a run goes on is simulated
event by event with seeded failures, and has a closed form beside it:

- :class:`Restarts`: a failure stops all, and they go on from the last checkpoint.
- :class:`Members`: the others wait until they have noticed it, and go on without it.
- :class:`Learners`: the others do not notice.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import statistics
from random import Random
from typing import NamedTuple

from lightning_loco._util.text import format_seconds
from lightning_loco.costs.methods import METHOD_TABLE
from lightning_loco.tools.plan.planner import Option, Plan

BATCHES, FAILURES = 8, 1000
"""Simulations with different seeds, and the failures in each."""

NOTICED_AFTER_S = 5.0
"""Seconds after which elastic members notice a failure, as in ``lightning_loco.simulation``."""

_LEAST, _MOST = {"mtbf_h": 1e-3, "checkpoint_every_s": 1e-3, "checkpoint_s": 1e-3}, 1e9
"""Ranges of the values: beyond them numbers are not precise enough, and make no sense."""

_JOIN_BYTES = 8
"""Bytes per parameter that an elastic member receives: outer parameters and momentum."""

_ASYNC_MIX = 0.25
"""Share of local parameters that async DiLoCo keeps when a result arrives."""


@dataclasses.dataclass(frozen=True)
class Failures:
    """How often workers fail, and what follows.

    Args:
        mtbf_h: Mean hours between the failures of one worker.
        restart_s: Seconds from a failure until a process in its place is ready to train.
        checkpoint_every_s: Seconds of training between two checkpoints.
        checkpoint_s: Seconds for which a checkpoint stops the training.
        price: Of a worker for an hour; None if costs are not asked for.

    Raises:
        ValueError: If a value is out of range.
    """

    mtbf_h: float
    restart_s: float
    checkpoint_every_s: float
    checkpoint_s: float
    price: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, option = getattr(self, field.name), f"--{field.name.replace('_', '-')}"
            least = _LEAST.get(field.name, 0.0)
            if value is not None and not least <= value <= _MOST:
                raise ValueError(f"{option} must be from {least:g} to {_MOST:g}, got {value:g}.")

    @property
    def mtbf_s(self) -> float:
        """Mean seconds between the failures of one worker."""
        return 3600 * self.mtbf_h


class Shares(NamedTuple):
    """What the workers' time is for: seconds, or shares of it, which add up to 1.

    Attributes:
        computing: Local steps whose progress counts: the goodput.
        waiting: For an exchange, for other workers, or for a checkpoint.
        joining: For the parameters of the run, after a restart.
        lost: Local steps that a failure, or a result that has arrived, has made worthless.
        restarting: From a failure until a process is there again.
    """

    computing: float
    waiting: float
    joining: float
    lost: float
    restarting: float

    def of_method(self, utilisation: float = 1.0, kept: float = 1.0) -> Shares:
        """Return the shares of a method that waits for exchanges and keeps not all steps."""
        total = sum(self)
        computing, waiting, joining, lost, restarting = (seconds / total for seconds in self)
        steps = computing * utilisation
        waiting, lost = waiting + computing - steps, lost + steps * (1 - kept)
        return Shares(steps * kept, waiting, joining, lost, restarting)


@dataclasses.dataclass(frozen=True)
class Restarts:
    """A job that stops at each failure of a worker, and goes on from its last checkpoint.

    Args:
        mtbf_s: Mean seconds between the failures of the job: M / N.
        restart_s: Seconds of a restart; a failure in it begins another one.
        every_s: Seconds between two checkpoints.
        checkpoint_s: Seconds of a checkpoint.

    Example:
        >>> round(Restarts(45_000, 300, 600, 10).goodput(), 4)
        0.97
    """

    mtbf_s: float
    restart_s: float
    every_s: float
    checkpoint_s: float

    def simulate(self, draws: Random, failures: int) -> Shares:
        """Return the seconds of the job until this number of failures."""
        computing = waiting = lost = restarting = 0.0
        for _ in range(failures):
            until_s = draws.expovariate(1 / self.mtbf_s)  # from the failure before
            restarting += min(until_s, self.restart_s)
            period_s = self.every_s + self.checkpoint_s
            periods, rest_s = divmod(max(0.0, until_s - self.restart_s), period_s)
            computing += periods * self.every_s
            waiting += periods * self.checkpoint_s + max(0.0, rest_s - self.every_s)
            lost += min(rest_s, self.every_s)
        return Shares(computing, waiting, 0.0, lost, restarting)

    def goodput(self) -> float:
        """Return the expected share of computing, which is exact."""
        period = (self.every_s + self.checkpoint_s) / self.mtbf_s
        survives = math.exp(-self.restart_s / self.mtbf_s - period)
        return self.every_s / self.mtbf_s * survives / -math.expm1(-period)

    def with_best_interval(self) -> Restarts:
        r"""Return the job with the checkpoint interval whose expected goodput is highest.

        With :math:`x` = ``every_s / mtbf_s`` it solves :math:`(1 - x) e^x = e^{-c}`, with
        :math:`c` = ``checkpoint_s / mtbf_s``; Young's :math:`\sqrt{2 c}` is the limit of rare
        failures.
        """
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            is_low = math.log1p(-middle) + middle > -self.checkpoint_s / self.mtbf_s
            low, high = (middle, high) if is_low else (low, middle)
        return dataclasses.replace(self, every_s=high * self.mtbf_s)


@dataclasses.dataclass(frozen=True)
class Learners:
    """Workers that go on without each other: a failure costs one worker's steps since its pushes.

    Args:
        mtbf_s: Mean seconds between the failures of a worker M.
        restart_s: Seconds of a restart.
        join_s: Seconds in which it receives the parameters.
        gap_s: Seconds between two pushes, which are of one fragment after the other.
        fragments: Number of fragments.
    """

    mtbf_s: float
    restart_s: float
    join_s: float
    gap_s: float
    fragments: int

    def simulate(self, draws: Random, failures: int) -> Shares:
        """Return the seconds of one worker until this number of failures."""
        computing = lost = 0.0
        for _ in range(failures):
            pushes, rest_s = divmod(draws.expovariate(1 / self.mtbf_s), self.gap_s)
            unsent_s = self.gap_s * _unsent(int(pushes), self.fragments)
            computing += pushes * self.gap_s - unsent_s
            lost += rest_s + unsent_s
        return Shares(computing, 0.0, failures * self.join_s, lost, failures * self.restart_s)

    def goodput(self) -> float:
        """Return the expected share of computing, which is exact."""
        alive_s = _counted_s(self.mtbf_s, self.gap_s, self.fragments)
        return alive_s / (self.mtbf_s + self.restart_s + self.join_s)


@dataclasses.dataclass(frozen=True)
class Members:
    """Elastic members: rounds wait until a failure is noticed, and go on without the worker.

    Args:
        num_workers: Number of workers N.
        mtbf_s: Mean seconds between the failures of a worker M.
        restart_s: Seconds of a restart; then the worker joins with the next exchange.
        join_s: Seconds in which it receives the state.
        gap_s: Seconds between two exchanges, which are of one fragment after the other.
        fragments: Number of fragments.
        stall_s: Seconds after a failure in which no exchange can end: until it is noticed and the
            exchange is repeated, less what is hidden behind local steps.
        waits_for_joining: Whether the others wait for one that joins, as in blocking rounds.
    """

    num_workers: int
    mtbf_s: float
    restart_s: float
    join_s: float
    gap_s: float
    fragments: int
    stall_s: float
    waits_for_joining: bool

    def simulate(self, draws: Random, failures: int) -> Shares:
        """Return the seconds of all workers until this number of failures."""
        computing = waiting = joining = lost = now_s = 0.0
        number = failed = returned = 0
        gap_s = self.gap_s
        away_s = self.restart_s + (0.0 if self.waits_for_joining else self.join_s)
        dead = round(self.num_workers * (1 - self._alive(away_s)))
        # As many are dead at the start as on average. The list is sorted, and so a heap.
        back = [away_s * (index + 0.5) / dead for index in range(dead)]
        joined = [-self.fragments] * (self.num_workers - dead)  # the exchange with which each did

        def next_failure(from_s: float) -> float:
            return from_s + draws.expovariate(len(joined) / self.mtbf_s) if joined else math.inf

        fails_s = next_failure(0.0)
        while True:
            # Exchanges without an event, at once; then the one with a failure or a return.
            quiet = max(0, math.floor((min([fails_s, *back[:1]]) - now_s) / gap_s))
            computing += quiet * gap_s * len(joined)
            number, now_s = number + quiet, now_s + quiet * gap_s
            end_s = now_s + gap_s
            while fails_s <= end_s:
                index = draws.randrange(len(joined))
                joined[index], joined[-1] = joined[-1], joined[index]
                unsent_s = gap_s * _unsent(number - joined.pop(), self.fragments)
                rest_s = min(fails_s - now_s, gap_s)
                computing, lost = computing - unsent_s, lost + unsent_s + rest_s
                waiting += fails_s - now_s - rest_s
                heapq.heappush(back, fails_s + away_s)
                if (failed := failed + 1) == failures:
                    return Shares(computing, waiting, joining, lost, returned * self.restart_s)
                end_s = max(end_s, fails_s + self.stall_s)
                fails_s = next_failure(fails_s)
            computing += gap_s * len(joined)
            waiting += (end_s - now_s - gap_s) * len(joined)
            number, now_s, before = number + 1, end_s, len(joined)
            while back and back[0] <= now_s:
                joining += now_s - heapq.heappop(back) + self.join_s
                joined.append(number)
            if (came := len(joined) - before) > 0:
                returned += came
                if self.waits_for_joining:
                    waiting, now_s = waiting + before * self.join_s, now_s + self.join_s
                fails_s = next_failure(now_s)

    def goodput(self) -> float:
        """Return the expected share of computing, as if always the mean number were alive."""
        rate = (self.num_workers - 1) * self._alive(self.restart_s + self.join_s) / self.mtbf_s
        # An exchange ends once no other has failed for stall_s.
        checked_s = min(self.gap_s, self.stall_s)
        stalled_s = -math.expm1(-rate * checked_s) / rate * math.exp(min(rate * self.stall_s, 500))
        exchange_s = self.gap_s - checked_s + stalled_s
        alive = self._alive(self.restart_s + self.join_s + exchange_s / 2)
        counted = _counted_s(self.mtbf_s, exchange_s, self.fragments) / self.mtbf_s
        if self.waits_for_joining:
            exchange_s += self.join_s * -math.expm1(-rate * exchange_s)
        return alive * counted * self.gap_s / exchange_s

    def _alive(self, away_s: float) -> float:
        return self.mtbf_s / (self.mtbf_s + away_s)


Recovery = Restarts | Learners | Members
"""How a run goes on after failures."""


def _unsent(exchanges: int, fragments: int) -> float:
    """Return how many exchanges ago a fragment was sent or received: the mean of all."""
    sent = min(exchanges, fragments)
    return (sent * (sent - 1) / 2 + (fragments - sent) * exchanges) / fragments


def _counted_s(mtbf_s: float, gap_s: float, fragments: int) -> float:
    """Return the expected seconds of a worker's life until the last push of each fragment."""
    period_s = gap_s * fragments
    later_s = period_s * math.exp(-period_s / mtbf_s) / -math.expm1(-period_s / mtbf_s)
    firsts_s = [gap_s * (index + 1) for index in range(fragments)]
    return statistics.fmean(math.exp(-one / mtbf_s) * (one + later_s) for one in firsts_s)


# ------------------------------------------------------------------------- of a plan


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What failures make of an option.

    Attributes:
        title: The method, and how it goes on after a failure.
        shares: What the workers' time is for, simulated.
        error: Standard error of the goodput.
        expected: The goodput by the closed form.
        billion_tokens_s: Seconds for a billion tokens; infinite if the goodput rounds to 0.00 %.
        cost: Of a billion tokens; None without a price.
    """

    title: str
    shares: Shares
    error: float
    expected: float
    billion_tokens_s: float
    cost: float | None


def outcomes(plan: Plan, failures: Failures) -> list[Outcome]:
    """Return what failures make of DDP, of rounds and of decoupled learners.

    Rounds are those of the recommended option, if its members can be elastic; otherwise of the one
    that computes most of the time among those whose loss is known.
    """
    job, n, mtbf_s, restart_s = plan.job, plan.job.num_workers, failures.mtbf_s, failures.restart_s
    ddp = next(one for one in plan.options if one.candidate.method == "ddp")
    elastic = [
        one
        for one in plan.options
        if METHOD_TABLE[one.candidate.method].elastic and one.gap is not None
    ]
    rounds = plan.chosen if plan.chosen in elastic else max(elastic, key=lambda o: o.utilisation)
    learners = min(
        (one for one in plan.options if one.candidate.method == "decoupled_diloco"),
        key=lambda one: one.sync_every,
    )
    given = Restarts(mtbf_s / n, restart_s, failures.checkpoint_every_s, failures.checkpoint_s)
    best = given.with_best_interval()
    link = job.times.slowest_link()
    members = Members(
        n,
        mtbf_s,
        restart_s,
        link.seconds(_JOIN_BYTES * job.num_parameters) + 2 * link.latency_s,
        rounds.sync_every / rounds.fragments * rounds.step_s,
        rounds.fragments,
        max(0.0, NOTICED_AFTER_S + rounds.exchange_s - rounds.delay * job.step_s),
        waits_for_joining=rounds.delay == 0,
    )
    independent = Learners(
        mtbf_s,
        restart_s,
        link.seconds(4 * job.num_parameters) + 2 * learners.fragments * link.latency_s,
        learners.sync_every / learners.fragments * job.step_s,
        learners.fragments,
    )
    found: list[tuple[Option, str, Recovery]] = []
    for option in (ddp, rounds):
        found += [(option, f"every {format_seconds(given.every_s)}", given)]
        found += [(option, f"every {format_seconds(best.every_s)} (best)", best)]
    found += [(rounds, "elastic", members), (learners, "", independent)]
    return [_outcome(plan, failures, *one) for one in found]


def _outcome(
    plan: Plan, failures: Failures, option: Option, title: str, recovery: Recovery
) -> Outcome:
    job = plan.job
    mix = METHOD_TABLE[option.candidate.method].defaults.get("mix")
    overwritten = (1 - (_ASYNC_MIX if mix is None else mix)) * option.delay / option.sync_every
    kept = max(0.0, 1 - overwritten)
    runs = [
        recovery.simulate(Random(seed), FAILURES).of_method(option.utilisation, kept)
        for seed in range(BATCHES)
    ]
    shares = Shares(*map(statistics.fmean, zip(*runs, strict=True)))
    error = statistics.stdev(one.computing for one in runs) / math.sqrt(BATCHES)
    rate = shares.computing * job.num_workers * job.tokens_per_step / job.step_s
    billion_s = 1e9 / rate if shares.computing >= 5e-5 else math.inf
    price = failures.price
    cost = None if price is None else price * job.num_workers * billion_s / 3600
    expected = recovery.goodput() * option.utilisation * kept
    name = ", ".join(filter(None, (option.candidate.title, title)))
    return Outcome(name, shares, error, expected, billion_s, cost)
