"""A joining worker in the two-stage pipeline equals a plain loop over the members of each round."""

from __future__ import annotations

import argparse
import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import nn

from lightning_loco.app.configured_strategy import build_strategy
from lightning_loco.engine import Engine
from tests.elastic import worker
from tests.elastic.arguments import elastic_of
from tests.elastic.cluster import Line, cluster
from tests.harness.sources import ROOT

pytestmark = pytest.mark.process

OUTER_LR, RATE, STEPS = 0.7, 0.05, 4


def trained(start: float, index: int) -> float:
    """Return the parameter of a worker after its local steps."""
    for _ in range(STEPS):
        start += RATE * (index + 1 - start)
    return start


def pipeline(first: float, members: list[list[int]]) -> list[float]:
    """Return outer parameters after the start of each round, given the members with weight.

    Each start applies the gradient of the previous round and sends the next gradient, which was
    computed from outer parameters before that update.
    """
    outer, gradient, found = first, 0.0, []
    for own in members:
        next_gradient = sum(outer - trained(outer, index) for index in own) / len(own)
        outer -= OUTER_LR * gradient
        gradient = next_gradient
        found.append(outer)
    return found


def members_of(line: Line) -> list[int]:
    pairs = zip(line["members"], line["weights"], strict=True)
    return [int(name[1]) for name, weight in pairs if weight]


def pccl_engine(args: argparse.Namespace) -> Engine:
    """Return the engine of a worker with the settings of the experiment."""
    choice = ["experiment=pccl_async_diloco", "membership=elastic", "run_dir=/run"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("train", [*choice, f"algorithm.sync_every={args.sync_every}"])
    settings = build_strategy(cfg).settings
    model = nn.Linear(args.numel, 1, bias=False)
    model.register_buffer("mark", torch.zeros(1))
    return Engine.from_settings(model, dataclasses.replace(settings, membership=elastic_of(args)))


def test_a_worker_joins_as_in_the_plain_loop(tmp_path: Path) -> None:
    """With PCCL's settings, while a round is pending."""
    program = partial(worker.main, make_engine=pccl_engine)
    settings = ("--rounds=4", "--from-members=3", "--step-s=0.02")
    with cluster(tmp_path, *settings, program=program) as workers:
        workers.start_all(2, rounds=2)
        workers.start(2)
        workers.wait_for_success(0, 1, 2)
        first, *lines = workers.lines(0)
        # each line lists the members of the previous round
        members = [members_of(line) for line in lines[1:]]
        expected = pipeline(first["outer"], members)
        assert [line["outer"] for line in lines[:-1]] == pytest.approx(expected, abs=1e-5)
        own = {line["round"]: line["outer"] for line in workers.lines(2)[1:]}
        theirs = {line["round"]: line["outer"] for line in lines}
        assert len(own) >= 4
        assert own == {round_index: theirs[round_index] for round_index in own}
        assert {len(each) for each in members} == {2, 3}
