"""Gossip of workers that join and die: every round equals that of a plain loop over the members.

A worker without weight in a round has joined in it, and is at the mean of the others.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_loco.algorithms import RoundInfo
from lightning_loco.topology import get_topology
from tests.algorithms.toys import apply_update
from tests.elastic.cluster import HEARTBEAT_TIMEOUT_S, Cluster, Line, cluster, until
from tests.elastic.worker import PULL, TOPOLOGIES, algorithm_of

pytestmark = pytest.mark.process

SYNC_EVERY = 4
BASE = ("--dtype=float64", "--numel=5", "--vectors", f"--sync-every={SYNC_EVERY}")
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def state_of(line: Line) -> dict[str, Tensor]:
    return {k: torch.tensor(v, dtype=torch.float64) for k, v in line["vectors"].items()}


def mean_of(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([state[key] for state in states]).mean(0) for key in states[0]}


def by_round(workers: Cluster) -> dict[int, dict[int, Line]]:
    """The lines of each round, by the indices of the workers."""
    found: dict[int, dict[int, Line]] = {}
    for index in workers.processes:
        for line in workers.lines(index):
            found.setdefault(line["round"], {})[index] = line
    return found


def full_members(line: Line) -> list[str]:
    """The members with weight in the round of a line."""
    pairs = zip(line["members"], line["weights"], strict=True)
    return [name for name, weight in pairs if weight]


def index_of(name: str) -> int:
    """The index of a worker, from its name in the group."""
    return int(name.removeprefix("w").partition("-")[0])


def plain_round(
    algorithm: str, indices: list[int], states: list[dict[str, Tensor]], round_index: int
) -> list[dict[str, Tensor]]:
    """A blocking round of these workers in a plain loop, with the full mixing matrix."""
    method, topology = algorithm_of(algorithm, False), get_topology(TOPOLOGIES[algorithm])
    method = method.prepare(len(indices), topology)
    messages = []
    for index, state in zip(indices, states, strict=True):
        local = state["start"].clone()
        for _ in range(SYNC_EVERY):
            local.lerp_(torch.full_like(local, index + 1), PULL)
        messages.append(method.propose(local, state, RoundInfo()))
    mixed = topology.mixing_matrix(len(indices), round_index) @ torch.stack(messages)
    for message, received, state in zip(messages, mixed, states, strict=True):
        apply_update(method, message.clone(), received.clone(), state)
    return states


def check_rounds(workers: Cluster, algorithm: str) -> set[int]:
    """Compare all rounds with the plain loop; return their numbers of members."""
    rounds = by_round(workers)
    sizes = set()
    for round_index in sorted(rounds)[:-1]:
        before, after = rounds[round_index], rounds[round_index + 1]
        some_line = next(line for line in after.values() if line["own"] in full_members(line))
        indices = [index_of(name) for name in full_members(some_line)]
        states = [state_of(before[index]) for index in indices]
        expected = plain_round(algorithm, indices, states, round_index)
        sizes.add(len(indices))
        for index, line in after.items():
            is_new = index not in indices
            state = mean_of(expected) if is_new else expected[indices.index(index)]
            torch.testing.assert_close(state_of(line), state, **EXACT)
    return sizes


@pytest.mark.soak
@pytest.mark.parametrize("algorithm", ["gasloc", "noloco", "neighbor_average"])
def test_one_joins_one_is_killed_and_all_rounds_are_those_of_the_members(
    tmp_path: Path, algorithm: str
) -> None:
    settings = (*BASE, "--rounds=30", "--from-members=4", "--step-s=0.02")
    with cluster(tmp_path, *settings, f"--algorithm={algorithm}") as workers:
        for index in range(3):
            workers.start(index)
        workers.wait_for_round(1, 5)
        workers.join(3, rounds=5)
        killed_at = workers.kill(0)
        workers.wait_for_success(1, 2, 3)
        times = [line["time"] for line in workers.lines(2) if line["time"] > killed_at + 0.05]
        assert min(times) - killed_at < HEARTBEAT_TIMEOUT_S + 6  # no neighbour in the ring
        assert check_rounds(workers, algorithm) >= {3, 4}
        assert len(full_members(workers.lines(3)[-1])) == 3


@pytest.mark.soak
def test_a_single_worker_continues_and_two_join_at_once(tmp_path: Path) -> None:
    settings = (*BASE, "--rounds=120", "--step-s=0.02", "--algorithm=noloco")
    with cluster(tmp_path, *settings, min_workers=1) as workers:
        workers.start(0)
        workers.start(1)
        workers.wait_for_round(0, 5)
        workers.kill(1)
        workers.wait_for_members(0, 1)
        workers.start(2)
        workers.start(3)
        workers.wait_for_success(0, 2, 3)
        assert check_rounds(workers, "noloco") >= {1, 3}


@pytest.mark.soak
def test_a_suspended_worker_rejoins_at_the_mean(tmp_path: Path) -> None:
    settings = (*BASE, "--rounds=80", "--step-s=0.03", "--algorithm=gasloc", "--timeout-s=4")
    with cluster(tmp_path, *settings) as workers:
        for index in range(3):
            workers.start(index)
        workers.wait_for_round(0, 3)
        until(lambda: len(workers.lines(2)) > 3, "rounds of worker 2")
        workers.suspend_for_a_round(2, seen_by=0)
        workers.wait_for_success(0, 1, 2)
        check_rounds(workers, "gasloc")
        assert len(full_members(workers.lines(0)[-1])) == 3


@pytest.mark.soak
@pytest.mark.parametrize(
    ("algorithm", "dtype", "tolerance"),
    [("noloco", "float64", 1e-12), ("gasloc", "float32", 1e-6)],
)
def test_with_overlap_the_mean_does_not_change_when_one_joins(
    tmp_path: Path, algorithm: str, dtype: str, tolerance: float
) -> None:
    own = ("--rounds=10", "--from-members=4", "--step-s=0.02", "--overlap", f"--dtype={dtype}")
    with cluster(tmp_path, *BASE, *own, f"--algorithm={algorithm}") as workers:
        for index in range(3):
            workers.start(index)
        workers.wait_for_round(1, 5)
        workers.start(3)
        workers.wait_for_success(0, 1, 2, 3)
        rounds, first = by_round(workers), workers.lines(3)[0]["round"]
        for round_index in (first, first + 1):  # pending, and applied
            joined, *others = (state_of(rounds[round_index][i]) for i in (3, 0, 1, 2))
            close = {"rtol": tolerance, "atol": tolerance}
            torch.testing.assert_close(joined, mean_of(others), **close)
            torch.testing.assert_close(mean_of([joined, *others]), mean_of(others), **close)
        assert workers.lines(3)[0]["mark"] == 1.0  # a buffer, which holds their indices
        assert not torch.equal(others[0]["start"], others[1]["start"])
        later = [state_of(rounds[first + 4][i])["start"] for i in range(4)]
        assert not torch.allclose(later[3], torch.stack(later[:3]).mean(0), rtol=1e-9)
