"""Peers that send arbitrary bytes as encoded parameters: only plausible models are returned."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator

import pytest
import torch

from lightning_loco.algorithms.pairwise_average import Tag
from lightning_loco.compression import BFloat16, Codec, Float16, Int8
from lightning_loco.gossip import PeerNode
from lightning_loco.gossip.protocol import PARAMETERS, ModelId, ReplyHeader, pack_reply
from tests.harness.gossip_nodes import TAG, Replying, fetch, make_node, peers, replying

pytestmark = pytest.mark.recovery

CODECS = [BFloat16(), Float16(), Int8(), Int8(block=12)]


def fetch_and_check(node: PeerNode, own: torch.Tensor) -> bool:
    """Fetch once; return whether there is a result, which must be finite and not too large."""
    received = fetch(node)
    if received is None:
        return False
    assert torch.isfinite(received.params).all()
    longest = 10 * max(float(own.norm()), math.sqrt(len(own)))
    assert float(received.params.double().norm()) <= 1.001 * longest
    return True


def fetch_often(node: PeerNode, own: torch.Tensor) -> int:
    """Return how many of 300 fetches succeed; the others may fail only because of their values."""
    num_plausible = sum(fetch_and_check(node, own) for _ in range(300))
    found = node.statistics
    assert num_plausible == found.fetches
    assert found.not_finite + found.too_large == 300 - num_plausible
    assert (found.malformed, found.errors, found.timeouts) == (0, 0, 0)
    return num_plausible


def reply_with_bytes(make: Callable[[], bytes]) -> Replying:
    """Return replies whose bodies are arbitrary bytes."""

    def make_reply(requested: ModelId) -> tuple[bytes, bytes]:
        return pack_reply(ReplyHeader(PARAMETERS, requested, TAG)), make()

    return make_reply


@pytest.mark.parametrize("codec", [BFloat16(), Int8()], ids=str)
def test_megabytes_of_random_bytes_are_rejected(codec: Codec) -> None:
    numel, num_fetches = 100_000, 30
    make_reply = random_bytes(random.Random(0), codec.num_bytes(numel))
    with reading(codec, torch.randn(numel), make_reply) as here:
        for _ in range(num_fetches):
            assert fetch(here) is None
        found = here.statistics
        assert found.not_finite + found.too_large == num_fetches
        assert (found.malformed, found.errors, found.fetches, found.timeouts) == (0, 0, 0, 0)


def random_bytes(draw: random.Random, total_bytes: int) -> Replying:
    return reply_with_bytes(lambda: draw.randbytes(total_bytes))


def changed_bytes(draw: random.Random, wire: bytes, row_bytes: int) -> Replying:
    """Return replies with a few changed bytes; in every other reply these belong to scales."""
    scales = range(0, len(wire), row_bytes)
    changes = 0

    def change() -> bytes:
        nonlocal changes
        changes += 1
        changed = bytearray(wire)
        for _ in range(draw.randrange(1, 10)):
            in_scale = draw.choice(scales) + draw.randrange(4)
            index = in_scale if changes % 2 else draw.randrange(len(wire))
            changed[index] = draw.randrange(256)
        return bytes(changed)

    return reply_with_bytes(change)


@contextlib.contextmanager
def reading(codec: Codec, own: torch.Tensor, make_reply: Replying) -> Iterator[PeerNode]:
    """Open a node whose only peer sends these replies."""
    nodes = peers(2)
    with (
        replying(nodes[1].port, make_reply),
        contextlib.closing(make_node(nodes, 0, len(own), compression=codec)) as here,
    ):
        here.publish(own, Tag(1, 1))
        yield here


def test_only_plausible_ones_of_a_few_random_values_are_returned(
    subtests: pytest.Subtests,
) -> None:
    for codec in CODECS:
        own, make_reply = torch.randn(10), random_bytes(random.Random(1), codec.num_bytes(10))
        with subtests.test(str(codec)), reading(codec, own, make_reply) as here:
            assert 0 <= fetch_often(here, own) < 300


def test_changed_bytes_are_rejected_or_plausible(
    subtests: pytest.Subtests,
) -> None:
    for codec in CODECS:
        own = torch.randn(1000)
        wire = bytes(codec.encode(own).tolist())
        make_reply = changed_bytes(random.Random(2), wire, codec.row_bytes)
        with subtests.test(str(codec)), reading(codec, own, make_reply) as here:
            assert 0 < fetch_often(here, own) < 300


def test_implausible_scales_are_rejected(
    subtests: pytest.Subtests,
) -> None:
    for scale in (math.nan, math.inf, -math.inf, 3e38, -3e38):
        own = torch.randn(1000)
        wire = Int8().encode(own)
        wire[260:264].view(torch.float32).fill_(scale)
        make_reply = reply_with_bytes(lambda wire=wire: bytes(wire.tolist()))
        with subtests.test(scale=scale), reading(Int8(), own, make_reply) as here:
            assert fetch(here) is None
            found = here.statistics
            assert (found.not_finite, found.too_large) == (
                (0, 1) if math.isfinite(scale) else (1, 0)
            )
