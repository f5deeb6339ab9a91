"""The snapshot server: replies to a bare client."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

import pytest
import torch

from lightning_loco.algorithms.pairwise_average import Tag
from lightning_loco.gossip.protocol import (
    NOTHING_PUBLISHED,
    OTHER_MODEL,
    PARAMETERS,
    ModelId,
    ReplyHeader,
    pack_request,
    parse_reply,
)
from lightning_loco.gossip.snapshot_server import max_connections
from lightning_loco.transport import Client
from tests.harness.gossip_nodes import FORMAT, HOST, peers, serving
from tests.harness.limits import HARNESS_S, wait_until


@contextlib.contextmanager
def client(port: int) -> Iterator[Client]:
    with contextlib.closing(Client(HOST, port)) as opened:
        yield opened


def ask(client: Client, model_id: ModelId = FORMAT.model_id) -> tuple[ReplyHeader, bytes]:
    """Send a request; return the header and the body of the reply."""
    reply = client.request(pack_request(model_id), timeout_s=HARNESS_S)
    body = bytearray(reply.body_bytes)
    reply.receive_into(memoryview(body), timeout_s=HARNESS_S)
    return parse_reply(reply.header), bytes(body)


def test_published_parameters_are_served() -> None:
    (peer,) = peers(1)
    with serving(peer) as (server, snapshots), client(peer.port) as connection:
        for count in (1, 2, 3):
            flat = torch.randn(1000)
            snapshots.publish(flat, Tag(count, 0.5))
            reply, body = ask(connection)
            assert body == flat.numpy().tobytes()
            assert reply == ReplyHeader(PARAMETERS, FORMAT.model_id, Tag(count, 0.5))
            assert server.bytes_sent == 4000 * count
        assert server.malformed == 0


def test_reply_says_why_nothing_is_served(subtests: pytest.Subtests) -> None:
    for value, model_id, kind in (
        (None, FORMAT.model_id, NOTHING_PUBLISHED),
        (1.0, FORMAT.model_id._replace(schema_checksum=1), OTHER_MODEL),
        (1.0, FORMAT.model_id._replace(encoding_checksum=2), OTHER_MODEL),
        (None, FORMAT.model_id._replace(schema_checksum=1), OTHER_MODEL),
    ):
        (peer,) = peers(1)
        with (
            subtests.test(value=value, model_id=model_id),
            serving(peer, value) as (server, _),
            client(peer.port) as connection,
        ):
            assert ask(connection, model_id) == (ReplyHeader(kind, FORMAT.model_id), b"")
            assert (server.bytes_sent, server.malformed) == (0, 0)


def test_invalid_request_closes_the_connection(subtests: pytest.Subtests) -> None:
    for header, body in ((b"", b""), (b"nonsense", b""), (pack_request(FORMAT.model_id), b"body")):
        (peer,) = peers(1)
        with (
            subtests.test(header=header, body=body),
            serving(peer, 1.0) as (server, _),
            client(peer.port) as connection,
        ):
            with pytest.raises(ConnectionError):
                connection.request(header, body, timeout_s=HARNESS_S)
            wait_until(
                lambda server=server: server.malformed == 1, "the malformed message was not counted"
            )
            assert ask(connection)[0].kind == PARAMETERS


def test_peers_use_at_most_an_eighth_of_the_open_files(
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
            assert max_connections(num_peers) == expected
