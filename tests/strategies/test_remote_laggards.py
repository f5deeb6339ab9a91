"""Workers that run out of data or stop, change parameters manually, or have a NaN loss."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_loco import RemoteOptimizerStrategy
from tests.harness.cover import cover
from tests.harness.pool import Pool, PoolError
from tests.harness.small_model import TinyModule, ValidatedModule, flat, make_loader
from tests.strategies.families import Seen, fit_with, remote_or_ddp

pytestmark = pytest.mark.recovery

STEPS = 6


def run_uneven(rank: int, world: int, folder: str, validates: bool) -> dict[str, Any]:
    module = ValidatedModule() if validates else TinyModule()
    seen = Seen(f"{folder}/one.ckpt")
    num_batches = STEPS if rank == 0 else STEPS + 3
    validation = make_loader(9, 2) if validates else None
    data = make_loader(rank, num_batches), validation
    fit_with(remote_or_ddp(2), module, *data, callbacks=[seen], max_epochs=2)
    return {"final": flat(module), "validated": seen.validated, "steps": len(module.losses)}


@pytest.mark.parametrize(("num_tiers", "validates"), cover([2, 3], [True, False], strength=1))
def test_a_worker_without_data_gets_the_current_parameters(
    pool: Pool, tmp_path: Any, num_tiers: int, validates: bool
) -> None:
    first, second, *_, server = pool.run(run_uneven, str(tmp_path), validates, world=1 + num_tiers)
    saved = torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"]
    assert (first["steps"], second["steps"]) == (2 * STEPS, 2 * STEPS + 6)
    assert torch.equal(second["final"], server["final"])
    assert torch.equal(first["final"], server["final"])
    assert torch.equal(torch.cat([v.reshape(-1) for v in saved.values()]), server["final"])
    if validates:
        assert torch.equal(first["validated"][-1], server["final"])


def run_uneven_with_two_servers(rank: int, world: int) -> Tensor:
    module = ValidatedModule()
    strategy = RemoteOptimizerStrategy(2, num_servers=2, timeout_s=5)
    data = make_loader(rank, STEPS if rank == 0 else STEPS + 3), make_loader(9, 2)
    fit_with(strategy, module, *data)
    return flat(module)


@pytest.mark.alone
def test_a_worker_without_data_waits_at_all_servers_at_once(pool: Pool) -> None:
    first, second, *_ = pool.run(run_uneven_with_two_servers, world=4)
    assert torch.equal(first, second)


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


class Clipped(TinyModule):
    """Clips its weights, as in WGAN."""

    limit = 0.2

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.automatic_optimization = how != "manual"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.how == "before_forward":
            self.clip()
        loss = super().training_step([part.to(next(self.parameters()).dtype) for part in batch], 0)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.clip()
        return None

    def on_train_batch_end(self, *_: Any) -> None:
        if self.how == "data":
            self.clip()
        elif self.how == "tracked":
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.clamp_(-self.limit, self.limit)

    def clip(self) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-self.limit, self.limit)


def run_clipped(
    rank: int, world: int, how: str, remote: bool, options: dict[str, Any], steps: int
) -> Tensor:
    module = Clipped(how)
    if options.get("compression"):
        module.float()
    strategy = RemoteOptimizerStrategy(2, timeout_s=20, **options) if remote else DDPStrategy()
    fit_with(strategy, module, make_loader(rank, steps), gradient_clip_val=None)
    return flat(module)


@pytest.mark.parametrize(
    ("how", "num_tiers"),
    cover(["data", "tracked", "before_forward", "manual"], [2, 3], strength=1),
)
def test_clipped_weights_are_those_of_ddp(pool: Pool, how: str, num_tiers: int) -> None:
    found = pool.run(run_clipped, how, True, {}, STEPS, world=1 + num_tiers)
    expected = pool.run(run_clipped, how, False, {}, STEPS, world=2)[0]
    untouched = pool.run(run_clipped, "not", False, {}, STEPS, world=2)[0]
    assert torch.equal(found[0], expected)
    assert torch.equal(found[1], expected)
    assert not torch.equal(untouched, expected)


@pytest.mark.parametrize("options", [{"num_servers": 2}, {"overlap": False}, {"bucket_bytes": 40}])
def test_clipped_weights_with_other_options(pool: Pool, options: dict[str, Any]) -> None:
    world = 2 + options.get("num_servers", 1)
    found = pool.run(run_clipped, "data", True, options, STEPS, world=world)
    expected = pool.run(run_clipped, "data", False, {}, STEPS, world=2)[0]
    assert torch.equal(found[0], expected)
    assert torch.equal(found[1], expected)


def test_clipping_weights_does_not_round_other_elements(pool: Pool) -> None:
    options = {"compression": "bf16"}
    found = pool.run(run_clipped, "before_forward", True, options, STEPS, world=3)
    expected = pool.run(run_clipped, "before_forward", False, options, STEPS, world=2)[0]
    torch.testing.assert_close(found[2], expected, rtol=0.05, atol=0.02)
    assert not torch.equal(found[2], found[2].bfloat16().float())
    assert torch.equal(found[0], found[2].bfloat16().float())


class ClippedOnOne(TinyModule):
    """Changes the weights of one worker, or differently on each worker."""

    def __init__(self, which: tuple[int, ...]) -> None:
        super().__init__()
        self.which = which

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and self.global_rank in self.which:
            for parameter in self.parameters():
                parameter.data.add_(1.0 + self.global_rank)


def run_module(rank: int, world: int, module: TinyModule, settings: dict[str, Any]) -> Tensor:
    strategy = RemoteOptimizerStrategy(2, timeout_s=20, **settings)
    fit_with(strategy, module, make_loader(rank, STEPS))
    return flat(module)


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
        pool.run(run_module, ClippedOnOne(which), {}, world=3)
    assert set(caught.value.failures) == {0, 1, 2}
    for failure in caught.value.failures.values():
        assert text in failure.message


class NaNOnce(TinyModule):
    """Has a NaN loss on one worker in one step."""

    def __init__(self, broken: int) -> None:
        super().__init__()
        self.broken = broken

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.global_rank == self.broken and batch_idx == 2 else loss


@pytest.mark.parametrize(
    ("settings", "broken"),
    cover([{}, {"overlap": False}, {"num_servers": 2}], [1, 0], strength=1),
    ids=str,
)
def test_a_nan_loss_ends_the_run_with_the_name_of_the_worker(
    pool: Pool, settings: dict[str, Any], broken: int
) -> None:
    world = 2 + settings.get("num_servers", 1)
    with pytest.raises(PoolError) as caught:
        pool.run(run_module, NaNOnce(broken), settings, world=world)
    assert set(caught.value.failures) == set(range(world))
    for failure in caught.value.failures.values():
        assert f"Worker {broken}: a gradient is not finite" in failure.message
