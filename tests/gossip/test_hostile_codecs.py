"""Peers that send anything as encoded parameters: nothing is handed over that is no model."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator

import pytest
import torch

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.compression import BFloat16, Codec, Float16, Int8
from lightning_loco.gossip import PeerNode
from lightning_loco.gossip.protocol import PARAMETERS, Answer, Content, pack_answer
from tests.gossip.helpers import TAG, Answering, answering, fetch, make_node, peers

pytestmark = pytest.mark.recovery

CODECS = [BFloat16(), Float16(), Int8(), Int8(block=12)]


def assert_plausible(node: PeerNode, own: torch.Tensor) -> bool:
    """Whether a fetch brings anything; if so, it is finite and near enough."""
    received = fetch(node)
    if received is None:
        return False
    assert torch.isfinite(received.params).all()
    longest = 10 * max(float(own.norm()), math.sqrt(len(own)))
    assert float((received.params.double() - own).norm()) <= 1.001 * longest
    return True


def fetch_often(node: PeerNode, own: torch.Tensor) -> int:
    """How many of 300 fetches bring something; the others are refused for their values alone."""
    num_plausible = sum(assert_plausible(node, own) for _ in range(300))
    found = node.statistics
    assert num_plausible == found.fetches
    assert found.not_finite + found.too_far == 300 - num_plausible
    assert (found.malformed, found.errors, found.timeouts) == (0, 0, 0)
    return num_plausible


def bytes_as_parameters(make: Callable[[], bytes]) -> Answering:
    """Answers that hold any bytes."""

    def answer(asked: Content) -> tuple[bytes, bytes]:
        return pack_answer(Answer(PARAMETERS, asked, TAG)), make()

    return answer


@pytest.mark.parametrize("codec", [BFloat16(), Int8()], ids=str)
def test_megabytes_of_random_bytes_are_not_handed_over(codec: Codec) -> None:
    numel, num_fetches = 100_000, 30
    answer = random_bytes(random.Random(0), codec.num_bytes(numel))
    with reading(codec, torch.randn(numel), answer) as here:
        for _ in range(num_fetches):
            assert fetch(here) is None
        found = here.statistics
        assert found.not_finite + found.too_far == num_fetches
        assert (found.malformed, found.errors, found.fetches, found.timeouts) == (0, 0, 0, 0)


def random_bytes(draw: random.Random, total_bytes: int) -> Answering:
    return bytes_as_parameters(lambda: draw.randbytes(total_bytes))


def changed_bytes(draw: random.Random, wire: bytes, row_bytes: int) -> Answering:
    """A few bytes of what is right are others; in every other answer those of scales."""
    scales = range(0, len(wire), row_bytes)
    changes = 0

    def change() -> bytes:
        nonlocal changes
        changes += 1
        changed = bytearray(wire)
        for _ in range(draw.randrange(1, 10)):
            place = draw.choice(scales) + draw.randrange(4) if changes % 2 else None
            changed[draw.randrange(len(wire)) if place is None else place] = draw.randrange(256)
        return bytes(changed)

    return bytes_as_parameters(change)


@contextlib.contextmanager
def reading(codec: Codec, own: torch.Tensor, answer: Answering) -> Iterator[PeerNode]:
    """A node with parameters of its own, whose only peer answers like this."""
    nodes = peers(2)
    with (
        answering(nodes[1].port, answer),
        contextlib.closing(make_node(nodes, 0, len(own), compression=codec)) as here,
    ):
        here.publish(own, Tag(1, 1))
        yield here


def test_of_a_few_random_values_only_plausible_ones_are_handed_over(
    subtests: pytest.Subtests,
) -> None:
    for codec in CODECS:
        own, answer = torch.randn(10), random_bytes(random.Random(1), codec.num_bytes(10))
        with subtests.test(str(codec)), reading(codec, own, answer) as here:
            assert 0 <= fetch_often(here, own) < 300


def test_parameters_with_changed_bytes_are_finite_and_near_or_not_handed_over(
    subtests: pytest.Subtests,
) -> None:
    for codec in CODECS:
        own = torch.randn(1000)
        wire = bytes(codec.encode(own).tolist())
        answer = changed_bytes(random.Random(2), wire, codec.row_bytes)
        with subtests.test(str(codec)), reading(codec, own, answer) as here:
            assert 0 < fetch_often(here, own) < 300


def test_a_scale_that_no_model_has_makes_a_model_that_is_not_taken(
    subtests: pytest.Subtests,
) -> None:
    for scale in (math.nan, math.inf, -math.inf, 3e38, -3e38):
        own = torch.randn(1000)
        wire = Int8().encode(own)
        wire[260:264].view(torch.float32).fill_(scale)
        answer = bytes_as_parameters(lambda wire=wire: bytes(wire.tolist()))
        with subtests.test(scale=scale), reading(Int8(), own, answer) as here:
            assert fetch(here) is None
            found = here.statistics
            assert (found.not_finite, found.too_far) == ((0, 1) if math.isfinite(scale) else (1, 0))
