"""The tape of a run: a line for each event of a syncer, from which merges can be repeated."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_loco._util.plain import plain
from lightning_loco.algorithms.algorithm import State
from lightning_loco.algorithms.decoupled_diloco import DecoupledDiLoCo, TensorRange
from lightning_loco.algorithms.decoupled_diloco import Push as Progress
from lightning_loco.syncer.contract import read_method
from lightning_loco.syncer.merge_rounds import Merge, Push
from lightning_loco.syncer.snapshot import save_tensors

log = logging.getLogger(__name__)

_LINES = "tape.jsonl"
_PUSHES = "pushes"


class KeptDeltas(NamedTuple):
    """Of the pseudo-gradients of a merge their file, if they are kept, and their norms."""

    name: str | None
    norms: list[float]


class Tape:
    """Writes ``tape.jsonl``: one JSON object per line, each with the ``event`` and its ``time``.

    If the disk is full, the tape ends, and the log says so: the run goes on.

    Args:
        folder: Of the tape; it is made.
        wall_time: The clock, in seconds since 1970.
        keeps_pushes: Whether pseudo-gradients are kept, in ``pushes/``, to repeat merges: as many
            bytes as the learners have sent.
    """

    def __init__(
        self, folder: Path, wall_time: Callable[[], float], keeps_pushes: bool = False
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._wall_time, self._keeps = folder, wall_time, keeps_pushes
        if keeps_pushes:
            (folder / _PUSHES).mkdir(exist_ok=True)
        self._has_ended = False
        self._file = (folder / _LINES).open("a+b", buffering=0)
        if self._file.tell() and os.pread(self._file.fileno(), 1, self._file.tell() - 1) != b"\n":
            self._file.write(b"\n")  # after a line of a syncer that was killed

    def write(self, event: str, **values: Any) -> None:
        """Write a line."""
        line = {"event": event, "time": round(self._wall_time(), 3), **values}
        self._try_to(lambda: self._write_all(memoryview(json.dumps(line).encode() + b"\n")))

    def _write_all(self, data: memoryview) -> None:
        while data:
            data = data[self._file.write(data) or 0 :]

    def _keep(self, name: str, content: Any) -> str | None:
        """Save tensors in ``pushes/``, if they are kept; return their name if they are there."""
        if not self._keeps:
            return None

        def save() -> None:
            with (self._folder / _PUSHES / name).open("wb") as file:
                save_tensors(content, file)

        return name if self._try_to(save) else None

    def _try_to(self, act: Callable[[], object]) -> bool:
        """Do a part of a line, unless the tape has ended; return whether it is done."""
        if self._has_ended:
            return False
        try:
            act()
        except OSError as error:
            self._has_ended = True
            log.error(
                "The tape in %s ends here: %s. The run goes on without it. Free disk space, "
                "and start the syncer again to continue the tape.",
                self._folder,
                error,
            )
        return not self._has_ended

    def write_start(
        self,
        method: DecoupledDiLoCo,
        tensors: Sequence[Sequence[TensorRange]],
        epoch: int,
        committed: int,
        states: Sequence[State],
    ) -> None:
        """Write what a syncer begins with, or continues with after a restart."""
        named = self._keep(f"start_{epoch}.pt", list(states))
        self.write(
            "start",
            epoch=epoch,
            committed=committed,
            method=plain(method)[1],
            tensors=[list(map(list, one)) for one in tensors],
            states=named,
            hashes=[hash_of(state["outer"]) for state in states],
        )

    def keep_deltas(self, merge: Merge, epoch: int, deltas: Tensor) -> KeptDeltas:
        """Measure the pseudo-gradients of a merge, ``(M, P)``, and keep them if that was chosen."""
        norms = torch.linalg.vector_norm(deltas, dim=1, dtype=torch.float64).tolist()
        return KeptDeltas(self._keep(f"round_{epoch}_{merge.due.round}.pt", deltas), norms)

    def write_merge(
        self,
        merge: Merge,
        epoch: int,
        weights: Sequence[float],
        kept: KeptDeltas,
        outer: Tensor,
    ) -> None:
        """Write the line of a merge, with the fragment that it has given."""
        self.write(
            "merge",
            round=merge.due.round,
            fragment=merge.due.fragment,
            epoch=epoch,
            attempt=merge.due.attempt,
            pushes=[
                _line_of(push, age, weight, norm)
                for push, age, weight, norm in zip(
                    merge.pushes, merge.ages, weights, kept.norms, strict=True
                )
            ],
            deltas=kept.name,
            hash=hash_of(outer),
        )

    def close(self) -> None:
        """Write nothing any more."""
        self._has_ended = True
        self._file.close()


def _line_of(push: Push, age: int, weight: float, norm: float) -> dict[str, Any]:
    return {
        "learner": push.learner,
        "generation": push.generation,
        "asked_in": push.due.round,
        "base": list(push.base),
        "age": age,
        "steps": push.steps,
        "tokens": push.tokens,
        "weight": weight,
        "norm": norm,
    }


def hash_of(vector: Tensor) -> str:
    """Return the SHA-256 of the bytes of a vector, in 16 hexadecimal digits."""
    return hashlib.sha256(vector.detach().cpu().numpy().tobytes()).hexdigest()[:16]


# ---------------------------------------------------------------------------- replay


class Repeated(NamedTuple):
    """A merge that was repeated, or could not be.

    Attributes:
        round: Number of the round.
        fragment: That was merged.
        problem: None if the result is equal bit for bit; else how it differs, or what is missing.
        differs: Whether there is a result, and it is another one.
    """

    round: int
    fragment: int
    problem: str | None
    differs: bool = False


def replay(folder: Path, method: DecoupledDiLoCo | None = None) -> Iterator[Repeated]:
    """Repeat the merges of a tape from the recorded pseudo-gradients, one after the other.

    Weights are those that were applied. After a difference the recorded result cannot be known, so
    later merges of that fragment differ as well. After a merge that is missing, those of its
    fragment cannot be repeated until the syncer was started again.

    Args:
        folder: Of the tape.
        method: Of the run. Default: as the tape says; needed for functions of your own.

    Raises:
        ValueError: If the folder has no tape, or the method cannot be read from it.
    """
    path = folder / _LINES
    if not path.exists():
        raise ValueError(f"There is no {path}. Name the folder of a tape.")
    part: _Part | None = None
    with path.open("rb") as file:
        for text in file:
            try:
                line = json.loads(text)
                event = line["event"]
            except (ValueError, TypeError, KeyError):
                continue  # of a syncer that was killed, or damaged: then its round is missing
            if event == "start":
                part = _Part(folder, line, method or read_method(line["method"]))
            elif event == "merge":
                if part is None:
                    raise ValueError(f"{path} does not begin with the start of a syncer.")
                yield from part.repeat(line)


class _Missing(Exception):
    """Why something cannot be repeated."""


class _Part:
    """The merges from one start of the syncer to the next one."""

    def __init__(self, folder: Path, start: dict[str, Any], method: DecoupledDiLoCo) -> None:
        self._folder, self._method = folder, method
        self._tensors = [[TensorRange(*one) for one in tensors] for tensors in start["tensors"]]
        self._committed = start["committed"]
        try:
            self._states: list[State] | _Missing = _load(folder, start["states"])
        except _Missing as missing:
            self._states = missing
        # Why a fragment has no state from which its next merge can be repeated.
        self._unknown: dict[int, str] = {}

    def repeat(self, line: dict[str, Any]) -> Iterator[Repeated]:
        """Repeat a merge, after those before it that are not on the tape."""
        count = len(self._tensors)
        for number in range(self._committed + 1, line["round"]):
            yield self._missing(number, (number - 1) % count, "it is not on the tape")
        self._committed, fragment = line["round"], line["fragment"]
        try:
            if isinstance(self._states, _Missing):
                raise self._states
            deltas = _load(self._folder, line["deltas"])
            if fragment in self._unknown:
                raise _Missing(self._unknown[fragment])
        except _Missing as missing:
            yield self._missing(line["round"], fragment, str(missing))
            return
        problem = self._compare(line, deltas, self._states[fragment])
        yield Repeated(line["round"], fragment, problem, problem is not None)

    def _missing(self, number: int, fragment: int, problem: str) -> Repeated:
        self._unknown.setdefault(fragment, f"it follows round {number}, which is missing")
        return Repeated(number, fragment, problem)

    def _compare(self, line: dict[str, Any], deltas: Tensor, state: State) -> str | None:
        pushes = [Progress(one["steps"], one["tokens"], one["age"]) for one in line["pushes"]]
        weights = [one["weight"] for one in line["pushes"]]
        tensors = self._tensors[line["fragment"]]
        found = hash_of(self._method.merge(deltas, pushes, state, tensors, weights))
        if found == line["hash"]:
            return None
        own = self._method.weights(pushes)
        other = f", and weights {own} instead of {weights}" if own != weights else ""
        return f"the result is {found}, and was {line['hash']}{other}"


def _load(folder: Path, name: str | None) -> Any:
    if name is None:
        raise _Missing("its pseudo-gradients were not kept")
    path = folder / _PUSHES / name
    if not path.exists():
        raise _Missing(f"there is no {path}")
    try:
        return torch.load(path, weights_only=True)
    except Exception as error:
        raise _Missing(f"{path} cannot be read: {error}") from error
