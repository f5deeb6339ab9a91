"""The hub, which exchanges the messages of simulated workers."""

from __future__ import annotations

import pytest
import torch

from lightning_loco.algorithms import GASLoC, LocalSGD
from lightning_loco.distributed import Statistics, WorkerGroup
from lightning_loco.engine.buckets import Bucket, BucketChunk
from lightning_loco.engine.exchanges import make_exchange
from lightning_loco.parameters.flat import Chunk
from lightning_loco.simulation.simulation import Hub
from lightning_loco.topology import Ring, Topology


def hub(num_workers: int, topology: Topology | None = None) -> Hub:
    algorithm = LocalSGD() if topology is None else GASLoC()
    exchange = make_exchange(algorithm, WorkerGroup(0, 1), Statistics(), topology)
    return Hub(exchange, num_workers, bucket_elements=2)


def bucket(value: float, start: int = 0) -> Bucket:
    tensor = torch.full((2,), float(value))
    chunk = Chunk(start, [tensor])
    message = tensor.clone()
    return Bucket(message, [BucketChunk(chunk, message, LocalSGD(), {})])


def test_all_workers_receive_the_result_of_the_exchange() -> None:
    common = hub(3)
    handles = [common.of_worker(w).start(bucket(w), 0) for w in range(3)]
    assert [handle.wait().tolist() for handle in handles] == [[1.0, 1.0]] * 3


def test_a_message_is_copied_when_it_is_sent() -> None:
    common = hub(2)
    first = bucket(1.0)
    handle = common.of_worker(0).start(first, 0)
    first.wire.fill_(9.0)
    common.of_worker(1).start(bucket(3.0), 0)
    assert handle.wait().tolist() == [2.0, 2.0]
    handle.release()


def test_it_has_arrived_once_all_workers_have_sent() -> None:
    common = hub(2)
    handle = common.of_worker(0).start(bucket(1.0), 0)
    assert not handle.has_arrived()
    with pytest.raises(RuntimeError, match="ends before all workers have begun it"):
        handle.wait()
    common.of_worker(1).start(bucket(2.0), 0)
    assert handle.has_arrived()


def test_buckets_and_rounds_are_separate_even_if_one_is_pending() -> None:
    common = hub(2, Ring())
    earlier = [common.of_worker(w).start(bucket(w), 0) for w in range(2)]
    for start in (0, 2):
        later = [common.of_worker(w).start(bucket(10.0 * w + start, start), 1) for w in range(2)]
        assert [h.wait().tolist()[0] for h in later] == [5.0 + start] * 2
    assert [h.wait().tolist() for h in earlier] == [[0.5, 0.5]] * 2
