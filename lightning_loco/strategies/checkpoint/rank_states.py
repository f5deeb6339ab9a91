"""What differs between the ranks of one worker: its side file has it for each of them."""

from __future__ import annotations

from typing import Any, NamedTuple

from lightning_loco.distributed import WorkerGroup

OTHER_RANKS = "other_ranks"
"""Entry of a side file with the states of all ranks of the worker but the first, in order."""


READERS = "readers"
"""Entry of such a file with the number of ranks of the worker that read different data."""


class RankState(NamedTuple):
    """The state of one rank that the other ranks of its worker do not have.

    Attributes:
        position: Where it is in its data, and its random states.
        loops: Lightning's loops, with the states of the loaders.
        statistics: What its communication has cost.
    """

    position: dict[str, Any]
    loops: dict[str, Any]
    statistics: dict[str, Any]

    def gather_others(self, group: WorkerGroup, label: str) -> list[dict[str, Any]]:
        """Return those of all ranks of the worker but the first; all of them must call it.

        RuntimeError if a rank is missing or has failed, or has other objects in it than tensors and
        plain values; the message names it.
        """
        return group.gather_states_inside(self._asdict(), label)[1:]


def take_rank_state(own: dict[str, Any], place: int) -> int:
    """Put the state of one rank in place of that of the first one into the content of a side file.

    A rank that the worker did not have keeps that of the first one. Returns how many ranks it had;
    TypeError if a state is not one that this package writes.
    """
    others = [RankState(**entry) for entry in own.pop(OTHER_RANKS, ())]
    if 0 < place <= len(others):
        state = others[place - 1]
        own["position"] = state.position
        own["lightning"] = {**own["lightning"], "loops": state.loops}
        own["engine"] = {**own["engine"], "statistics": state.statistics}
    return 1 + len(others)
