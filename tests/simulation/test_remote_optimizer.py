"""Simulated training with a remote optimizer: numbers of real runs and of DDP, virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_loco.compression import Int8
from lightning_loco.costs import ENCODINGS, StepTimes, as_method, estimate
from lightning_loco.links import Link, LinkTimes, as_links
from lightning_loco.parameter_server import RemoteOptimizer, Serving, Transport, run_role
from lightning_loco.simulation import Failure, RemoteOptimizerSimulation
from tests.algorithms.toys import Point, randn
from tests.parameter_server.test_roles import Net, backward
from tests.pool import Pool

STEPS = 12
NUMEL = 1024
BYTES = 4 * NUMEL
SPEEDS = (10.0, 4.0, 2.5, 5.0)


class Real(NamedTuple):
    """A real run: its ranks, and what is done with gradients."""

    workers: int
    world: int
    codec: Any = None
    clip: str | None = None
    optimizer: str = "AdamW"
    servers: int = 1

    @property
    def tiers(self) -> int:
        return 1 + (self.world - self.workers) // self.servers


RUNS = {
    "2 tiers": Real(2, 3, clip="norm"),
    "3 workers": Real(3, 4, optimizer="SGD"),
    "3 tiers": Real(2, 4, clip="value"),
    "2 servers": Real(2, 4, servers=2, clip="norm"),
    "int8, 2 tiers": Real(3, 4, Int8(16), "norm"),
    "int8, 3 tiers": Real(2, 4, Int8(16), optimizer="SGD"),
    "bf16, 3 tiers": Real(2, 4, "bf16"),
    "fp16, 2 servers": Real(2, 4, "fp16", "norm", servers=2),
}
CLIP = {"norm": 0.1, "value": 0.02}
BUCKET_BYTES = 100  # several buckets, which cut parameters in two


def make_optimizer(name: str, net: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer whose groups have the parameters in another order than the model."""
    params = list(net.parameters())
    groups = [{"params": params[3:], "lr": 0.02}, {"params": params[:3]}]
    if name == "SGD":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(groups, lr=0.01)


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def train_really(rank: int, world: int) -> list[list[Tensor]]:
    """Train as each run says; return the parameters after each step, by run."""
    found = []
    for run in RUNS.values():
        if run.world == world:
            found.append(train_one(rank, run))
    return found


def train_one(rank: int, run: Real) -> list[Tensor]:
    net, history = Net(seed=5), []

    def work(remote: RemoteOptimizer) -> None:
        history.append(flat(net))
        for step in range(STEPS):
            remote.zero_grad()
            if step % 2:
                remote.expect_backward()
            backward(net, rank, step, use_all=rank == 0)
            if run.clip == "norm":
                remote.clip_grad_norm_(CLIP["norm"])
            elif run.clip == "value":
                remote.clip_grad_value_(CLIP["value"])
            remote.step()
            history.append(flat(net))

    schedules: list[Any] = []

    def make(groups: Any) -> torch.optim.Optimizer:
        optimizer = make_optimizer(run.optimizer, net)
        schedules.append(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS))
        return optimizer

    run_role(
        work,
        make_optimizer(run.optimizer, net).param_groups,
        make,
        run.workers,
        num_servers=run.servers,
        transport=Transport(bucket_bytes=BUCKET_BYTES, compression=run.codec),
        serving=Serving(after_step=lambda: schedules[0].step()),
    )
    return [*history, flat(net)]


def simulate_one(run: Real) -> tuple[list[list[Tensor]], RemoteOptimizerSimulation]:
    nets = [Net(seed=5 + worker) for worker in range(run.workers)]
    simulation = RemoteOptimizerSimulation(
        nets,
        lambda net: make_optimizer(run.optimizer, net),
        num_servers=run.servers,
        num_tiers=run.tiers,
        compression=run.codec,
        bucket_bytes=BUCKET_BYTES,
        gradient_clip_val=CLIP.get(run.clip or ""),
        gradient_clip_algorithm="value" if run.clip == "value" else "norm",
        speeds=SPEEDS[: run.workers],
        jitter=0.5,
        links="wan",
    )
    histories = [[flat(net)] for net in nets]
    schedules = [
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        for optimizer in simulation.optimizers
    ]
    made = [0] * run.workers

    def local_step(worker: int) -> None:
        nets[worker].zero_grad()
        backward(nets[worker], worker, made[worker], use_all=worker == 0)
        made[worker] += 1

    def after_step() -> None:
        for schedule in schedules:
            schedule.step()
        for net, history in zip(nets, histories, strict=True):
            history.append(flat(net))

    simulation.run(local_step, STEPS, after_step=after_step)
    return histories, simulation


@pytest.mark.parametrize("world", [3, 4])
def test_parameters_are_those_of_a_real_run(
    pool: Pool, world: int, subtests: pytest.Subtests
) -> None:
    """Bit for bit after every step: gradients are added in the same order."""
    results = pool.run(train_really, world=world)
    for index, name in enumerate(name for name, run in RUNS.items() if run.world == world):
        with subtests.test(name):
            run = RUNS[name]
            histories, simulation = simulate_one(run)
            for worker, history in enumerate(histories):
                real = results[worker][index][:-1]
                assert len(history) == len(real) == 1 + STEPS
                assert not torch.equal(real[0], real[-1])
                assert all(map(torch.equal, history, real))
            if run.servers == 1:  # otherwise each has a shard
                assert torch.equal(simulation.consensus(), results[-1][index][-1])


# ------------------------------------------------------------------------------- numbers


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def points(num_workers: int = 4, dtype: torch.dtype = torch.float32) -> list[Point]:
    return [Point(torch.zeros(NUMEL, dtype=dtype)) for _ in range(num_workers)]


def toward_target(models: Sequence[Point], worker: int) -> Tensor:
    """Compute the gradient of the distance to the worker's own target; return the loss."""
    models[worker].zero_grad()
    value = models[worker].value
    target = randn(len(models), NUMEL, seed=9)[worker].to(value.dtype)
    loss = 0.5 * (value - target).square().mean()
    loss.backward()
    return loss.detach()


def simulate(
    num_steps: int,
    num_workers: int = 4,
    local_step: Callable[[Sequence[Point], int], Any] = toward_target,
    **settings: Any,
) -> RemoteOptimizerSimulation:
    models = points(num_workers)
    simulation = RemoteOptimizerSimulation(models, sgd, **settings)
    simulation.run(lambda worker: local_step(models, worker), num_steps)
    return simulation


@pytest.mark.parametrize("num_servers", [1, 3])
def test_it_is_one_optimizer_with_the_mean_gradient(num_servers: int) -> None:
    """As DDP: a plain loop over the batches of all workers, with one model."""
    n = 5

    def make(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(net.parameters(), lr=0.01)

    nets = [Net(seed=worker).double() for worker in range(n)]
    plain = Net(seed=0).double()
    optimizer = make(plain)
    simulation = RemoteOptimizerSimulation(
        nets, make, num_servers=num_servers, gradient_clip_val=0.1
    )

    def gradient(net: nn.Module, worker: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * worker + step)
        inputs = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        loss: Tensor = net(inputs, worker == 0).square().mean()
        loss.backward()
        return loss.detach()

    def local_step(worker: int) -> Tensor:
        nets[worker].zero_grad()
        return gradient(nets[worker], worker, simulation.round_index)

    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses += [gradient(plain, worker, step).item() for worker in range(n)]
        for param in plain.parameters():
            if param.grad is not None:
                param.grad /= n
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
    simulation.run(local_step, STEPS)
    for found in (*simulation.params(), simulation.consensus()):
        torch.testing.assert_close(found, flat(plain), rtol=0, atol=1e-12)
    assert [point.loss for point in simulation.losses] == pytest.approx(losses, abs=1e-12)


def test_changes_that_all_workers_make_alike_are_sent_to_the_server() -> None:
    models = points(2)
    simulation = RemoteOptimizerSimulation(models, sgd)
    simulation.run(lambda worker: toward_target(models, worker), 2)
    before = simulation.consensus()

    def clipped(worker: int) -> None:
        models[worker].value.data.clamp_(-1e-4, 1e-4)
        models[worker].value.grad = torch.zeros(NUMEL)

    simulation.run(clipped, 1)
    assert before.abs().max() > 1e-4
    for found in (*simulation.params(), simulation.consensus()):
        assert torch.equal(found, before.clamp(-1e-4, 1e-4))


def test_a_worker_that_steps_by_itself_is_an_error() -> None:
    models = points(2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

    def local_step(worker: int) -> None:
        toward_target(models, worker)
        optimizers[worker].step()

    with pytest.raises(RuntimeError, match="outside of the optimizer on worker 0, worker 1, but"):
        RemoteOptimizerSimulation(models, sgd).run(local_step, 1)


def test_a_gradient_that_is_not_finite_names_the_worker() -> None:
    def local_step(models: Sequence[Point], worker: int) -> None:
        toward_target(models, worker)
        if worker == 1:
            assert models[1].value.grad is not None
            models[1].value.grad[3] = math.nan

    with pytest.raises(RuntimeError, match="^Worker 1: a gradient is not finite"):
        simulate(1, local_step=local_step)


# --------------------------------------------------------------------------- virtual time

SLOW = Link(0.032, 0.5)
"""A kilobyte takes a quarter of a second."""
UNEQUAL = {
    "default": {"mbit_per_s": 0.1, "latency_s": 0.03, "jitter_s": 0.02},
    "workers": {2: {"mbit_per_s": 0.02, "latency_s": 0.1, "jitter_s": 0.1}},
    "pairs": {"0-1": {"mbit_per_s": 0.5}, "1->3": {"mbit_per_s": 0.01}},
    "seed": 3,
}
TWO_SITES = {"default": "lan", "sites": 2, "between_sites": SLOW.__dict__}


def test_times_and_bytes_are_those_of_the_costs_without_training(
    subtests: pytest.Subtests,
) -> None:
    """Exactly, with constant links and speeds and with jitter."""
    for links in (SLOW, "wan", UNEQUAL, TWO_SITES):
        for codec in (None, "int8", "bf16"):
            for jitter in (0.0, 0.3):
                with subtests.test(links=links, codec=codec, jitter=jitter):
                    others = {"speeds": SPEEDS, "jitter": jitter, "links": links, "seed": 5}
                    simulation = simulate(7, compression=codec, **others)
                    found = as_links(links)
                    assert found is not None
                    costs = estimate(
                        as_method("remote_optimizer", encoding=ENCODINGS[codec or "none"]),
                        NUMEL,
                        StepTimes([1 / speed for speed in SPEEDS], jitter, 5),
                        LinkTimes(found, 4),
                        num_rounds=7,
                    )
                    own = simulation.costs
                    assert simulation.time_s == costs.time_s.tolist()
                    assert [one.bytes_sent for one in own] == costs.bytes_sent.tolist()
                    compute_s = [one.compute_s for one in own]
                    assert compute_s == pytest.approx(costs.compute_s.tolist())
                    assert {one.steps for one in own} == {one.rounds for one in own} == {7}


def test_the_slowest_worker_and_the_queue_of_the_server_determine_the_time() -> None:
    queue_s = 4 * BYTES * 8 / 0.032e6
    for speeds, links, step_s in (
        (SPEEDS, None, 1 / 2.5),
        ([10.0] * 4, SLOW, 0.1 + 2 * (queue_s + 0.5)),
    ):
        simulation = simulate(3, speeds=speeds, links=links)
        assert simulation.time_s == pytest.approx([3 * step_s] * 4)


@pytest.mark.parametrize(
    ("speeds", "codec", "step_s"),
    [
        ([1.0, 0.01], None, 100 + 4 + 2 * 4),
        ([0.01, 1.0], None, 100 + 4 + 1 + 2 * 4),
        ([1.0, 0.01], "bf16", 100 + 2 + 1 + 2 * 2),
    ],
)
def test_a_server_has_buckets_of_early_workers_but_one(
    speeds: list[float], codec: str | None, step_s: float
) -> None:
    """A bucket takes a second. Without compression worker 0's are all received into the sum."""
    links = Link(8e-6 * 1024)
    simulation = simulate(1, 2, speeds=speeds, links=links, bucket_bytes=1024, compression=codec)
    assert simulation.time_s == pytest.approx([step_s] * 2)


def test_a_third_tier_receives_bucket_by_bucket() -> None:
    """It adds two latencies, the last bucket of gradients and the first one of parameters."""
    for codec, last, first in ((None, 1024, 1024), ("int8", 260, 780), ("bf16", 2048, 1024)):
        times = [
            simulate(1, num_tiers=tiers, links=SLOW, bucket_bytes=1024, compression=codec).time_s
            for tiers in (2, 3)
        ]
        longer_s = 2 * 0.5 + (last + first) * 8 / 0.032e6
        assert times[1] == pytest.approx([times[0][0] + longer_s] * 4)


def test_servers_exchange_norms_before_they_clip() -> None:
    def time_of(**settings: Any) -> float:
        nets = [Net(seed=0) for _ in range(2)]
        simulation = RemoteOptimizerSimulation(nets, sgd, links=SLOW, **settings)
        simulation.run(lambda worker: backward(nets[worker], worker, 0, use_all=True), 1)
        return simulation.time_s[0]

    for servers, longer_s in ((1, 0.0), (2, 0.5)):
        times = [time_of(num_servers=servers, gradient_clip_val=clip) for clip in (None, 1.0)]
        assert times[1] - times[0] == pytest.approx(longer_s)


def test_links_and_speeds_do_not_change_numbers() -> None:
    plain, timed = (
        torch.stack(simulate(5, compression="int8", **others).params())
        for others in ({}, {"speeds": SPEEDS, "jitter": 0.5, "links": UNEQUAL})
    )
    assert torch.equal(plain, timed)


def test_the_timeline_of_a_worker_has_no_gaps_and_its_losses_have_times() -> None:
    simulation = simulate(3, speeds=SPEEDS, links=SLOW)
    for worker in range(4):
        own = [e for e in simulation.timeline if e.worker == worker and e.kind != "send"]
        assert [event.kind for event in own] == ["compute", "wait"] * 3
        ends = [0.0, *(event.end_s for event in own)]
        assert [event.start_s for event in own] == ends[:-1]
        assert ends[-1] == simulation.time_s[worker]
        sent = [e for e in simulation.timeline if e.worker == worker and e.kind == "send"]
        assert len(sent) == 6
        losses = [point for point in simulation.losses if point.worker == worker]
        assert [point.step for point in losses] == [1, 2, 3]
        assert losses[0].time_s == pytest.approx(1 / SPEEDS[worker])
    times = [point.time_s for point in simulation.losses]
    assert times == sorted(times)


def test_a_run_in_pieces_is_the_same() -> None:
    results = []
    for pieces in ([30.0], [0.05, 0.2, 7.0, 15.0, 7.75]):
        models = points()
        simulation = RemoteOptimizerSimulation(models, sgd, speeds=SPEEDS, links=SLOW)
        for seconds in pieces:
            simulation.run(lambda worker: toward_target(models, worker), seconds=seconds)  # noqa: B023
        results.append((torch.stack(simulation.params()), simulation.timeline, simulation.costs))
    assert results[0][1:] == results[1][1:]
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][2][0].steps > 3


# ------------------------------------------------------------------------------- failures


def to_number(models: Sequence[Point], worker: int) -> None:
    """A gradient of -1, -2, -4: steps tell who took part."""
    models[worker].value.grad = torch.full((NUMEL,), -(2.0**worker))


def test_a_dead_worker_is_waited_for_until_it_is_noticed() -> None:
    failures = [Failure(worker=2, at_s=2.5, noticed_after_s=5.0)]
    simulation = simulate(4, 3, to_number, speeds=[1.0] * 3, failures=failures, min_workers=2)
    assert simulation.time_s == [8.5, 8.5, 2.5]
    assert [costs.steps for costs in simulation.costs] == [4, 4, 2]
    assert simulation.consensus().unique().tolist() == pytest.approx([2 * 7 / 3 + 2 * 3 / 2])
    assert [costs.wait_s for costs in simulation.costs] == [4.5, 4.5, 0.0]


@pytest.mark.parametrize(
    ("at_s", "first", "steps"), [(2.0, 3.0, 1), (9.0, 7 / 3, 1), (0.5, 3.0, 0)]
)
def test_the_gradient_of_a_worker_that_is_noticed_to_be_dead_is_left_out(
    at_s: float, first: float, steps: int
) -> None:
    """Worker 2 is slow; worker 0 dies before, and is noticed to be dead before or after."""
    failures = [Failure(worker=0, at_s=at_s)]
    models = points(3)
    simulation = RemoteOptimizerSimulation(
        models, sgd, speeds=[1.0, 1.0, 0.1], failures=failures, min_workers=1
    )
    simulation.run(lambda worker: to_number(models, worker), 1)
    assert simulation.consensus().unique().tolist() == pytest.approx([first])
    simulation.run(lambda worker: to_number(models, worker), 1)
    assert simulation.consensus().unique().tolist() == pytest.approx([first + 3.0])
    assert simulation.time_s == [at_s, 20.0, 20.0]
    assert [costs.steps for costs in simulation.costs] == [steps, 2, 2]


@pytest.mark.parametrize(
    ("links", "noticed_after_s", "at_s"),
    [
        (SLOW, 1000.0, 1002.0),
        (SLOW, 0.25, 1.0 + BYTES * 8 / 0.032e6 + 0.5),  # the other gradient takes longer
        ([SLOW, Link(0.0032)], 1.0, 3.0),
    ],
)
def test_the_gradient_of_a_worker_that_dies_while_it_sends_is_left_out(
    links: Any, noticed_after_s: float, at_s: float
) -> None:
    """The server waits for the rest of it until the worker is noticed to be dead."""
    failures = [Failure(1, 2.0, noticed_after_s=noticed_after_s)]
    simulation = simulate(
        1, 2, to_number, speeds=[1.0] * 2, links=links, failures=failures, min_workers=1
    )
    back_s = BYTES * 8 / 0.032e6 + 0.5
    assert simulation.time_s == pytest.approx([at_s + back_s, 2.0])
    assert simulation.consensus().unique().tolist() == [1.0]
    assert [costs.wait_s for costs in simulation.costs] == pytest.approx([at_s + back_s - 1.0, 1.0])
    assert max(e.end_s for e in simulation.timeline if e.worker == 1) == 2.0


def test_a_run_ends_when_too_few_workers_are_left() -> None:
    failures = [Failure(worker=0, at_s=2.5), Failure(worker=1, at_s=20.0)]
    settings = {"speeds": [1.0] * 3, "failures": failures, "min_workers": 2}
    with pytest.raises(RuntimeError, match="Worker 1 has died at 20 s, and fewer than min_workers"):
        simulate(100, 3, **settings)


# ----------------------------------------------------------------------------------- errors


def test_settings_that_cannot_work_are_refused(subtests: pytest.Subtests) -> None:
    dead = [Failure(worker=1, at_s=1.0)]
    for settings, message in (
        ({"num_servers": 2}, "num_servers=2 is more than the model's 1 parameters"),
        ({"num_servers": 0}, "num_servers must be at least 1"),
        ({"num_tiers": 4}, "num_tiers must be 2 or 3, got 4"),
        ({"bucket_bytes": 0}, "bucket_bytes must be positive"),
        ({"min_workers": 5}, "min_workers must be 1 to num_workers=4"),
        ({"failures": dead}, "ends when a worker dies. Give min_workers"),
        (
            {"failures": [Failure(1, 1.0, 9.0)], "min_workers": 1},
            "does not come back, got back_s=9 of worker 1",
        ),
        ({"failures": [Failure(7, 1.0)], "min_workers": 1}, "worker 7, but there are 4 workers"),
        ({"compression": "int4"}, "too roughly for a remote optimizer"),
        ({"gradient_clip_val": -1.0}, "gradient_clip_val must be positive"),
        ({"gradient_clip_algorithm": "max"}, "must be 'norm' or 'value', got 'max'"),
        ({"speeds": [1.0]}, "speeds are the local steps per second of each worker"),
        ({"links": ["wan"]}, "link has 1 entries"),
    ):
        with subtests.test(message), pytest.raises(ValueError, match=message):
            RemoteOptimizerSimulation(points(), sgd, **settings)
    with pytest.raises(ValueError, match="at least one model"):
        RemoteOptimizerSimulation([], sgd)
    with pytest.raises(ValueError, match="Worker 1 holds a different model than worker 0"):
        RemoteOptimizerSimulation([nn.Linear(2, 2), nn.Linear(2, 3)], sgd)
    with pytest.raises(ValueError, match="needs a closure"):
        RemoteOptimizerSimulation(points(), lambda m: torch.optim.LBFGS(m.parameters()))
    models = points()
    with pytest.raises(ValueError, match="must use the parameters of the model that it is called"):
        RemoteOptimizerSimulation(models, lambda _: sgd(models[0]))
    simulation = RemoteOptimizerSimulation(points(), sgd)
    with pytest.raises(ValueError, match="Give num_steps or seconds, and not both"):
        simulation.run(lambda worker: None)
    with pytest.raises(ValueError, match="take no time without speeds"):
        simulation.run(lambda worker: None, seconds=1.0)
    for name, value in (("min_workers", 1.5), ("num_tiers", 3.0), ("num_servers", True)):
        with pytest.raises(TypeError, match=f"{name} must be an integer, got {value}"):
            RemoteOptimizerSimulation(points(), sgd, **{name: value})  # type: ignore[arg-type]
