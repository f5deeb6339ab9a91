"""Headers: what is written is read, and nothing else is."""

from __future__ import annotations

import random
import struct

import pytest

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.comm.checks import schema_checksum
from lightning_loco.peers.protocol import (
    DATA,
    EMPTY,
    GONE,
    MAX_CHUNK_BYTES,
    MAX_REQUEST_BYTES,
    OTHER_MODEL,
    MalformedMessage,
    Reply,
    Request,
    pack_reply,
    pack_request,
    parse_reply,
    parse_request,
)

LARGEST = 2**64 - 1
REQUEST = Request(LARGEST, 1, 2**63, 17, 2**40, MAX_CHUNK_BYTES)
REPLY = Reply(DATA, LARGEST, 2, 2**63, 17, 2**40, 5, 2**41, Tag(1e300, -0.5))


def test_messages_come_back_as_they_went() -> None:
    assert parse_request(pack_request(REQUEST)) == REQUEST
    for kind in (DATA, EMPTY, GONE, OTHER_MODEL):
        reply = REPLY._replace(kind=kind)
        assert parse_reply(pack_reply(reply)) == reply


def test_the_bytes_of_a_request_are_little_endian_and_fixed() -> None:
    expected = b"LOCO\x01\x01\x00\x00" + struct.pack(
        "<QQQQQI", LARGEST, 1, 2**63, 17, 2**40, MAX_CHUNK_BYTES
    )
    assert pack_request(REQUEST) == expected
    assert len(expected) == MAX_REQUEST_BYTES


@pytest.mark.parametrize("length", [0, MAX_CHUNK_BYTES + 1, 2**32 - 1])
def test_lengths_out_of_range_are_refused(length: int) -> None:
    with pytest.raises(MalformedMessage):
        parse_request(pack_request(REQUEST._replace(length=length)))
    if length:
        with pytest.raises(MalformedMessage):
            parse_reply(pack_reply(REPLY._replace(length=length)))


def test_every_other_start_is_refused() -> None:
    for parse, frame in (
        (parse_request, pack_request(REQUEST)),
        (parse_reply, pack_reply(REPLY)),
    ):
        for place in range(8):
            for value in range(256):
                changed = frame[:place] + bytes([value]) + frame[place + 1 :]
                known_kind = place == 5 and parse is parse_reply and value in (2, 3, 4, 5)
                if changed == frame or known_kind:
                    parse(changed)
                else:
                    with pytest.raises(MalformedMessage):
                        parse(changed)


def test_every_other_length_and_random_bytes_are_refused() -> None:
    draw = random.Random(0)
    for parse, frame in (
        (parse_request, pack_request(REQUEST)),
        (parse_reply, pack_reply(REPLY)),
    ):
        wrong = [frame[:end] for end in range(len(frame))]
        wrong += [frame + b"\0", frame * 2, frame * 100]
        wrong += [draw.randbytes(draw.randrange(200)) for _ in range(1000)]
        wrong += [draw.randbytes(len(frame)) for _ in range(1000)]
        for each in wrong:
            with pytest.raises(MalformedMessage):
                parse(each)


def test_the_checksum_tells_models_apart_and_is_the_same_in_every_process() -> None:
    schema = [("a.weight", (2, 3), "torch.float32", (3, 1))]
    assert schema_checksum(schema) == schema_checksum(list(schema))
    assert schema_checksum(schema) == 17002396515029882019
    others = [[("a.weight", (3, 2), "torch.float32", (2, 1))], [], schema * 2]
    assert len({schema_checksum(each) for each in [schema, *others]}) == 4
