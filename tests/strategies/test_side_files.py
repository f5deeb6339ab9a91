"""Side files that are damaged, missing or from another worker are refused; the error names them."""

from __future__ import annotations

import os
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_loco import LocoStrategy, PairwiseGossipStrategy
from lightning_loco.strategies.checkpoint.atomic_io import WholeFileIO
from lightning_loco.strategies.checkpoint.position import random_states
from lightning_loco.strategies.checkpoint.side_files import (
    KEY,
    SideFiles,
    checksum,
    is_stamp,
    new_stamp,
    with_header,
)
from tests.cases import CASES, without_variants
from tests.harness.pool import Pool, PoolError, make_trainer
from tests.harness.small_model import TinyModule, make_loader

WORLD = 2
pytestmark = [
    pytest.mark.recovery,
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that"),
]


def strategy_of(kind: str) -> LocoStrategy | PairwiseGossipStrategy:
    if kind == "pairwise_gossip":
        return PairwiseGossipStrategy(1.0, timeout_s=30, fetch_timeout_s=0.2)
    return CASES[kind].strategy(2, timeout_s=30)


def save(trainer: Trainer, path: str, *_: Any) -> None:
    """Save after the last step."""
    if trainer.global_step == trainer.max_steps:
        trainer.save_checkpoint(path)


def fit(rank: int, world: int, path: str, resume: bool = False, kind: str = "diloco") -> int:
    trainer = make_trainer(
        strategy_of(kind),
        max_steps=6 if resume else 4,
        use_distributed_sampler=False,
    )
    module = TinyModule()
    if not resume:
        module.on_train_batch_end = partial(save, trainer, path)  # type: ignore[method-assign]
    trainer.fit(module, make_loader(rank, 20), ckpt_path=path if resume else None)
    return trainer.global_step


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a checkpoint of two workers after four steps."""
    folder = tmp_path_factory.mktemp("saved")
    pool.run(fit, str(folder / "one.ckpt"), world=WORLD)
    return folder


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """Return a copy of the saved checkpoint."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    return tmp_path / "one.ckpt"


def folder_of(checkpoint: Path) -> Path:
    (folder,) = Path(f"{checkpoint}.loco").iterdir()
    return folder


def check_refused(
    pool: Pool, checkpoint: Path, *texts: str, kind: str = "diloco", world: int = WORLD
) -> None:
    """Check that it is refused on all workers, with this message."""
    with pytest.raises(PoolError) as error:
        pool.run(fit, str(checkpoint), True, kind, world=world)
    assert sorted(error.value.failures) == [*range(world)]
    for failure in error.value.failures.values():
        assert failure.type_name == "ValueError"
        for word in texts:
            assert word in failure.message
        assert "To start a new run from its weights alone" in failure.message


def change(path: Path, **entries: Any) -> None:
    """Set entries of a file; delete entries that are None."""
    content = torch.load(path)
    for name, value in entries.items():
        content[name] = value
        if value is None:
            del content[name]
    torch.save(content, path)


def test_intact_side_files_are_resumed(pool: Pool, checkpoint: Path) -> None:
    assert pool.run(fit, str(checkpoint), True, world=WORLD) == [6, 6]


def test_file_of_another_worker_is_refused(pool: Pool, checkpoint: Path) -> None:
    folder = folder_of(checkpoint)
    shutil.copy(folder / "worker_00000.pt", folder / "worker_00001.pt")
    check_refused(
        pool, checkpoint, f"{folder}/worker_00001.pt", "belongs to worker 0", "not to worker 1"
    )


def test_file_of_another_save_is_refused(pool: Pool, checkpoint: Path) -> None:
    file = folder_of(checkpoint) / "worker_00001.pt"
    content = torch.load(file)
    del content["seal"]
    torch.save(with_header(content, new_stamp(4), 1), file)
    check_refused(pool, checkpoint, str(file), f"not to worker 1 in save '{file.parent.name}'")


def test_file_of_a_worker_is_not_accepted_as_the_shared_one(pool: Pool, checkpoint: Path) -> None:
    folder = folder_of(checkpoint)
    shutil.copy(folder / "worker_00000.pt", folder / "shared.pt")
    check_refused(pool, checkpoint, f"{folder}/shared.pt", "not to all workers")


def load(files: SideFiles, stamp: str) -> tuple[tuple[Any, Any] | None, str]:
    """Return the state that worker 1 reads, or the error."""
    try:
        return files.load(stamp, 1, True), ""
    except ValueError as error:
        return None, str(error)


@pytest.mark.soak
@pytest.mark.parametrize("worker", [1, None], ids=["worker_00001.pt", "shared.pt"])
def test_flipped_bits_are_found(checkpoint: Path, worker: int | None) -> None:
    """None of 200 flipped bits changes the values that are read; bits in padding have no effect."""
    stamp = folder_of(checkpoint).name
    files = SideFiles(WholeFileIO(), checkpoint)
    name = Path(files.path_of(stamp, worker))
    whole = name.read_bytes()
    own, shared = files.load(stamp, 1, True)
    expected = checksum([own, shared])
    draw = random.Random(7)
    refused = 0
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        name.write_bytes(damaged)
        found, message = load(files, stamp)
        refused += found is None
        assert str(name) in message if found is None else checksum([*found]) == expected
    assert refused > 20


def test_flipped_bit_of_a_parameter_is_found_by_all(pool: Pool, checkpoint: Path) -> None:
    file = folder_of(checkpoint) / "worker_00001.pt"
    content = torch.load(file)
    content["engine"]["params"][3] += 1e-9
    torch.save(content, file)
    check_refused(pool, checkpoint, str(file), "has changed since it was written")


def test_empty_file_is_refused(pool: Pool, checkpoint: Path) -> None:
    file = folder_of(checkpoint) / "worker_00001.pt"
    file.write_bytes(b"")
    check_refused(pool, checkpoint, str(file), "is damaged and cannot be read")


def test_file_without_a_header_is_refused(pool: Pool, checkpoint: Path) -> None:
    file = folder_of(checkpoint) / "worker_00001.pt"
    change(file, seal=None)
    check_refused(pool, checkpoint, str(file), "has no header of lightning_loco")


def test_missing_entry_names_the_file(
    pool: Pool, checkpoint: Path, subtests: pytest.Subtests
) -> None:
    folder = folder_of(checkpoint)
    files = [folder / f"worker_{worker:05d}.pt" for worker in range(WORLD)]
    whole = [file.read_bytes() for file in files]
    for part, entry, message in (
        (None, "engine", "KeyError: 'engine'"),
        (None, "position", "KeyError: 'position'"),
        ("position", "phase", "argument: 'phase'"),
        ("engine", "params", "KeyError: 'params'"),
    ):
        for worker, file in enumerate(files):
            file.write_bytes(whole[worker])
            content = torch.load(file)
            del content["seal"]
            del (content if part is None else content[part])[entry]
            torch.save(with_header(content, folder.name, worker), file)
        with subtests.test(entry, part=part):
            check_refused(pool, checkpoint, f"{folder}/worker_0000", message)


def test_missing_entry_of_the_main_file_names_it(
    pool: Pool, checkpoint: Path, subtests: pytest.Subtests
) -> None:
    whole = torch.load(checkpoint)["lightning_loco"]
    for entry in (
        "format", "stamp", "algorithm", "num_workers", "settings", "has_shared"
    ):  # fmt: skip
        with subtests.test(entry):
            rest = {name: value for name, value in whole.items() if name != entry}
            assert rest.keys() != whole.keys()
            change(checkpoint, lightning_loco=rest)
            check_refused(pool, checkpoint, f"{checkpoint} holds what", f"KeyError: {entry!r}")


def test_impossible_entries_of_the_main_file_are_refused(
    pool: Pool, checkpoint: Path, subtests: pytest.Subtests
) -> None:
    whole = torch.load(checkpoint)["lightning_loco"]
    rows: list[tuple[str, Any, str]] = [
        (
            "format",
            2,
            "has format {!r}, and this version of lightning_loco reads format 5.",
        ),
        ("stamp", "../../elsewhere", "names its side files {!r}"),
        ("stamp", "step4-0123456", "names its side files {!r}"),
        ("stamp", "step4-0123456\u0661", "names its side files {!r}"),
        ("stamp", 4, "names its side files {!r}"),
        ("stamp", None, "names its side files {!r}"),
        ("stamp", "/step4-01234567", "names its side files {!r}"),
        ("num_workers", 0, "which does not exist"),
        ("num_workers", "2", "one.ckpt holds what"),
        ("num_workers", 1000, "worker_00999.pt, which does not exist"),
        ("settings", None, "one.ckpt holds what"),
        ("settings", {**whole["settings"], "sync_every": ["x"]}, "one.ckpt holds what"),
    ]
    for entry, value, texts in rows:
        with subtests.test(entry, value=value):
            change(checkpoint, lightning_loco={**whole, entry: value})
            check_refused(pool, checkpoint, texts.format(value))


@pytest.mark.parametrize("world", [2, 1])
def test_missing_file_of_a_worker_is_named(pool: Pool, checkpoint: Path, world: int) -> None:
    """Also if there is no such worker any more."""
    (folder_of(checkpoint) / "worker_00001.pt").unlink()
    texts = "worker_00001.pt, which does not exist", "Keep the folder one.ckpt.loco beside"
    check_refused(pool, checkpoint, *texts, world=world)


def test_format_of_stamps() -> None:
    assert all(is_stamp(new_stamp(steps)) for steps in (0, 7, 10**9))
    assert not is_stamp("step4-01234567\n")


# ----------------------------------------------------------------- every kind of strategy


KINDS = ("pairwise_gossip", *without_variants())
QUICK_KINDS = ("streaming_diloco",)


def flipped(tensor: Tensor) -> Tensor:
    """Return the tensor with the lowest bit of one element flipped."""
    changed = tensor.clone().contiguous()
    changed.view(-1).view(torch.uint8)[0] ^= 1
    return changed


@pytest.mark.parametrize(
    "kind",
    [
        *QUICK_KINDS,
        *(pytest.param(kind, marks=pytest.mark.soak) for kind in KINDS if kind not in QUICK_KINDS),
    ],
)
def test_files_of_every_kind_are_checked(pool: Pool, tmp_path: Path, kind: str) -> None:
    """A flipped bit, a file of another worker, a missing entry, and finally the original."""
    checkpoint = tmp_path / "one.ckpt"
    pool.run(fit, str(checkpoint), False, kind, world=WORLD)
    folder = folder_of(checkpoint)
    file, stamp = folder / "worker_00001.pt", folder.name
    whole = file.read_bytes()

    content = torch.load(file)
    content["engine"]["params"] = flipped(content["engine"]["params"])
    torch.save(content, file)
    check_refused(pool, checkpoint, str(file), "has changed since it was written", kind=kind)

    shutil.copy(folder / "worker_00000.pt", file)
    check_refused(pool, checkpoint, str(file), "belongs to worker 0", kind=kind)

    file.write_bytes(whole)
    for part, name in [(None, "engine"), (None, "position"), ("engine", "params")]:
        content = torch.load(file)
        del content["seal"]
        del (content if part is None else content[part])[name]
        torch.save(with_header(content, stamp, 1), file)
        check_refused(pool, checkpoint, str(file), f"KeyError: {name!r}", kind=kind)
        file.write_bytes(whole)

    if (folder / "shared.pt").exists():
        shared = folder / "shared.pt"
        all_of_it = shared.read_bytes()
        content = torch.load(shared)
        content["shared"][0]["state"]["outer"] = flipped(content["shared"][0]["state"]["outer"])
        torch.save(content, shared)
        check_refused(pool, checkpoint, str(shared), "has changed since it was written", kind=kind)
        shared.write_bytes(all_of_it)

    assert pool.run(fit, str(checkpoint), True, kind, world=WORLD) == [6, 6]


def test_a_folder_may_be_a_link_and_other_files_are_kept(pool: Pool, checkpoint: Path) -> None:
    folder, elsewhere = folder_of(checkpoint).parent, checkpoint.parent / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    (elsewhere / "mine").mkdir()
    assert pool.run(fit, str(checkpoint), True, world=WORLD) == [6, 6]
    pool.run(fit, str(checkpoint), world=WORLD)
    assert sorted(os.listdir(elsewhere)) == ["mine", torch.load(checkpoint)[KEY]["stamp"]]


def test_removal_does_not_follow_a_link(checkpoint: Path) -> None:
    elsewhere = checkpoint.parent / "elsewhere"
    linked = folder_of(checkpoint).parent
    linked.rename(elsewhere)
    linked.symlink_to(elsewhere)
    SideFiles(WholeFileIO(), checkpoint).remove()
    assert not linked.is_symlink()
    assert len(os.listdir(elsewhere)) == 1


# ---------------------------------------------------------------------------- checksums


def test_checksum_differs_between_contents(subtests: pytest.Subtests) -> None:
    rows: list[tuple[Any, Any]] = [
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 1.0}),
        ([1, 2], [2, 1]),
        ([[1], 2], [[1, 2]]),
        ([0.1], [0.1 + 2e-17]),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), torch.tensor([0.0, -0.0])),
        (torch.zeros(3, dtype=torch.bfloat16), torch.tensor([0, 0, 1e-40]).bfloat16()),
        (torch.tensor([1 + 1j]), torch.tensor([1 - 1j])),
        ({"a", "b"}, {"a", "c"}),
        ("1", 1),
        (None, False),
    ]
    for one, other in rows:
        with subtests.test(one=one, other=other):
            assert checksum(one) != checksum(other)


def test_checksum_survives_writing_and_reading(tmp_path: Path) -> None:
    tensors: list[Tensor] = [
        torch.randn(4, 3).T,
        torch.tensor(True),
        torch.zeros(0),
        torch.randn(3, requires_grad=True),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor(float("nan")),
    ]
    content = {"tensors": tensors, "random": random_states(), 3: ("x", {"y": None}), "s": {1, 2}}
    torch.save(content, tmp_path / "one.pt")
    assert checksum(torch.load(tmp_path / "one.pt")) == checksum(content)
