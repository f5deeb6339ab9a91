"""A pending round: what is known between its start and end, also from a checkpoint."""

from __future__ import annotations

import pytest
import torch

from lightning_loco.algorithms import LocalSGD
from lightning_loco.distributed.worker_status import IN_ROUND, WorkerStatus
from lightning_loco.engine.exchanges.exchange import Arrived
from lightning_loco.engine.fragment_sync import Round, Stage
from tests.engine.test_fragment_sync import fragment_of
from tests.harness.rounds import saved_and_loaded

FRAGMENT, _ = fragment_of(LocalSGD(), 3)


class ByTest:
    """A handle, or statuses, whose arrival the test controls."""

    def __init__(self, arrived: bool) -> None:
        self.arrived = arrived

    def has_arrived(self) -> bool:
        return self.arrived

    def wait(self) -> torch.Tensor:
        raise AssertionError("has_arrived must not wait")

    def release(self) -> None:
        pass


def test_it_has_arrived_when_all_buckets_and_the_statuses_have(subtests: pytest.Subtests) -> None:
    for late in (None, 0, 1, 2):
        with subtests.test(late=late):
            parts = [ByTest(arrived=index != late) for index in range(3)]
            pending = Round(FRAGMENT, 3, 30, True, statuses=parts[0], handles=[*parts[1:]])
            assert pending.has_arrived() is (late is None)
            for part in parts:
                part.arrived = True
            assert pending.has_arrived()


def test_one_from_a_checkpoint_has_arrived_and_equals_the_one_that_was_saved() -> None:
    old = Round(FRAGMENT, 3, 30, weight=0.5)
    statuses = [
        WorkerStatus(IN_ROUND, 3, 5, 1.0, 1.0, 0.5, 0.25, scalars=(1.0, 2.0)),
        WorkerStatus(IN_ROUND, 3, 7, 0.0, 1.0, 1.5, 0.25, scalars=(3.0, 4.0)),
    ]
    received = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    new = Round.from_state(FRAGMENT, saved_and_loaded(old.state_dict(statuses)), received)
    assert (new.index, new.weight, new.began_at) == (3, 0.5, 30)
    assert new.has_arrived()
    assert new.is_overlapped
    assert new.stage is Stage.COMBINED
    assert new.received == received
    assert new.statuses.wait() == statuses


def test_one_between_neighbours_has_no_statuses_after_a_resume() -> None:
    old = Round(FRAGMENT, 0, 1, weight=1.0)
    new = Round.from_state(FRAGMENT, saved_and_loaded(old.state_dict([])), [])
    assert new.statuses.wait() == []


def test_what_has_arrived_is_returned_as_it_is() -> None:
    received = torch.ones(2)
    handle = Arrived(received)
    assert handle.has_arrived()
    handle.release()
    assert handle.wait() is received
