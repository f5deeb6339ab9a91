"""Only what is declared is read."""

from __future__ import annotations

import asyncio
import json

import pytest

from lightning_loco.doctor.connectivity import Answer, Contact, Results
from lightning_loco.doctor.messages import (
    LONGEST_TEXT,
    BadMessageError,
    decode,
    encode,
    receive,
)
from lightning_loco.doctor.rendezvous import Hello, Report, Roster
from lightning_loco.doctor.report import Finding
from tests.doctor.fake_machine import facts_of

MESSAGES = [
    Answer(1, "node-1"),
    Hello(facts_of(1, 2), 3.5),
    Roster((facts_of(0, 2), facts_of(1, 2, faults=("a", "b")))),
    Results(0, (Contact(1, "silent", 0.0),), ("::ffff:10.0.0.1",)),
    Report((Finding("machines", "ok", "2 of 2"),), ()),
]


def test_a_message_comes_back_as_it_was(subtests: pytest.Subtests) -> None:
    for message in MESSAGES:
        with subtests.test(type(message).__name__):
            line = encode(message)
            assert line.endswith(b"\n")
            assert line.count(b"\n") == 1
            assert decode(line, Contact, type(message)) == message


def test_whole_numbers_are_taken_for_seconds() -> None:
    line = b'{"Contact": {"target": 1, "failure": "", "round_trip_s": 1}}'
    assert decode(line, Contact) == Contact(1, "", 1.0)


def test_anything_else_is_refused(subtests: pytest.Subtests) -> None:
    for line in [
        b"",
        b"\x80\x04K\x01.",  # a pickle
        b"GET / HTTP/1.1",
        b"[]",
        b"{}",
        b"1",
        b"[" * 100_000,
        b'{"Answer": {"name": "a", "rank": 1}, "Roster": {}}',
        b'{"Roster": {}}',
        b'{"Answer": []}',
        b'{"Answer": {"name": "a"}}',
        b'{"Answer": {"name": "a", "rank": 1, "more": 1}}',
        b'{"Answer": {"name": "a", "rank": true}}',
        b'{"Answer": {"name": "a", "rank": 1.0}}',
        b'{"Answer": {"name": "a", "rank": "1"}}',
        b'{"Answer": {"name": 1, "rank": 1}}',
        b'{"Answer": {"name": null, "rank": 1}}',
        b'{"Answer": {"name": "a", "rank": 99999999999999999999}}',
        b'{"Answer": {"name": "a", "rank": ' + b"9" * 10_000 + b"}}",
    ]:
        with subtests.test(line=line), pytest.raises(BadMessageError):
            decode(line, Answer)


def test_seconds_are_finite_numbers(subtests: pytest.Subtests) -> None:
    for number in ["NaN", "Infinity", "1e999", "1" + "0" * 400, "true", '"1"', "null"]:
        line = f'{{"Contact": {{"target": 1, "failure": "", "round_trip_s": {number}}}}}'
        with subtests.test(number), pytest.raises(BadMessageError):
            decode(line.encode(), Contact)


def test_parts_are_checked_as_well() -> None:
    fields = json.loads(encode(MESSAGES[1]))
    fields["Hello"]["facts"]["port"] = "22"
    with pytest.raises(BadMessageError, match="'22'"):
        decode(json.dumps(fields).encode(), Hello)


def test_texts_can_be_printed_and_end() -> None:
    sent = Answer(1, "a\x1b[31m\n\ud800" + "b" * 10_000)
    name = decode(encode(sent), Answer).name
    assert name.startswith("a?[31m??b")
    assert len(name) == LONGEST_TEXT


def received(data: bytes, limit: int = 100, ends: bool = True) -> Answer:
    async def from_a_connection() -> Answer:
        reader = asyncio.StreamReader(limit)
        reader.feed_data(data)
        if ends:
            reader.feed_eof()
        return await receive(reader, 0.05, Answer)

    return asyncio.run(from_a_connection())


def test_a_line_is_received() -> None:
    assert received(encode(Answer(1, "a")) + b"more") == Answer(1, "a")


def test_what_does_not_end_or_does_not_come(subtests: pytest.Subtests) -> None:
    for data, ends, error in [
        (b"x" * 1000, False, BadMessageError),  # longer than the limit, and no end
        (b'{"Answer": {"na', False, TimeoutError),
        (b'{"Answer": {"na', True, ConnectionError),
        (b"", True, ConnectionError),
    ]:
        with subtests.test(data=data, ends=ends), pytest.raises(error):
            received(data, ends=ends)
