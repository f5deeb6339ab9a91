"""Snapshots: readers get complete models, and neither readers nor the publisher wait."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time

import pytest
import torch

from lightning_loco.algorithms.pairwise_average import Tag
from lightning_loco.compression import BFloat16, Float16, Int8
from lightning_loco.gossip.protocol import WireFormat
from lightning_loco.gossip.snapshots import Snapshots, norm_of

NUMEL = 1000
LARGE = 3 * 2**17 + 5


def make(numel: int = NUMEL) -> Snapshots:
    return Snapshots(WireFormat(1, numel, torch.float32))


def publish(snapshots: Snapshots, value: int) -> bool:
    numel = snapshots.wire_format.numel
    return snapshots.publish(torch.full((numel,), float(value)), Tag(value, value))


def read(snapshots: Snapshots) -> set[float]:
    """Return the distinct values of the latest snapshot, or an empty set if there is none."""
    with snapshots.reading() as snapshot:
        if snapshot is None:
            return set()
        values = torch.frombuffer(snapshot.data, dtype=torch.float32)
        assert snapshot.tag == Tag(values[0].item(), values[0].item())
        return set(values.tolist())


def test_latest_snapshot_is_read() -> None:
    snapshots = make()
    assert read(snapshots) == set()
    assert snapshots.latest is None
    for value in range(1, 10):
        assert publish(snapshots, value)
        assert read(snapshots) == {value}
        assert snapshots.latest is not None
        assert snapshots.latest.number == value


def test_snapshot_does_not_change_while_it_is_read() -> None:
    snapshots = make()
    publish(snapshots, 1)
    with snapshots.reading() as first:
        assert first is not None
        for value in range(2, 1000):
            assert publish(snapshots, value)
            assert set(first.wire.view(torch.float32).tolist()) == {1.0}
        assert read(snapshots) == {999}


def test_nothing_is_published_while_two_earlier_snapshots_are_read() -> None:
    snapshots = make()
    publish(snapshots, 1)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(snapshots.reading())
        publish(snapshots, 2)
        second = stack.enter_context(snapshots.reading())
        assert first is not None
        assert second is not None
        assert (first.number, second.number) == (1, 2)
        assert publish(snapshots, 3)
        assert not publish(snapshots, 4)
        assert snapshots.flat_buffer() is None
        assert snapshots.wire_buffer() is None
        assert read(snapshots) == {3}
        assert set(first.wire.view(torch.float32).tolist()) == {1.0}
        assert set(second.wire.view(torch.float32).tolist()) == {2.0}
    assert publish(snapshots, 5)
    assert read(snapshots) == {5}


def test_nothing_is_served_after_withdraw_until_the_next_snapshot() -> None:
    snapshots = make()
    publish(snapshots, 1)
    with snapshots.reading():
        publish(snapshots, 2)
        with snapshots.reading():
            publish(snapshots, 3)
            assert snapshots.flat_buffer() is None
            snapshots.withdraw()
            assert read(snapshots) == set()
            assert publish(snapshots, 4)
            assert read(snapshots) == {4}


def test_no_reader_ever_sees_a_mixed_model() -> None:
    numel = 20_000
    snapshots = make(numel)
    wrong: list[object] = []
    seen: set[float] = set()
    stop = threading.Event()

    def read_slowly() -> None:
        while not stop.is_set():
            with snapshots.reading() as snapshot:
                if snapshot is None:
                    continue
                parts = [bytes(snapshot.data[at : at + numel]) for at in range(0, 4 * numel, numel)]
                time.sleep(0.0001)
                values = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.float32).unique()
                if values.tolist() != [snapshot.tag.clock]:
                    wrong.append((snapshot.tag, values))
                seen.add(snapshot.tag.clock)

    threads = [threading.Thread(target=read_slowly) for _ in range(3)]
    for thread in threads:
        thread.start()
    flat = torch.empty(numel)
    value, deadline = 0, time.monotonic() + 20
    while value < 1000 or (len(seen) < 20 and time.monotonic() < deadline):
        value += 1
        flat.fill_(value)
        snapshots.publish(flat, Tag(value, value))
        time.sleep(0)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(seen) >= 20


def test_values_are_rounded_to_the_wire_dtype() -> None:
    snapshots = make()
    flat = torch.randn(NUMEL, dtype=torch.float64)
    snapshots.publish(flat, Tag(0, 0))
    with snapshots.reading() as snapshot:
        assert snapshot is not None
        assert torch.equal(snapshot.wire.view(torch.float32), flat.float())


def test_published_parameters_are_encoded(subtests: pytest.Subtests) -> None:
    for codec in (BFloat16(), Float16(), Int8(), Int8(block=12)):
        with subtests.test(codec=codec):
            wire_format = WireFormat(1, NUMEL, torch.float32, codec)
            snapshots = Snapshots(wire_format)
            for _ in range(5):
                flat = torch.randn(NUMEL)
                assert snapshots.publish(flat, Tag(0, 0))
                with snapshots.reading() as snapshot:
                    assert snapshot is not None
                    assert len(snapshot.data) == wire_format.total_bytes == codec.num_bytes(NUMEL)
                    assert torch.equal(snapshot.wire, codec.encode(flat))
                    assert bytes(snapshot.data) == snapshot.wire.numpy().tobytes()
                    assert snapshot.norm == pytest.approx(float(flat.norm()))


def test_encoded_parameters_are_served_unchanged() -> None:
    codec = Int8()
    snapshots = Snapshots(WireFormat(1, NUMEL, torch.float32, codec))
    snapshots.publish(torch.ones(NUMEL), Tag(1, 1))
    wire = codec.encode(torch.randn(NUMEL))
    memory = snapshots.wire_buffer()
    assert memory is not None
    memory.copy_(wire)
    snapshots.commit_wire(Tag(2, 2), 3.0)
    latest = snapshots.latest
    assert latest is not None
    assert torch.equal(latest.wire, wire)
    assert (latest.number, latest.tag, latest.norm) == (2, Tag(2, 2), 3.0)


@pytest.mark.parametrize("codec", [None, Int8()])
def test_buffer_is_not_served_before_the_commit(codec: Int8 | None) -> None:
    snapshots = Snapshots(WireFormat(1, NUMEL, torch.float32, codec))
    publish(snapshots, 1)
    before = snapshots.latest
    assert before is not None
    served = before.wire.clone()
    buffer = snapshots.flat_buffer()
    assert buffer is not None
    buffer.fill_(2)
    again = snapshots.flat_buffer()
    assert again is not None
    assert again.data_ptr() == buffer.data_ptr()
    assert snapshots.latest is before
    assert torch.equal(before.wire, served)
    snapshots.commit_flat(Tag(2, 2), 4.0)
    assert snapshots.latest is not before
    assert torch.equal(before.wire, served)


def test_errors_name_the_invalid_argument() -> None:
    with pytest.raises(ValueError, match="no parameters"):
        make(numel=0)
    with pytest.raises(ValueError, match=r"\(999,\), but 1000 were announced"):
        make().publish(torch.zeros(999), Tag(0, 0))


def test_norm_is_that_of_all_values(subtests: pytest.Subtests) -> None:
    for numel, dtype in itertools.product((1, 2**17, LARGE), (torch.float32, torch.float64)):
        with subtests.test(numel=numel, dtype=dtype):
            values = torch.randn(numel, dtype=dtype)
            expected = values.double().norm().item()
            assert norm_of(values) == pytest.approx(expected, rel=1e-5)


def test_norm_is_that_of_the_copy() -> None:
    values = torch.tensor([3.0 + 2**-40, 4.0], dtype=torch.float64)
    snapshots = make(numel=2)
    assert snapshots.publish(values, Tag(0, 0))
    assert snapshots.latest is not None
    assert snapshots.latest.norm == 5


def test_norm_is_not_finite_if_a_value_or_square_is_not(subtests: pytest.Subtests) -> None:
    for value, index in itertools.product((math.inf, -math.inf, math.nan, 3e38), (0, -1)):
        with subtests.test(value=value, index=index):
            values = torch.ones(LARGE)
            values[index] = value
            assert not math.isfinite(norm_of(values))
