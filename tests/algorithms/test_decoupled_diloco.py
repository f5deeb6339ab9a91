"""Decoupled DiLoCo's merge equals a plain loop in float64, and keeps lengths where it says so."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco.algorithms import (
    CGAD,
    Cosine,
    DecoupledDiLoCo,
    DiLoCo,
    HeLoCo,
    Push,
    RoundInfo,
    StaleCorrection,
    TensorRange,
    radial_mean,
)

TENSORS = [TensorRange(0, 6, is_embedding=True), TensorRange(6, 10), TensorRange(10, 17)]
SIZE = 17
PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0}


def vectors(seed: int, count: int, size: int = SIZE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, size, generator=generator, dtype=torch.float64)


def length(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector))


def plain_mean(rows: list[list[float]], weights: list[float]) -> list[float]:
    pairs = [list(zip(weights, column, strict=True)) for column in zip(*rows, strict=True)]
    return [sum(weight * value for weight, value in pair) for pair in pairs]


def plain_radial(rows: list[list[float]], weights: list[float]) -> list[float]:
    """The formula of the docstring, without tensors."""
    lengths = [math.sqrt(sum(value**2 for value in row)) for row in rows]
    units = [
        [v / size if size else 0.0 for v in row] for row, size in zip(rows, lengths, strict=True)
    ]
    radius = plain_mean([[size] for size in lengths], weights)[0]
    direction = plain_mean(units, weights)
    size = math.sqrt(sum(value**2 for value in direction))
    moved = [weight for weight, size in zip(weights, lengths, strict=True) if size]
    share = min(1.0, size / math.sqrt(sum(weight**2 for weight in moved)))
    mean = plain_mean(rows, weights)
    return [
        share * radius * value / size + (1 - share) * other
        for value, other in zip(direction, mean, strict=True)
    ]


def plain_run(
    method: DecoupledDiLoCo, start: list[float], merges: list[tuple[list[Push], Tensor]]
) -> list[float]:
    """Merges of Decoupled DiLoCo without its code and without tensors."""
    outer, momentum = list(start), [0.0] * len(start)
    for pushes, deltas in merges:
        if method.weight == "equal":
            parts = [1.0] * len(pushes)
        elif method.weight == "steps":
            parts = [float(push.steps) for push in pushes]
        else:
            parts = [push.tokens * push.tokens / push.steps for push in pushes]
        weights = [part / sum(parts) for part in parts]
        merged: list[float] = []
        for begin, end, is_embedding in TENSORS:
            rows = [row[begin:end].tolist() for row in deltas]
            is_plain = is_embedding or method.aggregate == "mean"
            merged += (plain_mean if is_plain else plain_radial)(rows, weights)
        momentum = [method.outer_momentum * m + d for m, d in zip(momentum, merged, strict=True)]
        for index, (m, d) in enumerate(zip(momentum, merged, strict=True)):
            step = d + method.outer_momentum * m if method.nesterov else m
            outer[index] -= float(method.outer_lr) * step  # type: ignore[arg-type]
    return outer


def pushes(seed: int, count: int) -> list[Push]:
    drawn = torch.randint(1, 30, (count, 2), generator=torch.Generator().manual_seed(seed))
    return [Push(int(steps), float(steps * 8 + extra)) for steps, extra in drawn]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weight": "steps"},
        {"weight": "equal", "outer_lr": 0.5},
        {"aggregate": "mean"},
        {"outer_momentum": 0.9, "outer_lr": 0.7, "mix": 0.5},
        {"outer_momentum": 0.5, "nesterov": False, "mix": 0.5},
    ],
)
def test_merges_equal_a_plain_loop(settings: dict[str, Any]) -> None:
    method = DecoupledDiLoCo(**{**PLAIN, **settings})
    start = vectors(0, 1)[0]
    state = method.init(start.clone())
    # Of one learner, of two whose pseudo-gradients contradict each other, and of more.
    merges = [
        (pushes(seed, count), vectors(seed, count)) for seed, count in enumerate((1, 2, 5, 3))
    ]
    merges[1][1][1] = -0.9 * merges[1][1][0] + 0.1 * merges[1][1][1]
    merges[3][1][2, 6:10] = 0.0  # a learner that has not moved a tensor
    for said, deltas in merges:
        found = method.merge(deltas.clone(), said, state, TENSORS)
    expected = torch.tensor(plain_run(method, start.tolist(), merges), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert found is state["outer"]


def test_means_of_equal_weights_are_diloco() -> None:
    """Fragments that all learners push are those of streaming DiLoCo."""
    method = DecoupledDiLoCo(0.7, 0.9, aggregate="mean", weight="equal", mix=0.5)
    diloco = DiLoCo(0.7, 0.9)
    start, states = vectors(0, 1)[0], []
    for algorithm in (method, diloco):
        states.append(algorithm.init(start.clone()))
    for seed in range(4):
        local = vectors(seed, 3)
        deltas = torch.stack([method.propose(row, states[0]["outer"]) for row in local])
        method.merge(deltas, [Push(5, 40.0)] * 3, states[0], TENSORS)
        mean = states[1]["outer"] - local.mean(0)
        diloco.update(None, None, mean, states[1], RoundInfo())
    torch.testing.assert_close(states[0]["outer"], states[1]["outer"], rtol=1e-12, atol=1e-12)


def test_a_late_push_counts_from_what_its_learner_received() -> None:
    """10, -2, and -1 on the old base make 7: what others have moved is not in a late push."""
    method = DecoupledDiLoCo(1.0, 0.0)
    state = method.init(torch.tensor([10.0]))
    received = state["outer"].clone()
    whole = [TensorRange(0, 1)]
    for local in (8.0, 9.0):
        delta = method.propose(torch.tensor([local]), received)
        method.merge(delta[None], [Push(3, 24.0)], state, whole)
    assert state["outer"].tolist() == [7.0]


@pytest.mark.parametrize("count", [2, 5, 16])
def test_orthogonal_vectors_keep_their_length(count: int) -> None:
    rows = torch.linalg.qr(vectors(1, 20, 20))[0][:count] * 3.0
    equal = [1 / count] * count
    assert length(radial_mean(rows, equal)) == pytest.approx(3.0, rel=1e-12)
    assert length(rows.mean(0)) == pytest.approx(3.0 / math.sqrt(count))
    uneven = (torch.arange(count) + 1.0) / sum(range(1, count + 1))
    assert length(radial_mean(rows, uneven.tolist())) == pytest.approx(3.0, rel=1e-5)


def test_the_length_is_bounded_where_directions_cancel() -> None:
    """It goes over into the plain mean without a jump."""
    before = None
    for angle in [*torch.linspace(0, math.pi, 400, dtype=torch.float64).tolist(), math.pi]:
        rows = torch.tensor([[3.0, 0.0], [math.cos(angle), math.sin(angle)]], dtype=torch.float64)
        found = radial_mean(rows, [0.5, 0.5])
        assert length(found) <= 2.0 + 1e-12
        assert before is None or length(found - before) < 0.05
        before = found
    torch.testing.assert_close(before, torch.tensor([1.0, 0.0], dtype=torch.float64))


def test_zeros_have_no_direction() -> None:
    assert radial_mean(torch.zeros(3, 4), [0.5, 0.25, 0.25]).tolist() == [0.0] * 4
    moved = torch.tensor([[4.0, 0.0], [0.0, 0.0]])
    assert radial_mean(moved, [0.5, 0.5]).tolist() == [2.0, 0.0]
    assert radial_mean(moved, [0.25, 0.75]).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("cosine", [-1.0, -0.7, -0.05, 0.0, 0.1, 0.19, 0.2, 0.9])
def test_heloco_by_cosine(cosine: float) -> None:
    momentum = torch.tensor([0.0, 2.0, 0.0], dtype=torch.float64)
    sine = math.sqrt(1 - cosine**2)
    delta = 5.0 * torch.tensor([sine, cosine, 0.0], dtype=torch.float64)
    found = delta.clone()
    HeLoCo().correct(found, momentum, age=3)
    confidence = 5.0 / (5.0 + 3 * 2.0)
    if cosine >= 0.2:
        expected = [5 * sine, 5 * cosine]
    elif cosine < 0:
        beta = min(0.5 * -cosine * confidence, 0.5)
        expected = [5 * sine, 5 * cosine - beta * cosine * 5]
    else:
        turned = (1 - cosine) * confidence
        u = [(1 - turned) * sine, (1 - turned) * cosine + turned]
        expected = [5 * part / math.hypot(*u) for part in u]
    assert found.tolist() == pytest.approx([*expected, 0.0], rel=1e-12, abs=1e-12)


def test_heloco_without_a_direction_changes_nothing() -> None:
    for delta, momentum in (([0.0, 0.0], [1.0, 0.0]), ([-1.0, 2.0], [0.0, 0.0])):
        found = torch.tensor(delta)
        HeLoCo().correct(found, torch.tensor(momentum), age=1)
        assert found.tolist() == delta


def test_a_correction_sees_each_tensor_and_the_mean_of_the_merges() -> None:
    method = DecoupledDiLoCo(0.7, 0.9, mix=0.5, correction=HeLoCo())
    state = method.init(torch.zeros(SIZE, dtype=torch.float64))
    first = vectors(1, 1)
    method.merge(first.clone(), [Push(1, 1.0)], state, TENSORS)
    second = -first + 0.1 * vectors(2, 1)
    outer = state["outer"].clone()
    buffer = state["momentum"].clone()
    method.merge(second.clone(), [Push(1, 1.0, age=1)], state, TENSORS)
    corrected = second[0].clone()
    for begin, end, _ in TENSORS:
        HeLoCo().correct(corrected[begin:end], 0.1 * buffer[begin:end], 1)
    assert not torch.equal(corrected, second[0])
    buffer = 0.9 * buffer + corrected
    torch.testing.assert_close(state["outer"], outer - 0.7 * (corrected + 0.9 * buffer))


def test_cgad_is_adam_at_age_zero_and_nothing_at_the_cutoff() -> None:
    adam = partial(torch.optim.Adam, lr=0.1)
    gated = DecoupledDiLoCo(outer_optimizer=adam, correction=CGAD(decay=0.2, cutoff=4))
    plain = DecoupledDiLoCo(outer_optimizer=adam)
    start, delta = vectors(0, 1)[0], vectors(1, 1)
    merged = [
        method.merge(delta.clone(), [Push(1, 1.0)], method.init(start.clone()), TENSORS)
        for method in (gated, plain)
    ]
    assert torch.equal(*merged)
    for age, factor in ((1, 0.5 + math.sqrt(0.125)), (2, 0.5), (4, 0.0), (9, 0.0)):
        found = delta[0].clone()
        CGAD(decay=0.2, cutoff=4).correct(found, None, age)
        expected = delta[0] * factor * math.exp(-0.2 * age)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_schedule_counts_the_merges() -> None:
    method = DecoupledDiLoCo(Cosine(1.0, 0.5, rounds=2), 0.0)
    state = method.init(torch.zeros(SIZE, dtype=torch.float64))
    ones = torch.ones(1, SIZE, dtype=torch.float64)
    found = [method.merge(ones.clone(), [Push(1, 1.0)], state, TENSORS)[0].item() for _ in range(3)]
    assert found == pytest.approx([-1.0, -1.75, -2.25])


def test_a_learner_continues_from_a_mixture() -> None:
    received, local = torch.tensor([8.0]), torch.tensor([4.0])
    assert DecoupledDiLoCo(mix=0.25).continue_from(received, local.clone()).tolist() == [7.0]
    assert DecoupledDiLoCo().continue_from(received, local.clone()).tolist() == [8.0]


class Doubled(StaleCorrection):
    """A correction of the user's own."""

    def correct(self, delta: Tensor, momentum: Tensor | None, age: int) -> None:
        delta.mul_(2)


def test_own_corrections() -> None:
    method = DecoupledDiLoCo(1.0, 0.0, correction=Doubled())
    found = method.merge(torch.ones(2, SIZE), pushes(0, 2), method.init(torch.zeros(SIZE)), TENSORS)
    torch.testing.assert_close(found, torch.full((SIZE,), -2.0))


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"outer_lr": 0.0}, ValueError, "outer_lr"),
        ({"outer_momentum": 1.0}, ValueError, r"outer_momentum must be in \[0, 1\)"),
        ({"mix": 2.0}, ValueError, "mix is the share"),
        ({"aggregate": "median"}, ValueError, "aggregate must be one of 'radial', 'mean'"),
        ({"weight": "token"}, ValueError, "weight must be one of 'tokens', 'steps', 'equal'"),
        ({"correction": "heloco"}, TypeError, r"an object such as HeLoCo\(\)"),
        ({"correction": HeLoCo(), **PLAIN}, ValueError, "outer momentum, and there is none"),
        ({"outer_optimizer": 3}, ValueError, "cannot be an outer optimizer"),
        (
            {"outer_optimizer": torch.optim.AdamW, "outer_lr": Cosine(1.0, 0.5, 2)},
            ValueError,
            "has its own rate",
        ),
    ],
)
def test_arguments_are_checked(
    settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        DecoupledDiLoCo(**settings)


@pytest.mark.parametrize("field", ["keep_above", "max_shrink", "shrink", "turn", "momentum_weight"])
def test_ranges_of_heloco(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} of HeLoCo must be"):
        HeLoCo(**{field: -0.1})


def test_ranges_of_cgad() -> None:
    with pytest.raises(ValueError, match="decay of CGAD must be at least 0"):
        CGAD(decay=-1.0)
    with pytest.raises(ValueError, match="cutoff of CGAD .* at least 1, got 0"):
        CGAD(cutoff=0)


def test_momentum_that_replaces_local_parameters_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="with mix=0 may learn worse than none"):
        DecoupledDiLoCo(outer_momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DecoupledDiLoCo(outer_momentum=0.9, mix=0.5)
        DecoupledDiLoCo()
        DecoupledDiLoCo(correction=HeLoCo())


@pytest.mark.parametrize("push", [Push(0, 8.0), Push(3, 0.0), Push(3, math.nan)])
def test_pushes_without_progress_are_refused(push: Push) -> None:
    with pytest.raises(ValueError, match="needs local steps and tokens"):
        DecoupledDiLoCo().weights([Push(1, 8.0), push])
    with pytest.raises(ValueError, match="no push"):
        DecoupledDiLoCo().weights([])
