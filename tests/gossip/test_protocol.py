"""Notes between workers: what is written is read again, and nothing else is."""

from __future__ import annotations

import random

import pytest

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.gossip.protocol import (
    NOTHING_YET,
    OTHER_MODEL,
    PARAMETERS,
    Answer,
    Content,
    pack_answer,
    pack_request,
    parse_answer,
    parse_request,
)
from lightning_loco.transport import MAX_HEADER_BYTES, MalformedMessage

CONTENT = Content(2**64 - 1, 3)


def test_what_is_written_is_read_again() -> None:
    assert parse_request(pack_request(CONTENT)) == CONTENT
    for kind in (PARAMETERS, NOTHING_YET, OTHER_MODEL):
        answer = Answer(kind, CONTENT, Tag(5.0, -0.25))
        note = pack_answer(answer)
        assert parse_answer(note) == answer
        assert len(note) < MAX_HEADER_BYTES


def test_nothing_else_is_read(subtests: pytest.Subtests) -> None:
    draw = random.Random(0)
    request, answer = pack_request(CONTENT), pack_answer(Answer(PARAMETERS, CONTENT))
    for parse, note in ((parse_request, request), (parse_answer, answer)):
        for wrong in (
            b"",
            note[:-1],
            note + b"\0",
            b"X" + note[1:],
            answer if note is request else request,
            *(draw.randbytes(len(note)) for _ in range(100)),
        ):
            with (
                subtests.test(parse=parse.__name__, note=wrong[:8]),
                pytest.raises(MalformedMessage),
            ):
                parse(wrong)
