"""Messages between ranks: text and numbers of bounded length, never a pickle."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_loco.distributed import json_messages
from lightning_loco.distributed.worker_group import WorkerGroup
from tests.harness.pool import Pool, PoolError


class CountsUnpickling:
    """Counts how often it is unpickled."""

    num_unpickled = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return CountsUnpickling._unpickle, ()

    @staticmethod
    def _unpickle() -> int:
        CountsUnpickling.num_unpickled += 1
        return 0


def test_plain_values_are_sent_unchanged(subtests: pytest.Subtests) -> None:
    values = (None, 3, -(2**80), 0.1, math.inf, "ä|", [1, ["a", None]], {"a": [True, {"b": 2.5}]})
    for value in values:
        with subtests.test(str(value)):
            assert json_messages.read(json_messages.write(value), "Worker 1") == value


def test_other_values_are_an_error() -> None:
    with pytest.raises(TypeError):
        json_messages.write(CountsUnpickling())


def test_garbage_is_an_error_that_names_its_sender(subtests: pytest.Subtests) -> None:
    rows = {
        "nothing": b"",
        "no text": b"\xff\xfe",
        "a fragment": b"{",
        "deep": b"[" * 100_000,
        "a long number": b"9" * 10_000,
        "a pickle": pickle.dumps(CountsUnpickling()),
    }
    for name, garbage in rows.items():
        with subtests.test(name):
            with pytest.raises(RuntimeError, match="^Worker 1 has sent .* no message"):
                json_messages.read(garbage, "Worker 1")
            assert CountsUnpickling.num_unpickled == 0


def test_a_state_holds_plain_values_and_tensors_only() -> None:
    state = {"random": [3, [1, 2], None], "torch": torch.arange(3), "text": "a"}
    again = json_messages.read_state(json_messages.write_state(state))
    assert again["torch"].tolist() == [0, 1, 2]
    assert again["random"] == [3, [1, 2], None]
    with pytest.raises(pickle.UnpicklingError):
        json_messages.read_state(json_messages.write_state({"a": CountsUnpickling()}))
    assert CountsUnpickling.num_unpickled == 0


class NeedsTwo(Exception):
    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)


def send_and_receive(error: Exception | None) -> Exception | None:
    value = json_messages.read(json_messages.write(json_messages.write_error(error)), "Worker 1")
    return json_messages.read_error(value, "Worker 1")


def test_builtin_errors_keep_their_type() -> None:
    assert send_and_receive(None) is None
    for error in (ValueError("a"), TypeError("b"), PermissionError(13, "no"), MemoryError("c")):
        again = send_and_receive(error)
        assert type(again) is type(error)
        assert f"Worker 1: {error}" in str(again)


def test_errors_with_other_constructors_become_runtime_errors() -> None:
    unicode = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")
    for error in (NeedsTwo("two of them", 2), unicode):
        again = send_and_receive(error)
        assert type(again) is RuntimeError
        assert str(again) == f"Worker 1: {type(error).__name__}: {error}"


def test_an_invalid_error_becomes_a_runtime_error(subtests: pytest.Subtests) -> None:
    values = ("text", [], ["ValueError"], ["ValueError", 3], {"a": 1}, ["SystemExit", "x"], 7)
    for value in values:
        with subtests.test(str(value)):
            assert type(json_messages.read_error(value, "Worker 1")) is RuntimeError


def gather_messages(rank: int, world: int) -> None:
    assert dist.group.WORLD is not None
    names = [f"Worker {w}" for w in range(world)]
    for lengths in ([0, 3, 504], [505, 1, 0], [10, 200_000, 504]):
        sent = [bytes([w]) * length for w, length in enumerate(lengths)]
        assert json_messages.all_gather(sent[rank], dist.group.WORLD, names) == sent


def test_short_and_long_messages_are_gathered(pool: Pool) -> None:
    pool.run(gather_messages, world=3)


def announce_endless_message(rank: int, world: int) -> None:
    group = WorkerGroup.create(timeout_s=20)
    if rank == 1:
        frame = (2**50).to_bytes(8, "little").ljust(512, b"\0")
        json_messages._all_gather_equal(frame, group.control, world)
    else:
        with pytest.raises(ValueError, match="Worker 1 wants .* of 1,125,899,906,842,624 bytes"):
            group.gather_objects("fine")
    group.close()


def test_an_announced_message_that_is_too_long_is_an_error(pool: Pool) -> None:
    pool.run(announce_endless_message, world=3)


def send_a_pickle(rank: int, world: int) -> None:
    group = WorkerGroup.create(timeout_s=20)
    try:
        if rank == 1:
            names = [f"Worker {w}" for w in range(world)]
            json_messages.all_gather(pickle.dumps(CountsUnpickling()), group.control, names)
        else:
            group.gather_objects("fine")
    finally:
        group.close()
        assert CountsUnpickling.num_unpickled == 0


def test_a_pickle_is_not_unpickled(pool: Pool) -> None:
    with pytest.raises(PoolError) as caught:
        pool.run(send_a_pickle, world=2)
    assert "Worker 1 has sent something that is no message" in caught.value.failures[0].message
    assert set(caught.value.failures) == {0}
