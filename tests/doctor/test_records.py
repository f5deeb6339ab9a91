"""Only what is declared is read."""

from __future__ import annotations

import asyncio
import json

import pytest

from lightning_loco.doctor.messages import Bulk, Door, Hello, Knock, Ping, Results, Summary
from lightning_loco.doctor.records import GarbledError, printable, read, receive, write
from tests.doctor.fake_machine import facts_of

DOOR = Door("gloo", "eth0", "10.0.0.1", 40000)
RECORDS = [
    Ping(),
    Bulk(0.25),
    Hello(1, facts_of(1, 2, DOOR), 3.5),
    Results((), ("::ffff:10.0.0.1",), -0.5, 0.1),
    Summary((facts_of(0, 2), facts_of(1, 2, DOOR)), (None, Results((), (), 0.0, 0.0)), ("no",)),
]


def test_a_record_comes_back_as_it_was(subtests: pytest.Subtests) -> None:
    for record in RECORDS:
        with subtests.test(type(record).__name__):
            line = write(record)
            assert line.endswith(b"\n")
            assert line.count(b"\n") == 1
            assert read(line, Door, type(record)) == record


def test_whole_numbers_are_taken_for_seconds() -> None:
    assert read(b'{"Bulk": {"seconds": 1}}\n', Bulk) == Bulk(1.0)


def test_anything_else_is_refused(subtests: pytest.Subtests) -> None:
    for line in [
        b"",
        b"\x80\x04K\x01.",  # a pickle
        b"GET / HTTP/1.1",
        b"[]",
        b"{}",
        b"1",
        b"[" * 100_000,
        b'{"Knock": {"token": "a", "rank": 1}, "Ping": {}}',
        b'{"Ping": {}}',
        b'{"Knock": []}',
        b'{"Knock": {"token": "a"}}',
        b'{"Knock": {"token": "a", "rank": 1, "more": 1}}',
        b'{"Knock": {"token": "a", "rank": true}}',
        b'{"Knock": {"token": "a", "rank": 1.0}}',
        b'{"Knock": {"token": "a", "rank": "1"}}',
        b'{"Knock": {"token": 1, "rank": 1}}',
        b'{"Knock": {"token": null, "rank": 1}}',
        b'{"Knock": {"token": "a", "rank": 99999999999999999999}}',
        b'{"Knock": {"token": "a", "rank": ' + b"9" * 10_000 + b"}}",
        b'{"Knock": {"token": "\\u001b[2J", "rank": 1}}',  # clears a terminal
        b'{"Knock": {"token": "' + b"a" * 501 + b'", "rank": 1}}',
    ]:
        with subtests.test(line=line), pytest.raises(GarbledError):
            read(line, Knock)


def test_seconds_are_finite_numbers(subtests: pytest.Subtests) -> None:
    for number in ["NaN", "Infinity", "1e999", "true", '"1"', "null"]:
        with subtests.test(number), pytest.raises(GarbledError):
            read(f'{{"Bulk": {{"seconds": {number}}}}}'.encode(), Bulk)


def test_parts_are_checked_as_well() -> None:
    fields = json.loads(write(RECORDS[2]))
    fields["Hello"]["facts"]["doors"][0]["port"] = "22"
    with pytest.raises(GarbledError, match="'22'"):
        read(json.dumps(fields).encode(), Hello)


def test_what_is_printable_can_be_read() -> None:
    text = printable("a\x1b[31m\n" + "b" * 1000)
    assert text.startswith("a?[31m?b")
    assert read(write(Knock(text, 1)), Knock).token == text


def received(data: bytes, limit: int = 100, ends: bool = True) -> Knock:
    async def from_a_connection() -> Knock:
        reader = asyncio.StreamReader(limit)
        reader.feed_data(data)
        if ends:
            reader.feed_eof()
        return await receive(reader, 0.05, Knock)

    return asyncio.run(from_a_connection())


def test_a_line_is_received() -> None:
    assert received(write(Knock("a", 1)) + b"more") == Knock("a", 1)


def test_what_does_not_end_or_does_not_come(subtests: pytest.Subtests) -> None:
    for data, ends, error in [
        (b"x" * 1000, False, GarbledError),  # longer than the limit, and no end
        (b'{"Knock": {"tok', False, TimeoutError),
        (b'{"Knock": {"tok', True, ConnectionError),
        (b"", True, ConnectionError),
    ]:
        with subtests.test(data=data, ends=ends), pytest.raises(error):
            received(data, ends=ends)
