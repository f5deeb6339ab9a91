"""Invalid messages raise errors that name the sender, and allocate no memory."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch

from lightning_loco.distributed.job import Job
from lightning_loco.distributed.store import TimeoutStore
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.parameter_server import Transport
from lightning_loco.parameter_server.optimizer_state import OptimizerState
from lightning_loco.parameter_server.protocol import FRAME_BYTES, MessageKind, MessageTag
from tests.harness.forked_jobs import Start
from tests.harness.pool import Pool
from tests.harness.programs import free_ports

MESSAGES = [
    b"",
    b"\xff\xfe",
    b"[2",
    b"[]",
    b"{}",
    b'"STEP"',
    b"[99, {}]",
    b"[true, {}]",
    b'["2", {}]',
    b"[2, []]",
    b"[2, {}, 1]",
    b"[" + b"1" * 450 + b", {}]",
]


def send_messages(rank: int, world: int) -> list[str]:
    """Rank 0 sends the messages and an impossible length; rank 1 returns the error for each."""
    connection = Transport().connect(1 - rank, f"worker {1 - rank}")
    frames = [len(text).to_bytes(8, "little") + text for text in MESSAGES]
    frames += [(2**62).to_bytes(8, "little"), (4).to_bytes(8, "little") + b"null"]
    found = []
    for frame in frames:
        if rank == 0:
            for part in (frame[:FRAME_BYTES].ljust(FRAME_BYTES), frame[FRAME_BYTES:]):
                memory = torch.tensor(list(part), dtype=torch.uint8)
                if part:
                    connection.wait(connection.send(memory, MessageTag.REQUESTS), "a message")
            continue
        with pytest.raises(RuntimeError) as raised:
            connection.receive_request()
        found.append(str(raised.value))
    return found


def test_messages(pool: Pool) -> None:
    _, found = pool.run(send_messages, world=2)
    assert len(found) == len(MESSAGES) + 2
    assert all(text.startswith("Worker 0 has ") for text in found), found


INVALID_TENSORS: list[dict[str, Any]] = [
    {},
    {"shape": [2], "dtype": "nn"},
    {"shape": [2], "dtype": "no_such_dtype"},
    {"shape": [2.5], "dtype": "float32"},
    {"shape": [True], "dtype": "float32"},
    {"shape": "2", "dtype": "float32"},
    {"shape": [2], "dtype": 4},
]


def receive_states(rank: int, world: int) -> list[str]:
    """Return the error for each of ``INVALID_TENSORS``."""
    connection = Transport().connect(1 - rank, "the aggregator")
    found = []
    for described in INVALID_TENSORS:
        description = {"entries": [[0, "momentum_buffer", described]], "groups": []}
        try:
            OptimizerState.receive(connection, description)
            found.append("nothing is raised")
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_descriptions_of_a_state(pool: Pool, subtests: pytest.Subtests) -> None:
    for described, *texts in zip(INVALID_TENSORS, *pool.run(receive_states, world=2), strict=True):
        with subtests.test(described=described):
            assert len(texts) == 2
            for text in texts:
                assert "The aggregator has described an invalid tensor" in text


def wait_for(store: TimeoutStore, key: str) -> None:
    while not store.check([key]):
        time.sleep(0.01)


def agree_with_garbage(rank: int, world: int, port: int, garbage: str) -> str:
    names = ["worker 0", "worker 1"]
    job = Job("127.0.0.1", port, rank, names, 30.0)
    group = WorkerGroup.of_job(job)
    try:
        group.connect()
        if rank == 1:
            group.own_store("agreement2").set("1", garbage)
            return "sent"
        group.raise_together(None)
    except RuntimeError as error:
        return str(error)
    finally:
        # Worker 0's process hosts the store, so it ends last.
        if rank == 0:
            job.store.set("seen", "")
            wait_for(job.store, "left")
            group.close()
        else:
            wait_for(job.store, "seen")
            group.close()
            job.store.set("left", "")
        job.close()
    return "nothing"


@pytest.mark.process
def test_agreements(subtests: pytest.Subtests) -> None:
    for garbage in ("[", "[]", "3", json.dumps([int(MessageKind.STEP), ""]), "\u00e9"):
        with subtests.test(garbage=garbage):
            (port,) = free_ports()
            with Start(agree_with_garbage, port, garbage, world=2) as job:
                first, second = job.outcomes([0, 1], 60)
            assert first.error is None, first.error
            assert second.result == "sent"
            assert first.result.lower().startswith("worker 1 has ")
