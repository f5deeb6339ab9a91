"""The engine of pairwise gossip: exact blends without waits, ranks of one job, errors."""

from __future__ import annotations

import itertools
import math
import socket
import threading
import time
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_loco import PairwiseAverage, PairwiseEngine
from lightning_loco.algorithms.pairwise_average import Tag
from lightning_loco.compression import BFloat16, Codec, Float16, Int8
from tests.harness.gossip_nodes import DPWA, peers, silent
from tests.harness.limits import LONG_S
from tests.harness.pool import Pool
from tests.harness.small_model import flat, make_model


class Numbers(nn.Module):
    """A vector, a buffer, and an integer buffer, which is not exchanged."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.full((5,), value, dtype=torch.float64))
        self.register_buffer("mean", torch.full((3,), value, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(int(value)))


def pair(
    *values: float, fetch_timeout_s: float = 5, **settings: Any
) -> list[tuple[Numbers, PairwiseEngine]]:
    """Yield open engines in one process, one for each worker."""
    nodes = peers(len(values), "w")
    workers = []
    for node, value in zip(nodes, values, strict=True):
        model = Numbers(value)
        engine = PairwiseEngine(
            model,
            PairwiseAverage(**DPWA | settings),
            nodes=nodes,
            name=node.name,
            fetch_timeout_s=fetch_timeout_s,
        )
        workers.append((model, engine))
    return workers


def close(workers: list[tuple[Numbers, PairwiseEngine]]) -> None:
    for _, engine in workers:
        engine.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("loco")]


def test_only_the_fetching_worker_changes() -> None:
    (here, reader), (there, served) = workers = pair(0.0, 8.0, factor=0.25)
    served._clock = 40.0
    served.update_send(loss=1.0)
    reader.update_send(loss=1.0)
    assert reader.update_wait(loss=1.0) == 0.25
    assert here.values.tolist() == [2.0] * 5
    assert here.mean.tolist() == [2.0] * 3
    assert here.count == 0
    assert there.values.tolist() == [8.0] * 5
    assert reader._clock == 0.25 * 41 + 0.75 * 1
    assert reader.statistics.rounds == 1
    close(workers)


def test_simultaneous_blends_with_factor_one_half_keep_the_mean() -> None:
    workers = pair(1.0, 5.0)
    for _, engine in workers:
        engine._clock = 3.0
        engine.node.publish(engine._served.new_flat(), Tag(engine._clock, 1.0))
    for _, engine in workers:
        engine._exchange.publisher._next_time = math.inf
        engine.update_send(1.0)
    for _, engine in workers:
        assert engine.update_wait(1.0) == 0.5
    assert [float(model.values.detach().mean()) for model, _ in workers] == [3.0, 3.0]
    close(workers)


def test_interpolation_determines_the_factor(subtests: pytest.Subtests) -> None:
    rows: list[tuple[dict[str, Any], float]] = [
        ({"interpolation": "loss"}, 0.75),
        ({"interpolation": "clock"}, 0.5),
        ({"interpolation": lambda clock, peer_clock, loss, peer_loss: 1.0}, 1.0),
        ({"divergence_threshold": 6.0}, 0.25),
        ({"factor": 0.0}, 0.0),
    ]
    for settings, expected in rows:
        with subtests.test(settings=settings):
            (here, reader), (_, served) = workers = pair(0.0, 4.0, **settings)
            try:
                served.update_send(loss=1.0)
                reader.update_send(loss=3.0)
                assert reader.update_wait(loss=3.0) == expected
                assert here.values.tolist() == [4 * expected] * 5
            finally:
                close(workers)


@pytest.mark.parametrize(("interpolation", "expected"), [("constant", 0.5), ("loss", 0.0)])
def test_rules_that_use_the_loss_wait_for_the_first_loss(
    interpolation: str, expected: float
) -> None:
    (here, reader), (_, served) = workers = pair(0.0, 4.0, interpolation=interpolation)
    served.update_send()
    reader.update_send()
    assert reader.update_wait() == expected
    assert here.values.tolist() == [4 * expected] * 5
    served.update_send(loss=torch.tensor(2.0))  # from now on the loss is known
    served._exchange.publisher.publish(served._clock)
    reader.update_send(loss=2.0)
    assert reader.update_wait() == 0.5
    close(workers)


def test_unfreezing_is_refused() -> None:
    model = Numbers(1.0)
    model.other = nn.Parameter(torch.zeros(2), requires_grad=False)
    engine = PairwiseEngine(model, nodes=peers(1), name="p0")
    engine.update_send(1.0)
    model.other.requires_grad_(True)
    engine._exchange.publisher._next_time = (
        0.0  # the check is made when the parameters are published
    )
    with pytest.raises(RuntimeError, match="'other' became trainable"):
        engine.update_send(1.0)
    with pytest.raises(RuntimeError, match="'other' became trainable"):
        engine.finish()
    engine.close()


def test_nothing_changes_without_a_peer() -> None:
    (here, engine), (_, other) = workers = pair(3.0, 4.0)
    other.close()
    for _ in range(3):
        engine.update_send(1.0)
        assert engine.update_wait(1.0) == 0.0
    assert here.values.tolist() == [3.0] * 5
    assert (engine.node.statistics.refused, engine.node.statistics.timeouts) == (3, 0)
    assert engine.statistics.rounds == 0
    close(workers)


def test_worker_with_nan_takes_the_parameters_of_its_peer() -> None:
    (here, engine), (_, other) = workers = pair(1.0, 4.0)
    other.update_send(1.0)
    here.values.data[2] = math.nan
    engine.update_send(1.0)
    assert not engine.worker.was_finite
    assert engine.update_wait(1.0) == 1.0
    assert here.values.tolist() == [4.0] * 5
    close(workers)


def test_steps_never_wait_for_a_fetch() -> None:
    (_, engine), (_, other) = workers = pair(1.0, 4.0, fetch_timeout_s=LONG_S)
    (peer,) = engine.settings.peers[1:]
    other.close()
    with silent(peer):
        for _ in range(20):
            engine.update_send(1.0)
            assert not engine.step()
        assert not engine.node.has_ended
        assert engine.statistics.wait_s == 0.0
        close(workers)


def test_a_reset_drops_the_running_fetch() -> None:
    (here, reader), (_, served) = workers = pair(0.0, 8.0)
    served.update_send(1.0)
    reader.update_send(1.0)
    reader.reset()
    assert reader.update_wait(1.0) == 0.0
    assert here.values.tolist() == [0.0] * 5
    reader.update_send(1.0)
    assert reader.update_wait(1.0) == 0.5
    close(workers)


def test_single_worker_is_not_changed() -> None:
    model = make_model()
    before = flat(model)
    engine = PairwiseEngine(model)
    for _ in range(3):
        engine.update_send(1.0)
        engine.step()
    engine.finish()
    engine.close()
    assert torch.equal(flat(model), before)


class Spread(nn.Module):
    """Parameters of many magnitudes, which a codec rounds."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, numel in (("long", 100_000), ("short", 3)):
            values = torch.randn(numel, generator=generator).pow(3)
            self.register_parameter(name, nn.Parameter(values))
        self.register_buffer("mean", torch.randn(5, generator=generator))


def test_blend_uses_the_decoded_parameters_of_the_peer(subtests: pytest.Subtests) -> None:
    for codec, keep_progress in itertools.product(
        (BFloat16(), Float16(), Int8(), Int8(block=12)), (False, True)
    ):
        with subtests.test(codec=codec, keep_progress=keep_progress):
            blend_with_a_codec(codec, keep_progress)


def blend_with_a_codec(codec: Codec, keep_progress: bool) -> None:
    nodes = peers(2, "w")
    average = PairwiseAverage(1.0, factor=0.25, keep_progress=keep_progress)
    models = [Spread(seed) for seed in range(2)]
    reader, served = (
        PairwiseEngine(model, average, nodes=nodes, name=node.name, compression=codec)
        for model, node in zip(models, nodes, strict=True)
    )
    with closing(reader), closing(served):
        before, theirs = (engine._served.new_flat() for engine in (reader, served))
        decoded = codec.decode(codec.encode(theirs), torch.empty_like(theirs))
        served.update_send(1.0)
        reader.update_send(1.0)
        assert reader.update_wait(1.0) == 0.25
        expected = before.clone()
        average.blend(expected, decoded, 0.25)
        assert torch.equal(reader._served.new_flat(), expected)
        assert torch.equal(served._served.new_flat(), theirs)
        num_bytes = codec.num_bytes(len(theirs))
        assert served.node.bytes_sent == reader.node.statistics.bytes_received == num_bytes
        served._record_blend(0.5, 0.0)  # bytes sent are counted with the next blend
        assert served.statistics.bytes_sent == num_bytes
        assert served.statistics.bytes_saved == theirs.nbytes - num_bytes


def test_bytes_sent_continue_after_a_resumed_run() -> None:
    (_, engine), (_, other) = workers = pair(1.0, 4.0)
    engine.statistics.bytes_sent = 1000
    engine.update_send(1.0)
    other.update_send(1.0)
    assert other.update_wait(1.0) == 0.5
    engine._record_blend(0.5, 0.0)
    assert engine.statistics.bytes_sent == 1000 + 64
    assert engine.statistics.bytes_saved == 0
    close(workers)


# ------------------------------------------------------------------------- ranks of one job


def gossip_between_ranks(rank: int, world: int) -> tuple[Tensor, int, Tensor]:
    model = Numbers(0.0)
    engine = PairwiseEngine(model, PairwiseAverage(1.0), fetch_timeout_s=10)
    model.values.data.fill_(float(rank))
    for _ in range(150):
        engine.update_send(1.0)
        time.sleep(0.002)
        engine.step()
    local = model.values.detach().clone()
    engine.finish()
    engine.close()
    return local, engine.statistics.rounds, model.values.detach().clone()


def test_ranks_of_one_job_converge_and_finish_with_the_same_mean(pool: Pool) -> None:
    results = pool.run(gossip_between_ranks, world=4)
    for local, blends, final in results:
        assert blends > 5
        assert 0 <= float(local.min()) <= float(local.max()) <= 3
        assert torch.equal(final, results[0][2])
    spread = max(float(local[0]) for local, _, _ in results) - min(
        float(local[0]) for local, _, _ in results
    )
    assert spread < 1.0


def start_with_different_models(rank: int, world: int) -> str:
    try:
        PairwiseEngine(nn.Linear(2, 2 + rank)).close()
    except ValueError as error:
        return str(error)
    return ""


def test_different_models_are_refused_on_every_rank(pool: Pool) -> None:
    for text in pool.run(start_with_different_models, world=2):
        assert "weight" in text


# ------------------------------------------------------------------------- errors and state


NODES = [{"name": "a", "host": "127.0.0.1", "port": 45671}]


def test_errors_name_the_invalid_setting(subtests: pytest.Subtests) -> None:
    rows: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"nodes": NODES}, ValueError, "name"),
        ({"nodes": NODES, "name": "b"}, ValueError, "no node 'b'"),
        ({"name": "a"}, ValueError, "nodes"),
        ({"nodes": [{"name": "a", "host": "x"}], "name": "a"}, ValueError, "port"),
        ({"nodes": "there/is/none.yaml", "name": "a"}, FileNotFoundError, "none.yaml"),
        ({"fetch_timeout_s": 0}, ValueError, "fetch_timeout_s"),
        ({"fetch_timeout_s": "1"}, TypeError, "fetch_timeout_s"),
        ({"compression": "zip"}, ValueError, "compression must be one of"),
        ({"compression": "int4"}, ValueError, "too roughly"),
        ({"key_file": "there/is/none.key"}, FileNotFoundError, "none.key"),
    ]
    for settings, error, text in rows:
        with subtests.test(settings=settings), pytest.raises(error, match=text):
            PairwiseEngine(make_model(), **settings)


def test_error_names_a_taken_port() -> None:
    (node,) = peers(1)
    with socket.socket() as taken:
        taken.bind((node.host, node.port))
        taken.listen()
        with pytest.raises(RuntimeError, match=str(node.port)):
            PairwiseEngine(make_model(), nodes=[node], name=node.name)


def test_state_restores_parameters_steps_and_clock() -> None:
    (_, engine), (_, other) = workers = pair(1.0, 4.0)
    for _ in range(3):
        engine.update_send(1.0)
        engine.step()
    saved = engine.state_dict()
    (model, resumed), (_, third) = others = pair(2.0, 4.0)
    resumed.load_state_dict(saved)
    assert resumed._clock == engine._clock
    assert resumed.worker.steps == 3
    assert torch.equal(model.values, workers[0][0].values)
    close(workers + others)


def test_keep_progress_adds_the_steps_made_during_a_fetch() -> None:
    for keep_progress, expected in ((False, 0.5 * 8 + 0.5 * 3), (True, 0.5 * 8 + 0.5 * 0 + 3)):
        (here, engine), (_, other) = workers = pair(0.0, 8.0, keep_progress=keep_progress)
        other.update_send(1.0)
        engine.update_send(1.0)
        here.values.data.add_(3.0)  # local steps during the fetch
        assert engine.update_wait(1.0) == 0.5
        assert here.values.tolist() == [expected] * 5
        close(workers)
