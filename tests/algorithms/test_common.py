"""Laws that hold for every algorithm, for all rows of the table of test cases."""

from __future__ import annotations

import dataclasses
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco import (
    SPARTA,
    DiLoCo,
    GASLoC,
    LocalSGD,
    ModelAverage,
    PairwiseAverage,
    Simulation,
    StepEngine,
)
from lightning_loco.algorithms import Algorithm, RoundInfo, State
from lightning_loco.engine import RoundSettings
from lightning_loco.engine.buckets import slice_state
from lightning_loco.topology import FromMatrix
from tests.cases import CASES, Case, rows, without_variants
from tests.harness.pool import Pool
from tests.harness.toys import (
    Point,
    apply_update,
    assert_close,
    flat_rounds,
    move_to,
    randn,
    states_of,
)


def apply_rounds(algorithm: Algorithm, state: State, rounds: range, dtype: torch.dtype) -> Tensor:
    """Run rounds of one worker with random received vectors, and return its parameters."""
    params = randn(6, seed=99).to(dtype)
    if (start := algorithm.round_start(state)) is not None:
        params.copy_(start)
    for t in rounds:
        params.add_(randn(6, seed=t).to(dtype), alpha=0.1)
        message = algorithm.propose(params, state, RoundInfo())
        received = message + 0.1 * randn(len(message), seed=100 + t).to(dtype)
        apply_update(algorithm, params, received, state)
    return params


@pytest.mark.parametrize("drive", [StepEngine, Simulation])
def test_an_algorithm_without_rounds_is_refused(drive: Any) -> None:
    model = Point(torch.zeros(3))
    with pytest.raises(ValueError, match="PairwiseEngine"):
        drive([model] if drive is Simulation else model, PairwiseAverage())


def check_that_it_converges(
    case: Case, num_workers: int, rounds: int = 100, rate: float = 0.3
) -> None:
    """Assert that the consensus converges to the mean of the targets, the optimum of their sum."""
    targets = randn(num_workers, 3)
    models = [Point(torch.zeros(3, dtype=torch.float64)) for _ in range(num_workers)]

    def local_step(worker: int) -> None:
        value = models[worker].value.data
        value.add_(targets[worker] - value, alpha=rate)

    simulation = Simulation(models, case.algorithm, **case.settings(sync_every=2))
    before = (simulation.consensus() - targets.mean(0)).abs().max()
    simulation.run(local_step, rounds)
    simulation.drain()
    off = (simulation.consensus() - targets.mean(0)).abs().max()
    assert off < min(case.accuracy, before)


@rows("laws", without_variants())
def test_it_converges_on_quadratics_with_different_targets_on_each_worker(case: Case) -> None:
    check_that_it_converges(case, num_workers=4)


@rows("laws", ["diloco", "eager_diloco", "gasloc", "async_model_average"])
def test_one_worker_converges_on_a_quadratic(case: Case) -> None:
    check_that_it_converges(case, num_workers=1)


@pytest.mark.soak
@rows("laws")
def test_it_converges_with_any_number_of_workers(case: Case, subtests: pytest.Subtests) -> None:
    for num_workers in (1, 2, 3, 4):
        with subtests.test(num_workers=num_workers):
            check_that_it_converges(case, num_workers, rounds=300, rate=0.1)


def law_messages_have_the_dtype_of_the_parameters(case: Case, dtype: torch.dtype) -> None:
    algorithm = case.prepared(4)
    params = randn(6).to(dtype)
    state = algorithm.init(params.clone())
    for _ in range(3):
        message = algorithm.propose(params, state, RoundInfo())
        assert message.dtype == dtype
        apply_update(algorithm, params, message.clone(), state)
        assert params.dtype == dtype
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == (6,):
                assert value.dtype == dtype, key


def law_the_model_keeps_its_dtype_and_the_state_is_float32_or_wider(
    case: Case, dtype: torch.dtype
) -> None:
    """Sums and outer parameters are at least float32; the model keeps its dtype."""
    models = [Point(torch.zeros(6).to(dtype)) for _ in range(3)]
    simulation = Simulation(models, case.algorithm, **case.settings())
    simulation.run(lambda worker: models[worker].value.data.add_(worker + 1), 3)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert all(model.value.dtype == dtype for model in models)
    assert all(model.value.detach().float().abs().sum() > 0 for model in models)
    assert simulation.consensus().dtype == wide
    for state in states_of(simulation):
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == (6,):
                assert value.dtype == wide, key


def law_it_is_picklable_and_equal_after_a_round_trip(case: Case) -> None:
    for algorithm in (case.algorithm, case.prepared(4)):
        again = pickle.loads(pickle.dumps(algorithm))
        assert again == algorithm
        assert hash(again) == hash(algorithm)
        assert repr(again) == repr(algorithm)


def law_it_is_frozen(case: Case) -> None:
    for field in dataclasses.fields(case.algorithm):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(case.algorithm, field.name, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        case.algorithm.something_new = 1  # type: ignore[attr-defined]


def law_prepare_is_pure_and_idempotent(case: Case) -> None:
    before = repr(case.algorithm)
    ready = case.prepared(4)
    assert repr(case.algorithm) == before
    assert RoundSettings(ready, topology=case.topology).prepare(4).algorithm == ready


def law_its_state_is_tensors_and_plain_numbers(case: Case) -> None:
    """Loaded with weights_only, it continues to the same numbers, bit for bit."""
    algorithm = case.prepared(4)
    start = randn(6, seed=98)
    expected = apply_rounds(algorithm, algorithm.init(start.clone()), range(7), torch.float64)
    state = algorithm.init(start.clone())
    apply_rounds(algorithm, state, range(4), torch.float64)
    for key, value in state.items():
        assert isinstance(key, str)
        assert isinstance(value, (Tensor, int, float))
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    if algorithm.consensus_key is not None:  # a round starts from the consensus in the state
        result = apply_rounds(algorithm, loaded, range(4, 7), torch.float64)
        assert torch.equal(result, expected)
    assert loaded.keys() == state.keys()


def law_two_states_share_no_memory(case: Case) -> None:
    """A state may keep the tensor it is created from, but not the parameters of later rounds."""
    algorithm = case.prepared(4)
    params = randn(6)
    state = algorithm.init(params.clone())
    message = algorithm.propose(params, state, RoundInfo())
    apply_update(algorithm, params, message.clone(), state)
    kept = {key: value.clone() for key, value in state.items() if isinstance(value, Tensor)}
    params.fill_(float("nan"))
    for key, value in kept.items():
        assert torch.equal(state[key], value), key
    pointers = [v.data_ptr() for v in state.values() if isinstance(v, Tensor)]
    assert len(set(pointers)) == len(pointers)


def law_received_may_share_memory_with_the_parameters(case: Case) -> None:
    """An all-reduce works in place, so the received vector may be in the memory of the message."""
    results = []
    for in_place in (False, True):
        algorithm = case.prepared(4)
        params = randn(6)
        state = algorithm.init(randn(6, seed=1))
        for _ in range(3):
            message = algorithm.propose(params, state, RoundInfo())
            apply_update(algorithm, params, message if in_place else message.clone(), state)
            params.add_(0.1)
        results.append(params)
    assert torch.equal(*results)


def law_restart_without_progress_gives_the_parameters_of_the_last_update(case: Case) -> None:
    """Without progress, restart returns the parameters that the last apply wrote."""
    algorithm = case.prepared(4)
    state = algorithm.init(randn(6))
    params = randn(6, seed=1)
    message = algorithm.propose(params, state, RoundInfo())
    apply_update(algorithm, params, message.clone(), state)
    start = algorithm.round_start(state)
    if type(algorithm) in (LocalSGD, ModelAverage, SPARTA):
        assert start is None
    else:
        assert start is not None
        assert torch.equal(start, params)


def law_all_workers_have_the_same_state_keys(case: Case) -> None:
    """Otherwise checkpoints and exchanges of state would not match."""
    models = [Point(torch.zeros(6)) for _ in range(3)]
    simulation = Simulation(models, case.algorithm, **case.settings(sync_every=1))
    for _ in range(3):
        simulation.run(lambda worker: models[worker].value.data.add_(worker), 1)
        keys = [list(state) for state in states_of(simulation)]
        assert all(other == keys[0] for other in keys)


def run_on_slices(algorithm: Algorithm, cuts: list[int]) -> Tensor:
    """Run rounds of one worker, each computed slice by slice on views of one state."""
    edges = [0, *cuts, 12]
    slices = [range(start, stop) for start, stop in zip(edges, edges[1:], strict=False)]
    state = algorithm.init(randn(12))
    parts = [slice_state(state, 12, one) for one in slices]
    params = randn(12, seed=1)
    for t in range(4):
        received = randn(12, seed=10 + t)
        for one, part in zip(slices, parts, strict=True):
            own, info = params[one.start : one.stop], RoundInfo(t, start=one.start)
            message = algorithm.propose(own, part, info)
            assert message.shape == (algorithm.message_length(len(one)),)
            first = algorithm.message_length(one.start)
            change = received[first : first + len(message)]
            apply_update(algorithm, own, message + change, part, info)
        for name in algorithm.summed & state.keys():
            total = sum(float(part[name]) for part in parts)
            for part in parts:
                part[name] = total
        params.mul_(0.9)
    whole = [state[key] for key in sorted(state) if isinstance(state[key], Tensor)]
    return torch.cat([params, *whole])


def law_slices_give_the_same_result_as_the_whole(case: Case, cuts: list[int]) -> None:
    """Equal up to the last bit: vectorized kernels round the end of a slice differently."""
    algorithm = case.prepared(4)
    whole = run_on_slices(algorithm, [])
    torch.testing.assert_close(run_on_slices(algorithm, cuts), whole, rtol=1e-15, atol=1e-15)


def bits(state: State) -> dict[str, Any]:
    """Return a copy of all entries that can be compared exactly."""
    return {k: v.tolist() if isinstance(v, Tensor) else v for k, v in state.items()}


def law_propose_is_pure(case: Case) -> None:
    """Called twice it returns the same message, and no entry of the state changes by a bit."""
    algorithm = case.prepared(4)
    state = algorithm.init(randn(6))
    for t in range(3):
        params, before = randn(6, seed=t + 1), bits(state)
        message = algorithm.propose(params.clone(), state, RoundInfo()).clone()
        assert torch.equal(algorithm.propose(params.clone(), state, RoundInfo()), message)
        assert bits(state) == before
        kept = [v.data_ptr() for v in state.values() if isinstance(v, Tensor)]
        assert algorithm.propose(params, state, RoundInfo()).data_ptr() not in kept
        apply_update(algorithm, params, message + randn(len(message), seed=10 + t), state)


def law_restart_gives_the_start_of_the_round(case: Case) -> None:
    """In every round and after any call of propose; or restart always returns None."""
    algorithm = case.prepared(4)
    params = randn(6)
    state = algorithm.init(params.clone())
    has_start = algorithm.round_start(state) is not None
    for t in range(4):
        began = params.clone()
        params.add_(randn(6, seed=t), alpha=0.1)
        message = algorithm.propose(params, state, RoundInfo()).clone()
        start = algorithm.round_start(state)
        assert torch.equal(start, began) if has_start else start is None
        if len(message) == len(params):
            params = message.clone()
        apply_update(algorithm, params, message + randn(len(message), seed=10 + t), state)


def law_permuting_the_workers_permutes_the_results(case: Case) -> None:
    """Renumbering the workers and the nodes of the graph changes nothing else."""
    num_workers, order = 5, torch.tensor([3, 0, 4, 1, 2])
    algorithm = case.prepared(num_workers)
    targets, starts = randn(num_workers, 4), randn(4, seed=1).expand(num_workers, 4)
    graphs: list[Any] = [None, None]
    topology = case.graph
    if topology is not None:
        matrix = topology.mixing_matrix(num_workers, 0)
        if topology.period(num_workers) != 1:  # several rounds form a connected graph
            matrix = sum((topology.mixing_matrix(num_workers, t) for t in range(1, 8)), matrix) / 8
        graphs = [FromMatrix(m, directed=True) for m in (matrix, matrix[order][:, order])]
    plain = flat_rounds(algorithm, starts, move_to(targets, 0.4), 5, graphs[0])
    permuted = flat_rounds(algorithm, starts, move_to(targets[order], 0.4), 5, graphs[1])
    assert_close(permuted, plain[:, order])
    if topology is not None:
        assert (permuted - plain).abs().max() > 1e-3


PLAIN_LAWS = [
    law_it_is_picklable_and_equal_after_a_round_trip,
    law_it_is_frozen,
    law_prepare_is_pure_and_idempotent,
    law_its_state_is_tensors_and_plain_numbers,
    law_two_states_share_no_memory,
    law_received_may_share_memory_with_the_parameters,
    law_restart_without_progress_gives_the_parameters_of_the_last_update,
    law_all_workers_have_the_same_state_keys,
    law_propose_is_pure,
    law_restart_gives_the_start_of_the_round,
    law_permuting_the_workers_permutes_the_results,
]


@rows("laws")
def test_the_laws_of_every_algorithm_hold(case: Case, subtests: pytest.Subtests) -> None:
    for law in PLAIN_LAWS:
        with subtests.test(law.__name__.removeprefix("law_")):
            law(case)
    for dtype in (torch.float32, torch.float64):
        with subtests.test("messages_have_the_dtype_of_the_parameters", dtype=dtype):
            law_messages_have_the_dtype_of_the_parameters(case, dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        with subtests.test("the_model_keeps_its_dtype_and_the_state_is_wide", dtype=dtype):
            law_the_model_keeps_its_dtype_and_the_state_is_float32_or_wider(case, dtype)
    if (granularity := case.prepared(4).granularity) is not None:
        longer = ([6], [1, 2, 5], list(range(1, 12)), [11])
        for cuts in longer if granularity == 1 else ([granularity], [granularity, 2 * granularity]):
            with subtests.test("slices_give_the_same_result_as_the_whole", cuts=cuts):
                law_slices_give_the_same_result_as_the_whole(case, cuts)


@rows("alone")
def test_a_worker_alone_computes_what_equal_workers_compute(case: Case) -> None:
    """One worker gives the same numbers as several workers with the same local steps."""
    histories = []
    for num_workers in (1, 4):
        models = [Point(randn(6)) for _ in range(num_workers)]
        algorithm = case.prepared(4)
        if isinstance(algorithm, GASLoC):  # "auto" may choose otherwise for one worker
            algorithm = dataclasses.replace(case.algorithm, momentum=algorithm.momentum)
        simulation = Simulation(models, algorithm, **case.settings())
        simulation.run(lambda worker: models[worker].value.data.mul_(0.8).add_(0.1), 5)  # noqa: B023
        histories.append(simulation.params()[0])
    assert_close(histories[0], histories[1])


LARGE = 5000  # five chunks of at most 1024 elements, of which four are pending


def train_large(rank: int, world: int, case: Case, bucket_bytes: int) -> Tensor:
    model = Point(torch.zeros(LARGE, dtype=torch.float64))
    target = randn(LARGE, seed=rank)
    settings = case.settings(sync_every=2, bucket_bytes=bucket_bytes)
    engine = StepEngine(model, case.algorithm, **settings)
    for _ in range(6):
        model.value.data.add_(target - model.value.data, alpha=0.1)
        engine.step()
    engine.drain()
    engine.finish()
    engine.close()
    return model.value.detach()


@rows("chunks")
def test_chunks_give_the_same_result_as_the_whole_on_gloo(pool: Pool, case: Case) -> None:
    targets = [randn(LARGE, seed=worker) for worker in range(3)]
    models = [Point(torch.zeros(LARGE, dtype=torch.float64)) for _ in targets]

    def local_step(worker: int) -> None:
        value = models[worker].value.data
        value.add_(targets[worker] - value, alpha=0.1)

    simulation = Simulation(models, case.algorithm, **case.settings(sync_every=2))
    simulation.run(local_step, 3)
    simulation.drain()
    for result in pool.run(train_large, case, 1, world=3):
        assert_close(result, simulation.consensus())


MASTERS = [name for name, case in CASES.items() if case.algorithm.consensus_key is not None]


@rows("without progress", MASTERS)
def test_without_progress_a_bfloat16_model_moves_no_outer_parameter(case: Case) -> None:
    """The rounding error of the model's bfloat16 parameters does not count as progress."""
    models = [Point(torch.zeros(6, dtype=torch.bfloat16)) for _ in range(3)]
    plain = dataclasses.replace(case.algorithm, outer_momentum=0.0)
    simulation = Simulation(models, plain, **case.settings())
    between = torch.linspace(1.0, 1.01, 6)
    assert not torch.equal(between.bfloat16().float(), between)
    for state, model in zip(states_of(simulation), models, strict=True):
        state["outer"].copy_(between)
        model.value.data.copy_(between)
    simulation.run(lambda worker: None, 3)
    for state in states_of(simulation):
        assert torch.equal(state["outer"], between)


SMALLEST = 2.0**-7
"""The spacing of bfloat16 right above 1."""

SMALL_STEPS = [
    pytest.param(DiLoCo(0.5, 0.0), False, id="diloco"),
    pytest.param(GASLoC(0.5, 1.0, 0.0), False, id="gasloc"),
    pytest.param(GASLoC(0.5, 1.0, 0.0), True, id="gasloc_overlap"),
]
small_steps = pytest.mark.parametrize(("algorithm", "overlap"), SMALL_STEPS)


def topology_of(algorithm: Algorithm) -> str | None:
    return "complete" if algorithm.exchange == "neighbors" else None


@small_steps
def test_small_steps_of_a_bfloat16_model_add_up(algorithm: Algorithm, overlap: bool) -> None:
    """One worker of four takes the smallest step each round; the mean moves by 1/8 of it.

    Only float32 outer parameters can represent that; the model's rounding must not erase it.
    """
    models = [Point(torch.ones(1, dtype=torch.bfloat16)) for _ in range(4)]
    simulation = Simulation(models, algorithm, overlap=overlap, topology=topology_of(algorithm))

    def local_step(worker: int) -> None:
        if worker == 0:
            models[worker].value.data.add_(SMALLEST)

    simulation.run(local_step, 32)
    simulation.drain()
    assert models[1].value.item() == pytest.approx(1 + 32 * SMALLEST / 8, abs=SMALLEST / 2)


def take_small_steps(rank: int, world: int, algorithm: Algorithm, overlap: bool) -> float:
    model = Point(torch.ones(1, dtype=torch.bfloat16))
    settings = {"overlap": overlap, "topology": topology_of(algorithm)}
    engine = StepEngine(model, algorithm, sync_every=1, **settings)
    for _ in range(16):
        if rank == 0:
            model.value.data.add_(SMALLEST)
        engine.step()
    engine.finish()
    engine.close()
    assert model.value.dtype == torch.bfloat16
    return model.value.item()


@small_steps
def test_small_steps_of_a_bfloat16_model_add_up_on_gloo(
    pool: Pool, algorithm: Algorithm, overlap: bool
) -> None:
    for result in pool.run(take_small_steps, algorithm, overlap, world=4):
        assert result == pytest.approx(1 + 16 * SMALLEST / 8, abs=SMALLEST / 2)
