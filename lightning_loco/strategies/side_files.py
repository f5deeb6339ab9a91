"""What lies beside a checkpoint: one file per worker and one for what all workers share.

``model.ckpt`` is an ordinary Lightning checkpoint. ``model.ckpt.loco/<stamp>/`` holds
``worker_00000.pt`` and so on, and ``shared.pt``. The main file is written last and names its stamp,
so an interrupted save never spoils the checkpoint that was there before.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem

_SHARED = "shared.pt"


def new_stamp(steps: int) -> str:
    """A name for one save that no other save has.

    Args:
        steps: Local steps made so far.
    """
    return f"step{steps}-{secrets.token_hex(4)}"


class SideFiles:
    """The side files of one checkpoint.

    Args:
        io: How files are written: to a temporary name, then renamed.
        path: The main file.
    """

    def __init__(self, io: CheckpointIO, path: str | Path) -> None:
        self._io = io
        self._path = str(path)

    def save(
        self, stamp: str, worker: int, own: dict[str, Any], shared: dict[str, Any] | None
    ) -> None:
        """Write one worker's part of a save.

        Args:
            stamp: The name of this save.
            worker: Who writes.
            own: What is this worker's alone.
            shared: What all workers share, which worker 0 writes; None if there is nothing.
        """
        folder = _folder(self._path) / stamp
        self._io.save_checkpoint(own, str(folder / _file_of(worker)))
        if shared is not None and worker == 0:
            self._io.save_checkpoint(shared, str(folder / _SHARED))

    def load(
        self, stamp: str, worker: int, has_shared: bool, weights_only: bool | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read what one worker needs.

        Args:
            stamp: The name of the save, from the main file.
            worker: Who reads.
            has_shared: Whether there is something that all workers share.
            weights_only: False to unpickle any object, as for the main file.

        Returns:
            The worker's own part, and the shared one: empty if there is none.

        Raises:
            FileNotFoundError: Naming the first file that does not exist.
        """
        folder = _folder(os.path.realpath(self._path)) / stamp
        names = [_file_of(worker)] + ([_SHARED] if has_shared else [])
        files = get_filesystem(str(folder))
        for name in names:
            if not files.exists(str(folder / name)):
                raise FileNotFoundError(
                    f"The checkpoint {self._path} needs {folder / name}, which does not exist. "
                    f"Keep the folder {_folder(self._path).name} beside the checkpoint, on a file "
                    "system that all machines share."
                )
        own, *shared = (
            self._io.load_checkpoint(str(folder / name), weights_only=weights_only is not False)
            for name in names
        )
        return own, shared[0] if shared else {}

    def remove(self, keep: str | None = None) -> None:
        """Delete all saves, or all but one stamp."""
        folder = _folder(self._path)
        if keep is None:
            self._io.remove_checkpoint(str(folder))
            return
        files = get_filesystem(str(folder))
        if files.exists(str(folder)):
            for entry in files.ls(str(folder), detail=False):
                if Path(entry).name != keep:
                    self._io.remove_checkpoint(entry)


def _folder(path: str) -> Path:
    return Path(f"{path}.loco")


def _file_of(worker: int) -> str:
    return f"worker_{worker:05d}.pt"
