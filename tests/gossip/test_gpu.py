"""Models on a GPU: local steps and blends do not wait for it, and give the numbers of a CPU."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from torch import Tensor, nn

from lightning_loco import PairwiseAverage, PairwiseEngine
from lightning_loco.compression import BFloat16, Float16, Int8
from lightning_loco.gossip.averaging import ModelAverager
from lightning_loco.gossip.snapshots import (
    Publisher,
    copy_with_norm_and_loss,
    make_publisher,
)
from lightning_loco.model.flat import Cuts, FlatLayout
from tests.harness.gossip_nodes import DPWA, make_node, peers
from tests.harness.gpu import no_checksum, no_waits_for_the_gpu, with_streams

__all__ = ["no_checksum"]

NUMEL = 25


def make(device: str, dtype: torch.dtype, **settings: object) -> tuple[ModelAverager, list[Tensor]]:
    tensors = [torch.ones(shape, dtype=dtype, device=device) for shape in ((3, 4), (5,), (2, 4))]
    layout = FlatLayout(zip("abc", tensors, strict=True), Cuts(7))
    return ModelAverager(layout, PairwiseAverage(**DPWA | settings), layout.numel), tensors


# Tensors on the device "meta" have no values, so reading one raises an error.


def test_copy_with_norm_and_loss_does_not_wait_for_the_device(subtests: pytest.Subtests) -> None:
    losses = {"none": None, "a number": 2.0, "a tensor": torch.ones(1, device="meta")}
    codecs = (None, BFloat16(), Float16(), Int8(), Int8(block=12))
    for codec, (kind, loss) in itertools.product(codecs, losses.items()):
        with subtests.test(codec=codec, loss=kind):
            averager, _ = make("meta", torch.float32)
            flat = torch.empty(NUMEL, device="meta")
            norm_and_loss = torch.zeros(2, dtype=torch.float64, device="meta")
            copy_with_norm_and_loss(averager.layout, flat, norm_and_loss, loss)
            if codec is not None:
                assert codec.encode(flat).is_meta
            with pytest.raises(RuntimeError, match="item"):
                norm_and_loss[0].item()


def test_blend_does_not_wait_for_the_device(subtests: pytest.Subtests) -> None:
    for dtype, keep_progress in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        with subtests.test(dtype=dtype, keep_progress=keep_progress):
            averager, tensors = make("meta", dtype, keep_progress=keep_progress)
            averager.record_fetch_start()
            for was_finite in (True, False):
                averager.blend(torch.zeros(NUMEL), 0.5, was_finite=was_finite)
            assert all(tensor.device.type == "meta" for tensor in tensors)


@pytest.mark.parametrize("loss", [None, 2.0, torch.tensor([3.0])])
def test_norm_and_loss_are_copied(loss: float | Tensor | None) -> None:
    averager, tensors = make("cpu", torch.float64)
    flat, norm_and_loss = (
        torch.empty(NUMEL, dtype=torch.float64),
        torch.zeros(2, dtype=torch.float64),
    )
    copy_with_norm_and_loss(averager.layout, flat, norm_and_loss, loss)
    assert norm_and_loss.tolist() == [5.0, float(loss or 0.0)]
    assert torch.equal(flat, torch.ones(NUMEL, dtype=torch.float64))
    tensors[1][2] = torch.nan
    copy_with_norm_and_loss(averager.layout, flat, norm_and_loss, loss)
    assert not torch.isfinite(norm_and_loss[0])


def test_models_on_the_cpu_need_no_asynchronous_copies() -> None:
    averager, _ = make("cpu", torch.float32)
    node = make_node(peers(1), 0, NUMEL)
    assert isinstance(make_publisher(node.snapshots, averager.layout), Publisher)
    averager.blend(torch.zeros(NUMEL), 0.5, was_finite=True)
    assert averager.is_upload_done
    node.close()


def pair(
    *values: float,
    device: str = "cuda",
    compression: str | None = None,
    **settings: object,
) -> list[tuple[nn.Linear, PairwiseEngine]]:
    nodes = peers(len(values), "w")
    workers = []
    for node, value in zip(nodes, values, strict=True):
        model = nn.Linear(300, 300, device=device)
        for parameter in model.parameters():
            parameter.data.fill_(value)
        engine = PairwiseEngine(
            model,
            PairwiseAverage(**DPWA | settings),
            nodes=nodes,
            name=node.name,
            fetch_timeout_s=5,
            compression=compression,
        )
        workers.append((model, engine))
    return workers


@pytest.mark.usefixtures("no_checksum")
@pytest.mark.parametrize(
    ("interpolation", "compression"),
    [("constant", None), ("clock", None), ("loss", None), ("loss", "int8"), ("clock", "bf16")],
)
def test_local_step_does_not_wait_for_the_device(
    interpolation: str, compression: str | None, subtests: pytest.Subtests
) -> None:
    """Asynchronous copies from this device return zeros: parameters, norms and losses."""
    for keep_progress in (False, True):
        with subtests.test(keep_progress=keep_progress), with_streams():
            workers = pair(
                0.0,
                4.0,
                device="meta",
                compression=compression,
                interpolation=interpolation,
                keep_progress=keep_progress,
            )
            deadline = time.monotonic() + 20
            factors: list[float] = []
            while len(factors) < 5 and time.monotonic() < deadline:
                for model, engine in workers:
                    loss = model(torch.ones(2, 300, device="meta")).sum()
                    engine.update_send(loss)
                    engine.worker.last_loss = loss.detach()
                    engine.step()
                factors = workers[0][1].factors
            assert len(factors) >= 5
            assert workers[0][0].weight.is_meta
            for _, engine in workers:
                engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("interpolation", "compression"), [("constant", None), ("loss", None), ("constant", "int8")]
)
def test_models_on_a_gpu_gossip_without_waiting_for_it(
    interpolation: str, compression: str | None, subtests: pytest.Subtests
) -> None:
    loss = torch.ones((), device="cuda")
    for keep_progress in (False, True):
        with subtests.test(keep_progress=keep_progress):
            (here, reader), (_, served) = workers = pair(
                0.0,
                4.0,
                compression=compression,
                interpolation=interpolation,
                keep_progress=keep_progress,
            )
            with no_waits_for_the_gpu():
                deadline = time.monotonic() + 20
                factor = 0.0
                while factor == 0.0 and time.monotonic() < deadline:
                    served.update_send(loss)
                    reader.update_send(loss)
                    factor = reader.update_wait(loss)
            assert factor == 0.5
            assert here.weight.unique().tolist() == pytest.approx([2.0], rel=1e-6)
            for _, engine in workers:
                engine.close()
