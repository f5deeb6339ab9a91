"""A worker of two ranks that shard the model runs the same rounds as a worker of one rank."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.utils import parameters_to_vector

from lightning_loco import SPARTA, Algorithm, DiLoCo, GASLoC, LocalSGD, NoLoCo, Simulation
from lightning_loco.algorithms import Mix, ModelAverage
from lightning_loco.compression import Int8
from lightning_loco.costs import Link, as_links
from lightning_loco.distributed import WorkerGroup
from lightning_loco.distributed.statistics import Spans
from lightning_loco.engine import Engine, RoundSettings
from lightning_loco.model.flat import local_tensor
from lightning_loco.schedules import EveryInterval, EverySteps, Staggered
from tests.harness.pool import Pool
from tests.harness.toys import randn

NUM_WORKERS = REPLICA_SIZE = 2
SHAPE, NUMEL, CUT = (5, 8), 40, 24  # the first place holds 3 rows, the second one 2
SHARDS = slice(0, CUT), slice(CUT, NUMEL)
SYNC_EVERY, ROUNDS = 3, 8
TARGETS = randn(NUM_WORKERS, NUMEL)


class Vector(nn.Module):
    """One matrix, or a shard of it if it is distributed over the ranks of a worker."""

    def __init__(self, group: WorkerGroup | None = None) -> None:
        super().__init__()
        value = randn(NUMEL, seed=9).view(SHAPE)
        self.value = nn.Parameter(value if group is None else sharded(value, Shard(0), group))

    @property
    def held(self) -> Tensor:
        """Return the elements that this rank holds."""
        return local_tensor(self.value).detach().view(-1)


def sharded(whole: Tensor, placement: Placement, group: WorkerGroup) -> DTensor:
    """Return the shard of a tensor for this rank of a worker."""
    mesh = DeviceMesh.from_group(group.inner, "cpu")
    return distribute_tensor(whole, mesh, [placement], src_data_rank=None)


def approach(model: Vector, worker: int, elements: slice, step: int) -> None:
    """Take an elementwise local step, whose size changes from step to step."""
    model.held.add_(TARGETS[worker][elements] - model.held, alpha=0.05 + 0.02 * (step % 4))


def settings_of(algorithm: Algorithm, overlap: bool, compression: Any) -> RoundSettings:
    schedule = EverySteps(SYNC_EVERY, overlap=overlap)
    return RoundSettings(algorithm, schedule, compression=compression)


def unsharded(
    algorithm: Algorithm, overlap: bool, compression: Any = None, nan_at: int | None = None
) -> Tensor:
    """Return the workers' parameters after the rounds, ``(N, P)``; each worker is one rank."""
    models = [Vector() for _ in range(NUM_WORKERS)]
    simulation = Simulation.from_settings(models, settings_of(algorithm, overlap, compression))
    steps = [0] * NUM_WORKERS

    def local_step(worker: int) -> None:
        approach(models[worker], worker, slice(0, NUMEL), steps[worker])
        if worker == 1 and steps[worker] == nan_at:
            models[worker].held[-1] = math.nan
        steps[worker] += 1

    simulation.run(local_step, ROUNDS)
    simulation.drain()
    return torch.stack(simulation.params())


def train_shard(
    rank: int,
    world: int,
    algorithm: Algorithm,
    overlap: bool,
    compression: Any = None,
    nan_at: int | None = None,
) -> dict[str, Any]:
    torch.manual_seed(rank)  # the ranks of a worker still draw the same pairs
    group = WorkerGroup.create(timeout_s=30, replica_size=REPLICA_SIZE)
    worker, place = divmod(rank, REPLICA_SIZE)
    assert (group.worker, group.place, group.num_workers) == (worker, place, NUM_WORKERS)
    model = Vector(group)
    settings = settings_of(algorithm, overlap, compression)
    engine = Engine.from_settings(model, settings, group)
    engine.measure_outer_gradient, engine.consensus_every = True, 1
    engine.consensus_elements = NUMEL
    for step in range(ROUNDS * SYNC_EVERY):
        approach(model, worker, SHARDS[place], step)
        if (rank, step) == (3, nan_at):
            model.held[-1] = math.nan
        engine.worker.last_loss = float(rank)
        engine.step()
    engine.drain()
    statistics = engine.statistics
    found = {
        "params": model.held.clone(),
        "topology": repr(engine.settings.topology),
        "norm": statistics.outer_grad_norm,
        "persistence": statistics.persistence,
        "distance": statistics.consensus_distance,
        "losses": statistics.losses,
        "sent": statistics.worker_bytes_sent,
        "all_sent": sum(group.gather_inside(statistics.bytes_sent)),
    }
    engine.finish()
    found["consensus"] = model.held.clone()
    engine.close()
    return found


def joined(results: list[dict[str, Any]], name: str) -> Tensor:
    """Join the shards of all ranks to the vectors of all workers, ``(N, P)``."""
    shards = [result[name] for result in results]
    return torch.stack([torch.cat(shards[:REPLICA_SIZE]), torch.cat(shards[REPLICA_SIZE:])])


CASES = {
    "local_sgd": (LocalSGD(), False, None),
    "diloco": (DiLoCo(0.7, 0.5), False, None),
    "diloco auto": (DiLoCo(outer_momentum="auto"), False, None),
    "diloco overlapped": (DiLoCo(0.7, 0.3), True, None),
    "diloco int8": (DiLoCo(0.7, 0.5), False, Int8(8)),
    "diloco trimmed mean": (DiLoCo(0.7, 0.5, aggregate="trimmed_mean"), False, None),
    "gasloc": (GASLoC(), False, None),
    "gasloc overlapped": (GASLoC(), True, None),
    "gasloc int8": (GASLoC(), False, Int8(8)),
    "noloco": (NoLoCo(), False, None),
    "sparta": (SPARTA(0.25), False, None),  # shards begin at stretch boundaries
}


@pytest.mark.filterwarnings("ignore:.*cannot tell which of 2 workers is wrong:UserWarning")
@pytest.mark.parametrize("name", list(CASES))
def test_shards_give_what_whole_models_give(pool: Pool, name: str) -> None:
    algorithm, overlap, compression = CASES[name]
    expected = unsharded(algorithm, overlap, compression)
    results = pool.run(train_shard, algorithm, overlap, compression, world=4)
    torch.testing.assert_close(joined(results, "params"), expected, rtol=0, atol=1e-11)
    consensus = expected.mean(0).expand(NUM_WORKERS, -1)
    torch.testing.assert_close(joined(results, "consensus"), consensus, rtol=0, atol=1e-11)
    assert len({result["topology"] for result in results}) == 1


def train_whole(rank: int, world: int, algorithm: Algorithm) -> dict[str, Any]:
    """Train with one rank per worker."""
    group = WorkerGroup.create(timeout_s=30)
    model = Vector()
    engine = Engine.from_settings(model, settings_of(algorithm, False, None), group)
    engine.measure_outer_gradient, engine.consensus_every = True, 1
    engine.consensus_elements = NUMEL
    for step in range(ROUNDS * SYNC_EVERY):
        approach(model, rank, slice(0, NUMEL), step)
        engine.step()
    found = {"norm": engine.statistics.outer_grad_norm}
    found["persistence"] = engine.statistics.persistence
    found["distance"] = engine.statistics.consensus_distance
    engine.close()
    return found


@pytest.mark.parametrize("algorithm", [DiLoCo(0.7, 0.5), GASLoC()], ids=str)
def test_sums_over_the_ranks_of_a_worker_count_each_element_once(
    pool: Pool, algorithm: Algorithm
) -> None:
    whole = pool.run(train_whole, algorithm, world=2)
    for rank, found in enumerate(pool.run(train_shard, algorithm, False, world=4)):
        expected = whole[rank // REPLICA_SIZE]
        assert found["norm"] == pytest.approx(expected["norm"], rel=1e-11)
        assert found["persistence"] == pytest.approx(expected["persistence"], rel=1e-11)
        assert found["distance"] == pytest.approx(expected["distance"], rel=1e-11)
        assert found["losses"] == [0.5, 2.5]  # the mean over the ranks of each worker
        assert found["sent"] == found["all_sent"]


@pytest.mark.parametrize("name", ["diloco", "gasloc", "diloco overlapped"])
def test_nan_in_one_shard_leaves_the_whole_worker_out(pool: Pool, name: str) -> None:
    algorithm, overlap, compression = CASES[name]
    expected = unsharded(algorithm, overlap, compression, nan_at=4)
    assert torch.isfinite(expected).all()
    results = pool.run(train_shard, algorithm, overlap, compression, 4, world=4)
    torch.testing.assert_close(joined(results, "params"), expected, rtol=0, atol=1e-11)
    plain = unsharded(algorithm, overlap, compression)
    assert (expected - plain).abs().max() > 1e-3


WIDE = (3, 66_000)  # the first rank holds 2 rows


def train_wide(rank: int, world: int) -> float:
    """Return the persistence that automatic momentum finds for a single worker of all ranks.

    The first rows keep their direction, and the last one turns by a right angle.
    """
    group = WorkerGroup.create(timeout_s=30, replica_size=world)
    whole = torch.zeros(WIDE)
    model = nn.Module()
    model.value = nn.Parameter(whole if world == 1 else sharded(whole, Shard(0), group))
    settings = RoundSettings(DiLoCo(outer_momentum="auto"), EverySteps(1))
    engine = Engine.from_settings(model, settings, group)
    rows = local_tensor(model.value).detach()
    for step in range(6):
        moves = torch.ones(WIDE)
        moves[2:, step % 2 :: 2] = 0
        rows.add_(moves[: len(rows)] if rank == 0 else moves[-len(rows) :])
        engine.step()
    persistence: float = engine.fragments[0].state["persistence"]
    engine.close()
    return persistence


def test_automatic_momentum_samples_all_ranks_alike(pool: Pool) -> None:
    (whole,) = pool.run(train_wide, world=1)
    first, second = pool.run(train_wide, world=2)
    assert first == second == pytest.approx(whole, rel=1e-9)
    assert whole < 0.95


def average_by_time(rank: int, world: int) -> dict[str, Any]:
    """Average asynchronously; place 0 decides which rounds start and end."""
    group = WorkerGroup.create(timeout_s=30, replica_size=REPLICA_SIZE)
    worker, place = divmod(rank, REPLICA_SIZE)
    model = Vector(group)
    engine = Engine.from_settings(model, RoundSettings(ModelAverage(), EveryInterval(0.0)), group)
    history = []
    while engine.worker.round_index < 4:
        step = engine.worker.steps
        approach(model, worker, SHARDS[place], step)
        engine.step()
        history.append((engine.worker.round_index, engine.fragments[0].pending is None))
    engine.finish()
    engine.close()
    return {"history": history, "params": model.held.clone()}


def test_the_ranks_of_a_worker_begin_and_end_rounds_by_time_together(pool: Pool) -> None:
    results = pool.run(average_by_time, world=4)
    for worker in range(NUM_WORKERS):
        first, second = results[REPLICA_SIZE * worker : REPLICA_SIZE * (worker + 1)]
        assert first["history"] == second["history"]
        assert first["history"][-1][0] == 4
    params = joined(results, "params")
    assert torch.equal(params[0], params[1])


# ------------------------------------------------------------- several kinds of parameters

PARTS = {"blocks.0.a": (3, 4), "blocks.0.b": (5,), "blocks.1.a": (4, 6), "blocks.2.b": (1,)}


class Blocks(nn.Module):
    """Parameters that are whole, shards of rows or columns, or shards that both ranks hold."""

    def __init__(self, kinds: dict[str, Placement] | None = None, group: Any = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Module() for _ in range(3)])
        for number, (name, shape) in enumerate(PARTS.items()):
            value = randn(math.prod(shape), seed=number).view(shape)
            if kinds is not None and name in kinds:
                value = sharded(value, kinds[name], group)
            _, index, leaf = name.split(".")
            self.blocks[int(index)].register_parameter(leaf, nn.Parameter(value))


def target_of(worker: int, name: str) -> Tensor:
    seed = 10 * worker + list(PARTS).index(name)
    return randn(math.prod(PARTS[name]), seed=100 + seed).view(PARTS[name])


def approach_all(model: Blocks, worker: int, step: int) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            target = target_of(worker, name)
            if isinstance(p, DTensor):
                target = distribute_tensor(target, p.device_mesh, p.placements, src_data_rank=None)
            p.add_(target - p, alpha=0.05 + 0.02 * (step % 4))


def train_blocks(
    rank: int,
    world: int,
    kinds: dict[str, Placement],
    settings: RoundSettings,
    replica_size: int = REPLICA_SIZE,
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    torch.manual_seed(rank)
    group = WorkerGroup.create(timeout_s=30, replica_size=replica_size)
    model = Blocks(kinds, group)
    engine = Engine.from_settings(model, settings, group)
    engine.measure_outer_gradient = True
    for step in range(rounds * SYNC_EVERY):
        approach_all(model, group.worker, step)
        engine.step()
    engine.drain()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    found = {
        "params": torch.cat([p.detach().reshape(-1) for p in whole]),
        "owned": engine.worker.replica.layout.numel,
        "norm": engine.statistics.outer_grad_norm,
        "bytes": engine.statistics.bytes_sent,
    }
    engine.finish()
    engine.close()
    return found


ROWS, COLUMNS, BOTH = Shard(0), Shard(1), Replicate()
KINDS: dict[str, dict[str, Placement]] = {
    "whole": {},
    "rows": dict.fromkeys(PARTS, ROWS),
    "columns": {"blocks.0.a": COLUMNS, "blocks.1.a": COLUMNS},
    "one rank holds nothing of a fragment": {"blocks.0.a": ROWS, "blocks.2.b": ROWS},
    "both hold a shard": {"blocks.0.a": ROWS, "blocks.0.b": BOTH, "blocks.1.a": BOTH},
}
BY_LAYER = Staggered(SYNC_EVERY, 3, delay=1, pattern="strided")
EVENLY = Staggered(SYNC_EVERY, 3, delay=0, pattern="even")
HIDDEN = Staggered(SYNC_EVERY, 3, delay=1, pattern="even")
ROUNDS_OF = {
    "sparta": RoundSettings(SPARTA(0.25), EverySteps(SYNC_EVERY)),
    "local_sgd": RoundSettings(LocalSGD(), EverySteps(SYNC_EVERY)),
    "diloco": RoundSettings(DiLoCo(0.7, 0.5), EVENLY),
    "diloco overlapped": RoundSettings(DiLoCo(0.7, 0.3), EverySteps(SYNC_EVERY, overlap=True)),
    "streaming": RoundSettings(DiLoCo(0.4, 0.5), BY_LAYER, merge_policy=Mix(0.5)),
    "async": RoundSettings(DiLoCo(0.6, 0.5), HIDDEN, merge_policy=Mix(0.25)),
    "gasloc": RoundSettings(GASLoC(), EverySteps(SYNC_EVERY, overlap=True)),
    "noloco": RoundSettings(NoLoCo(), EverySteps(SYNC_EVERY)),
    "trimmed": RoundSettings(DiLoCo(0.7, 0.5, aggregate="trimmed_mean"), EVENLY),
}
EQUAL = [
    (kinds, rounds)
    for kinds, rounds in itertools.product(KINDS, ROUNDS_OF)
    # Shards that begin within a stretch of parameters lead to other random draws.
    if rounds != "sparta" or kinds in ("whole", "both hold a shard")
]


def check_layout(
    pool: Pool, layout: tuple[int, int], kinds: str, rounds: str, num_rounds: int = ROUNDS
) -> None:
    """Compare workers of several ranks with simulated workers of one."""
    num_workers, replica_size = layout
    models, settings = [Blocks() for _ in range(num_workers)], ROUNDS_OF[rounds]
    simulation, steps = Simulation.from_settings(models, settings), [0] * num_workers

    def local_step(worker: int) -> None:
        approach_all(models[worker], worker, steps[worker])
        steps[worker] += 1

    while steps[0] < num_rounds * SYNC_EVERY:
        simulation.run(local_step, 1)
    assert steps == [num_rounds * SYNC_EVERY] * num_workers
    simulation.drain()
    arguments = KINDS[kinds], settings, replica_size, num_rounds
    results = pool.run(train_blocks, *arguments, world=num_workers * replica_size)
    for rank, found in enumerate(results):
        expected = simulation.params()[rank // replica_size]
        torch.testing.assert_close(found["params"], expected, rtol=0, atol=1e-11)
        assert torch.equal(found["params"], results[rank // replica_size * replica_size]["params"])
    owned = [result["owned"] for result in results]
    for first in range(0, len(owned), replica_size):
        assert sum(owned[first : first + replica_size]) == sum(map(math.prod, PARTS.values()))


@pytest.mark.filterwarnings("ignore:.*cannot tell which of 2 workers is wrong:UserWarning")
@pytest.mark.parametrize(("kinds", "rounds"), EQUAL)
def test_every_kind_of_parameter_gives_what_one_rank_gives(
    pool: Pool, kinds: str, rounds: str
) -> None:
    check_layout(pool, (2, 2), kinds, rounds)


@pytest.fixture(scope="module")
def six_ranks() -> Iterator[Pool]:
    pool = Pool(6)
    yield pool
    pool.close()


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:.*cannot tell which of 2 workers is wrong:UserWarning")
@pytest.mark.parametrize("layout", [(2, 3), (3, 2), (4, 1), (1, 4)])
def test_numbers_do_not_depend_on_the_ranks_of_a_worker(
    six_ranks: Pool, layout: tuple[int, int]
) -> None:
    for kinds, rounds in EQUAL:
        if layout[1] > 1 or kinds == "whole":
            check_layout(six_ranks, layout, kinds, rounds, num_rounds=50)


COMPRESSED = {
    "diloco int8": RoundSettings(DiLoCo(0.7, 0.5), EverySteps(SYNC_EVERY), compression=Int8(8)),
    "diloco sparse": RoundSettings(DiLoCo(), EverySteps(SYNC_EVERY), compression="sparse"),
    "gasloc int8": RoundSettings(GASLoC(), EVENLY, compression=Int8(8)),
}


@pytest.mark.parametrize("rounds", list(COMPRESSED))
def test_messages_of_ranks_that_own_little_or_nothing_are_compressed(
    pool: Pool, rounds: str
) -> None:
    for kinds in ("whole", "one rank holds nothing of a fragment"):
        results = pool.run(train_blocks, KINDS[kinds], COMPRESSED[rounds], world=4)
        for first, second in (results[:2], results[2:]):
            assert torch.isfinite(first["params"]).all()
            assert torch.equal(first["params"], second["params"])
        if rounds != "gasloc int8":
            assert torch.equal(results[0]["params"], results[2]["params"])


@pytest.mark.parametrize("algorithm", [DiLoCo(0.7, 0.5), GASLoC()], ids=str)
def test_codes_of_blocks_do_not_depend_on_who_owns_them(pool: Pool, algorithm: Algorithm) -> None:
    schedule = EverySteps(SYNC_EVERY)
    settings = RoundSettings(algorithm, schedule, compression=Int8(8))
    models = [Blocks() for _ in range(NUM_WORKERS)]
    simulation, steps = Simulation.from_settings(models, settings), [0] * NUM_WORKERS

    def local_step(worker: int) -> None:
        approach_all(models[worker], worker, steps[worker])
        steps[worker] += 1

    simulation.run(local_step, ROUNDS)
    results = pool.run(train_blocks, {}, settings, world=4)
    for rank, found in enumerate(results):
        expected = simulation.params()[rank // REPLICA_SIZE]
        torch.testing.assert_close(found["params"], expected, rtol=0, atol=1e-11)


def start_and_show(rank: int, world: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[0].bias.requires_grad_(requires_grad=False)
    group = WorkerGroup.create(timeout_s=30, replica_size=REPLICA_SIZE)
    engine = Engine.from_settings(model, RoundSettings(DiLoCo()), group)
    at_start = parameters_to_vector([*model.parameters(), *model.buffers()]).clone()
    with torch.no_grad():
        model[1].running_mean.add_(rank)
        model[0].bias.add_(rank)
    own = parameters_to_vector([*model.parameters(), *model.buffers()]).clone()
    engine.show_consensus()
    shown = parameters_to_vector([*model.parameters(), *model.buffers()]).clone()
    engine.worker.show_local()
    assert torch.equal(own, parameters_to_vector([*model.parameters(), *model.buffers()]))
    engine.close()
    return at_start, shown, model[1].running_mean.clone()


def test_ranks_start_equal_and_show_one_consensus_with_its_buffers(pool: Pool) -> None:
    results = pool.run(start_and_show, world=4)
    for at_start, shown, _ in results:
        assert torch.equal(at_start, results[0][0])
        assert torch.equal(shown, results[0][1])
    assert not torch.equal(results[0][0], results[0][1])


def differ(rank: int, world: int) -> str:
    group = WorkerGroup.create(timeout_s=30, replica_size=REPLICA_SIZE)
    with pytest.raises(ValueError, match="outer_lr") as error:
        Engine.from_settings(Vector(), RoundSettings(DiLoCo(0.5 if rank == 1 else 0.7)), group)
    return str(error.value)


def test_settings_that_differ_inside_a_worker_are_refused(pool: Pool) -> None:
    (text,) = set(pool.run(differ, world=4))
    assert text.startswith("Worker 0, place 1 (rank 1) has outer_lr=0.5 and worker 0, place 0")


def need_all(rank: int, world: int) -> str:
    group = WorkerGroup.create(timeout_s=30, replica_size=REPLICA_SIZE)
    momentum = DiLoCo(outer_optimizer=functools.partial(torch.optim.SGD, lr=0.7))
    with pytest.raises(ValueError, match="needs the whole vector") as error:
        Engine.from_settings(Vector(group), RoundSettings(momentum), group)
    return str(error.value)


def test_an_algorithm_of_the_whole_vector_refuses_shards(pool: Pool) -> None:
    assert len(set(pool.run(need_all, world=4))) == 1


def stop_by_time(rank: int, world: int) -> int:
    """Stop at the request of one rank; all ranks of a worker stop after the same step."""
    group = WorkerGroup.create(timeout_s=30, replica_size=REPLICA_SIZE)
    model = Vector(group)
    engine = Engine.from_settings(model, RoundSettings(ModelAverage(), EveryInterval(0.0)), group)
    while engine.stop_agreed is None:
        if rank == 3 and engine.worker.steps == 5:
            engine.worker.stop.request("a test")
        approach(model, group.worker, SHARDS[group.place], engine.worker.steps)
        engine.step()
    engine.sync_point("the checkpoint after the stop")
    engine.close()
    return engine.worker.steps


def test_the_ranks_of_a_worker_stop_together_if_rounds_follow_the_clock(pool: Pool) -> None:
    first, second, third, fourth = pool.run(stop_by_time, world=4)
    assert first == second
    assert third == fourth
    assert third >= 5


def delay_round(rank: int, world: int, replica_size: int) -> tuple[float, int]:
    group = WorkerGroup.create(timeout_s=30, replica_size=replica_size)
    link = as_links(Link(mbit_per_s=0.05))
    settings = RoundSettings(LocalSGD(), EverySteps(1), link=link)
    engine = Engine.from_settings(Vector(), settings, group)
    engine.statistics.spans = spans = Spans()
    engine.step()
    engine.close()
    return spans.seconds["send"], engine.statistics.bytes_sent


def test_the_ranks_of_a_worker_share_an_emulated_link(pool: Pool) -> None:
    seconds, num_bytes = pool.run(delay_round, REPLICA_SIZE, world=4)[0]
    whole_s, whole_bytes = pool.run(delay_round, 1, world=2)[0]
    assert num_bytes < 0.75 * whole_bytes
    assert seconds / (REPLICA_SIZE * num_bytes) == pytest.approx(whole_s / whole_bytes, rel=0.2)


def fail(rank: int, world: int, failing: int) -> str:
    group = WorkerGroup.create(timeout_s=20, replica_size=REPLICA_SIZE)
    error = ValueError("it does not fit") if rank == failing else None
    try:
        group.raise_together(error, "a test")
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    finally:
        group.close()
    return "no error"


def test_an_error_of_one_rank_is_raised_on_all(pool: Pool) -> None:
    for failing in range(4):
        for rank, text in enumerate(pool.run(fail, failing, world=4)):
            assert text.startswith("ValueError: ")
            assert "it does not fit" in text
            if rank != failing:
                assert f"Worker {failing // 2}" in text


def refused(rank: int, world: int) -> str:
    with pytest.raises(ValueError, match="does not divide the 3 ranks") as error:
        WorkerGroup.create(replica_size=2)
    return str(error.value)


def test_a_number_of_ranks_that_is_no_multiple_is_refused(pool: Pool) -> None:
    assert len(set(pool.run(refused, world=3))) == 1
