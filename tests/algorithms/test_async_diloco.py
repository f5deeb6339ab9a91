"""DiLoCo with overlap: the published order of steps, its error recursion, and drain()."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import Tensor

from lightning_loco import DiLoCo, LocalSGD, Simulation, StepEngine
from lightning_loco.app.configured_strategy import build_strategy
from lightning_loco.engine import RoundSettings
from tests.harness.pool import Pool, run_each
from tests.harness.small_model import flat, make_model, worker_batch
from tests.harness.sources import ROOT
from tests.harness.toys import (
    ADAMW,
    SGD,
    Point,
    assert_close,
    randn,
    run_engine,
    simulate,
    train_step,
)

TORCH_SGD = partial(torch.optim.SGD, lr=0.7, momentum=0.3, nesterov=True)
ALGORITHM = DiLoCo(0.7, 0.3)
COLD = {"overlap": True, "warm_start": False}


class Workers:
    """The local models and the outer model of the reference loops."""

    def __init__(self, world: int, steps: int, inner: Any, outer: Any = TORCH_SGD) -> None:
        self.outer = make_model()
        self.outer_optimizer = outer(self.outer.parameters())
        self.models = [copy.deepcopy(self.outer) for _ in range(world)]
        self.optimizers = [inner(model.parameters()) for model in self.models]
        self.steps = steps
        self.steps_done = 0

    def train(self) -> None:
        for worker, model in enumerate(self.models):
            for step in range(self.steps_done, self.steps_done + self.steps):
                train_step(model, self.optimizers[worker], worker_batch(worker, step))
        self.steps_done += self.steps

    def mean_pseudo_gradient(self) -> list[Tensor]:
        copies = zip(*(model.parameters() for model in self.models), strict=True)
        with torch.no_grad():
            return [
                torch.stack([p - q for q in local]).mean(0)
                for p, local in zip(self.outer.parameters(), copies, strict=True)
            ]

    def outer_step(self, gradients: list[Tensor]) -> None:
        for p, gradient in zip(self.outer.parameters(), gradients, strict=True):
            p.grad = gradient
        self.outer_optimizer.step()

    def reset_local(self) -> None:
        for model in self.models:
            model.load_state_dict(self.outer.state_dict())


def file_order(
    world: int, phases: int, steps: int, inner: Any, warm: bool = False, outer: Any = TORCH_SGD
) -> Tensor:
    """Run local steps, pseudo-gradient, outer step with the previous mean, reset, launch.

    Returns:
        ``(phases + 1, P)``: outer parameters after each phase, and after the last mean is applied.
    """
    workers = Workers(world, steps, inner, outer)
    pending = None
    history = []
    for phase in range(phases):
        workers.train()
        fresh = workers.mean_pseudo_gradient()
        if warm and phase == 0:
            workers.outer_step(fresh)
            fresh = None
        elif pending is not None:
            workers.outer_step(pending)
        workers.reset_local()
        pending = fresh
        history.append(flat(workers.outer))
    if pending is not None:
        workers.outer_step(pending)
    return torch.stack([*history, flat(workers.outer)])


def printed_order(world: int, phases: int, steps: int, inner: Any) -> Tensor:
    """Run the loop as printed: wait for the previous reduction first, then train and launch.

    Returns:
        ``(phases, P)``: outer parameters at the beginning of each phase.
    """
    workers = Workers(world, steps, inner)
    pending = None
    history = []
    for _ in range(phases):
        if pending is not None:
            workers.outer_step(pending)
            workers.reset_local()
        history.append(flat(workers.outer))
        workers.train()
        pending = workers.mean_pseudo_gradient()
    return torch.stack(history)


def test_the_printed_order_is_synchronous_and_shifted_by_one_phase() -> None:
    """Waiting right before the next phase hides no communication: that is overlap=False."""
    printed = printed_order(3, 6, 2, ADAMW)
    synchronous = simulate(ALGORITHM, 3, 6, inner=ADAMW, sync_every=2)
    assert_close(printed[1:], synchronous[:5, 0])


def test_it_has_the_published_order(subtests: pytest.Subtests) -> None:
    for inner, warm in itertools.product([SGD, ADAMW], [False, True]):
        with subtests.test(inner.func.__name__, warm_start=warm):
            expected = file_order(3, 6, 2, inner, warm)
            settings = {"overlap": True, "warm_start": warm, "sync_every": 2}
            history = simulate(ALGORITHM, 3, 6, inner=inner, **settings)
            assert_close(history, expected[:, None].expand(-1, 3, -1))
            synchronous = simulate(ALGORITHM, 3, 6, inner=inner, sync_every=2)
            assert (history - synchronous).abs().max() > 1e-2


def experiment(*choice: str) -> RoundSettings:
    """Return the settings of PCCL's example, with two local steps in each round."""
    overrides = ["experiment=pccl_async_diloco", "algorithm.sync_every=2", "run_dir=/run", *choice]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        settings = build_strategy(compose("train", overrides)).settings
    assert isinstance(settings, RoundSettings)
    return settings


def test_the_experiment_is_the_published_loop() -> None:
    """Elastic members run it as well; a joining one is tested in tests/elastic/test_pipeline.py."""
    settings = experiment()
    assert settings.outer_device == "cpu"
    assert dataclasses.replace(experiment("membership=elastic"), membership=None) == settings
    models = [make_model() for _ in range(3)]
    optimizers, steps = [ADAMW(model.parameters()) for model in models], [0, 0, 0]

    def local_step(worker: int) -> None:
        train_step(models[worker], optimizers[worker], worker_batch(worker, steps[worker]))
        steps[worker] += 1

    simulation, history = Simulation.from_settings(models, settings), []
    for _ in range(6):
        simulation.run(local_step, 1)
        history.append(simulation.params()[0])
    expected = file_order(3, 6, 2, ADAMW, outer=partial(torch.optim.SGD, lr=0.7))
    assert_close(torch.stack(history), expected[:6])


@pytest.mark.soak
def test_it_has_the_published_order_on_gloo(pool: Pool, subtests: pytest.Subtests) -> None:
    for world, warm in itertools.product([2, 3, 4], [False, True]):
        with subtests.test(world=world, warm_start=warm):
            settings = {"overlap": True, "warm_start": warm, "sync_every": 2}
            expected = file_order(world, 5, 2, ADAMW, warm)
            results = pool.run(run_engine, ALGORITHM, 5, settings, ADAMW, world=world)
            for history in results:
                assert_close(history, expected)
                assert torch.equal(history, results[0])


def errors(
    algorithm: DiLoCo, contraction: float, rounds: int, **settings: Any
) -> tuple[list[float], Simulation]:
    """Return the error at the start and after each round, on quadratics around -1 and 1."""
    models = [Point(torch.ones(1, dtype=torch.float64)) for _ in range(2)]
    optima = [-1.0, 1.0]

    def local_step(worker: int) -> None:
        models[worker].value.data.lerp_(
            models[worker].value.new_tensor(optima[worker]), contraction
        )

    simulation = Simulation(models, algorithm, **settings)
    found = [1.0]
    for _ in range(rounds):
        simulation.run(local_step, 1)
        found.append(simulation.consensus().item())
    return found, simulation


def test_the_known_sequence_of_errors() -> None:
    found, _ = errors(DiLoCo(0.7, 0.0), 0.3, 6, **COLD)
    assert found == pytest.approx([1, 1, 0.79, 0.58, 0.4141, 0.2923, 0.205339], abs=1e-12)


def test_the_error_follows_the_recursion_with_delay_1(subtests: pytest.Subtests) -> None:
    """e' = e - kappa e_previous; closed form with the roots of z^2 - z + kappa."""
    for rate, contraction in ((0.7, 0.3), (0.5, 0.9), (0.5, 0.5), (1.0, 0.9)):
        with subtests.test(rate=rate, contraction=contraction):
            found, _ = errors(DiLoCo(rate, 0.0), contraction, 20, **COLD)
            kappa = rate * contraction
            assert found[0] == found[1] == 1
            for t in range(1, 20):
                assert found[t + 1] == pytest.approx(found[t] - kappa * found[t - 1], abs=1e-12)
            root = complex(0.25 - kappa) ** 0.5
            if abs(root) > 1e-9:
                z1, z2 = 0.5 + root, 0.5 - root
                c1 = (1 - z2) / (z1 - z2)
                closed = [(c1 * z1**t + (1 - c1) * z2**t).real for t in range(21)]
            else:
                closed = [(1 + t) * 0.5**t for t in range(21)]
            assert found == pytest.approx(closed, abs=1e-12)
            assert max(abs(0.5 + root), abs(0.5 - root)) == pytest.approx(
                math.sqrt(kappa) if kappa > 0.25 else 0.5 + math.sqrt(0.25 - kappa)
            )


def test_a_warm_start_makes_the_first_phase_count() -> None:
    """The error is 1 - kappa after one round; then the recursion continues with delay 1."""
    found, _ = errors(DiLoCo(0.7, 0.0), 0.3, 6, overlap=True)
    cold, _ = errors(DiLoCo(0.7, 0.0), 0.3, 5, **COLD)
    assert found == pytest.approx([1.0, *(0.79 * e for e in cold)], abs=1e-12)


def test_without_a_warm_start_the_first_round_changes_nothing() -> None:
    """Theta_1 = Theta_0, and the local parameters are reset to it."""
    history = simulate(ALGORITHM, 3, 2, **COLD)
    start = flat(make_model())
    assert torch.equal(history[0], start.expand(3, -1))
    assert not torch.equal(history[1], start.expand(3, -1))


@pytest.mark.parametrize("settings", [{}, {"overlap": True}, COLD], ids=["sync", "warm", "cold"])
def test_without_progress_the_outer_parameters_do_not_change(settings: dict[str, Any]) -> None:
    models = [Point(randn(5)) for _ in range(3)]
    simulation = Simulation(models, ALGORITHM, **settings)
    simulation.run(lambda worker: None, 5)
    simulation.drain()
    assert torch.equal(torch.stack(simulation.params()), randn(5).expand(3, 5))


def test_after_t_phases_t_minus_1_means_are_applied_and_drain_applies_the_last() -> None:
    found, simulation = errors(DiLoCo(0.7, 0.0), 0.3, 5, **COLD)
    later, _ = errors(DiLoCo(0.7, 0.0), 0.3, 6, **COLD)
    assert simulation.consensus().item() == found[5]
    simulation.drain()
    assert simulation.consensus().item() == later[6]
    for p in simulation.params():
        assert p.item() == later[6]
    simulation.drain()
    assert simulation.consensus().item() == later[6]


def count_outer_steps(rank: int, world: int, phases: int) -> list[float]:
    """Return the parameters before and after drain(); each mean moves them by 1."""
    model = Point(torch.zeros(1))
    engine = StepEngine(model, DiLoCo(1.0, 0.0), sync_every=1, **COLD)
    for _ in range(phases):
        model.value.data.sub_(1.0)
        assert engine.step()
    before = model.value.item()
    engine.drain()
    drained = model.value.item()
    engine.finish()
    engine.close()
    assert model.value.item() == drained
    return [before, drained]


def test_draining_the_engine_applies_the_last_mean(pool: Pool) -> None:
    calls = {phases: (phases,) for phases in (1, 2, 5)}
    for phases, results in run_each(pool, count_outer_steps, calls, world=2).items():
        assert results == [[1.0 - phases, -phases]] * 2


def test_without_overlap_there_is_no_delay() -> None:
    expected, _ = errors(DiLoCo(0.7, 0.3), 0.3, 6)
    warm, _ = errors(DiLoCo(0.7, 0.3), 0.3, 6, overlap=True)
    assert warm[1] == expected[1]
    assert expected[1] == pytest.approx(1 - 0.7 * 1.3 * 0.3, abs=1e-12)
    assert warm[2:] != expected[2:]


def test_algorithms_without_a_merge_policy_refuse_overlap() -> None:
    with pytest.raises(ValueError, match="overlap=True needs an algorithm with outer parameters"):
        Simulation([Point(torch.zeros(1))] * 2, LocalSGD(), overlap=True)
