"""A pending round: what is known between its begin and its end, also from a checkpoint."""

from __future__ import annotations

import pytest
import torch

from lightning_loco.distributed.worker_status import PendingStatuses
from lightning_loco.engine.buckets import Arrived
from lightning_loco.engine.fragment_sync import PendingRound
from tests.engine.toys import saved_and_loaded


class Travelling:
    """A handle, or rows, of which a test says when they are here."""

    def __init__(self, arrived: bool) -> None:
        self.arrived = arrived

    def has_arrived(self) -> bool:
        return self.arrived

    def wait(self) -> torch.Tensor:
        raise AssertionError("a look must not wait")

    def release(self) -> None:
        pass


def statuses_of(arrived: Travelling) -> PendingStatuses:
    return PendingStatuses(arrived.wait, "round 3", arrived.has_arrived)


def test_it_has_arrived_when_all_parcels_and_the_rows_have(subtests: pytest.Subtests) -> None:
    for late in (None, 0, 1, 2):
        with subtests.test(late=late):
            parts = [Travelling(arrived=index != late) for index in range(3)]
            pending = PendingRound(3, statuses_of(parts[0]), True, 30, handles=[*parts[1:]])
            assert pending.has_arrived() is (late is None)
            for part in parts:
                part.arrived = True
            assert pending.has_arrived()


def test_one_from_a_checkpoint_has_arrived_and_knows_what_the_old_one_knew() -> None:
    old = PendingRound(
        3, statuses_of(Travelling(arrived=True)), False, 30, told=[(1.0, 2.0), (3.0, 4.0)]
    )
    received = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    new = PendingRound.arrived(saved_and_loaded(old.state_dict()), received)
    assert (new.index, new.valid, new.began_at) == (3, False, 30)
    assert new.told == [(1.0, 2.0), (3.0, 4.0)]
    assert new.has_arrived()
    assert new.was_overlapped
    assert new.is_divided
    assert [handle.wait().tolist() for handle in new.handles] == [[1.0, 2.0], [3.0]]
    assert new.statuses.wait() == []


def test_one_of_which_nothing_is_told_comes_back_so() -> None:
    old = PendingRound(0, statuses_of(Travelling(arrived=True)), True, 1)
    assert PendingRound.arrived(saved_and_loaded(old.state_dict()), []).told is None


def test_what_has_arrived_is_given_out_as_it_is() -> None:
    received = torch.ones(2)
    handle = Arrived(received)
    assert handle.has_arrived()
    handle.release()
    assert handle.wait() is received
