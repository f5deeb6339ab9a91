"""The protocol: headers are parsed strictly, and any rows of the wire format can be decoded."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco.algorithms.pairwise_average import Tag
from lightning_loco.compression import CODECS, BFloat16, Codec, ErrorFeedback, Float16, Int8
from lightning_loco.gossip.protocol import (
    NOTHING_PUBLISHED,
    OTHER_MODEL,
    PARAMETERS,
    SINGLE_THREAD_ELEMENTS,
    ModelId,
    ReplyHeader,
    WireFormat,
    pack_reply,
    pack_request,
    parse_reply,
    parse_request,
    pull_codec,
)
from lightning_loco.transport import MAX_HEADER_BYTES, MalformedMessage

MODEL_ID = ModelId(2**64 - 1, 3)


def test_headers_are_packed_and_parsed() -> None:
    assert parse_request(pack_request(MODEL_ID)) == MODEL_ID
    for kind in (PARAMETERS, NOTHING_PUBLISHED, OTHER_MODEL):
        reply = ReplyHeader(kind, MODEL_ID, Tag(5.0, -0.25))
        header = pack_reply(reply)
        assert parse_reply(header) == reply
        assert len(header) < MAX_HEADER_BYTES


def test_other_headers_are_refused(subtests: pytest.Subtests) -> None:
    draw = random.Random(0)
    request, reply = pack_request(MODEL_ID), pack_reply(ReplyHeader(PARAMETERS, MODEL_ID))
    for parse, header in ((parse_request, request), (parse_reply, reply)):
        for wrong in (
            b"",
            header[:-1],
            header + b"\0",
            b"X" + header[1:],
            reply if header is request else request,
            *(draw.randbytes(len(header)) for _ in range(100)),
        ):
            with (
                subtests.test(parse=parse.__name__, header=wrong[:8]),
                pytest.raises(MalformedMessage),
            ):
                parse(wrong)


# -------------------------------------------------------------------------- wire format

PULL_CODECS = [BFloat16(), Float16(), Int8(), Int8(block=12), Int8(block=40_000)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_are_not_copied_without_a_codec(dtype: torch.dtype) -> None:
    wire_format = WireFormat(1, 100, dtype)
    flat = torch.randn(100, dtype=dtype)
    wire, out = flat.view(torch.uint8), torch.empty(10, dtype=dtype)
    assert (wire_format.block, wire_format.row_bytes, wire_format.total_bytes) == (
        1,
        dtype.itemsize,
        flat.nbytes,
    )
    assert wire_format.elements(8 * dtype.itemsize, 2 * dtype.itemsize) == slice(8, 10)
    values = wire_format.decode(wire, 7, out)
    assert torch.equal(values, flat[7:17])
    assert values.data_ptr() == flat[7:].data_ptr()


def test_any_rows_are_decoded_as_by_the_codec(subtests: pytest.Subtests) -> None:
    for codec, numel in itertools.product(PULL_CODECS, (1, 64, 1001, 100_001)):
        with subtests.test(codec=codec, numel=numel):
            wire_format = WireFormat(1, numel, torch.float32, codec)
            flat = torch.randn(numel)
            wire = codec.encode(flat)
            assert len(wire) == wire_format.total_bytes
            expected = codec.decode(wire, torch.empty(numel))
            num_rows = wire_format.total_bytes // wire_format.row_bytes
            for first in {0, 1, num_rows // 2, num_rows - 1} & set(range(num_rows)):
                for count in {1, 2, num_rows - first} & set(range(1, num_rows - first + 1)):
                    part = wire_format.elements(
                        first * wire_format.row_bytes, count * wire_format.row_bytes
                    )
                    assert part.start == first * codec.block
                    out = torch.empty(part.stop - part.start)
                    assert wire_format.decode(wire, part.start, out) is out
                    assert torch.equal(out, expected[part])
            assert wire_format.elements(0, wire_format.total_bytes) == slice(0, numel)


@dataclasses.dataclass(frozen=True)
class Halves(Codec):
    """A codec that records how many values it decodes at once."""

    largest: Any = dataclasses.field(default_factory=list, compare=False, repr=False)
    block: int = 2
    row_bytes: int = 2

    def encode_blocks(self, values: Tensor, rows: Tensor) -> None:
        rows.copy_(values * 2)

    def decode_blocks(self, rows: Tensor, values: Tensor) -> None:
        self.largest.append(values.numel())
        values.copy_(rows).div_(2)


def test_one_thread_decodes_the_values() -> None:
    codec = Halves()
    assert pull_codec(codec) is codec
    wire_format = WireFormat(1, 100_001, torch.float32, codec)
    flat = torch.arange(100_001) % 100 / 2
    out = torch.empty(100_001)
    assert torch.equal(wire_format.decode(codec.encode(flat), 0, out), flat)
    assert max(codec.largest) == SINGLE_THREAD_ELEMENTS < 32_768
    assert sum(codec.largest) == 100_002


def test_each_encoding_has_its_own_checksum() -> None:
    formats = [WireFormat(1, 10, dtype) for dtype in (torch.float32, torch.float64)]
    formats += [WireFormat(1, 10, torch.float32, codec) for codec in PULL_CODECS]
    checksums = [each.model_id.encoding_checksum for each in formats]
    assert len(set(checksums)) == len(formats)
    assert checksums == [each.model_id.encoding_checksum for each in formats]
    assert all(0 <= checksum < 2**64 for checksum in checksums)
    same_codec = WireFormat(9, 7, torch.float32, Int8())
    assert same_codec.model_id.encoding_checksum == checksums[4]


@pytest.mark.parametrize("given", [None, "none"])
def test_no_compression_is_no_codec(given: str | None) -> None:
    assert pull_codec(given) is None


def test_rough_codecs_are_refused(subtests: pytest.Subtests) -> None:
    for name, make in CODECS.items():
        with subtests.test(name):
            codec = make()
            if codec.is_rough:
                with pytest.raises(ValueError, match='too roughly for gossip.*compression="int8"'):
                    pull_codec(name)
            else:
                assert pull_codec(name) == pull_codec(codec) == codec


def test_unknown_compression_and_error_feedback_are_refused(subtests: pytest.Subtests) -> None:
    for given, error, text in (
        ("bfloat16", ValueError, "one of none, bf16, fp16, int8, .* got 'bfloat16'"),
        (torch.bfloat16, TypeError, "a codec such as Int8.*got torch.bfloat16"),
        (ErrorFeedback(Int8()), ValueError, "does not track who has read what.*codec alone"),
    ):
        with subtests.test(given=given), pytest.raises(error, match=text):
            pull_codec(given)
