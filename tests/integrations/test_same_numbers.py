"""Every front end gives the numbers of a plain loop, bit for bit: docs/front_ends.md."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.harness.pages import doc
from tests.harness.pool import Pool, run_each
from tests.integrations import ray_runs
from tests.integrations.same_numbers import IN_POOL, METHODS, STEPS, WORKERS

Numbers = dict[str, list[Tensor]]
"""For each method, the parameters of each worker after every local step and at the end."""


def in_pool(pool: Pool, front_end: str) -> Numbers:
    rows = {name: (name,) for name in METHODS}
    return run_each(pool, IN_POOL[front_end], rows, world=WORKERS)


def check(found: Numbers, expected: Numbers) -> None:
    assert found.keys() == expected.keys() == METHODS.keys()
    for name in METHODS:
        for ours, plain in zip(found[name], expected[name], strict=True):
            assert len(plain) == STEPS + 1
            assert torch.equal(ours, plain), name


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}")


@pytest.mark.parametrize(
    "front_end",
    [
        "Lightning's Trainer",
        "Fabric",
        pytest.param("Hugging Face", marks=needs("transformers")),
    ],
)
def test_the_numbers_of_a_plain_loop(pool: Pool, front_end: str) -> None:
    expected = in_pool(pool, "a plain loop")
    for first, second in expected.values():
        assert torch.equal(first[-1], second[-1])
        assert not torch.equal(first[-2], second[-2])  # gradients are local
    check(in_pool(pool, front_end), expected)


@needs("ray")
@pytest.mark.process
def test_the_numbers_of_a_plain_loop_on_ray(pool: Pool, tmp_path: Path) -> None:
    ray_runs.start(tmp_path, "numbers", str(WORKERS))
    files = [torch.load(tmp_path / f"numbers.{rank}.pt") for rank in range(WORKERS)]
    found = {name: [one[name] for one in files] for name in METHODS}
    check(found, in_pool(pool, "a plain loop"))


def test_the_page_has_what_is_compared() -> None:
    page = doc("front_ends.md")
    rows = page.table("same numbers")
    assert [row[0] for row in rows] == [*IN_POOL, "Ray Train"]
    assert f"| same numbers | {' | '.join(METHODS)} |" in page.text
    assert f"{STEPS} local steps" in page.text
