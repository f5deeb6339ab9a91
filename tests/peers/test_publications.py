"""Publications: whole models only, nobody waits, and slow readers keep what they began with."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.codecs import BFloat16, Float16, Int8
from lightning_loco.peers.model import Model
from lightning_loco.peers.protocol import LATEST
from lightning_loco.peers.publications import Publications

NUMEL = 1000
READER, OTHER, THIRD = b"reader", b"other", b"third"


def make(lease_s: float = 60.0, num_buffers: int = 3, numel: int = NUMEL) -> Publications:
    model = Model(1, numel, torch.float32)
    return Publications(model, lease_s=lease_s, num_buffers=num_buffers)


def publish(publications: Publications, value: int) -> int:
    numel = publications._model.numel
    return publications.publish(torch.full((numel,), float(value)), Tag(value, value))


def read(publications: Publications, number: int, reader: bytes) -> tuple[int, set[float]] | None:
    """Number and distinct values of what a reader gets; None if it is gone."""
    with publications.reading(number, reader) as publication:
        if publication is None:
            return None
        values = torch.frombuffer(publication.data, dtype=torch.float32)
        assert publication.tag == Tag(publication.number, publication.number)
        return publication.number, set(values.tolist())


def test_nothing_is_there_before_the_first() -> None:
    publications = make()
    assert publications.latest == 0
    assert read(publications, LATEST, READER) is None
    assert read(publications, 1, READER) is None


def test_the_latest_is_served() -> None:
    publications = make()
    for value in range(1, 10):
        assert publish(publications, value) == value == publications.latest
        assert read(publications, LATEST, b"%d" % value) == (value, {value})
        with publications.reading(LATEST, b"%d" % value) as publication:
            assert publication is not None
            publications.release(publication, b"%d" % value)


def test_a_slow_reader_keeps_its_publication_among_thousands() -> None:
    publications = make()
    publish(publications, 1)
    assert read(publications, LATEST, READER) == (1, {1.0})
    for value in range(2, 3000):
        publish(publications, value)
        if value % 100 == 0:
            assert read(publications, 1, READER) == (1, {1.0})
    assert read(publications, 2998, READER) is not None


def test_a_publisher_does_not_wait_for_a_reader_in_the_middle_of_a_copy() -> None:
    publications = make()
    publish(publications, 1)
    with publications.reading(LATEST, READER) as publication:
        assert publication is not None
        for value in range(2, 1000):
            publish(publications, value)
            assert set(publication.wire.view(torch.float32).tolist()) == {1.0}


def test_without_a_lease_a_publication_goes() -> None:
    publications = make(lease_s=0.02)
    publish(publications, 1)
    assert read(publications, 1, READER) is not None
    time.sleep(0.03)
    for value in range(2, 5):
        publish(publications, value)
    assert read(publications, 1, READER) is None


def test_a_reader_that_has_all_keeps_nothing() -> None:
    publications = make()
    publish(publications, 1)
    with publications.reading(LATEST, READER) as publication:
        assert publication is not None
        publications.release(publication, READER)
    for value in range(2, 5):
        publish(publications, value)
    assert read(publications, 1, READER) is None


def test_the_oldest_lease_ends_when_no_buffer_is_left() -> None:
    publications = make()
    publish(publications, 1)
    assert read(publications, 1, READER) == (1, {1.0})
    publish(publications, 2)
    assert read(publications, 2, OTHER) == (2, {2.0})  # by number, so that they do not share
    publish(publications, 3)
    publish(publications, 4)
    assert read(publications, 1, READER) is None
    assert read(publications, 2, OTHER) == (2, {2.0})


def test_readers_share_what_is_kept_already() -> None:
    publications = make()
    publish(publications, 1)
    assert read(publications, LATEST, READER) == (1, {1.0})
    publish(publications, 2)
    for reader in (OTHER, THIRD):
        assert read(publications, LATEST, reader) == (1, {1.0})
    for value in range(3, 50):
        publish(publications, value)
        for reader in (READER, OTHER, THIRD):
            assert read(publications, 1, reader) == (1, {1.0})


def test_readers_do_not_share_what_is_old() -> None:
    publications = make(lease_s=0.2)
    publish(publications, 1)
    started = time.monotonic()
    assert read(publications, LATEST, READER) == (1, {1.0})
    publish(publications, 2)
    while time.monotonic() - started < 0.25:
        assert read(publications, 1, READER) == (1, {1.0})  # the lease goes on
        time.sleep(0.01)
    assert read(publications, LATEST, OTHER) == (2, {2.0})


def test_strangers_do_not_fill_the_table_of_leases() -> None:
    publications = make()
    publish(publications, 1)
    for number in range(10_000):
        read(publications, LATEST, b"%d" % number)
    assert sum(len(buffer.leases) for buffer in publications._buffers) <= 64


@pytest.mark.parametrize("num_buffers", [3, pytest.param(4, marks=pytest.mark.soak)])
def test_no_reader_ever_sees_a_mixed_model(num_buffers: int) -> None:
    numel = 20_000
    publications = make(num_buffers=num_buffers, lease_s=0.01, numel=numel)
    wrong: list[object] = []
    seen: set[int] = set()
    stop = threading.Event()

    def read_slowly() -> None:
        draw = 0
        while not stop.is_set():
            draw += 1
            number, total = LATEST, torch.zeros(0)
            for start in range(0, 4 * numel, numel):  # in four chunks
                with publications.reading(number, b"reader%d" % (draw % 3)) as publication:
                    if publication is None:
                        break
                    number = publication.number
                    chunk = bytes(publication.data[start : start + numel])
                    total = torch.cat(
                        [total, torch.frombuffer(bytearray(chunk), dtype=total.dtype)]
                    )
            else:
                if set(total.tolist()) != {float(number)}:
                    wrong.append((number, set(total.tolist())))
                seen.add(number)

    thread = threading.Thread(target=read_slowly)
    thread.start()
    longest = 0.0
    flat = torch.empty(numel)
    value, deadline = 0, time.monotonic() + 20
    while value < 3000 or (len(seen) < 20 and time.monotonic() < deadline):
        value += 1
        flat.fill_(value)
        started = time.perf_counter()
        publications.publish(flat, Tag(value, value))
        longest = max(longest, time.perf_counter() - started)
    stop.set()
    thread.join()
    assert not wrong
    assert len(seen) >= 20
    assert longest < 1.0


def test_values_are_narrowed_like_torch_does() -> None:
    publications = make()
    flat = torch.randn(NUMEL, dtype=torch.float64)
    publications.publish(flat, Tag(0, 0))
    with publications.reading(LATEST, READER) as publication:
        assert publication is not None
        assert torch.equal(publication.wire.view(torch.float32), flat.float())


def test_what_is_published_is_encoded(subtests: pytest.Subtests) -> None:
    for codec in (BFloat16(), Float16(), Int8(), Int8(block=12)):
        with subtests.test(codec=codec):
            model = Model(1, NUMEL, torch.float32, codec)
            publications = Publications(model)
            for number in range(1, 6):
                flat = torch.randn(NUMEL)
                assert publications.publish(flat, Tag(0, 0)) == number
                with publications.reading(number, READER) as publication:
                    assert publication is not None
                    assert len(publication.data) == model.total_bytes == codec.num_bytes(NUMEL)
                    assert torch.equal(publication.wire, codec.encode(flat))
                    assert bytes(publication.data) == publication.wire.numpy().tobytes()
                    assert publication.norm == pytest.approx(float(flat.norm()))


def test_what_was_encoded_elsewhere_is_served_as_it_is() -> None:
    codec = Int8()
    publications = Publications(Model(1, NUMEL, torch.float32, codec))
    publications.publish(torch.ones(NUMEL), Tag(1, 1))
    wire = codec.encode(torch.randn(NUMEL))
    publications.draft_bytes().copy_(wire)
    assert publications.post_bytes(Tag(2, 2), 3.0) == publications.latest == 2
    newest = publications.newest
    assert newest is not None
    assert torch.equal(newest.wire, wire)
    assert (newest.tag, newest.norm) == (Tag(2, 2), 3.0)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="no parameters"):
        make(numel=0)
    with pytest.raises(ValueError, match="at least 3, got 2"):
        make(num_buffers=2)
    with pytest.raises(ValueError, match=r"\(999,\), but 1000 were announced"):
        make().publish(torch.zeros(999), Tag(0, 0))


def test_a_draft_is_not_read_before_it_is_posted() -> None:
    publications = make()
    publish(publications, 1)
    draft = publications.draft()
    draft.fill_(2)
    assert publications.draft().data_ptr() == draft.data_ptr()
    assert read(publications, 0, READER) == (1, {1})
    assert publications.post(Tag(2, 2), 4.0) == publications.latest == 2
    assert read(publications, 2, READER) == (2, {2})
    assert publications.draft().data_ptr() != draft.data_ptr()


def test_a_draft_that_is_to_be_encoded_is_not_read_before_it_is_posted() -> None:
    publications = Publications(Model(1, NUMEL, torch.float32, Int8()))
    publications.publish(torch.full((NUMEL,), 1.0), Tag(1, 1))
    newest = publications.newest
    assert newest is not None
    served = newest.wire.clone()
    publications.draft().fill_(2)
    assert publications.newest is newest
    assert torch.equal(newest.wire, served)
    assert publications.post(Tag(2, 2), 4.0) == 2
    assert publications.newest is not newest
    assert torch.equal(newest.wire, served)
