"""Messages: only lines with the declared fields and types are accepted."""

from __future__ import annotations

import asyncio
import json

import pytest

from lightning_loco.tools.doctor.connectivity import (
    MAX_TEXT_LENGTH,
    BadMessageError,
    ConnectionResult,
    Identity,
    Results,
    decode,
    encode,
    receive,
)
from lightning_loco.tools.doctor.findings import Finding
from lightning_loco.tools.doctor.rendezvous import Findings, Hello, Participants
from tests.tools.doctor.fake_machine import facts_of

MESSAGES = [
    Identity(1, "node-1"),
    Hello(facts_of(1, 2), 3.5),
    Participants((facts_of(0, 2), facts_of(1, 2, faults=("a", "b"))), 2.0),
    Results(0, (ConnectionResult(1, "silent", 0.0),), ("::ffff:10.0.0.1",), 0.0),
    Findings((Finding("machines", "ok", "2 of 2"),), ()),
]


def test_messages_are_encoded_and_decoded(subtests: pytest.Subtests) -> None:
    for message in MESSAGES:
        with subtests.test(type(message).__name__):
            line = encode(message)
            assert line.endswith(b"\n")
            assert line.count(b"\n") == 1
            assert decode(line, ConnectionResult, type(message)) == message


def test_integers_are_accepted_as_seconds() -> None:
    line = b'{"ConnectionResult": {"target": 1, "failure": "", "round_trip_s": 1}}'
    assert decode(line, ConnectionResult) == ConnectionResult(1, "", 1.0)


def test_other_lines_are_refused(subtests: pytest.Subtests) -> None:
    for line in [
        b"",
        b"\x80\x04K\x01.",  # a pickle
        b"GET / HTTP/1.1",
        b"[]",
        b"{}",
        b"1",
        b"[" * 100_000,
        b'{"Identity": {"name": "a", "rank": 1}, "Participants": {}}',
        b'{"Participants": {}}',
        b'{"Identity": []}',
        b'{"Identity": {"name": "a"}}',
        b'{"Identity": {"name": "a", "rank": 1, "more": 1}}',
        b'{"Identity": {"name": "a", "rank": true}}',
        b'{"Identity": {"name": "a", "rank": 1.0}}',
        b'{"Identity": {"name": "a", "rank": "1"}}',
        b'{"Identity": {"name": 1, "rank": 1}}',
        b'{"Identity": {"name": null, "rank": 1}}',
        b'{"Identity": {"name": "a", "rank": 99999999999999999999}}',
        b'{"Identity": {"name": "a", "rank": ' + b"9" * 10_000 + b"}}",
    ]:
        with subtests.test(line=line), pytest.raises(BadMessageError):
            decode(line, Identity)


def test_seconds_are_finite_numbers(subtests: pytest.Subtests) -> None:
    for number in ["NaN", "Infinity", "1e999", "1" + "0" * 400, "true", '"1"', "null"]:
        line = f'{{"ConnectionResult": {{"target": 1, "failure": "", "round_trip_s": {number}}}}}'
        with subtests.test(number), pytest.raises(BadMessageError):
            decode(line.encode(), ConnectionResult)


def test_nested_fields_are_checked() -> None:
    fields = json.loads(encode(MESSAGES[1]))
    fields["Hello"]["facts"]["port"] = "22"
    with pytest.raises(BadMessageError, match="'22'"):
        decode(json.dumps(fields).encode(), Hello)


def test_texts_are_printable_and_bounded() -> None:
    sent = Identity(1, "a\x1b[31m\n\ud800" + "b" * 10_000)
    name = decode(encode(sent), Identity).name
    assert name.startswith("a?[31m??b")
    assert len(name) == MAX_TEXT_LENGTH


def receive_from(data: bytes, limit: int = 100, ends: bool = True) -> Identity:
    async def from_a_connection() -> Identity:
        reader = asyncio.StreamReader(limit)
        reader.feed_data(data)
        if ends:
            reader.feed_eof()
        return await receive(reader, 0.05, Identity)

    return asyncio.run(from_a_connection())


def test_line_is_received() -> None:
    assert receive_from(encode(Identity(1, "a")) + b"more") == Identity(1, "a")


def test_line_that_is_incomplete_or_too_long(subtests: pytest.Subtests) -> None:
    for data, ends, error in [
        (b"x" * 1000, False, BadMessageError),  # longer than the limit, without an end
        (b'{"Identity": {"na', False, TimeoutError),
        (b'{"Identity": {"na', True, ConnectionError),
        (b"", True, ConnectionError),
    ]:
        with subtests.test(data=data, ends=ends), pytest.raises(error):
            receive_from(data, ends=ends)
