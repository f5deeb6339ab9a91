"""Four learners of different speed; one is killed and comes back, and no other one waits.

What it shows: each learner is a Trainer of its own (decoupled/learner.py), and pushes what it has
learned to a syncer. While b is away the others go on at their pace; when it is back, it continues
from the parameters of the syncer. At the end the merges are repeated from the tape, bit for bit.

Run it: python examples/13_decoupled_learners.py
"""

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

SECONDS_PER_STEP = {"a": 0.03, "b": 0.03, "c": 0.06, "d": 0.18}
FRAGMENTS = 4
PROGRAM = str(Path(sys.executable).with_name("lightning-loco"))
LEARNER = str(Path(__file__).with_name("decoupled") / "learner.py")


def steps(folder: Path, name: str, begin: float = 0.0, end: float = float("inf")) -> int:
    """Return how many local steps a learner has made in a time."""
    file = folder / f"{name}.steps"
    times = [float(line) for line in file.read_text().splitlines()] if file.exists() else []
    return sum(begin < one <= end for one in times)


def merged_steps(tape: Path) -> Counter[str]:
    """Return how many local steps of each learner are in a merge."""
    found: Counter[str] = Counter()
    for line in map(json.loads, tape.read_text().splitlines()):
        for push in line.get("pushes", []):
            found[push["learner"]] += push["steps"]
    return Counter({name: count // FRAGMENTS for name, count in found.items()})


def main(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    subprocess.run([PROGRAM, "keys", "run.pem"], cwd=folder, check=True)
    serve = [PROGRAM, "syncer", "--bind", address, "--key-file=run.pem", "--folder=run"]
    running = [subprocess.Popen([*serve, "--keep-pushes", "--idle-exit=1"], cwd=folder)]

    def start(name: str) -> None:
        settings = [address, name, str(SECONDS_PER_STEP[name]), "run.pem"]
        running.append(subprocess.Popen([sys.executable, LEARNER, *settings], cwd=folder))

    def wait_until_all_train(since: float = 0.0) -> float:
        while not all(steps(folder, name, since) for name in SECONDS_PER_STEP):
            if any(process.poll() is not None for process in running):
                sys.exit("A process has ended.")
            time.sleep(0.1)
        return time.time()

    try:
        for name in SECONDS_PER_STEP:
            start(name)
        began = wait_until_all_train()
        time.sleep(7)
        killed = running.pop(2)
        killed.kill()
        killed.wait()
        away = time.time()
        print(f"b was killed after {steps(folder, 'b')} local steps", flush=True)
        time.sleep(3)
        start("b")
        back = wait_until_all_train(since=away)
        print(f"b is back after {back - away:.0f} s", flush=True)
        time.sleep(7)
        ended = time.time()
        (folder / "stop").touch()
        codes = [process.wait() for process in reversed(running)]
    finally:
        for process in running:
            process.kill()
            process.wait()
    merged = merged_steps(folder / "run" / "tape" / "tape.jsonl")
    print("learner  local steps  of them merged  per s: before  b away  after    loss")
    for name in SECONDS_PER_STEP:
        total, count = steps(folder, name), merged[name]
        spans = ((began, away), (away, back), (back, ended))
        rates = [steps(folder, name, *span) / (span[1] - span[0]) for span in spans]
        loss = json.loads((folder / f"{name}.json").read_text())["loss"]
        print(f"{name:7}  {total:11}  {count:8} ({count / total:3.0%})", end="  ")
        print("{:13.1f}  {:6.1f}  {:5.1f}".format(*rates), f" {loss:.4f}", flush=True)
    replay = subprocess.run([PROGRAM, "replay", "run", "--quiet"], cwd=folder, check=False)
    sys.exit(any([*codes, replay.returncode]))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as path:
        main(Path(path))
