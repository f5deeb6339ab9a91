"""Damaged checkpoints are refused on all ranks; the error names the file and an intact checkpoint.

``DAMAGES`` lists what happens to a checkpoint; each row is tested with some kinds of strategies.
"""

from __future__ import annotations

import functools
import operator
import os
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_loco.strategies.checkpoint.atomic_io import META
from lightning_loco.strategies.checkpoint.side_files import (
    KEY,
    NEW_RUN,
    SHARDS,
    new_stamp,
    with_header,
)
from tests.cases import CASES, without_variants
from tests.harness.pool import Pool
from tests.strategies.families import FAMILIES, Family, ShardedModule
from tests.strategies.save_and_resume import SaveEvery, pairwise

pytestmark = [
    pytest.mark.recovery,
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
]

METHODS = ["pairwise", *without_variants()]
KINDS: dict[str, Family] = {
    **{name: FAMILIES[name] for name in ("rounds", "remote", "fsdp", "rounds of ranks")},
    "fsdp, in a file": Family(FAMILIES["fsdp"].make, (2, 1), in_folder=False),
    "pairwise": Family(functools.partial(pairwise, 0, fetch_timeout_s=0.2)),
    **{
        name: Family(functools.partial(CASES[name].strategy, 2))
        for name in METHODS
        if name in CASES
    },
}
QUICK = ["rounds", "pairwise", "remote", "fsdp", "streaming_diloco"]


def fit(rank: int, world: int, kind: str, **settings: Any) -> int:
    """Train, and return the number of steps."""
    module, settings = ShardedModule(optimizer="Adam"), {"limit_val_batches": 0, **settings}
    trainer = KINDS[kind].fit(rank, module, 20, {"timeout_s": 20}, **settings)
    return trainer.global_step


def fit_and_save(rank: int, world: int, kind: str, folder: str) -> None:
    """Save to ``1.ckpt`` after two steps, and to ``2.ckpt`` after four, the last one."""
    save = SaveEvery(2, f"{folder}/{{}}.ckpt")
    fit(rank, world, kind, max_steps=4, callbacks=[save])


def resume_each(
    rank: int, world: int, kind: str, paths: Sequence[Any], settings: Mapping[str, Any] = {}
) -> list[tuple[str, str]]:
    """Resume from each path, or from the path of this rank; return the errors or the steps."""
    found = []
    for path in paths:
        own = path.get(rank) if isinstance(path, dict) else str(path)
        try:
            steps = fit(rank, world, kind, max_steps=6, ckpt_path=own, **settings)
        except Exception as error:
            found.append((type(error).__name__, str(error)))
        else:
            found.append(("", f"{steps} steps"))
    return found


Saved = Callable[[str], Path]


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return a folder with two checkpoints, by the kind of the strategy."""

    @functools.cache
    def folder_of(kind: str) -> Path:
        folder = tmp_path_factory.mktemp("saved")
        pool.run(fit_and_save, kind, str(folder), world=KINDS[kind].world)
        return folder

    return folder_of


def refused_by_all(
    pool: Pool, kind: str, paths: Sequence[Any], world: int | None = None, **settings: Any
) -> list[list[str]]:
    """Check that all ranks refuse each path with a ValueError; return the messages of each."""
    # A remote optimizer takes the process group of the job away.
    jobs = [[path] for path in paths] if kind == "remote" else [paths]
    found: list[list[str]] = []
    for job in jobs:
        world = world or KINDS[kind].world
        results = pool.run(resume_each, kind, job, settings, world=world, timeout_s=120)
        assert {error for of_rank in results for error, _ in of_rank} == {"ValueError"}, results
        found += [[text for _, text in of_path] for of_path in zip(*results, strict=True)]
    return found


# -------------------------------------------------------------------------- the damages


def side(path: Path, name: str = "worker_00001.pt") -> Path:
    """Return a side file of a checkpoint."""
    (folder,) = Path(f"{path}.loco").iterdir()
    return folder / name


def write(content: Callable[[bytes], bytes], of: Callable[[Path], Path] = Path) -> Any:
    """Change the bytes of the main file, or of another file."""
    return lambda path: of(path).write_bytes(content(of(path).read_bytes()))


def flip_in_tensors(path: Path) -> None:
    """Flip one bit of the largest tensor in a file, which torch does not detect."""
    with zipfile.ZipFile(path) as archive:
        tensors = [part for part in archive.infolist() if "/data/" in part.filename]
        content = archive.read(max(tensors, key=lambda part: part.file_size))
    whole = bytearray(path.read_bytes())
    whole[whole.index(content) + len(content) // 2] ^= 1
    path.write_bytes(whole)
    torch.load(path)


def flip(name: str) -> Callable[[Path], None]:
    """Flip one bit in the middle of a file of shards, in the main or in the side folder."""

    def damage(path: Path) -> None:
        file = path / name if (path / name).exists() else side(path, name)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)

    return damage


def make_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def edit(
    change: Callable[[dict[str, Any]], Any], *names: str, seal: Callable[[str], str] | None = None
) -> Callable[[Path], None]:
    """Change what side files contain, or the main file; ``seal`` gives them a stamp again."""

    def damage(path: Path) -> None:
        for file in [side(path, name) for name in names] or [path]:
            content = torch.load(file)
            change(content)
            if seal is not None:
                del content["seal"]
                content = with_header(content, seal(file.parent.name), int(file.stem[-1]))
            torch.save(content, file)

    return damage


def at(keys: Sequence[Any], tree: Any) -> Any:
    """Return an entry of nested dictionaries and lists."""
    return functools.reduce(operator.getitem, keys, tree)


def without(*keys: str) -> Callable[[Path], None]:
    """Remove an entry of both workers' files."""
    files = "worker_00000.pt", "worker_00001.pt"
    return edit(lambda content: at(keys[:-1], content).pop(keys[-1]), *files, seal=str)


def flip_lowest_bit(*keys: Any, of: str) -> Callable[[Path], None]:
    """Flip the lowest bit of the first element of a tensor in a side file."""

    def change(content: dict[str, Any]) -> None:
        at(keys, content).view(-1).view(torch.uint8)[0] ^= 1

    return edit(change, of)


def manifest(**entries: Any) -> Callable[[Path], None]:
    """Change entries of the manifest in the main file."""
    return edit(lambda content: content[KEY].update(entries))


def exchange_workers(path: Path) -> None:
    first, second = (side(path, f"shards_worker_0000{worker}") for worker in range(2))
    first.rename(path.parent / "first")
    second.rename(first)
    (path.parent / "first").rename(second)


def shards_of_another_save(path: Path) -> None:
    other, present = (side(path.with_name(f"{n}.ckpt"), "shards_worker_00001") for n in (1, 2))
    shutil.rmtree(present)
    shutil.copytree(other, present)


def empty_rest(path: Path) -> None:
    (path / META).resolve().write_bytes(b"")


def of_both(damage: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Damage the other checkpoint, too."""
    return lambda path: [damage(one) for one in (path, path.with_name("1.ckpt"))]


CUT, CHANGED = "it was cut short or has changed", "has changed since it was written"
GONE, ODD = "which does not exist", "2.ckpt holds what"
PIPE, LAST = "is not a file", "No other checkpoint in {folder} is intact."
OF_ONE, OF_ALL, SHARDS_OF_ONE = "worker_00001.pt", "shared.pt", "shards_worker_00001"
SHORTEN = write(lambda whole: whole[:-1], side)
STAMPS = ("../../elsewhere", "step4-0123456", "step4-0123456\u0661", 4, None, "/step4-01234567")
SIDE_CUT = "{one} is damaged and cannot be read: it was cut short"
ENTRIES = ("format", "stamp", "algorithm", "num_workers", "settings", "has_shared")

Damages = dict[str, tuple[Any, ...]]
"""A function that damages a checkpoint, and texts in the errors: ``path`` and ``folder`` of the
checkpoint, ``one`` is the side file of worker 1, ``stamp`` the name of its save."""

OF_MAIN: Damages = {
    "empty": (write(lambda _: b""), "{path}", "it is empty"),
    "two bytes": (write(lambda whole: whole[:2]), "{path}", "cannot be read"),
    "half": (write(lambda whole: whole[: len(whole) // 2]), "{path}", CUT),
    "a byte less": (write(lambda whole: whole[:-1]), "{path}", CUT),
    "a bit": (flip_in_tensors, "{path}", CHANGED),
    "a bit of both checkpoints": (of_both(flip_in_tensors), "{path}", CHANGED, LAST),
}
OF_WORKERS: Damages = {
    "a bit of the parameters": (flip_lowest_bit("engine", "params", of=OF_ONE), "{one}", CHANGED),
    "a file of another worker": (
        lambda path: shutil.copy(side(path, "worker_00000.pt"), side(path)),
        "{one}",
        "belongs to worker 0",
        "not to worker 1",
    ),
    "no engine": (without("engine"), "worker_0000", "KeyError: 'engine'"),
    "no position": (without("position"), "worker_0000", "KeyError: 'position'"),
    "no parameters": (without("engine", "params"), "worker_0000", "KeyError: 'params'"),
}
OF_SHARED: Damages = {
    "a bit of what all share": (
        flip_lowest_bit("shared", 0, "state", "outer", of=OF_ALL),
        OF_ALL,
        CHANGED,
    )
}
OF_ROUNDS: Damages = {
    "a pipe": (make_pipe, "{path}", PIPE),
    "a pipe as side file": (lambda path: make_pipe(side(path)), "{one}", PIPE),
    "an empty side file": (write(lambda _: b"", side), "{one} is damaged and cannot be read"),
    "a side file with a byte less": (SHORTEN, SIDE_CUT),
    "side files of both with a byte less": (of_both(SHORTEN), SIDE_CUT),
    "no side file": (lambda path: side(path).unlink(), OF_ONE, GONE, "Keep the folder 2.ckpt.loco"),
    "no header": (edit(lambda content: content.pop("seal"), OF_ONE), "{one}", "has no header of"),
    "no phase": (without("position", "phase"), "worker_0000", "argument: 'phase'"),
    "a file of another save": (
        edit(lambda _: None, OF_ONE, seal=lambda _: new_stamp(4)),
        "{one}",
        "not to worker 1 in save '{stamp}'",
    ),
    "a worker's file as the shared one": (
        lambda path: shutil.copy(side(path), side(path, OF_ALL)),
        OF_ALL,
        "not to all workers",
    ),
    **{
        f"no {name}": (edit(lambda content, name=name: content[KEY].pop(name)), ODD, repr(name))
        for name in ENTRIES
    },
    "format 2": (manifest(format=2), "has format 2, and this version of", "reads format 5."),
    **{
        f"stamp {value!r}": (manifest(stamp=value), f"names its side files {value!r}")
        for value in STAMPS
    },
    "no workers": (manifest(num_workers=0), GONE),
    "workers in words": (manifest(num_workers="2"), ODD),
    "too many workers": (manifest(num_workers=1000), f"worker_00999.pt, {GONE}"),
    "settings of None": (manifest(settings=None), ODD),
    "steps in words": (manifest(settings={"sync_every": ["x"]}), ODD),
}
OF_SHARDS: Damages = {
    "a bit of the main folder": (flip("__1_0.distcp"), "2.ckpt", "__1_0.distcp"),
    "a bit of a worker": (flip(f"{SHARDS_OF_ONE}/__0_0.distcp"), f"{SHARDS_OF_ONE}/__0_0.distcp"),
    "a bit of what all share": (flip("shards_shared/__0_0.distcp"), "shards_shared/__0_0.distcp"),
    "exchanged workers": (exchange_workers, "shards_worker_00000/.metadata"),
    "another save": (shards_of_another_save, f"{SHARDS_OF_ONE}/.metadata"),
    "no description": (lambda path: (path / ".metadata").unlink(), "2.ckpt", ".metadata"),
    "no rest": (lambda path: (path / META).unlink(), f"2.ckpt/{META}"),
    "an empty rest of both checkpoints": (of_both(empty_rest), LAST),
}
NO_FOLDER: Damages = {
    "no side folder": (lambda path: shutil.rmtree(f"{path}.loco"), "does not exist")
}
NO_OTHER = ("both", "no parameters")
"""Words in the names of damages whose errors name no other checkpoint."""


def damages_of(kind: str) -> Damages:
    """Return the damages with which a kind of strategy is tested."""
    if kind == "fsdp":
        return {**OF_SHARDS, **NO_FOLDER}
    if kind == "remote":
        return OF_MAIN
    is_shared = kind == "rounds" or (kind in CASES and CASES[kind].algorithm.replicated)
    rows = {**OF_WORKERS, **(OF_SHARED if is_shared else {})}
    if kind in ("rounds", "pairwise"):
        rows |= OF_MAIN
    return rows | {**OF_ROUNDS, **NO_FOLDER} if kind == "rounds" else rows


IN_SOAK = [pytest.param(name, marks=pytest.mark.soak) for name in METHODS if name not in QUICK]


@pytest.mark.parametrize("kind", [*QUICK, *IN_SOAK])
def test_a_damaged_checkpoint_is_refused(
    pool: Pool, saved: Saved, tmp_path: Path, kind: str, subtests: pytest.Subtests
) -> None:
    rows, paths, texts = damages_of(kind), {}, {}
    for number, (name, (damage, *parts)) in enumerate(rows.items()):
        folder = tmp_path / f"{number}"
        shutil.copytree(saved(kind), folder, symlinks=True)
        path = paths[name] = folder / "2.ckpt"
        one = side(path) if kind != "remote" else path
        damage(path)
        words = {"path": path, "folder": folder, "one": one, "stamp": one.parent.name}
        texts[name] = [text.format(**words) for text in parts]
    found = refused_by_all(pool, kind, [*paths.values()])
    for name, messages in zip(rows, found, strict=True):
        with subtests.test(name):
            named = any if kind == "fsdp" else all  # a rank names the damage that it has found
            for text in texts[name]:
                assert named(text in message for message in messages), (text, messages)
            other = f"Go on from {paths[name].with_name('1.ckpt')}, the newest"
            for message in messages:
                assert (other in message) != any(part in name for part in NO_OTHER), message
                assert str(paths[name]) in message
                if name not in OF_MAIN and kind != "fsdp":
                    assert NEW_RUN in message or PIPE in message, message
            if name in OF_MAIN and kind != "fsdp":  # errors of another worker start with its name
                one_text = {m.split(": ", m.startswith("Worker"))[-1] for m in messages}
                assert len(one_text) == 1, messages
    intact = pool.run(resume_each, kind, [saved(kind) / "2.ckpt"], world=KINDS[kind].world)
    num_training = len(intact) - KINDS[kind].servers
    assert intact[:num_training] == [[("", "6 steps")]] * num_training


# -------------------------------------------------------- files that are not the right ones


def test_a_missing_file_of_a_worker_that_is_gone_is_named(
    pool: Pool, saved: Saved, tmp_path: Path
) -> None:
    shutil.copytree(saved("rounds"), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "2.ckpt"
    side(path).unlink()
    ((message,),) = refused_by_all(pool, "rounds", [path], world=1)
    assert "worker_00001.pt, which does not exist" in message
    assert "Keep the folder 2.ckpt.loco beside" in message


@pytest.mark.parametrize("kind", ["rounds", "pairwise", "remote"])
def test_all_ranks_must_resume_from_one_save(pool: Pool, saved: Saved, kind: str) -> None:
    path, other = (saved(kind) / f"{number}.ckpt" for number in (2, 1))
    last = KINDS[kind].world - 1
    alone = [{rank: str(path)} for rank in (0, last)]
    both: dict[int, str] = {rank: str(path if rank else other) for rank in range(last + 1)}
    *of_some, of_all = refused_by_all(pool, kind, [*alone, both])
    for rank, messages in zip((last, 0), of_some, strict=True):
        for message in messages:
            assert f"Some ranks resume from {path}, and " in message
            assert any(f"{name} {rank}" in message for name in ("worker", "rank"))
            assert "Pass the same ckpt_path on all ranks" in message
    for message in of_all:
        assert "The ranks resume from different saves" in message
        assert str(path) in message
        assert str(other) in message


def test_all_ranks_must_see_the_folder(pool: Pool, saved: Saved, tmp_path: Path) -> None:
    path, elsewhere = saved("fsdp") / "2.ckpt", tmp_path / "elsewhere" / "2.ckpt"
    paths = {rank: str(elsewhere if rank == 3 else path) for rank in range(4)}
    (messages,) = refused_by_all(pool, "fsdp", [paths])
    assert all(f"There is no checkpoint {elsewhere}" in message for message in messages)


@pytest.mark.parametrize("kind", ["rounds", "pairwise", "remote"])
def test_folder_of_shards_is_refused(pool: Pool, tmp_path: Path, kind: str) -> None:
    paths, of_lightning = [], "ModelParallelStrategy"
    own = "Loco- or DecoupledModelParallelStrategy"
    writers = {own: {SHARDS: {}}, of_lightning: dict[str, Any]()}
    for writer, content in writers.items():
        paths.append(tmp_path / f"{writer}.ckpt")
        paths[-1].mkdir()
        torch.save(content, paths[-1] / META)
    found = refused_by_all(pool, kind, paths)
    for path, writer, messages in zip(paths, writers, found, strict=True):
        for message in messages:
            assert f"The checkpoint {path} is a folder" in message
            assert f"the ranks of {writer} have written shards" in message


def test_states_of_shards_and_of_whole_models_are_not_mixed(
    pool: Pool, saved: Saved, tmp_path: Path
) -> None:
    pool.run(fit_and_save, "fsdp, in a file", str(tmp_path), world=4)
    (messages,) = refused_by_all(pool, "rounds of ranks", [tmp_path / "2.ckpt"])
    assert any("was written by workers whose ranks hold shards" in message for message in messages)
    (messages,) = refused_by_all(pool, "fsdp", [saved("rounds of ranks") / "2.ckpt"])
    text = "written by workers whose ranks hold the whole model"
    assert any(text in message for message in messages)


def test_last_is_refused_too(pool: Pool, saved: Saved, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved("rounds"), folder)
    path = folder / "last.ckpt"
    path.write_bytes((folder / "2.ckpt").read_bytes()[:-1])
    settings = {"enable_checkpointing": True, "default_root_dir": str(tmp_path)}
    (messages,) = refused_by_all(pool, "rounds", ["last"], **settings)
    for message in messages:
        assert f"The checkpoint {path} cannot be read" in message
        assert f"Go on from {folder / '2.ckpt'}" in message
