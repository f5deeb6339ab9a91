"""Defects of elastic members that exploration is to find."""

from __future__ import annotations

from tests.exploration.mutants import Mutant

_ELASTIC = "lightning_loco.elastic"

MUTANTS = [
    Mutant(
        "a cut connection to the own store is not made anew",
        f"{_ELASTIC}.group:MemberGroup.count_finished",
        "except RuntimeError:",
        "except ZeroDivisionError:",
    ),
    Mutant(
        "an exchange counts although one that is left has not received it",
        f"{_ELASTIC}.quorum:_agrees",
        "return other.received[:1] == [group]",
        "return True",
    ),
    Mutant(
        "a member does not say what it has received",
        f"{_ELASTIC}.round_decisions:RoundDecisions._find_members",
        "[] if received is None else received.plan.group_and_members",
        "[]",
    ),
    Mutant(
        "a result is applied before all have confirmed",
        f"{_ELASTIC}.round_decisions:RoundDecisions.run",
        "yield Do.CONFIRM, None",
        "pass",
    ),
    Mutant(
        "an old result is kept when the exchange is repeated",
        f"{_ELASTIC}.round_decisions:RoundDecisions.run",
        "unconfirmed, received = received, None",
        "unconfirmed = received",
    ),
    Mutant(
        "a joining worker has weight",
        f"{_ELASTIC}.rounds:RoundThread._exchange_messages",
        "weight=0.0",
        "weight=1.0",
    ),
    Mutant(
        "members of other groups count as members with the state",
        f"{_ELASTIC}.quorum:make_plan",
        "[name for name in ahead if infos[name].last_group == last_group]",
        "ahead",
    ),
    Mutant(
        "a message is overwritten by its exchange",
        f"{_ELASTIC}.exchanges:SumExchange.exchange",
        "message.cpu() if message.is_cuda else message.clone()",
        "message",
    ),
    Mutant(
        "members that have finished do not count",
        f"{_ELASTIC}.round_decisions:RoundDecisions.ask",
        "self._min_workers - self._get_num_finished()",
        "self._min_workers",
    ),
    Mutant(
        "a worker that finishes waits for others",
        f"{_ELASTIC}.connection:ElasticConnection.finish",
        "self._rounds.decisions.is_leaving = True",
        "pass",
    ),
    Mutant(
        "a restarted lighthouse is not told who is alive",
        f"{_ELASTIC}.rounds:QuorumRequester._request",
        "self._live_members() if has_restarted else []",
        "[]",
        lacks="Restarts of it while all heartbeats are prompt; late ones excuse this.",
    ),
    Mutant(
        "a restarted lighthouse is asked at once",
        f"{_ELASTIC}.lighthouse:Lighthouse.quorum",
        "self.uptime.wait(deadline)",
        "pass",
    ),
    Mutant(
        "a group that has failed is used again",
        f"{_ELASTIC}.round_decisions:RoundDecisions.run",
        "yield Do.LEAVE_GROUP, None",
        "pass",
        lacks="Errors within three minutes of a cut are excused, and it causes no others.",
    ),
    Mutant(
        "no member looks whether another one has given up",
        f"{_ELASTIC}.group:MemberMonitor._watch_next",
        "self._check_left()",
        "pass",
        lacks="Groups of gloo in which a transfer under way delays an abort.",
    ),
    Mutant(
        "new members continue where the first one is in the data",
        f"{_ELASTIC}.quorum:make_plan",
        "data_position=max(",
        "data_position=min(",
    ),
    Mutant(
        "samples that are read until the result is applied do not count",
        f"{_ELASTIC}.data_shard:DataShard.first_unused",
        "(self._used + self._most_per_round + 1)",
        "self._used",
    ),
    Mutant(
        "a member that has drifted sends its state",
        f"{_ELASTIC}.consistency:ConsistencyCheck.compare",
        "next(rank for rank, value in known.items() if value == expected)",
        "plan.donor",
    ),
    Mutant(
        "local steps made before the state was received count",
        f"{_ELASTIC}.recovery:resume_from_state",
        "sync.fresh_at = worker.steps",
        "pass",
    ),
    Mutant(
        "the state is copied after the exchange",
        f"{_ELASTIC}.exchanges:SumExchange.send_state",
        'reach("before the state is sent")',
        "state = copy_state(self._engine, state.values, False)",
    ),
    Mutant(
        "a member with NaN in its local parameters cannot save (0e98b15)",
        "lightning_loco.model.worker:Worker.show_consensus",
        "if num_valid == 0 and outer is None:",
        "if num_valid == 0:",
    ),
]
