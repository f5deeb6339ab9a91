"""Made-up records of runs, for tests of their pages."""

from __future__ import annotations

import math

from lightning_loco.report.record import Curve, Drawing, RunRecord

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def made_up(num_workers: int = 2, num_steps: int = 40, text: str = "ring") -> RunRecord:
    """Return a record with every field set; ``text`` is used for all text fields."""
    curves, events, shares = [], [], []
    for worker in range(num_workers):
        loss = Curve("train_loss", f"training, worker {worker} {text}", worker)
        for step in range(1, num_steps + 1):
            loss.add(step, 0.1 * step, 1000 * (step // 4), 2 + math.cos(step + worker) / step)
        curves.append(loss)
        for number in range(num_steps // 2):
            start_s = 0.2 * number
            events += [
                (worker, "compute", start_s, start_s + 0.15),
                (worker, "wait", start_s + 0.15, start_s + 0.2),
                (worker, "round", start_s + 0.1, start_s + 0.2),
                (worker, text, start_s, start_s + 0.01),
            ]
        shares.append({"compute": 0.075 * num_steps, "wait": 0.025 * num_steps, text: 0.1})
    for kind in ("validation", "learning_rate", "consensus", "metric"):
        curve = Curve(kind, f"{kind} {text}")  # type: ignore[arg-type]
        for step in range(10, num_steps + 1, 10):
            curve.add(step, 0.1 * step, 1000 * (step // 4), 1 / step)
        curves.append(curve)
    return RunRecord(
        title=f"GASLoC {text}",
        started=text,
        ended=text,
        seconds=0.1 * num_steps,
        lanes=[f"worker {worker} {text}" for worker in range(num_workers)],
        curves=curves,
        events=events,
        shares=shares,
        goodput=[
            {"goodput": 0.5, "waiting": 0.25, "joining": 0.0, "lost": 0.125, "restarting": 0.125},
            *[{"goodput": 1.0} for _ in range(num_workers - 1)],
        ],
        events_left_out=7,
        numbers={"local steps": num_steps, text: text},
        bytes_sent=250.0 * num_steps,
        ddp_bytes=100_000.0 * num_steps,
        topology=Drawing(text, num_workers, ((0, num_workers - 1),), 0.25, text),
        settings={"strategy": {text: text, "sync_every": 4}},
        versions={"torch": "2", text: text},
        warnings={text: 2},
        notes=[text],
    )
