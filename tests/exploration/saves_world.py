"""Checkpoints: real saves and the real choice of one to resume from, on a model of disks."""

from __future__ import annotations

import copy
import functools
import itertools
import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch

from lightning_loco.distributed.watchdog import WorkerFailure
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.strategies.checkpoint import atomic_io, side_files
from lightning_loco.strategies.checkpoint.atomic_io import META, WholeFileIO, make_folder
from lightning_loco.strategies.checkpoint.main_file import MainFile, ShardedMainFile
from lightning_loco.strategies.checkpoint.reader import SavedRun, check_same_save, choose_save
from lightning_loco.strategies.checkpoint.side_files import (
    KEY,
    SHARDS,
    Manifest,
    SideFiles,
    new_stamp,
)
from lightning_loco.strategies.checkpoint.writer import Save, save_together
from tests.exploration.records import (
    Committing,
    Ended,
    Filed,
    Found,
    Left,
    Prepared,
    Removed,
    Saved,
    SaveFailed,
    SaveStarted,
)
from tests.exploration.scheduler import Fault, Task
from tests.exploration.world import World
from tests.harness.model_disk import ModelDisk

LAST, ALONE = Path("/run/last.ckpt"), Path("/run/weights.ckpt")
TIMEOUT_S = 5.0
MOST_LIVES = 4
PLACES = ("create", "sync", "replace", "remove", "all in")
"""Where faults may happen, if not everywhere: before changes of a disk, or in agreements."""

ERRORS = {"space": 28, "io": 5}
DISKS = {1: [[0]], 2: [[0, 0], [0, 1]], 3: [[0, 0, 0], [0, 1, 2], [0, 0, 1], [0, 1, 1]]}
"""Which worker has which disk, by the number of workers."""


class ModelIO(WholeFileIO):
    """The real one, which also reads from the model of a disk."""

    def __init__(self, disk: ModelDisk) -> None:
        self.disk = disk

    def load_checkpoint(self, path: Any, *_: Any, **__: Any) -> dict[str, Any]:
        with self.disk.open(path) as file:
            return copy.deepcopy(_loaded(file.read()))


@functools.lru_cache(maxsize=10_000)
def _loaded(content: bytes) -> dict[str, Any]:
    """Load the content of a file; most are read many times."""
    return torch.load(BytesIO(content), weights_only=True)  # type: ignore[no-any-return]


class ModelGroup(WorkerGroup):
    """The workers of one life of a run, which agree through a table in memory.

    A rank that waits for one that was killed, or is late, gives up. A late one may find that all
    have sent what it waits for, although they have given up since.
    """

    def __init__(self, life: Life, rank: int) -> None:
        super().__init__(rank, life.world.num_workers, clock=life.world.clock)
        self.control = object()  # type: ignore[assignment]
        self._life, self._count = life, itertools.count()

    def _all_gather(self, message: bytes, label: str) -> list[bytes]:
        life, scheduler = self._life, self._life.world.scheduler
        sent = life.sent.setdefault(next(self._count), {})
        sent[self.worker] = message
        is_complete = lambda: len(sent) == self.num_workers  # noqa: E731
        has_all = scheduler.wait(f"all in {label}", is_complete, TIMEOUT_S)
        is_late = life.is_given_up and not life.world.settings["late_completes"]
        if not has_all or is_late:
            life.is_given_up = life.is_excused = True
            raise WorkerFailure(f"a worker is missing in {label}")
        return [sent[rank] for rank in range(self.num_workers)]


class ObservedSave(Save):
    """A save that writes down how far it has come."""

    history: Any = None
    rank = 0

    def write_shared(self, staged: bool) -> None:
        self.history.add(Prepared(self.files.path, self.stamp))
        super().write_shared(staged)

    def commit(self, staged: bool, before: list[str], workers: list[int]) -> None:
        self.history.add(Committing(self.files.path, self.stamp, self.rank, tuple(before)))
        super().commit(staged, before, workers)


class ObservedFiles(SideFiles):
    """Side files that write down when a worker begins to write its own."""

    history: Any = None

    def save(self, stamp: str, worker: int | None, content: dict[str, Any]) -> None:
        if worker is not None:
            self.history.add(Filed(stamp, worker))
        super().save(stamp, worker, content)


class Life:
    """One life of a run: its workers start together, and save until they have done their part.

    Attributes:
        name: Its name.
        sent: What each rank has sent in each agreement.
        is_given_up: Whether a rank has waited in vain.
        is_excused: Whether something has happened to it, so that its saves may fail.
        done: Ranks that have ended, with whether they have done their part.
        tasks: Its tasks, by host.
    """

    def __init__(self, world: SavesWorld, run: str, number: int, rounds: int) -> None:
        self.world, self.run, self.name = world, run, f"{run}{number}"
        self.rounds = rounds
        self.sent: dict[int, dict[int, bytes]] = {}
        self.is_given_up = self.is_excused = False
        self.done: dict[int, bool] = {}
        self.hosts = [f"{self.name}.{rank}" for rank in range(world.num_workers)]
        self.tasks: dict[str, Task] = {}
        world.order.append(self)

    def start(self) -> None:
        """Start its workers."""
        for rank, host in enumerate(self.hosts):
            work = functools.partial(self._run, rank)
            self.tasks[host] = self.world.scheduler.start(host, work, host)

    def is_at(self, host: str, place: str) -> bool:
        """Whether a worker is at one of :data:`PLACES`."""
        return self.tasks[host].why.startswith(place)

    def _run(self, rank: int) -> None:
        try:
            self.done[rank] = self._train(rank)
        except (OSError, RuntimeError, ValueError):
            self.done[rank] = False
        finally:
            self.done.setdefault(rank, False)

    def _train(self, rank: int) -> bool:
        world = self.world
        group, io = ModelGroup(self, rank), ModelIO(world.disk_of(rank))
        step = resume(world, group, io)
        older: str | None = None
        for number in range(self.rounds):
            step += 1
            paths = [LAST]
            if number % 2 == 1 and world.settings["steps_too"]:
                paths.append(LAST.with_name(f"{self.name}-{step}.ckpt"))
            for path in paths:
                try:
                    self._save(group, io, str(path), step)
                except OSError:
                    if not world.settings["goes_on"]:
                        raise
            if rank == 0 and world.settings.get("saves_alone", False):
                self._save_alone(io, step)
            if len(paths) > 1:
                if older is not None and (rank == 0 or world.disk_of(rank) is not world.disks[0]):
                    world.history.add(Removed(older))
                    io.remove_checkpoint(older)
                    SideFiles(io, older).remove()
                older = str(paths[1])
        return True

    def _save_alone(self, io: ModelIO, step: int) -> None:
        """Write a file without side files, as worker 0 does when there is no fit."""
        world = self.world
        try:
            io.save_checkpoint({"step": step}, ALONE)
        except OSError as error:
            text = f"{type(error).__name__}: {error}"
            world.history.add(
                SaveFailed(self.name, 0, str(ALONE), "", text, False, self.is_excused)
            )

    def _save(self, group: WorkerGroup, io: ModelIO, path: str, step: int) -> None:
        world, rank = self.world, group.worker
        history = world.history
        _, stamp = group.gather_from_ranks([path, new_stamp(step)], "a save")[0]
        history.add(SaveStarted(self.name, rank, path, stamp))
        others = world.others_of(self)
        files = ObservedFiles(io, path)
        files.history = history
        manifest = Manifest(stamp, world.num_workers, "None", {}, True)
        main = {"step": step, KEY: manifest.state_dict()}
        is_folder = world.settings["form"] == "folder"
        strategy: Any = SimpleNamespace(checkpoint_io=io)
        form = ShardedMainFile(strategy, saves_folders=True) if is_folder else MainFile(strategy)
        write = form.writer(main, None)
        own = {"engine": {"step": step, "statistics": {}}, "position": {}}
        save = ObservedSave(files, stamp, own, {"shared": step}, write)
        save.history, save.rank = history, rank
        to_shared = functools.partial(save.to_shared_folder, num_workers=world.num_workers)
        try:
            if is_folder:
                main[SHARDS] = {"shard": (0, 0), f"shard{step}": (0, 0)}
                with group.errors_shared("writing the shards"):
                    if rank == 0:
                        write_shards(io.disk, Path(files.staged_main(stamp)), step)
            decide = save.to_private_folders if world.is_private else to_shared
            has_written = save_together(decide, group)
        except (OSError, RuntimeError) as error:
            is_excused = self.is_excused or bool(others) or world.others_of(self) != others
            text = f"{type(error).__name__}: {error}"
            is_of_all = not isinstance(error, WorkerFailure)
            history.add(SaveFailed(self.name, rank, path, stamp, text, is_of_all, is_excused))
            raise
        history.add(Saved(self.name, rank, path, stamp, world.num_workers))
        if has_written and not others and not world.others_of(self):
            names = tuple(all_names(io.disk, Path(f"{path}.loco")))
            history.add(Left(path, stamp, tuple(files.stamps()), names))


def write_shards(disk: ModelDisk, folder: Path, step: int) -> None:
    """Write files to a folder as ``write_folder`` does; one has a name of this save alone."""
    make_folder(disk, folder)
    for name in ("shard", f"shard{step}"):
        with disk.create(folder / name) as file:
            torch.save(step, file)
            disk.sync_file(file)
        disk.sync(folder)


def all_names(disk: ModelDisk, folder: Path) -> Iterator[str]:
    """Yield all paths in a folder."""
    for name in sorted(disk.names_in(folder)):
        yield name
        yield from (f"{name}/{below}" for below in all_names(disk, folder / name))


def resume(world: SavesWorld, group: WorkerGroup, io: ModelIO) -> int:
    """Read the newest checkpoint as a run that resumes; return its step, 0 without one."""
    path, writers = str(LAST), None
    if world.is_private:
        own = path if io.disk.exists(path) else None
        has_saves = any(saved.path == path for saved in world.history.of(Saved))
        try:
            chosen = choose_save(group, io, own)
        except ValueError as error:
            world.history.add(Found("a run", path, "", str(error)))
            raise
        if chosen is None:
            if has_saves:  # else another run may have saved while this worker was suspended
                world.history.add(Found("a run", path, "", ""))
            return 0
        path, writers = chosen.path, chosen.writers
    found = read(world, io, path, group.worker, writers, "a run")
    if not world.is_private:
        check_same_save(group, found or {}, path)
    if found is None:
        return 0
    if isinstance(found.get("error"), Exception):
        raise found["error"]
    return int(found["step"])


def read(
    world: SavesWorld,
    io: ModelIO,
    path: str,
    worker: int,
    writers: set[int] | None,
    reader: str,
) -> dict[str, Any] | None:
    """Read a checkpoint as a worker that resumes, and write down what it has found."""
    disk, stamp = io.disk, ""
    if not disk.exists(path):
        world.history.add(Found(reader, path, "", ""))
        return None
    try:
        main = io.load_checkpoint(f"{path}/{META}" if disk.is_dir(path) else path)
        stamp, step = main[KEY]["stamp"], main["step"]
        saved = SavedRun(main[KEY], SideFiles(io, path), path, worker, 0, True, writers)
        steps = {step, saved.own["engine"]["step"], saved.own["engine"]["shared"]}
        if disk.is_dir(path):
            steps |= {io.load_checkpoint(f"{path}/{name}") for name in ("shard", f"shard{step}")}
        error = "" if steps == {step} else f"it has parts of the steps {steps}"
    except Exception as raised:
        error, main = f"{type(raised).__name__}: {raised}", {"error": raised}
    world.history.add(Found(reader, path, stamp, error))
    return main


class SavesWorld(World):
    """Runs save to the same path, are killed, suspended and started again; disks fail and crash.

    At the end one more run resumes and saves, and another one resumes from that.
    """

    name = "saves"
    covered = (
        "lightning_loco.strategies.checkpoint.writer",
        "lightning_loco.strategies.checkpoint.side_files",
        "lightning_loco.strategies.checkpoint.atomic_io",
        "lightning_loco.strategies.checkpoint.reader",
    )
    limit_s: ClassVar[float] = 300.0
    max_events: ClassVar[int] = 20_000

    @classmethod
    def draw(cls, draw: random.Random) -> dict[str, Any]:
        workers = draw.choice([1, 2, 2, 3])
        disks = draw.choice(DISKS[workers])
        is_private = len({*disks}) > 1 or draw.random() < 0.2
        kinds = ("kill", "freeze", "crash", "space", "io")
        drawn = {
            "disks": disks,
            "is_private": is_private,
            "form": "file" if is_private else draw.choice(["file", "folder"]),
            "runs": 1 if is_private else draw.choice([1, 1, 2]),
            "rounds": draw.choice([2, 3, 4]),
            "steps_too": draw.random() < 0.5,
            "goes_on": draw.random() < 0.5,
            "late_completes": draw.random() < 0.7,
            "peek_every": draw.choice([1, 4, 16]),
            "crash_seed": draw.randrange(1000),
            "faults": [kind for kind in kinds if draw.random() < 0.5],
            "at": draw.choice(["", "", *PLACES]),
            "has_first": draw.random() < 0.3,
            "saves_alone": draw.random() < 0.2,
        }
        # Situations that are rare otherwise.
        wanted: dict[str, Any] = {}
        focus = draw.choice(["", "", "", "two", "two", "suspended", "errors"])
        if focus == "two":  # they replace the main file at the same time, or one after a freeze
            wanted = {"disks": [0] * draw.choice([1, 1, 2]), "runs": 2, "is_private": False}
            wanted |= {"form": draw.choice(["file", "folder"]), "has_first": True, "rounds": 2}
            wanted |= {"steps_too": False, "peek_every": 4}
            wanted |= {"faults": ["freeze"], "at": draw.choice(["", "create", "replace", "all in"])}
        elif focus == "suspended":  # one is, and learns when others have saved that all had agreed
            wanted = {"disks": draw.choice([[0, 1], [0, 1, 1]]), "is_private": True, "runs": 1}
            wanted |= {"form": "file", "late_completes": True, "at": "all in", "faults": ["freeze"]}
        elif focus == "errors":  # and the run goes on
            wanted = {"faults": sorted(ERRORS), "goes_on": True, "steps_too": False}
        return drawn | wanted

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self.is_private: bool = settings["is_private"]
        self.num_workers = len(settings["disks"])
        self.disks = [ModelDisk() for _ in {*settings["disks"]}]
        self.lives: dict[str, list[Life]] = {}
        self.order: list[Life] = []  # all of them, as they have begun
        self.failing: dict[str, int] = {}
        self.killed: set[str] = set()
        self.is_calm = self.is_peeking = False
        self._draw = random.Random(settings["crash_seed"])
        self._changes = 0
        self._patches = ExitStack()
        for disk in self.disks:
            disk.make_folder(LAST.parent)
            disk.sync("/")
            disk.before = self._before

    def disk_of(self, rank: int) -> ModelDisk:
        """Return the disk of a worker."""
        return self.disks[self.settings["disks"][rank]]

    # ------------------------------------------------------------------------- a run

    def start(self) -> None:
        self.clock = self.scheduler.clock()
        self.scheduler.after_event = self._go_on
        numbers = itertools.count(1)
        secrets = SimpleNamespace(token_hex=lambda _: f"{next(numbers):08x}")
        for module in (atomic_io, side_files):
            self._patches.enter_context(mock.patch.object(module, "secrets", secrets))
        if self.settings.get("has_first", False):
            self._start_life("x", 1)
        else:
            self._start_runs()
        self.scheduler.start("the end", self._finish)

    def _start_runs(self) -> None:
        for run in "ab"[: self.settings["runs"]]:
            self._start_life(run)

    def _start_life(self, run: str, rounds: int | None = None) -> Life:
        lives = self.lives.setdefault(run, [])
        for life in lives[-1:]:  # what is frozen cannot be ended: it goes on when it returns
            for host in life.hosts:
                if not self.scheduler.is_frozen(host):
                    self._kill(host)
        found = Life(self, run, len(lives) + 1, rounds or self.settings["rounds"])
        lives.append(found)
        found.start()
        return found

    def _kill(self, host: str) -> None:
        self.killed.add(host)
        self.scheduler.kill(host)

    def is_running(self, life: Life) -> bool:
        """Whether a worker of it goes on, or may go on."""
        return any(
            rank not in life.done and host not in self.killed
            for rank, host in enumerate(life.hosts)
        )

    def others_of(self, life: Life) -> list[str]:
        """Return the other lives that may write now, or have begun to since ``life`` began."""
        own = self.order.index(life)
        return [
            one.name
            for number, one in enumerate(self.order)
            if one is not life and (self.is_running(one) or number > own)
        ]

    def has_ended(self, run: str) -> bool:
        """Whether the last life of a run has done its part, or no other one follows."""
        life = self.lives[run][-1]
        has_done = len(life.done) == self.num_workers and all(life.done.values())
        return has_done or (len(self.lives[run]) >= MOST_LIVES and not self.is_running(life))

    def _go_on(self) -> None:
        if "a" not in self.lives:
            if not self.has_ended("x"):
                return
            self._start_runs()
        if not self.is_calm and all(map(self.has_ended, "ab"[: self.settings["runs"]])):
            self.is_calm = self.scheduler.is_prompt = True
            self.failing.clear()
            for lives in self.lives.values():
                for host in (host for life in lives for host in life.hosts):
                    self.scheduler.thaw(host)

    def _finish(self) -> None:
        """Resume once more when all others have ended, save, and resume from that."""
        everyone = [life for lives in self.lives.values() for life in lives]
        wait = self.scheduler.wait
        wait("the last fault", lambda: self.is_calm)
        everyone = [life for lives in self.lives.values() for life in lives]
        wait("all to end", lambda: not any(map(self.is_running, everyone)))
        for run, rounds in (("y", 1), ("z", 0)):
            life = Life(self, run, 1, rounds)
            self.lives[run] = [life]
            life.start()
            wait("the last runs", lambda life=life: not self.is_running(life))  # type: ignore[misc]
            is_done = len(life.done) == self.num_workers and all(life.done.values())
            self.history.add(Ended(life.name, 0, "" if is_done else "it failed", 0.0))

    # ------------------------------------------------------------------------- the disks

    def _before(self, change: str) -> None:
        """Let others go on before a change of a disk, or let the change fail."""
        if not self.scheduler.is_in_task or self.is_peeking:
            return
        host = self.scheduler.current.host
        self.scheduler.wait(change)
        self._changes += 1
        if not self.is_private and self._changes % self.settings["peek_every"] == 0:
            self._peek(self.disks, "peek")
        if (number := self.failing.pop(host, None)) is not None:
            raise OSError(number, "injected")

    def _peek(self, disks: list[ModelDisk], reader: str) -> None:
        """Read the checkpoints of a disk that all share, as each worker would."""
        self.is_peeking = True
        confirmed = dict.fromkeys(one.path for one in self.history.of(Saved))
        for path in confirmed:
            for worker in range(self.num_workers):
                read(self, ModelIO(disks[0]), path, worker, None, reader)
        if disks[0].exists(ALONE):
            try:
                ModelIO(disks[0]).load_checkpoint(ALONE)
            except Exception as error:
                self.history.add(Found(reader, str(ALONE), "", f"{type(error).__name__}: {error}"))
        self.is_peeking = False

    def _crash(self, number: int) -> None:
        """Let a machine fail: its disk has one of the contents that are possible then."""
        before = self.disks[number]
        for life in [life for lives in self.lives.values() for life in lives]:
            for rank, host in enumerate(life.hosts):
                if self.settings["disks"][rank] == number and rank not in life.done:
                    life.is_excused = True
                    self._kill(host)
        self.is_peeking = True
        outcomes = [*before.crashes()]
        self.is_peeking = False
        if not self.is_private:
            for outcome in outcomes:
                self._peek([outcome], "a crash")
        self.disks[number] = after = self._draw.choice(outcomes)
        after.before = self._before

    # ------------------------------------------------------------------------- faults

    def faults(self) -> Mapping[str, Fault]:
        if self.is_calm:
            return {}
        kinds, found = self.settings["faults"], dict[str, Fault]()
        scheduler, at = self.scheduler, self.settings.get("at", "")
        for run, lives in self.lives.items():
            life = lives[-1]
            is_broken = any(host in self.killed for host in life.hosts) or False in [
                *life.done.values()
            ]
            is_broken |= any(map(scheduler.is_frozen, life.hosts)) and life.is_given_up
            if is_broken and len(lives) < MOST_LIVES:
                found[f"restart {run}"] = Fault(functools.partial(self._start_life, run), True)
            for one in lives:
                for rank, host in enumerate(one.hosts):
                    if rank in one.done or host in self.killed:
                        continue
                    if scheduler.is_frozen(host):
                        found[f"thaw {host}"] = Fault(functools.partial(scheduler.thaw, host), True)
                        continue
                    for kind in kinds if one.is_at(host, at) else ():
                        if kind != "crash":
                            act = functools.partial(self._harm, one, host, kind)
                            found[f"{kind} {host}"] = Fault(act)
        if "crash" in kinds:
            for number in range(len(self.disks)):
                found[f"crash {number}"] = Fault(functools.partial(self._crash, number))
        return found

    def _harm(self, life: Life, host: str, kind: str) -> None:
        life.is_excused = True
        if kind in ERRORS:
            self.failing[host] = ERRORS[kind]
        elif kind == "kill":
            self._kill(host)
        else:
            self.scheduler.freeze(host)

    def close(self) -> None:
        self._patches.close()
