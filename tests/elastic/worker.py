"""One rank of an elastic worker in a separate process: a plain loop that logs every round.

Each log line holds the round, local steps, members, and a checksum of the outer state.
"""

from __future__ import annotations

import argparse
import json
import time
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from lightning_loco.algorithms import Algorithm, DelayedNesterov, DiLoCo, Linear, LocalSGD, Mix
from lightning_loco.compression import ErrorFeedback, Sparse
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.engine import Engine, RoundSettings, StepEngine
from lightning_loco.engine.settings import Membership
from lightning_loco.schedules import Staggered
from tests.elastic.arguments import elastic_of, make_parser
from tests.harness.failing import KINDS, failing_at, lose_connection
from tests.harness.toys import Point

SENDERS = ErrorFeedback(Sparse(k=4, block=16, mean_over="senders"), 0.95)


def compression_of(name: str | None) -> str | ErrorFeedback | None:
    """Return a compression by its name; ``senders`` are sparse means over senders."""
    return SENDERS if name == "senders" else name


PULL = 0.05
"""Fraction of the way to the worker's target, ``index + 1``, in one local step."""


def checksum(engine: Engine) -> int:
    """Return a checksum of the outer state's vectors, or of the parameters if there are none."""
    state = engine.fragments[0].state
    vectors = [v for _, v in sorted(state.items()) if isinstance(v, torch.Tensor)]
    vectors = vectors or [engine.worker.replica.layout.new_flat()]
    value = 0
    for vector in vectors:
        value = zlib.crc32(vector.numpy().tobytes(), value)
    return value


def first_of(engine: Engine) -> float:
    """Return the first outer parameter, or parameter; 0 if this rank owns none."""
    state = engine.fragments[0].state
    return float(state.get("outer", engine.worker.replica.layout.new_flat())[:1].sum())


def algorithm_of(name: str, overlap: bool) -> Algorithm:
    """Return an algorithm of the workers by name."""
    return {
        "diloco": DiLoCo(outer_momentum=0.0 if overlap else 0.9),
        "diloco_schedule": DiLoCo(Linear(0.2, 0.9, rounds=30), 0.0 if overlap else 0.5),
        "delayed_nesterov": DelayedNesterov(every=3),
        "local_sgd": LocalSGD(),
    }[name]


def vectors(engine: Engine) -> dict[str, list[float]]:
    """Return the vectors of the outer state."""
    return {key: value.tolist() for key, value in engine.fragments[0].memory.state.items()}


class Layers(nn.Module):
    """Three blocks, for two fragments of different length."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        sizes = (numel // 2, numel // 3, numel - numel // 2 - numel // 3)
        self.blocks = nn.ModuleList(Point(torch.zeros(size)) for size in sizes)


def streaming_settings(
    args: argparse.Namespace, membership: Membership | None = None
) -> RoundSettings:
    """Return settings with several fragments, or with one fragment whose results are delayed."""
    schedule = Staggered(args.sync_every, args.fragments, args.delay)
    algorithm = algorithm_of(args.algorithm, overlap=False)
    return RoundSettings(
        algorithm,
        schedule,
        compression=compression_of(args.compression),
        merge_policy=Mix(args.mix),
        membership=membership,
    )


def make_engine(args: argparse.Namespace) -> Engine:
    """Return the engine of a worker."""
    if args.fragments:
        layers = Layers(args.numel).to(getattr(torch, args.dtype))
        for p in layers.parameters():
            p.data.normal_()
        layers.register_buffer("mark", torch.zeros(1))
        settings = streaming_settings(args, elastic_of(args))
        return Engine.from_settings(layers, settings, group_of(args))
    model = nn.Linear(args.numel, 1, bias=False, dtype=getattr(torch, args.dtype))
    model.register_buffer("mark", torch.zeros(1))
    return StepEngine(
        model,
        algorithm_of(args.algorithm, args.overlap),
        sync_every=args.sync_every,
        overlap=args.overlap,
        warm_start=False,
        compression=compression_of(args.compression),
        membership=elastic_of(args),
        group=group_of(args),
    )


def group_of(args: argparse.Namespace) -> WorkerGroup | None:
    """Connect the ranks of a worker; return None for one rank."""
    if args.ranks == 1:
        return None
    address, rank = f"tcp://127.0.0.1:{args.port}", args.index % args.ranks
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=args.ranks)
    return WorkerGroup.create(timeout_s=args.timeout_s, replica_size=args.ranks)


def main(
    arguments: list[str], make_engine: Callable[[argparse.Namespace], Engine] = make_engine
) -> None:
    """Train for a number of rounds or steps."""
    parser = make_parser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, help="instead of rounds")
    parser.add_argument(
        "--from-members",
        type=int,
        default=0,
        help="count from the first round with this number of members",
    )
    parser.add_argument("--algorithm", default="diloco")
    parser.add_argument("--sync-every", type=int, default=4)
    parser.add_argument("--step-s", type=float, default=0.01)
    parser.add_argument("--numel", type=int, default=1000)
    parser.add_argument("--fail", choices=KINDS)
    parser.add_argument("--fail-at", help="a fault point")
    parser.add_argument("--fail-place", type=int, default=0, help="of the rank with a failure")
    parser.add_argument("--fail-in", type=int, default=0, help="in this round or a later one")
    parser.add_argument(
        "--fail-among", type=int, default=0, help="after a round with this number of members"
    )
    parser.add_argument(
        "--lose-in", type=int, help="in this round the confirmations, or what --fail-at says"
    )
    parser.add_argument("--nan-in", type=int, default=-1, help="this round")
    parser.add_argument("--flip-at", type=int, default=-1)
    parser.add_argument(
        "--other-past", action="store_true", help="as if the round before --flip-at was made alone"
    )
    parser.add_argument("--save-at", type=int, default=-1)
    parser.add_argument("--keep-in", type=int, default=-1, help="this round, after one step")
    parser.add_argument("--resume", help="a saved state")
    parser.add_argument("--fragments", type=int, default=0, help="number of fragments")
    parser.add_argument("--delay", type=int, default=2)
    parser.add_argument("--mix", type=float, default=0.5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--vectors", action="store_true")
    args = parser.parse_args(arguments)

    torch.manual_seed(args.index)
    engine = make_engine(args)
    if args.resume:
        engine.load_state_dict(torch.load(args.resume))

    with failing(args, engine):
        train(args, engine)
    engine.close()


def is_place_of_failure(args: argparse.Namespace) -> bool:
    """Whether this rank of its worker fails, or gets wrong numbers."""
    return bool(args.index % args.ranks == args.fail_place)


def failing(args: argparse.Namespace, engine: Engine) -> AbstractContextManager[None]:
    """Make this worker fail as given by its arguments."""
    worker = engine.worker

    def is_time() -> bool:
        last = engine.exchange.last_round
        members = 0 if last is None else len(last.plan.names)
        return worker.round_index >= args.fail_in and members >= args.fail_among

    if not is_place_of_failure(args):
        return nullcontext()
    if args.fail:
        return failing_at(args.fail_at, is_time, KINDS[args.fail])
    if args.lose_in:
        point = args.fail_at or "after confirming"
        return failing_at(point, lambda: worker.round_index >= args.lose_in, lose_connection)
    return nullcontext()


def train(args: argparse.Namespace, engine: Engine) -> None:
    """Run local steps and rounds, and log them."""
    worker, model = engine.worker, engine.worker.replica.model
    counted_from = None if args.from_members else 0

    def progress() -> int:
        return worker.steps if args.steps else worker.round_index

    with open(args.log, "a", buffering=1) as log:

        def log_line() -> None:
            nonlocal counted_from
            last = engine.exchange.last_round
            line = {
                "round": worker.round_index,
                "steps": worker.steps,
                "pending": sum(fragment.pending is not None for fragment in engine.fragments),
                "members": [] if last is None else list(last.plan.names),
                "own": "" if last is None else last.plan.names[last.plan.rank],
                "weights": [] if last is None else last.statuses[:, 3].tolist(),
                "checksum": checksum(engine),
                "outer": first_of(engine),
                "repaired": engine.statistics.repaired,
                "lost": engine.statistics.lost_steps,
                "joining": engine.statistics.join_s,
                "time": time.time(),
                "mark": model.mark.item(),
                "vectors": vectors(engine) if args.vectors else {},
            }
            log.write(json.dumps(line) + "\n")
            if counted_from is None and len(line["members"]) == args.from_members:
                counted_from = progress()

        engine.start()
        log_line()
        model.mark.fill_(args.index)
        while counted_from is None or progress() - counted_from < (args.steps or args.rounds):
            with torch.no_grad():
                for p in model.parameters():
                    p.lerp_(torch.full_like(p, args.index // args.ranks + 1), PULL)
                    if engine.worker.round_index == args.nan_in and is_place_of_failure(args):
                        p.fill_(torch.nan)
            time.sleep(args.step_s)
            if engine.step():
                log_line()
                if worker.round_index == args.save_at:
                    engine.state_dict()
                if worker.round_index == args.flip_at and is_place_of_failure(args):
                    engine.fragments[0].state["outer"].view(torch.int32)[0] ^= 2**16
                    args.flip_at = -1
                    if args.other_past:
                        engine.exchange._rounds.decisions.last_group = "another/1"
            if (worker.round_index, worker.steps_since_round) == (args.keep_in, 1):
                torch.save(engine.state_dict(), args.log.with_suffix(".pt"))
        if args.steps:
            engine.finish()
            log_line()
