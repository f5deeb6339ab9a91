"""Settings and guards for every test, and the pool of gloo processes."""

from __future__ import annotations

import os

# Four processes share few cores: more threads would only wait for each other. torch reads this
# when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# PyTorch's store asks for the names of addresses, and a name server may not answer.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import itertools
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.mark import ParameterSet

from tests.harness.exclusive import pytest_collection_finish as pytest_collection_finish
from tests.harness.exclusive import pytest_runtest_protocol as pytest_runtest_protocol
from tests.harness.guards import Surroundings, allow_processes
from tests.harness.seeding import seed

if TYPE_CHECKING:
    from tests.harness.pool import Pool

ROOT = Path(__file__).resolve().parent.parent

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
    """A few combinations that stand for a product which is too expensive to run whole.

    Every combination of ``strength`` values of different axes occurs in one of them. With
    ``--full`` the rest of the product follows, marked ``soak``.

    Args:
        axes: The values of each parameter; ``pytest.param`` gives one an id or marks.
        strength: 2 for pairs; 1 for each value at least once.
        possible: Says of the values of a row whether there can be one.

    Returns:
        What ``pytest.mark.parametrize`` takes.
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
        # Of those that bring as much that is new, the one whose values have been used least.
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
    """What an entry of an axis stands for."""
    return value.values if isinstance(value, ParameterSet) else (value,)


def _joined(values: list[Any], soak: bool) -> Any:
    """One parameter set of several values, with the ids and marks that these have."""
    params = [value if isinstance(value, ParameterSet) else pytest.param(value) for value in values]
    ids = [str(one.id if one.id is not None else one.values[0]) for one in params]
    return pytest.param(
        *itertools.chain.from_iterable(one.values for one in params),
        id="-".join(ids) if any(one.id is not None for one in params) else None,
        marks=[*(mark for one in params for mark in one.marks), *([pytest.mark.soak] * soak)],
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    allow_processes(item.get_closest_marker("process") is not None)
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def leave_nothing_behind() -> Iterator[None]:
    """Fail a test that leaves a thread, a process, a process group or a file behind."""
    before = Surroundings.now(ROOT)
    yield
    left = before.restore()
    if left:
        pytest.fail("The test left behind: " + "; ".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Begin each test with the same random numbers, whatever ran before it in its process."""
    seed(0)


@pytest.fixture
def other_disk() -> Iterator[Path]:
    """Return a folder on another file system than that of temporary files."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == Path(tempfile.gettempdir()).stat().st_dev:
        pytest.skip("there is only one file system")
    folder = Path(tempfile.mkdtemp(dir=memory))
    folder.chmod(0o777)
    yield folder
    folder.chmod(0o777)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four gloo processes: `pool.run(fn, *args, world=4, timeout_s=60)`; see harness/pool.py."""
    # Imports PyTorch, which the controller of xdist does not need.
    from tests.harness.pool import Pool

    processes = Pool()
    yield processes
    processes.close()
