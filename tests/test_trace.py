"""CONTRIBUTING lists the files that a round passes through, in order; a real one is followed."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import lightning_loco
from lightning_loco import DiLoCo, StepEngine
from tests.conftest import ROOT
from tests.pool import Pool

PACKAGE = f"{Path(lightning_loco.__file__).parent}/"
MOST_FILES = 10


def follow(rank: int, world: int) -> list[str]:
    """The files of the package in which a blocking round calls something, in order.

    Of several rounds the one that passes through the fewest: a worker that is late is called.
    """
    engine = StepEngine(torch.nn.Linear(100, 100), DiLoCo(), sync_every=2)
    engine.step()
    rounds = []
    for _ in range(5):
        files: dict[str, None] = {}

        def note(frame: FrameType, event: str, arg: Any, files: Any = files) -> None:
            path = frame.f_code.co_filename
            if event == "call" and path.startswith(PACKAGE):
                files.setdefault(path.removeprefix(PACKAGE))

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            made = engine.step()
        finally:
            sys.setprofile(before)
        assert made
        rounds.append(list(files))
        engine.step()
    engine.close()
    return min(rounds, key=len)


def listed() -> list[str]:
    """The files of the numbered list below the heading."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = re.search(r"^## Follow a round\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert section is not None
    return re.findall(r"^\d+\. `(?:lightning_loco/)?([\w/]+\.py)`", section[1], re.M)


def test_a_round_passes_through_the_files_that_are_listed_and_no_others(pool: Pool) -> None:
    for files in pool.run(follow, world=2):
        assert len(files) <= MOST_FILES
        assert files == listed()
