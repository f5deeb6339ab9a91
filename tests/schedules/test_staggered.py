"""The schedule Staggered, its fragments, and the schedules of async and streaming DiLoCo."""

from __future__ import annotations

import itertools
import math

import pytest

from lightning_loco.schedules import (
    EverySteps,
    Schedule,
    Staggered,
    StepInfo,
    VaryingSteps,
    hidden_rounds,
)
from lightning_loco.schedules.staggered import layer_of, split_into_fragments

GPT = {
    "embedding.weight": 50,
    "blocks.0.attention.weight": 12,
    "blocks.0.mlp.0.weight": 20,
    "blocks.1.attention.weight": 12,
    "blocks.1.mlp.0.weight": 20,
    "blocks.2.attention.weight": 12,
    "blocks.2.mlp.0.weight": 20,
    "norm.weight": 4,
    "norm.bias": 4,
}
STARTS = dict(zip(GPT, itertools.accumulate(GPT.values(), initial=0), strict=False))


class Pending:
    """A pending round; only its start matters."""

    def __init__(self, began_at: int) -> None:
        self.began_at = began_at

    def has_arrived(self) -> bool:
        return False


def play(schedule: Schedule, steps: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return (step, fragment) of each start and each end, calling ``due`` as an engine does."""
    begun: list[tuple[int, int]] = []
    ended: list[tuple[int, int]] = []
    pending_rounds: dict[int, Pending] = {}
    round_index = since = 0
    for step in range(1, steps + 1):
        since += 1
        for fragment in range(schedule.num_fragments):
            info = StepInfo(
                step, since, round_index, fragment, math.inf, pending_rounds.get(fragment)
            )
            begins, ends = schedule.due(info)
            if ends:
                del pending_rounds[fragment]
                ended.append((step, fragment))
            if begins:
                begun.append((step, fragment))
                if schedule.is_overlapped(round_index):
                    pending_rounds[fragment] = Pending(step)
                else:
                    ended.append((step, fragment))
        if begun and begun[-1][0] == step:
            round_index, since = round_index + 1, 0
    return begun, ended


def test_the_order_of_two_fragments() -> None:
    begun, ended = play(Staggered(6, 2), 15)
    assert begun == ended == [(3, 0), (6, 1), (9, 0), (12, 1), (15, 0)]


def test_results_are_applied_after_the_delay_even_if_another_round_has_begun() -> None:
    begun, ended = play(Staggered(6, 2, delay=4), 16)
    assert begun == [(3, 0), (6, 1), (9, 0), (12, 1), (15, 0)]
    assert ended == [(step + 4, fragment) for step, fragment in begun if step + 4 <= 16]


def test_with_delay_sync_every_a_round_ends_when_the_next_one_begins() -> None:
    for fragments in (1, 2, 3):
        begun, ended = play(Staggered(6, fragments, delay=6), 30)
        assert ended == [(step + 6, fragment) for step, fragment in begun if step + 6 <= 30]
    expected = play(EverySteps(6, overlap=True, warm_start=False), 30)
    assert play(Staggered(6, 1, delay=6), 30) == expected
    late = Staggered(6, 1, delay=6)
    assert late.due(StepInfo(7, 5, 1, 0, 1.0, Pending(0))) == (
        False,
        False,
    )  # although 7 steps have passed


def test_a_warm_start_ends_the_first_rounds_at_once() -> None:
    begun, ended = play(Staggered(4, 2, delay=3, warm_start=True), 9)
    assert begun == [(2, 0), (4, 1), (6, 0), (8, 1)]
    assert ended == [(2, 0), (4, 1), (9, 0)]


def test_starts_are_distinct_and_each_fragment_has_one_per_sync_every(
    subtests: pytest.Subtests,
) -> None:
    for every in range(1, 12):
        for fragments in range(1, every + 1):
            with subtests.test(every=every, fragments=fragments):
                begun, _ = play(Staggered(every, fragments), 3 * every)
                steps = [step for step, _ in begun]
                assert [fragment for _, fragment in begun] == list(range(fragments)) * 3
                assert len(set(steps)) == 3 * fragments
                assert steps[fragments - 1 :: fragments] == [every, 2 * every, 3 * every]
                assert steps[fragments:] == [step + every for step in steps[:-fragments]]
                gaps = {after - before for before, after in zip([0, *steps], steps, strict=False)}
                assert max(gaps) - min(gaps) <= 1


def test_a_list_gives_each_worker_its_schedule() -> None:
    schedule = Staggered([4, 8], 2, delay=4)
    schedule.check(2)
    assert [schedule.of_worker(w) for w in (0, 1)] == [
        Staggered(4, 2, delay=4),
        Staggered(8, 2, delay=4),
    ]
    assert schedule.shares(2) == [1, 2]
    assert [schedule.staleness_of(w) for w in (0, 1)] == [1.0, 0.5]
    assert [schedule.shortest_run(w) for w in (0, 1)] == [8, 0]
    assert not schedule.is_whole_phase
    with pytest.raises(ValueError, match="lists 2 numbers for 3 workers"):
        schedule.check(3)


def test_staleness() -> None:
    assert (Staggered(10, delay=2).staleness_of(0), Staggered(10).staleness_of(0)) == (0.2, 0.0)
    assert Staggered(10, delay=10).is_whole_phase
    assert not Staggered(10, delay=9).is_whole_phase
    assert EverySteps(3, True).staleness_of(0) == 1.0
    assert EverySteps(3, True).is_whole_phase


def test_describe_and_str() -> None:
    assert Staggered((4, 8), 2, 1, ("a", "b")).describe() == {
        "sync_every": [4, 8],
        "fragments": 2,
        "delay": 1,
        "pattern": ["a", "b"],
        "warm_start": False,
    }
    assert Staggered(4).describe()["pattern"] == "strided"
    assert str(Staggered(6, 2, 1)) == (
        "a round of each of 2 fragments every 6 local steps, applied 1 steps later"
    )
    assert str(Staggered(6)) == "a round every 6 local steps"


def test_invalid_arguments_are_refused(subtests: pytest.Subtests) -> None:
    for arguments, error, text in (
        ({"sync_every": 0}, ValueError, "must be at least 1, got 0"),
        ({"sync_every": "10"}, TypeError, "must be an integer"),
        ({"sync_every": 2, "fragments": 3}, ValueError, "from 1 to sync_every=2, got 3"),
        ({"sync_every": [9, 2], "fragments": 3}, ValueError, "from 1 to sync_every=2, got 3"),
        ({"fragments": 0}, ValueError, "from 1 to sync_every=100, got 0"),
        ({"fragments": 2.0}, TypeError, "fragments counts the parts .* must be an integer"),
        ({"fragments": True}, TypeError, "must be an integer, got True"),
        ({"sync_every": 5, "delay": 6}, ValueError, "from 0 to sync_every=5, got 6"),
        ({"delay": -1}, ValueError, "from 0 to sync_every=100, got -1"),
        ({"delay": 0.5}, TypeError, "delay counts the local steps .* must be an integer"),
        (
            {"pattern": "stripes"},
            ValueError,
            "strided, contiguous, even, or a list .* got 'stripes'",
        ),
        ({"pattern": 3}, ValueError, "strided, contiguous, even, or a list .* got 3"),
        ({"pattern": ["a", "b"]}, ValueError, "lists 2 regular expressions for fragments=1"),
        ({"pattern": ["a("]}, ValueError, r"'a\(' is not a regular expression"),
        ({"pattern": [3]}, ValueError, "3 is not a regular expression"),
    ):
        with subtests.test(arguments=arguments), pytest.raises(error, match=text):
            Staggered(**arguments)


# ---------------------------------------------------------------------------- fragments


def names_in(fragment: list[range]) -> list[str]:
    """Return the parameters of a fragment; assert that each is in it as a whole or not at all."""
    names = []
    for name, size in GPT.items():
        inside = [i in part for i in range(STARTS[name], STARTS[name] + size) for part in fragment]
        assert sum(inside) in (0, size)
        names += [name] if any(inside) else []
    return names


def layers_in(fragment: list[range]) -> list[str]:
    return list(dict.fromkeys(map(layer_of, names_in(fragment))))


def test_a_layer_is_a_numbered_block_or_a_module(subtests: pytest.Subtests) -> None:
    for name, layer in (
        ("model.blocks.12.mlp.0.weight", "model.blocks.12"),
        ("0.weight", "0"),
        ("stages.1.blocks.2.bias", "stages.1"),
        ("head.bias", "head"),
        ("encoder.norm.weight", "encoder.norm"),
        ("scale", ""),
    ):
        with subtests.test(name):
            assert layer_of(name) == layer


def test_strided_assigns_layers_to_fragments_in_turn() -> None:
    fragments = split_into_fragments(GPT, 2, "strided")
    assert [layers_in(fragment) for fragment in fragments] == [
        ["embedding", "blocks.1", "norm"],
        ["blocks.0", "blocks.2"],
    ]
    assert fragments[0] == [range(50), range(82, 114), range(146, 154)]


def test_contiguous_fragments_are_neighbouring_layers_of_about_the_same_size() -> None:
    fragments = split_into_fragments(GPT, 3, "contiguous")
    assert fragments == [[range(50)], [range(50, 114)], [range(114, 154)]]
    (whole,) = split_into_fragments(GPT, 1, "contiguous")
    assert whole == [range(154)]
    lopsided = split_into_fragments({"a.w": 100, "b.w": 1, "c.w": 1}, 3, "contiguous")
    assert lopsided == [[range(100)], [range(100, 101)], [range(101, 102)]]
    lopsided = split_into_fragments({"a.w": 1, "b.w": 1, "c.w": 100}, 2, "contiguous")
    assert lopsided == [[range(2)], [range(2, 102)]]


def test_even_fragments_have_equally_many_elements() -> None:
    assert split_into_fragments(GPT, 3, "even") == [
        [range(51)],
        [range(51, 102)],
        [range(102, 154)],
    ]
    one_layer = {"head.weight": 6, "head.bias": 1}
    assert split_into_fragments(one_layer, 4, "even") == [
        [range(1)],
        [range(1, 3)],
        [range(3, 5)],
        [range(5, 7)],
    ]
    with pytest.raises(ValueError, match="fragments=8 is more than the 7 trainable elements"):
        split_into_fragments(one_layer, 8, "even")


@pytest.mark.parametrize("pattern", ["strided", "contiguous"])
def test_every_element_is_in_one_fragment(pattern: str) -> None:
    for sizes in itertools.product((0, 1, 7), (1, 5), (2, 30), (1, 3), (0, 4)):
        named = {f"blocks.{i}.weight": size for i, size in enumerate(sizes)}
        layers = sum(map(bool, sizes))
        for count in range(1, layers + 1):
            fragments = split_into_fragments(named, count, pattern)
            assert all(map(any, fragments))
            covered = sorted(i for fragment in fragments for part in fragment for i in part)
            assert covered == list(range(sum(sizes)))
            for fragment in fragments:
                gaps = [b.start - a.stop for a, b in itertools.pairwise(fragment)]
                assert min(gaps, default=1) > 0  # adjacent slices are merged
        with pytest.raises(ValueError, match=f"more than the {layers} layers"):
            split_into_fragments(named, layers + 1, pattern)


def test_fragments_by_name() -> None:
    first, second = split_into_fragments(GPT, 2, ["attention", "mlp|norm|embedding"])
    assert names_in(first) == [name for name in GPT if "attention" in name]
    assert names_in(second) == [name for name in GPT if "attention" not in name]


@pytest.mark.parametrize(
    ("patterns", "text"),
    [
        (["attention", "mlp|norm"], r"'embedding.weight' must match one pattern and matches none"),
        (["block", "mlp|norm|emb"], r"'blocks.0.mlp.0.weight' .* matches 'block' and 'mlp\|norm"),
        (["", "head"], "No trainable parameter matches the pattern 'head'"),
    ],
)
def test_a_parameter_belongs_to_one_fragment(patterns: list[str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        split_into_fragments(GPT, 2, patterns)


# ------------------------------------------------------------------------- hidden rounds


def test_arguments_of_hidden_rounds_become_a_schedule(subtests: pytest.Subtests) -> None:
    for arguments, schedule in (
        ((100,), Staggered(100, 4, 25, "even")),
        ((10,), Staggered(10, 4, 2, "even")),
        ((3,), Staggered(3, 3, 1, "even")),
        ((1,), Staggered(1, 1, 1, "even")),
        (([9, 30],), Staggered([9, 30], 4, 2, "even")),
        ((10, 5), Staggered(10, 5, 2, "even")),
        ((10, 5, 7), Staggered(10, 5, 7, "even")),
        ((10, 1), Staggered(10, 1, 10, "even")),
        ((10, None, 3, True), Staggered(10, 1, 3, "even", warm_start=True)),
        ((10, None), EverySteps(10, overlap=True, warm_start=False)),
        ((10, None, None, True), EverySteps(10, overlap=True)),
        (({0: 10}, None, None, True), VaryingSteps({0: 10}, overlap=True)),
    ):
        with subtests.test(arguments=arguments):
            assert hidden_rounds(*arguments) == schedule


def test_invalid_arguments_of_hidden_rounds_are_refused(subtests: pytest.Subtests) -> None:
    for arguments, error, text in (
        (({0: 10},), ValueError, "need one sync_every for the whole run, got {0: 10}"),
        (({0: 10}, None, 2), ValueError, "need one sync_every for the whole run"),
        ((10, 11), ValueError, "from 1 to sync_every=10, got 11"),
        ((10, 0), ValueError, "from 1 to sync_every=10, got 0"),
        ((10, "many"), TypeError, "must be an integer, got 'many'"),
        ((10, 2, 11), ValueError, "from 0 to sync_every=10, got 11"),
        (("10",), TypeError, "must be an integer"),
        ((0,), ValueError, "must be at least 1, got 0"),
    ):
        with subtests.test(arguments=arguments), pytest.raises(error, match=text):
            hidden_rounds(*arguments)
