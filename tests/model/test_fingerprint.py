"""Checksums of tensors: equal for equal bits, and changed by any usual change."""

from __future__ import annotations

import itertools
import zlib

import pytest
import torch
from torch import Tensor

from lightning_loco.model import fingerprint
from lightning_loco.model.fingerprint import crc32, fingerprints, pieces

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


def test_one_changed_element_changes_the_fingerprint(subtests: pytest.Subtests) -> None:
    for dtype in DTYPES:
        with subtests.test(dtype=dtype):
            values = torch.arange(1000).remainder(2).to(dtype)
            (before,) = fingerprints([values])
            assert fingerprints([values.clone()]) == [before]
            values[17] = 0
            assert fingerprints([values]) != [before]


def test_crc32_is_that_of_the_values_in_order(
    monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    monkeypatch.setattr(fingerprint, "_PIECE_BYTES", 7)
    values = torch.tensor([[1.5 + 2j, 3.0], [5.0, -7j]])
    tensors = [strided(), torch.zeros(0), torch.tensor(True), values, values.conj(), values.imag]
    for tensor in tensors:
        with subtests.test(dtype=tensor.dtype, shape=tuple(tensor.shape)):
            expected = tensor.clone().resolve_conj().contiguous().numpy().tobytes()
            assert b"".join(pieces(tensor)) == expected
            assert crc32(tensor) == zlib.crc32(expected)
            assert crc32(tensor, start=5) == zlib.crc32(expected, 5)


def test_a_tensor_that_was_read_can_still_be_resized() -> None:
    buffer = torch.ones(3)
    crc32(buffer)
    fingerprints([buffer])
    assert buffer.resize_(5).shape == (5,)


def test_values_anywhere_in_memory(subtests: pytest.Subtests) -> None:
    """The memory, or the offset in it, may not be aligned to words of 8 bytes."""
    memory = bytearray(8 * 60)
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.arange(101).to(dtype)
        (expected,) = fingerprints([values])
        for skipped, offset in itertools.product((0, 4), range(8)):
            with subtests.test(dtype=dtype, skipped=skipped, offset=offset):
                found = torch.frombuffer(memory, dtype=dtype, offset=skipped)[offset:][:101]
                found.copy_(values)
                assert fingerprints([found]) == [expected]


def strided() -> Tensor:
    return torch.randn(4, 6).t()[::2]


def test_shapes_strides_and_empty_lists() -> None:
    scalar, gaps, empty = torch.tensor(2.0), strided(), torch.zeros(0)
    found = fingerprints([scalar, gaps, empty])
    assert found == fingerprints([scalar.clone(), gaps.contiguous(), empty])
    assert found[2] == 0
    assert fingerprints([]) == []


def test_changed_signs_and_writes_without_autograd_are_detected() -> None:
    weight = torch.nn.Parameter(torch.rand(100))
    (before,) = fingerprints([weight])
    weight.data.neg_()
    assert fingerprints([weight]) != [before]
    weight.data.neg_()
    assert fingerprints([weight]) == [before]


def test_changes_that_a_plain_sum_would_cancel_are_noticed(subtests: pytest.Subtests) -> None:
    values = torch.tensor([0.3, 0.7, -0.2, -0.4, 0.25, 0.5])
    up, down = torch.tensor([torch.inf, -torch.inf])
    last_bits = values.clone()
    last_bits[2], last_bits[5] = values[2].nextafter(up), values[5].nextafter(down)
    signs = values.clone()
    signs[[0, 2]] *= -1
    for name, changed in {"last bits": last_bits, "signs": signs}.items():
        for dtype in (torch.float32, torch.float64):
            with subtests.test(name, dtype=dtype):
                one, other = fingerprints([values.to(dtype), changed.to(dtype)])
                assert one != other


def test_pieces_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1001)
    whole = fingerprints([values])
    monkeypatch.setattr(fingerprint, "_WORDS_IN_CACHE", 7)
    assert fingerprints([values]) == whole
