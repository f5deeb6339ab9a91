"""Workers killed, stopped, cut off and started at random, and a lighthouse that is restarted.

What it shows: a run under membership=Elastic(...) loses no round, all who made a round ended it
with the same outer parameters and momentum, and its model is as good as that of as many workers
that nobody disturbs, with as much data. The table at the end says so, and the exit status is 0.

Run it: python examples/chaos/chaos.py --kills 20 --joins 20
Or with rounds that travel during the next local steps: python examples/chaos/chaos.py --overlap
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

from verdict import Record, different, judge

HERE = Path(__file__).resolve().parent
HEARTBEAT_S = 1.0
LONGEST_ROUND_S, LONGEST_START_S = 60.0, 240.0
MOST, FEWEST = 4, 2
RESOLVER = {"RES_OPTIONS": "timeout:1 attempts:1"}
"""PyTorch asks for the name of every address of which it reports an error, and waits for it."""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


class Run:
    """A lighthouse and its workers.

    Args:
        folder: Where they write.
        asked: What the user says.
    """

    def __init__(self, folder: Path, asked: argparse.Namespace) -> None:
        self.folder, self.asked, self.port = folder, asked, free_port()
        self.workers: dict[int, subprocess.Popen[bytes]] = {}
        self._seen = Record()
        folder.mkdir()
        self.start_lighthouse()

    def start_lighthouse(self) -> None:
        """Start it, at the same address as before."""
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
        """Kill it, and start it again a moment later."""
        self.lighthouse.kill()
        self.lighthouse.wait()
        time.sleep(0.5)
        self.start_lighthouse()
        self._seen.lighthouse_back.append(time.time())

    def start(self) -> int:
        """Start a worker; its number."""
        number = len(self.workers)
        asked = self.asked
        with open(self.folder / f"{number}.err", "wb") as errors:
            self.workers[number] = subprocess.Popen(
                [
                    sys.executable,
                    str(HERE / "worker.py"),
                    f"--lighthouse=127.0.0.1:{self.port}",
                    f"--log={self.folder / f'{number}.jsonl'}",
                    f"--rounds={asked.rounds}",
                    f"--sync-every={asked.sync_every}",
                    f"--step-s={asked.step_s}",
                    f"--min-workers={FEWEST}",
                    *(["--overlap"] if asked.overlap else []),
                ],
                stderr=errors,
                env=os.environ | RESOLVER,
            )
        return number

    def lines(self, number: int) -> list[dict]:
        """What a worker has written."""
        path = self.folder / f"{number}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def record(self) -> Record:
        """All that has happened so far."""
        self._seen.lines = {number: self.lines(number) for number in self.workers}
        return self._seen

    def alive(self) -> list[int]:
        """Workers that run."""
        return [number for number, process in self.workers.items() if process.poll() is None]

    def taking_part(self) -> list[int]:
        """Workers that have made a round."""
        return [number for number in self.alive() if self.lines(number)]

    @property
    def round(self) -> int:
        """Rounds made so far."""
        last = [self.lines(number)[-1:] for number in self.workers]
        return max((line[0].get("round", 0) for line in last if line), default=0)

    def errors(self) -> list[str]:
        """The last words of workers that have failed."""
        well = (None, 0, -signal.SIGKILL)
        failed = [number for number, process in self.workers.items() if process.poll() not in well]
        texts = {number: (self.folder / f"{number}.err").read_text() for number in failed}
        return [f"worker {n}: {(text.splitlines() or ['killed'])[-1]}" for n, text in texts.items()]

    def kill(self, number: int) -> None:
        """SIGKILL."""
        self.workers[number].kill()
        self.workers[number].wait()
        self._seen.killed_at.append(time.time())

    def sleep(self, number: int, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later."""
        began = time.time()
        self.workers[number].send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.workers[number].send_signal(signal.SIGCONT)
        self._seen.absent[number].append((began, time.time() + 3 * HEARTBEAT_S))

    def cut(self, number: int) -> None:
        """Let a worker lose all its connections."""
        self.workers[number].send_signal(signal.SIGUSR1)

    def stop_latecomers(self) -> None:
        """Once a worker has finished, end those that have made no round: they would begin a run."""
        if any(process.poll() == 0 for process in self.workers.values()):
            for number in set(self.alive()) - set(self.taking_part()):
                self.workers[number].kill()

    def close(self) -> None:
        """End all."""
        for process in [*self.workers.values(), self.lighthouse]:
            process.kill()
            process.wait()


def disturb(run: Run, asked: argparse.Namespace, chance: random.Random) -> dict[str, int]:
    """Kill, start and stop workers until there was enough of it, or the run has ended."""
    counts = {"kills": 0, "joins": 0, "sleeps": 0, "cuts": 0, "lighthouse restarts": 0}
    made, since = 0, time.monotonic()
    while made < asked.rounds - 20:
        if time.monotonic() > since + (LONGEST_ROUND_S if made else LONGEST_START_S):
            break
        time.sleep(chance.uniform(0.3, 1.0))
        if made != (made := run.round):
            since = time.monotonic()
        there, alive = run.taking_part(), run.alive()
        wanted = chance.random()
        if len(alive) < MOST and counts["joins"] < asked.joins:
            run.start()
            counts["joins"] += 1
        elif len(there) > FEWEST and wanted < 0.7 and counts["kills"] < asked.kills:
            run.kill(chance.choice(there))
            counts["kills"] += 1
        elif len(there) > FEWEST and wanted < 0.8 and counts["sleeps"] < asked.sleeps:
            run.sleep(chance.choice(there), 2 * HEARTBEAT_S)
            counts["sleeps"] += 1
        elif len(there) > FEWEST and wanted < 0.9 and counts["cuts"] < asked.cuts:
            run.cut(chance.choice(there))
            counts["cuts"] += 1
        elif wanted > 0.95 and counts["lighthouse restarts"] < asked.restarts:
            run.restart_lighthouse()
            counts["lighthouse restarts"] += 1
        progress(run, counts)
    return counts


def progress(run: Run, counts: dict[str, int]) -> None:
    """One line that is written again and again, where somebody looks."""
    if sys.stderr.isatty():
        told = ", ".join(f"{count} {name}" for name, count in counts.items())
        line = f"round {run.round}, {len(run.taking_part())} workers, {told}"
        print(f"\r{line:<78}", end="", file=sys.stderr, flush=True)


def ends_by_itself(run: Run, limit_s: float) -> bool:
    """Whether all workers that take part end in time."""
    deadline = time.monotonic() + limit_s
    while run.alive() and time.monotonic() < deadline:
        run.stop_latecomers()
        time.sleep(0.1)
    return not run.taking_part()


def undisturbed(folder: Path, asked: argparse.Namespace, found: dict[str, float]) -> float:
    """Loss of as many workers that nobody disturbs, with as much data."""
    workers = round(found["weight"] / found["rounds"])
    rounds = round(found["weight"] / workers)
    run = Run(folder, argparse.Namespace(**{**vars(asked), "rounds": rounds}))
    try:
        for _ in range(workers):
            run.start()
        ends_by_itself(run, 600)
        return judge(run.record())["loss"]
    finally:
        run.close()


def main() -> int:
    """Make the chaos and say what came of it."""
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
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder) / "chaos", asked)
        try:
            for _ in range(3):
                run.start()
            counts = disturb(run, asked, random.Random(asked.seed))
            has_ended = ends_by_itself(run, 120)
            errors = run.errors()
            if not run.round:
                print("No round was made.", *errors, sep="\n")
                return 1
            found, differences = judge(run.record()), different(run.record())
        finally:
            run.close()
        print(file=sys.stderr)
        calm = undisturbed(Path(folder) / "calm", asked, found)
    ratio = found["loss"] / calm
    rows = [
        ("ended by itself", has_ended, "yes" if has_ended else "no"),
        ("rounds", found["rounds"] >= asked.rounds - 1, f"{found['rounds']:.0f}"),
        ("rounds lost", found["lost"] == 0, f"{found['lost']:.0f}"),
        ("rounds with different states", found["different"] == 0, f"{found['different']:.0f}"),
        ("live workers that took part", found["part"] >= 0.95, f"{found['part']:.1%}"),
        (
            "longest wait after a kill",
            found["longest wait"] <= HEARTBEAT_S + 1,
            f"{found['longest wait']:.2f} s",
        ),
        ("loss / undisturbed", abs(ratio - 1) <= 0.05, f"{found['loss']:.4f} / {calm:.4f}"),
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
