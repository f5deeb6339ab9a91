"""A remote optimizer in the Trainer gives the results of DDP, bit for bit."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    Callback,
    LearningRateMonitor,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_loco import RemoteOptimizerStrategy
from lightning_loco.compression import BFloat16
from lightning_loco.parameter_server import Tiers
from tests.harness.cover import cover
from tests.harness.pool import Pool
from tests.harness.small_model import (
    TinyModule,
    ValidatedModule,
    flat,
    loss_of,
    make_loader,
    quiet_trainer,
    worker_batch,
)
from tests.strategies.families import fit_with, remote_or_ddp

STEPS = 6


# ------------------------------------------------------------------------- optimizers


class Cosine(ValidatedModule):
    """AdamW with a cosine schedule; workers of a server have other weights before they start."""

    def __init__(self) -> None:
        super().__init__()
        has_server = dist.get_world_size() > 2
        seed = 1 + dist.get_rank() if has_server and dist.get_rank() < 2 else 0
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Plateau(ValidatedModule):
    """Has a schedule that depends on a validation metric."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.1, patience=0, threshold=10.0
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"},
        }


class Estimated(TinyModule):
    """Has a schedule as long as the run, which Lightning computes from the data."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = int(self.trainer.estimated_stepping_batches)
        assert steps == 2 * STEPS
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Monitored(ValidatedModule):
    """Has momentum, weight decay, two parameter groups and optionally a schedule."""

    def __init__(self, schedule: bool) -> None:
        super().__init__()
        self.schedule = schedule

    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        groups = [{"params": [first], "lr": 0.1}, {"params": others}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        if not self.schedule:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Groups(TinyModule):
    """Has two groups, a frozen parameter, and one without a gradient in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.model[0].bias.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        first, *others = self.model.parameters()
        groups = [{"params": [first], "lr": 0.1}, {"params": others, "weight_decay": 0.1}]
        return torch.optim.AdamW(groups, lr=0.01)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 2:
            return loss
        with torch.no_grad():
            offset = self.model[2].bias.clone()
        inputs, target = batch
        hidden = self.model[1](self.model[0](inputs))
        outputs = hidden @ self.model[2].weight.T + offset
        return (outputs.squeeze(-1) - target).square().mean()


# --------------------------------------------------- gradients that are read and changed


class Manual(TinyModule):
    """Uses manual optimization, with clipping."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()


class ReadInHooks(TinyModule):
    """Records gradients and changes them, in every hook where this is allowed."""

    def record_norm(self) -> None:
        self.losses.append(nn.utils.clip_grad_norm_(self.parameters(), 0.3).item())

    def on_after_backward(self) -> None:
        self.record_norm()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for param in self.parameters():
            if param.grad is not None:
                param.grad += 0.1 * param.grad.sign()

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        self.record_norm()


class ReadWithGroups(ReadInHooks, Groups):
    """Also has a parameter without a gradient in every other step."""


class ReadInStep(TinyModule):
    """Changes gradients in its ``optimizer_step``."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        closure()
        self.losses.append(nn.utils.clip_grad_norm_(self.parameters(), 0.3).item())
        optimizer.step()


class ReadByHand(Manual):
    """Accumulates gradients and changes them, with manual optimization."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        with self.trainer.model.no_sync():
            self.manual_backward(TinyModule.training_step(self, batch, batch_idx))
        self.manual_backward(TinyModule.training_step(self, batch, batch_idx))
        self.losses.append(nn.utils.clip_grad_norm_(self.parameters(), 0.3).item())
        optimizer.step()


class DropsNan(TinyModule):
    """Has an infinite loss in a batch of one rank; a hook drops this gradient."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        is_bad = batch_idx == 3 and self.trainer.global_rank == 1
        return loss / 0 if is_bad else loss

    def on_after_backward(self) -> None:
        if any(not p.grad.isfinite().all() for p in self.parameters() if p.grad is not None):
            self.zero_grad()


class Infinite(TinyModule):
    """Has an infinite loss on one worker in one step; the gradient scaler skips this step."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step([part.float() for part in batch], batch_idx)  # type: ignore[arg-type]
        is_bad = batch_idx == 3 and self.trainer.global_rank == 1 and self.current_epoch == 0
        return loss * torch.inf if is_bad else loss


class InfiniteRead(Infinite):
    """Records the norm of the mean gradient as well."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = norm_of_gradients(self)
        self.losses.append(norm.item() if norm.isfinite() else -1.0)


def half_precision() -> list[Any]:
    return [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))]


def norm_of_gradients(module: nn.Module) -> Tensor:
    return torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).norm()


# ------------------------------------------------------------ weights changed by hand


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


class Loads(Callback):
    """Loads other weights in one hook, once."""

    def __init__(self, hook: str) -> None:
        self.done = False
        setattr(self, hook, self.load)

    def load(self, trainer: Any, module: Any, *_: Any) -> None:
        if not self.done:
            for parameter in module.parameters():
                parameter.data.fill_(5.0)
            self.done = True


# ------------------------------------------------------------------------------- runs


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of two ranks that read different data.

    Args:
        module: Makes the module.
        options: Arguments of the remote optimizer, besides two workers.
        trainer: Arguments of the Trainer, besides two epochs.
        callbacks: Makes the callbacks.
        plugins: Makes plugins of the Trainer.
        scale: Final scale of the gradients.
        tolerance: Of results in low precision; others are equal bit for bit.
        writes: Whether weights are changed after steps, so that servers may have other ones at
            the end, and checkpoints are compared.
    """

    module: Callable[[], TinyModule] = TinyModule
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trainer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    callbacks: Callable[[], list[Callback]] = list
    plugins: Callable[[], list[Any]] = list
    scale: float | None = None
    tolerance: float = 0.0
    writes: bool = False


def monitor() -> list[Callback]:
    return [LearningRateMonitor(log_momentum=True, log_weight_decay=True)]


def pruning() -> list[Callback]:
    return [ModelPruning("l1_unstructured", amount=0.5)]


def swa() -> list[Callback]:
    return [StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1)]


def loads(hook: str) -> list[Callback]:
    return [Loads(hook)]


adam = partial(TinyModule, optimizer="Adam")
validated_adam = partial(ValidatedModule, optimizer="Adam")
clipped = partial(Clipped, "data")
two_ranks = {"num_workers": 1, "replica_size": 2}
two_servers = {"num_servers": 2}
infinite = {"plugins": half_precision, "scale": 128.0, "tolerance": 1e-3}
HOOKS = (
    "on_fit_start",
    "on_sanity_check_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
)
RUNS: dict[str, Run] = {
    "schedule by step": Run(Cosine),
    "accumulation": Run(Cosine, trainer={"accumulate_grad_batches": 2}),
    "clipping by norm": Run(Cosine, trainer={"gradient_clip_val": 0.5}),
    "clipping by value": Run(
        Cosine, trainer={"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}
    ),
    "schedule by a metric": Run(Plateau),
    "schedule of the run's length": Run(Estimated),
    "parameter groups": Run(Groups),
    "optimizer by hand": Run(Manual),
    "hooks that read gradients of groups": Run(ReadWithGroups),
    "optimizer_step that reads": Run(ReadInStep),
    "gradients read by hand": Run(ReadByHand),
    "hook that drops an infinite gradient": Run(DropsNan),
    "hooks that read accumulated gradients": Run(
        ReadInHooks, trainer={"accumulate_grad_batches": 3}
    ),
    "skipped step": Run(Infinite, trainer={"gradient_clip_val": 1.0}, **infinite),
    "skipped step, read": Run(InfiniteRead, trainer={"gradient_clip_val": 1.0}, **infinite),
    **{
        f"weights clipped, {how}": Run(partial(Clipped, how), writes=how != "before_forward")
        for how in ("data", "tracked", "before_forward", "manual")
    },
    **{
        f"weights loaded in {hook}": Run(ValidatedModule, callbacks=partial(loads, hook))
        for hook in HOOKS
    },
    "learning-rate monitor": Run(partial(Monitored, True), callbacks=monitor),
    "learning-rate monitor, no schedule": Run(partial(Monitored, False), callbacks=monitor),
    "pruning": Run(validated_adam, trainer={"max_epochs": 4}, callbacks=pruning, writes=True),
    "stochastic weight averaging": Run(
        validated_adam, trainer={"max_epochs": 4}, callbacks=swa, writes=True
    ),
}
WITH_OPTIONS: dict[str, Run] = {
    "two servers": Run(adam, two_servers),
    "two servers, clipping": Run(adam, two_servers, {"gradient_clip_val": 0.5}),
    "two servers, hooks that read": Run(ReadInHooks, two_servers, {"gradient_clip_val": 0.5}),
    "two servers, weights clipped": Run(clipped, two_servers, writes=True),
    "no overlap, weights clipped": Run(clipped, {"overlap": False}, writes=True),
    "small buckets, weights clipped": Run(clipped, {"bucket_bytes": 40}, writes=True),
    "a worker of two ranks": Run(ValidatedModule, two_ranks),
    "a worker of two ranks, two servers": Run(ValidatedModule, {**two_ranks, **two_servers}),
    "a worker of two ranks, hooks that read": Run(ReadInHooks, two_ranks),
}


class Recorder(Callback):
    """Records the learning rate in each step, and the weights saved after each epoch."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rates: list[float] = []
        self.saved: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        configs = trainer.lr_scheduler_configs
        owner = configs[0].scheduler.optimizer if configs else trainer.optimizers[0]
        self.rates.append(owner.param_groups[0]["lr"])

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.path is None:
            return
        trainer.save_checkpoint(self.path)
        if trainer.global_rank == 0:
            self.saved.append(torch.load(self.path, weights_only=False)["state_dict"])


def fit(rank: int, world: int, run: Run, is_remote: bool, folder: Path) -> dict[str, Any]:
    module, recorder = run.module(), Recorder(folder / "one.ckpt" if run.writes else None)
    start = flat(module)
    options = {"num_workers": 2, **run.options}
    strategy = remote_or_ddp(**options) if is_remote else DDPStrategy(find_unused_parameters=True)
    data = [make_loader(rank, STEPS)]
    if isinstance(module, ValidatedModule):
        data.append(make_loader(9, 2))
    trainer = fit_with(
        strategy,
        module,
        *data,
        plugins=run.plugins(),
        callbacks=[*run.callbacks(), recorder],
        logger=CSVLogger(folder, name="", version=""),
        log_every_n_steps=1,
        **{"max_epochs": 2, **run.trainer},
    )
    logged = folder / "metrics.csv"
    lines = logged.read_text().splitlines() if rank == 0 and logged.exists() else []
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    assert isinstance(scaler, torch.amp.GradScaler) == (run.scale is not None)  # not a wrapper
    return {
        "start": start,
        "weights": flat(module),
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "scale": None if scaler is None else scaler.get_scale(),
        "same": (trainer.global_step, recorder.rates, lines),
        "losses": module.losses,
        "saved": recorder.saved,
    }


@pytest.mark.filterwarnings("ignore:Swapping scheduler:UserWarning")
@pytest.mark.filterwarnings("ignore:.*no learning rate schedulers:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
@pytest.mark.parametrize(
    ("name", "num_tiers"),
    [*cover(RUNS, [2, 3], strength=1), *((name, 2) for name in WITH_OPTIONS)],
)
def test_a_run_gives_the_results_of_ddp(
    pool: Pool, tmp_path: Path, name: str, num_tiers: int
) -> None:
    run = {**RUNS, **WITH_OPTIONS}[name]
    folders = [tmp_path / "remote", tmp_path / "ddp"]
    for folder in folders:
        folder.mkdir()
    num_servers = run.options.get("num_servers", 1)
    found = pool.run(fit, run, True, folders[0], world=num_tiers + num_servers)
    of_ddp = pool.run(fit, run, False, folders[1], world=2)
    expected = of_ddp[0]["weights"]
    assert not torch.equal(expected, of_ddp[0]["start"])
    for own, other in zip(found[:2], of_ddp, strict=True):
        close = partial(torch.testing.assert_close, rtol=run.tolerance, atol=run.tolerance / 10)
        close(own["weights"], expected)
        assert own["losses"] == pytest.approx(other["losses"], rel=run.tolerance, abs=0)
        assert own["same"] == other["same"]
        assert own["metrics"] == other["metrics"]
        assert own["scale"] == other["scale"] == run.scale
        for saved, saved_by_ddp in zip(own["saved"], other["saved"], strict=True):
            close(saved, saved_by_ddp)
    if run.writes:
        return
    assert found[-1]["metrics"] == pytest.approx(found[0]["metrics"])
    if num_servers == 1:
        assert torch.equal(found[-1]["weights"], found[0]["weights"])
        assert torch.equal(found[-1]["weights"], found[1]["weights"])
        return
    for one in found[-num_servers:]:  # each has changed only its shard
        changed = one["weights"] != one["start"]
        assert 0 < changed.sum() < len(changed)
        assert torch.equal(one["weights"][changed], expected[changed])


def test_runs_differ_in_what_they_are_about(pool: Pool, tmp_path: Path) -> None:
    """Schedules change the rates, clipping and pruning the weights, and monitors write them."""
    found = {}
    for name in (
        "schedule by a metric",
        "weights clipped, data",
        "pruning",
        "learning-rate monitor",
    ):
        folder = tmp_path / name
        folder.mkdir()
        found[name] = pool.run(fit, RUNS[name], False, folder, world=2)[0]
    assert len(set(found["schedule by a metric"]["same"][1])) > 1
    assert found["weights clipped, data"]["weights"].abs().max() == Clipped.limit
    assert (found["pruning"]["weights"] == 0.0).any()
    assert "lr-AdamW/pg1" in found["learning-rate monitor"]["same"][2][0]


def log_on_one_rank(rank: int, world: int) -> tuple[list[Tensor], Tensor]:
    module, norms = SkipsABatch(), Norms()
    data = make_loader(rank, 4 - rank)  # the first rank takes the last step alone
    fit_with(remote_or_ddp(2), module, data, callbacks=[norms] if rank == 0 else [])
    return norms.found, flat(module)


class Norms(Callback):
    """Records the gradient norm."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.found.append(norm_of_gradients(module))


class SkipsABatch(Manual):
    """Has no backward pass in one batch of one rank."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        if batch_idx != 1 or self.trainer.global_rank == 0:
            self.manual_backward(TinyModule.training_step(self, batch, batch_idx))
        optimizer.step()


def test_a_callback_on_one_rank_sees_the_mean_of_all(pool: Pool) -> None:
    (norms, weights), *_ = pool.run(log_on_one_rank, world=3)
    module, expected = TinyModule(), []
    optimizer = module.configure_optimizers()
    for step, readers in enumerate([(0, 1), (0,), (0, 1), (0,)]):
        optimizer.zero_grad()
        for worker in readers:  # one without a backward pass counts as zero
            loss = loss_of(module.model, worker_batch(worker, step))
            (loss / (1 if step == 3 else 2)).backward()
        expected.append(norm_of_gradients(module))
        optimizer.step()
    torch.testing.assert_close(norms, expected)
    torch.testing.assert_close(weights, flat(module))


# -------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("name", ["remote_optimizer", "remote_optimizer_notebook"])
def test_by_name_all_ranks_except_one_train(name: str) -> None:
    trainer = quiet_trainer(strategy=name, devices=4, num_nodes=2)
    strategy = trainer.strategy
    assert isinstance(strategy, RemoteOptimizerStrategy)
    assert strategy.tiers == Tiers(7, 2)
    assert strategy.num_workers == trainer.world_size == 7
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 7, "rank": 0}


def test_the_strategy_can_be_pickled() -> None:
    strategy = RemoteOptimizerStrategy(4, num_servers=2, compression="bf16", overlap=False)
    copy = pickle.loads(pickle.dumps(strategy))
    assert copy.counts == strategy.counts == (4, 2, 1)
    assert copy.compression == BFloat16()
    assert (copy.overlap, copy.timeout_s) == (False, 600)


def test_arguments_and_defaults_are_unchanged() -> None:
    parameters = inspect.signature(RemoteOptimizerStrategy).parameters
    expected = {"num_servers": 1, "compression": None}
    assert {name: parameters[name].default for name in expected} == expected
    assert RemoteOptimizerStrategy().timeout_s == 600
    first, *others, _ = parameters.values()
    assert first.name == "num_workers"
    assert {parameter.kind for parameter in others} == {inspect.Parameter.KEYWORD_ONLY}
