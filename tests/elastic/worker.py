"""One elastic worker in a process of its own: a plain loop that writes down every round.

Each line of its file: round, local steps, number of members, and a checksum of the outer state.
"""

from __future__ import annotations

import argparse
import json
import time
import zlib
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from lightning_loco.algorithms import (
    Algorithm,
    DiLoCo,
    GASLoC,
    Linear,
    LocalSGD,
    Mix,
    NeighborAverage,
    NoLoCo,
)
from lightning_loco.engine import Engine, RoundSettings, StepEngine
from lightning_loco.engine.membership import Membership
from lightning_loco.schedules import Staggered
from tests.algorithms.toys import Point
from tests.elastic.arguments import elastic_of, make_parser
from tests.faults.failing import KINDS, failing_at, lose_confirmations

TOPOLOGIES = {"gasloc": "ring", "noloco": "random_matching", "neighbor_average": "ring"}
PULL = 0.05
"""How far a local step goes to the target of its worker, index + 1."""


def checksum(engine: Engine) -> int:
    """Of all vectors of the outer state, or of the parameters where there are none."""
    state = engine.fragments[0].memory.state
    vectors = [v for _, v in sorted(state.items()) if isinstance(v, torch.Tensor)]
    vectors = vectors or [engine.worker.replica.layout.new_flat()]
    value = 0
    for vector in vectors:
        value = zlib.crc32(vector.numpy().tobytes(), value)
    return value


def first_of(engine: Engine) -> float:
    """The first element of the outer parameters, or of the parameters where there are none."""
    state = engine.fragments[0].memory.state
    return float(state.get("outer", engine.worker.replica.layout.new_flat())[0])


def algorithm_of(name: str, overlap: bool) -> Algorithm:
    """One of the algorithms that workers run here."""
    return {
        "diloco": DiLoCo(outer_momentum=0.0 if overlap else 0.9),
        "diloco_schedule": DiLoCo(Linear(0.2, 0.9, rounds=30), 0.0 if overlap else 0.5),
        "local_sgd": LocalSGD(),
        "gasloc": GASLoC(momentum=0.3),
        "noloco": NoLoCo(),
        "neighbor_average": NeighborAverage(),
    }[name]


def vectors(engine: Engine) -> dict[str, list[float]]:
    """The vectors of the outer state."""
    return {key: value.tolist() for key, value in engine.fragments[0].memory.state.items()}


class Layers(nn.Module):
    """Three blocks, which make two fragments of different length."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        sizes = (numel // 2, numel // 3, numel - numel // 2 - numel // 3)
        self.blocks = nn.ModuleList(Point(torch.zeros(size)) for size in sizes)


def streaming_settings(
    asked: argparse.Namespace, membership: Membership | None = None
) -> RoundSettings:
    """Of fragments, or of one whose results come after a delay."""
    schedule = Staggered(asked.sync_every, asked.fragments, asked.delay)
    algorithm = algorithm_of(asked.algorithm, overlap=False)
    return RoundSettings(
        algorithm,
        schedule,
        compression=asked.compression,
        merge_policy=Mix(asked.mix),
        membership=membership,
    )


def make_engine(asked: argparse.Namespace) -> Engine:
    """The engine of a worker."""
    if asked.fragments:
        layers = Layers(asked.numel)
        for p in layers.parameters():
            p.data.normal_()
        layers.register_buffer("mark", torch.zeros(1))
        return Engine.from_settings(layers, streaming_settings(asked, elastic_of(asked)))
    model = nn.Linear(asked.numel, 1, bias=False, dtype=getattr(torch, asked.dtype))
    model.register_buffer("mark", torch.zeros(1))
    return StepEngine(
        model,
        algorithm_of(asked.algorithm, asked.overlap),
        sync_every=asked.sync_every,
        overlap=asked.overlap,
        warm_start=False,
        topology=TOPOLOGIES.get(asked.algorithm),
        compression=asked.compression,
        membership=elastic_of(asked),
    )


def main(arguments: list[str]) -> None:
    """Train until so many rounds or steps are made."""
    parser = make_parser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, help="instead of rounds")
    parser.add_argument("--from-members", type=int, default=0, help="count only from such a round")
    parser.add_argument("--algorithm", default="diloco")
    parser.add_argument("--sync-every", type=int, default=4)
    parser.add_argument("--step-s", type=float, default=0.01)
    parser.add_argument("--numel", type=int, default=1000)
    parser.add_argument("--fail", choices=KINDS)
    parser.add_argument("--fail-at", help="a fault point")
    parser.add_argument("--fail-in", type=int, default=0, help="in this round or a later one")
    parser.add_argument("--fail-among", type=int, default=0, help="after a round of so many")
    parser.add_argument("--lose-in", type=int, help="the others' confirmations of this round")
    parser.add_argument("--nan-in", type=int, default=-1, help="this round")
    parser.add_argument("--flip-at", type=int, default=-1)
    parser.add_argument("--other-past", action="store_true", help="as if alone in --flip-at")
    parser.add_argument("--save-at", type=int, default=-1)
    parser.add_argument("--keep-in", type=int, default=-1, help="this round, after one step")
    parser.add_argument("--resume", help="what was kept")
    parser.add_argument("--fragments", type=int, default=0, help="stream so many")
    parser.add_argument("--delay", type=int, default=2)
    parser.add_argument("--mix", type=float, default=0.5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--vectors", action="store_true")
    asked = parser.parse_args(arguments)

    torch.manual_seed(asked.index)
    engine = make_engine(asked)
    if asked.resume:
        engine.load_state_dict(torch.load(asked.resume))

    with failing(asked, engine):
        train(asked, engine)
    engine.close()


def failing(asked: argparse.Namespace, engine: Engine) -> AbstractContextManager[None]:
    """Where and when this worker fails, if at all."""
    worker = engine.worker

    def is_time() -> bool:
        last = engine.connection.last_round
        members = 0 if last is None else len(last.plan.names)
        return worker.round_index >= asked.fail_in and members >= asked.fail_among

    if asked.fail:
        return failing_at(asked.fail_at, is_time, KINDS[asked.fail])
    if asked.lose_in:
        point = "after confirming"
        return failing_at(point, lambda: worker.round_index >= asked.lose_in, lose_confirmations)
    return nullcontext()


def train(asked: argparse.Namespace, engine: Engine) -> None:
    """Make local steps and their rounds, and write them down."""
    worker, model = engine.worker, engine.worker.replica.model
    counted_from = None if asked.from_members else 0

    def progress() -> int:
        return worker.steps if asked.steps else worker.round_index

    with open(asked.log, "a", buffering=1) as log:

        def note() -> None:
            nonlocal counted_from
            last = engine.connection.last_round
            line = {
                "round": worker.round_index,
                "steps": worker.steps,
                "under_way": sum(fragment.pending is not None for fragment in engine.fragments),
                "members": [] if last is None else list(last.plan.names),
                "own": "" if last is None else last.plan.names[last.plan.rank],
                "weights": [] if last is None else last.statuses[:, 3].tolist(),
                "checksum": checksum(engine),
                "outer": first_of(engine),
                "repaired": engine.statistics.repaired,
                "time": time.time(),
                "mark": model.mark.item(),
                "vectors": vectors(engine) if asked.vectors else {},
            }
            log.write(json.dumps(line) + "\n")
            if counted_from is None and len(line["members"]) == asked.from_members:
                counted_from = progress()

        engine.join()
        note()
        model.mark.fill_(asked.index)
        while counted_from is None or progress() - counted_from < (asked.steps or asked.rounds):
            with torch.no_grad():
                for p in model.parameters():
                    p.lerp_(torch.full_like(p, asked.index + 1), PULL)
                    if engine.worker.round_index == asked.nan_in:
                        p.fill_(torch.nan)
            time.sleep(asked.step_s)
            if engine.step():
                note()
                if worker.round_index == asked.save_at:
                    engine.state_dict()
                if worker.round_index == asked.flip_at:
                    engine.fragments[0].memory.state["outer"].view(torch.int32)[0] ^= 2**16
                    asked.flip_at = -1
                    if asked.other_past:
                        engine.connection._rounds.last_group = "another/1"
            if (worker.round_index, worker.steps_since_round) == (asked.keep_in, 1):
                torch.save(engine.state_dict(), asked.log.with_suffix(".pt"))
        if asked.steps:
            engine.finish()
            note()
