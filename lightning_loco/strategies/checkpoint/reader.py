"""Reading a checkpoint: the main file, the choice among several saves, a worker's side files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_loco.distributed import WorkerGroup
from lightning_loco.model.participant import LocalParticipant
from lightning_loco.model.worker import EarlierRun
from lightning_loco.schedules.schedule import reduce_ratio
from lightning_loco.strategies.checkpoint.atomic_io import (
    META,
    check_kind,
    damage_of,
    is_archive,
    local_path,
)
from lightning_loco.strategies.checkpoint.position import (
    READERS,
    DataShares,
    Position,
    take_rank_state,
)
from lightning_loco.strategies.checkpoint.shard_folder import OWN_SHARDS, SHARED_SHARDS, damage_in
from lightning_loco.strategies.checkpoint.side_files import (
    AFTER_ERROR,
    KEY,
    NEW_RUN,
    SHARDS,
    Manifest,
    SideFiles,
    errors_naming,
    plain_parts,
    steps_of,
)

_REQUEUED = re.compile(r"hpc_ckpt_(\d+)\.ckpt")
_LABEL = "the choice of a checkpoint"
READING = "reading the checkpoint"
"""What all ranks wait for while each reads, in words."""

_NO_STAMP = ""
"""Instead of a stamp: a main file without side files."""

# ----------------------------------------------------------------------- the main file


def newest_requeued(path: str | Path) -> str | Path:
    """Return the checkpoint to resume from, if a requeue of SLURM was killed while it saved.

    Lightning takes the highest number in its folder, even of side files without a main file.
    If ``path`` is such a name, the newest complete checkpoint of a requeue there replaces it.
    """
    local = local_path(path)
    if local is None or local.exists() or not _REQUEUED.fullmatch(local.name):
        return path
    found = [file for file in local.parent.iterdir() if _REQUEUED.fullmatch(file.name)]
    if not found:
        return path
    last = max(found, key=lambda file: int(file.stem.rpartition("_")[2]))
    rank_zero_info(f"{path} was not completed. Going on from {last}.")
    return last


def resumed_by_all(group: WorkerGroup, path: str | Path | None) -> str | Path | None:
    """Return the path, or None; ValueError on all ranks if only some of them have a path."""
    given = group.gather_from_ranks(None if path is None else str(path), READING)
    without = [name for name, one in zip(group.rank_names, given, strict=True) if one is None]
    if 0 < len(without) < len(given):
        raise ValueError(
            f"Some ranks resume from {next(filter(None, given))}, and {', '.join(without)} from no "
            "checkpoint. Pass the same ckpt_path on all ranks; with 'last' or 'hpc' all machines "
            "must see the same files."
        )
    return path


def check_same_save(group: WorkerGroup, loaded: dict[str, Any], path: str | Path) -> None:
    """Raise ValueError on all ranks if they have read different checkpoints."""
    stamp = loaded[KEY]["stamp"] if KEY in loaded else f"step {loaded.get('global_step')}"
    # Also on one machine: a run that saves meanwhile replaces the file between two reads.
    first, *others = group.gather_from_ranks([stamp, str(path)], READING)
    for name, other in zip(group.rank_names[1:], others, strict=True):
        if other[0] != first[0]:
            raise ValueError(
                f"The ranks resume from different saves: {group.rank_names[0]} from {first[0]} in "
                f"{first[1]}, and {name} from {other[0]} in {other[1]}. Pass the same ckpt_path on "
                "all ranks."
            )


def read_main(read: Callable[[], dict[str, Any]], path: str | Path) -> dict[str, Any]:
    """Read a main file by ``read``; ValueError, which describes the damage, if it is damaged."""
    if (local := local_path(path)) is not None:
        check_kind(local)
    try:
        loaded = read()
    except Exception as error:  # damaged files raise errors of many types
        if isinstance(error, IsADirectoryError) and (Path(path) / META).exists():
            raise ValueError(_written_in_parts(Path(path))) from error
        # Errors of the file system say what is wrong, and that is not damage.
        if isinstance(error, FileNotFoundError) or getattr(error, "filename", None) is not None:
            raise
        is_local = local is not None and local.is_file()
        if (found := damage_of(path)) is None and (is_archive(path) or not is_local):
            raise
        raise ValueError(f"The checkpoint {path} cannot be read: {found or error}.") from error
    # torch.load does not compare the checksums of tensors.
    if (found := damage_of(path)) is not None:
        raise ValueError(f"The checkpoint {path} is damaged: {found}.")
    return loaded


def _written_in_parts(folder: Path) -> str:
    """Say which strategy has written a checkpoint that is a folder."""
    is_own = SHARDS.encode() in b"".join(plain_parts(str(folder / META)))
    writer = "Loco- or DecoupledModelParallelStrategy" if is_own else "ModelParallelStrategy"
    return (
        f"The checkpoint {folder} is a folder, to which the ranks of {writer} have written shards. "
        "Use it with that strategy."
    )


@contextmanager
def other_one_named(
    io: CheckpointIO, path: str | Path, worker: int | None = None, has_shards: bool = False
) -> Iterator[None]:
    """A context that adds to a ValueError which other checkpoint in the folder can be used.

    The side file of ``worker`` must exist for it, or of all workers if None; ``has_shards`` says
    whether the ranks of a worker hold shards.
    """
    try:
        yield
    except ValueError as error:
        other = _other_one(io, path, worker, has_shards)
        raise ValueError(f"{error} {other}".rstrip()) from error


def _other_one(io: CheckpointIO, path: str | Path, worker: int | None, has_shards: bool) -> str:
    local = local_path(path)
    if local is None:
        return ""
    own = os.path.realpath(local)
    others: list[tuple[float, Path]] = []
    for file in local.parent.glob("*.ckpt"):
        with suppress(OSError):  # deleted meanwhile
            if os.path.realpath(file) != own:
                main = file / META if has_shards and file.is_dir() else file
                others.append((main.stat().st_mtime, file))
    for _, file in sorted(others, reverse=True):
        if _is_intact(io, file, worker, has_shards):
            return f"Go on from {file}, the newest other checkpoint in its folder that is intact."
    return f"No other checkpoint in {local.parent} is intact."


def _is_intact(io: CheckpointIO, path: Path, worker: int | None, has_shards: bool) -> bool:
    """Return whether a run can resume from a checkpoint.

    Of side files only the ends are checked, and of shards the lengths.
    """
    try:
        main = path / META if has_shards and path.is_dir() else path
        if not main.is_file() or damage_of(main) is not None:
            return False
        content = torch.load(main, map_location="cpu", weights_only=True, mmap=True)
        if damage_in(str(path), content.get(SHARDS, {}), reads_all=False) is not None:
            return False
        if KEY in content:
            if (SHARDS in content) != has_shards:
                return False
            manifest, files = Manifest.from_state_dict(content[KEY], path), SideFiles(io, path)
            writers = range(manifest.num_workers) if worker is None else [worker]
            for writer in [*writers, None] if manifest.has_shared else writers:
                file = files.find(manifest.stamp, writer)
                if damage_of(file, reads_all=False) is not None:
                    return False
                if has_shards and not _has_all_shards(files.shards(manifest.stamp, writer), file):
                    return False
        return "loops" in content and ("optimizer_states" in content or main != path)
    except Exception:  # damaged files raise errors of many types
        return False


def _has_all_shards(folder: str, file: str) -> bool:
    """Return whether the files that a side file describes have the length that it says."""
    content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    state = content.get("engine", content)
    return damage_in(folder, state.get(OWN_SHARDS, state.get(SHARED_SHARDS, {})), False) is None


# --------------------------------------------- the choice of a save on private disks

Found = dict[str, list[int]]
"""The stamps of saves on a worker's disk, with the workers whose side files are there."""


class ChosenSave(NamedTuple):
    """The save that all workers resume from, whose main file on this worker's disk is ``path``.

    ``writers`` are the workers whose side files are on a disk.
    """

    path: str
    writers: set[int]


def path_on_own_disk(path: str | Path) -> str:
    """Return the absolute path of a file on this machine; ValueError for a remote one."""
    local = local_path(path)
    if local is None:
        raise ValueError(
            f"checkpoint_folder='private' keeps checkpoints on each worker's own disk, and {path} "
            "is not on a disk. Use checkpoint_folder='shared' for it."
        )
    return str(local)


def choose_save(group: WorkerGroup, io: CheckpointIO, path: str | Path | None) -> ChosenSave | None:
    """Agree on the newest save that all workers have, and commit it if that was interrupted.

    All ranks must call it, with the main file that each would resume from, or None. Returns None if
    no rank has found one. ValueError on every rank, with a list of the saves of each worker, if
    they have none in common.
    """
    own = None if path is None else os.path.realpath(path_on_own_disk(path))
    named = [one for one in group.gather_from_ranks(own, _LABEL) if one is not None]
    if not named:
        return None
    where: dict[str, SideFiles] = {}
    found: Found = {}
    damaged: list[str] = []
    for name in _candidates(own, named):
        files = SideFiles(io, name)
        stamps = files.saves()
        if not stamps and os.path.exists(name):
            if (damage := damage_of(name)) is None:
                stamps = {_NO_STAMP}
            else:
                damaged.append(f"Worker {group.worker}'s {name} is damaged: {damage}.")
        for stamp in stamps:
            if stamp not in found:
                where[stamp], found[stamp] = files, files.workers_of(stamp) if stamp else []
    size, of_ranks = group.replica_size, group.gather_from_ranks(found, _LABEL)
    everyone = [_seen_by_all(of_ranks[i : i + size]) for i in range(0, len(of_ranks), size)]
    common = [stamp for stamp in found if all(stamp in theirs for theirs in everyone)]
    grades = {stamp: _grade(stamp, everyone) for stamp in common}
    stamp = max(common, key=lambda one: (grades[one], steps_of(one), one), default=_NO_STAMP)
    if not grades.get(stamp):
        lines = [
            _nothing_in_common(everyone, named[0]),
            *(["The ranks of a worker must see the same disk."] if size > 1 else []),
            *dict.fromkeys(sum(group.gather_from_ranks(damaged, _LABEL), [])),
        ]
        with other_one_named(io, own or named[0], group.worker) if damaged else nullcontext():
            raise ValueError(" ".join(lines))
    # A save that all have may be staged only, if the workers were killed before the rename.
    with group.errors_shared(_LABEL):
        if group.place == 0:
            where[stamp].commit_main(stamp)
    return ChosenSave(where[stamp].path, {n for found in everyone for n in found[stamp]})


def _candidates(own: str | None, named: Sequence[str]) -> list[str]:
    """Return the files to check: in this worker's folder, if it has one, under all names."""
    if own is None:
        return list(dict.fromkeys(named))
    folder = os.path.dirname(own)
    others = [os.path.join(folder, os.path.basename(name)) for name in named]
    return list(dict.fromkeys([own, *others]))


def _seen_by_all(ranks: Sequence[Found]) -> Found:
    """Return the saves that all ranks of a worker have found; on one disk they find the same."""
    first, *others = ranks
    return {
        stamp: [n for n in numbers if all(n in found[stamp] for found in others)]
        for stamp, numbers in first.items()
        if all(stamp in found for found in others)
    }


def _grade(stamp: str, everyone: Sequence[Found]) -> int:
    """Grade a save that all workers have.

    3 if each worker has its own side file; 2 if some have only worker 0's, because theirs are
    missing; 1 if there are no side files at all; 0 if a worker cannot use it.
    """
    if stamp == _NO_STAMP:
        return 1
    seen = [found[stamp] for found in everyone]
    if all(worker in numbers for worker, numbers in enumerate(seen)):
        return 3
    writers = {number for numbers in seen for number in numbers}
    mine = [worker if worker in writers else 0 for worker in range(len(seen))]
    return 2 * all(number in numbers for number, numbers in zip(mine, seen, strict=True))


def _nothing_in_common(everyone: Sequence[Found], path: str) -> str:
    parts = [
        f"worker {worker} has {_listed(found) or 'none'}" for worker, found in enumerate(everyone)
    ]
    return (
        f"checkpoint_folder='private', and there is no checkpoint {path} that all workers have on "
        f"their disks: {'; '.join(parts)}. Start each worker where it was, or copy the main file "
        f"and its folder {Path(path).name}.loco to the disks that lack them. {NEW_RUN}"
    )


def _listed(found: Found) -> str:
    newest_first = sorted(found, key=steps_of, reverse=True)
    return ", ".join(
        f"{stamp or 'a file without side files'} with the side files of worker "
        f"{', '.join(map(str, found[stamp])) or 'none'}"
        for stamp in newest_first
    )


# ------------------------------------------------------------------- a worker's own state


class SavedRun:
    """The run that wrote a checkpoint, and the state that this rank resumes from, ``own``.

    A worker that did not exist in that run reads the state of worker 0, and so does one whose own
    side file is missing, as all but worker 0's are after an error. A rank that its worker did not
    have takes the state of the first one. Both are new: ``is_new``. ``name`` is the file that this
    rank reads, of the worker ``worker``.

    ``entry`` is the manifest in the main file ``path``, which was read with ``weights_only``.
    ``writers`` are the workers whose side files exist; None if all must exist.
    ValueError if a file is missing, is damaged, belongs to another save, or is incomplete.
    """

    def __init__(
        self,
        entry: Any,
        files: SideFiles,
        path: str | Path,
        worker: int,
        place: int,
        weights_only: bool | None,
        writers: set[int] | None,
    ) -> None:
        manifest = Manifest.from_state_dict(entry, path)
        self._is_after_error = AFTER_ERROR in entry
        if writers is None and self._is_after_error:
            writers = {0}
        self.stamp, self.num_workers = manifest.stamp, manifest.num_workers
        self.algorithm, self._settings = manifest.algorithm, manifest.settings
        everyone = range(self.num_workers)
        self._missing = [] if writers is None else [n for n in everyone if n not in writers]
        is_new_worker = worker not in everyone or worker in self._missing
        self.worker = 0 if is_new_worker else worker
        self.name = files.path_of(self.stamp, self.worker)
        own, shared = files.load(self.stamp, self.worker, manifest.has_shared, weights_only)
        with errors_naming(self.name):
            own["engine"].update(shared)
            self.own = own
            self.replica_size = take_rank_state(own, place)
            self.is_new = is_new_worker or place >= self.replica_size
            if self.is_new:  # or the bytes of one worker would count twice
                own["engine"]["statistics"].update(bytes_sent=0, wait_s=0.0, spent={})
        # Each worker finds its own file; fewer workers than before would not miss the last one.
        if writers is None:
            files.find(self.stamp, self.num_workers - 1)

    def position(self) -> Position:
        """Return where the worker resumes; a new worker keeps its own random states."""
        found = Position(**self.own["position"])
        return found._replace(random=None) if self.is_new else found

    def shares(self) -> DataShares:
        """Return in what proportion its workers shared the data."""
        every = self._settings.get("sync_every")
        by_worker = reduce_ratio(every) if isinstance(every, list) else [1] * self.num_workers
        return DataShares(by_worker, self.replica_size, self.own.get(READERS, self.replica_size))

    def equals(self, engine: LocalParticipant) -> bool:
        """Return whether the present run has the same settings and workers."""
        return (
            self._has_same_workers(engine)
            and self.algorithm == type(engine.settings.algorithm).__name__
            and self._settings == engine.settings.describe()
        )

    def earlier_run(self, engine: LocalParticipant) -> EarlierRun:
        """Return the state for an engine with other settings or other workers."""
        is_same = self._has_same_workers(engine)
        return EarlierRun(self.own["engine"], self.algorithm, self._settings, is_same)

    def _has_same_workers(self, engine: LocalParticipant) -> bool:
        return self.num_workers == engine.worker.group.num_workers and not self._missing

    def missing(self) -> list[str]:
        """Describe which side files are missing."""
        if self._is_after_error:
            return ["worker 0 has saved its own model and state alone, after an error"]
        names = ", ".join(map(str, self._missing))
        return [f"the state of worker {names}, which is on no disk, is dropped"] if names else []
