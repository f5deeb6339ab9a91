"""Which libraries there are, and whether they are installed here."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from libraries.library import Job, Library, Line


@dataclass(frozen=True)
class Entry:
    """One row of the table.

    Attributes:
        title: What is printed.
        adapter: ``"module:class"`` within this folder.
        package: What has to be installed for it; None for what is always there.
        part: A file or folder of the package by which it is known from others of its name.
        bound: Of our blocking round divided by this one's, on the loopback; None for none.
    """

    title: str
    adapter: str
    package: str | None = None
    part: str = "__init__.py"
    bound: float | None = None

    def load(self) -> Callable[..., Library]:
        """The adapter; ImportError if its library is missing or does not fit."""
        module, _, name = self.adapter.partition(":")
        return getattr(importlib.import_module(f"libraries.{module}"), name)

    def make(self, job: Job, line: Line, model: object, optimizer: object) -> Library:
        """Set the library up in this worker."""
        return self.load()(job, line, model, optimizer)


ALONE, OURS = "alone", "ours"
ENTRIES = {
    ALONE: Entry("no library, every worker alone", "built_in:Alone"),
    OURS: Entry("lightning_loco DiLoCo", "built_in:Ours"),
    "ours_int8": Entry("lightning_loco DiLoCo, int8", "built_in:Ours"),
    "ours_e3m0": Entry("lightning_loco DiLoCo, e3m0", "built_in:Ours"),
    "ours_sparse": Entry("lightning_loco DiLoCo, sparse", "built_in:Ours"),
    "ddp": Entry("torch DDP, every step", "built_in:TorchDDP"),
    "post_local_sgd": Entry("torch PostLocalSGD", "built_in:TorchPostLocalSGD"),
    "torchft_buckets": Entry(
        "torchft DiLoCo, bucketised", "torchft_diloco:TorchftDiLoCoInBuckets", "torchft", bound=0.5
    ),
    "torchft": Entry(
        "torchft DiLoCo, per parameter", "torchft_diloco:TorchftDiLoCo", "torchft", bound=0.2
    ),
    "hivemind": Entry("hivemind averager", "hivemind_diloco:HivemindDiLoCo", "hivemind"),
    "exogym": Entry("exogym DiLoCo", "exogym_diloco:ExogymDiLoCo", "exogym", "strategy"),
    "dpwa": Entry("dpwa gossip", "dpwa_gossip:DpwaGossip", "dpwa"),
}


def found(key: str, dpwa: str | None) -> str | None:
    """The version of a library here; None if it is absent, "" if it does not say."""
    entry = ENTRIES[key]
    if entry.package is None:
        return ""
    if entry.package == "dpwa":
        return "" if dpwa and Path(dpwa, "dpwa", "dpwa.py").is_file() else None
    spec = importlib.util.find_spec(entry.package)
    folders = spec.submodule_search_locations if spec is not None else None
    if not any(Path(folder, entry.part).exists() for folder in folders or ()):
        return None
    try:
        return importlib.metadata.version(entry.package)
    except importlib.metadata.PackageNotFoundError:
        return ""
