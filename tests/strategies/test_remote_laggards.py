"""Workers that run out of data or stop, or change parameters differently."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_loco import RemoteOptimizerStrategy
from lightning_loco.compression import Int8
from tests.harness.cover import cover
from tests.harness.pool import Pool, PoolError
from tests.harness.small_model import TinyModule, ValidatedModule, flat, make_loader
from tests.strategies.families import Seen, fit_with, remote_or_ddp, saved_weights

pytestmark = pytest.mark.recovery

STEPS = 6
CODEC = Int8(block=4)


def decoded(module: TinyModule, full: Tensor) -> Tensor:
    """Return the values that workers decode; parameters are one bucket, the last one first."""
    params = list(module.parameters())
    parts = list(reversed(full.split([param.numel() for param in params])))
    values = torch.cat(parts)
    values = CODEC.decode(CODEC.encode(values), torch.empty_like(values))
    return torch.cat(list(reversed(values.split([len(part) for part in parts]))))


def run_uneven(
    rank: int, world: int, folder: Path, module: TinyModule, options: dict[str, Any]
) -> dict[str, Any]:
    """Train two epochs, in which worker 0 has fewer batches."""
    seen = Seen(f"{folder}/one.ckpt")
    data = [make_loader(rank, STEPS if rank == 0 else STEPS + 3)]
    if isinstance(module, ValidatedModule):
        data.append(make_loader(9, 2))
    strategy = remote_or_ddp(2, **options)
    fit_with(strategy, module, *data, callbacks=[seen], max_epochs=2)
    return {"final": flat(module), "validated": seen.validated, "steps": len(module.losses)}


@pytest.mark.parametrize(
    ("options", "module", "num_tiers"),
    [
        *cover([{}], [TinyModule, ValidatedModule], [2, 3], strength=1),
        *cover([{"compression": CODEC}], [ValidatedModule], [2, 3]),
    ],
    ids=str,
)
def test_a_worker_without_data_gets_the_current_parameters(
    pool: Pool, tmp_path: Path, options: Any, module: type[TinyModule], num_tiers: int
) -> None:
    found = pool.run(run_uneven, tmp_path, module(), options, world=1 + num_tiers)
    first, second, *_, server = found
    assert (first["steps"], second["steps"]) == (2 * STEPS, 2 * STEPS + 6)
    assert torch.equal(saved_weights(tmp_path / "one.ckpt"), server["final"])
    expected = decoded(module(), server["final"]) if options else server["final"]
    assert torch.equal(expected, server["final"]) == (not options)
    assert torch.equal(first["final"], expected)
    assert torch.equal(second["final"], expected)
    if module is ValidatedModule:
        assert len(first["validated"]) == 2
        assert all(map(torch.equal, first["validated"], second["validated"]))
        assert torch.equal(first["validated"][-1], expected)


@pytest.mark.alone
def test_a_worker_without_data_waits_at_all_servers_at_once(pool: Pool, tmp_path: Path) -> None:
    options = {"num_servers": 2, "timeout_s": 5}
    first, second, *_ = pool.run(run_uneven, tmp_path, ValidatedModule(), options, world=4)
    assert torch.equal(first["final"], second["final"])


class Slow(Callback):
    """Delays each batch."""

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(0.4)


def run_slowly(rank: int, world: int) -> Tensor:
    module = ValidatedModule()
    data = make_loader(rank, 1 if rank == 0 else 10), make_loader(9, 2)
    fit_with(
        RemoteOptimizerStrategy(2, timeout_s=2),
        module,
        *data,
        callbacks=[Slow()] if rank == 1 else [],
    )
    return flat(module)


@pytest.mark.alone
@pytest.mark.process
@pytest.mark.parametrize("num_tiers", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_a_worker_without_data_waits_longer_than_the_timeout(pool: Pool, num_tiers: int) -> None:
    first, second, *_, server = pool.run(run_slowly, world=1 + num_tiers)
    assert torch.equal(first, server)
    assert torch.equal(second, server)


class StopsAlone(Callback):
    """Sets ``should_stop`` on one rank only."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == 0 and trainer.global_step == 3:
            trainer.should_stop = True


def run_stopped(rank: int, world: int) -> tuple[Tensor, int]:
    module = TinyModule()
    trainer = fit_with(remote_or_ddp(2), module, make_loader(rank, STEPS), callbacks=[StopsAlone()])
    return flat(module), trainer.global_step


def test_a_worker_that_stops_alone_gets_the_final_parameters(pool: Pool) -> None:
    first, second, server = pool.run(run_stopped, world=3)
    assert (first[1], second[1]) == (3, STEPS)
    assert torch.equal(first[0], server[0])
    assert torch.equal(second[0], server[0])


class ClippedOnOne(TinyModule):
    """Changes the weights of one worker, or differently on each worker."""

    def __init__(self, which: tuple[int, ...]) -> None:
        super().__init__()
        self.which = which

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and self.global_rank in self.which:
            for parameter in self.parameters():
                parameter.data.add_(1.0 + self.global_rank)


def run_module(rank: int, world: int, module: TinyModule) -> None:
    fit_with(remote_or_ddp(2), module, make_loader(rank, STEPS))


@pytest.mark.parametrize(
    ("which", "text"),
    [
        ((1,), "on worker 1 but not on worker 0"),
        pytest.param((0, 1), "but not to the same values", marks=pytest.mark.soak),
    ],
)
def test_manual_changes_that_differ_are_refused(
    pool: Pool, which: tuple[int, ...], text: str
) -> None:
    with pytest.raises(PoolError) as caught:
        pool.run(run_module, ClippedOnOne(which), world=3)
    assert set(caught.value.failures) == {0, 1, 2}
    for failure in caught.value.failures.values():
        assert text in failure.message
