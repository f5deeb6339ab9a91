"""Flat vectors: every element is packed once, for any sizes, dtypes and strides."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from lightning_loco.model.flat import (
    Chunk,
    CrossDevicePacking,
    Cuts,
    FlatLayout,
    Packing,
    are_finite,
    cut_tensors,
)
from tests.harness.gpu import DEVICE, copies_to_the_host

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def numbered(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return tensors that hold 1, 2, 3, ... over all of them."""
    tensors = []
    first = 1
    for shape in shapes:
        tensor = torch.zeros(shape, dtype=dtype)
        tensor.copy_(torch.arange(first, first + tensor.numel()).view(shape))
        tensors.append(tensor)
        first += tensor.numel()
    return tensors


def layout_of(tensors: list[Tensor], chunk_elements: int | None = None) -> FlatLayout:
    return FlatLayout(((f"t{i}", t) for i, t in enumerate(tensors)), Cuts(chunk_elements))


def check(tensors: list[Tensor], chunk_elements: int | None = None) -> FlatLayout:
    """Check the properties of a layout of tensors that hold 1, 2, 3, ... each number once."""
    layout = layout_of(tensors, chunk_elements)
    total = sum(tensor.numel() for tensor in tensors)
    assert layout.numel == total
    chunks = layout.chunks()
    # The chunks follow each other without gap or overlap, and none is empty.
    edges = [0, *itertools.accumulate(len(chunk) for chunk in chunks)]
    assert [(chunk.start, chunk.stop) for chunk in chunks] == list(itertools.pairwise(edges))
    assert edges[-1] == total
    assert all(len(chunk) > 0 for chunk in chunks)
    # Every element is packed exactly once.
    before = [tensor.clone() for tensor in tensors]
    flat = layout.new_flat()
    assert flat.shape == (total,)
    assert sorted(flat.tolist()) == list(range(1, total + 1))
    # Packing by chunks equals packing as a whole.
    parts = [torch.full((len(chunk),), -1.0, dtype=layout.dtype) for chunk in chunks]
    for chunk, part in zip(chunks, parts, strict=True):
        chunk.pack(part)
    assert torch.equal(torch.cat([*parts, flat[:0]]), flat)
    # Unpacking is the inverse, and writes every element exactly once.
    layout.write(torch.zeros_like(flat))
    assert all(not tensor.any() for tensor in tensors)
    layout.write(flat)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    for chunk, part in zip(chunks, parts, strict=True):
        chunk.unpack(-part)
    assert torch.equal(layout.new_flat(), -flat)
    layout.write(flat)
    return layout


def test_all_small_sizes_and_chunk_sizes(subtests: pytest.Subtests) -> None:
    """One to three tensors of up to 4 elements, including empty ones and scalars."""
    shapes = ((), (0,), (1,), (2,), (3,), (4,), (2, 2), (0, 3))
    choices = [row for count in (1, 2, 3) for row in itertools.product(shapes, repeat=count)]
    for chunk_elements in (None, 1, 2, 3, 5, 100):
        with subtests.test(chunk_elements=chunk_elements):
            for chosen in choices:
                layout = check(numbered(*chosen), chunk_elements)
                if chunk_elements is not None:
                    sizes = [len(chunk) for chunk in layout.chunks()]
                    assert all(size == chunk_elements for size in sizes[:-1])
                    assert all(size <= chunk_elements for size in sizes)


def test_empty_tensors_have_no_chunk(subtests: pytest.Subtests) -> None:
    """A chunk is a message, so an empty one would be sent for nothing."""
    for shape in ((0,), (0, 3), (3, 0), (2, 0, 3)):
        with subtests.test(shape=shape):
            check([torch.zeros(shape)])
            check([*numbered((2,)), torch.zeros(shape)])
            first, second = numbered((2,), (3,))
            layout = check([first, torch.zeros(shape), second])
            assert len(layout.chunks()) == 1


def test_memory_formats(subtests: pytest.Subtests) -> None:
    """Elements of dense tensors are in memory order, not in index order."""
    for chunk_elements in (None, 1, 5, 7, 1000):
        with subtests.test(chunk_elements=chunk_elements):
            whole = torch.arange(1.0, 1 + 2 * 3 * 4 * 5).view(2, 4, 5, 3)
            channels_last = whole.permute(0, 3, 1, 2)
            assert channels_last.is_contiguous(memory_format=torch.channels_last)
            layout = check([channels_last], chunk_elements)
            assert torch.equal(layout.new_flat(), whole.reshape(-1))

            transposed = torch.arange(1.0, 13.0).view(3, 4).T
            layout = check([transposed], chunk_elements)
            assert torch.equal(layout.new_flat(), torch.arange(1.0, 13.0))

            part_of_a_storage = torch.arange(-4.0, 20.0)[5:17].view(3, 4)
            check([part_of_a_storage], chunk_elements)


def test_tensors_with_gaps_in_memory(subtests: pytest.Subtests) -> None:
    """A column, every third element and a corner of a matrix, between dense tensors."""
    for chunk_elements in (None, 1, 4, 1000):
        with subtests.test(chunk_elements=chunk_elements):
            first, last = torch.arange(1.0, 4.0), torch.arange(18.0, 21.0)
            matrix, line, corner = torch.zeros(4, 3), torch.zeros(12), torch.zeros(4, 4)
            gappy = [matrix[:, 1], line[::3], corner[:2, :3].T]
            values = iter(range(4, 18))
            for tensor in gappy:
                for index in itertools.product(*map(range, tensor.shape)):
                    tensor[index] = next(values)
            assert not list(values)
            layout = check([first, *gappy, last], chunk_elements)
            assert matrix[:, 0].count_nonzero() == matrix[:, 2].count_nonzero() == 0
            assert line.count_nonzero() == 4
            assert corner.count_nonzero() == 6
            longest = max(chunk_elements or layout.numel, 6)  # a tensor with gaps is not split
            assert max(len(chunk) for chunk in layout.chunks()) <= longest
            assert torch.equal(layout.new_flat()[3:7], matrix[:, 1])


def test_mixed_dtypes(subtests: pytest.Subtests) -> None:
    rows = itertools.product(itertools.permutations(DTYPES, 3), (None, 1, 4, 1000))
    for dtypes, chunk_elements in rows:
        with subtests.test(dtypes=dtypes, chunk_elements=chunk_elements):
            pairs = zip(numbered((3,), (2, 2), (5,)), dtypes, strict=True)
            tensors = [tensor.to(dtype) for tensor, dtype in pairs]
            layout = check(tensors, chunk_elements)
            assert layout.dtype == (torch.float64 if torch.float64 in dtypes else torch.float32)
            assert [tensor.dtype for tensor in tensors] == list(dtypes)


def test_packing_changes_no_value_of_any_dtype(subtests: pytest.Subtests) -> None:
    """float32 holds every bfloat16 and float16; float64 is not narrowed."""
    for dtype in DTYPES:
        with subtests.test(dtype=dtype):
            if dtype in (torch.bfloat16, torch.float16):
                values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
                values = values[~values.isnan()]
            else:
                values = torch.randn(1000, dtype=dtype)
            before = values.clone()
            layout = layout_of([values])
            flat = layout.new_flat()
            assert torch.equal(flat.to(torch.float64), before.to(torch.float64))
            layout.write(flat)
            assert torch.equal(values, before)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_appear_once_and_stay_tied() -> None:
    model = Tied()
    layout = FlatLayout(model.named_parameters())
    assert layout.names == ["embed.weight", "norm.weight", "norm.bias"]
    assert layout.numel == 5 * 3 + 3 + 3
    layout.write(torch.arange(21.0))
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight.detach(), torch.arange(15.0).view(5, 3))


def test_new_memory_of_a_parameter_is_detected(subtests: pytest.Subtests) -> None:
    """Some wrappers and `model.to` move a parameter to new memory."""
    for chunk_elements in (None, 2):
        with subtests.test(chunk_elements=chunk_elements):
            model = nn.Linear(2, 2)
            layout = FlatLayout(model.named_parameters(), Cuts(chunk_elements))
            layout.new_flat()
            old = model.weight.data
            model.weight.data = torch.full((2, 2), 7.0)
            assert torch.equal(layout.new_flat()[:4], torch.full((4,), 7.0))
            before = old.clone()
            layout.write(torch.arange(6.0))
            assert torch.equal(model.weight.detach().reshape(-1), torch.arange(4.0))
            assert torch.equal(old, before)
            model.to(torch.bfloat16)
            layout.write(torch.arange(1.0, 7.0))
            assert model.weight.dtype == torch.bfloat16
            assert torch.equal(layout.new_flat(), torch.arange(1.0, 7.0))


def test_chunks_are_kept_while_the_memory_is_the_same() -> None:
    layout = layout_of(numbered((4,), (4,)), 3)
    assert layout.chunks() is layout.chunks()


def test_subsample_takes_every_stride_th_element(subtests: pytest.Subtests) -> None:
    for chunk_elements in (None, 1, 4):
        with subtests.test(chunk_elements=chunk_elements):
            gappy = torch.zeros(3, 2)[:, 0]
            gappy.copy_(torch.tensor([8.0, 9.0, 10.0]))
            last = torch.tensor(11.0), torch.arange(12.0, 14.0).half()
            tensors = [*numbered((2, 2), (3,)), gappy, *last]
            layout = layout_of(tensors, chunk_elements)
            flat = layout.new_flat()
            assert flat.tolist() == list(range(1, 14))
            for stride in range(1, 16):
                picked = [layout.subsample(stride, offset) for offset in range(stride)]
                for offset, part in enumerate(picked):
                    assert torch.equal(part, flat[offset::stride])
                    assert part.dtype == layout.dtype
                assert sum(part.numel() for part in picked) == 13


def test_subsample_returns_a_copy() -> None:
    (tensor,) = numbered((6,))
    layout_of([tensor]).subsample(1, 0).zero_()
    assert tensor.tolist() == [1, 2, 3, 4, 5, 6]


def test_a_single_nonfinite_element_is_detected(subtests: pytest.Subtests) -> None:
    for dtype, bad in itertools.product(DTYPES, (math.nan, math.inf, -math.inf)):
        with subtests.test(dtype=dtype, bad=bad):
            tensors = numbered((3, 2), (), (4,), dtype=dtype)
            layout = layout_of(tensors)
            assert are_finite(layout.chunks())
            for tensor in tensors:
                for index in itertools.product(*map(range, tensor.shape)):
                    good = tensor[index].clone()
                    tensor[index] = bad
                    assert not are_finite(layout.chunks())
                    tensor[index] = good
            assert are_finite(layout.chunks())


def test_large_numbers_whose_sum_overflows_are_finite(subtests: pytest.Subtests) -> None:
    for dtype in DTYPES:
        with subtests.test(dtype=dtype):
            tensor = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
            assert are_finite(layout_of([tensor]).chunks())
            tensor[::2] *= -1
            assert are_finite(layout_of([tensor]).chunks())


def test_infinities_that_cancel_are_not_finite() -> None:
    assert not are_finite(layout_of([torch.tensor([float("inf"), 1.0, -float("inf")])]).chunks())


def test_an_empty_layout_is_finite() -> None:
    assert are_finite(layout_of([]).chunks())
    assert layout_of([]).new_flat().shape == (0,)


def test_dtypes_that_are_not_real_floating_point_are_an_error(subtests: pytest.Subtests) -> None:
    for dtype in (torch.complex64, torch.complex128, torch.int64, torch.bool):
        text = f"'phase' has dtype {dtype}; only real floating-point"
        with subtests.test(dtype=dtype), pytest.raises(TypeError, match=text):
            FlatLayout([("fine", torch.zeros(2)), ("phase", torch.zeros(2, dtype=dtype))])


def test_schemas_with_other_shapes_dtypes_or_strides_differ() -> None:
    tensors = {
        "plain": torch.zeros(2, 3),
        "shape": torch.zeros(3, 2),
        "dtype": torch.zeros(2, 3, dtype=torch.bfloat16),
        "strides": torch.zeros(3, 2).T,
    }
    schemas = [FlatLayout([("weight", tensor)]).schema() for tensor in tensors.values()]
    assert schemas[0] == [("weight", (2, 3), "torch.float32", (3, 1))]
    assert all(a != b for a, b in itertools.combinations(schemas, 2))


def test_a_packing_pairs_all_views() -> None:
    views = [torch.ones(2), torch.ones(3).bfloat16(), torch.ones(4)]
    for chunk in (Chunk(0, views), Chunk(0, views[::2])):
        numbers = torch.arange(float(len(chunk)))
        pairs = list(chunk.same_device_packing(numbers).pairs())
        assert sorted(len(view) for view, _ in pairs) == sorted(map(len, chunk.views))
        assert all(len(view) == len(part) for view, part in pairs)
        assert sorted(torch.cat([part for _, part in pairs]).tolist()) == numbers.tolist()


def test_the_rounding_error_is_what_the_parameters_do_not_hold() -> None:
    """For a matrix and vectors, in bfloat16 and in the dtype of the flat vector."""
    views = [torch.zeros(2, 3).bfloat16(), torch.zeros(4), torch.zeros(5).bfloat16()]
    chunk, flat = Chunk(0, views), torch.linspace(-3, 7, 15) / 3
    chunk.unpack(flat)
    held = torch.empty(15)
    chunk.pack(held)
    error = chunk.rounding_error(flat)
    assert torch.equal(error, flat - held)
    assert error[:6].any()
    assert not error[6:10].any()


def test_packing_across_devices_gives_the_same_values() -> None:
    torch.manual_seed(0)
    views = [torch.randn(2, 3), torch.randn(5).bfloat16(), torch.randn(4).double()]
    chunk, same_device, other_device = Chunk(0, views), torch.empty(15), torch.empty(15)
    chunk.same_device_packing(same_device).pack()
    CrossDevicePacking(chunk, other_device).pack()
    assert torch.equal(other_device, same_device)
    CrossDevicePacking(chunk, same_device * 2).unpack()
    chunk.pack(other_device)
    assert torch.equal(other_device, same_device * 2)


def test_the_packing_depends_on_the_device_of_the_vector() -> None:
    chunk = Chunk(0, [torch.empty(2, 3, device=DEVICE)])
    assert isinstance(chunk.packing(torch.empty(6, device=DEVICE)), Packing)
    window = chunk.packing(torch.empty(6))
    assert isinstance(window, CrossDevicePacking)
    with copies_to_the_host():
        window.pack()
    window.unpack()


def test_a_layout_with_vectors_on_another_device() -> None:
    model = nn.Linear(30, 40).to(DEVICE)
    layout = FlatLayout(model.named_parameters(), Cuts(100), torch.device("cpu"))
    with copies_to_the_host():
        vector = layout.new_flat()
        assert vector.device.type == layout.new_flat_on_cpu().device.type == "cpu"
    layout.write(vector)
    layout.write(vector.to(DEVICE))
    assert layout.subsample(7, 3).device == DEVICE
    assert {p.device for p in model.parameters()} == {DEVICE}


@pytest.mark.gpu
def test_host_vectors_of_gpu_parameters_are_pinned() -> None:
    model = nn.Linear(30, 40).cuda()
    layout = FlatLayout(model.named_parameters(), Cuts(100), torch.device("cpu"))
    assert layout.empty(10).is_pinned()
    assert torch.equal(layout.new_flat(), FlatLayout(model.named_parameters()).new_flat().cpu())


SIZES = (5, 1, 12, 3, 7)


def named_tensors() -> list[tuple[str, torch.Tensor]]:
    parts = torch.arange(float(sum(SIZES))).split(SIZES)
    return [(str(number), part) for number, part in enumerate(parts)]


def test_every_element_is_in_one_slice(subtests: pytest.Subtests) -> None:
    rows = itertools.product((1, 3, 8, 100), (1, 2, 4), ((), (8,), (8, 20)))
    for longest, granularity, boundaries in rows:
        with subtests.test(longest=longest, granularity=granularity, boundaries=boundaries):
            found = list(cut_tensors(named_tensors(), longest, granularity, boundaries))
            starts = [start for start, _ in found]
            joined = [torch.cat(views) for _, views in found]
            assert torch.cat(joined).tolist() == list(range(sum(SIZES)))
            assert starts == [int(values[0]) for values in joined]
            assert all(start % granularity == 0 for start in starts)
            assert set(boundaries) <= set(starts)
            assert max(map(len, joined)) <= max(longest, granularity)


def test_a_tensor_with_gaps_stays_whole() -> None:
    gaps = torch.arange(12.0).view(4, 3)[:, :2]
    found = list(cut_tensors([("a", torch.zeros(3)), ("gaps", gaps)], longest=4))
    assert [(start, [view.shape for view in views]) for start, views in found] == [
        (0, [(3,)]),
        (3, [(4, 2)]),
    ]
    with pytest.raises(ValueError, match="'gaps' has gaps in memory and cannot be cut"):
        list(cut_tensors([("gaps", gaps)], longest=4, boundaries=(2,)))
