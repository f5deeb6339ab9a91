"""A picture comes out, and says what is missing when it cannot."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_loco.topology import (
    Exponential,
    FromMatrix,
    Hypercube,
    RandomMatching,
    Ring,
    draw,
)


def test_picture_shows_workers_and_title(tmp_path: Path, subtests: pytest.Subtests) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    for topology, num_workers in (
        (Ring(), 8),
        (Exponential(), 6),
        (RandomMatching(), 7),
        (Ring(), 1),
        (FromMatrix([[1.0]]), 1),
    ):
        with (
            subtests.test(str(topology), num_workers=num_workers),
            matplotlib.rc_context({"svg.fonttype": "none"}),
        ):
            file = tmp_path / f"{topology.name}-{num_workers}.svg"
            text = draw(topology, num_workers, file, round_index=3).read_text()
            assert f"{topology.name}, {num_workers} workers" in text
            assert ("round 3" in text) is (topology.period(num_workers) != 1)
            assert all(f">{worker}</text>" in text for worker in range(num_workers))


def test_every_edge_is_drawn_once(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = [
        draw(topology, 6, tmp_path / "graph.svg").read_text().count("stroke: #1f77b4")
        for topology in (Ring(), FromMatrix(Ring().mixing_matrix(6)))
    ]
    assert lines == [6, 6]


def test_png_by_suffix(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert draw(Ring(), 4, str(tmp_path / "ring.png")).read_bytes().startswith(b"\x89PNG")


def test_number_of_workers_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a power of two workers, got 6"):
        draw(Hypercube(), 6, tmp_path / "graph.png")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install lightning-loco\[report\]"):
        draw(Ring(), 4, tmp_path / "ring.png")
