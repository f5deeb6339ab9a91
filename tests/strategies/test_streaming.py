"""Streaming DiLoCo and async DiLoCo under a Trainer: they equal a plain loop, and each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_loco import (
    AsyncDiLoCoStrategy,
    DiLoCo,
    DiLoCoStrategy,
    LocoStrategy,
    StreamingDiLoCoStrategy,
)
from lightning_loco.algorithms import Mix
from lightning_loco.schedules import EverySteps, Staggered
from lightning_loco.strategies.checkpoint.local_state import to_device
from tests.harness.pool import Pool, make_trainer, run_each
from tests.harness.small_model import (
    TinyModule,
    ValidatedModule,
    WorkerData,
    flat,
    make_loader,
    make_model,
    train_step,
    worker_batch,
)
from tests.harness.toys import assert_close

STEPS = 20
Make = Callable[[], LocoStrategy]


streaming = partial(StreamingDiLoCoStrategy, 6, 2, 4, 0.25, outer_lr=0.5, outer_momentum=0.6)
"""Sends the second layer before the first one's result arrives."""

in_order = partial(streaming, pattern=["model.0", "model.2"])


def by_hand(world: int) -> Tensor:
    """Compute the workers' mean at the end, before due rounds start or are applied."""
    models = [make_model() for _ in range(world)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    layers = [[0, 1], [2, 3]]  # parameters of the first linear layer, and of the second one
    outer = [p.detach().clone() for p in models[0].parameters()]
    momentum = [torch.zeros_like(p) for p in outer]
    pending_rounds: dict[int, tuple[int, list[Tensor]]] = {}

    def start(layer: int, step: int) -> None:
        locals_of = [list(model.parameters()) for model in models]
        means = [torch.stack([p[i].detach() for p in locals_of]).mean(0) for i in layers[layer]]
        starts = [outer[i] for i in layers[layer]]
        pending_rounds[layer] = step, [s - mean for s, mean in zip(starts, means, strict=True)]

    @torch.no_grad()
    def apply(layer: int) -> None:
        _, gradients = pending_rounds.pop(layer)
        for i, gradient in zip(layers[layer], gradients, strict=True):
            momentum[i] = 0.6 * momentum[i] + gradient
            outer[i] -= 0.5 * (gradient + 0.6 * momentum[i])
            for model in models:
                p = list(model.parameters())[i]
                p.copy_(0.25 * p + 0.75 * outer[i])

    for step in range(1, STEPS + 1):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train_step(model, optimizer, worker_batch(worker, step - 1))
        if step == STEPS:
            break
        for layer in [one for one, (began, _) in pending_rounds.items() if step - began == 4]:
            apply(layer)
        if step % 3 == 0:
            start(step // 3 % 2 == 0, step)
    return torch.stack([flat(model) for model in models]).mean(0)


def fit(rank: int, world: int, make: Make, folder: str = "", resume: str | None = None) -> Tensor:
    """Train; if there is a folder, validate every 4 steps and save every 5."""
    checkpoint = ModelCheckpoint(
        dirpath=folder, filename="{step}", every_n_train_steps=5, save_top_k=-1
    )
    trainer = make_trainer(
        make(),
        max_steps=STEPS,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        val_check_interval=4 if folder else None,
        callbacks=[checkpoint] if folder else [],
        enable_checkpointing=bool(folder),
    )
    module = ValidatedModule() if folder else TinyModule()
    validation = make_loader(rank, 2) if folder else None
    loader: StatefulDataLoader[Any] = StatefulDataLoader(WorkerData(rank, STEPS), batch_size=None)
    trainer.fit(module, loader, validation, ckpt_path=resume)
    return flat(module)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(streaming, id="strided"),
        pytest.param(in_order, id="in order", marks=pytest.mark.soak),
    ],
)
def test_a_fit_is_the_plain_loop(pool: Pool, tmp_path: Path, make: Make) -> None:
    """Also with validations and checkpoints in between, which change no bit."""
    plain = pool.run(fit, make, world=3)
    seen = pool.run(fit, make, str(tmp_path), world=3)
    for result, with_sync_points in zip(plain, seen, strict=True):
        assert_close(result, by_hand(3))
        assert torch.equal(result, plain[0])
        assert torch.equal(result, with_sync_points)


@pytest.mark.recovery
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("step", [5, 10, 15])
def test_a_run_resumes_with_pending_rounds(pool: Pool, tmp_path: Path, step: int) -> None:
    uninterrupted = pool.run(fit, streaming, str(tmp_path), world=2)
    files = sorted(tmp_path.glob(f"step={step}.ckpt.loco/*/worker_*.pt"))
    pending_rounds = [
        fragment["pending"]
        for file in files
        for fragment in torch.load(file)["engine"]["fragments"]
    ]
    assert any(pending is not None for pending in pending_rounds)
    resumed = pool.run(fit, streaming, str(tmp_path), str(tmp_path / f"step={step}.ckpt"), world=2)
    for one, other in zip(uninterrupted, resumed, strict=True):
        assert torch.equal(one, other)


def test_fragments_write_what_they_share_once(pool: Pool, tmp_path: Path) -> None:
    pool.run(fit, streaming, str(tmp_path), world=2)
    shared = torch.load(next(tmp_path.glob("step=10.ckpt.loco/*/shared.pt")))["shared"]
    for key in ("outer", "momentum"):
        first, second = (fragment["state"][key] for fragment in shared)
        assert first.data_ptr() == second.data_ptr()
    outer = torch.zeros(2)
    first, second = to_device([{"outer": outer}, {"outer": outer}], torch.device("meta"))
    assert first["outer"] is second["outer"]
    assert first["outer"].device.type == "meta"


BLOCKING = partial(DiLoCoStrategy, 5, outer_momentum=0.3)
IDENTITIES: dict[str, tuple[Make, Make]] = {
    "one fragment at once is DiLoCo": (
        partial(StreamingDiLoCoStrategy, 5, 1, 0, 0.0, 0.7, 0.3),
        BLOCKING,
    ),
    "async DiLoCo without a delay is DiLoCo": (
        partial(AsyncDiLoCoStrategy, 5, 0.7, 0.3, fragments=None, delay=0, mix=0.0),
        BLOCKING,
    ),
    "one late fragment is async DiLoCo, cold": (
        partial(StreamingDiLoCoStrategy, 5, 1, 5, 0.0, 0.7, 0.3),
        partial(AsyncDiLoCoStrategy, 5, outer_momentum=0.3, warm_start=False, fragments=None),
    ),
    "a delay of a phase is async DiLoCo of the whole": (
        partial(AsyncDiLoCoStrategy, 5, 0.7, 0.3, warm_start=True, fragments=1, mix=0.0),
        partial(AsyncDiLoCoStrategy, 5, outer_momentum=0.3, fragments=None),
    ),
    "async DiLoCo of fragments is streaming DiLoCo of even ones": (
        partial(AsyncDiLoCoStrategy, 6, fragments=2),
        partial(StreamingDiLoCoStrategy, 6, 2, 3, pattern="even"),
    ),
}


def fit_both(rank: int, world: int, make: Make, same: Make) -> tuple[Tensor, Tensor]:
    return fit(rank, world, make), fit(rank, world, same)


def test_identities_bit_for_bit(pool: Pool, subtests: pytest.Subtests) -> None:
    for name, found in run_each(pool, fit_both, IDENTITIES, world=2).items():
        with subtests.test(name):
            for one, other in found:
                assert torch.equal(one, other)


# ------------------------------------------------------------------------------- arguments


def test_the_strategies_choose_schedule_and_merge_policy() -> None:
    settings = StreamingDiLoCoStrategy().settings
    assert settings.algorithm == DiLoCo(0.7, "auto") == DiLoCo()
    assert (settings.schedule, settings.merge_policy) == (Staggered(100, 3, 5), Mix(0.25))
    assert StreamingDiLoCoStrategy(4).settings.schedule == Staggered(4, 3, 2)
    assert StreamingDiLoCoStrategy(1).settings.schedule == Staggered(1, 1, 1)
    assert StreamingDiLoCoStrategy([9, 30]).settings.schedule == Staggered([9, 30], 3, 4)
    assert (
        StreamingDiLoCoStrategy(10, 1, 10, 0.0).settings.merge_policy is None
    )  # the algorithm's own
    hidden = AsyncDiLoCoStrategy(10).settings
    assert hidden.algorithm == DiLoCo()
    assert (hidden.schedule, hidden.merge_policy) == (Staggered(10, 4, 2, "even"), Mix(0.25))
    assert AsyncDiLoCoStrategy(3).settings.schedule == Staggered(3, 3, 1, "even")
    assert AsyncDiLoCoStrategy([9, 30]).settings.schedule == Staggered([9, 30], 4, 2, "even")
    late = AsyncDiLoCoStrategy(10, fragments=None).settings
    assert late.algorithm == DiLoCo(0.7, 0.0)
    assert (late.schedule, late.merge_policy) == (EverySteps(10, True), None)
    late = AsyncDiLoCoStrategy(10, fragments=None, mix=0.5).settings
    assert (late.schedule, late.merge_policy) == (EverySteps(10, True), Mix(0.5))
    soon = AsyncDiLoCoStrategy(10, fragments=None, delay=2).settings
    assert soon.algorithm == DiLoCo()
    assert (soon.schedule, soon.merge_policy) == (Staggered(10, 1, 2, "even"), Mix(0.25))


def test_fragments_of_async_diloco_need_one_sync_every() -> None:
    with pytest.raises(ValueError, match="need one sync_every for the whole run, got {0: 10}"):
        AsyncDiLoCoStrategy({0: 10})
    AsyncDiLoCoStrategy({0: 10}, fragments=None)
