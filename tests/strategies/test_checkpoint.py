"""A resumed run equals the uninterrupted one bit for bit; contents of the files of a checkpoint.

``ROWS`` lists methods, layouts of workers and disks, times of validation, and where runs are saved.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from tests.cases import CASES, Case, params
from tests.harness.cover import cover
from tests.harness.pool import Pool
from tests.strategies.families import Sizes, as_pair, size_of
from tests.strategies.save_and_resume import (
    METHODS,
    STEPS,
    SYNC_EVERY,
    Run,
    SaveEvery,
    ShardedDrawing,
    check_exact,
    files_in,
    files_of,
    fit,
    train_save_resume,
)
from tests.strategies.test_resume import VALIDATIONS

pytestmark = [
    pytest.mark.recovery,
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:Using `isinstance"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
]

LATE = {
    "async_diloco",
    "async_diloco, feedback",
    "async_diloco of fragments",
    "async_diloco_momentum",
    "streaming_diloco",
    "fragments",
    "gasloc_overlap, int8",
}
"""Methods with a pending round after the second one has started."""


class Layout(NamedTuple):
    """How a run is divided.

    Attributes:
        sizes: Ranks of a worker.
        disks: The disk of each rank, if workers have private folders; else they share one.
        in_folder: Whether ranks that shard the model save to a folder.
    """

    sizes: Sizes = None
    disks: tuple[int, ...] = ()
    in_folder: bool = True

    @property
    def size(self) -> int:
        """Number of ranks of a worker."""
        return size_of(self.sizes)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.disks) or 2 * self.size


LAYOUTS = {
    "one rank": Layout(),
    "ranks": Layout(2),
    "fsdp": Layout((2, 1)),
    "fsdp, in a file": Layout((2, 1), in_folder=False),
    "tensor": Layout((1, 2)),
    "tensor, in a file": Layout((1, 2), in_folder=False),
    "a disk each": Layout(disks=(0, 1)),
    "a disk for two": Layout(disks=(0, 0, 1)),
    "one disk, private": Layout(disks=(0, 0)),
    "ranks, a disk each": Layout(2, disks=(0, 0, 1, 1)),
}


class PartlyUsed(nn.Sequential):
    """Does not use the layer ``unused``."""

    def forward(self, inputs: Tensor) -> Tensor:
        for name, layer in self.named_children():
            inputs = inputs if name == "unused" else layer(inputs)
        return inputs


class WithUnused(ShardedDrawing):
    """Has a layer without gradients, so that AdamW has no state for it."""

    def __init__(self, dropout: float) -> None:
        super().__init__(dropout)
        self.model = PartlyUsed(*self.model)
        self.model.register_module("unused", nn.Linear(4, 4))

    def shard(self, mesh: DeviceMesh) -> None:
        fully_shard(self.model[0], mesh=mesh)
        fully_shard(self.model.unused, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def on_train_end(self) -> None:
        states = self.trainer.optimizers[0].state
        assert sum(not states.get(parameter) for parameter in self.parameters()) == 2


@dataclass(frozen=True)
class Row:
    """A run that is saved and resumed.

    Args:
        method: Its name in ``METHODS``.
        layout: Its name in ``LAYOUTS``.
        points: Where it is saved, ``"<hook> <step>"``; None for every point.
        validation: When it is validated, see ``VALIDATIONS``; None without validations.
        dropout: Dropout of the module.
        steps: Steps of the run; an epoch has 6.
        module: Makes the module.
        soak: Whether it runs in the soak only.
    """

    method: str
    layout: str
    points: str | None
    validation: str | None = None
    dropout: float = 0.3
    steps: int = 12
    module: Any = None
    soak: bool = False

    def __str__(self) -> str:
        return f"{self.method}, {self.layout}, {self.points}, {self.validation}"


VALIDATED = [
    Row("local_sgd", "one rank", "validation 12, batch 18", "every epoch"),
    Row("async_diloco", "one rank", "batch 12, start 12", "every 2 epochs", dropout=0.0),
    Row("gasloc", "one rank", "batch 12, validation 18", "every 3 epochs"),
    Row("local_sgd", "one rank", "batch 8, validation 12", "every 4 steps", dropout=0.0),
    Row("async_diloco", "one rank", "batch 8, epoch 12", "every 2 steps of 2nd epochs"),
    Row("gasloc", "one rank", "batch 12, start 12", "no check before training", dropout=0.0),
    Row("local_sgd", "one rank", "batch 18, epoch 18", "never"),
]
ROWS = [
    *(replace(row, steps=STEPS) for row in VALIDATED),
    *(replace(row, steps=STEPS, points=None, soak=True) for row in VALIDATED),
    Row("streaming_diloco", "one rank", None, "every 4 steps", steps=STEPS, soak=True),
    Row("streaming_diloco", "one rank", None, "every 3 epochs", steps=STEPS, soak=True),
    Row("delayed_nesterov", "one rank", None, "every 3 epochs", steps=STEPS, soak=True),
    Row("noloco", "one rank", None, "every epoch", steps=STEPS, soak=True),
    Row("local_sgd", "ranks", "batch 9"),
    Row("diloco", "ranks", "validation 6, epoch 6, batch 10", "every epoch"),
    Row("diloco, feedback", "ranks", "batch 9"),
    Row("diloco_adamw", "ranks", "batch 10"),  # the first rank owns the outer optimizer
    Row("async_diloco, feedback", "ranks", "batch 10"),
    Row("fragments", "ranks", "batch 9"),
    Row("gasloc, int8", "ranks", "batch 9"),
    Row("gasloc_overlap, int8", "ranks", "batch 10"),
    Row("local_sgd", "fsdp", "batch 9"),
    Row("diloco, feedback", "fsdp", "batch 10"),
    Row("diloco", "fsdp", "batch 10", module=WithUnused),
    Row("diloco", "fsdp, in a file", "batch 10", module=WithUnused),
    Row("diloco", "tensor, in a file", "batch 10"),
    Row("async_diloco", "fsdp", "batch 10"),
    Row("async_diloco of fragments", "tensor", "batch 10"),
    Row("streaming_diloco", "fsdp", "batch 10"),
    Row("gasloc", "fsdp", "batch 10"),
    Row("noloco", "tensor, in a file", "batch 10"),
    Row("diloco", "a disk each", "batch 10"),
    Row("gasloc", "a disk each", "batch 10"),
    Row("local_sgd", "a disk each", "batch 10", soak=True),
    Row("sparta", "a disk each", "batch 10", soak=True),
    Row("async_diloco_momentum", "a disk each", "batch 10", soak=True),
    Row("diloco", "a disk for two", "batch 10"),
    Row("diloco", "one disk, private", "batch 10"),
    Row("diloco", "ranks, a disk each", "batch 5, batch 10"),
]
POINTS = ("batch 8", "batch 12", "batch 18", "epoch 12", "epoch 18", "start 12")
VALIDATION_POINTS = {
    "validation 12": {*VALIDATIONS} - {"every 3 epochs", "never"},
    "validation 18": {"every epoch", "every 3 epochs"},
}
"""Where validations end, and the runs that have them."""


def run_of(method: str, layout: str, folder: Path, max_steps: int = 12) -> tuple[Run, int, int]:
    """Return a run of a method, the number of ranks of a worker, and of all ranks."""
    of_ranks = LAYOUTS[layout]
    disks = of_ranks.disks or [0] * of_ranks.world
    private = {"checkpoint_folder": "private"} if of_ranks.disks else {}
    run = Run(
        method,
        [str(folder / f"disk{disk}") for disk in disks],
        max_steps=max_steps,
        strategy={"timeout_s": 30, **private},
        sizes=of_ranks.sizes,
        in_folder=of_ranks.in_folder,
    )
    return run, of_ranks.size, of_ranks.world


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.soak] * row.soak) for row in ROWS], ids=str
)
def test_resumed_run_equals_uninterrupted_run(pool: Pool, tmp_path: Path, row: Row) -> None:
    """Its losses, validations, parameters and buffers; and it has written only whole saves."""
    layout, case = LAYOUTS[row.layout], METHODS[row.method]
    points = [*POINTS, *(at for at, runs in VALIDATION_POINTS.items() if row.validation in runs)]
    points = row.points.split(", ") if row.points else points
    run, size, world = run_of(row.method, row.layout, tmp_path, row.steps)
    run = replace(
        run,
        dropout=row.dropout,
        validates=row.validation not in (None, "never"),
        trainer=VALIDATIONS[row.validation] if row.validation else {},
        module=row.module,
    )
    whole, *_ = check_exact(pool, run, points, world)
    num_readers = world // as_pair(layout.sizes)[1]
    assert len({str(outcome.losses) for outcome in whole}) == num_readers
    is_sharded = isinstance(layout.sizes, tuple)
    is_shared = not isinstance(case, Case) or case.algorithm.replicated
    for point in points:
        path = Path(run.folder[0], f"{point}.ckpt")
        files = files_of(path)
        is_late = row.method in LATE and int(point.split()[1]) > 2 * SYNC_EVERY
        assert files.has_pending == is_late, point
        assert path.is_dir() == (is_sharded and layout.in_folder)
        assert bool(files.shared) == is_shared
        assert all(("shared" in one["engine"]) != is_shared for one in files.workers)
    for disk in {*run.folder} if not is_sharded else ():
        workers = {rank // size for rank, own in enumerate(run.folder) if own == disk}
        names = [f"worker_{worker:05d}.pt" for worker in workers]
        names += ["shared.pt"] if is_shared else []
        side = [f"{point}.ckpt.loco/S/{name}" for point in points for name in names]
        assert files_in(Path(disk)) == sorted([*(f"{point}.ckpt" for point in points), *side])


@pytest.mark.parametrize(
    ("case", "in_validation"),
    [
        *cover(params("resume"), [False, True], strength=1),
        *cover([pytest.param(CASES["async_diloco"], id="async_diloco")], [True]),
    ],
)
def test_every_method_resumes_exactly(
    pool: Pool, tmp_path: Path, case: Case, in_validation: bool
) -> None:
    """Resume during a round, and at the end of an epoch that is also the end of a round.

    With three workers the result depends on the partners of each exchange.
    """
    epochs = {"every_n_epochs": 2, "save_on_train_epoch_end": not in_validation}
    run = Run(
        case,
        str(tmp_path),
        callbacks=[
            ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **settings)
            for settings in ({"every_n_train_steps": 10}, epochs)
        ],
        max_steps=17,
        validates=in_validation,
        trainer={"enable_checkpointing": True},
    )
    world = 2 if case.graph is None else 3
    whole, *_ = check_exact(pool, run, ["step=10", "step=12"], world, save=[])
    assert whole[0].losses != whole[1].losses  # the workers had different data


@pytest.mark.parametrize("layout", ["ranks", "a disk each"])
def test_averaging_by_the_clock_goes_on(pool: Pool, tmp_path: Path, layout: str) -> None:
    """The run cannot be repeated exactly, but the ranks of a worker stay equal."""
    run, size, world = run_of("async_model_average", layout, tmp_path)
    saving = replace(run, callbacks=[SaveEvery(10)])
    results = pool.run(train_save_resume, saving, ["often.ckpt"], run, world=world)
    for rank, (_, resumed) in enumerate(results):
        assert sorted(resumed.losses) == [10, 11]
        assert torch.equal(resumed.state, results[rank - rank % size][1].state)


# ---------------------------------------------------------------- which files are kept


@pytest.mark.parametrize("layout", ["one rank", "ranks", "a disk each"])
def test_deletion_removes_whole_saves_and_last_resumes(
    pool: Pool, tmp_path: Path, layout: str
) -> None:
    """A run that resumes from a link deletes the save before, too."""
    one, best = tmp_path / "newest", tmp_path / "best"
    settings: dict[str, Any] = {"every_n_train_steps": 3, "save_top_k": 1, "save_last": "link"}
    newest = ModelCheckpoint(one, "{step}", **settings)
    of_best = ModelCheckpoint(best, "{step}", monitor="val/dataloader_idx_0", save_top_k=1)
    run, size, world = run_of("diloco", layout, tmp_path, max_steps=14)
    run = replace(run, validates=True, trainer={"enable_checkpointing": True})
    again = replace(run, max_steps=16, callbacks=[newest])
    run = replace(run, callbacks=[newest, of_best])
    for whole, resumed in pool.run(train_save_resume, run, ["last"], again, world=world):
        assert sorted(resumed.losses) == [12, 13, 14, 15]
        for step in (12, 13):
            assert whole.losses[step] == resumed.losses[step]
    # Lightning keeps the file that it has resumed from; with private folders, links are resolved.
    kept = ["step=12.ckpt", "step=12.ckpt.loco"] if layout == "a disk each" else []
    assert sorted(os.listdir(one)) == ["last.ckpt", *kept, "step=15.ckpt", "step=15.ckpt.loco"]
    main, folder = sorted(os.listdir(best))
    assert folder == f"{main}.loco"
    assert len(list(best.rglob("worker_*.pt"))) == len(list(one.rglob("step=15*/*/w*"))) == 2
    assert world == 2 * size


@pytest.mark.parametrize("layout", ["one rank", "ranks", "a disk each"])
def test_weights_alone_have_no_side_files(pool: Pool, tmp_path: Path, layout: str) -> None:
    run, _, world = run_of("diloco", layout, tmp_path, max_steps=6)
    save = SaveEvery(6, "folder/one.ckpt", weights_only=True)
    pool.run(fit, replace(run, callbacks=[save]), world=world)
    states = []
    for disk in {*run.folder}:
        assert files_in(Path(disk)) == ["folder/one.ckpt"]
        content = torch.load(f"{disk}/folder/one.ckpt")["state_dict"]
        states.append(torch.cat([value.flatten() for value in content.values()]))
    assert all(torch.equal(state, states[0]) for state in states)


def test_overwriting_leaves_one_complete_set(pool: Pool, tmp_path: Path) -> None:
    pool.run(fit, Run("local_sgd", str(tmp_path), [SaveEvery(1)], 4), world=2)
    main = torch.load(tmp_path / "often.ckpt")["lightning_loco"]
    sets = list((tmp_path / "often.ckpt.loco").iterdir())
    assert [folder.name for folder in sets] == [main["stamp"]]
    assert main["stamp"].startswith("step4-")
