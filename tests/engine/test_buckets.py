"""Chunks and buckets: exact copies, wherever the values are in memory."""

from __future__ import annotations

import torch

from lightning_loco.algorithms import DiLoCo
from lightning_loco.engine.buckets import Bucket, BucketChunk, group_chunks
from lightning_loco.model.flat import Cuts, FlatLayout


def layout_of(*sizes: int, chunk_elements: int | None = None) -> FlatLayout:
    tensors = [torch.randn(size) for size in sizes]
    return FlatLayout(((f"p{i}", t) for i, t in enumerate(tensors)), Cuts(chunk_elements))


def test_a_chunk_unpacks_values_from_the_bucket_from_the_state_and_from_anywhere() -> None:
    layout = layout_of(3, 2)
    (params,) = layout.chunks()
    algorithm = DiLoCo()
    state = algorithm.init(layout.new_flat())
    chunk = BucketChunk(params, torch.empty(5), state)
    elsewhere = torch.arange(5.0)
    for values in (chunk.message, chunk.state["outer"], elsewhere):
        values.copy_(torch.randn(5))
        chunk.unpack(values)
        assert torch.equal(torch.cat(layout.tensors), values)


def test_a_state_entry_that_is_replaced_is_not_confused_with_the_old_one() -> None:
    layout = layout_of(4)
    algorithm = DiLoCo()
    state = algorithm.init(layout.new_flat())
    chunk = BucketChunk(layout.chunks()[0], torch.empty(4), state)
    for value in range(50):  # new tensors could reuse the ids of deleted ones
        chunk.state["outer"] = torch.full((4,), float(value))
        chunk.unpack(chunk.state["outer"])
        assert torch.equal(layout.tensors[0], chunk.state["outer"])


def test_a_bucket_splits_what_was_received_and_ignores_the_statuses_behind() -> None:
    layout = layout_of(3, 3, 1, chunk_elements=3)
    message = torch.empty(7)
    chunks = [BucketChunk(c, message[c.start : c.stop], {}) for c in layout.chunks()]
    bucket = Bucket(message, chunks)
    slices = [part.tolist() for _, part in bucket.split(torch.arange(9.0))]
    assert slices == [[0, 1, 2], [3, 4, 5], [6]]
    both = torch.stack([torch.arange(9.0), torch.zeros(9)])  # messages of two workers
    rows = [part.tolist() for _, part in bucket.split(both)]
    assert rows == [[[0, 1, 2], [0] * 3], [[3, 4, 5], [0] * 3], [[6], [0]]]
    assert len(bucket) == 7


def test_chunks_are_grouped_up_to_the_longest_bucket() -> None:
    chunks = layout_of(3, 3, 3, 3, 2, chunk_elements=3).chunks()
    lengths = [[len(c) for c in group] for group in group_chunks(chunks, len, 7)]
    assert lengths == [[3, 3], [3, 3], [2]]
    assert [len(group) for group in group_chunks(chunks, len, 1)] == [1] * 5
    assert group_chunks([], len, 7) == []
