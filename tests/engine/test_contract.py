"""What an algorithm gets in a round: what it reads, weights that are numbers, whole tensors."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor, nn

from lightning_loco.algorithms import (
    Algorithm,
    DiLoCo,
    GASLoC,
    KeepProgress,
    LocalSGD,
    MergePolicy,
    ModelAverage,
    Restart,
    RoundInfo,
    State,
)
from lightning_loco.compression import E3M0, Codec, ErrorFeedback, Float16, Int8, Sparse
from lightning_loco.compression.sums import shards
from lightning_loco.distributed import Statistics, WorkerGroup
from lightning_loco.engine import RoundSettings
from lightning_loco.engine.exchanges import make_exchange
from lightning_loco.schedules import EverySteps, Schedule, Staggered
from tests.engine.test_compression import CODECS
from tests.engine.test_fragment_sync import fragment_of
from tests.harness.pool import Pool, run_each
from tests.harness.rounds import LARGE, SMALL_BUCKET, Exact, approach, simulate, train, zeros
from tests.harness.toys import assert_close, randn

WORLD, ROUNDS, SYNC_EVERY = 3, 4, 2


# ----------------------------------------------------------------- local, message, received


@dataclasses.dataclass(frozen=True)
class Reading(Algorithm):
    """Adds shares of what it reads to half of the mean; with ``Restart()`` it starts from that."""

    exchange: ClassVar[Literal["mean", "neighbors", "pull"]] = "mean"
    reads = frozenset({"local", "message"})
    start_key = "start"
    merge_policy: ClassVar[MergePolicy | None] = Restart()

    def init(self, params: Tensor) -> State:
        return {"start": params}

    def propose(self, params: Tensor, state: State, info: RoundInfo) -> Tensor:
        return params

    def update(
        self,
        local: Tensor | None,
        message: Tensor | None,
        received: Tensor,
        state: State,
        info: RoundInfo,
    ) -> Tensor:
        assert (local is not None, message is not None) == (
            "local" in self.reads,
            "message" in self.reads,
        )
        result: Tensor = state["start"].copy_(received).mul_(0.5)
        for part, share in ((local, 0.2), (message, 0.3)):
            if part is not None:
                assert part.data_ptr() != received.data_ptr()
                result.add_(part, alpha=share)
                part.fill_(float("nan"))  # which it may
        return result


class ReadingMessage(Reading):
    """Reads its message only."""

    reads = frozenset({"message"})


class ReadingNothing(Reading):
    """Reads nothing but the mean."""

    reads = frozenset()


class KeepingReading(Reading):
    """The same with local steps that are kept."""

    merge_policy = KeepProgress()


class GossipReading(Reading):
    """The same with neighbours."""

    exchange = "neighbors"
    merge_policy = KeepProgress()
    default_topology = "complete"


def by_hand(algorithm: Reading, overlap: bool) -> Tensor:
    """The parameters after each round, ``(ROUNDS, WORLD, LARGE)``."""
    models = [zeros() for _ in range(WORLD)]
    params = [next(model.parameters()) for model in models]
    pending: list[tuple[Tensor, Tensor]] = []
    history = []

    def apply() -> None:
        for p, (message, mean) in zip(params, pending, strict=True):
            before = p.data.clone()
            p.data = 0.5 * mean
            if "local" in algorithm.reads:
                p.data += 0.2 * before
            if "message" in algorithm.reads:
                p.data += 0.3 * message
            if overlap and algorithm.merge_policy == KeepProgress():
                p.data += before - message
        pending.clear()

    for _ in range(ROUNDS):
        for worker, model in enumerate(models):
            for _ in range(SYNC_EVERY):
                approach(worker, model)
        if overlap and algorithm.merge_policy == KeepProgress() and pending:
            apply()
        messages = [p.data.clone() for p in params]
        mean = torch.stack(messages).mean(0)
        if pending:
            apply()
        elif overlap and algorithm.merge_policy == Restart():
            for p in params:
                p.data = torch.zeros_like(p.data)  # the common start
        pending += [(message, mean) for message in messages]
        if not overlap:
            apply()
        history.append(torch.stack([p.data for p in params]))
    return torch.stack(history)


READERS = [Reading(), ReadingMessage(), ReadingNothing(), KeepingReading(), GossipReading()]


def test_an_update_gets_what_it_reads(pool: Pool, subtests: pytest.Subtests) -> None:
    """In several buckets, after a resume, with pending rounds, and with codecs."""
    settings: dict[Any, RoundSettings] = {}
    for algorithm, overlap in itertools.product(READERS, (False, True)):
        schedule = EverySteps(SYNC_EVERY, overlap, warm_start=False)
        name = type(algorithm).__name__, overlap
        settings[name] = RoundSettings(algorithm, schedule)
        if algorithm.exchange == "mean":
            exact = ErrorFeedback(Exact(8))
            settings[(*name, "encoded")] = dataclasses.replace(settings[name], compression=exact)
    rows: dict[Any, Any] = {name: (one, ROUNDS) for name, one in settings.items()}
    rows |= {(*name, "resumed"): (one, ROUNDS, zeros, 2) for name, one in settings.items()}
    found = run_each(pool, train, rows, world=WORLD)
    for name, results in found.items():
        with subtests.test(str(name)):
            one = settings[tuple(part for part in name if part != "resumed")]
            assert isinstance(one.algorithm, Reading)
            expected = by_hand(one.algorithm, one.is_overlapped)
            assert_close(torch.stack(results, dim=1)[:ROUNDS], expected)
            if "resumed" not in name:
                assert_close(simulate(one, WORLD, ROUNDS)[:ROUNDS], expected)


def test_no_memory_is_taken_for_what_is_not_read() -> None:
    for algorithm in (LocalSGD(), GASLoC(), Reading()):
        memory = fragment_of(algorithm, LARGE)[0].memory
        assert (memory.buckets[0].own_message is not None) == ("message" in algorithm.reads)
        own = {b.own_message.data_ptr() for b in memory.buckets if b.own_message is not None}
        wires = {bucket.wire.data_ptr() for bucket in memory.buckets}
        assert own == (wires if isinstance(algorithm, GASLoC) else own - wires)
        assert (memory.chunks[0].local is not None) == ("local" in algorithm.reads)


class Misspelled(Reading):
    reads = frozenset({"locals"})


def test_a_misspelled_name_of_what_is_read_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Misspelled.reads must be of 'local' and 'message', got"):
        RoundSettings(Misspelled()).prepare(2)


def test_encoded_parameters_with_restart_are_relative_to_the_reference_of_their_round(
    pool: Pool,
) -> None:
    """A round that ends when the next one begins replaces the reference of both."""
    schedule = EverySteps(SYNC_EVERY, overlap=True, warm_start=False)
    plain = RoundSettings(ReadingNothing(), schedule)
    restarting = RoundSettings(ModelAverage(), schedule, merge_policy=Restart())
    for one in (restarting, dataclasses.replace(plain, algorithm=SendingParams())):
        encoded = dataclasses.replace(one, compression=Exact(8))
        assert_close(simulate(encoded, WORLD, ROUNDS), simulate(one, WORLD, ROUNDS))
        found = torch.stack(pool.run(train, encoded, ROUNDS, world=WORLD), dim=1)
        assert_close(found, simulate(one, WORLD, ROUNDS))


class SendingParams(ReadingNothing):
    sends_parameters = True


# ------------------------------------------------------------------------------- weights


@dataclasses.dataclass(frozen=True)
class Weighted(DiLoCo):
    """DiLoCo whose messages have other weights.

    Args:
        of_steps: Weight of a message, by its number of local steps.
    """

    of_steps: tuple[float, ...] = (0.0, 0.0, 1 / 3, 1e6)

    def weight(self, steps: float) -> float:
        return self.of_steps[int(steps)]


UNEVEN = [1, 2, 3]
"""Local steps of the three workers between rounds."""


def weighted_by_hand(weights: tuple[float, ...], rounds: int = ROUNDS) -> Tensor:
    """The outer parameters after each round of DiLoCo(1.0, 0.0), equal on all workers."""
    outer, history = torch.zeros(LARGE, dtype=torch.float64), []
    for _ in range(rounds):
        total = torch.zeros_like(outer)
        for worker, weight in enumerate(weights):
            model = zeros()
            (params,) = model.parameters()
            params.data.copy_(outer)
            for _ in range(UNEVEN[worker]):
                approach(worker, model)
            total += weight * params.data
        outer = total / sum(weights)
        history.append(outer)
    return torch.stack(history)


def test_a_mean_is_weighted_by_what_the_algorithm_says(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    cases = {
        (weights, codec): RoundSettings(
            Weighted(1.0, 0.0, of_steps=(0.0, *weights)),
            EverySteps(UNEVEN),
            compression=codec,
        )
        for weights in ((0.0, 1 / 3, 1e6), (2.0, 1 / 3, 5.0), (1e6, 1e6, 1e6))
        for codec in (None, Exact(8))
    }
    rows = {name: (one, ROUNDS) for name, one in cases.items()}
    for name, results in run_each(pool, train, rows, world=WORLD).items():
        with subtests.test(str(name)):
            expected = weighted_by_hand(name[0])
            for found in (torch.stack(results, dim=1), simulate(cases[name], WORLD, ROUNDS)):
                for worker in range(WORLD):
                    assert_close(found[:ROUNDS, worker], expected)


@dataclasses.dataclass(frozen=True)
class Flagged(DiLoCo):
    """DiLoCo that gives the default weight itself."""

    def weight(self, steps: float) -> float:
        return float(steps > 0)


def test_weights_of_0_and_1_give_the_same_bits_as_none(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    """One worker has no local steps in every other round, so its weight is 0."""
    codecs = [None, *CODECS, ErrorFeedback(E3M0(8)), Sparse(4, 16, mean_over="senders")]
    settings = {
        (str(codec), kind): RoundSettings(
            algorithm,
            EverySteps(SYNC_EVERY),
            compression=codec
            if not isinstance(codec, Sparse) or codec.mean_over == "workers"
            else ErrorFeedback(codec, 0.9),
        )
        for codec in codecs
        for kind, algorithm in (("none", DiLoCo(0.7, 0.5)), ("own", Flagged(0.7, 0.5)))
    }
    rows = {name: (one, ROUNDS) for name, one in settings.items()}
    results = run_each(pool, train, rows, world=2)
    for codec in map(str, codecs):
        with subtests.test(codec):
            pairs = zip(results[codec, "none"], results[codec, "own"], strict=True)
            assert all(torch.equal(none, own) for none, own in pairs)
            none, own = (settings[codec, kind] for kind in ("none", "own"))
            assert torch.equal(simulate(none, 2, ROUNDS), simulate(own, 2, ROUNDS))


@pytest.mark.parametrize("codec", [*CODECS, Sparse(4, 16, mean_over="senders")], ids=str)
def test_no_weight_is_too_large_or_too_small_for_a_codec(codec: Codec) -> None:
    """Values near the end of a codec's range stay there, and weights in proportion change nothing.

    Each value of the mean is off by no more than with equal weights, plus the rounding of sums.
    """
    messages = [30000 * randn(4096, seed=seed).float().sign() for seed in range(WORLD)]
    if codec.is_sparse:
        messages = [message * (randn(4096, seed=9) > 0) for message in messages]
    feedback = ErrorFeedback(codec, 0.9) if codec.averages_senders else codec
    settings = RoundSettings(Weighted(), compression=feedback).prepare(WORLD)
    exchange = make_exchange(
        settings.algorithm, WorkerGroup(0, 1), Statistics(), None, settings.compression
    )
    means = []
    for weights in ((1.0, 1.0, 1.0), (1e6, 1e6, 1e6), (1 / 3, 1 / 3, 1 / 3)):
        received = exchange.simulate([m.clone() for m in messages], 0, weights)[0]
        means.append(received if codec.averages_senders else received / sum(weights))
    for mean in means:
        assert torch.isfinite(mean).all()
        torch.testing.assert_close(mean, means[0], rtol=1e-6, atol=0)
    (alone, *_) = exchange.simulate([m.clone() for m in messages], 0, (1e6, 0.0, 0.0))
    decoded = codec.decode(codec.encode(messages[0]), torch.empty(4096))
    expected = decoded if codec.averages_senders else 1e6 * decoded
    if isinstance(codec, (Float16, Int8)):
        torch.testing.assert_close(alone, expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize("weights", [(1 / 3, 2.0, 5.0), (1.0, 1.0, 0.0)], ids=str)
def test_error_feedback_loses_nothing_of_a_weighted_mean(weights: tuple[float, ...]) -> None:
    """The mean of what is received in many rounds of equal messages approaches their mean."""
    messages = [randn(512, seed=seed) for seed in range(WORLD)]
    settings = RoundSettings(Weighted(), compression=ErrorFeedback(E3M0(8))).prepare(WORLD)
    exchange = make_exchange(
        settings.algorithm, WorkerGroup(0, 1), Statistics(), None, settings.compression
    )
    lost = [torch.zeros_like(message) for message in messages]
    total = torch.zeros_like(messages[0])
    count = 400
    for t in range(count):
        sent = [
            message + own if weight else torch.zeros_like(message)
            for message, own, weight in zip(messages, lost, weights, strict=True)
        ]
        total += exchange.simulate(sent, t, weights)[0] / sum(weights)
        for own, left, weight in zip(lost, sent, weights, strict=True):
            own.copy_(left if weight else own + left)
    expected = sum(w * m for w, m in zip(weights, messages, strict=True)) / sum(weights)
    # The last worker sums the last part; with weight 0 it does not send what that has lost.
    summed_by_others = shards(E3M0(8), 512, WORLD)[-1].values.start if weights[-1] == 0 else 512
    error = (total / count - expected)[:summed_by_others].abs().max()
    assert error < 0.02


class Endless(Weighted):
    """Gives a weight that no message can have."""

    def weight(self, steps: float) -> float:
        return float("inf")


class WeightedGossip(GASLoC):
    """Gives its messages weights."""

    def weight(self, steps: float) -> float:
        return 2.0


def test_weights_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="WeightedGossip gives its messages weights, which only a"):
        RoundSettings(WeightedGossip()).prepare(4)
    with pytest.raises(ValueError, match="aggregate='trimmed_mean' counts all workers alike"):
        RoundSettings(Weighted(aggregate="trimmed_mean")).prepare(4)
    with pytest.raises(RuntimeError, match=r"Endless.weight has returned inf for 2 local steps"):
        simulate(RoundSettings(Endless(), EverySteps(SYNC_EVERY)), 2, 1)


# -------------------------------------------------------------------------- whole tensors


@dataclasses.dataclass(frozen=True)
class UnitSteps(Algorithm):
    """Moves each tensor by the direction of its mean drift: a step of length 1 per tensor."""

    exchange = "mean"
    whole_tensors = True
    start_key = "start"
    consensus_key = "start"
    replicated = True
    merge_policy = Restart()
    seen: ClassVar[set[tuple[int, ...]]] = set()

    def init(self, params: Tensor) -> State:
        return {"start": params}

    def propose(self, params: Tensor, state: State, info: RoundInfo) -> Tensor:
        return params.sub_(state["start"])

    def update(
        self,
        local: Tensor | None,
        message: Tensor | None,
        received: Tensor,
        state: State,
        info: RoundInfo,
    ) -> Tensor:
        self.seen.add(tuple(end - begin for begin, end in info.bounds))
        for begin, end in info.bounds:
            part = received[begin:end]
            state["start"][begin:end].add_(part, alpha=1 / float(part.norm()))
        start: Tensor = state["start"]
        return start


SIZES = {"0": (40, 50), "1": (3,), "2": (60, 20), "3": (7, 1)}


def layers() -> nn.Module:
    """Four layers with a tensor each, of which two are longer than a bucket."""
    model = nn.Module()
    for name, shape in SIZES.items():
        layer = nn.Module()
        layer.weight = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
        model.add_module(name, layer)
    return model


def steps_by_hand(rounds: int, fragments: int) -> Tensor:
    """The parameters after each round of one of the fragments, in turn, ``(rounds, P)``."""
    outer = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SIZES.items()}
    local = [{name: value.clone() for name, value in outer.items()} for _ in range(WORLD)]
    history = []
    for index in range(rounds):
        for worker, params in enumerate(local):
            for _ in range(SYNC_EVERY):
                for number, value in enumerate(params.values()):
                    target = randn(*value.shape, seed=10 * worker + number)
                    value += 0.1 * (target - value)
        for name in list(SIZES)[index % fragments :: fragments]:
            drift = torch.stack([params[name] for params in local]).mean(0) - outer[name]
            outer[name] = outer[name] + drift / drift.norm()
            for params in local:
                params[name] = outer[name].clone()
        history.append(torch.cat([value.flatten() for value in local[0].values()]))
    return torch.stack(history)


def test_slices_of_whole_tensors(pool: Pool, subtests: pytest.Subtests) -> None:
    """In several buckets, with a codec whose blocks do not fit, and in fragments of layers."""
    cases: dict[Any, RoundSettings] = {}
    for fragments, codec in itertools.product((1, 2), (None, Exact(7))):
        schedule: Schedule = EverySteps(SYNC_EVERY)
        if fragments > 1:
            schedule = Staggered(fragments * SYNC_EVERY, fragments, 0, pattern="strided")
        cases[fragments, str(codec)] = RoundSettings(UnitSteps(), schedule, compression=codec)
    rows = {name: (one, ROUNDS, layers) for name, one in cases.items()}
    for name, results in run_each(pool, train, rows, world=WORLD).items():
        with subtests.test(str(name)):
            expected = steps_by_hand(ROUNDS, name[0])
            UnitSteps.seen.clear()
            small = dataclasses.replace(cases[name], bucket_bytes=SMALL_BUCKET)
            assert_close(simulate(small, WORLD, ROUNDS, layers)[:ROUNDS, 0], expected)
            assert_close(results[0][:ROUNDS], expected)
            sizes = {torch.Size(shape).numel() for shape in SIZES.values()}
            assert {size for bounds in UnitSteps.seen for size in bounds} == sizes


def test_fragments_that_cut_tensors_are_refused() -> None:
    settings = RoundSettings(UnitSteps(), Staggered(4, 2, 0, pattern="even")).prepare(2)
    with pytest.raises(ValueError, match="UnitSteps needs whole tensors, and the fragments of"):
        settings.fragment_slices({"a": 10, "b": 5})
