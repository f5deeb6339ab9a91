"""The hub that exchanges the messages of simulated workers."""

from __future__ import annotations

import pytest
import torch

from lightning_loco.algorithms import GASLoC, LocalSGD
from lightning_loco.distributed import Statistics, WorkerGroup
from lightning_loco.distributed.worker_status import IN_ROUND, WorkerStatus
from lightning_loco.engine.buckets import Bucket, BucketChunk
from lightning_loco.engine.exchanges import make_exchange
from lightning_loco.model.flat import Chunk
from lightning_loco.simulation.messages import Hub, HubHandle, VirtualClock
from lightning_loco.topology import Ring, Topology


def hub(num_workers: int, topology: Topology | None = None) -> Hub:
    algorithm = LocalSGD() if topology is None else GASLoC()
    exchange = make_exchange(algorithm, WorkerGroup(0, 1), Statistics(), topology)
    return Hub(exchange, num_workers, bucket_elements=2)


def send(common: Hub, worker: int, bucket: Bucket, index: int = 0) -> HubHandle:
    return common.of_worker(worker, VirtualClock()).start(bucket, index)


def bucket(value: float, start: int = 0) -> Bucket:
    tensor = torch.full((2,), float(value))
    chunk = Chunk(start, [tensor])
    message = tensor.clone()
    return Bucket(message, [BucketChunk(chunk, message, {})])


def test_all_workers_receive_the_result_of_the_exchange() -> None:
    common = hub(3)
    handles = [send(common, worker, bucket(worker)) for worker in range(3)]
    assert [handle.wait().tolist() for handle in handles] == [[3.0, 3.0]] * 3  # the sum


def test_a_message_is_copied_when_it_is_sent() -> None:
    common = hub(2)
    first = bucket(1.0)
    handle = send(common, 0, first)
    first.wire.fill_(9.0)
    send(common, 1, bucket(3.0))
    assert handle.wait().tolist() == [4.0, 4.0]


def test_a_sum_has_arrived_once_all_workers_have_sent() -> None:
    common = hub(2)
    handle = send(common, 0, bucket(1.0))
    assert not handle.has_arrived()
    assert common.wakeups == []
    with pytest.raises(RuntimeError, match="ends before all workers have begun it"):
        handle.wait()
    send(common, 1, bucket(2.0))
    assert handle.has_arrived()
    assert common.wakeups == [(0.0, 0), (0.0, 1)]


def test_gossip_waits_for_neighbours_only() -> None:
    common = hub(5, Ring())
    handle = send(common, 0, bucket(0.0))
    for other in (2, 3, 1):
        send(common, other, bucket(other))
        assert not handle.has_arrived()
    assert 0 not in [worker for _, worker in common.wakeups]
    send(common, 4, bucket(4.0))
    assert handle.has_arrived()
    assert handle.wait().tolist() == pytest.approx([5 / 3] * 2)


def test_rounds_are_separate_and_forgotten_when_all_have_released_them() -> None:
    common = hub(2, Ring())
    earlier = [send(common, w, bucket(w)) for w in range(2)]
    later = [send(common, w, bucket(10.0 * w), 1) for w in range(2)]
    assert [h.wait().tolist()[0] for h in later] == [5.0] * 2
    assert [h.wait().tolist() for h in earlier] == [[0.5, 0.5]] * 2
    first = common.round_at(0)
    earlier[0].release()
    assert common.round_at(0) is first
    earlier[1].release()
    assert common.round_at(0) is not first


def test_statuses_have_arrived_once_all_workers_have_sent_theirs() -> None:
    common = hub(2)
    status = WorkerStatus(IN_ROUND, 4, 1, weight=1.0)
    found = common.of_worker(1, VirtualClock()).send_status(status, "round 4")
    assert not found.has_arrived()
    with pytest.raises(RuntimeError, match="ends before all workers have begun it"):
        found.wait()
    other = status._replace(weight=0.0)
    common.of_worker(0, VirtualClock()).send_status(other, "round 4")
    assert found.has_arrived()
    assert not found.has_been_read
    assert found.wait() == [other, status]
    assert found.has_been_read


def test_there_are_no_sync_points() -> None:
    exchange = hub(1).of_worker(0, VirtualClock())
    with pytest.raises(RuntimeError, match="A simulation has no sync points"):
        exchange.wait_at_sync_point(WorkerStatus(1.0, 0, 0), "validation")
