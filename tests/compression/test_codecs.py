"""Codecs: decoded values are within the documented error bounds, block by block."""

from __future__ import annotations

import itertools
import pickle

import pytest
import torch
from torch import Tensor

from lightning_loco.compression import CODECS, E3M0, BFloat16, Codec, Float16, Int4, Int8, Sparse
from lightning_loco.compression.sums import (
    add_up,
    add_written,
    average_senders,
    shards,
    subtract_written,
)

SMALL = [BFloat16(), Float16(), Int8(8), Int4(8), E3M0(8), Sparse(4, 16)]
LENGTHS = [1, 3, 8, 15, 16, 17, 64, 100, 4096, 5000]


def randn(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator, dtype=dtype)


def read(codec: Codec, values: Tensor) -> Tensor:
    return codec.decode(codec.encode(values), torch.full_like(values, torch.nan))


def scales(values: Tensor, block: int) -> Tensor:
    """Return the largest magnitude in the block of each value."""
    padded = torch.zeros(-(-len(values) // block) * block, dtype=values.dtype)
    padded[: len(values)] = values
    largest = padded.view(-1, block).abs().amax(1, keepdim=True)
    return largest.expand(-1, block).reshape(-1)[: len(values)]


def check_errors(codec: Codec, found: Tensor, values: Tensor) -> None:
    """Assert that decoded values are within the error bounds in the codec's docstring."""
    error, size = (found - values).abs(), values.abs()
    largest = scales(values, codec.block)
    slack = 1 + 1e-5
    if isinstance(codec, BFloat16):
        assert (error <= size * 2**-8 * slack).all()
    elif isinstance(codec, Float16):
        assert (error <= size * 2**-11 * slack + 2**-25).all()
    elif isinstance(codec, Int8):
        assert (error <= largest / 254 * slack).all()
    elif isinstance(codec, Int4):
        assert (error <= largest / 14 * slack).all()
    elif isinstance(codec, E3M0):
        is_seen = size >= 0.75 * 2**-6 * largest
        assert (error[is_seen] <= size[is_seen] / 3 * slack).all()
        assert (found[~is_seen].abs() <= 2**-6 * largest[~is_seen]).all()
    else:
        assert (error <= largest * slack).all()


@pytest.mark.parametrize("codec", [*SMALL, Int8(), Int4(), E3M0(), Sparse()], ids=str)
def test_errors_are_within_the_documented_bounds(codec: Codec, subtests: pytest.Subtests) -> None:
    for numel, dtype in itertools.product(LENGTHS, [torch.float32, torch.float64]):
        with subtests.test(numel=numel, dtype=dtype):
            values = randn(numel, numel, dtype) * torch.logspace(-2, 2, numel, dtype=dtype)
            before = values.clone()
            wire = codec.encode(values)
            assert torch.equal(values, before)
            assert wire.dtype == torch.uint8
            assert len(wire) == codec.num_bytes(numel)
            found = codec.decode(wire, torch.full_like(values, torch.nan))
            check_errors(codec, found, values)


def test_a_message_can_be_split_between_blocks_without_changing_bytes(
    subtests: pytest.Subtests,
) -> None:
    values = randn(100)
    for codec in SMALL:
        with subtests.test(str(codec)):
            wire = codec.encode(values)
            cut = 3 * codec.block if codec.block * 3 < 100 else codec.block
            row = cut // codec.block * codec.row_bytes
            assert torch.equal(codec.encode(values[:cut]), wire[:row])
            assert torch.equal(codec.encode(values[cut:]), wire[row:])
            whole = codec.decode(wire, torch.empty(100))
            assert torch.equal(codec.decode(wire[row:], torch.empty(100 - cut)), whole[cut:])


def test_zeros_are_exact_and_encoding_decoded_values_changes_nothing(
    subtests: pytest.Subtests,
) -> None:
    for codec in SMALL:
        with subtests.test(str(codec)):
            assert torch.equal(read(codec, torch.zeros(40)), torch.zeros(40))
            once = read(codec, randn(40))
            torch.testing.assert_close(read(codec, once), once, rtol=1e-6, atol=0)


def test_a_value_that_is_not_finite_affects_its_own_block_only(
    subtests: pytest.Subtests,
) -> None:
    for codec, bad in itertools.product(SMALL, [torch.nan, torch.inf, -torch.inf]):
        with subtests.test(str(codec), bad=bad):
            values = randn(200)
            values[70] = bad
            begin = 70 // codec.block * codec.block
            block = slice(begin, begin + codec.block)
            found = read(codec, values)
            assert not torch.isfinite(found[block]).all()
            found[block] = 0
            values[block] = 0
            assert torch.equal(found, read(codec, values))


def test_tiny_and_huge_values_remain_finite(subtests: pytest.Subtests) -> None:
    for codec in SMALL:
        with subtests.test(str(codec)):
            for size in (1e-45, 1e-38, 1e-20, 1e30, 3e38):
                found = read(codec, randn(64).clamp(-1, 1) * size)
                assert torch.isfinite(found).all()


def test_any_bytes_can_be_decoded(subtests: pytest.Subtests) -> None:
    for codec in SMALL:
        with subtests.test(str(codec)):
            generator = torch.Generator().manual_seed(1)
            for numel in LENGTHS:
                size = (codec.num_bytes(numel),)
                for _ in range(20):
                    wire = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
                    assert codec.decode(wire, torch.empty(numel)).shape == (numel,)


@pytest.mark.parametrize(("name", "at_most"), [("int8", 0.27), ("int4", 0.145), ("e3m0", 0.145)])
def test_size_relative_to_float32(name: str, at_most: float) -> None:
    assert CODECS[name]().num_bytes(5_000_000) / 20_000_000 <= at_most


def test_two_sparse_messages_are_a_fiftieth_of_float32() -> None:
    assert Sparse().num_bytes(5_000_000) / 20_000_000 <= 0.02


def test_sparse_keeps_the_largest_values() -> None:
    values = randn(4096)
    found = read(Sparse(64), values)
    kept = found != 0
    assert kept.sum() == 64
    assert values[kept].abs().min() >= values[~kept].abs().max()
    assert torch.equal(found[kept].sign(), values[kept].sign())
    upper = values[kept].abs() > values[kept].abs().mean()
    for level in (upper, ~upper):
        mean = values[kept][level].abs().mean()
        torch.testing.assert_close(found[kept][level].abs(), mean.expand(int(level.sum())))


def test_shards_cover_every_element_once(subtests: pytest.Subtests) -> None:
    for codec, num_workers in itertools.product(SMALL, range(1, 6)):
        with subtests.test(str(codec), num_workers=num_workers):
            for numel in range(1, 70):
                parts = shards(codec, numel, num_workers)
                values = [i for part in parts for i in range(numel)[part.values]]
                assert values == list(range(numel))
                size = codec.num_bytes(numel)
                assert [i for part in parts for i in range(size)[part.wire]] == list(range(size))
                for part in parts:
                    length = len(range(numel)[part.values])
                    assert codec.num_bytes(length) == len(range(size)[part.wire])


def test_sums_are_sums_of_decoded_values(subtests: pytest.Subtests) -> None:
    messages = [randn(5000, seed) for seed in range(3)]
    for codec in SMALL:
        with subtests.test(str(codec)):
            expected = read(codec, messages[0])
            for message in messages[1:]:
                expected = expected + read(codec, message)
            wires = [codec.encode(message) for message in messages]
            assert torch.equal(add_up(codec, wires, torch.empty(5000), (1, 1, 1)), expected)
            total = read(codec, messages[0])
            for wire in wires[1:]:
                add_written(codec, wire, total)
            assert torch.equal(total, expected)
            lost = messages[0].clone()
            subtract_written(codec, wires[0], lost)
            assert torch.equal(lost, messages[0] - read(codec, messages[0]))


def test_a_value_is_averaged_over_the_workers_that_have_sent_it() -> None:
    codec = Sparse(16, 64, mean_over="senders")
    messages = [randn(5000, seed) for seed in range(3)]
    messages.append(torch.zeros(5000))
    wires = [codec.encode(one) for one in messages]
    mean = average_senders(codec, wires, torch.empty(5000), (1, 1, 1, 1))
    sent = torch.stack([read(codec, one) for one in messages])
    counts = (sent != 0).sum(0)
    assert set(counts.tolist()) == {0, 1, 2, 3}
    for index, count in enumerate(counts.tolist()):
        expected = sent[:, index].sum() / count if count else torch.tensor(0.0)
        torch.testing.assert_close(mean[index], expected)


def test_codecs_can_be_pickled_and_hashed(subtests: pytest.Subtests) -> None:
    for codec in SMALL:
        with subtests.test(str(codec)):
            assert pickle.loads(pickle.dumps(codec)) == codec
            assert hash(codec) == hash(pickle.loads(pickle.dumps(codec)))


def test_invalid_settings_are_refused(subtests: pytest.Subtests) -> None:
    for make, error, words in (
        (lambda: Int8(0), ValueError, "positive multiple of 4, got 0"),
        (lambda: Int8(6), ValueError, "positive multiple of 4, got 6"),
        (lambda: Int4(4), ValueError, "positive multiple of 8, got 4"),
        (lambda: E3M0(8.0), TypeError, "must be an integer, got 8.0"),
        (lambda: Sparse(0), ValueError, "between 4 and 4096, got 0"),
        (lambda: Sparse(6), ValueError, "multiple of 4 between 4 and 4096, got 6"),
        (lambda: Sparse(64, 32), ValueError, "between 4 and 32, got 64"),
        (lambda: Sparse(64, 8192), ValueError, "at most 4096, got 8192"),
        (lambda: Sparse(True), TypeError, "k counts values"),
        (lambda: Sparse(mean_over="all"), ValueError, "'workers' or 'senders', got 'all'"),
    ):
        with subtests.test(words), pytest.raises(error, match=words):
            make()
