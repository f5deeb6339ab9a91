"""``cover``: selects a few combinations of a product that is too expensive to run completely."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet

_full = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="also collect what cover() leaves out of a product, marked soak",
    )


def pytest_configure(config: pytest.Config) -> None:
    global _full
    _full = config.getoption("--full")


def cover(
    *axes: Iterable[Any],
    strength: int = 2,
    possible: Callable[..., bool] = lambda *_: True,
) -> list[Any]:
    """Return a few combinations of a product that is too expensive to run completely.

    Every combination of ``strength`` values of different axes occurs at least once. With
    ``--full`` the rest of the product follows, marked ``soak``.

    Args:
        axes: The values of each parameter; ``pytest.param`` gives one an id or marks.
        strength: 2 for pairs; 1 for each value at least once.
        possible: Returns whether the values of a row can be combined.

    Returns:
        Arguments for ``pytest.mark.parametrize``.
    """
    values = [list(axis) for axis in axes]

    def is_possible(row: tuple[int, ...]) -> bool:
        parts = (_of(axis[place]) for axis, place in zip(values, row, strict=True))
        return possible(*itertools.chain.from_iterable(parts))

    rows = list(filter(is_possible, itertools.product(*map(range, map(len, values)))))

    def combinations(row: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(itertools.combinations(enumerate(row), strength))

    missing = set().union(*map(combinations, rows))
    chosen: list[tuple[int, ...]] = []
    uses: Counter[tuple[int, int]] = Counter()
    while missing:
        # Among the rows with the most new combinations, choose the one with the least used values.
        best = max(
            rows,
            key=lambda row: (
                len(combinations(row) & missing),
                -sum(uses[one] for one in enumerate(row)),
            ),
        )
        chosen.append(best)
        missing -= combinations(best)
        uses.update(enumerate(best))
    others = [row for row in rows if row not in chosen] if _full else []
    return [
        _joined([axis[index] for axis, index in zip(values, row, strict=True)], soak)
        for some, soak in ((sorted(chosen), False), (others, True))
        for row in some
    ]


def _of(value: Any) -> Iterable[Any]:
    """Return the value of an entry of an axis."""
    return value.values if isinstance(value, ParameterSet) else (value,)


def _joined(values: list[Any], soak: bool) -> Any:
    """Join several values to one parameter set, with their ids and marks."""
    params = [value if isinstance(value, ParameterSet) else pytest.param(value) for value in values]
    ids = [str(one.id if one.id is not None else one.values[0]) for one in params]
    return pytest.param(
        *itertools.chain.from_iterable(one.values for one in params),
        id="-".join(ids) if any(one.id is not None for one in params) else None,
        marks=[*(mark for one in params for mark in one.marks), *([pytest.mark.soak] * soak)],
    )
