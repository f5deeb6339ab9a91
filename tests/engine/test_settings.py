"""Settings: default topology, equality on all workers by value, memory for messages."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco import DiLoCo, GASLoC, LocalSGD, LocoStrategy, Simulation, StepEngine
from lightning_loco.algorithms import Algorithm
from lightning_loco.distributed import WorkerGroup
from lightning_loco.engine import RoundSettings
from lightning_loco.engine.settings import CHUNK_ELEMENTS, PENDING_BUCKETS
from lightning_loco.model.flat import cut_tensors
from lightning_loco.model.ownership import find_ownership
from lightning_loco.schedules import EverySteps
from lightning_loco.topology import RandomMatching, Ring
from tests.harness.pool import Pool, PoolError, make_trainer
from tests.harness.rounds import Counting, Halves, Lonely, RandomPairs, SignBlocks
from tests.harness.small_model import TinyModule, flat, make_loader
from tests.harness.toys import Point, assert_close, randn

ROUNDS = 5
SEED = 7

# ------------------------------------------------------------------------- default topology


def seeded_engine(rank: int, world: int, algorithm: Algorithm, topology: Any = None) -> Tensor:
    torch.manual_seed(SEED + rank)
    model = Point(torch.zeros(3, dtype=torch.float64))
    engine = StepEngine(model, algorithm, sync_every=1, topology=topology)
    for _ in range(ROUNDS):
        model.value.data.add_(randn(3, seed=rank))
        engine.step()
    engine.close()
    return flat(model)


def seeded_simulation(algorithm: Algorithm, topology: Any = None) -> Tensor:
    torch.manual_seed(SEED)
    models = [Point(torch.zeros(3, dtype=torch.float64)) for _ in range(4)]
    simulation = Simulation(models, algorithm, topology=topology)
    simulation.run(lambda worker: models[worker].value.data.add_(randn(3, seed=worker)), ROUNDS)
    return torch.stack(simulation.params())


def seeded_trainer(rank: int, world: int, algorithm: Algorithm, topology: Any = None) -> Tensor:
    strategy = LocoStrategy(algorithm, sync_every=1, topology=topology, finalize="keep")
    trainer = make_trainer(strategy, max_steps=ROUNDS, use_distributed_sampler=False)
    module = TinyModule()
    torch.manual_seed(SEED + rank)
    trainer.fit(module, make_loader(rank, ROUNDS))
    return flat(module)


@pytest.mark.parametrize(
    ("algorithm", "topology"),
    [(GASLoC(), Ring()), (RandomPairs(), RandomMatching(SEED))],
    ids=["gasloc", "random_pairs"],
)
def test_the_default_topology_is_the_algorithms_own_with_the_runs_seed(
    pool: Pool, algorithm: Algorithm, topology: Any
) -> None:
    """In the engine, the simulation and the Trainer."""
    expected = seeded_simulation(algorithm, topology)
    assert torch.equal(seeded_simulation(algorithm), expected)
    assert_close(torch.stack(pool.run(seeded_engine, algorithm)), expected)
    assert (seeded_simulation(algorithm, RandomMatching(SEED + 1)) - expected).abs().max() > 0.1
    named = pool.run(seeded_trainer, algorithm, topology)
    for result, other in zip(pool.run(seeded_trainer, algorithm), named, strict=True):
        assert torch.equal(result, other)
    assert not torch.equal(named[0], named[1])


@pytest.mark.parametrize("drive", [StepEngine, Simulation])
def test_missing_neighbours_are_an_error_and_not_a_mean(drive: Any) -> None:
    model = Point(torch.zeros(3))
    with pytest.raises(ValueError, match="Lonely exchanges with neighbours and has no default"):
        drive([model] if drive is Simulation else model, Lonely())


# --------------------------------------------------------------------- equal on all workers

adamw = torch.optim.AdamW


class Adam:
    """Makes optimizers, and has no ``repr``."""

    def __init__(self, lr: float) -> None:
        self.lr = lr

    def __call__(self, params: Any) -> torch.optim.Optimizer:
        return adamw(params, lr=self.lr)


def other_optimizer(kind: str, lr: float) -> Any:
    if kind == "partial":
        return functools.partial(adamw, lr=lr)
    return Adam(lr) if kind == "object" else lambda params: adamw(params, lr=lr)


def start_with(rank: int, world: int, kind: str, same: bool) -> None:
    lr = 0.1 if same or rank == 0 else 0.2
    StepEngine(Point(torch.zeros(3)), DiLoCo(outer_optimizer=other_optimizer(kind, lr))).close()


def test_settings_that_differ_by_value_are_refused_on_every_worker(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    for kind in ("partial", "object"):
        with subtests.test(kind):
            with pytest.raises(PoolError, match="Worker 1 has outer_optimizer=") as error:
                pool.run(start_with, kind, False, world=2)
            assert sorted(error.value.failures) == [0, 1]


def start_with_all(rank: int, world: int) -> None:
    for kind in ("partial", "object"):
        start_with(rank, world, kind, same=True)
    start_with(rank, world, "function, which is compared by its name", same=False)


def test_settings_of_equal_value_are_accepted(pool: Pool) -> None:
    pool.run(start_with_all, world=2)


# -------------------------------------------------------------------------------- refusals


def test_settings_that_cannot_work_are_refused_at_once(subtests: pytest.Subtests) -> None:
    rows = [
        ({"algorithm": "diloco"}, TypeError, "algorithm must be an Algorithm such as DiLoCo"),
        ({"schedule": 100}, TypeError, "schedule must be a Schedule such as EverySteps"),
        ({"compression": "zip"}, ValueError, "compression must be one of none, bf16"),
        ({"compression": 8}, TypeError, "compression must be a name, a codec such as Int8"),
        ({"bucket_bytes": 1.5}, TypeError, "bucket_bytes must be an integer, got 1.5"),
        ({"bucket_bytes": True}, TypeError, "bucket_bytes must be an integer"),
        ({"bucket_bytes": 0}, ValueError, "bucket_bytes must be positive"),
        ({"schedule": EverySteps(1, overlap=True)}, ValueError, "got LocalSGD"),
    ]
    for settings, error, text in rows:
        with subtests.test(str(settings)), pytest.raises(error, match=text):
            RoundSettings(**{"algorithm": LocalSGD(), **settings})


def test_an_algorithm_of_the_whole_vector_cannot_be_exchanged_in_parts() -> None:
    with pytest.raises(ValueError, match="Counting needs the whole vector .* in 2 parts"):
        RoundSettings(Counting(whole=True), Halves(2)).prepare(2)


@dataclasses.dataclass(frozen=True)
class Gappy(Halves):
    """Omits the last parameter."""

    def fragment_slices(self, sizes: Any) -> list[list[range]]:
        return super().fragment_slices({**sizes, "last": sizes["last"] - 1})


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (Gappy(2), "do not cover each parameter once"),
        (Halves(2, granularity=1), "must begin at multiples of 4, which SignBlocks is made of"),
    ],
)
def test_lanes_that_do_not_fit_are_refused(schedule: Halves, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RoundSettings(SignBlocks(), schedule).prepare(2).fragment_slices({"first": 7, "last": 6})


# ---------------------------------------------------------------------------------- memory


def test_all_buckets_that_are_being_sent_fit_bucket_bytes() -> None:
    megabyte = 2**20
    mean = RoundSettings(LocalSGD(), bucket_bytes=megabyte).prepare(4)
    assert PENDING_BUCKETS * 4 * mean.bucket_elements(10**7, 4) == megabyte
    ring = RoundSettings(GASLoC(), bucket_bytes=megabyte).prepare(4)  # its own, and two others
    assert 3 * PENDING_BUCKETS * 4 * ring.bucket_elements(10**7, 4) <= megabyte
    halves = RoundSettings(LocalSGD(), Halves(2), bucket_bytes=megabyte).prepare(4)
    assert 2 * PENDING_BUCKETS * 4 * halves.bucket_elements(10**7, 4) == megabyte
    whole = RoundSettings(Counting(whole=True), bucket_bytes=1).prepare(4)
    assert whole.bucket_elements(10**7, 4) == 10**7


def test_chunks_are_for_the_cache_and_end_where_fragments_do() -> None:
    numel = 3 * CHUNK_ELEMENTS + 1001
    sizes = {"first": 3 * CHUNK_ELEMENTS, "last": 1001}
    settings = RoundSettings(SignBlocks(), Halves(2)).prepare(2)
    ownership = find_ownership(
        {name: torch.empty(size, device="meta") for name, size in sizes.items()},
        settings.fragment_slices(sizes),
        settings.granularity,
        WorkerGroup(0, 2),
    )
    cuts = settings.cuts(numel, 4, boundaries=ownership.boundaries)
    assert cuts.granularity == 4
    assert cuts.boundaries == (numel // 2 // 4 * 4, numel)
    assert cuts.chunk_elements is not None
    assert abs(cuts.chunk_elements - CHUNK_ELEMENTS) < 1000
    assert RoundSettings(Counting(whole=True)).prepare(2).cuts(numel, 4).chunk_elements is None


@pytest.mark.parametrize("numel", [CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS + 1, 3 * CHUNK_ELEMENTS + 1])
def test_no_small_chunk_is_left_over(numel: int) -> None:
    tensors = {"p": torch.empty(numel, device="meta")}
    for settings in (RoundSettings(SignBlocks()), RoundSettings(DiLoCo(), compression="int8")):
        cuts = settings.prepare(2).cuts(numel, 4)
        lengths = [sum(map(len, views)) for _, views in cut_tensors(tensors.items(), *cuts)]
        assert len(lengths) == round(numel / CHUNK_ELEMENTS)
        assert all(length % cuts.granularity == 0 for length in lengths[:-1])


def test_descriptions_of_codecs_and_schedules_differ() -> None:
    plain = RoundSettings(LocalSGD(), EverySteps(2)).describe()
    with_codec = RoundSettings(LocalSGD(), compression="int8").describe()
    assert plain["compression"] != with_codec["compression"]
    halves = RoundSettings(LocalSGD(), Halves(2)).describe()
    assert (plain["schedule"], halves["schedule"]) == ("EverySteps", "Halves")
    assert halves["granularity"] == 4
