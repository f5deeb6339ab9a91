"""What must hold in every run, whatever the order of events; written once for all worlds.

A property is a function of the history. It raises AssertionError with what is wrong, in words.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tests.exploration.records import (
    Applied,
    Began,
    Blamed,
    Chosen,
    Closed,
    Committing,
    Compared,
    Counted,
    Ended,
    Exchanged,
    Failed,
    Fetched,
    FetchStarted,
    Filed,
    Finished,
    Found,
    Gone,
    Harmed,
    Healed,
    Left,
    Merged,
    Mixed,
    Overtaken,
    Overwritten,
    Prepared,
    Published,
    Read,
    Removed,
    Reported,
    Reset,
    Resumed,
    Saved,
    SaveFailed,
    SaveStarted,
    Sent,
    Shown,
    Stopped,
    Unpublished,
    Waited,
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
def no_worker_is_overtaken(history: History) -> None:
    """Others do not continue without a worker that they reach, whose local steps would be lost."""
    for overtaken in history.of(Overtaken):
        raise AssertionError(f"{overtaken.worker} was overtaken in round {overtaken.round_index}")


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
def members_save_outer_parameters(history: History) -> None:
    """A member saves the outer parameters, also if its local ones are NaN."""
    for shown in history.of(Shown):
        assert shown.values == shown.outer, (
            f"{shown.worker} saves {shown.values}, not {shown.outer}"
        )
        assert all(map(math.isfinite, shown.outer)), f"{shown.worker} saves {shown.outer}"


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
    unwell = {(failed.worker, failed.life) for failed in history.of(Failed)}
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
        # Worker 0 takes the store with it, also if it has what it needs and ends as it should.
        zero = "w0", failed.life
        if zero not in unwell and gone.get(zero, math.inf) <= failed.time_s:
            lost.add("w0")
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
def nan_of_one_worker_heals(history: History) -> None:
    """The NaN of one worker reaches no consensus, and is gone from its own parameters soon."""
    for healed in history.of(Healed):
        assert healed.is_finite, f"{healed.worker}: {healed.what} hold NaN"


@holds_in("rounds")
def reports_are_waited_for_once(history: History) -> None:
    """A worker waits for the readers of its reports no longer than three heartbeats, in all."""
    for reported in history.of(Reported):
        assert reported.seconds <= _LONGEST_REPORT_S, (
            f"{reported.worker} has waited {reported.seconds:g} s for those that read its reports"
        )


_ROUNDING = 1e-4
_HARMFUL = ("kill", "error", "frozen for long", "ends at once")
_LONGEST_REPORT_S = 3.0 + 1.2
"""Three heartbeats, and a call to the store that is late."""


def _name(worker: str) -> str:
    """The name of a worker in messages."""
    return f"worker {worker[1:]}"


# ------------------------------------------------------------------------- pairwise gossip


@holds_in("gossip")
def what_is_received_was_published_whole(history: History) -> None:
    """A fetch returns what its peer has published, with its tag; it was the latest at some time."""
    published: dict[tuple[str, object, object], int] = {}
    last: dict[str, int] = {}
    until: dict[int, int] = {}
    began: dict[str, int] = {}
    for number, record in enumerate(history.records):
        if isinstance(record, Published):
            assert all(map(math.isfinite, record.values)), f"{record.life} has published NaN"
            if record.life in last:
                until[last[record.life]] = number
            last[record.life] = number
            published[record.name, record.tag, record.values] = number
        elif isinstance(record, FetchStarted):
            began[record.life] = number
        elif isinstance(record, Fetched) and record.peer:
            found = published.get((record.peer, record.tag, record.values))
            assert found is not None, f"{record.life} has received what nobody published: {record}"
            assert until.get(found, number) > began[record.life], (
                f"{record.life} has received what {record.peer} had replaced before it was asked"
            )


@holds_in("gossip")
def parameters_are_published_unless_two_are_read(history: History) -> None:
    """There is memory for the next parameters, unless two earlier ones are being sent."""
    for found in history.of(Unpublished):
        assert found.being_read > 1, f"{found.life} publishes nothing, and {found.being_read} read"


@holds_in("gossip")
def nothing_is_overwritten_that_may_be_read(history: History) -> None:
    """Parameters are written only to memory that is not being sent, and not to the latest ones."""
    for found in history.of(Overwritten):
        assert not found.readers, f"{found.life} writes to memory that {found.readers} read"
        assert not found.is_latest, f"{found.life} writes to what the next peer would get"


@holds_in("gossip")
def only_what_was_received_is_blended(history: History) -> None:
    """Parameters are blended at most once, with the tag with which they came, in the same model."""
    received: dict[str, tuple[object, ...]] = {}
    models: dict[str, int] = {}
    for record in history.records:
        if isinstance(record, Published) and record.values:
            assert models.setdefault(record.name, record.model) == record.model
        elif isinstance(record, Fetched) and record.peer:
            received[record.life] = record.peer, record.tag, record.values
        elif isinstance(record, Reset):
            received.pop(record.life, None)
        elif isinstance(record, Exchanged):
            assert received.pop(record.life, None) == (record.peer, record.tag, record.values), (
                f"{record.life} has blended what it has not received, or twice"
            )
            assert models[record.peer] == record.model, f"{record.peer} has another model"


@holds_in("gossip")
def a_blend_is_an_average(history: History) -> None:
    """The shares are in [0, 1] and sum to 1; the clock is averaged with the same shares."""
    for found in history.of(Exchanged):
        share = found.factor
        assert 0 <= share <= 1, f"the peer has the share {share}"
        before, after = found.clocks
        expected = (1 - share) * before + share * found.tag[0]
        assert math.isclose(after, expected, rel_tol=1e-9), f"the clock is {after}, not {expected}"
        if share == 1 and found.base == found.before:
            assert found.after == found.values
            continue
        for mine, base, theirs, result in zip(
            found.before, found.base, found.values, found.after, strict=True
        ):
            average = mine - base + (1 - share) * base + share * theirs
            assert abs(result - average) < 1e-5 or math.isnan(average), (
                f"{found.life} has {result} after a blend, not {average}"
            )


@holds_in("gossip")
def fetches_end_in_time(history: History) -> None:
    """A fetch ends by its deadline, and training waits no longer for it."""
    for record in history.records:
        if isinstance(record, (Fetched, Waited)):
            assert record.seconds <= record.limit_s + 1e-6, (
                f"it took {record.seconds:g} s, more than {record.limit_s:g} s: {record}"
            )


@holds_in("gossip")
def peers_that_are_passed_over_regain_points(history: History) -> None:
    """A peer gains a point whenever it could be chosen and was not, up to the largest score."""
    before: dict[str, dict[str, int]] = {}
    for record in history.records:
        if isinstance(record, Chosen):
            highest = max(record.scores.values())
            for name in record.passed if record.life in before else ():
                score = before[record.life][name]
                assert record.scores[name] > score or record.scores[name] >= highest, (
                    f"{record.life} has passed over {name}, whose score is still {score}"
                )
            before[record.life] = record.scores
        elif isinstance(record, Blamed):
            before.pop(record.life, None)


@holds_in("gossip")
def no_peer_is_blamed_for_a_close(history: History) -> None:
    """No peer loses points because this node was closed."""
    for blamed in history.of(Blamed):
        assert not blamed.is_closing, f"{blamed.life} was closed, and {blamed.peer} lost points"


@holds_in("gossip")
def closing_ends_everything_in_time(history: History) -> None:
    """A node that was closed has no threads, and it took a bounded time."""
    for closed in history.of(Closed):
        assert not closed.left, f"{closed.life} was closed, and {closed.left} go on"
        assert closed.seconds <= closed.limit_s + 1e-6, f"closing took {closed.seconds:g} s"


@holds_in("gossip")
def outcomes_of_fetches_add_up(history: History) -> None:
    """Each peer that was asked has one outcome, unless the node was closed meanwhile."""
    chosen: dict[str, int] = {}
    stopped: dict[str, int] = {}
    accepted: dict[str, int] = {}
    for record in history.records:
        if isinstance(record, Chosen):
            chosen[record.life] = chosen.get(record.life, 0) + 1
        elif isinstance(record, Fetched):
            stopped[record.life] = stopped.get(record.life, 0) + record.is_stopped
            accepted[record.life] = accepted.get(record.life, 0) + bool(record.peer)
        elif isinstance(record, Closed):
            counts, life = record.counts, record.life
            assert not counts["errors"], f"{life} had {counts['errors']} errors that are no peer's"
            outcomes = ("fetches", "timeouts", "refused", "empty", "not_finite", "too_large")
            total = sum(counts[name] for name in outcomes)
            missing = chosen.get(life, 0) - total
            assert 0 <= missing <= stopped.get(life, 0), f"{missing} outcomes are missing: {counts}"
            assert 0 <= counts["fetches"] - accepted.get(life, 0) <= stopped.get(life, 0), counts


@holds_in("gossip")
def a_resume_goes_on_where_it_was(history: History) -> None:
    """A worker that resumes has the parameters that it had saved."""
    for resumed in history.of(Resumed):
        assert resumed.saved == resumed.values, f"{resumed.worker} has resumed from other values"


# ------------------------------------------------------------------------- checkpoints


@holds_in("saves")
def the_newest_whole_checkpoint_is_never_lost(history: History) -> None:
    """A save that has returned on all workers is found, or one that it has not replaced.

    A save that had all its own files before another one began is replaced by that one, also if its
    writer was suspended and goes on. Two saves at the same time may replace each other.
    """
    returned: dict[str, set[int]] = {}
    began: dict[str, int] = {}
    prepared: dict[str, int] = {}
    committed: set[str] = set()
    confirmed: dict[str, list[str]] = {}
    for number, record in enumerate(history.records):
        if isinstance(record, SaveStarted):
            if record.rank == 0:
                began[record.stamp] = number
        elif isinstance(record, Prepared):
            prepared.setdefault(record.stamp, number)
        elif isinstance(record, Committing):
            committed.add(record.stamp)
        elif isinstance(record, Saved):
            ranks = returned.setdefault(record.stamp, set())
            ranks.add(record.rank)
            if len(ranks) == record.num_workers:
                confirmed.setdefault(record.path, []).append(record.stamp)
        elif isinstance(record, Removed):
            confirmed.pop(record.path, None)
        elif isinstance(record, Found) and record.path in confirmed:
            who = f"{record.reader} has found {record.stamp or 'nothing'} at {record.path}"
            assert record.stamp, who
            for stamp in confirmed[record.path]:
                assert stamp == record.stamp or prepared[record.stamp] >= began[stamp], (
                    f"{who}, which {stamp} had replaced"
                )


@holds_in("saves")
def a_checkpoint_is_found_whole_or_not_at_all(history: History) -> None:
    """Whoever reads finds all files of one save that was complete, or no checkpoint."""
    removed = {record.path for record in history.of(Removed)}
    complete: set[str] = set()
    for record in history.records:
        if isinstance(record, (Prepared, Committing)):
            complete.add(record.stamp)
        elif isinstance(record, Found) and record.path not in removed:
            assert not record.error, f"{record.reader} has found {record.path}: {record.error}"
            assert not record.stamp or record.stamp in complete


@holds_in("saves")
def no_later_save_is_deleted_as_an_older_one(history: History) -> None:
    """A save deletes no other one that has begun after its own files."""
    began: dict[str, int] = {}
    filed: dict[tuple[str, int], int] = {}
    for number, record in enumerate(history.records):
        if isinstance(record, SaveStarted):
            began.setdefault(record.stamp, number)
        elif isinstance(record, Filed):
            filed[record.stamp, record.rank] = number
        elif isinstance(record, Committing):
            for stamp in record.before:
                assert began[stamp] < filed[record.stamp, record.rank], (
                    f"{record.stamp} deletes {stamp}, which has begun after it"
                )


@holds_in("saves")
def a_save_fails_for_a_reason_and_on_all(history: History) -> None:
    """Without a fault all saves succeed, and an error of one worker is an error of all."""
    saved = {(record.life, record.stamp) for record in history.of(Saved)}
    for failed in history.of(SaveFailed):
        assert failed.is_excused, f"a save of {failed.life} has failed: {failed.text}"
        assert not failed.is_of_all or (failed.life, failed.stamp) not in saved, (
            f"a save of {failed.life} has failed on worker {failed.rank} and not on others"
        )


@holds_in("saves")
def nothing_is_left_of_earlier_saves(history: History) -> None:
    """After a save that no other one disturbs there is nothing of earlier ones."""
    for left in history.of(Left):
        assert left.stamps == (left.stamp,), f"{left.stamps} are left after {left.stamp}"
        strange = [name for name in left.names if not name.startswith(left.stamp)]
        strange += [name for name in left.names if name.endswith(".part") or "main" in name]
        assert not strange, f"{strange} are left after {left.stamp}"


@holds_in("saves")
def the_last_runs_succeed(history: History) -> None:
    """After all faults a run resumes and saves, and another one resumes from that."""
    for ended in history.of(Ended):
        assert not ended.error, f"the run {ended.worker}: {ended.error}"
