"""The state of a worker whose ranks hold shards, in a folder of ``torch.distributed.checkpoint``.

Vectors are written by the names of the parameters, as ``DTensor``: so a worker with another number
of ranks, or another division of the model, reads its own shards. The rest of the state
stays as it is, with the number of a vector in place of each.
"""

from __future__ import annotations

import io
import os
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_loco._util.disk import DISK
from lightning_loco.distributed import WorkerGroup, json_messages
from lightning_loco.engine.gathered_state import of_length, with_vectors
from lightning_loco.model.replica import Replica
from lightning_loco.strategies.checkpoint.atomic_io import make_folder
from lightning_loco.strategies.checkpoint.side_files import NEW_RUN

OWN_SHARDS = "shards"
"""Entry of a state with the files in the folder of a worker."""

SHARED_SHARDS = "shared_shards"
"""Entry of a state with the files in the folder of the shared state."""

Files = dict[str, tuple[int, int]]
"""The length and the CRC-32 checksum of each file in a folder."""

_VECTOR = "vector"
_PIECE_BYTES = 2**24


class ShardFolder:
    """Writes and reads the vectors of an engine's state, and the states of the optimizers.

    All ranks of the worker must call each method at the same time; all of them get an error if one
    cannot write or read.

    Args:
        own: Folder of the state of one worker.
        shared: Folder of the state that all workers share.
        replica: That of the engine.
        group: This worker, which writes and reads.
    """

    def __init__(self, own: str, shared: str, replica: Replica, group: WorkerGroup) -> None:
        self._folders = own, shared
        self._layout = replica.layout
        self._parameters = replica.parameters
        self._group = group
        assert replica.vectors is not None
        self._vectors = replica.vectors
        self._is_vector = of_length(self._layout.num_held)

    def write(
        self,
        state: dict[str, Any],
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        is_replicated: bool,
    ) -> dict[str, Any]:
        """Write a state with the vectors that this rank holds; return it without them.

        Args:
            state: Of the engine; its entry ``"shared"`` may be missing.
            model: The module, to which the optimizers belong.
            optimizers: Their states are written, too.
            is_replicated: Whether all workers share that entry.

        Raises:
            RuntimeError: If parameters that no optimizer has differ between the workers.
        """
        if names := state["others"][0]:
            raise RuntimeError(
                f"Parameters that are not trained differ between the workers ({', '.join(names)}). "
                "With a model that is divided among the ranks of a worker, such a state cannot be "
                "saved. Keep them equal on all workers."
            )
        of_own, of_shared = dict[str, Any](), dict[str, Any]()

        def put(vector: Tensor, fragment: int | None, into: dict[str, Any]) -> dict[str, Any]:
            number = len(into)
            held = vector if fragment is None else self._vectors.spread(vector, fragment)
            into[f"{_VECTOR}_{number}"] = self._named(held)
            return {_VECTOR: number, "dtype": vector.dtype, "is_shared": into is of_shared}

        is_own = {name: name != "shared" or not is_replicated for name in state}
        own = {name: value for name, value in state.items() if is_own[name]}
        plain = with_vectors(own, self._is_vector, partial(put, into=of_own))
        plain["params"] = put(state["params"], None, of_own)
        for number, optimizer in enumerate(optimizers):
            of_own[f"optimizer_{number}"] = get_optimizer_state_dict(model, optimizer)
        plain[OWN_SHARDS] = write_folder(of_own, self._folders[0], self._group.inner)
        if not all(is_own.values()):
            shared = {"fragments": [], "shared": state["shared"]}
            found = with_vectors(shared, self._is_vector, partial(put, into=of_shared))
            plain[SHARED_SHARDS] = write_folder(of_shared, self._folders[1], self._group.inner)
            plain["shared"] = found["shared"]
        return plain

    def read(self, plain: dict[str, Any]) -> dict[str, Any]:
        """Return the state that :meth:`write` was given, with the vectors that this rank holds now.

        ValueError if a file is not the one that was written together with this state.
        """
        plain = dict(plain)
        files = plain.pop(OWN_SHARDS), plain.pop(SHARED_SHARDS, {})
        try:
            for folder, of_folder in zip(self._folders, files, strict=True):
                check_folder(folder, of_folder, self._group.inner)
        except ValueError as error:
            raise ValueError(f"{error} {NEW_RUN}") from error
        vectors: tuple[dict[int, Tensor], dict[int, Tensor]] = ({}, {})

        def prepare(marker: dict[str, Any], fragment: int | None) -> None:
            held = torch.zeros(self._layout.num_held, dtype=marker["dtype"], device="cpu")
            vectors[marker["is_shared"]][marker[_VECTOR]] = held

        def get(marker: dict[str, Any], fragment: int | None) -> Tensor:
            held = vectors[marker["is_shared"]][marker[_VECTOR]]
            return held if fragment is None else self._vectors.part_of(held, fragment)

        with_vectors(plain, _is_marker, prepare)
        prepare(plain["params"], None)
        for found, folder in zip(vectors, self._folders, strict=True):
            if found:
                named = {f"{_VECTOR}_{n}": self._named(held) for n, held in found.items()}
                read_folder(named, folder, self._group.inner)
        return {**with_vectors(plain, _is_marker, get), "params": get(plain["params"], None)}

    def read_optimizers(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Load the states of the optimizers; a parameter without a saved state gets none."""
        saved = FileSystemReader(self._folders[0]).read_metadata().state_dict_metadata
        for number, optimizer in enumerate(optimizers):
            key, without = f"optimizer_{number}", list[str]()
            content = get_optimizer_state_dict(model, optimizer)
            states: Any = content["state"]
            for name in [*states]:
                if not any(found.startswith(f"{key}.state.{name}.") for found in saved):
                    del states[name]
                    without.append(name)
            read_folder({key: content}, self._folders[0], self._group.inner)
            states.update((name, {}) for name in without)
            set_optimizer_state_dict(model, optimizer, optim_state_dict=content)

    def _named(self, held: Tensor) -> dict[str, Tensor]:
        """Views of a vector by the names of the parameters; a view of a shard is a ``DTensor``."""
        named: dict[str, Tensor] = {}
        for name, view in self._layout.named_views(held).items():
            parameter, found = self._parameters[name], view
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                shape, stride = parameter.shape, parameter.stride()
                found = DTensor.from_local(view, mesh, placements, shape=shape, stride=stride)
            named[name] = found
        return named


class _SummedFile(io.FileIO):
    """A file whose length and checksum are computed as it is written, from start to end."""

    length = checksum = 0

    def write(self, data: Any) -> int:
        written = super().write(data)
        self.length += written
        self.checksum = zlib.crc32(memoryview(data).cast("B")[:written], self.checksum)
        return written


class _SummedFiles(FileSystem):
    """Records the length and the checksum of each file that is written.

    The names of the folder and its files are put on the disk, too, before a save is committed.
    """

    def __init__(self) -> None:
        self.files: Files = {}

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        make_folder(DISK, Path(path))

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)  # of the file that is written last, after those of all ranks
        DISK.sync(Path(new_path).parent)

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        raw = _SummedFile(path, mode)
        with io.BufferedWriter(raw) as stream:
            yield stream
        # The file that describes the others is written under another name and renamed.
        self.files[Path(path).name.removesuffix(".tmp")] = raw.length, raw.checksum


def write_folder(content: dict[str, Any], folder: str, group: dist.ProcessGroup | None) -> Files:
    """Write the content of each rank of a group; OSError on all of them if one cannot.

    Without a group, this rank writes alone. Returns the files, for :func:`check_folder`.
    """
    writer, system = FileSystemWriter(folder), _SummedFiles()
    writer.fs = system
    try:
        with _silent_without(group):
            dcp.save(content, storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise OSError(f"{folder} cannot be written: {_reason(error)}.") from error
    return {
        name: (length, checksum)
        for files in _gathered(system.files, group)
        for name, (length, checksum) in files.items()
    }


def damage_in(folder: str, files: Files, reads_all: bool = True) -> str | None:
    """Describe the damage of files in a folder; None if there is none.

    Without ``reads_all`` only their lengths are compared.
    """
    for name, (length, checksum) in files.items():
        file = Path(folder, name)
        if not file.is_file():
            return f"{file} does not exist, or is not a file"
        if (found := file.stat().st_size) != length:
            return f"{file} has {found} bytes, and {length} were written"
        if reads_all and _checksum_of(file) != checksum:
            return f"{file} has changed since it was written, or belongs to another save or worker"
    return None


def check_folder(
    folder: str, files: Files, group: dist.ProcessGroup | None, damage: str | None = None
) -> None:
    """Compare the files of a folder with those written, each rank of a group a part of them.

    A rank that could not read their list passes the ``damage``.

    Raises:
        ValueError: On all ranks of the group, if one file is missing or is another one.
    """
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    try:
        own = {name: files[name] for name in sorted(files)[rank::size]}
        damage = damage or damage_in(folder, own)
    except OSError as error:
        damage = f"{folder} cannot be read: {error}"
    for found in _gathered(damage, group):
        if found is not None:
            raise ValueError(f"{found}.")


def _gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the values of all ranks, tuples as lists; without a group, this rank's."""
    if group is None:
        return [value]
    names = [f"rank {rank}" for rank in dist.get_process_group_ranks(group)]
    messages = json_messages.all_gather(json_messages.write(value), group, names)
    return [
        json_messages.read(message, name) for message, name in zip(messages, names, strict=True)
    ]


def _checksum_of(file: Path) -> int:
    checksum = 0
    with file.open("rb") as stream:
        while piece := stream.read(_PIECE_BYTES):
            checksum = zlib.crc32(piece, checksum)
    return checksum


def read_folder(content: dict[str, Any], folder: str, group: dist.ProcessGroup | None) -> None:
    """Read into the tensors of each rank of a group; ValueError on all of them if one cannot.

    Without a group, this rank reads alone.
    """
    try:
        with _silent_without(group):
            dcp.load(content, checkpoint_id=folder, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise ValueError(f"{folder} cannot be read: {_reason(error)}. {NEW_RUN}") from error


@contextmanager
def _silent_without(group: dist.ProcessGroup | None) -> Iterator[None]:
    """A context without the warning that there is no group."""
    with warnings.catch_warnings():
        if group is None:
            warnings.filterwarnings("ignore", ".*assuming the intent is to (load|save)")
        yield


def _reason(error: CheckpointException) -> str:
    """The first error of a rank, which all have got."""
    first = next(failure[0] for failure in error.failures.values())
    return str(first) or type(first).__name__


def _is_marker(value: Any, fragment: int | None) -> bool:
    return isinstance(value, dict) and _VECTOR in value
