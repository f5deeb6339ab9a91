"""Text as bytes, without a download: the Python standard library on this machine, or any file."""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset

# Third-party packages lie inside the library's folder; not every system ships its tests.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}

AnyWindows = TypeVar("AnyWindows", bound=Dataset[Tensor])


def standard_library(max_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the first bytes of the Python standard library's source, uint8, in order of paths.

    ValueError if this Python has no source files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    chunks, num_bytes = [], 0
    for file in sorted(files, key=lambda file: file.relative_to(root).as_posix()):
        if num_bytes >= max_bytes:
            break
        chunks.append(file.read_bytes())
        num_bytes += len(chunks[-1])
    if not chunks:
        raise ValueError(
            f"No Python source in {root}. Choose a text instead: data=text data.path=FILE."
        )
    return np.frombuffer(b"".join(chunks)[:max_bytes], dtype=np.uint8)


def text_file(path: str | Path, max_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the first bytes of a file, memory-mapped; ValueError if there are none to read."""
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(
            f"data.path must name one file, got {path!r}. Write several texts into one file first."
        )
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"data.path must name a file, and there is none at {file.absolute()}.")
    if file.stat().st_size == 0:
        raise ValueError(f"data.path names an empty file: {file.absolute()}.")
    try:
        text = np.memmap(file, dtype=np.uint8, mode="r")[:max_bytes]
    except PermissionError as error:
        raise ValueError(
            f"data.path names a file which this user may not read: {file.absolute()}."
        ) from error
    start = text[:65_536].tobytes()
    if b"\0" in start or start.startswith(b"\x1f\x8b"):
        raise ValueError(
            f"data.path names a file that is no text in UTF-8, but binary, compressed or UTF-16: "
            f"{file.absolute()}. Unpack it (gzip -d), or convert it (iconv -f UTF-16 -t UTF-8)."
        )
    return text


class Windows(Dataset[Tensor]):
    """Windows of ``context + 1`` bytes; neighbours share one, so each byte is predicted once.

    Args:
        text: Bytes, uint8 (L,).
        context: Bytes the model sees.
        stride: Distance between the starts of two windows; None means ``context``.
    """

    def __init__(
        self, text: np.ndarray[Any, np.dtype[np.uint8]], context: int, stride: int | None = None
    ) -> None:
        self.text = text
        self.context = context
        self.stride = stride or context

    def __len__(self) -> int:
        return max(0, (len(self.text) - self.context - 1) // self.stride + 1)

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"Window {index} of {len(self)}.")
        start = index * self.stride
        return torch.from_numpy(np.array(self.text[start : start + self.context + 1]))


class SeededShuffle(RandomSampler):
    """A shuffle that depends on the seed and the epoch only, so that a resumed run can repeat it.

    With several workers Lightning replaces it by a ``DistributedSampler``, which does the same.
    """

    def __init__(self, data_source: Sized, seed: int) -> None:
        super().__init__(data_source)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; called by Lightning at the start of each."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.data_source), generator=generator, device="cpu")
        return iter(order.tolist())


class ByteTextData(LightningDataModule):
    """Windows of bytes for next-byte prediction; the last part of the text is for validation.

    Args:
        path: File to train on; None takes the source of the Python standard library.
        batch_size: Windows per rank and local step, at least 1.
        context: Bytes per window, at least 1; the model's context or less.
        max_bytes: Use at most this much of the text.
        val_fraction: Share of the text, at its end, kept for validation, in (0, 1).
        val_bytes: Validate on at most this much of that part, in windows spread evenly over it.
        seed: Of the shuffle on a single rank; with several, Lightning's global seed decides.
        num_workers: Loader processes per rank; 0 loads in the training process.

    Raises:
        ValueError: If a number is outside its range; in ``setup``: if a text is missing or too
            small, or torchdata is missing.

    Example:
        >>> data = ByteTextData(batch_size=4, context=32)
        >>> data.setup("fit")
        >>> next(iter(data.train_dataloader())).shape
        torch.Size([4, 33])
    """

    def __init__(
        self,
        *,
        path: str | Path | None = None,
        batch_size: int = 8,
        context: int = 128,
        max_bytes: int = 20_000_000,
        val_fraction: float = 0.05,
        val_bytes: int = 65_536,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        counts = {
            "batch_size": batch_size,
            "context": context,
            "max_bytes": max_bytes,
            "val_bytes": val_bytes,
        }
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"data.{name} must be at least 1, got {count}.")
        if not 0 < val_fraction < 1:
            raise ValueError(
                f"data.val_fraction must lie between 0 and 1, got {val_fraction}. Try 0.05."
            )
        if num_workers < 0:
            raise ValueError(f"data.num_workers must be at least 0, got {num_workers}.")
        self.path = path
        self.batch_size = batch_size
        self.context = context
        self.max_bytes = max_bytes
        self.val_fraction = val_fraction
        self.val_bytes = val_bytes
        self.seed = seed
        self.num_workers = num_workers
        self.train_windows: Windows | None = None
        self.val_windows: Subset[Tensor] | None = None

    def setup(self, stage: str) -> None:
        """Read and split the text; the same on every rank."""
        if self.train_windows is None:
            self.check(self.trainer.world_size if self.trainer is not None else 1)

    def check(self, num_ranks: int) -> None:
        """Read and split the text.

        Raises:
            ValueError: If the text is missing or too small for the ranks, or torchdata is missing.
        """
        if importlib.util.find_spec("torchdata") is None:
            raise ValueError(
                "The demo's data needs torchdata, with which a run resumes at any batch. Run in a "
                "checkout of lightning_loco: pip install -c constraints.txt -e '.[demo]'"
            )
        text = (
            standard_library(self.max_bytes)
            if self.path is None
            else text_file(self.path, self.max_bytes)
        )
        num_train = round(len(text) * (1 - self.val_fraction))
        train = Windows(text[:num_train], self.context)
        val = Windows(text[num_train:], self.context)
        if len(train) < self.batch_size * num_ranks or len(val) < num_ranks:
            raise ValueError(
                f"The text has {len(text)} bytes: {len(train)} training and {len(val)} validation"
                f" windows of {self.context} bytes. One batch for each of {num_ranks} ranks"
                f" needs {self.batch_size * num_ranks} and {num_ranks}. Take a longer text, or"
                " lower data.batch_size, data.context or the number of ranks."
            )
        # A multiple of the number of ranks, so that no window is used twice.
        num_val = max(min(len(val), self.val_bytes // self.context) // num_ranks, 1) * num_ranks
        self.train_windows = train
        self.val_windows = Subset(val, [i * len(val) // num_val for i in range(num_val)])

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return shuffled windows (batch_size, context + 1), uint8, in full batches."""
        # torchdata is installed with the extra "demo" only; other data needs none.
        from lightning_loco.app.demo.loader import ResumableDataLoader

        windows = self._ready(self.train_windows)
        return ResumableDataLoader(
            windows,
            batch_size=self.batch_size,
            sampler=SeededShuffle(windows, self.seed),
            num_workers=self.num_workers,
            drop_last=True,
        )

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Return windows (up to 4 * batch_size, context + 1), uint8, in a fixed order."""
        windows = self._ready(self.val_windows)
        return DataLoader(windows, batch_size=4 * self.batch_size, num_workers=self.num_workers)

    def test_dataloader(self) -> DataLoader[Tensor]:
        """Return the validation windows."""
        return self.val_dataloader()

    def _ready(self, windows: AnyWindows | None) -> AnyWindows:
        if windows is None:
            raise RuntimeError("ByteTextData has no text yet. Call setup('fit'); the Trainer does.")
        return windows
