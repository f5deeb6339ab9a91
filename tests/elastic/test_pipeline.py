"""A joining worker in the two-stage pipeline equals a plain loop over the members of each round."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.elastic.cluster import Line, cluster

pytestmark = pytest.mark.process

OUTER_LR, RATE, STEPS = 0.7, 0.05, 4


def trained(start: float, index: int) -> float:
    """The parameter of a worker after its local steps."""
    for _ in range(STEPS):
        start += RATE * (index + 1 - start)
    return start


def pipeline(first: float, members: list[list[int]]) -> list[float]:
    """Outer parameters after the start of each round, for given members with weight.

    Each start applies the gradient of the previous round and sends the next one, which was computed
    from outer parameters without the previous one.
    """
    outer, gradient, found = first, 0.0, []
    for own in members:
        next_gradient = sum(outer - trained(outer, index) for index in own) / len(own)
        outer -= OUTER_LR * gradient
        gradient = next_gradient
        found.append(outer)
    return found


def members_of(line: Line) -> list[int]:
    pairs = zip(line["members"], line["weights"], strict=True)
    return [int(name[1]) for name, weight in pairs if weight]


@pytest.mark.soak
def test_a_worker_joins_as_in_the_plain_loop(tmp_path: Path) -> None:
    with cluster(
        tmp_path, "--rounds=20", "--from-members=3", "--step-s=0.02", "--overlap"
    ) as workers:
        workers.start_all(2, rounds=5)
        workers.join(2, rounds=5)
        workers.wait_for_success(0, 1, 2)
        first, *lines = workers.lines(0)
        # each line has the members of the previous round
        members = [members_of(line) for line in lines[1:]]
        expected = pipeline(first["outer"], members)
        assert [line["outer"] for line in lines[:-1]] == pytest.approx(expected, abs=1e-5)
        own = {line["round"]: line["outer"] for line in workers.lines(2)[1:]}
        theirs = {line["round"]: line["outer"] for line in lines}
        assert len(own) > 5
        assert own == {round_index: theirs[round_index] for round_index in own}
        assert {len(each) for each in members} == {2, 3}
