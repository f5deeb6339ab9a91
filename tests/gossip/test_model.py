"""What travels: rows of bytes, and the values that are read from any of them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco.compression import CODECS, BFloat16, Codec, ErrorFeedback, Float16, Int8
from lightning_loco.gossip.model import SERIAL_ELEMENTS, Model, codec_of_peers

CODECS_OF_PEERS = [BFloat16(), Float16(), Int8(), Int8(block=12), Int8(block=40_000)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_a_codec_values_are_read_where_they_are(dtype: torch.dtype) -> None:
    model = Model(1, 100, dtype)
    flat = torch.randn(100, dtype=dtype)
    wire, room = flat.view(torch.uint8), torch.empty(10, dtype=dtype)
    assert (model.block, model.row_bytes, model.total_bytes) == (1, dtype.itemsize, flat.nbytes)
    assert model.elements(8 * dtype.itemsize, 2 * dtype.itemsize) == slice(8, 10)
    values = model.read(wire, 7, room)
    assert torch.equal(values, flat[7:17])
    assert values.data_ptr() == flat[7:].data_ptr()


def test_any_rows_are_read_as_the_codec_reads_them_all(subtests: pytest.Subtests) -> None:
    for codec, numel in itertools.product(CODECS_OF_PEERS, (1, 64, 1001, 100_001)):
        with subtests.test(codec=codec, numel=numel):
            model = Model(1, numel, torch.float32, codec)
            flat = torch.randn(numel)
            wire = codec.encode(flat)
            assert len(wire) == model.total_bytes
            expected = codec.decode(wire, torch.empty(numel))
            num_rows = model.total_bytes // model.row_bytes
            for first in {0, 1, num_rows // 2, num_rows - 1} & set(range(num_rows)):
                for count in {1, 2, num_rows - first} & set(range(1, num_rows - first + 1)):
                    part = model.elements(first * model.row_bytes, count * model.row_bytes)
                    assert part.start == first * codec.block
                    room = torch.empty(part.stop - part.start)
                    assert model.read(wire, part.start, room) is room
                    assert torch.equal(room, expected[part])
            assert model.elements(0, model.total_bytes) == slice(0, numel)


@dataclasses.dataclass(frozen=True)
class Halves(Codec):
    """A codec of one's own, which says how many values it is given at once."""

    largest: Any = dataclasses.field(default_factory=list, compare=False, repr=False)
    block: int = 2
    row_bytes: int = 2

    def encode_blocks(self, values: Tensor, rows: Tensor) -> None:
        rows.copy_(values * 2)

    def decode_blocks(self, rows: Tensor, values: Tensor) -> None:
        self.largest.append(values.numel())
        values.copy_(rows).div_(2)


def test_no_more_is_read_at_once_than_one_thread_does() -> None:
    codec = Halves()
    assert codec_of_peers(codec) is codec
    model = Model(1, 100_001, torch.float32, codec)
    flat = torch.arange(100_001) % 100 / 2
    room = torch.empty(100_001)
    assert torch.equal(model.read(codec.encode(flat), 0, room), flat)
    assert max(codec.largest) == model.piece == SERIAL_ELEMENTS < 32_768
    assert sum(codec.largest) == 100_002


def test_a_piece_is_whole_blocks(subtests: pytest.Subtests) -> None:
    for block in (4, 256, 260, SERIAL_ELEMENTS, 100_000):
        with subtests.test(block=block):
            piece = Model(1, 10, torch.float32, Int8(block)).piece
            assert piece % block == 0
            assert piece == block or SERIAL_ELEMENTS - block < piece <= SERIAL_ELEMENTS


def test_what_is_written_otherwise_has_another_format() -> None:
    models = [Model(1, 10, dtype) for dtype in (torch.float32, torch.float64)]
    models += [Model(1, 10, torch.float32, codec) for codec in CODECS_OF_PEERS]
    formats = [model.wire_format for model in models]
    assert len(set(formats)) == len(models)
    assert formats == [model.wire_format for model in models]
    assert all(0 <= each < 2**64 for each in formats)
    assert Model(9, 7, torch.float32, Int8()).wire_format == formats[4]


@pytest.mark.parametrize("given", [None, "none"])
def test_nothing_is_no_codec(given: str | None) -> None:
    assert codec_of_peers(given) is None


def test_a_codec_is_taken_unless_it_is_rough(subtests: pytest.Subtests) -> None:
    for name, make in CODECS.items():
        with subtests.test(name):
            codec = make()
            if codec.is_rough:
                with pytest.raises(ValueError, match='too roughly for gossip.*compression="int8"'):
                    codec_of_peers(name)
            else:
                assert codec_of_peers(name) == codec_of_peers(codec) == codec


def test_what_peers_cannot_use_is_refused(subtests: pytest.Subtests) -> None:
    for given, error, text in (
        ("bfloat16", ValueError, "one of none, bf16, fp16, int8, .* got 'bfloat16'"),
        (torch.bfloat16, TypeError, "a codec such as Int8.*got torch.bfloat16"),
        (ErrorFeedback(Int8()), ValueError, "nobody knows which peer.*codec alone"),
    ):
        with subtests.test(given=given), pytest.raises(error, match=text):
            codec_of_peers(given)
