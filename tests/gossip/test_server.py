"""Serving snapshots: what a bare client is told when it asks."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

import pytest
import torch

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.gossip.protocol import (
    NOTHING_YET,
    OTHER_MODEL,
    PARAMETERS,
    Answer,
    Content,
    pack_request,
    parse_answer,
)
from lightning_loco.gossip.server import most_connections
from lightning_loco.transport import Client
from tests.gossip.helpers import HOST, MODEL, peers, serving
from tests.limits import HARNESS_S
from tests.transport.helpers import wait_until


@contextlib.contextmanager
def client(port: int) -> Iterator[Client]:
    with contextlib.closing(Client(HOST, port)) as made:
        yield made


def ask(client: Client, content: Content = MODEL.content) -> tuple[Answer, bytes]:
    """The answer to a request, and the parameters."""
    reply = client.request(pack_request(content), timeout_s=HARNESS_S)
    body = bytearray(reply.body_bytes)
    reply.receive_into(memoryview(body), timeout_s=HARNESS_S)
    return parse_answer(reply.header), bytes(body)


def test_parameters_are_served_as_they_were_published() -> None:
    (peer,) = peers(1)
    with serving(peer) as (server, snapshots), client(peer.port) as connection:
        for count in (1, 2, 3):
            flat = torch.randn(1000)
            snapshots.publish(flat, Tag(count, 0.5))
            answer, body = ask(connection)
            assert body == flat.numpy().tobytes()
            assert answer == Answer(PARAMETERS, MODEL.content, Tag(count, 0.5))
            assert server.bytes_sent == 4000 * count
        assert server.malformed == 0


def test_who_cannot_be_served_is_told_why(subtests: pytest.Subtests) -> None:
    for value, content, kind in (
        (None, MODEL.content, NOTHING_YET),
        (1.0, MODEL.content._replace(checksum=1), OTHER_MODEL),
        (1.0, MODEL.content._replace(wire_format=2), OTHER_MODEL),
        (None, MODEL.content._replace(checksum=1), OTHER_MODEL),
    ):
        (peer,) = peers(1)
        with (
            subtests.test(value=value, content=content),
            serving(peer, value) as (server, _),
            client(peer.port) as connection,
        ):
            assert ask(connection, content) == (Answer(kind, MODEL.content), b"")
            assert (server.bytes_sent, server.malformed) == (0, 0)


def test_what_is_no_request_costs_the_connection(subtests: pytest.Subtests) -> None:
    for note, body in ((b"", b""), (b"nonsense", b""), (pack_request(MODEL.content), b"body")):
        (peer,) = peers(1)
        with (
            subtests.test(note=note, body=body),
            serving(peer, 1.0) as (server, _),
            client(peer.port) as connection,
        ):
            with pytest.raises(ConnectionError):
                connection.request(note, body, timeout_s=HARNESS_S)
            wait_until(lambda server=server: server.malformed == 1, "it was not counted")
            assert ask(connection)[0].kind == PARAMETERS


def test_others_hold_an_eighth_of_the_open_files_at_most(
    monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    for files, num_peers, expected in (
        (1024, 3, 38),
        (1024, 1000, 128),
        (4, 3, 1),
        (resource.RLIM_INFINITY, 1000, 2032),
    ):
        with subtests.test(files=files, num_peers=num_peers):
            monkeypatch.setattr(resource, "getrlimit", lambda kind, files=files: (files, files))
            assert most_connections(num_peers) == expected
