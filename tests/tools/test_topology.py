"""``lightning-loco topology``: numbers agree with the package, and errors name invalid input."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_loco.algorithms import GASLoC
from lightning_loco.tools.topology import describe, run
from lightning_loco.topology import chi, get_topology, optimal_gossip, spectral_gap
from tests.harness.pages import doc
from tests.harness.programs import environment
from tests.harness.sources import ROOT


def rows(name: str, num_workers: int) -> dict[str, str]:
    """Return the rows of the report by title."""
    lines = describe(get_topology(name), num_workers, name).splitlines()
    return {line[:20].strip(): line[20:] for line in lines if line[20:]}


def numbers(text: str) -> list[float]:
    return [float(one) for one in re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", text)]


def test_a_fixed_graph() -> None:
    ring, text = get_topology("ring"), rows("ring", 16)
    assert text["neighbours"] == "2, the same in every round"
    assert text["of worker 0"] == "1, 15"
    assert text["sent"].startswith("2 times the model")
    assert numbers(text["spectral gap"]) == pytest.approx([spectral_gap(ring, 16)], rel=1e-3)
    assert numbers(text["chi"])[0] == pytest.approx(chi(ring, 16), rel=1e-3)
    step, momentum, _ = optimal_gossip(ring, 16)
    found = numbers(text["without local steps"])
    assert found[:2] == pytest.approx([step, momentum], rel=1e-3)


def test_the_page_shows_what_is_printed() -> None:
    (shown,) = doc("topologies.md").blocks("text")
    assert shown.strip() == describe(get_topology("ring"), 16, "ring")


def test_the_settings_are_those_that_gasloc_chooses(subtests: pytest.Subtests) -> None:
    for name in ("ring", "hypercube", "random_matching", "exponential"):
        topology = get_topology(name)
        text = describe(topology, 16, name)
        for form in ("gossiped", "local"):
            with subtests.test(name, form=form):
                made = GASLoC(momentum_on=form).prepare(16, topology)  # type: ignore[arg-type]
                (line,) = [one for one in text.splitlines() if f"  momentum_on={form} " in one]
                chosen = f"gossip_step={made.gossip_step:g} momentum={made.momentum:g}, leaves"
                assert chosen in line


def test_graphs_that_change() -> None:
    pairs, exact = rows("random_matching", 8), rows("one_peer_exponential", 8)
    assert pairs["neighbours"] == "1, drawn anew in every round"
    assert pairs["of worker 0"].count("then") == 3
    assert exact["neighbours"] == "1, repeated every 3 rounds"
    assert exact["to the mean"] == "exact after 3 rounds of averaging"
    for text in (pairs, exact):
        assert text["chi"].startswith("not defined: the graph changes")


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "command.py"), "topology", *arguments],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.process
def test_a_file_and_a_picture(tmp_path: Path) -> None:
    edges, picture = tmp_path / "edges.txt", tmp_path / "graph.png"
    edges.write_text("0 1\n1 2\n2 0\n")
    done = run_command(str(edges), "--workers", "3", "--png", str(picture))
    assert done.returncode == 0, done.stdout
    assert f"topology=file topology.path={edges} trainer.devices=3" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_errors_name_what_is_wrong(subtests: pytest.Subtests) -> None:
    for name, workers, png, message in (
        ("rings", 4, None, "Did you mean 'ring'?"),
        ("hypercube", 6, None, "needs a power of two workers, got 6"),
        ("ring", 1, None, "--workers must be from 2 to"),
        (
            "ring",
            4,
            "/nowhere/graph.png",
            "graph.png: No such file or directory.",
        ),
    ):
        with subtests.test(message), pytest.raises(ValueError, match=re.escape(message)):
            run(argparse.Namespace(topology=name, workers=workers, png=png))
