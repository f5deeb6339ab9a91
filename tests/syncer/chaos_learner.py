"""A learner in a process of its own, with a log of what it does: ``PORT NAME STEP_S FOLDER``.

It saves itself every ten local steps and continues from there when it is started again. When
``FOLDER/still`` is there it makes no more steps, and writes the versions that it has until
``FOLDER/leave`` is there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_loco.syncer import LearnerEngine, MergeSettings
from lightning_loco.syncer.tape import hash_of

ROUNDS = MergeSettings(fragments=3, sync_every=9, lease_s=1.5)
SAVE_EVERY = 10


class Numbers(nn.Module):
    """A vector, and an embedding. A step goes a tenth of the way to a number."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(3000))
        self.table = nn.Embedding(100, 10)
        nn.init.zeros_(self.table.weight)

    @torch.no_grad()
    def step(self, toward: float) -> None:
        """Take a step."""
        for parameter in self.parameters():
            parameter += 0.1 * (toward - parameter)


def main(port: str, name: str, step_s: float, folder: Path) -> None:
    """Train until told otherwise."""
    log = (folder / f"{name}.log").open("a", buffering=1)

    def write(**values: Any) -> None:
        log.write(json.dumps({"process": os.getpid(), **values}) + "\n")

    model, saved = Numbers(), folder / f"{name}.pt"
    engine = LearnerEngine(model, syncer=f"127.0.0.1:{port}", name=name, rounds=ROUNDS)
    if saved.exists():
        engine.load_state_dict(torch.load(saved))
    engine.start()
    assert engine.learner is not None
    write(event="start", steps=engine.worker.steps)
    while not (folder / "still").exists():
        time.sleep(step_s)
        write(event="step", at=time.monotonic(), received=engine.statistics.rounds)
        model.step(float(len(name)))
        engine.step()
        if engine.worker.steps % SAVE_EVERY == 0:
            torch.save(engine.state_dict(), saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)
    while not (folder / "leave").exists():
        time.sleep(0.02)
        if engine.check_due():
            engine.make_round()
        learner = engine.learner
        hashes = [hash_of(one) for one in learner.received]
        write(event="has", versions=learner.rounds.received, hashes=hashes)
    engine.finish()
    write(event="end", counts=learner.counts)
    engine.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), Path(sys.argv[4]))
