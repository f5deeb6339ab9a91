"""The state of every worker beside a checkpoint of the consensus, in any training loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.rank_zero import rank_zero_warn

from lightning_loco.distributed.devices import CPU
from lightning_loco.engine.gathered_state import gather_state, own_state
from lightning_loco.model.participant import LocalParticipant
from lightning_loco.strategies.checkpoint.local_state import to_device
from lightning_loco.strategies.checkpoint.position import random_states, set_random_states
from lightning_loco.strategies.checkpoint.reader import READING, SavedRun
from lightning_loco.strategies.checkpoint.side_files import (
    KEY,
    Manifest,
    SideFiles,
    errors_naming,
    new_stamp,
)
from lightning_loco.strategies.checkpoint.writer import Save, save_together

_SAVING = "a checkpoint"


class WorkerFiles(NamedTuple):
    """Writes and reads the files of all workers; their folder has the name of the main file.

    All ranks must call its functions.

    Attributes:
        engine: The engine of this worker.
        io: Writes and reads single files.
    """

    engine: LocalParticipant
    io: CheckpointIO

    def save(
        self, path: str | Path, loop: dict[str, Any], write_main: Callable[[str, Any], None]
    ) -> None:
        """Write the files of all workers, and then the main file.

        Args:
            path: Of the main file; that of rank 0 counts.
            loop: State of this worker's training loop, such as its optimizers.
            write_main: Called on one rank with a path, and with an entry that must be under
                :data:`KEY` in what it writes there.

        Raises:
            OSError: On every rank, if one cannot write; the checkpoint before is still complete.
        """
        engine, group = self.engine, self.engine.worker.group
        names = [str(path), new_stamp(engine.worker.steps)]
        path, stamp = group.gather_from_ranks(names, _SAVING)[0]
        files = SideFiles(self.io, path)
        state = {**engine.state_dict()}
        random = group.gather_states_inside(random_states(), _SAVING)
        whole, shared = gather_state(state, engine.worker.replica), None
        if whole is not None and engine.settings.algorithm.replicated:
            entry = whole.pop("shared")
            shared = {"shared": entry} if group.worker == 0 else None
        own = None if whole is None else {"engine": whole, "loop": loop, "random": random}
        entry = Manifest.of(engine, stamp).state_dict()
        own, shared = to_device((own, shared), CPU)
        save = Save(files, stamp, own, shared, partial(_write, write_main, entry))
        save_together(partial(save.to_shared_folder, num_workers=group.num_workers), group)

    def load(self, path: str | Path, entry: Any, weights_only: bool | None) -> dict[str, Any]:
        """Resume the engine from the files of a save, and return the state of the training loop.

        With other settings or another number of workers, the state is used as far as it fits.

        Args:
            path: Of the main file, which was read with ``weights_only``.
            entry: What the main file has under :data:`KEY`.
            weights_only: False if there may be other objects than tensors and numbers.

        Raises:
            ValueError: On every rank, if a file is missing or damaged.
        """
        engine, group = self.engine, self.engine.worker.group
        files = SideFiles(self.io, path)
        with group.errors_shared(READING):
            run = SavedRun(entry, files, path, group.worker, 0, weights_only, None)
        with group.errors_shared(READING), errors_naming(run.name):
            is_same = run.equals(engine)
            if is_same:
                engine.load_state_dict(own_state(run.own["engine"], engine.worker.replica))
        notes = [] if is_same else engine.resume_from(run.earlier_run(engine))
        if not run.is_new and group.place < len(run.own["random"]):
            set_random_states(run.own["random"][group.place])
        if group.num_workers > run.num_workers:
            notes.append(
                f"{_workers(run.num_workers, group.num_workers)} new, with the optimizer and the "
                "position of worker 0"
            )
        elif group.num_workers < run.num_workers:
            notes.append(
                f"{_workers(group.num_workers, run.num_workers)} left out, with their optimizers "
                "and positions"
            )
        if notes and group.worker == group.place == 0:
            rank_zero_warn(
                f"Resumed from {path}, whose workers or settings are others "
                f"({run.num_workers} workers then, {group.num_workers} now): {'; '.join(notes)}."
            )
        loop: dict[str, Any] = run.own["loop"]
        return loop


def _workers(begin: int, end: int) -> str:
    """Name some workers, with a verb."""
    last = end - 1
    return f"worker {last} is" if begin == last else f"workers {begin} to {last} are"


def _write(write_main: Callable[[str, Any], None], entry: Any, path: str) -> None:
    write_main(path, {KEY: entry})
