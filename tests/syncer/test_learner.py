"""What a learner decides, request by request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco._util.decisions import Decision
from lightning_loco.algorithms import DecoupledDiLoCo
from lightning_loco.syncer.learner import Do, Learner
from lightning_loco.syncer.merge_rounds import Due, MergeSettings, Push, Refused, Reply, Version
from lightning_loco.syncer.syncer import Fragment
from tests.syncer.world import SIZE, contract_of

START, FIRST = Version(1, 0), Version(1, 1)
DUE = Due(1, 0, 0)
PUSH = Push("a", 1, 1, DUE, START, 1, 8.0)


def full(value: float) -> Tensor:
    return torch.full((SIZE,), value)


def go_on(exchange: Decision[Do, None], outcome: Any = None) -> tuple[Do, Any]:
    """Give an exchange the reply to its last request, and return the next one."""
    return exchange.throw(outcome) if isinstance(outcome, Exception) else exchange.send(outcome)


def end(exchange: Decision[Do, None], outcome: Any = None) -> None:
    """Give an exchange the reply to its last request, after which it ends."""
    with pytest.raises(TimeoutError if isinstance(outcome, OSError) else StopIteration):
        go_on(exchange, outcome)


def fetch(exchange: Decision[Do, None], version: Version, reply: Any) -> None:
    """Give an exchange a reply with a version that is new, and that version."""
    assert go_on(exchange, reply)[0] is Do.FETCH
    end(exchange, Fragment(version.epoch, version, full(float(version.round))))


def pushed(exchange: Decision[Do, None]) -> tuple[Push, float]:
    """Begin an exchange, and return the push that it sends with its value."""
    what, (push, delta) = go_on(exchange)
    assert what is Do.PUSH
    return push, delta.unique().item()


def step(learner: Learner, local: float) -> dict[int, Tensor]:
    """Make a local step; return what is written into the model after it."""
    learner.count_step(8.0)
    return learner.at_boundary(lambda _: full(local)).written


CONTRACT = contract_of(DecoupledDiLoCo(), MergeSettings(fragments=1), torch.float32)


def new_learner() -> Learner:
    return Learner(CONTRACT, "a", 1, [full(1.0)], "syncer")


@pytest.fixture
def learner() -> Learner:
    """One that has joined a run of one fragment, which is at zero."""
    learner = new_learner()
    exchange = learner.exchange()
    assert go_on(exchange) == (Do.JOIN, ("a", 1, 0, CONTRACT.as_plain()))
    fetch(exchange, START, (True, Reply(1, (), (START,))))
    assert learner.is_ready.is_set()
    assert torch.equal(learner.at_boundary(lambda _: full(1.0)).written[0], full(0.0))
    return learner


def ask(learner: Learner, *asked: Due) -> None:
    """Carry out an exchange in which the learner is asked for pushes."""
    exchange = learner.exchange()
    assert go_on(exchange) == (Do.POLL, ("a", 1, 1, learner.rounds.total_steps))
    end(exchange, Reply(1, asked, (START,)))


@pytest.mark.parametrize("failure", [TimeoutError(), Refused("learner", "join")])
def test_a_push_that_fails_is_answered_again_with_what_there_is_then(
    learner: Learner, failure: Exception
) -> None:
    ask(learner, DUE)
    step(learner, -1.0)
    exchange = learner.exchange()
    assert pushed(exchange) == (PUSH, 1.0)
    end(exchange, failure)
    if isinstance(failure, Refused):
        exchange = learner.exchange()
        assert go_on(exchange)[0] is Do.JOIN
        end(exchange, (True, Reply(1, (DUE,), (START,))))
    step(learner, -3.0)
    assert pushed(learner.exchange()) == (PUSH._replace(steps=2, tokens=16.0), 3.0)


def test_a_push_that_is_refused_for_good_is_not_repeated(learner: Learner) -> None:
    ask(learner, DUE)
    step(learner, -1.0)
    exchange = learner.exchange()
    assert pushed(exchange) == (PUSH, 1.0)
    assert go_on(exchange, Refused("duplicate", "is there"))[0] is Do.POLL
    end(exchange, Reply(1, (DUE,), (START,)))
    assert learner.counts == {"received": 1, "pushed": 0, "refused": 1}
    assert not learner.is_due
    step(learner, -2.0)
    assert go_on(learner.exchange())[0] is Do.POLL


def test_a_push_whose_progress_was_replaced_is_sent_until_it_is_taken(learner: Learner) -> None:
    """No later push has it: it waited while the fragment arrived. Also to a restarted syncer."""
    ask(learner, DUE)
    exchange = learner.exchange()
    assert go_on(exchange)[0] is Do.POLL
    step(learner, -1.0)  # while the poll is on its way
    fetch(exchange, FIRST, Reply(1, (), (FIRST,)))
    assert step(learner, -2.0).keys() == {0}
    for failure in (TimeoutError(), Refused("epoch", "join")):
        exchange = learner.exchange()
        assert pushed(exchange) == (PUSH, 1.0)
        end(exchange, failure)
    exchange = learner.exchange()
    assert go_on(exchange)[0] is Do.JOIN
    end(exchange, (True, Reply(2, (), (FIRST,))))
    assert pushed(learner.exchange()) == (PUSH._replace(epoch=2), 1.0)


def test_progress_that_was_not_asked_for_is_sent_before_it_is_replaced(learner: Learner) -> None:
    step(learner, -1.0)
    exchange = learner.exchange()
    assert go_on(exchange)[0] is Do.POLL
    fetch(exchange, FIRST, Reply(1, (), (FIRST,)))
    exchange = learner.exchange()
    assert go_on(exchange)[0] is Do.POLL
    end(exchange, Reply(1, (), (FIRST,)))  # it is there, and waits for the end of the local step
    assert torch.equal(step(learner, -2.0)[0], full(1.0))
    assert step(learner, -3.0) == {}
    exchange = learner.exchange()
    assert pushed(exchange) == (PUSH._replace(steps=2, tokens=16.0), 2.0)
    assert go_on(exchange)[0] is Do.POLL


def test_a_learner_leaves_after_its_last_push(learner: Learner) -> None:
    step(learner, -1.0)
    nothing_new, last = Reply(1, (), (START,)), (PUSH._replace(due=Due(0, 0, 0)), 1.0)
    exchange = learner.exchange()
    assert go_on(exchange)[0] is Do.POLL
    learner.prepare_to_leave(lambda _: full(-1.0))  # while the poll is on its way
    end(exchange, nothing_new)
    exchange = learner.exchange()
    assert pushed(exchange) == last
    end(exchange, TimeoutError())
    exchange = learner.exchange()
    assert go_on(exchange)[0] is Do.POLL
    end(exchange, nothing_new)  # the push was lost, so it does not leave
    learner.prepare_to_leave(lambda _: full(-1.0))
    exchange = learner.exchange()
    assert pushed(exchange) == last
    assert go_on(exchange)[0] is Do.POLL
    assert go_on(exchange, nothing_new) == (Do.LEAVE, ("a", 1))
    assert not learner.has_left.is_set()
    end(exchange)
    assert learner.has_left.is_set()


def test_what_arrives_from_another_syncer_than_the_last_one_is_not_taken(learner: Learner) -> None:
    """A version that a killed syncer had not saved, and one whose syncer was not joined yet."""
    exchange = learner.exchange()
    assert go_on(exchange)[0] is Do.POLL
    fetch(exchange, FIRST, Reply(1, (), (FIRST,)))
    exchange = learner.exchange()
    assert go_on(exchange)[0] is Do.POLL
    end(exchange, Refused("epoch", "join"))
    exchange = learner.exchange()
    assert go_on(exchange)[0] is Do.JOIN
    end(exchange, (True, Reply(2, (), (START,))))
    assert learner.is_due
    assert step(learner, -1.0) == {}
    exchange = learner.exchange()
    assert go_on(exchange)[0] is Do.POLL
    assert go_on(exchange, Reply(2, (), (Version(2, 1),)))[0] is Do.FETCH
    end(exchange, Fragment(3, START, full(0.0)))
    assert not learner.is_due


def test_a_learner_is_ready_when_all_has_arrived() -> None:
    learner = new_learner()
    exchange = learner.exchange()
    assert go_on(exchange)[0] is Do.JOIN
    assert go_on(exchange, (True, Reply(1, (), (START,))))[0] is Do.FETCH
    end(exchange, Fragment(2, START, full(0.0)))  # the syncer was restarted
    assert not learner.is_ready.is_set()


def test_a_learner_that_joins_mixes_nothing_of_its_own() -> None:
    contract = contract_of(DecoupledDiLoCo(mix=0.5), CONTRACT.settings, torch.float32)
    learner = Learner(contract, "a", 1, [full(1.0)], "syncer")
    exchange = learner.exchange()
    assert go_on(exchange)[0] is Do.JOIN
    fetch(exchange, START, (True, Reply(1, (), (START,))))
    assert torch.equal(learner.at_boundary(lambda _: full(1.0)).written[0], full(0.0))
