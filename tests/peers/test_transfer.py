"""A transfer: what is asked for when, which replies count, and what is put together from them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.codecs import BFloat16, Codec, Float16, Int8
from lightning_loco.peers.model import Model
from lightning_loco.peers.protocol import (
    DATA,
    EMPTY,
    GONE,
    LATEST,
    MAX_CHUNK_BYTES,
    OTHER_MODEL,
    Reply,
    Request,
    parse_request,
)
from lightning_loco.peers.transfer import Assembly, Transfer
from tests.peers.helpers import MODEL, right_reply

CHUNK_BYTES = 800  # MODEL has 4000 bytes: five chunks
WINDOW = 4


def make(chunk_bytes: int = CHUNK_BYTES, window: int = WINDOW) -> Transfer:
    return Transfer(MODEL, Assembly(MODEL), chunk_bytes, window)


def asked(transfer: Transfer) -> list[Request]:
    return [parse_request(frame) for frame in transfer.requests()]


def reply_to(request: Request, **change: Any) -> Reply:
    return right_reply(request, MODEL.total_bytes)._replace(**change)


def carry(transfer: Transfer, flat: Tensor) -> None:
    """Answer everything that is asked for with what a peer with these numbers would say."""
    data = memoryview(flat.view(torch.uint8).numpy())
    while not transfer.is_done:
        for request in asked(transfer):
            reply = right_reply(request, len(data))
            assert transfer.expects(reply)
            transfer.place(reply, data[request.offset : request.offset + request.length])
            transfer.accept(reply)


def test_the_first_request_goes_alone_and_names_no_publication() -> None:
    transfer = make()
    (first,) = asked(transfer)
    assert (first.publication, first.offset, first.length) == (LATEST, 0, CHUNK_BYTES)
    assert asked(transfer) == []
    transfer.accept(reply_to(first))
    assert [request.offset for request in asked(transfer)] == [800, 1600, 2400, 3200]
    assert asked(transfer) == []


def test_requests_are_sent_several_at_a_time_when_half_of_the_window_is_free() -> None:
    transfer = make(chunk_bytes=80, window=4)
    transfer.accept(reply_to(asked(transfer)[0]))
    under_way = asked(transfer)
    assert {request.publication for request in under_way} == {5}
    transfer.accept(reply_to(under_way[0]))
    assert asked(transfer) == []
    transfer.accept(reply_to(under_way[1]))
    assert [request.offset for request in asked(transfer)] == [5 * 80, 6 * 80]


def test_every_byte_is_asked_for_once(subtests: pytest.Subtests) -> None:
    for chunk_bytes in (8, 800, 2400, 4096):
        with subtests.test(chunk_bytes=chunk_bytes):
            transfer = make(chunk_bytes)
            seen = []
            while not transfer.is_done:
                for request in asked(transfer):
                    seen += range(request.offset, request.offset + request.length)
                    transfer.accept(reply_to(request))
            assert seen == list(range(4000))
            assert transfer.received_bytes == 4000
            assert transfer.tag == Tag(1, 1)
            assert asked(transfer) == []


@pytest.mark.parametrize(
    "codec", [None, BFloat16(), Float16(), Int8(), Int8(12), Int8(40_000)], ids=str
)
def test_what_is_put_together_is_what_was_sent(
    codec: Codec | None, subtests: pytest.Subtests
) -> None:
    for dtype, chunk_bytes in itertools.product(
        (torch.float32, torch.float64), (8, 800, 80_000, MAX_CHUNK_BYTES)
    ):
        with subtests.test(dtype=dtype, chunk_bytes=chunk_bytes):
            numel = 100_001 if chunk_bytes > 8 else 1001  # more than PyTorch reads in one thread
            model = Model(1, numel, dtype, codec)
            assembly = Assembly(model)
            transfer = Transfer(model, assembly, chunk_bytes, WINDOW)
            for _ in range(2):
                flat = torch.randn(numel, dtype=dtype)
                wire = flat.view(torch.uint8) if codec is None else codec.encode(flat)
                carry(transfer, wire)
                expected = flat if codec is None else codec.decode(wire, torch.empty_like(flat))
                assert torch.equal(assembly.params, expected)
                assert assembly.params.dtype == dtype
                assert assembly.nearness.is_finite
                transfer.restart()


def test_chunks_are_whole_rows_and_as_long_as_was_said(subtests: pytest.Subtests) -> None:
    for codec, chunk_bytes in itertools.product((BFloat16(), Int8(), Int8(12)), (8, 256, 4096)):
        with subtests.test(codec=codec, chunk_bytes=chunk_bytes):
            model = Model(1, 9999, torch.float32, codec)
            transfer = Transfer(model, Assembly(model), chunk_bytes, WINDOW)
            longest = max(chunk_bytes, codec.row_bytes)
            assert transfer.chunk_bytes <= longest < transfer.chunk_bytes + codec.row_bytes
            seen = []
            while not transfer.is_done:
                for request in asked(transfer):
                    assert request.offset % codec.row_bytes == request.length % codec.row_bytes == 0
                    seen.append(request.length)
                    transfer.accept(right_reply(request, model.total_bytes))
            assert sum(seen) == model.total_bytes
            assert set(seen[:-1]) == {transfer.chunk_bytes} >= {max(seen)}


def test_what_a_codec_makes_nan_is_noticed(subtests: pytest.Subtests) -> None:
    for place in (0, 255, 256, 998, 999):
        with subtests.test(place=place):
            model = MODEL._replace(codec=Int8())
            assembly = Assembly(model)
            transfer = Transfer(model, assembly, CHUNK_BYTES, WINDOW)
            flat = torch.zeros(1000)
            flat[place] = math.nan
            carry(transfer, Int8().encode(flat))
            assert not assembly.nearness.is_finite
            assert assembly.params.isnan().sum() == (256 if place < 768 else 232)
            transfer.restart()
            carry(transfer, Int8().encode(torch.zeros(1000)))
            assert assembly.nearness.is_finite


def test_one_value_that_is_not_finite_is_noticed_and_forgotten_by_a_restart(
    subtests: pytest.Subtests,
) -> None:
    for value, place in itertools.product((math.nan, math.inf, -math.inf), (0, 500, 999)):
        with subtests.test(value=value, place=place):
            assembly = Assembly(MODEL)
            transfer = Transfer(MODEL, assembly, CHUNK_BYTES, WINDOW)
            flat = torch.zeros(1000)
            flat[place] = value
            carry(transfer, flat)
            assert not assembly.nearness.is_finite
            transfer.restart()
            carry(transfer, torch.zeros(1000))
            assert assembly.nearness.is_finite


def test_only_replies_to_what_is_under_way_are_expected(subtests: pytest.Subtests) -> None:
    rows: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({"request_id": 1}, False),
        ({"offset": 8}, False),
        ({"length": 792}, False),
        ({"total_bytes": 4008}, False),
        ({"checksum": 1}, False),
        ({"wire_format": 2}, False),
        ({"publication": LATEST}, False),  # data always come from one publication
        ({"kind": EMPTY, "publication": LATEST}, True),
        ({"kind": EMPTY, "publication": 5}, False),
        ({"kind": GONE, "publication": LATEST, "request_id": 1}, False),
        ({"kind": OTHER_MODEL, "checksum": 1, "wire_format": 2}, True),
        ({"kind": OTHER_MODEL, "request_id": 1}, False),
    ]
    for change, is_expected in rows:
        with subtests.test(change=change):
            transfer = make()
            (request,) = asked(transfer)
            assert transfer.expects(reply_to(request, **change)) == is_expected


def test_chunks_of_another_publication_and_replays_are_not_expected() -> None:
    transfer = make()
    (first,) = asked(transfer)
    transfer.accept(reply_to(first))
    assert not transfer.expects(reply_to(first))
    second = asked(transfer)[0]
    assert not transfer.expects(reply_to(second, publication=6))
    assert transfer.expects(reply_to(second, publication=5))
    assert transfer.expects(reply_to(second, kind=GONE, length=0))


def test_a_restart_begins_with_the_latest_and_expects_nothing_from_before() -> None:
    transfer = make()
    (first,) = asked(transfer)
    transfer.accept(reply_to(first))
    old = asked(transfer)[0]
    transfer.restart()
    assert transfer.received_bytes == 0
    assert not transfer.expects(reply_to(old))
    (again,) = asked(transfer)
    assert (again.publication, again.offset) == (LATEST, 0)
    assert again.request_id != first.request_id
    assert transfer.expects(reply_to(again, kind=DATA, publication=9))


def test_bad_arguments_are_named(subtests: pytest.Subtests) -> None:
    for chunk_bytes, window, message in (
        (0, 8, "multiple of 8 up to 4194304, got 0"),
        (12, 8, "multiple of 8"),
        (2**23, 8, "got 8388608"),
        (800, 0, "window must be 1 to 8, got 0"),
        (800, 9, "1 to 8, got 9"),
    ):
        with (
            subtests.test(chunk_bytes=chunk_bytes, window=window),
            pytest.raises(ValueError, match=message),
        ):
            make(chunk_bytes, window)
