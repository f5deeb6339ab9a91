"""State sent between two members of a process group, and invalid states."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_loco.distributed import json_messages
from lightning_loco.elastic.group import MemberGroup
from lightning_loco.elastic.quorum import QuorumPlan
from lightning_loco.elastic.recovery import RunState
from lightning_loco.elastic.state_transfer import receive_state, send_state
from tests.harness.pool import Pool

STATE = RunState(
    {
        "state/outer": torch.arange(6.0),
        "flags": torch.tensor([True, False]),
        "count": torch.tensor(3),
        "half": torch.ones(2, 3, dtype=torch.bfloat16),
        "empty": torch.zeros(0),
    },
    {"round_index": 7, "host": {"lr": 0.1 + 0.2}},
)


def open_group(rank: int) -> MemberGroup:
    """Return a group of two members."""
    group = MemberGroup("127.0.0.1", 10)
    stores: list[Any] = [None, None]
    torch.distributed.all_gather_object(stores, group.address)
    group.open(QuorumPlan("test/2", ("a", "b"), rank, tuple(stores), True, 0, (1,), 0, 0))
    return group


def transfer(rank: int, world: int) -> RunState | None:
    group = open_group(rank)
    try:
        if rank == 0:
            send_state(STATE, group, 1)
            return None
        return receive_state(group, 0, 1000)
    finally:
        torch.distributed.barrier()
        group.close()


def test_a_state_arrives_unchanged(pool: Pool) -> None:
    _, found = pool.run(transfer, world=2)
    assert found.values == STATE.values
    assert found.tensors.keys() == STATE.tensors.keys()
    for name, tensor in STATE.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)


def errors_of(rank: int, world: int, descriptions: list[bytes]) -> list[str]:
    return [error_of(rank, description) for description in descriptions]


def error_of(rank: int, description: bytes) -> str:
    group = open_group(rank)
    try:
        if rank == 0:
            text = torch.frombuffer(bytearray(description), dtype=torch.uint8)
            group.send([torch.tensor([len(description)])], 1)
            group.send([text], 1)
            return ""
        receive_state(group, 0, 1000)
        return "accepted"
    except RuntimeError as error:
        return str(error)
    finally:
        torch.distributed.barrier()
        group.close()


def test_invalid_descriptions_are_refused(pool: Pool, subtests: pytest.Subtests) -> None:
    descriptions = [
        b"\x80\x04no JSON",
        json_messages.write([]),
        json_messages.write({"tensors": {"a": ["float99", [3]]}, "values": {}}),
        json_messages.write({"tensors": {"a": ["torch.float32", [-3]]}, "values": {}}),
        json_messages.write({"tensors": {"a": ["torch.float32", [2.5]]}, "values": {}}),
        json_messages.write({"tensors": {"a": ["torch.float32", [251]]}, "values": {}}),
        json_messages.write({"tensors": {"a": ["torch.float32", [3]]}, "values": 5}),
    ]
    _, errors = pool.run(errors_of, descriptions, world=2)
    for sent, error in zip(descriptions, errors, strict=True):
        with subtests.test(sent=sent):
            assert "is invalid" in error or "no message of this program" in error
