"""Learners with a model: they follow a real syncer, and go on without one."""

from __future__ import annotations

import dataclasses
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from lightning_loco._util.clock import Clock
from lightning_loco.algorithms import DecoupledDiLoCo
from lightning_loco.compression import E3M0, BFloat16, Int8
from lightning_loco.distributed import WorkerGroup
from lightning_loco.syncer.engine import LearnerEngine
from lightning_loco.syncer.merge_rounds import MergeSettings
from lightning_loco.syncer.service import SyncerServer
from lightning_loco.syncer.settings import Address, DecoupledSettings
from lightning_loco.syncer.syncer import Syncer
from lightning_loco.syncer.tape import Tape, replay
from lightning_loco.transport import read_certificate, write_certificate
from tests.harness.limits import LONG_S, wait_until
from tests.harness.pool import Pool
from tests.harness.programs import free_ports
from tests.harness.small_model import flat, make_model
from tests.strategies.families import whole

ROUNDS = MergeSettings(fragments=3, sync_every=6)


class Numbers(nn.Module):
    """A vector, and an embedding."""

    def __init__(self, value: float = 0.0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.full((7,), value, dtype=dtype))
        self.table = nn.Embedding(2, 2, dtype=dtype)
        self.table.weight.data.fill_(value)

    @torch.no_grad()
    def step(self, toward: float) -> None:
        """Go a tenth of the way to a number."""
        for parameter in self.parameters():
            parameter += 0.1 * (toward - parameter)


@contextmanager
def serving(folder: Path, port: int = 0, **settings: Any) -> Iterator[SyncerServer]:
    tape = Tape(folder / "tape", time.time, keeps_pushes=True)
    server = SyncerServer(
        lambda contract: Syncer(contract, folder / "run", tape=tape), port=port, **settings
    )
    server.start()
    try:
        yield server
    finally:
        server.close()
        tape.close()


def learner(model: nn.Module, server: SyncerServer | int, **settings: Any) -> LearnerEngine:
    port = server if isinstance(server, int) else server.server.port
    settings.setdefault("rounds", ROUNDS)
    return LearnerEngine(model, syncer=f"127.0.0.1:{port}", **settings)


def train(engine: LearnerEngine, model: Numbers, toward: float, until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not until():
        model.step(toward)
        engine.step()
        time.sleep(0.002)
        assert time.monotonic() < deadline, "the learner does not get on"


def idle(engine: LearnerEngine, until: Callable[[], bool]) -> None:
    train(engine, Numbers(), 0.0, until)


def received(engine: LearnerEngine) -> list[Tensor]:
    assert engine.learner is not None
    return engine.learner.received


@pytest.mark.parametrize("codec", [None, BFloat16(), Int8(), E3M0()])
def test_learners_meet_and_their_tape_is_repeated(tmp_path: Path, codec: Any) -> None:
    write_certificate(tmp_path / "key.pem")
    key = {"key_file": tmp_path / "key.pem"}
    certificate = read_certificate(tmp_path / "key.pem")
    models, found = {"a": Numbers(5.0), "b": Numbers(-5.0)}, {}
    (tmp_path / "x").mkdir()
    with serving(tmp_path / "x", certificate=certificate) as server:

        def run(name: str, toward: float) -> None:
            model = models[name]
            engine = learner(model, server, name=name, compression=codec, **key)
            with closing(engine):
                engine.start()
                train(engine, model, toward, lambda: server.status()["committed"] >= 40)
                assert engine.statistics.rounds > 10
                assert (engine.statistics.bytes_saved != 0) == (codec is not None)
                engine.finish()
                found[name] = torch.cat(engine._saved["received"].split(11))

        threads = [threading.Thread(target=run, args=one) for one in (("a", 1.0), ("b", 3.0))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)
        status = server.status()
    assert status["learners"] == {}
    assert status["late"] >= 1  # what was left when they ended
    for name, model in models.items():
        assert torch.equal(flat(model), found[name])  # what was received last
        assert ((flat(model) > 0.8) & (flat(model) < 3.2)).all()
    repeated = list(replay(tmp_path / "x/tape"))
    assert len(repeated) == status["committed"]
    assert {one.problem for one in repeated} == {None}


def test_a_learner_goes_on_without_the_syncer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, port = Numbers(), free_ports()[0]
    with serving(tmp_path, port) as server, closing(learner(model, server, name="a")) as engine:
        engine.start()
        train(engine, model, 1.0, lambda: engine.statistics.rounds >= 6)
        before = engine.worker.steps
        with caplog.at_level(logging.WARNING):
            server.close()
            train(engine, model, 1.0, lambda: engine.worker.steps >= before + 100)
            with serving(tmp_path, port) as again:
                rounds = engine.statistics.rounds
                train(engine, model, 1.0, lambda: engine.statistics.rounds >= rounds + 6)
                epoch = again.status()["epoch"]
                texts = [record.getMessage() for record in caplog.records]
    assert epoch == 2
    assert len([text for text in texts if "cannot be reached" in text]) == 1
    assert len([text for text in texts if "answers again, after" in text]) == 1


@contextmanager
def learner_alone(folder: Path, port: int) -> Iterator[tuple[LearnerEngine, Numbers]]:
    """A learner that has trained, and whose syncer is away."""
    model = Numbers()
    with closing(learner(model, port, name="a")) as engine:
        with serving(folder, port):
            engine.start()
            train(engine, model, 1.0, lambda: engine.statistics.rounds >= 6)
        yield engine, model


def test_what_was_not_sent_is_sent_when_the_syncer_answers_again(tmp_path: Path) -> None:
    """Also at the end of training, to a syncer that was away or was restarted."""
    port = free_ports()[0]
    with learner_alone(tmp_path, port) as (engine, model):
        steps = engine.worker.steps
        train(engine, model, 1.0, lambda: engine.worker.steps >= steps + 10)
        ended = threading.Thread(target=engine.finish)
        ended.start()
        assert engine.learner is not None
        wait_until(lambda: engine.learner._is_leaving)
        with serving(tmp_path, port) as server:
            ended.join(LONG_S)
            status = server.status()
    assert status["learners"] == {}
    assert status["late"] == ROUNDS.fragments


def test_nan_at_the_end_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Numbers()
    with serving(tmp_path) as server, closing(learner(model, server, name="a")) as engine:
        engine.start()
        train(engine, model, 1.0, lambda: engine.statistics.rounds >= 6)
        assert engine.learner is not None
        engine.learner.rounds.count(1.0)
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        engine.finish()
        assert torch.isfinite(flat(model)).all()
        assert server.status()["learners"] == {}
    assert "NaN or infinity in the parameters of learner a" in caplog.text
    assert "could not be sent" not in caplog.text


@pytest.mark.parametrize("min_quorum", [1, 2])
def test_a_model_that_has_nothing_of_the_training_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, min_quorum: int
) -> None:
    rounds, model = dataclasses.replace(ROUNDS, min_quorum=min_quorum), Numbers()
    merges = 1 if min_quorum == 1 else 0  # of a quorum of two there is none

    def has_trained() -> bool:
        return engine.worker.steps >= 40 and engine.statistics.rounds >= merges

    with (
        serving(tmp_path) as server,
        closing(learner(model, server, rounds=rounds)) as engine,
    ):
        engine.start()
        train(engine, model, 1.0, has_trained)
        engine.finish()
    assert (flat(model) == 0).all() == (min_quorum == 2)
    assert ("nothing since its start" in caplog.text) == (min_quorum == 2)


def test_a_syncer_that_lost_its_folder_goes_on_from_what_a_learner_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_ports()[0]
    with learner_alone(tmp_path, port) as (engine, model):
        server = SyncerServer(lambda contract: Syncer(contract, first_epoch=10**9), port=port)
        server.start()
        with closing(server):
            rounds = engine.statistics.rounds
            train(engine, model, 1.0, lambda: engine.statistics.rounds >= rounds + 12)
            assert (received(engine)[0] > 0.5).all()
    assert "has lost its parameters" in caplog.text


def test_nan_goes_back_to_what_was_received(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Numbers()
    with serving(tmp_path) as server, closing(learner(model, server, name="a")) as engine:
        engine.start()
        train(engine, model, 1.0, lambda: engine.statistics.rounds >= 3)
        # In every step: a fragment that arrives may replace NaN before it is noticed.
        train(engine, model, torch.nan, lambda: not engine.worker.was_finite)
        assert torch.isfinite(flat(model)).all()
        rounds = engine.statistics.rounds
        train(engine, model, 1.0, lambda: engine.statistics.rounds >= rounds + 6)
        assert engine.worker.was_finite
        assert server.status()["refused"] == 0
    assert "NaN or infinity in the parameters of learner a" in caplog.text


def test_nan_again_and_again_ends_the_learner(tmp_path: Path) -> None:
    """As if the state of the optimizer held it."""
    model = Numbers()
    with serving(tmp_path) as server, closing(learner(model, server, name="a")) as engine:
        engine.start()
        with pytest.raises(RuntimeError, match="learner a had NaN or infinity 11 times in a row"):
            train(engine, model, torch.nan, lambda: False)
        assert engine.statistics.rounds == 0


def test_narrow_parameters_without_progress_stay_as_they_are(tmp_path: Path) -> None:
    """What bfloat16 loses of a fragment is not taken for progress."""
    model, method = Numbers(dtype=torch.bfloat16), DecoupledDiLoCo(0.3, 0.0)
    with serving(tmp_path) as server, closing(learner(model, server, algorithm=method)) as engine:
        engine.start()
        train(engine, model, 1.0, lambda: engine.statistics.rounds >= 6)
        still = engine.statistics.rounds + 9
        idle(engine, lambda: engine.statistics.rounds >= still)
        syncer = server.syncer
        assert syncer is not None
        before = [syncer.fetch(fragment) for fragment in range(3)]
        assert any((one.params.bfloat16() != one.params).any() for one in before)
        idle(engine, lambda: engine.statistics.rounds >= still + 9)
        for fragment, (_, version, params) in enumerate(before):
            assert syncer.fetch(fragment).version > version
            assert torch.equal(syncer.fetch(fragment).params, params)


def test_only_part_of_what_arrives_is_taken_with_mix(tmp_path: Path) -> None:
    model = Numbers(4.0)
    method = DecoupledDiLoCo(mix=0.5)
    with serving(tmp_path) as server, closing(learner(model, server, algorithm=method)) as engine:
        engine.start()
        train(engine, model, 1.0, lambda: engine.statistics.rounds >= 20)
        assert ((flat(model) > 0.9) & (flat(model) < 4.0)).all()


# ------------------------------------------------------------------------------- errors


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    write_certificate(tmp_path / "key.pem")
    write_certificate(tmp_path / "other.pem")
    certificate = read_certificate(tmp_path / "key.pem")
    with serving(tmp_path, certificate=certificate) as server:
        first = learner(Numbers(), server, name="a", key_file=tmp_path / "key.pem")
        with closing(first):
            first.start()
            by_column = Numbers()
            by_column.table.weight = nn.Parameter(by_column.table.weight.data.t())
            rows: list[tuple[nn.Module, dict[str, Any], str]] = [
                (make_model(), {}, r"parameters\.values is None there|parameters.*there and"),
                (
                    Numbers(),
                    {"rounds": MergeSettings(fragments=2)},
                    "settings.fragments is 2 there",
                ),
                (
                    Numbers(dtype=torch.float32),
                    {},
                    r"parameters.values is \[\[7\], 'torch.float32'",
                ),
                (by_column, {}, r"parameters.table.weight is .*, \[1, 2\]\] there and"),
                (Numbers(), {"algorithm": DecoupledDiLoCo(0.5)}, "method.outer_lr is 0.5 there"),
                (Numbers(), {"compression": "bf16"}, "compression is .*BFloat16.* there and None"),
            ]
            for model, settings, text in rows:
                key = {"key_file": tmp_path / "key.pem", **settings}
                other, error = learner(model, server, name="b", **key), f"refuses this .*{text}"
                with closing(other), pytest.raises(RuntimeError, match=error):
                    other.start()
            other = learner(Numbers(), server, name="b", key_file=tmp_path / "other.pem")
            with closing(other), pytest.raises(RuntimeError, match="have different key files"):
                other.start()
            assert first.learner is not None
            newer = learner(Numbers(), server, name="a", key_file=tmp_path / "key.pem")
            with closing(newer):
                newer.start()
                with pytest.raises(RuntimeError, match="A newer process .* is learner a"):
                    train(first, Numbers(), 0.0, lambda: False)


def test_the_clock_of_a_learner_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that starts is newer than the one before, whatever the clock says."""
    with serving(tmp_path) as server:
        with closing(learner(Numbers(), server, name="a")) as killed:
            killed.start()
        monkeypatch.setattr(Clock, "wall_time", lambda self: time.time() - 3600)
        model = Numbers()
        with closing(learner(model, server, name="a")) as engine:
            engine.start()
            rounds = engine.statistics.rounds
            train(engine, model, 1.0, lambda: engine.statistics.rounds >= rounds + 6)
            assert server.status()["merges"] > 0


def test_a_syncer_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    group = WorkerGroup.create(timeout_s=0.5)
    engine = learner(Numbers(), free_ports()[0], name="a", group=group)
    with closing(engine), pytest.raises(RuntimeError, match=r"within 0 s \(.*Connection refused\)"):
        engine.start()


def test_a_learner_that_waits_for_the_syncer_can_be_stopped() -> None:
    with closing(learner(Numbers(), free_ports()[0], name="a")) as engine:
        timer = threading.Timer(0.3, engine.request_stop, ["SIGTERM"])
        timer.start()
        with pytest.raises(RuntimeError, match="Learner a was asked to stop before the syncer at"):
            engine.start()
        timer.join()


def test_wrong_settings(tmp_path: Path) -> None:
    for values, error in (
        ({"syncer": "node7:abc"}, "syncer must be 'HOST:PORT'"),
        ({"syncer": "node7:0"}, "syncer must be 'HOST:PORT'"),
        *(
            ({"syncer": "a", "name": name}, "name must have at least one character")
            for name in ("", "a\nb", "\ud800", 300 * "a", 100 * "习", 3)
        ),
        ({"name": "a"}, "name='a' is of a learner of a syncer elsewhere"),
        ({"compression": "sparse"}, "compression must be a codec that sends every value"),
    ):
        with pytest.raises(ValueError, match=error):
            DecoupledSettings(DecoupledDiLoCo(), **values)
    with pytest.raises(ValueError, match="cannot hold functions"):
        DecoupledSettings(DecoupledDiLoCo(outer_lr=lambda merge: 1.0), syncer="a")
    with pytest.raises(ValueError, match="min_quorum=3 is more than the 2 workers"):
        DecoupledSettings(DecoupledDiLoCo(), MergeSettings(min_quorum=3)).prepare(2)
    with pytest.raises(ValueError, match="is one learner, and this one has 2 workers"):
        DecoupledSettings(DecoupledDiLoCo(), syncer="a").prepare(2)
    assert Address.of("[::1]:7") == ("::1", 7)


# ------------------------------------------------------------------------------- jobs


def test_a_learner_continues_from_its_state(tmp_path: Path) -> None:
    model = Numbers()
    with serving(tmp_path) as server:
        with closing(learner(model, server, name="a")) as engine:
            engine.start()
            train(engine, model, 1.0, lambda: engine.statistics.rounds >= 12)
            state, steps = engine.state_dict(), engine.worker.steps
        again = Numbers()
        with closing(learner(again, server, name="a")) as engine:
            engine.load_state_dict(state)
            assert torch.equal(flat(again), flat(model))
            engine.start()
            assert engine.worker.steps == engine.learner.rounds.total_steps == steps
            train(engine, again, 1.0, lambda: engine.statistics.rounds >= 24)
            assert server.status()["refused"] <= 3


def train_in_job(rank: int, world: int, replica_size: int = 1) -> Any:
    """Workers of one job, whose worker 0 runs the syncer."""
    model = Numbers(float(rank))
    group = WorkerGroup.create(timeout_s=30.0, replica_size=replica_size)
    engine = LearnerEngine(model, rounds=ROUNDS, group=group)
    engine.start()
    toward = float(group.worker)
    train(engine, model, toward, lambda: engine.worker.steps >= 150)
    engine.sync_point("the save")  # or the syncer is saved before what a learner receives later
    state = engine.state_dict()
    rounds, inside = engine.statistics.rounds, flat(model)
    engine.finish()
    shown = flat(model)
    engine.close()

    model = Numbers(9.0)
    group = WorkerGroup.create(timeout_s=30.0, replica_size=replica_size)
    engine = LearnerEngine(model, rounds=ROUNDS, group=group)
    engine.load_state_dict(state)
    resumed = flat(model)
    engine.start()
    train(engine, model, toward, lambda: engine.worker.steps >= 200)
    after = engine.statistics.rounds
    counts = engine.learner.counts if engine.learner is not None else {"refused": 0}
    engine.finish()
    last = flat(model)
    engine.close()
    return rounds, inside, shown, resumed, after, counts["refused"], last


def test_workers_of_a_job_and_their_resume(pool: Pool) -> None:
    results = pool.run(train_in_job, world=3)
    for rounds, inside, shown, resumed, after, refused, last in results:
        assert rounds > 10
        assert torch.equal(resumed, inside)
        assert after > rounds
        assert refused <= 3  # pushes that were merged when the first run ended, once a fragment
        assert torch.equal(shown, results[0][2])  # the mean of all, in every worker
        assert torch.equal(last, results[0][6])
    mean = torch.stack([one[1] for one in results]).mean(0)
    torch.testing.assert_close(results[0][2], mean)


def test_ranks_of_a_worker_stay_together(pool: Pool) -> None:
    results = pool.run(train_in_job, 2, world=4)
    for first, second in ((0, 1), (2, 3)):
        assert torch.equal(results[first][1], results[second][1])
        assert results[first][0] == results[second][0] > 10
    assert not torch.equal(results[0][1], results[2][1])


class Table(nn.Module):
    """A matrix and a vector, each element of which goes to another number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 7, dtype=torch.float64)
        for parameter in self.parameters():
            parameter.data.zero_()
        self.targets = [torch.arange(35.0).double().view(7, 5), torch.arange(7.0).double()]

    @torch.no_grad()
    def step(self, toward: float) -> None:
        """Go a part of the way to the numbers."""
        for parameter, target in zip(self.parameters(), self.targets, strict=True):
            parameter.add_(as_parts_of(target, parameter) - parameter, alpha=0.1 * toward)


def as_parts_of(values: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return values
    return distribute_tensor(values, parameter.device_mesh, parameter.placements)


TABLE_ROUNDS = MergeSettings(fragments=4, sync_every=8)


def divided(rank: int, world: int, port: int, by_columns: bool, timeout_s: float) -> LearnerEngine:
    model, mesh = Table(), init_device_mesh("cpu", (world,))
    if by_columns:
        parallelize_module(model, mesh, {"layer": RowwiseParallel()})
    else:
        fully_shard(model, mesh=mesh)
    group = WorkerGroup.create(timeout_s=timeout_s, replica_size=world)
    return learner(model, port, rounds=TABLE_ROUNDS, group=group)


def train_divided(rank: int, world: int, port: int, by_columns: bool) -> Any:
    engine = divided(rank, world, port, by_columns, timeout_s=30.0)
    model: Any = engine.worker.replica.model
    engine.start()
    toward = torch.nan if rank == 1 else 1.0  # in one shard, which all ranks notice together
    train(engine, model, toward, lambda: not engine.worker.was_finite)
    targets = torch.cat([target.reshape(-1) for target in model.targets])
    train(engine, model, 1.0, lambda: float((whole(model) - targets).abs().max()) < 1e-6)
    assert engine.worker.was_finite
    assert engine.statistics.rounds > 20
    before = whole(model)
    engine.finish()
    received = None if rank > 0 else engine._saved["received"]
    engine.close()
    return engine.name, before, whole(model), received


def start_divided(rank: int, world: int, port: int, timeout_s: float, stops: bool) -> str:
    engine = divided(rank, world, port, by_columns=False, timeout_s=timeout_s)
    if stops and rank == 1:
        engine.request_stop("SIGTERM")
    with closing(engine), pytest.raises(RuntimeError) as error:
        engine.start()
    return str(error.value)


@pytest.mark.parametrize(
    ("timeout_s", "stops", "why"),
    [
        (3.0, False, "has not sent its parameters within 2 s .*refused"),
        (30.0, True, "was asked to stop"),
    ],
    ids=["away", "stop"],
)
def test_all_ranks_say_why_a_learner_has_not_started(
    pool: Pool, timeout_s: float, stops: bool, why: str
) -> None:
    for error in pool.run(start_divided, free_ports()[0], timeout_s, stops, world=2):
        assert re.search(why, error)


@pytest.mark.parametrize("by_columns", [False, True], ids=["FSDP2", "tensor parallelism"])
def test_a_learner_that_holds_shards_and_one_that_does_not(
    pool: Pool, tmp_path: Path, by_columns: bool
) -> None:
    model = Table()
    with serving(tmp_path) as server:
        engine, is_over = learner(model, server, rounds=TABLE_ROUNDS), threading.Event()

        def run() -> None:
            with closing(engine):
                engine.start()
                train(engine, model, 0.5, is_over.is_set)
                engine.finish()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            found = pool.run(train_divided, server.server.port, by_columns, world=2)
        finally:
            is_over.set()
            thread.join(LONG_S)
        assert server.status()["refused"] == 0
    (name, before, after, received), (other_name, *others, _) = found
    assert name == other_name
    assert torch.equal(after, received)  # what was received last
    assert torch.equal(before, others[0])
    assert torch.equal(after, others[1])
    targets = torch.cat([target.reshape(-1) for target in model.targets])
    torch.testing.assert_close(after, targets, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(flat(model), targets, rtol=1e-3, atol=1e-3)
    assert {one.problem for one in replay(tmp_path / "tape")} == {None}
