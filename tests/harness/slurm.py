"""A faked SLURM: its commands, and the variables of a job."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.harness.programs import free_ports
from tests.harness.sources import ROOT

# Replaces srun: it starts the tasks, with a few steps of a tiny model instead of the long run.
# On request it then acts like SLURM before the time limit.
SRUN = """
import os, pathlib, signal, subprocess, sys, time

command = sys.argv[1:]
while command[0].startswith("--"):
    command.pop(0)
per_node = int(os.environ["SLURM_NTASKS_PER_NODE"])
tasks = [
    subprocess.Popen(
        [*command, *os.environ["CHANGES"].split()],
        env={
            **os.environ,
            "SLURM_PROCID": str(task),
            "SLURM_LOCALID": str(task % per_node),
            "SLURM_NODEID": str(task // per_node),
        },
    )
    for task in range(int(os.environ["SLURM_NTASKS"]))
]
time_is_up = os.environ.get("SIGNAL_WHEN_THERE_IS")
while time_is_up and not list(pathlib.Path().glob(time_is_up)):
    if any(task.poll() is not None for task in tasks):
        sys.exit("a task has ended too early")
    time.sleep(0.05)
if time_is_up:
    for task in tasks:
        task.send_signal(signal.SIGUSR1)
sys.exit(max(abs(task.wait()) for task in tasks))
"""
COMMAND = ROOT / "command.py"
TINY_STEPS = (
    "experiment=smoke trainer.accelerator=cpu trainer.precision=32-true "
    "trainer.max_steps=20 trainer.val_check_interval=10"
)
TINY = f"{TINY_STEPS} algorithm.sync_every=4"
"""Changes with which a batch script trains a tiny model."""


def fake_cluster(folder: Path) -> dict[str, str]:
    """Make a checkout with an environment; return the variables of a job with two tasks."""
    (folder / "train.py").symlink_to(ROOT / "train.py")
    programs = {
        ".venv/bin/activate": f"export PATH={folder}/.venv/bin:$PATH\n",
        ".venv/bin/python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n',
        ".venv/bin/lightning-loco": f'#!/bin/sh\nexec "{sys.executable}" "{COMMAND}" "$@"\n',
        ".venv/bin/srun": f"#!{sys.executable}\n{SRUN}",
        ".venv/bin/scontrol": f'#!/bin/sh\necho "$@" >> {folder}/scontrol.log\n',
    }
    for name, text in programs.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    (port,) = free_ports()
    return {
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NAME": "loco",
        "SLURM_STEP_ID": "0",
        "SLURM_NNODES": "1",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_CPUS_PER_TASK": "1",
        "MASTER_PORT": str(port),
    }
