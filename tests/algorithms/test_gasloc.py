"""GASLoC: the methods that it reduces to, those that it does not, and its recursions."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_loco import DiLoCo, GASLoC, LocalSGD, Simulation, StepEngine
from lightning_loco.algorithms import Algorithm, RoundInfo
from lightning_loco.topology import (
    Complete,
    Hypercube,
    Ring,
    Star,
    Topology,
    Torus,
    get_topology,
    gossip_radius,
    optimal_gossip,
)
from tests.harness.cover import cover
from tests.harness.pool import Pool
from tests.harness.small_model import flat, loss_of, make_model, worker_batch
from tests.harness.toys import (
    ADAMW,
    SGD,
    Point,
    apply_update,
    assert_close,
    distances,
    flat_rounds,
    move_to,
    no_progress,
    randn,
    run_engine,
    same_data,
    simulate,
    train_step,
)

ON_8 = ["ring", "complete", "star", "torus", "grid", "hypercube", "xor"]
ON_8 += ["exponential", "one_peer_exponential", "random_matching", "random_two_peer"]
MOMENTUM_ON: list[Literal["local", "gossiped"]] = ["local", "gossiped"]


def prepared(topology: Any, **settings: Any) -> GASLoC:
    """Settings for a graph, without the check of stability: some tests need unstable ones."""
    scale = topology.laplacian_scale
    step = 0.5 if topology.is_matching else 1.0
    return GASLoC(**{"gossip_step": step, **settings}, laplacian_scale=scale)


@dataclass(frozen=True)
class Alone(Topology):
    """A topology without edges: Lambda = 0."""

    def weights(self, worker: int, num_workers: int, round_index: int = 0) -> dict[int, float]:
        return {worker: 1.0}


# ------------------------------------------------------------------ the formula itself


def test_it_is_the_formula(subtests: pytest.Subtests) -> None:
    """u = theta + eta g; theta' = u - alpha Lambda u + gamma (u - u_previous)."""
    eta, alpha, gamma = 0.7, 0.3, 0.4
    targets, starts = randn(8, 3), randn(8, 3, seed=1)
    for name, momentum_on in itertools.product(ON_8, MOMENTUM_ON):
        with subtests.test(name, momentum_on=momentum_on):
            topology = get_topology(name)
            algorithm = GASLoC(eta, alpha, gamma, momentum_on).prepare(8, topology)
            history = flat_rounds(algorithm, starts, move_to(targets, 0.2), 9, topology)

            theta = previous = starts
            for t in range(9):
                laplacian = torch.eye(8, dtype=torch.float64) - topology.mixing_matrix(8, t)
                if name in ("xor", "random_matching"):
                    laplacian = 2 * laplacian  # [[1, -1], [-1, 1]] on each pair
                u = theta + eta * 0.2 * (targets - theta)
                z = u - alpha * laplacian @ u
                point = u if momentum_on == "local" else z
                theta, previous = z + gamma * (point - previous), point
                assert_close(history[t + 1], theta)


# ------------------------------------------------------------------ reductions to DiLoCo


def test_on_a_complete_graph_without_momentum_it_is_diloco(subtests: pytest.Subtests) -> None:
    """On every worker, for any model and data."""
    for inner, world in itertools.product([SGD, ADAMW], range(1, 5)):
        with subtests.test(inner.func.__name__, world=world):
            settings = {"inner": inner, "sync_every": 3}
            expected = simulate(DiLoCo(0.7, 0.0), world, 5, **settings)
            algorithm = GASLoC(0.7, 1.0, 0.0)
            assert_close(simulate(algorithm, world, 5, topology="complete", **settings), expected)


def test_on_a_pair_without_momentum_it_is_diloco() -> None:
    """Two workers average with weight 1/2 on a matching, a hypercube and a ring of two."""
    expected = simulate(DiLoCo(0.7, 0.0), 2, 5, sync_every=3)
    for name in ("xor", "random_matching", "hypercube", "one_peer_exponential", "exponential"):
        algorithm = GASLoC(0.7, "auto", 0.0)
        assert_close(simulate(algorithm, 2, 5, topology=name, sync_every=3), expected)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_on_a_complete_graph_without_momentum_it_is_diloco_on_gloo(pool: Pool, world: int) -> None:
    expected = simulate(DiLoCo(0.7, 0.0), world, 5, sync_every=2)[:, 0]
    settings = {"topology": "complete", "sync_every": 2}
    for history in pool.run(run_engine, GASLoC(0.7, 1.0, 0.0), 5, settings, world=world):
        assert_close(history, expected)


def test_on_a_complete_graph_with_outer_rate_1_it_is_local_sgd() -> None:
    settings = {"inner": ADAMW, "sync_every": 3}
    expected = simulate(LocalSGD(), 4, 5, **settings)
    algorithm = GASLoC(1.0, 1.0, 0.0)
    assert_close(simulate(algorithm, 4, 5, topology="complete", **settings), expected)


@pytest.mark.parametrize("momentum", [0.3, 0.9])
def test_with_the_same_data_everywhere_it_is_diloco_with_nesterov(momentum: float) -> None:
    settings = {"step": same_data, "inner": ADAMW, "sync_every": 2}
    expected = simulate(DiLoCo(0.7, momentum), 3, 8, **settings)
    algorithm = GASLoC(0.7, 1.0, momentum, "local")
    assert_close(simulate(algorithm, 3, 8, topology="complete", **settings), expected)


def test_with_the_same_data_everywhere_it_is_not_diloco_with_heavy_ball() -> None:
    settings = {"step": same_data, "sync_every": 2}
    heavy_ball = simulate(DiLoCo(0.7, 0.9, nesterov=False), 3, 8, **settings)
    algorithm = GASLoC(0.7, 1.0, 0.9, "local")
    history = simulate(algorithm, 3, 8, topology="complete", **settings)
    assert (history - heavy_ball).abs().max() > 1e-2


def test_with_other_data_on_each_worker_its_local_momentum_is_not_diloco() -> None:
    """Momentum on u, before the gossip, keeps the workers apart even on a complete graph."""
    expected = simulate(DiLoCo(0.7, 0.9), 3, 8, sync_every=2)
    algorithm = GASLoC(0.7, 1.0, 0.9, "local")
    history = simulate(algorithm, 3, 8, topology="complete", sync_every=2)
    assert (history[7] - expected[7]).abs().max() > 1e-2
    assert (history[7].mean(0) - expected[7, 0]).abs().max() > 1e-3
    assert distances(history)[7] > 1e-2


def test_gossiped_momentum_on_a_complete_graph_is_diloco_with_nesterov(
    subtests: pytest.Subtests,
) -> None:
    """On every worker, for any data."""
    settings = {"inner": ADAMW, "sync_every": 3}
    for momentum, world in itertools.product([0.5, 0.9], range(1, 5)):
        with subtests.test(momentum=momentum, world=world):
            expected = simulate(DiLoCo(0.7, momentum), world, 6, **settings)
            algorithm = GASLoC(0.7, 1.0, momentum, "gossiped")
            assert_close(simulate(algorithm, world, 6, topology="complete", **settings), expected)


def test_gossiped_momentum_on_a_complete_graph_is_diloco_with_nesterov_on_gloo(pool: Pool) -> None:
    expected = simulate(DiLoCo(0.7, 0.9), 4, 5, sync_every=2)[:, 0]
    settings = {"topology": "complete", "sync_every": 2}
    algorithm = GASLoC(0.7, 1.0, 0.9, "gossiped")
    for history in pool.run(run_engine, algorithm, 5, settings, world=4):
        assert_close(history, expected)


def test_on_equal_quadratics_the_mean_is_diloco_with_nesterov(subtests: pytest.Subtests) -> None:
    """On any graph, since the recursion of the mean does not depend on the graph."""
    targets = randn(8, 3)
    start = randn(3, seed=1).expand(8, 3)
    phase = move_to(targets, 0.3)
    expected = flat_rounds(DiLoCo(0.7, 0.6), start, phase, 12).mean(1)
    for name, momentum_on in itertools.product(ON_8, MOMENTUM_ON):
        with subtests.test(name, momentum_on=momentum_on):
            topology = get_topology(name)
            algorithm = prepared(topology, outer_lr=0.7, momentum=0.6, momentum_on=momentum_on)
            assert_close(flat_rounds(algorithm, start, phase, 12, topology).mean(1), expected)


def rounds_with_schedule(algorithm: Algorithm, rates: list[float]) -> Tensor:
    """Run one worker's rounds on a quadratic, with a different outer_lr in each."""
    params = torch.ones(1, dtype=torch.float64)
    state = algorithm.init(params.clone())
    history = []
    for rate in rates:
        now = dataclasses.replace(algorithm, outer_lr=rate)  # type: ignore[call-arg]
        params.mul_(0.8)
        message = now.propose(params, state, RoundInfo())
        apply_update(now, params, message.clone(), state)
        history.append(params.clone())
    return torch.cat(history)


def test_a_schedule_of_the_outer_rate_differs_from_diloco() -> None:
    """u_previous contains the old eta; torch's momentum buffer does not."""
    constant = [0.7] * 12
    cosine = [0.7 * (1 + math.cos(math.pi * t / 12)) / 2 for t in range(12)]
    cosine = [max(rate, 1e-3) for rate in cosine]
    gasloc, diloco = GASLoC(0.7, 1.0, 0.9, "local"), DiLoCo(0.7, 0.9)
    assert_close(rounds_with_schedule(gasloc, constant), rounds_with_schedule(diloco, constant))
    off = rounds_with_schedule(gasloc, cosine) - rounds_with_schedule(diloco, cosine)
    assert off.abs().max() > 0.05


# -------------------------------------------------------- reductions to one worker, to D-PSGD


def nesterov_lookahead(worker: int, rate: float, momentum: float, rounds: int) -> Tensor:
    """Train a single worker: torch's Nesterov SGD on slow - fast every 3 steps."""
    model = make_model()
    optimizer = ADAMW(model.parameters())
    slow = torch.nn.Parameter(flat(model))
    outer = torch.optim.SGD([slow], lr=rate, momentum=momentum, nesterov=momentum > 0)
    history = []
    for step in range(3 * rounds):
        train_step(model, optimizer, worker_batch(worker, step))
        if step % 3 == 2:
            slow.grad = slow.detach() - flat(model)
            outer.step()
            position = 0
            for p in model.parameters():
                p.data.copy_(slow.detach()[position : position + p.numel()].view_as(p))
                position += p.numel()
            history.append(flat(model))
    return torch.stack(history)


def test_a_single_worker_is_lookahead_with_nesterov(subtests: pytest.Subtests) -> None:
    for momentum_on, momentum in itertools.product(MOMENTUM_ON, [0.0, 0.5]):
        with subtests.test(momentum_on=momentum_on, momentum=momentum):
            algorithm = GASLoC(0.6, 1.0, momentum, momentum_on)
            history = simulate(algorithm, 1, 4, inner=ADAMW, sync_every=3)
            assert_close(history[:4, 0], nesterov_lookahead(0, 0.6, momentum, 4))


def without_edges(**settings: Any) -> Tensor:
    """Run four rounds of three workers that exchange nothing, each with its own model and data."""
    models = [make_model() for _ in range(3)]
    optimizers = [ADAMW(model.parameters()) for model in models]
    steps = [0] * 3

    def local_phase(worker: int, params: Tensor, round_index: int) -> Tensor:
        model, position = models[worker], 0
        for p in model.parameters():
            p.data.copy_(params[position : position + p.numel()].view_as(p))
            position += p.numel()
        for _ in range(3):
            train_step(model, optimizers[worker], worker_batch(worker, steps[worker]))
            steps[worker] += 1
        return flat(model)

    starts = flat(make_model()).expand(3, -1)
    return flat_rounds(prepared(Alone(), **settings), starts, local_phase, 4, Alone())


def test_without_edges_each_worker_is_lookahead_with_nesterov(subtests: pytest.Subtests) -> None:
    for momentum_on, momentum in itertools.product(MOMENTUM_ON, [0.0, 0.5]):
        with subtests.test(momentum_on=momentum_on, momentum=momentum):
            history = without_edges(outer_lr=0.6, momentum=momentum, momentum_on=momentum_on)
            for worker in range(3):
                assert_close(history[1:, worker], nesterov_lookahead(worker, 0.6, momentum, 4))


def gradients(params: Tensor, step: int) -> Tensor:
    """Return the gradient of each worker at its row of ``params``."""
    rows = []
    for worker, row in enumerate(params):
        model, position = make_model(), 0
        for p in model.parameters():
            p.data.copy_(row[position : position + p.numel()].view_as(p))
            position += p.numel()
        loss_of(model, worker_batch(worker, step)).backward()
        rows.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
    return torch.stack(rows)


@pytest.mark.parametrize("name", ["ring", "exponential", "random_matching"])
def test_single_steps_of_sgd_are_adapt_then_combine(name: str) -> None:
    """W (x - b grad): not combine-while-adapt, W x - b grad, which is another method."""
    topology = get_topology(name)
    adapt_then_combine = combine_while_adapt = flat(make_model()).expand(4, -1)
    history = simulate(GASLoC(1.0, "auto", 0.0), 4, 6, topology=name)
    for t in range(6):
        w = topology.mixing_matrix(4, t)
        adapt_then_combine = w @ (adapt_then_combine - 0.05 * gradients(adapt_then_combine, t))
        combine_while_adapt = w @ combine_while_adapt - 0.05 * gradients(combine_while_adapt, t)
        assert_close(history[t], adapt_then_combine)
    assert (history[5] - combine_while_adapt).abs().max() > 1e-3


# ------------------------------------------------------------------ the mean and the consensus


def test_the_mean_follows_its_own_recursion(subtests: pytest.Subtests) -> None:
    """mean(theta') = mean(u) + gamma (mean(u) - mean(u_previous)), for any local steps."""
    drifts, starts = randn(10, 8, 3), randn(8, 3, seed=1)
    for name, momentum_on in itertools.product(ON_8, MOMENTUM_ON):
        with subtests.test(name, momentum_on=momentum_on):
            topology = get_topology(name)
            algorithm = prepared(topology, outer_lr=0.7, momentum=0.4, momentum_on=momentum_on)
            history = flat_rounds(algorithm, starts, lambda i, p, t: p + drifts[t, i], 10, topology)
            previous = starts.mean(0)
            for t in range(10):
                u = history[t].mean(0) + 0.7 * drifts[t].mean(0)
                assert_close(history[t + 1].mean(0), u + 0.4 * (u - previous))
                previous = u


def test_without_progress_the_mean_is_kept_and_all_workers_converge_to_it(
    subtests: pytest.Subtests,
) -> None:
    starts = randn(8, 3)
    for name, momentum, momentum_on in itertools.product(ON_8, [0.0, 0.5], MOMENTUM_ON):
        with subtests.test(name, momentum=momentum, momentum_on=momentum_on):
            topology = get_topology(name)
            step = 0.25 if topology.is_matching else 0.5
            algorithm = GASLoC(0.7, step, momentum, momentum_on).prepare(8, topology)
            history = flat_rounds(algorithm, starts, no_progress, 60, topology)
            assert_close(history.mean(1), starts.mean(0).expand(61, 3))
            assert distances(history)[60] < 0.05 * distances(history)[0]


def scatter_then_gossip(rank: int, world: int, name: str, momentum: float) -> Tensor:
    """Move each worker to its own point, then run rounds without progress.

    Returns:
        The parameters before the first round and after each.
    """
    model = Point(torch.zeros(3, dtype=torch.float64))
    engine = StepEngine(model, GASLoC(1.0, "auto", momentum, "local"), sync_every=1, topology=name)
    model.value.data.copy_(randn(3, seed=rank))
    history = [model.value.detach().clone()]
    for _ in range(30):
        engine.step()
        history.append(model.value.detach().clone())
    engine.close()
    return torch.stack(history)


@pytest.mark.parametrize(
    ("name", "momentum"),
    cover(["ring", "star", "exponential", "random_matching"], [0.0, 0.5], strength=1),
)
def test_without_progress_the_mean_is_kept_on_gloo(pool: Pool, name: str, momentum: float) -> None:
    history = torch.stack(pool.run(scatter_then_gossip, name, momentum, world=4), dim=1)
    mean, previous = history[0].mean(0), torch.zeros(3, dtype=torch.float64)
    for t in range(30):  # heavy ball: the drift of the first phase moves the mean
        mean, previous = mean + momentum * (mean - previous), mean
        assert_close(history[t + 1].mean(0), mean)
    assert distances(history)[30] < 0.05 * distances(history)[0]


@pytest.mark.parametrize("topology", [Ring(), Star(), Torus()], ids=str)
def test_without_drift_it_is_polyaks_heavy_ball_on_the_disagreement(topology: Topology) -> None:
    """Gradient descent with heavy ball on x^T Lambda x / 2, by torch's own SGD."""
    alpha, gamma = 0.9, 0.6
    starts = randn(8, 2)
    algorithm = GASLoC(0.7, alpha, gamma, "local").prepare(8, topology)
    history = flat_rounds(algorithm, starts, no_progress, 40, topology)
    laplacian = torch.eye(8, dtype=torch.float64) - topology.mixing_matrix(8)
    x = torch.nn.Parameter(starts.clone())
    optimizer = torch.optim.SGD([x], lr=alpha, momentum=gamma)
    for t in range(40):
        optimizer.zero_grad()
        (0.5 * (x * (laplacian @ x)).sum()).backward()
        optimizer.step()
        assert_close(history[t + 1], x.detach())


def fitted_rate(
    algorithm: GASLoC, num_workers: int, topology: Topology, expected: float, double_root: bool
) -> float:
    """exp of the slope of log(distance), over the rounds in which it falls from 1e-8 to 1e-20."""
    last = round(-20 * math.log(10) / math.log(expected))
    starts = randn(num_workers, 1)
    history = flat_rounds(algorithm, starts - starts.mean(0), no_progress, last, topology)
    t = np.arange(2 * last // 5, last + 1)
    found = distances(history)[t].log().numpy()
    if double_root:  # the distance decays like t * rate^t
        found = found - np.log(t)
    return math.exp(np.polyfit(t, found, 1)[0])


def test_the_optimal_pair_reaches_its_rate(subtests: pytest.Subtests) -> None:
    rows = [(Ring(), 8, 0.447), (Ring(), 16, 0.674), (Torus(), 16, 0.333), (Hypercube(), 16, 0.333)]
    for topology, num_workers, rate in rows:
        with subtests.test(str(topology), num_workers=num_workers):
            best = optimal_gossip(topology, num_workers)
            assert best.rate == pytest.approx(rate, abs=1e-3)
            pair = GASLoC(1.0, best.gossip_step, best.momentum, "local").prepare(
                num_workers, topology
            )
            with_momentum = fitted_rate(pair, num_workers, topology, rate, double_root=True)
            assert with_momentum == pytest.approx(rate, rel=0.01)

            spectrum = torch.linalg.eigvalsh(topology.mixing_matrix(num_workers))
            low, high = 1 - float(spectrum[-2]), 1 - float(spectrum[0])
            plain = GASLoC(1.0, 2 / (low + high), 0.0).prepare(num_workers, topology)
            rate_without = (high - low) / (high + low)
            without = fitted_rate(plain, num_workers, topology, rate_without, double_root=False)
            assert without == pytest.approx(rate_without, rel=0.01)
            assert with_momentum < without


@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_after_exact_averaging_disagreement_decays_like_the_root_of_the_momentum(
    momentum: float,
) -> None:
    algorithm = GASLoC(1.0, 1.0, momentum, "local").prepare(4, Complete())
    starts = randn(4, 1)
    starts = starts - starts.mean(0)
    found = distances(flat_rounds(algorithm, starts, no_progress, 120, Complete()))
    rate = (found[100:].max() / found[20:41].max()) ** (1 / 80)  # it oscillates as it decays
    assert rate.item() == pytest.approx(math.sqrt(momentum), rel=0.01)


# ------------------------------------------------------------------ H_i and settings


def test_each_worker_may_make_its_own_number_of_local_steps(pool: Pool) -> None:
    """Computed by hand: worker i takes H_i local steps, then one round averages."""
    every = [1, 3, 2]
    models = [make_model() for _ in range(3)]
    optimizers = [SGD(model.parameters()) for model in models]
    done = [0] * 3
    w = Ring().mixing_matrix(3)
    theta = torch.stack([flat(model) for model in models])
    expected = []
    for _ in range(4):
        for worker, model in enumerate(models):
            for _ in range(every[worker]):
                train_step(model, optimizers[worker], worker_batch(worker, done[worker]))
                done[worker] += 1
        local = torch.stack([flat(model) for model in models])
        theta = w @ (theta + 0.7 * (local - theta))
        expected.append(theta)
        for row, model in zip(theta, models, strict=True):
            position = 0
            for p in model.parameters():
                p.data.copy_(row[position : position + p.numel()].view_as(p))
                position += p.numel()
    algorithm = GASLoC(0.7, 1.0, 0.0)
    settings = {"topology": "ring", "sync_every": every}
    history = simulate(algorithm, 3, 4, **settings)
    assert_close(history[:4], torch.stack(expected))
    results = pool.run(run_engine, algorithm, 4, settings, world=3)
    assert_close(torch.stack(results, 1), history)


def test_unequal_numbers_of_local_steps_weigh_the_workers() -> None:
    """The fixed point solves sum_i k_i (x - c_i) = 0 with k_i = 1 - (1 - b)^H_i."""
    targets, every, b = torch.tensor([0.0, 1.0, 5.0], dtype=torch.float64), [1, 4, 10], 0.1
    models = [Point(torch.zeros(1, dtype=torch.float64)) for _ in targets]

    def local_step(worker: int) -> None:
        value = models[worker].value.data
        value.sub_(b * (value - targets[worker]))

    simulation = Simulation(models, GASLoC(), topology="complete", sync_every=every)
    simulation.run(local_step, 200)
    shares = 1 - (1 - b) ** torch.tensor(every, dtype=torch.float64)
    expected = (shares * targets).sum() / shares.sum()
    assert simulation.consensus().item() == pytest.approx(expected.item(), abs=0.05)


def test_automatic_settings_of_the_paper(subtests: pytest.Subtests) -> None:
    rows = [
        ("ring", 1.0, 0.5, 1.0),
        ("random_matching", 0.5, 0.0, 2.0),
        ("xor", 0.5, 0.0, 2.0),
        ("one_peer_exponential", 1.0, 0.0, 1.0),
        ("random_two_peer", 1.0, 0.0, 1.0),
    ]
    for name, gossip_step, momentum, scale in rows:
        with subtests.test(name):
            ready = GASLoC(momentum_on="local").prepare(8, get_topology(name))
            assert (ready.gossip_step, ready.momentum) == (gossip_step, momentum)
            assert ready.laplacian_scale == scale
            assert ready.prepare(8, get_topology(name)) == ready


def test_automatic_settings(subtests: pytest.Subtests) -> None:
    rows = [
        ("ring", 4, 0.7),
        ("ring", 32, 0.7),
        ("complete", 8, 0.7),
        ("exponential", 8, 0.5),
        ("torus", 16, 0.1),
        ("random_matching", 4, 0.7),
        ("random_matching", 16, 0.5),
        ("one_peer_exponential", 8, 0.3),
    ]
    for name, num_workers, momentum in rows:
        with subtests.test(name, num_workers=num_workers):
            topology = get_topology(name)
            ready = GASLoC().prepare(num_workers, topology)
            assert ready.momentum == momentum
            plain, radius = (
                gossip_radius(topology, num_workers, float(ready.gossip_step), gamma, "gossiped")
                for gamma in (0.0, momentum)
            )
            assert radius <= max(plain, 0.85)


def test_given_numbers_are_kept() -> None:
    ready = GASLoC(0.3, 0.4, 0.1, "gossiped").prepare(4, Ring())
    assert ready == GASLoC(0.3, 0.4, 0.1, "gossiped", laplacian_scale=1.0)


def test_settings_out_of_range_are_refused(subtests: pytest.Subtests) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"outer_lr": 0.0}, r"outer_lr must be positive, got 0.0\. A common value is 0.7"),
        ({"outer_lr": float("nan")}, "outer_lr must be positive, got nan"),
        ({"gossip_step": 0.0}, "gossip_step must be positive or 'auto', got 0.0"),
        ({"gossip_step": -1}, "gossip_step must be positive or 'auto', got -1"),
        ({"gossip_step": float("nan")}, "gossip_step must be positive or 'auto', got nan"),
        ({"gossip_step": "best"}, "gossip_step must be positive or 'auto', got 'best'"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\) or 'auto', got 1.0"),
        ({"momentum": -0.1}, r"momentum must be in \[0, 1\) or 'auto', got -0.1"),
        ({"momentum": float("nan")}, r"momentum must be in \[0, 1\) or 'auto', got nan"),
        ({"momentum_on": "global"}, "momentum_on must be 'local' or 'gossiped', got 'global'"),
    ]
    for settings, message in rows:
        with subtests.test(str(settings)), pytest.raises(ValueError, match=message):
            GASLoC(**settings)


def test_a_graph_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="power of two workers, got 6"):
        GASLoC().prepare(6, Hypercube())
