"""The base class, with a topology that defines only its weights."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from lightning_loco.topology import Topology


@dataclass(frozen=True)
class Rows(Topology):
    """Explicit mixing matrices, one for each round of the period."""

    cycle: tuple[tuple[tuple[float, ...], ...], ...]

    def period(self, num_workers: int) -> int:
        return len(self.cycle)

    def weights(self, worker: int, num_workers: int, round_index: int = 0) -> dict[int, float]:
        self.require(worker, num_workers, round_index)
        row = self.cycle[round_index % len(self.cycle)][worker]
        return {j: w for j, w in enumerate(row) if w or j == worker}


FIRST_PAIR = ((0.5, 0.5, 0.0), (0.5, 0.5, 0.0), (0.0, 0.0, 1.0))
LAST_PAIR = ((1.0, 0.0, 0.0), (0.0, 0.5, 0.5), (0.0, 0.5, 0.5))
ROTATION = ((0.5, 0.0, 0.5), (0.5, 0.5, 0.0), (0.0, 0.5, 0.5))


def test_receivers_follow_from_the_weights() -> None:
    topology = Rows((ROTATION,))
    topology.check(3)
    assert [topology.receivers(worker, 3) for worker in range(3)] == [[1], [2], [0]]


def test_connected_over_the_period_is_enough() -> None:
    Rows((FIRST_PAIR, LAST_PAIR)).check(3)


def test_not_connected_over_the_period() -> None:
    with pytest.raises(ValueError, match=r"'custom' is not connected: .* 2 parts, \[0, 1\], \[2\]"):
        Rows((FIRST_PAIR, FIRST_PAIR)).check(3)


def test_rows_that_do_not_sum_to_one_in_a_later_round() -> None:
    wrong = ((1.0, 0.0, 0.0), (0.0, 0.5, 0.4), (0.0, 0.5, 0.5))
    with pytest.raises(ValueError, match=r"row 1 of the mixing matrix sums to 0\.9, not to 1"):
        Rows((FIRST_PAIR, wrong)).check(3)


def test_row_stochastic_alone_is_refused() -> None:
    towards_zero = ((1.0, 0.0, 0.0), (0.5, 0.5, 0.0), (0.0, 0.5, 0.5))
    with pytest.raises(ValueError, match=r"not doubly stochastic: column 0 sums to 1\.5"):
        Rows((towards_zero,)).check(3)


def test_a_topology_needs_weights() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Topology()
