"""What must hold in every run, whatever the order of events; written once for all worlds.

A property is a function of the history. It raises AssertionError with what is wrong, in words.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tests.exploration.records import (
    Applied,
    Began,
    Compared,
    Counted,
    Failed,
    Finished,
    Gone,
    Harmed,
    Merged,
    Mixed,
    Read,
    Reported,
    Sent,
    Stopped,
)
from tests.exploration.world import History

Property = Callable[[History], None]

_PROPERTIES: list[tuple[tuple[str, ...], Property]] = []


def holds_in(*worlds: str) -> Callable[[Property], Property]:
    """Check a function after every run of these worlds."""

    def add(function: Property) -> Property:
        _PROPERTIES.append((worlds, function))
        return function

    return add


def check(world: str, history: History) -> None:
    """Raise AssertionError, with the name of the property, if one does not hold."""
    for worlds, function in _PROPERTIES:
        if world in worlds:
            try:
                function(history)
            except AssertionError as error:
                error.property_name = function.__name__.replace("_", " ")  # type: ignore[attr-defined]
                raise


@holds_in("rounds", "members")
def outer_parameters_are_equal(history: History) -> None:
    """All that have applied a round in the same group have the same outer parameters."""
    first: dict[tuple[int, str], Applied] = {}
    for applied in history.of(Applied):
        other = first.setdefault((applied.round_index, applied.group), applied)
        assert applied.outer == other.outer, (
            f"round {applied.round_index}: {applied.worker} has {applied.outer}, "
            f"{other.worker} has {other.outer}"
        )


@holds_in("rounds", "members")
def weights_sum_to_one(history: History) -> None:
    """The shares of the messages in a result sum to 1."""
    for merged in history.of(Merged):
        total = math.fsum(merged.weights)
        assert abs(total - 1) < 1e-9, f"round {merged.round_index}: the weights sum to {total}"


@holds_in("rounds", "members")
def each_message_counts_once(history: History) -> None:
    """No message is in two results."""
    seen: dict[tuple[str, int], int] = {}
    for merged in history.of(Merged):
        for message in merged.is_of_messages:
            before = seen.setdefault(message, merged.round_index)
            assert before == merged.round_index, (
                f"the message of {message[0]} after step {message[1]} is in rounds {before} "
                f"and {merged.round_index}"
            )


@holds_in("rounds")
def all_stop_at_one_step(history: History) -> None:
    """A stop that all have agreed on stops all at one local step."""
    steps = {stopped.worker: stopped.step for stopped in history.of(Stopped)}
    assert len(set(steps.values())) <= 1, f"stopped after different local steps: {steps}"


@holds_in("members")
def a_repeated_message_is_the_same(history: History) -> None:
    """A worker sends a message again, unchanged, if an exchange has failed."""
    first: dict[tuple[str, str, int], Sent] = {}
    for sent in history.of(Sent):
        other = first.setdefault((sent.worker, sent.run, sent.round_index), sent)
        assert other.message == sent.message, (
            f"round {sent.round_index}: {sent.worker} has sent {other.message}, then {sent.message}"
        )


@holds_in("members")
def no_run_begins_beside_another_one(history: History) -> None:
    """Workers without a state do not begin a run while others that they reach have one."""
    for began in history.of(Began):
        assert not began.ahead, f"{began.worker} begins a run without {', '.join(began.ahead)}"


@holds_in("members")
def workers_finish_with_the_same_parameters(history: History) -> None:
    """All that have finished a run have the same outer parameters."""
    first: dict[str, Finished] = {}
    for finished in history.of(Finished):
        if not finished.may_differ:
            other = first.setdefault(finished.run, finished)
            assert other.outer == finished.outer, (
                f"{other.worker} finishes with {other.outer}, {finished.worker} with "
                f"{finished.outer}"
            )


@holds_in("members")
def no_sample_is_read_twice(history: History) -> None:
    """No two workers read the same position of the stream of a run."""
    readers: dict[tuple[str, int], str] = {}
    for read in history.of(Read):
        for position in read.positions:
            other = readers.setdefault((read.run, position), read.worker)
            assert other == read.worker, f"{other} and {read.worker} have read {position}"


@holds_in("rounds")
def order_does_not_change_numbers(history: History) -> None:
    """Whatever happens first, and also after a stop and a resume, the numbers are the same."""
    for compared in history.of(Compared):
        assert compared.found in compared.expected, (
            f"{compared.worker}: {compared.what} is {compared.found}, and without faults, in "
            f"another order, {' or '.join(compared.expected)}"
        )


@holds_in("rounds")
def gossip_conserves_the_mean(history: History) -> None:
    """The sum of what all workers have after a mix is the sum of what they have sent."""
    rounds: dict[tuple[int, int, int], dict[str, Mixed]] = {}
    for mixed in history.of(Mixed):
        key = (mixed.life, mixed.round_index, mixed.bucket)
        rounds.setdefault(key, {})[mixed.worker] = mixed
    for (_, number, _), found in rounds.items():
        if len(found) < next(iter(found.values())).num_workers:
            continue  # some were lost in it
        for before, after in zip(
            zip(*(mixed.sent for mixed in found.values()), strict=True),
            zip(*(mixed.received for mixed in found.values()), strict=True),
            strict=True,
        ):
            if all(map(math.isfinite, before)):
                size = max(1.0, *map(abs, before)) * _ROUNDING
                assert abs(math.fsum(before) - math.fsum(after)) <= size, (
                    f"round {number}: the workers have sent {before} and have {after}"
                )


@holds_in("rounds")
def steps_are_counted(history: History) -> None:
    """A worker has counted the steps that it has taken."""
    for counted in history.of(Counted):
        assert counted.taken == counted.counted, f"{counted}"


@holds_in("rounds")
def only_faults_end_a_run(history: History) -> None:
    """A worker fails only if one was lost, has raised an error, or was frozen for long."""
    harmed = {record.life for record in history.of(Harmed) if record.kind in _HARMFUL}
    for failed in history.of(Failed):
        assert failed.life in harmed, f"{failed.worker} fails without a fault: {failed.text}"


@holds_in("rounds")
def errors_name_who_is_lost(history: History) -> None:
    """A worker that fails because of another one names that one, and no healthy one."""
    gone = {(record.worker, record.life): record.time_s for record in history.of(Gone)}
    for failed in history.of(Failed):
        harms = [
            harm
            for harm in history.of(Harmed)
            if (harm.life, harm.kind in _HARMFUL) == (failed.life, True)
            and harm.time_s <= failed.time_s
        ]
        lost = {harm.worker for harm in harms}
        if failed.worker in lost:
            continue
        text = failed.text.lower()
        assert failed.kind == "WorkerFailure", f"{failed.worker}: {failed.kind}: {failed.text}"
        # One that was frozen may be back by the time when others look for it; and while the store
        # is frozen nobody knows of others.
        has_freeze = any(
            harm.life == failed.life and harm.kind.startswith("fr") for harm in history.of(Harmed)
        )
        assert has_freeze or any(_name(worker) in text for worker in lost), (
            f"{failed.worker} does not name {', '.join(sorted(lost))}: {failed.text}"
        )
        for worker, life in gone:
            if life == failed.life and worker not in lost and gone[worker, life] > failed.time_s:
                assert f"{_name(worker)} (no sign of life" not in text, (
                    f"{failed.worker} misses {worker}, which is alive: {failed.text}"
                )


@holds_in("rounds")
def reports_are_waited_for_once(history: History) -> None:
    """A worker waits for the readers of its reports no longer than three heartbeats, in all."""
    for reported in history.of(Reported):
        assert reported.seconds <= _LONGEST_REPORT_S, (
            f"{reported.worker} has waited {reported.seconds:g} s for those that read its reports"
        )


_ROUNDING = 1e-4
_HARMFUL = ("kill", "error", "frozen for long")
_LONGEST_REPORT_S = 3.0 + 1.2
"""Three heartbeats, and a call to the store that is late."""


def _name(worker: str) -> str:
    """The name of a worker in messages."""
    return f"worker {worker[1:]}"
