"""What a member decides in a round, without sockets, threads or time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_loco._util.decisions import carry_out
from lightning_loco.distributed.watchdog import WorkerFailure
from lightning_loco.distributed.worker_status import IN_ROUND, WorkerStatus
from lightning_loco.elastic.quorum import NO_STATE, Member, MemberInfo, Quorum, QuorumPlan
from lightning_loco.elastic.recovery import RunState
from lightning_loco.elastic.round_decisions import Do, RoundDecisions
from lightning_loco.elastic.round_request import PendingRound, RoundRequest, RoundResult
from tests.harness.manual_clock import ManualClock

TIMEOUT_S = 60.0
STATE = RunState({}, {})
Fails = Callable[[Do], Exception | None]


def quorum(rounds: dict[str, int], number: int = 1, **requests: Any) -> Quorum:
    """Return a quorum of members in some rounds; ``requests`` is what else they ask for."""
    values = {"open_group": "", "last_group": "6/3", "received": [], "min_members": 2, **requests}
    members = [
        Member(
            name,
            MemberInfo(
                index,
                values["open_group"],
                [f"{name}:1"],
                index,
                "run",
                values["min_members"],
                values["last_group"] if index > NO_STATE else "",
                values["received"],
                [],
            ).to_dict(),
        )
        for name, index in rounds.items()
    ]
    return Quorum(str(number), members)


class Script:
    """Carries out the decisions of member ``a`` with quorums and failures that a test chooses.

    ``fails`` returns an error for an action, or None.
    """

    def __init__(
        self,
        quorums: list[Quorum],
        fails: Fails = lambda what: None,
        round_index: int = 3,
        is_check_due: bool = False,
    ) -> None:
        self.clock = ManualClock()
        self.decisions = RoundDecisions(
            "a",
            0,
            "lighthouse:1",
            self.clock,
            lambda: False,
            lambda: 0,
            lambda plan: is_check_due,
            min_workers=2,
            timeout_s=TIMEOUT_S,
        )
        self.pending = PendingRound(
            RoundRequest(round_index, WorkerStatus(IN_ROUND, round_index, 2), {})
        )
        self.done: list[tuple[Do, Any]] = []
        self._quorums, self._fails = quorums, fails

    def run(self) -> list[Do]:
        """Run the round; return the kinds of the actions."""
        try:
            carry_out(self.decisions.run(self.pending), self._do)
        finally:
            self.kinds = [what for what, _ in self.done]
        return self.kinds

    def _do(self, what: Do, argument: Any) -> Any:
        self.done.append((what, argument))
        if (error := self._fails(what)) is not None:
            raise error
        match what:
            case Do.ASK:
                self.clock.advance(10.0)
                return self._quorums.pop(0)
            case Do.COMPARE:
                return argument._replace(drifted=(0,), joining=(0,), donor=1)
            case Do.EXCHANGE:
                statuses = torch.ones(len(argument.names), 4)
                return RoundResult(argument, torch.ones(3), statuses)
            case Do.RECEIVE:
                return STATE
            case Do.FINISH:
                self.pending.set_result(argument)
        return None

    @property
    def asked(self) -> list[list[str]]:
        """What this member says it has received, in each of its requests."""
        return [argument[0] for what, argument in self.done if what is Do.ASK]


def fail_once(kind: Do, error: Exception | None = None) -> Fails:
    """Fail in the first action of a kind."""
    errors = [error or RuntimeError("c has ended.")]
    return lambda what: errors.pop() if what is kind and errors else None


EXCHANGE = [Do.OPEN, Do.EXCHANGE, Do.CONFIRM, Do.FINISH]


def test_a_round_of_members_with_the_same_state() -> None:
    script = Script([quorum({"a": 3, "b": 3})])
    assert script.run() == [Do.ASK, *EXCHANGE]
    result = script.pending.result()
    assert result.plan.names == ("a", "b")
    assert result.data_start == (3, 0, 2)
    assert result.state is None
    assert script.decisions.last_group == "1/2"


def test_the_state_is_sent_once_the_round_is_complete(subtests: pytest.Subtests) -> None:
    for kind in (Do.SEND, None):
        with subtests.test(fails=kind):
            script = Script([quorum({"a": 3, "b": NO_STATE})], fail_once(kind or Do.PAUSE))
            left = [] if kind is None else [Do.LEAVE_GROUP]
            kinds = [Do.ASK, Do.OPEN, Do.COPY, *EXCHANGE[1:], Do.SEND, *left]
            assert script.run() == kinds
            assert script.pending.result().plan.joining == (1,)


def test_a_joining_member_receives_the_state_after_the_exchange() -> None:
    script = Script([quorum({"a": NO_STATE, "b": 3})], round_index=NO_STATE)
    assert script.run() == [Do.ASK, *EXCHANGE[:-1], Do.RECEIVE, Do.FINISH]
    assert script.pending.result().state is STATE


def test_nothing_is_exchanged_when_a_run_begins() -> None:
    script = Script([quorum({"a": NO_STATE, "b": NO_STATE})], round_index=NO_STATE)
    assert script.run() == [Do.ASK, Do.OPEN, Do.COPY, Do.FINISH, Do.SEND]
    assert script.pending.result().received is None


def test_a_member_that_has_drifted_receives_the_state() -> None:
    script = Script([quorum({"a": 3, "b": 3})], is_check_due=True)
    kinds = [Do.ASK, Do.OPEN, Do.COMPARE, Do.EXCHANGE, Do.CONFIRM, Do.RECEIVE, Do.FINISH]
    assert script.run() == kinds
    assert script.pending.result().plan.has_drifted


@pytest.mark.parametrize("kind", [Do.OPEN, Do.EXCHANGE, Do.CONFIRM, Do.RECEIVE])
def test_a_round_is_repeated_if_a_member_is_lost(
    kind: Do, caplog: pytest.LogCaptureFixture
) -> None:
    """It then tells the others what it has received, if it takes part with a message."""
    is_joining = kind is Do.RECEIVE
    index = NO_STATE if is_joining else 3
    rounds = {"a": index, "b": 3}
    script = Script(
        [quorum({**rounds, "c": 3}), quorum(rounds, 2)], fail_once(kind), round_index=index
    )
    kinds = script.run()
    steps = [*EXCHANGE[:-1], Do.RECEIVE, Do.FINISH] if is_joining else EXCHANGE
    first = steps[: steps.index(kind) + 1]
    assert kinds == [Do.ASK, *first, Do.LEAVE_GROUP, Do.ASK, *steps]
    received = ["1/3", "a", "b", "c"] if kind is Do.CONFIRM else []
    assert script.asked == [[], received]
    what = "may count already" if received else "is repeated"
    assert f"Round 3 {what}, since a member was lost: c has ended." in caplog.text
    assert script.pending.result().plan.names == ("a", "b")
    assert script.pending.result().data_start == (3, 0, 2)


def test_what_all_have_received_is_the_result(caplog: pytest.LogCaptureFixture) -> None:
    received = ["1/3", "a", "b", "c"]
    script = Script(
        [quorum({"a": 3, "b": 3, "c": 3}), quorum({"a": 3, "b": 3}, 2, received=received)],
        fail_once(Do.CONFIRM),
    )
    assert script.run() == [Do.ASK, *EXCHANGE[:-1], Do.LEAVE_GROUP, Do.ASK, Do.FINISH]
    result = script.pending.result()
    assert result.plan.names == ("a", "b", "c")
    assert result.received is not None
    assert result.received.tolist() == [1.0, 1.0, 1.0]
    assert script.decisions.last_group == "1/3"
    assert "Round 3 counts: all members that are left have received it." in caplog.text


def test_a_worker_that_also_needs_the_state_asks_again() -> None:
    received = ["1/3", "a", "b", "c"]
    three = quorum({"a": 3, "b": 3, "c": 3})
    script = Script(
        [three, quorum({"a": 3, "b": 3}, 2, received=received), quorum({"a": 3, "b": 4}, 3)],
        fail_once(Do.CONFIRM),
        is_check_due=True,
    )
    kinds = script.run()
    assert script.asked == [[], received, []]
    again = kinds.index(Do.ASK, 2)
    assert kinds[again : again + 2] == [Do.ASK, Do.ASK], "the result was not taken"
    assert script.pending.result().plan.round_index == 4


def test_a_round_waits_for_enough_members(
    caplog: pytest.LogCaptureFixture,
) -> None:
    alone, both = quorum({"a": 3}), quorum({"a": 3, "b": 3})
    script = Script([alone, alone, both])
    script.pending.waited_since = script.clock.now()
    assert script.run() == [Do.ASK, Do.PAUSE, Do.ASK, Do.PAUSE, Do.ASK, *EXCHANGE]
    assert "Round 3 waits for more workers. 1 of at least 2 are there (a)" in caplog.text
    caplog.clear()
    assert Script([alone, both]).run().count(Do.PAUSE) == 1
    assert not caplog.messages, "nobody waits for this round"


def test_a_round_is_repeated_until_the_timeout() -> None:
    ended, both = RuntimeError("b has ended."), quorum({"a": 3, "b": 3})
    late = Script([both] * 9, lambda what: ended if what is Do.CONFIRM else None)
    with pytest.raises(RuntimeError, match="b has ended"):
        late.run()
    assert len(late.asked) == TIMEOUT_S / 10.0 + 1


def test_a_lost_rank_of_this_worker_ends_the_round() -> None:
    script = Script([quorum({"a": 3, "b": 3})], fail_once(Do.CONFIRM, WorkerFailure("rank 1")))
    with pytest.raises(WorkerFailure):
        script.run()
    assert Do.LEAVE_GROUP not in script.kinds


def test_plans_tell_who_has_drifted() -> None:
    plan = QuorumPlan("1/2", ("a", "b"), 0, ("a:1", "b:1"), True, 1, (0,), 3, 0)
    assert not plan.has_drifted
    assert plan._replace(drifted=(0,)).has_drifted
    assert not plan._replace(drifted=(1,)).has_drifted
