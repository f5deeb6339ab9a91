"""Kill, suspend, disconnect and start workers at random, and restart the lighthouse.

It shows that a run with membership=Elastic(...) loses no round, that all members of a round end it
with the same outer parameters and momentum, and that the model is as good as one of an undisturbed
run of as many workers with as much data. A table at the end reports this, and the exit status is 0.

Run it: python examples/chaos/chaos.py --kills 20 --joins 20
Or with rounds that overlap with local steps: python examples/chaos/chaos.py --overlap
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import Record, differing_rounds, summarize

HERE = Path(__file__).resolve().parent
HEARTBEAT_S = 1.0
MAX_ROUND_S, MAX_START_S = 60.0, 240.0
MAX_WORKERS, MIN_WORKERS = 4, 2
RESOLVER = {"RES_OPTIONS": "timeout:1 attempts:1"}
"""PyTorch looks up the name of every address for which it reports an error, and waits for it."""


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Run:
    """A lighthouse and its workers.

    Args:
        folder: Folder of their logs.
        args: Arguments of the command line.
    """

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self.args, self.port = folder, args, free_port()
        self.workers: dict[int, subprocess.Popen[bytes]] = {}
        self._record = Record()
        folder.mkdir()
        self.start_lighthouse()

    def start_lighthouse(self) -> None:
        """Start the lighthouse, always at the same address."""
        program = Path(sys.executable).with_name("torchft_lighthouse")
        self.lighthouse = subprocess.Popen(
            [
                program,
                f"--bind=127.0.0.1:{self.port}",
                "--min_replicas=1",
                "--quorum_tick_ms=20",
                f"--heartbeat_timeout_ms={HEARTBEAT_S * 1000:.0f}",
            ],
            stderr=subprocess.DEVNULL,
        )
        time.sleep(0.3)

    def restart_lighthouse(self) -> None:
        """Kill the lighthouse, and start it again a moment later."""
        self.lighthouse.kill()
        self.lighthouse.wait()
        time.sleep(0.5)
        self.start_lighthouse()
        self._record.lighthouse_back.append(time.time())

    def start(self) -> int:
        """Start a worker, and return its number."""
        number = len(self.workers)
        args = self.args
        with open(self.folder / f"{number}.err", "wb") as errors:
            self.workers[number] = subprocess.Popen(
                [
                    sys.executable,
                    str(HERE / "worker.py"),
                    f"--lighthouse=127.0.0.1:{self.port}",
                    f"--log={self.folder / f'{number}.jsonl'}",
                    f"--rounds={args.rounds}",
                    f"--sync-every={args.sync_every}",
                    f"--step-s={args.step_s}",
                    f"--min-workers={MIN_WORKERS}",
                    *(["--overlap"] if args.overlap else []),
                ],
                stderr=errors,
                env=os.environ | RESOLVER,
            )
        return number

    def lines(self, number: int) -> list[dict]:
        """Return the lines that a worker has logged."""
        path = self.folder / f"{number}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def record(self) -> Record:
        """Return the record of all events so far."""
        self._record.lines = {number: self.lines(number) for number in self.workers}
        return self._record

    def alive(self) -> list[int]:
        """Return the numbers of workers that are running."""
        return [number for number, process in self.workers.items() if process.poll() is None]

    def taking_part(self) -> list[int]:
        """Return the numbers of running workers that have made a round."""
        return [number for number in self.alive() if self.lines(number)]

    @property
    def round(self) -> int:
        """Number of rounds so far."""
        last = [self.lines(number)[-1:] for number in self.workers]
        return max((line[0].get("round", 0) for line in last if line), default=0)

    def errors(self) -> list[str]:
        """Return the last error line of each worker that failed."""
        expected = (None, 0, -signal.SIGKILL)
        failed = [
            number for number, process in self.workers.items() if process.poll() not in expected
        ]
        texts = {number: (self.folder / f"{number}.err").read_text() for number in failed}
        return [f"worker {n}: {(text.splitlines() or ['killed'])[-1]}" for n, text in texts.items()]

    def kill(self, number: int) -> None:
        """Kill a worker."""
        self.workers[number].kill()
        self.workers[number].wait()
        self._record.killed_at.append(time.time())

    def suspend(self, number: int, seconds: float) -> None:
        """Suspend a worker for some seconds."""
        started = time.time()
        self.workers[number].send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.workers[number].send_signal(signal.SIGCONT)
        self._record.absent[number].append((started, time.time() + 3 * HEARTBEAT_S))

    def disconnect(self, number: int) -> None:
        """Cut all connections of a worker."""
        self.workers[number].send_signal(signal.SIGUSR1)

    def stop_latecomers(self) -> None:
        """Once a worker has finished, kill those without a round: they would begin another run."""
        if any(process.poll() == 0 for process in self.workers.values()):
            for number in set(self.alive()) - set(self.taking_part()):
                self.workers[number].kill()

    def close(self) -> None:
        """Kill all processes."""
        for process in [*self.workers.values(), self.lighthouse]:
            process.kill()
            process.wait()


def disturb(run: Run, args: argparse.Namespace, rng: random.Random) -> dict[str, int]:
    """Disturb the workers until all disturbances are made or the run has ended; return counts."""
    counts = {"kills": 0, "joins": 0, "sleeps": 0, "cuts": 0, "lighthouse restarts": 0}
    last_round, since = 0, time.monotonic()
    while last_round < args.rounds - 20:
        if time.monotonic() > since + (MAX_ROUND_S if last_round else MAX_START_S):
            break
        time.sleep(rng.uniform(0.3, 1.0))
        if last_round != (last_round := run.round):
            since = time.monotonic()
        active, alive = run.taking_part(), run.alive()
        chance = rng.random()
        if len(alive) < MAX_WORKERS and counts["joins"] < args.joins:
            run.start()
            counts["joins"] += 1
        elif len(active) > MIN_WORKERS and chance < 0.7 and counts["kills"] < args.kills:
            run.kill(rng.choice(active))
            counts["kills"] += 1
        elif len(active) > MIN_WORKERS and chance < 0.8 and counts["sleeps"] < args.sleeps:
            run.suspend(rng.choice(active), 2 * HEARTBEAT_S)
            counts["sleeps"] += 1
        elif len(active) > MIN_WORKERS and chance < 0.9 and counts["cuts"] < args.cuts:
            run.disconnect(rng.choice(active))
            counts["cuts"] += 1
        elif chance > 0.95 and counts["lighthouse restarts"] < args.restarts:
            run.restart_lighthouse()
            counts["lighthouse restarts"] += 1
        progress(run, counts)
    return counts


def progress(run: Run, counts: dict[str, int]) -> None:
    """Update a line about the progress, if standard error is a terminal."""
    if sys.stderr.isatty():
        done = ", ".join(f"{count} {name}" for name, count in counts.items())
        line = f"round {run.round}, {len(run.taking_part())} workers, {done}"
        print(f"\r{line:<78}", end="", file=sys.stderr, flush=True)


def wait_for_end(run: Run, limit_s: float) -> bool:
    """Wait until all workers have ended; whether they did in time."""
    deadline = time.monotonic() + limit_s
    while run.alive() and time.monotonic() < deadline:
        run.stop_latecomers()
        time.sleep(0.1)
    return not run.taking_part()


def run_undisturbed(folder: Path, args: argparse.Namespace, found: dict[str, float]) -> float:
    """Return the loss of an undisturbed run of as many workers with as much data."""
    workers = round(found["weight"] / found["rounds"])
    rounds = round(found["weight"] / workers)
    run = Run(folder, argparse.Namespace(**{**vars(args), "rounds": rounds}))
    try:
        for _ in range(workers):
            run.start()
        wait_for_end(run, 600)
        return summarize(run.record())["loss"]
    finally:
        run.close()


def main() -> int:
    """Run the disturbed and the undisturbed workers, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--joins", type=int, default=20)
    parser.add_argument("--sleeps", type=int, default=2)
    parser.add_argument("--cuts", type=int, default=3, help="of all connections of a worker")
    parser.add_argument("--restarts", type=int, default=1, help="of the lighthouse")
    parser.add_argument("--sync-every", type=int, default=20)
    parser.add_argument("--step-s", type=float, default=0.01)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder) / "chaos", args)
        try:
            for _ in range(3):
                run.start()
            counts = disturb(run, args, random.Random(args.seed))
            has_ended = wait_for_end(run, 120)
            errors = run.errors()
            if not run.round:
                print("No round was made.", *errors, sep="\n")
                return 1
            found, differences = summarize(run.record()), differing_rounds(run.record())
        finally:
            run.close()
        print(file=sys.stderr)
        undisturbed_loss = run_undisturbed(Path(folder) / "undisturbed", args, found)
    ratio = found["loss"] / undisturbed_loss
    rows = [
        ("ended by itself", has_ended, "yes" if has_ended else "no"),
        ("rounds", found["rounds"] >= args.rounds - 1, f"{found['rounds']:.0f}"),
        ("rounds lost", found["lost"] == 0, f"{found['lost']:.0f}"),
        ("rounds with different states", found["different"] == 0, f"{found['different']:.0f}"),
        ("live workers that took part", found["part"] >= 0.95, f"{found['part']:.1%}"),
        (
            "longest wait after a kill",
            found["longest wait"] <= HEARTBEAT_S + 1,
            f"{found['longest wait']:.2f} s",
        ),
        (
            "loss / undisturbed",
            abs(ratio - 1) <= 0.05,
            f"{found['loss']:.4f} / {undisturbed_loss:.4f}",
        ),
        *((name, True, str(count)) for name, count in counts.items()),
        ("workers that failed", not errors, str(len(errors))),
    ]
    for name, is_well, figure in rows:
        print(f"{name:<30} {figure:>18}  {'ok' if is_well else 'MISSED'}")
    for text in [*errors, *differences]:
        print(text)
    return int(not all(is_well for _, is_well, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
