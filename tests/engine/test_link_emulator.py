"""Exchanges on emulated links: as slow as predicted, hidden by local steps, equal bit for bit."""

from __future__ import annotations

import dataclasses
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_loco import (
    ClockEngine,
    DiLoCo,
    Elastic,
    GASLoC,
    Link,
    LocalSGD,
    LocoStrategy,
    ModelAverage,
    NeighborAverage,
    StepEngine,
)
from lightning_loco.algorithms import Algorithm
from lightning_loco.costs import Links, LinkTimes, as_links
from lightning_loco.distributed import Statistics, WorkerGroup
from lightning_loco.distributed.statistics import Spans
from lightning_loco.distributed.work import AllReduceSum
from lightning_loco.distributed.worker_status import IN_ROUND, WorkerStatus
from lightning_loco.engine import RoundSettings
from lightning_loco.engine.buckets import Bucket
from lightning_loco.engine.exchanges.all_reduce import AllReduce
from lightning_loco.engine.link_emulator import LinkEmulator
from lightning_loco.schedules import EverySteps
from lightning_loco.topology import Ring
from tests.harness.limits import HARNESS_S, LONG_S, wait_until
from tests.harness.manual_clock import SkippingClock
from tests.harness.pool import Pool, PoolError, make_trainer, run_each
from tests.harness.rounds import approach, train
from tests.harness.small_model import TinyModule, WorkerData, flat
from tests.harness.toys import Point

NUMEL = 250_000
MEGABYTE = 4 * NUMEL
SLOW = Link(mbit_per_s=16, latency_s=0.05)
"""A megabyte takes half a second."""


def model(rank: int) -> Point:
    return Point(torch.full((NUMEL,), float(rank)))


def skipping_group() -> tuple[WorkerGroup, SkippingClock]:
    """Return the worker group and the clock by which this worker waits."""
    group, clock = WorkerGroup.create(timeout_s=60), SkippingClock()
    group.clock = clock
    return group, clock


# ------------------------------------------------------------------------------- how long


@dataclasses.dataclass(frozen=True)
class Took:
    """Costs of successive rounds for a worker.

    Attributes:
        seconds: From start to end of each round.
        statistics: Statistics at the end.
        naps: Number of sleeps.
    """

    seconds: list[float]
    statistics: Statistics
    naps: int


def on_link(statistics: Statistics) -> float:
    """Return for how many seconds messages were in transit."""
    assert statistics.spans is not None
    return statistics.spans.seconds["send"]


def make_rounds(
    rank: int, world: int, algorithm: Algorithm, link: Any, rounds: int, settings: dict[str, Any]
) -> Took:
    """Run blocking rounds."""
    group, clock = skipping_group()
    engine = StepEngine(model(rank), algorithm, sync_every=1, link=link, group=group, **settings)
    engine.statistics.spans = Spans()
    seconds = []
    for _ in range(rounds):
        began = clock.now()
        engine.step()
        seconds.append(clock.now() - began)
    took = Took(seconds, dataclasses.replace(engine.statistics), len(clock.asked))
    engine.close()
    return took


def check_seconds(seconds: list[float], predicted: float) -> None:
    """Check that rounds take as long as predicted, including the few bytes besides parameters."""
    assert seconds == pytest.approx([predicted] * len(seconds), rel=1e-3)


@pytest.mark.parametrize("world", [2, 4])
def test_a_blocking_mean_takes_as_long_as_its_bytes_and_hops(pool: Pool, world: int) -> None:
    predicted = 2 * (world - 1) / world * MEGABYTE * 8 / 16e6 + 2 * (world - 1) * 0.05
    for took in pool.run(make_rounds, LocalSGD(), SLOW, 3, {}, world=world):
        check_seconds(took.seconds, predicted)
        total_s = pytest.approx(sum(took.seconds))
        assert took.statistics.wait_s == total_s
        assert on_link(took.statistics) == total_s
        assert took.naps < sum(took.seconds) / 0.2 + 2 * 3


def make_real_rounds(rank: int, world: int) -> tuple[list[float], float]:
    """Return the seconds of two rounds after a first, synchronizing one, and the CPU seconds."""
    engine = StepEngine(model(rank), LocalSGD(), sync_every=1, link=SLOW)
    engine.step()
    used, seconds = resource.getrusage(resource.RUSAGE_SELF), []
    for _ in range(2):
        began = time.monotonic()
        engine.step()
        seconds.append(time.monotonic() - began)
    now = resource.getrusage(resource.RUSAGE_SELF)
    engine.close()
    return seconds, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


@pytest.mark.soak
@pytest.mark.alone
def test_a_blocking_mean_takes_as_long_by_the_real_clock(pool: Pool) -> None:
    predicted = 0.5 + 2 * 0.05
    for seconds, processor_s in pool.run(make_real_rounds, world=2):
        for took in seconds:
            assert predicted - 0.01 <= took <= 1.5 * predicted + 0.1
        assert processor_s < 0.5 * sum(seconds)


def test_messages_to_neighbours_share_a_workers_link(pool: Pool) -> None:
    """Two of a megabyte on a ring of four; then one of worker 0's is on a separate, slow link."""
    settings: dict[str, Any] = {"topology": "ring"}
    for took in pool.run(make_rounds, GASLoC(), SLOW, 2, settings):
        check_seconds(took.seconds, 2 * 0.5 + 0.05)
    fast = {"default": Link(160), "pairs": {"0->1": SLOW}}
    took = pool.run(make_rounds, GASLoC(), fast, 1, settings)
    check_seconds(took[0].seconds, 0.5)
    check_seconds(took[1].seconds, 0.5 + 0.05)
    check_seconds(took[2].seconds + took[3].seconds, 2 * 0.05)


@pytest.mark.parametrize(("codec", "most"), [("int8", 0.27), ("e3m0", 0.145)])
def test_fewer_bytes_take_less_time(pool: Pool, codec: str, most: float) -> None:
    for took in pool.run(make_rounds, DiLoCo(), SLOW, 3, {"compression": codec}, world=2):
        sent = took.statistics.bytes_sent / 3
        assert 0.1 * MEGABYTE < sent < most * MEGABYTE
        check_seconds(took.seconds, sent * 8 / 16e6 + 2 * 0.05)


def test_the_slowest_worker_keeps_a_mean_waiting(pool: Pool) -> None:
    links = [Link(1000), Link(1000), Link(32, 0.02)]
    predicted = LinkTimes(as_links(links), 3).mean(4 / 3 * MEGABYTE, 4, 0).seconds
    assert predicted == pytest.approx(4 / 3 * 0.25 + 4 * 0.02)
    for took in pool.run(make_rounds, DiLoCo(), links, 2, {}, world=3):
        check_seconds(took.seconds, predicted)


def test_buckets_follow_each_other_on_the_link(pool: Pool) -> None:
    """Eight buckets in groups of two: a group is sent once the one before the last has arrived."""
    settings = {"bucket_bytes": MEGABYTE // 4}
    for took in pool.run(make_rounds, LocalSGD(), SLOW, 1, settings, world=2):
        check_seconds(took.seconds, 4 * (0.5 / 8 + 2 * 0.05) + 0.5 / 8)


def make_late_round(rank: int, world: int) -> tuple[float, float]:
    """Let worker 1 start its round half a second late; return start and end times."""
    group, clock = skipping_group()
    engine = StepEngine(model(rank), LocalSGD(), sync_every=1, link=SLOW, group=group)
    if rank == 1:
        clock.advance(0.5)
    began = clock.now()
    engine.step()
    ended = clock.now()
    engine.close()
    return began, ended


def test_nothing_arrives_before_the_last_worker_has_sent_it(pool: Pool) -> None:
    times = pool.run(make_late_round, world=3)
    assert [began for began, _ in times] == [0.0, 0.5, 0.0]
    check_seconds([ended for _, ended in times], 0.5 + 4 / 3 * 0.5 + 4 * 0.05)


# ---------------------------------------------------------------------------------- hidden


def overlap(
    rank: int, world: int, algorithm: Algorithm, topology: Any, compression: Any = None
) -> Statistics:
    """Return the costs of rounds that are shorter than the local steps they overlap with."""
    group, clock = skipping_group()
    engine = StepEngine(
        model(rank),
        algorithm,
        sync_every=2,
        overlap=True,
        warm_start=False,
        topology=topology,
        compression=compression,
        link=Link(32, 0.02),
        group=group,
    )
    engine.statistics.spans = Spans()
    for _ in range(6):
        clock.advance(0.4)
        engine.step()
    statistics = dataclasses.replace(engine.statistics)
    engine.finish()
    engine.close()
    return statistics


@pytest.mark.parametrize(
    ("algorithm", "topology", "predicted"),
    [(DiLoCo(outer_momentum=0.0), None, 0.25 + 2 * 0.02), (GASLoC(momentum=0.0), "ring", 0.27)],
    ids=["mean", "neighbours"],
)
def test_overlapped_rounds_hide_the_link(
    pool: Pool, algorithm: Algorithm, topology: Any, predicted: float
) -> None:
    for statistics in pool.run(overlap, algorithm, topology, world=2):
        assert statistics.wait_s == 0.0
        assert on_link(statistics) == pytest.approx(3 * predicted, rel=1e-3)


def test_compressed_rounds_in_a_thread_hide_the_link(pool: Pool) -> None:
    algorithm = DiLoCo(outer_momentum=0.0)
    for statistics in pool.run(overlap, algorithm, None, "int8", world=2):
        assert statistics.wait_s == 0.0
        predicted = statistics.bytes_sent / 3 * 8 / 32e6 + 2 * 0.02
        assert on_link(statistics) == pytest.approx(3 * predicted, rel=1e-3)


def step_before_and_after_arrival(rank: int, world: int) -> tuple[list[bool], float]:
    """Whether a round by the clock ends after messages arrive by gloo, before the emulated link."""
    group, clock = skipping_group()
    engine = ClockEngine(model(rank), interval_s=0, link=SLOW, group=group)
    engine.step()
    pending = engine.fragments[0].pending
    assert pending is not None
    assert all(handle.arrives_within(HARNESS_S) for handle in pending.handles)
    clock.advance(0.5 + 2 * 0.05 - 0.01)
    early = [engine.step() for _ in range(5)]
    clock.advance(0.02)
    wait_until(engine.step)
    waited_s = engine.statistics.wait_s
    engine.finish()
    engine.close()
    return early, waited_s


def test_rounds_by_the_clock_do_not_end_before_their_messages_arrive(pool: Pool) -> None:
    for early, waited_s in pool.run(step_before_and_after_arrival, world=2):
        assert early == [False] * 5
        assert waited_s == 0.0


# ------------------------------------------------------------------------------- the same

QUICK = Links(Link(20, 0.002, 0.004))


@pytest.mark.parametrize(
    "settings",
    [
        {
            "diloco": RoundSettings(DiLoCo(), EverySteps(2)),
            "late average": RoundSettings(ModelAverage(), EverySteps(2, True)),
            "gasloc": RoundSettings(GASLoC(), EverySteps(2), "ring"),
            "late gasloc": RoundSettings(GASLoC(), EverySteps(2, True), "random_matching"),
        },
        pytest.param(
            {
                "local sgd": RoundSettings(LocalSGD(), EverySteps(2)),
                "late diloco": RoundSettings(DiLoCo(outer_momentum=0.0), EverySteps(2, True)),
                "late neighbours": RoundSettings(NeighborAverage(), EverySteps(2, True), Ring()),
            },
            marks=pytest.mark.soak,
        ),
    ],
    ids=["each kind of round", "others"],
)
def test_a_link_changes_no_bit(
    pool: Pool, settings: dict[str, RoundSettings], subtests: pytest.Subtests
) -> None:
    without, slow = (
        run_each(
            pool,
            train,
            {name: (dataclasses.replace(one, link=link), 4) for name, one in settings.items()},
        )
        for link in (None, QUICK)
    )
    for name in settings:
        with subtests.test(name):
            for expected, found in zip(without[name], slow[name], strict=True):
                assert torch.equal(expected, found)


def average_by_the_clock(rank: int, world: int, link: Any) -> Tensor:
    """Return the parameters after one round by the clock, with a local step meanwhile."""
    point, (group, clock) = model(0), skipping_group()
    engine = ClockEngine(point, interval_s=0, link=link, group=group)
    point.value.data.fill_(0.1 + rank)
    engine.step()
    approach(rank, point)
    clock.advance(LONG_S)
    wait_until(engine.step)
    parameters = flat(point)
    engine.close()
    return parameters


def test_a_link_changes_no_bit_of_rounds_by_the_clock(pool: Pool) -> None:
    without = pool.run(average_by_the_clock, None, world=3)
    for expected, found in zip(without, pool.run(average_by_the_clock, SLOW, world=3), strict=True):
        assert torch.equal(expected, found)
    assert not torch.equal(without[0], without[1])


class SaveDuringRound(Callback):
    """Saves while an overlapped round is pending."""

    def __init__(self, path: str) -> None:
        self._path = path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 7:
            trainer.save_checkpoint(self._path)


def fit(
    rank: int, world: int, link: Any, steps: int, save: str | None = None, resume: str | None = None
) -> Tensor:
    """Return the parameters after ``steps``."""
    strategy = LocoStrategy(
        DiLoCo(outer_momentum=0.0), sync_every=3, overlap=True, link=link, finalize="keep"
    )
    callbacks = [SaveDuringRound(save)] if save else []
    settings = {"max_steps": steps, "use_distributed_sampler": False, "callbacks": callbacks}
    module = TinyModule()
    loader = StatefulDataLoader(WorkerData(rank, 20), batch_size=None)
    make_trainer(strategy, **settings).fit(module, loader, ckpt_path=resume)
    return flat(module)


@pytest.mark.recovery
@pytest.mark.parametrize("links", [(None, "lan"), ("lan", None), ("lan", "dsl")])
def test_a_run_goes_on_exactly_with_and_without_a_link(
    pool: Pool, tmp_path: Path, links: tuple[Any, Any]
) -> None:
    """Warnings are errors, so no changed setting is reported."""
    path = str(tmp_path / "saved.ckpt")
    unbroken = pool.run(fit, None, 14, world=2)
    pool.run(fit, links[0], 9, path, world=2)
    resumed = pool.run(fit, links[1], 14, None, path, world=2)
    for expected, found in zip(unbroken, resumed, strict=True):
        assert torch.equal(expected, found)


# ------------------------------------------------------------------- sends during a wait


class TwiceHandle:
    """Starts a second sum when it is waited for."""

    def __init__(self, group: WorkerGroup, statistics: Statistics, wire: Tensor) -> None:
        self._send = lambda: AllReduceSum(group, statistics, wire, "round 0")
        self._first = self._send()

    def has_arrived(self) -> bool:
        return False

    def wait(self) -> Tensor:
        self._first.wait()
        return self._send().wait()

    def release(self) -> None:
        pass


class Twice(AllReduce):
    """An exchange in two parts; the second part is sent when the first has arrived."""

    def start(self, bucket: Bucket, round_index: int, weight: float = 1.0) -> Any:
        return TwiceHandle(self._group, self._statistics, bucket.wire)


def exchange_twice(rank: int, world: int) -> tuple[float, float, int, float]:
    (group, clock), statistics = skipping_group(), Statistics()
    links = Links(Link(32, 0.01))
    exchange = LinkEmulator(Twice(group, statistics), links, group, statistics)
    simulated = exchange.simulate([torch.tensor([1.0]), torch.tensor([4.0])], 0)
    assert [tensor.item() for tensor in simulated] == [5.0, 5.0]
    handle = exchange.start(Bucket(torch.ones(NUMEL), []), 0)
    assert not handle.has_arrived()
    clock.advance(0.3)
    received = handle.wait()
    seconds = clock.now()
    assert handle.has_arrived()
    assert handle.wait() is received
    value = received[0].item()
    handle.release()
    group.close()
    return seconds, value, statistics.bytes_sent, statistics.wait_s


def test_what_is_sent_while_waiting_takes_its_time_too(pool: Pool) -> None:
    """The first part is hidden by 0.3 s without a check; the second part is not."""
    for seconds, value, sent, waited_s in pool.run(exchange_twice, world=2):
        assert (value, sent) == (4.0, 2 * MEGABYTE)
        check_seconds([seconds], 0.3 + 0.25 + 2 * 0.01)
        assert waited_s == pytest.approx(0.25 + 2 * 0.01, rel=1e-3)


# ------------------------------------------------------------------------------- refusals


class AwaitingFailure(SkippingClock):
    """Reports its first sleep, and then waits until another worker is known to have failed."""

    def __init__(self, group: WorkerGroup) -> None:
        super().__init__()
        self._group = group

    def sleep(self, seconds: float) -> None:
        if not self.asked:
            self._group.own_store("test").set("asleep", "")
            wait_until(lambda: self._group.watchdog.failure)
        super().sleep(seconds)


def fail_while_another_sleeps(rank: int, world: int) -> list[float]:
    """Return how long worker 0 slept on its link before it learned that worker 1 had failed."""
    group = WorkerGroup.create(timeout_s=60)
    group.clock = clock = AwaitingFailure(group)
    engine = StepEngine(model(rank), LocalSGD(), sync_every=1, group=group, link=Link(0.5))
    if rank == 1:
        engine.count_step()
        (fragment,), label = engine.fragments, "round 0"
        fragment.prepare(0)
        new = fragment.new_round(0, 1, weight=1.0)
        fragment.begin(new, WorkerStatus(IN_ROUND, 0, 1, 1.0, 1.0), label)
        wait_until(lambda: group.own_store("test").check(["asleep"]))
        group.report_error(ValueError("broken"))
    else:
        with pytest.raises(RuntimeError, match="broken"):
            engine.step()
    engine.close()
    return clock.asked


def test_a_worker_that_sleeps_learns_of_a_failure(pool: Pool) -> None:
    slept_s, _ = pool.run(fail_while_another_sleeps, world=2)
    assert slept_s == [0.2]


def exceed(rank: int, world: int) -> None:
    group = WorkerGroup.create(timeout_s=5)
    engine = StepEngine(model(rank), LocalSGD(), sync_every=1, group=group, link=Link(0.1))
    try:
        engine.step()
    finally:
        engine.close()


def test_what_would_take_longer_than_the_timeout_is_an_error(pool: Pool) -> None:
    text = r"round 0 would take 80.0 s on the link that is emulated, longer than timeout_s=5\."
    with pytest.raises(PoolError, match=text) as caught:
        pool.run(exceed, world=2)
    assert sorted(caught.value.failures) == [0, 1]


def start_with(rank: int, world: int, links: list[Any]) -> None:
    StepEngine(Point(torch.zeros(3)), LocalSGD(), link=links[rank]).close()


def test_links_that_do_not_fit_are_refused_on_all_workers(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    rows: list[tuple[list[Any], str]] = [
        (["wan", "dsl"], "Worker 1 has link=.* Start all workers with the same settings"),
        (["wan", None], "Worker 1 has link=None and worker 0 has link="),
        ([["wan"] * 3] * 2, "link has 3 entries, one for each worker, but there are 2 workers"),
        ([["wan", "moon"]] * 2, r"link\[1\] must be one of wan, dsl"),
        (["nowhere.yaml"] * 2, "There is no file of links 'nowhere.yaml'"),
    ]
    for links, text in rows:
        with subtests.test(str(links)):
            with pytest.raises(PoolError, match=text) as caught:
                pool.run(start_with, links, world=2)
            assert sorted(caught.value.failures) == [0, 1]


def test_a_worker_alone_has_no_link() -> None:
    engine = StepEngine(model(0), LocalSGD(), sync_every=1, link=Link(0.001))
    engine.step()  # over the link it would take hours, and would be refused
    engine.close()


def test_members_that_come_and_go_have_no_link() -> None:
    with pytest.raises(ValueError, match="not the exchanges of elastic members. Drop link or"):
        StepEngine(Point(torch.zeros(3)), LocalSGD(), membership=Elastic("a:1"), link="wan")
    with pytest.raises(TypeError, match=r"link must be as_links\('wan'\) or None, got 'wan'"):
        RoundSettings(LocalSGD(), link="wan")  # type: ignore[arg-type]


def test_a_link_is_no_part_of_what_a_checkpoint_compares() -> None:
    settings = RoundSettings(LocalSGD())
    assert dataclasses.replace(settings, link=QUICK).describe() == settings.describe()
