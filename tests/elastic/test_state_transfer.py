"""The state of a run between two members of a real group, and what is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_loco.distributed import notes
from lightning_loco.elastic import state_transfer
from lightning_loco.elastic.group import Groups
from lightning_loco.elastic.quorum import Plan
from lightning_loco.elastic.state_transfer import StateTransfer
from tests.pool import Pool

STATE = StateTransfer(
    {
        "state/outer": torch.arange(6.0),
        "flags": torch.tensor([True, False]),
        "count": torch.tensor(3),
        "half": torch.ones(2, 3, dtype=torch.bfloat16),
        "empty": torch.zeros(0),
    },
    {"round_index": 7, "host": {"lr": 0.1 + 0.2}},
)


def pair(rank: int) -> Groups:
    """A group of two, that find each other at a store of the first one."""
    groups = Groups("127.0.0.1", 10)
    stores: list[Any] = [None, None]
    torch.distributed.all_gather_object(stores, groups.address)
    groups.open(Plan("test/2", ("a", "b"), rank, tuple(stores), True, 0, (1,), 0, 0))
    return groups


def hand_over(rank: int, world: int) -> StateTransfer | None:
    groups = pair(rank)
    try:
        if rank == 0:
            state_transfer.send(STATE, groups, 1)
            return None
        return state_transfer.receive(groups, 0, 1000)
    finally:
        torch.distributed.barrier()
        groups.close()


def test_it_arrives_as_it_was(pool: Pool) -> None:
    _, found = pool.run(hand_over, world=2)
    assert found.values == STATE.values
    assert found.tensors.keys() == STATE.tensors.keys()
    for name, tensor in STATE.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)


def refusals(rank: int, world: int, garbage: list[bytes]) -> list[str]:
    return [refusal(rank, one) for one in garbage]


def refusal(rank: int, garbage: bytes) -> str:
    groups = pair(rank)
    try:
        if rank == 0:
            text = torch.frombuffer(bytearray(garbage), dtype=torch.uint8)
            groups.send([torch.tensor([len(garbage)])], 1)
            groups.send([text], 1)
            return ""
        state_transfer.receive(groups, 0, 1000)
        return "taken"
    except RuntimeError as refused:
        return str(refused)
    finally:
        torch.distributed.barrier()
        groups.close()


def test_what_is_no_state_is_refused(pool: Pool, subtests: pytest.Subtests) -> None:
    garbage = [
        b"\x80\x04no JSON",
        notes.write([]),
        notes.write({"tensors": {"a": ["float99", [3]]}, "values": {}}),
        notes.write({"tensors": {"a": ["torch.float32", [-3]]}, "values": {}}),
        notes.write({"tensors": {"a": ["torch.float32", [2.5]]}, "values": {}}),
        notes.write({"tensors": {"a": ["torch.float32", [251]]}, "values": {}}),
        notes.write({"tensors": {"a": ["torch.float32", [3]]}, "values": 5}),
    ]
    _, refused = pool.run(refusals, garbage, world=2)
    for sent, told in zip(garbage, refused, strict=True):
        with subtests.test(sent=sent):
            assert "is none" in told or "no message of this program" in told
