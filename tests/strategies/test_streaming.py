"""Streaming DiLoCo under a Trainer: it equals a plain loop, and refuses invalid settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_loco import (
    AsyncDiLoCoStrategy,
    DiLoCo,
    DiLoCoStrategy,
    Elastic,
    LocoStrategy,
    StreamingDiLoCoStrategy,
)
from lightning_loco.algorithms import Mix
from lightning_loco.schedules import EverySteps, Staggered
from lightning_loco.strategies.checkpoint.worker_checkpoints import to_device
from tests.harness.pool import Pool, PoolError, make_trainer
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


def streaming() -> StreamingDiLoCoStrategy:
    """Return a strategy that sends the second layer before the first one's result arrives."""
    return StreamingDiLoCoStrategy(6, 2, 4, 0.25, outer_lr=0.5, outer_momentum=0.6)


def in_order() -> StreamingDiLoCoStrategy:
    return StreamingDiLoCoStrategy(6, 2, 4, 0.25, 0.5, 0.6, pattern=["model.0", "model.2"])


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


def async_whole() -> LocoStrategy:
    return AsyncDiLoCoStrategy(5, outer_momentum=0.3, fragments=None)


def async_delay_of_a_phase() -> LocoStrategy:
    return AsyncDiLoCoStrategy(5, 0.7, 0.3, warm_start=True, fragments=1, mix=0.0)


def async_at_once() -> LocoStrategy:
    return AsyncDiLoCoStrategy(5, 0.7, 0.3, fragments=None, delay=0, mix=0.0)


def blocking() -> LocoStrategy:
    return DiLoCoStrategy(5, outer_momentum=0.3)


def one_fragment() -> LocoStrategy:
    return StreamingDiLoCoStrategy(5, 1, 0, 0.0, 0.7, 0.3)


def one_late_fragment() -> LocoStrategy:
    return StreamingDiLoCoStrategy(5, 1, 5, 0.0, 0.7, 0.3)


def async_cold() -> LocoStrategy:
    return AsyncDiLoCoStrategy(5, outer_momentum=0.3, warm_start=False, fragments=None)


def async_even() -> LocoStrategy:
    return AsyncDiLoCoStrategy(6, fragments=2)


def streaming_even() -> LocoStrategy:
    return StreamingDiLoCoStrategy(6, 2, 3, 0.25, 0.6, 0.8, pattern="even")


@pytest.mark.parametrize("make", [streaming, pytest.param(in_order, marks=pytest.mark.soak)])
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


def fit_each(rank: int, world: int, *makes: Make) -> list[Tensor]:
    return [fit(rank, world, make) for make in makes]


def test_identities_bit_for_bit(pool: Pool, subtests: pytest.Subtests) -> None:
    for make, same in (
        (one_fragment, blocking),
        (async_at_once, blocking),
        (one_late_fragment, async_cold),
        (async_delay_of_a_phase, async_whole),
        (async_even, streaming_even),
    ):
        with subtests.test(f"{make.__name__} is {same.__name__}"):
            for one, other in pool.run(fit_each, make, same, world=2):
                assert torch.equal(one, other)


# ------------------------------------------------------------------------------- arguments


def test_the_strategies_choose_schedule_and_merge_policy() -> None:
    settings = StreamingDiLoCoStrategy().settings
    assert settings.algorithm == DiLoCo(0.4, 0.9)
    assert (settings.schedule, settings.merge_policy) == (Staggered(100, 3, 5), Mix(0.5))
    assert StreamingDiLoCoStrategy(4).settings.schedule == Staggered(4, 3, 2)
    assert StreamingDiLoCoStrategy(1).settings.schedule == Staggered(1, 1, 1)
    assert StreamingDiLoCoStrategy([9, 30]).settings.schedule == Staggered([9, 30], 3, 4)
    assert (
        StreamingDiLoCoStrategy(10, 1, 10, 0.0).settings.merge_policy is None
    )  # the algorithm's own
    hidden = AsyncDiLoCoStrategy(10).settings
    assert hidden.algorithm == DiLoCo(0.6, 0.8)
    assert (hidden.schedule, hidden.merge_policy) == (Staggered(10, 4, 2, "even"), Mix(0.25))
    assert AsyncDiLoCoStrategy(3).settings.schedule == Staggered(3, 3, 1, "even")
    assert AsyncDiLoCoStrategy([9, 30]).settings.schedule == Staggered([9, 30], 4, 2, "even")
    late = AsyncDiLoCoStrategy(10, fragments=None).settings
    assert late.algorithm == DiLoCo(0.7, 0.0)
    assert (late.schedule, late.merge_policy) == (EverySteps(10, True), None)
    late = AsyncDiLoCoStrategy(10, fragments=None, mix=0.5).settings
    assert (late.schedule, late.merge_policy) == (EverySteps(10, True), Mix(0.5))
    soon = AsyncDiLoCoStrategy(10, fragments=None, delay=2).settings
    assert soon.algorithm == DiLoCo(0.6, 0.8)
    assert (soon.schedule, soon.merge_policy) == (Staggered(10, 1, 2, "even"), Mix(0.25))


def test_bad_arguments(subtests: pytest.Subtests) -> None:
    rows: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"delay": 11}, ValueError, "from 0 to sync_every=10, got 11"),
        ({"delay": -1}, ValueError, "from 0 to sync_every=10, got -1"),
        ({"delay": 1.0}, TypeError, "must be an integer, got 1.0"),
        ({"mix": 1.5}, ValueError, r"mix .* must be in \[0, 1\], got 1.5"),
        ({"mix": -0.1}, ValueError, r"mix .* must be in \[0, 1\], got -0.1"),
        ({"mix": float("nan")}, ValueError, r"mix .* must be in \[0, 1\], got nan"),
        ({"mix": "half"}, TypeError, "mix must be a number"),
        ({"outer_lr": 0.0}, ValueError, "outer_lr must be positive"),
    ]
    for strategy in (AsyncDiLoCoStrategy, StreamingDiLoCoStrategy):
        for arguments, error, text in rows:
            name = strategy.__name__
            with subtests.test(name, **arguments), pytest.raises(error, match=text):
                strategy(sync_every=10, **arguments)


def test_bad_fragments(subtests: pytest.Subtests) -> None:
    rows: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"fragments": 0}, ValueError, "from 1 to sync_every=10, got 0"),
        ({"fragments": 11}, ValueError, "from 1 to sync_every=10, got 11"),
        ({"pattern": "odd"}, ValueError, "must be one of strided, contiguous, even, or a list"),
        ({"pattern": ["a"]}, ValueError, "lists 1 regular expressions for fragments=3"),
        ({"topology": "ring"}, TypeError, "topology"),
    ]
    for arguments, error, text in rows:
        with subtests.test(**arguments), pytest.raises(error, match=text):
            StreamingDiLoCoStrategy(sync_every=10, **arguments)


def test_fragments_of_async_diloco_need_one_sync_every() -> None:
    with pytest.raises(ValueError, match="need one sync_every for the whole run, got {0: 10}"):
        AsyncDiLoCoStrategy({0: 10})
    AsyncDiLoCoStrategy({0: 10}, fragments=None)
    with pytest.raises(ValueError, match="from 1 to sync_every=10, got 11"):
        AsyncDiLoCoStrategy(10, fragments=11)
    with pytest.raises(TypeError, match="must be an integer, got 'many'"):
        AsyncDiLoCoStrategy(10, fragments="many")  # type: ignore[arg-type]


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1)


REFUSED: dict[str, tuple[Make, str]] = {
    "three fragments of two layers": (StreamingDiLoCoStrategy, "more than the 2 layers"),
    "a parameter in no fragment": (
        lambda: StreamingDiLoCoStrategy(10, 2, pattern=["weight", "2.bias"]),
        "'model.0.bias' must match one pattern and matches none",
    ),
    "an optimizer of the whole vector": (
        lambda: StreamingDiLoCoStrategy(10, 2, outer_optimizer=adamw),
        "needs the whole vector of parameters at once .* Use fragments=1",
    ),
    "two numbers for three workers": (
        lambda: StreamingDiLoCoStrategy([10, 12], 2),
        "lists 2 numbers for 3 workers",
    ),
    "a run too short for a whole phase": (
        lambda: AsyncDiLoCoStrategy(11, fragments=1),
        "sync_every=11: the result of a round is applied one round later, after the end",
    ),
}


def fit_named(rank: int, world: int, name: str) -> None:
    trainer = make_trainer(REFUSED[name][0](), max_steps=STEPS)
    trainer.fit(TinyModule(), make_loader(rank, STEPS))


def test_invalid_settings_are_refused_on_every_worker(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    for name, (_, text) in REFUSED.items():
        with subtests.test(name):
            with pytest.raises(PoolError, match=text) as error:
                pool.run(fit_named, name, world=3)
            assert sorted(error.value.failures) == [0, 1, 2]


MEMBERS = Elastic("127.0.0.1:29510")
ELASTIC: dict[str, tuple[Make, str]] = {
    "fragments": (
        lambda: StreamingDiLoCoStrategy(10, 2, 6, membership=MEMBERS),
        r"delay must be at most sync_every // fragments = 10 // 2 = 5, got 6\. Use delay=5",
    ),
    "a mapping": (
        lambda: DiLoCoStrategy({0: 10, 50: 20}, membership=MEMBERS),
        "after a fixed number of local steps. Use one number for sync_every",
    ),
}


def fit_elastic(rank: int, world: int, name: str) -> None:
    trainer = make_trainer(ELASTIC[name][0](), max_steps=STEPS)
    trainer.fit(TinyModule(), make_loader(rank, STEPS))


@pytest.mark.parametrize("name", ELASTIC)
def test_elastic_members_have_one_pending_round(pool: Pool, name: str) -> None:
    with pytest.raises(PoolError, match=ELASTIC[name][1]):
        pool.run(fit_elastic, name, world=1)
