"""Fragments and delays with elastic members: one pending round at a time."""

from __future__ import annotations

import argparse
import signal
import time
from pathlib import Path

import pytest
import torch

from lightning_loco.engine import Engine
from tests.elastic.cluster import HEARTBEAT_TIMEOUT_S, Cluster, Line, cluster
from tests.elastic.test_elastic import first_members, weight_of
from tests.elastic.test_faults import longest_wait
from tests.elastic.worker import PULL, Layers, checksum, streaming_settings
from tests.harness.pool import Pool

pytestmark = pytest.mark.process

STREAM = ("--fragments=2", "--delay=2", "--sync-every=10")
STEPS = 64


def run_of_ranks(
    rank: int, world: int, schedule: tuple[int, int, int], compression: str | None
) -> list[int]:
    """Train ranks of one job; return the outer states of tests/elastic/worker.py."""
    fragments, delay, every = schedule
    asked = argparse.Namespace(
        fragments=fragments,
        delay=delay,
        sync_every=every,
        mix=0.5,
        compression=compression,
        algorithm="diloco",
    )
    torch.manual_seed(rank)
    model = Layers(1000)
    for p in model.parameters():
        p.data.normal_()
    engine = Engine.from_settings(model, streaming_settings(asked))
    found = [checksum(engine)]
    for _ in range(STEPS):
        with torch.no_grad():
            for p in model.parameters():
                p.lerp_(torch.full_like(p, rank + 1), PULL)
        if engine.step():
            found.append(checksum(engine))
    for _ in engine.fragments:  # the last rounds, which only elastic members run
        engine.make_round()
    engine.drain()
    found.append(checksum(engine))
    engine.close()
    return found


def checksums(workers: Cluster, index: int) -> list[int]:
    return [line["checksum"] for line in workers.lines(index)]


@pytest.mark.parametrize(
    ("num_workers", "schedule", "compression"),
    [
        (2, (2, 2, 10), None),
        pytest.param(3, (2, 2, 10), None, marks=pytest.mark.soak),
        pytest.param(2, (2, 0, 10), None, marks=pytest.mark.soak),
        pytest.param(2, (3, 3, 10), None, marks=pytest.mark.soak),
        pytest.param(2, (1, 3, 10), None, marks=pytest.mark.soak),
        pytest.param(2, (1, 10, 10), None, marks=pytest.mark.soak),
        pytest.param(3, (2, 2, 10), "e3m0", marks=pytest.mark.soak),
        pytest.param(2, (2, 2, 10), "int8", marks=pytest.mark.soak),
    ],
)
def test_it_equals_a_run_of_ranks(
    pool: Pool,
    tmp_path: Path,
    num_workers: int,
    schedule: tuple[int, int, int],
    compression: str | None,
) -> None:
    expected = pool.run(run_of_ranks, schedule, compression, world=num_workers)
    fragments, delay, every = schedule
    settings = (f"--fragments={fragments}", f"--delay={delay}", f"--sync-every={every}")
    codec = (f"--compression={compression}",) if compression else ()
    ends = (f"--steps={STEPS}", "--step-s=0")
    with cluster(tmp_path, *ends, *settings, *codec, min_workers=num_workers) as workers:
        workers.run_to_completion(num_workers)
        for index in range(num_workers):
            assert checksums(workers, index) == expected[index]


def by_round(workers: Cluster, index: int) -> dict[tuple[int, int], Line]:
    """Return the lines of a worker by round and number of pending rounds."""
    return {(line["round"], line["pending"]): line for line in workers.lines(index)}


def check_steps(workers: Cluster, *indices: int) -> None:
    """Check that all workers start and end each round at the same local step."""
    steps: dict[tuple[int, int], int] = {}
    for index in indices:
        for at, line in by_round(workers, index).items():
            assert steps.setdefault(at, line["steps"]) == line["steps"], (index, at)


@pytest.mark.soak
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param((), id="fragments"),
        pytest.param(("--delay=0",), id="blocking"),
        pytest.param(("--delay=5",), id="until the next"),
        pytest.param(("--fragments=1", "--delay=3"), id="delay"),
        pytest.param(("--compression=e3m0",), id="e3m0"),
        pytest.param(("--algorithm=diloco_schedule",), id="outer rates"),
    ],
)
def test_one_joins_one_is_killed_and_the_others_continue(
    tmp_path: Path, settings: tuple[str, ...]
) -> None:
    own = ("--steps=250", "--from-members=3", "--step-s=0.01")
    with cluster(tmp_path, *own, *STREAM, *settings) as workers:
        workers.start_all(2)
        workers.join(2, rounds=5)
        workers.kill(0)
        workers.wait_for_success(1, 2)
        workers.check_states()
        check_steps(workers, 1, 2)
        joined = first_members(workers, 2, 3)
        assert weight_of(joined) == 0
        assert workers.lines(2)[-1]["checksum"] == workers.lines(1)[-1]["checksum"]
        assert workers.lines(2)[-1]["pending"] == 0
        assert {len(line["members"]) for line in workers.lines(1)} >= {2, 3}


@pytest.mark.soak
@pytest.mark.parametrize("point", ["within the exchange", "local step", "statuses", "outer step"])
def test_one_of_three_dies_while_a_fragment_is_pending(tmp_path: Path, point: str) -> None:
    size = "--numel=2000000" if point == "within the exchange" else "--numel=1000"
    with cluster(tmp_path, "--steps=100", "--step-s=0.01", *STREAM, size) as workers:
        workers.start(0, "--fail=killed", f"--fail-at={point}", "--fail-in=8")
        workers.start(1)
        workers.start(2)
        assert workers.exit_status(0) == -signal.SIGKILL
        workers.wait_for_success(1, 2)
        workers.check_states()
        check_steps(workers, 1, 2)
        assert checksums(workers, 1)[-1] == checksums(workers, 2)[-1]
        assert len(workers.lines(1)[-1]["members"]) == 2
        assert longest_wait(workers) < HEARTBEAT_TIMEOUT_S + 6


@pytest.mark.soak
@pytest.mark.parametrize("settings", [(), ("--delay=0",), ("--delay=5",)])
def test_a_suspended_worker_rejoins_as_a_new_one(tmp_path: Path, settings: tuple[str, ...]) -> None:
    asked = ("--steps=300", "--step-s=0.04", "--timeout-s=8", *STREAM, *settings)
    with cluster(tmp_path, *asked) as workers:
        for index in range(3):
            workers.start(index)
        for index in range(3):
            workers.wait_for_round(index, 4)
        time.sleep(
            0.1
        )  # rounds start every 0.2 s; a suspension during an exchange would last timeout_s
        workers.suspend_for_a_round(2, seen_by=0)
        workers.wait_for_success(0, 1, 2)
        workers.check_states()
        check_steps(workers, 0, 1)
        back = [line for line in workers.lines(2) if line["weights"] and weight_of(line) == 0]
        assert back
        assert weight_of(workers.lines(2)[-1]) == 1
        assert checksums(workers, 2)[-1] == checksums(workers, 0)[-1]


@pytest.mark.soak
def test_a_worker_that_drifts_is_repaired(tmp_path: Path) -> None:
    settings = ("--steps=100", "--check-every=5", "--step-s=0.01", *STREAM)
    with cluster(tmp_path, *settings, min_workers=3) as workers:
        for index in range(3):
            workers.start(index, *(("--flip-at=4",) if index == 1 else ()))
        workers.wait_for_success(0, 1, 2)
        lines_by_round = [by_round(workers, index) for index in range(3)]
        for at, line in lines_by_round[0].items():
            differs = line["checksum"] != lines_by_round[1][at]["checksum"]
            assert differs == (at in [(4, 0), (5, 1), (5, 0), (6, 1)]), at
            assert line["checksum"] == lines_by_round[2][at]["checksum"]
        for index in range(3):
            assert workers.lines(index)[-1]["repaired"] == 1
            assert "Round 5: the outer parameters or" in workers.output(index)


@pytest.mark.soak
@pytest.mark.parametrize("settings", [(), ("--fragments=1", "--delay=3"), ("--compression=e3m0",)])
def test_resuming_with_a_pending_round_equals_an_uninterrupted_run(
    tmp_path: Path, settings: tuple[str, ...]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    asked = ("--step-s=0.01", *STREAM, *settings)
    with cluster(first, "--steps=64", "--keep-in=4", *asked) as workers:
        workers.start(0)
        workers.start(1)
        workers.wait_for_success(0, 1)
        whole = [by_round(workers, index) for index in range(2)]
    with cluster(second, "--steps=64", *asked) as workers:
        for index in range(2):
            workers.start(index, f"--resume={first / f'{index}.pt'}")
        workers.wait_for_success(0, 1)
        for index in range(2):
            again = by_round(workers, index)
            assert min(again) == (4, 0)
            started, *_ = workers.lines(index)
            assert started["pending"] == 1
            assert started["steps"] == whole[index][4, 1]["steps"] + 1
            for at, line in again.items():
                assert line["checksum"] == whole[index][at]["checksum"], at
                assert at == (4, 1) or line["steps"] == whole[index][at]["steps"], at


@pytest.mark.soak
def test_a_joining_worker_receives_a_round_that_was_saved_pending(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    with cluster(first, "--steps=40", "--keep-in=4", *STREAM) as workers:
        workers.start(0)
        workers.start(1)
        workers.wait_for_success(0, 1)
        applied = by_round(workers, 0)[4, 0]
    with cluster(second, "--steps=100", "--step-s=0.01", *STREAM, min_workers=3) as workers:
        for index in range(2):
            workers.start(index, f"--resume={first / f'{index}.pt'}")
        workers.start(2)
        workers.wait_for_success(0, 1, 2)
        workers.check_states()
        check_steps(workers, 0, 1, 2)
        for index in range(3):
            assert by_round(workers, index)[4, 0]["checksum"] == applied["checksum"]
