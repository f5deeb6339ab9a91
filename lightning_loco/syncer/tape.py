"""The tape of a run: a line for each event of a syncer, from which merges can be repeated."""

from __future__ import annotations

import hashlib
import json
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

_PUSHES = "pushes"


class KeptDeltas(NamedTuple):
    """Of the pseudo-gradients of a merge their file, if they are kept, and their norms."""

    name: str | None
    norms: list[float]


class Tape:
    """Writes ``tape.jsonl``: one JSON object per line, each with the ``event`` and its ``time``.

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
        self._file = (folder / "tape.jsonl").open("a", encoding="utf-8")

    def write(self, event: str, **values: Any) -> None:
        """Write a line."""
        line = {"event": event, "time": round(self._wall_time(), 3), **values}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def write_start(
        self,
        method: DecoupledDiLoCo,
        tensors: Sequence[Sequence[TensorRange]],
        epoch: int,
        committed: int,
        states: Sequence[State],
    ) -> None:
        """Write what a syncer begins with, or continues with after a restart."""
        named = f"start_{epoch}.pt" if self._keeps else None
        if named is not None:
            torch.save(list(states), self._folder / _PUSHES / named)
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
        if not self._keeps:
            return KeptDeltas(None, norms)
        name = f"round_{epoch}_{merge.due.round}.pt"
        torch.save(deltas, self._folder / _PUSHES / name)
        return KeptDeltas(name, norms)

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
        """Close the file."""
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
    """A merge that was repeated.

    Attributes:
        round: Number of the round.
        fragment: That was merged.
        problem: None if the result is equal bit for bit; else how it differs, or what is missing.
    """

    round: int
    fragment: int
    problem: str | None


def replay(folder: Path, method: DecoupledDiLoCo | None = None) -> Iterator[Repeated]:
    """Repeat the merges of a tape from the recorded pseudo-gradients, one after the other.

    Weights are those that were applied. After a difference the recorded result cannot be known, so
    later merges of that fragment differ as well.

    Args:
        folder: Of the tape.
        method: Of the run. Default: as the tape says; needed for functions of your own.

    Raises:
        ValueError: If the folder has no tape, or the method cannot be read from it.
    """
    path = folder / "tape.jsonl"
    if not path.exists():
        raise ValueError(f"There is no {path}. Name the folder of a tape.")
    states: list[State] | None = None
    tensors: list[list[TensorRange]] = []
    chosen = method
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue  # the last line of a syncer that was killed
        if line["event"] == "start":
            chosen = method or read_method(line["method"])
            tensors = [[TensorRange(*one) for one in fragment] for fragment in line["tensors"]]
            states = _load(folder, line["states"])
        elif line["event"] == "merge":
            assert chosen is not None
            problem = _repeat(folder, line, states, chosen, tensors)
            yield Repeated(line["round"], line["fragment"], problem)


def _repeat(
    folder: Path,
    line: dict[str, Any],
    states: list[State] | None,
    method: DecoupledDiLoCo,
    tensors: list[list[TensorRange]],
) -> str | None:
    deltas = _load(folder, line["deltas"])
    if states is None or deltas is None:
        return "its pseudo-gradients were not kept"
    pushes = [Progress(one["steps"], one["tokens"], one["age"]) for one in line["pushes"]]
    fragment = line["fragment"]
    weights = [one["weight"] for one in line["pushes"]]
    result = method.merge(deltas, pushes, states[fragment], tensors[fragment], weights)
    found = hash_of(result)
    if found == line["hash"]:
        return None
    own = method.weights(pushes)
    other = f", and weights {own} instead of {weights}" if own != weights else ""
    return f"the result is {found}, and was {line['hash']}{other}"


def _load(folder: Path, name: str | None) -> Any:
    path = folder / _PUSHES / str(name)
    return torch.load(path, weights_only=True) if name is not None and path.exists() else None
