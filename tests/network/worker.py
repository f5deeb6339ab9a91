"""One worker on a machine with a separate network: prints the times of rounds or fetches."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from lightning_loco import DiLoCo, GASLoC, PairwiseAverage, PairwiseEngine, StepEngine
from tests.harness.networks import address

LONGEST_S = 60.0
METHODS = {"diloco": DiLoCo, "gasloc": GASLoC}


class Numbers(nn.Module):
    """A model with a single vector, different on each worker."""

    def __init__(self, numel: int, rank: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.full((numel,), float(rank)))


def make_rounds(asked: argparse.Namespace) -> list[float]:
    """Return the seconds of blocking rounds after the first one, which synchronizes the workers."""
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address(0)}:{asked.port}",
        rank=asked.rank,
        world_size=asked.world,
        timeout=timedelta(seconds=LONGEST_S),
    )
    model = Numbers(asked.numel, asked.rank)
    link = json.loads(asked.link)
    engine = StepEngine(model, METHODS[asked.method](), sync_every=1, link=link)
    seconds = []
    for _ in range(asked.times + 1):
        model.values.data.add_(asked.rank + 1)
        began = time.monotonic()
        engine.step()
        seconds.append(time.monotonic() - began)
    engine.close()
    dist.destroy_process_group()
    return seconds[1:]


def make_fetches(asked: argparse.Namespace) -> list[float]:
    """Return the seconds of successful fetches; then serve others until this process is killed."""
    nodes = [
        {"name": f"w{rank}", "host": address(rank), "port": asked.port + rank}
        for rank in range(asked.world)
    ]
    engine = PairwiseEngine(
        Numbers(asked.numel, asked.rank),
        PairwiseAverage(1.0),
        nodes=nodes,
        name=f"w{asked.rank}",
        fetch_timeout_s=20,
        key_file=asked.keys,
        link=json.loads(asked.link),
    )
    seconds: list[float] = []
    until = time.monotonic() + LONGEST_S
    while len(seconds) < asked.times and time.monotonic() < until:
        began = time.monotonic()
        engine.update_send()
        if engine.update_wait() > 0:
            seconds.append(time.monotonic() - began)
        else:
            time.sleep(0.1)
    return seconds


def main(words: Sequence[str]) -> None:
    """Print one line with the seconds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", choices=[*METHODS, "pairwise"], required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--port", type=int, default=29500)
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--times", type=int, required=True)
    parser.add_argument("--link", default="null", help="JSON")
    parser.add_argument("--keys")
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    is_pairwise = asked.method == "pairwise"
    seconds = make_fetches(asked) if is_pairwise else make_rounds(asked)
    print(f"seconds {json.dumps(seconds)}", flush=True)
    if is_pairwise:
        time.sleep(LONGEST_S)


if __name__ == "__main__":
    main(sys.argv[1:])
