"""One worker of chaos.py: a plain PyTorch loop that logs every round."""

import argparse
import json
import os
import signal
import socket
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lightning_loco as loco
from lightning_loco.elastic.data_stream import MembersSampler
from lightning_loco.elastic.member_connection import MemberConnection

FEATURES, SAMPLES, BATCH = 16, 20_000, 8
LEARNING_RATE = 5e-3
"""Initial value; it decays to 0, so that the final loss hardly depends on the last members."""


def make_model() -> nn.Module:
    """Create a small network."""
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 1))


def make_data(seed: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Create random inputs, and the noisy outputs of another such network."""
    torch.manual_seed(1)
    teacher = make_model()
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, FEATURES, generator=generator)
    with torch.no_grad():
        noise = 0.5 * torch.randn(samples, 1, generator=generator)
        return inputs, 5 * teacher(inputs) + noise


def checksum(engine: loco.StepEngine) -> int:
    """Return a checksum of outer parameters and momentum."""
    value = 0
    for _, tensor in sorted(engine.fragments[0].memory.state.items()):
        value = zlib.crc32(tensor.numpy().tobytes(), value)
    return value


def cut_connections(*_: Any) -> None:
    """Shut down every TCP connection of this process, as a failing network does."""
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # not a socket, or one that only listens
            continue


def main() -> None:
    """Join the run, and train until it has made the given number of rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--sync-every", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--min-workers", type=int, required=True)
    args = parser.parse_args()

    signal.signal(signal.SIGUSR1, cut_connections)
    torch.manual_seed(0)
    model = make_model()
    membership = loco.Elastic(
        args.lighthouse,
        min_workers=args.min_workers,
        name=args.log.stem,
        host="127.0.0.1",
        timeout_s=60,
    )
    engine = loco.StepEngine(
        model,
        loco.DiLoCo(outer_momentum=0.0 if args.overlap else "auto"),
        sync_every=args.sync_every,
        overlap=args.overlap,
        membership=membership,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    inputs, targets = make_data(2, SAMPLES)
    test_inputs, test_targets = make_data(3, 2000)
    engine.start()
    connection = engine.exchange
    assert isinstance(connection, MemberConnection)
    samples = MembersSampler(range(SAMPLES), connection.data_shard, seed=4)
    indices = iter(samples)
    args.log.parent.mkdir(parents=True, exist_ok=True)
    with open(args.log, "w", buffering=1) as log:
        while engine.worker.round_index < args.rounds:
            left = 1 - engine.worker.round_index / args.rounds
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * left
            batch = []
            while len(batch) < BATCH:
                index = next(indices, None)
                if index is None:
                    indices = iter(samples)
                else:
                    batch.append(index)
            loss = (model(inputs[batch]) - targets[batch]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(args.step_s)
            if engine.step():
                last = connection.last_round  # type: ignore[attr-defined]
                line = {
                    "round": engine.worker.round_index,
                    "checksum": checksum(engine),
                    "weight": 0.0 if last is None else float(last.statuses[:, 3].sum()),
                    "time": time.time(),
                }
                log.write(json.dumps(line) + "\n")
        engine.finish()
        with torch.no_grad():
            loss = (model(test_inputs) - test_targets).square().mean()
        log.write(json.dumps({"loss": loss.item()}) + "\n")
    engine.close()


if __name__ == "__main__":
    main()
