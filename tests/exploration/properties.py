"""What must hold in every run, whatever the order of events; written once for all worlds.

A property is a function of the history. It raises AssertionError with what is wrong, in words.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tests.exploration.records import Applied, Began, Finished, Merged, Read, Sent, Stopped
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
