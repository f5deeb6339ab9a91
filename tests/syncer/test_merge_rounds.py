"""The decisions of a syncer and a learner: quorum, grace, retries, late pushes, versions."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lightning_loco.syncer.learner_rounds import LearnerRounds
from lightning_loco.syncer.merge_rounds import (
    Due,
    MergeRounds,
    MergeSettings,
    Push,
    Refused,
    Reply,
    Version,
)


def syncer(**settings: Any) -> MergeRounds:
    """A syncer with one local step per round, unless the settings say otherwise."""
    return MergeRounds(MergeSettings(**{"fragments": 2, "sync_every": 2, **settings}))


def joined(rounds: MergeRounds, *names: str, now: float = 0.0) -> None:
    for name in names:
        rounds.join(name, 1, 0, now)


def stepped(rounds: MergeRounds, names: str, steps: int, now: float) -> list[tuple[Due, ...]]:
    """All learners report steps; return what each is asked for then."""
    for name in names:
        rounds.note_steps(name, 1, rounds.epoch, steps, now)
    rounds.advance(now)
    return [rounds.reply_to(name).asked for name in names]


def push(rounds: MergeRounds, name: str, due: Due, now: float, **changes: Any) -> None:
    base = rounds.version(due.fragment)
    rounds.push(Push(name, 1, rounds.epoch, due, base, 1, 8.0)._replace(**changes), now)


def refusal(rounds: MergeRounds, name: str, due: Due, **changes: Any) -> str:
    with pytest.raises(Refused) as caught:
        push(rounds, name, due, 1.0, **changes)
    return caught.value.reason


def test_a_merge_has_a_quorum_however_long_it_takes() -> None:
    rounds = syncer(min_quorum=2, grace=0.0, retry_s=1e6, lease_s=1e6)
    joined(rounds, "a")
    assert stepped(rounds, "a", 1, 1.0) == [()]  # not before two are there
    joined(rounds, "b", now=1.0)
    due = stepped(rounds, "ab", 2, 2.0)[0][0]
    assert due == Due(1, 0, 0)
    push(rounds, "a", due, 2.0)
    assert rounds.advance(9e5) is None
    push(rounds, "b", due, 9e5)
    merge = rounds.advance(9e5)
    assert merge is not None
    assert [one.learner for one in merge.pushes] == ["a", "b"]


def test_more_pushes_are_waited_for_as_long_as_there_is_slack() -> None:
    rounds = syncer(delay=3, grace=0.5)
    joined(rounds, "a", "b")
    (due,) = stepped(rounds, "ab", 1, 2.0)[0]  # local steps of 2 s
    push(rounds, "a", due, 2.0)
    assert rounds.advance(2.0) is None
    assert rounds.next_time() == 4.0  # half of 3 steps would be 3 s, and it is at most a step
    push(rounds, "b", due, 3.0)
    assert rounds.advance(3.0) is not None  # all are there

    rounds = syncer(delay=1, grace=0.5)
    joined(rounds, "a", "b")
    (due,) = stepped(rounds, "ab", 1, 2.0)[0]
    push(rounds, "a", due, 3.0)  # the quorum has taken 1 s, of which half counts
    assert rounds.next_time() == pytest.approx(3.0 + 0.5 * (2.0 - 0.5))
    merge = rounds.advance(4.0)
    assert merge is not None
    assert len(merge.pushes) == 1


def test_a_pause_of_a_learner_is_not_taken_for_a_long_step() -> None:
    """After its validation of ten minutes, nothing waits minutes for one that validates then."""
    rounds = syncer(delay=2, lease_s=1e6)
    joined(rounds, "a", "b", "c")
    for step in range(1, 9):
        stepped(rounds, "abc", step, float(step))
    now = 600.0
    (due,) = stepped(rounds, "a", 9, now)[0][:1]
    push(rounds, "a", due, now)
    waits_until = rounds.next_time()
    assert waits_until is not None
    assert waits_until < now + 3.0


def test_a_learner_that_has_left_is_not_waited_for() -> None:
    rounds = syncer(delay=3)
    joined(rounds, "a", "b")
    (due,) = stepped(rounds, "ab", 1, 2.0)[0]
    push(rounds, "a", due, 2.0)
    assert rounds.advance(2.0) is None
    rounds.leave("b", 7)  # another process
    assert rounds.advance(2.0) is None
    rounds.leave("b", 1)
    assert rounds.advance(2.0) is not None


def test_a_silent_learner_is_not_expected_after_its_lease() -> None:
    rounds = syncer(delay=100, lease_s=5.0)
    joined(rounds, "a", "b")
    stepped(rounds, "ab", 1, 10.0)
    rounds.note_steps("a", 1, 1, 1, 14.0)
    push(rounds, "a", Due(1, 0, 0), 14.0)
    assert rounds.advance(14.0) is None
    assert rounds.next_time() == 15.0
    assert rounds.advance(15.0) is not None
    with pytest.raises(Refused, match="No learner b is known: join"):
        rounds.note_steps("b", 1, 1, 1, 16.0)


def test_a_learner_is_not_silent_while_its_push_arrives() -> None:
    rounds = syncer(lease_s=5.0)
    joined(rounds, "a", "b")
    rounds.speaking["a"] += 2
    rounds.advance(99.0)
    assert rounds.learners.keys() == {"a"}
    assert rounds.next_time() is None
    rounds.stop_speaking("a", 99.0)
    rounds.stop_speaking("a", 100.0)
    rounds.stop_speaking("b", 100.0)
    assert not rounds.speaking
    assert rounds.next_time() == 105.0
    rounds.advance(105.0)
    assert not rounds.learners


def test_without_a_quorum_pushes_are_asked_for_again() -> None:
    rounds = syncer(min_quorum=2, retry_s=30.0, lease_s=1e6)
    joined(rounds, "a", "b")
    (due,) = stepped(rounds, "ab", 1, 1.0)[0]
    push(rounds, "a", due, 2.0)
    rounds.advance(31.0)
    (again,) = stepped(rounds, "ab", 20, 31.0)[0][:1]
    assert again == Due(1, 0, 1)
    assert refusal(rounds, "b", due) == "attempt"
    push(rounds, "a", again, 32.0)
    push(rounds, "b", again, 32.0)
    assert rounds.advance(32.0) is not None


def test_rounds_are_committed_in_their_order() -> None:
    rounds = syncer(grace=0.0)
    joined(rounds, "a", "b")
    first, second = stepped(rounds, "ab", 2, 1.0)[0]
    push(rounds, "a", second, 1.0)
    assert rounds.advance(1.0) is None
    assert refusal(rounds, "a", second) == "duplicate"
    push(rounds, "a", first, 1.0)
    merge = rounds.advance(1.0)
    assert merge is not None
    assert merge.due == first
    assert rounds.advance(1.0) is None  # one at a time
    assert rounds.versions() == (Version(1, 0),) * 2
    rounds.commit(1.0)
    assert rounds.versions() == (Version(1, 1), Version(1, 0))
    merge = rounds.advance(1.0)
    assert merge is not None
    rounds.commit(1.0)
    assert rounds.versions() == (Version(1, 1), Version(1, 2))


def test_the_pace_follows_the_learners_steps() -> None:
    rounds = syncer(fragments=2, sync_every=8, in_flight=1, grace=0.0)
    joined(rounds, "a", "b")
    opened = []
    for step in range(1, 25):
        rounds.note_steps("a", 1, 1, 3 * step, float(step))
        rounds.note_steps("b", 1, 1, step, float(step))  # together 2 steps each on average
        rounds.advance(float(step))
        for due in rounds.reply_to("a").asked:
            push(rounds, "a", due, float(step))
            push(rounds, "b", due, float(step))
            merge = rounds.advance(float(step))
            assert merge is not None
            rounds.commit(float(step))
            opened.append(step)
    assert opened == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24]
    assert rounds.measured_sync_every == 8


def test_what_does_not_fit_is_refused_by_name() -> None:
    rounds = syncer(grace=0.0, in_flight=1, keep_late=False)
    joined(rounds, "a", "b")
    (due,) = stepped(rounds, "ab", 1, 1.0)[0]
    assert refusal(rounds, "a", due, epoch=2) == "epoch"
    assert refusal(rounds, "c", due) == "learner"
    assert refusal(rounds, "a", due, generation=2) == "generation"
    assert refusal(rounds, "a", Due(2, 1, 0)) == "not open"
    assert refusal(rounds, "a", Due(1, 1, 0)) == "attempt"
    assert refusal(rounds, "a", due, base=Version(1, 1)) == "base"  # not there yet
    assert refusal(rounds, "a", due, base=Version(1, -1)) == "base"
    assert refusal(rounds, "a", due, base=Version(3, 0)) == "base"
    assert refusal(rounds, "a", due, steps=0) == "steps"
    assert refusal(rounds, "a", due, tokens=math.nan) == "steps"
    push(rounds, "a", due, 1.0)
    assert refusal(rounds, "a", due) == "duplicate"
    merge = rounds.advance(1.0)
    assert merge is not None
    assert refusal(rounds, "b", due) == "late"  # it is being merged
    rounds.commit(1.0)
    assert refusal(rounds, "b", due) == "late"
    with pytest.raises(Refused, match="newer process") as caught:
        rounds.join("a", 0, 0, 1.0)
    assert caught.value.reason == "generation"


def test_old_bases_have_an_age_and_a_limit() -> None:
    rounds = syncer(fragments=1, sync_every=1, grace=0.0, max_age=2)
    joined(rounds, "a", "b")
    for number in range(1, 5):
        (due,) = stepped(rounds, "ab", number, float(number))[0]
        if number == 3:
            push(rounds, "b", due, 1.0, base=Version(1, 0))
        if number == 4:
            rounds.join("c", 1, 0, 4.0)
            assert refusal(rounds, "c", due, base=Version(1, 0)) == "base"  # 3 merges old
        push(rounds, "a", due, 1.0)
        merge = rounds.advance(float(number))
        assert merge is not None
        assert merge.ages == ((0, 2) if number == 3 else (0,))
        rounds.commit(float(number))


def test_late_pushes_are_in_the_next_merge_of_their_fragment() -> None:
    rounds = syncer(fragments=1, sync_every=1, grace=0.0)
    joined(rounds, "a", "b")
    (first,) = stepped(rounds, "ab", 1, 1.0)[0]
    push(rounds, "a", first, 1.0)
    merge = rounds.advance(1.0)
    assert merge is not None
    push(rounds, "b", first, 1.5, steps=2)  # while the others are being merged
    assert refusal(rounds, "b", first, steps=2) == "duplicate"  # that came twice
    push(rounds, "b", first, 1.5, steps=3)  # again, after a reply was lost: it has all of before
    rounds.commit(2.0)
    assert [(one.learner, one.steps) for one in rounds.waiting_pushes()] == [("b", 3)]
    (second,) = stepped(rounds, "ab", 2, 3.0)[0]
    push(rounds, "a", second, 3.0)
    push(rounds, "b", second, 3.0)  # it has received the first merge, so this is new progress
    merge = rounds.advance(3.0)
    assert merge is not None
    found = [(one.learner, one.due.round, age) for one, age in zip(*merge[1:], strict=True)]
    assert found == [("a", 2, 0), ("b", 1, 1), ("b", 2, 0)]
    assert rounds.waiting_pushes() == set(merge.pushes)
    rounds.commit(4.0)
    assert rounds.waiting_pushes() == set()
    assert refusal(rounds, "b", first, base=Version(1, 0)) == "base"  # that came very late


def test_progress_on_one_base_is_merged_once() -> None:
    """A learner that has not received the merge of its push would send all of it again."""
    rounds = syncer(fragments=1, sync_every=1, grace=0.0)
    joined(rounds, "a", "b")
    start = Version(1, 0)
    (first,) = stepped(rounds, "ab", 1, 1.0)[0]
    push(rounds, "a", first, 1.0)
    assert rounds.advance(1.0) is not None
    rounds.commit(1.0)
    push(rounds, "b", first, 1.0, base=start)  # late
    (second,) = stepped(rounds, "ab", 2, 2.0)[0]
    assert refusal(rounds, "a", second, base=start) == "base"
    push(rounds, "b", second, 2.0, base=start, steps=5)  # takes the place of the late one
    merge = rounds.advance(2.0)
    assert merge is not None
    assert [(one.learner, one.steps) for one in merge.pushes] == [("b", 5)]
    rounds.commit(2.0)
    for again in (rounds, MergeRounds(rounds.settings, rounds.state_dict())):
        # Another process, which may continue from before the push; also after a restart.
        again.join("a", 2, 0, 3.0)
        again.join("b", 1, 2, 3.0)
        (third,) = stepped(again, "b", 9, 4.0)[0]
        assert refusal(again, "a", third, generation=2, base=start) == "base"
        push(again, "a", third, 4.0, generation=2)


def test_a_later_process_that_began_earlier_does_not_make_a_base_new() -> None:
    """It continues from a save before what the process before it has pushed."""
    rounds = syncer(fragments=1, sync_every=1, grace=0.0)
    joined(rounds, "a", "b")
    (first,) = stepped(rounds, "ab", 1, 1.0)[0]
    push(rounds, "b", first, 1.0)
    assert rounds.advance(1.0) is not None
    rounds.commit(1.0)
    (second,) = stepped(rounds, "ab", 2, 2.0)[0]
    push(rounds, "a", second, 2.0)
    rounds.join("a", 2, 1, 2.0)
    push(rounds, "a", first, 2.0, generation=2, base=Version(1, 0))
    merge = rounds.advance(2.0)
    assert merge is not None
    assert [one.base.round for one in merge.pushes] == [0, 1]
    rounds.commit(2.0)
    assert refusal(rounds, "a", second, generation=2, base=Version(1, 1)) == "base"


def test_a_push_that_is_many_merges_old_is_refused() -> None:
    rounds = syncer(fragments=1, sync_every=1, grace=0.0, max_age=3)
    joined(rounds, "a", "b")
    for number in range(1, 7):
        (due,) = stepped(rounds, "a", 2 * number, float(number))[0]
        push(rounds, "a", due, float(number))
        assert rounds.advance(float(number)) is not None
        rounds.commit(float(number))
    stepped(rounds, "b", 9, 8.0)
    assert refusal(rounds, "b", Due(6, 0, 0), base=Version(1, 2)) == "base"
    push(rounds, "b", Due(6, 0, 0), 8.0, base=Version(1, 3))
    assert rounds.state_dict()["used"] == [["a", 0, [1, 5]]]


def test_a_version_that_was_lost_is_not_taken_for_its_successor() -> None:
    rounds = syncer(fragments=1, sync_every=1, grace=0.0)
    joined(rounds, "a")
    saved: dict[str, Any] = {}
    for number in (1, 2, 3):
        (due,) = stepped(rounds, "a", number, float(number))[0]
        push(rounds, "a", due, 1.0)
        rounds.advance(float(number))
        rounds.commit(float(number))
        if number == 2:
            saved = rounds.state_dict()
    again = MergeRounds(rounds.settings, saved)
    assert again.version(0) == Version(1, 2)
    with pytest.raises(Refused, match="The syncer has epoch 2, and not 1: join"):
        again.note_steps("a", 1, 1, 3, 9.0)
    assert again.join("a", 1, 3, 9.0) == Reply(2, (), (Version(1, 2),))
    (due,) = stepped(again, "a", 4, 10.0)[0]
    assert refusal(again, "a", due, base=Version(1, 3)) == "base"
    push(again, "a", due, 10.0)
    again.advance(10.0)
    again.commit(10.0)
    assert again.version(0) == Version(2, 3)
    assert MergeRounds(rounds.settings, again.state_dict()).version(0) == Version(2, 3)


def test_a_learner_answers_once_and_a_lost_push_has_more_later() -> None:
    learner = LearnerRounds("a", 1, fragments=2)
    due = Due(1, 0, 0)
    versions = (Version(1, 0), Version(1, 2))
    learner.count(8.0)
    assert learner.listen(Reply(1, (due,), versions)) == [0, 1]
    assert learner.answers() == []  # nothing received yet
    for fragment, version in enumerate(versions):
        learner.receive(fragment, version)
    assert learner.listen(Reply(1, (due,), versions)) == []
    assert learner.answers() == []  # no steps
    learner.count(8.0)
    (first,) = learner.answers()
    assert first == Push("a", 1, 1, due, Version(1, 0), 1, 8.0)
    learner.count(16.0)
    assert learner.answers() == []
    learner.lost(due)
    (second,) = learner.answers()
    assert (second.steps, second.tokens) == (2, 24.0)
    assert learner.listen(Reply(1, (due._replace(attempt=1),), versions)) == []
    assert len(learner.answers()) == 1
    assert learner.listen(Reply(2, (due._replace(attempt=1),), versions)) == []
    assert len(learner.answers()) == 1  # a syncer that was restarted does not have it
    learner.receive(0, Version(1, 1))
    assert (learner.steps, learner.tokens, learner.total_steps) == ([0, 2], [0.0, 24.0], 3)


def test_progress_that_was_not_asked_for_is_pushed_late() -> None:
    learner = LearnerRounds("a", 1, fragments=1)
    start, following = Version(1, 0), Version(1, 1)
    learner.listen(Reply(1, (), (start,)))
    assert learner.leftover(0, start) is None
    learner.receive(0, start)
    assert learner.leftover(0, following) is None
    learner.count(8.0)
    late = Push("a", 1, 1, Due(1, 0, 0), start, 1, 8.0)
    assert learner.leftover(0, following) == late
    assert learner.leftover(0, following) is None  # it was pushed
    learner.lost(late.due)
    assert learner.leftover(0, following) == late
    learner.receive(0, following)
    learner.count(8.0)
    learner.listen(Reply(1, (Due(2, 0, 0),), (following,)))
    assert len(learner.answers()) == 1
    assert learner.leftover(0, Version(1, 2)) is None


def test_a_learner_follows_a_restarted_syncer_to_an_older_version() -> None:
    learner = LearnerRounds("a", 1, fragments=1)
    due = Due(4, 0, 0)
    assert learner.listen(Reply(1, (due,), (Version(1, 3),))) == [0]
    learner.receive(0, Version(1, 3))
    assert not learner.is_news(1, 0, Version(1, 2))  # a reply that took long
    assert learner.listen(Reply(2, (), (Version(1, 2),))) == [0]
    assert not learner.is_news(1, 0, Version(1, 4))  # of the syncer that was killed
    assert learner.is_news(2, 0, Version(1, 2))
    learner.receive(0, Version(1, 2))
    assert not learner.is_news(2, 0, Version(1, 2))
    # If its version was saved, it needs nothing.
    assert learner.listen(Reply(3, (), (Version(1, 2),))) == []
    assert not learner.is_news(3, 0, Version(1, 1))
    # Its folder was lost, and the clock was set back.
    assert learner.listen(Reply(2, (), (Version(2, 0),))) == [0]
    assert learner.is_news(2, 0, Version(2, 0))
    learner.receive(0, Version(2, 0))
    assert learner.listen(Reply(2, (), (Version(2, 0),))) == []
