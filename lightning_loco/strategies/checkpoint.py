"""What lies beside a checkpoint: each worker's own state, so that a run resumes exactly.

``model.ckpt`` is an ordinary Lightning checkpoint of the consensus. ``model.ckpt.loco/<stamp>/``
holds one file per worker and one for what all workers share. The main file is written last and
names its stamp, so an interrupted save never spoils the checkpoint that was there before.
"""

from __future__ import annotations

import os
import random
import secrets
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem

from lightning_loco.algorithms import Algorithm
from lightning_loco.rounds.engine import Engine

KEY = "lightning_loco"
_FORMAT = 1
_PER_WORKER = ("loops", "optimizer_states", "lr_schedulers", "MixedPrecision", "HalfPrecision")


def new_stamp(steps: int) -> str:
    """A name for one save that no other save has."""
    return f"step{steps}-{secrets.token_hex(4)}"


def describe(engine: Engine, stamp: str) -> dict[str, Any]:
    """The entry of the main file that ties it to its side files: plain values only."""
    return {
        "format": _FORMAT,
        "stamp": stamp,
        "num_workers": engine.group.num_workers,
        "algorithm": type(engine.algorithm).__name__,
        "settings": engine.settings.describe(),
        "round_index": engine.round_index,
    }


def save_worker(
    io: CheckpointIO, engine: Engine, checkpoint: dict[str, Any], path: str, stamp: str
) -> None:
    """Write this worker's side file, and from worker 0 the shared one.

    Args:
        io: How files are written: to a temporary name, then renamed.
        engine: The engine of this worker.
        checkpoint: What Lightning has collected on this worker.
        path: The main file.
        stamp: The name of this save.
    """
    state = engine.state_dict()
    shared = {}
    if engine.algorithm.replicated:
        shared = {"state": state.pop("state"), "pending": state.pop("pending")}
    content = {
        "engine": state,
        "random": random_state(),
        "lightning": {key: checkpoint[key] for key in _PER_WORKER if key in checkpoint},
    }
    folder = _folder(path) / stamp
    io.save_checkpoint(content, str(folder / _name(engine.group.worker)))
    if shared and engine.group.worker == 0:
        io.save_checkpoint(shared, str(folder / "shared.pt"))


def load_worker(
    io: CheckpointIO,
    entry: dict[str, Any],
    algorithm: Algorithm,
    worker: int,
    num_workers: int,
    path: str,
) -> dict[str, Any]:
    """Read the side files of one worker.

    Raises:
        ValueError: If the checkpoint does not fit this run, or its side files are missing.
    """
    weights_only = (
        "To start a new run from its weights alone, use "
        "YourModule.load_from_checkpoint(path) and fit without ckpt_path."
    )
    if entry["algorithm"] != type(algorithm).__name__:
        raise ValueError(
            f"The checkpoint {path} was written by {entry['algorithm']} and cannot be resumed with "
            f"{type(algorithm).__name__}. {weights_only}"
        )
    if entry["num_workers"] != num_workers:
        raise ValueError(
            f"The checkpoint {path} was written by {entry['num_workers']} workers and this run has "
            f"{num_workers}; each worker resumes from its own state. {weights_only}"
        )
    folder = _folder(os.path.realpath(path)) / entry["stamp"]
    names = [_name(worker)] + (["shared.pt"] if algorithm.replicated else [])
    for name in names:
        if not get_filesystem(str(folder)).exists(str(folder / name)):
            raise ValueError(
                f"The checkpoint {path} needs {folder / name}, which does not exist. Keep the "
                f"folder {_folder(path).name} beside the checkpoint, on a file system that all "
                f"machines share. {weights_only}"
            )
    content = io.load_checkpoint(str(folder / names[0]), weights_only=True)
    if algorithm.replicated:
        content["engine"].update(io.load_checkpoint(str(folder / names[1]), weights_only=True))
    return content


def forget_finished_epoch(loaded: dict[str, Any]) -> bool:
    """Drop the position in the data when it is the end of an epoch.

    Lightning would put the loader at its end again and count an epoch without batches. When the
    epoch is already counted, it would also take the next one for its last batch.

    Returns:
        Whether Lightning goes straight on with the next epoch, without ending the present one.
    """
    loop = loaded["loops"]["fit_loop"]
    batches, epochs = loop["epoch_loop.batch_progress"], loop["epoch_progress"]
    if not batches["is_last_batch"]:
        return False
    loop["state_dict"].pop("combined_loader", None)
    batch_ended = batches["current"]["completed"] == batches["current"]["ready"]
    epoch_ended = epochs["current"]["processed"] == epochs["current"]["ready"]
    if epoch_ended:
        batches["is_last_batch"] = False
        batches["current"] = dict.fromkeys(batches["current"], 0)
        for counts in (epochs["current"], epochs["total"]):
            counts["completed"] = counts["processed"]
    return epoch_ended or not batch_ended


def remove_side_files(io: CheckpointIO, path: str, keep: str | None = None) -> None:
    """Delete the side files of a checkpoint, all or all but one stamp."""
    folder = _folder(path)
    files = get_filesystem(str(folder))
    if keep is None:
        io.remove_checkpoint(str(folder))
        return
    if files.exists(str(folder)):
        for entry in files.ls(str(folder), detail=False):
            if Path(entry).name != keep:
                io.remove_checkpoint(entry)


def random_state() -> dict[str, Any]:
    """The state of all random number generators, as plain values and tensors."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    try:
        import numpy as np
    except ImportError:
        return state
    name, keys, *rest = np.random.get_state(legacy=True)
    state["numpy"] = [name, np.asarray(keys).tolist(), *rest]
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put all random number generators where :func:`random_state` found them."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        import numpy as np

        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))


def _folder(path: str) -> Path:
    return Path(f"{path}.loco")


def _name(worker: int) -> str:
    return f"worker_{worker:05d}.pt"
