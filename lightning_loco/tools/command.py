"""The command line for everything but training: ``lightning-loco doctor`` and other commands.

In a checkout: ``python command.py doctor``. PyTorch is not imported, so the commands start quickly,
and also work where PyTorch does not.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

from lightning_loco._util.text import suggestion
from lightning_loco.tools import report as report_command
from lightning_loco.tools.addresses import check_bind, read_address
from lightning_loco.tools.doctor import run as doctor_command
from lightning_loco.tools.doctor.facts import describe_versions
from lightning_loco.tools.plan import run as plan_command

MODULES = {
    "doctor": "lightning_loco.tools.doctor.run",
    "plan": "lightning_loco.tools.plan.run",
    "replay": "lightning_loco.tools.replay",
    "report": "lightning_loco.tools.report",
    "syncer": "lightning_loco.tools.syncer",
    "topology": "lightning_loco.tools.topology",
}
"""Modules of commands: their ``run`` takes the arguments and returns the exit status."""


def add_lighthouse_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the lighthouse."""
    parser.add_argument(
        "--bind",
        default="[::]:29510",
        metavar="HOST:PORT",
        help="address of this machine, and port; default %(default)s",
    )
    parser.add_argument(
        "--min-workers",
        type=int,
        default=1,
        metavar="N",
        help="least number of workers in a round; default %(default)s",
    )
    parser.add_argument(
        "--heartbeat-timeout",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="a worker without a heartbeat for this long is dead; default %(default)g",
    )
    parser.add_argument(
        "--join-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="longest wait for a live worker that does not join a round; default %(default)g",
    )


def add_topology_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the report of a topology, which imports PyTorch when it runs."""
    parser.add_argument(
        "topology",
        metavar="NAME|FILE",
        help="a name of conf/topology, such as ring, torus, hypercube or random_matching; or the "
        "path of an edge-list file",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", required=True, help="number of workers, from 2 on"
    )
    parser.add_argument(
        "--png", metavar="FILE", help="draw the graph (needs the extra 'report', for matplotlib)"
    )


def add_syncer_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the syncer, which imports PyTorch when it runs."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--folder",
        metavar="DIR",
        help="the folder of the run: it is made, or the run in it is continued; for this run alone",
    )
    what.add_argument(
        "--status",
        metavar="HOST:PORT",
        help="start nothing, but show the status of the syncer there; exit status 1 if it does not "
        "answer",
    )
    parser.add_argument(
        "--bind",
        default="[::]:29600",
        metavar="HOST:PORT",
        help="address of this machine, and port; default %(default)s",
    )
    parser.add_argument(
        "--key-file",
        metavar="FILE",
        help="key file of the run (lightning-loco keys), for encrypted connections of learners "
        "that have it; default: anybody can connect",
    )
    parser.add_argument(
        "--save-every",
        type=int,
        default=1,
        metavar="N",
        help="merges between two saves; if the syncer is killed, up to N - 1 are lost; "
        "default %(default)s",
    )
    parser.add_argument(
        "--tape",
        action="store_true",
        help="write a line for each event to DIR/tape/tape.jsonl",
    )
    parser.add_argument(
        "--keep-pushes",
        action="store_true",
        help="write the tape, and keep all pushes in DIR/tape/pushes, so that lightning-loco "
        "replay can repeat the merges: as many bytes as the learners send",
    )
    parser.add_argument(
        "--idle-exit",
        type=float,
        metavar="SECONDS",
        help="end, with exit status 0, this long after the last learner has left or was silent "
        "for too long; not before the first one; default: never",
    )
    parser.add_argument(
        "--log-every",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="time between two lines with the status; default %(default)g",
    )


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a replay, which imports PyTorch when it runs."""
    parser.add_argument(
        "folder", metavar="DIR", help="the folder of a syncer, or the folder tape in it"
    )
    parser.add_argument(
        "--quiet", action="store_true", help="print only the last line, with the counts"
    )


def check_lighthouse(args: argparse.Namespace) -> None:
    """Raise ValueError, which names the argument, if the lighthouse could not start with it."""
    check_bind(args.bind, "[::]:29510")
    if args.min_workers < 1:
        raise ValueError(f"--min-workers must be at least 1, got {args.min_workers}.")
    for name in ("heartbeat_timeout", "join_timeout"):
        if not 0.001 <= (seconds := getattr(args, name)) < math.inf:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} must be finite, and at least 0.001 s, got {seconds:g}.")


def check_syncer(args: argparse.Namespace) -> None:
    """Raise ValueError, which names the argument, if the syncer could not start with it."""
    if args.status is not None:
        read_address("--status", args.status, "10.77.0.1:29600")
    read_address("--bind", args.bind, "[::]:29600")
    if args.save_every < 1:
        raise ValueError(f"--save-every must be at least 1, got {args.save_every}.")
    for name in ("idle_exit", "log_every"):
        seconds = getattr(args, name)
        if seconds is not None and not 0 < seconds < math.inf:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} must be positive and finite, got {seconds:g}.")


def become_lighthouse(args: argparse.Namespace) -> NoReturn:
    """Replace this process by torchft's program, so that signals reach it."""
    program = Path(sys.executable).with_name("torchft_lighthouse")
    if not program.exists():
        sys.exit(
            "torchft is not installed. Run in a checkout of lightning_loco: "
            "pip install -c constraints.txt -e '.[elastic]'"
        )
    os.execv(
        program,
        [
            str(program),
            f"--bind={args.bind}",
            f"--min_replicas={args.min_workers}",
            f"--heartbeat_timeout_ms={args.heartbeat_timeout * 1000:.0f}",
            f"--join_timeout_ms={args.join_timeout * 1000:.0f}",
            "--quorum_tick_ms=20",
        ],
    )


def write_keys(path: str) -> int:
    """Write a key file. Returns the exit status."""
    try:
        importlib.import_module("lightning_loco.transport").write_certificate(path)
    except FileExistsError:
        print(f"{path} exists. Name another file, or delete it first.", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"Cannot write {path}: {error.strerror}.", file=sys.stderr)
        return 1
    except RuntimeError as error:
        print(f"Cannot write {path}: {error}", file=sys.stderr)
        return 1
    print(f"Wrote {path} (mode 600). Copy it to every machine and pass key_file={path}.")
    return 0


def main() -> int:
    """Run a command. Returns the exit status."""
    if isinstance(sys.stdout, TextIOWrapper):  # a path may be more than the terminal can show
        sys.stdout.reconfigure(errors="backslashreplace")
    parser = argparse.ArgumentParser(
        prog="lightning-loco",
        description="Tools for distributed runs. Training "
        "itself is another program: lightning-loco-train, in a checkout python train.py.",
    )
    parser.add_argument("--version", action="version", version=describe_versions())
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    doctor = commands.add_parser(
        "doctor",
        help="check within seconds whether this machine, or several together, can train",
        description="Run this on all machines at the same time. Each machine connects to all "
        "others, compares versions, and prints what is wrong and what to do. Without arguments it "
        "checks only this machine. Exit status: 0 if no check has failed, else 1.",
    )
    doctor_command.add_arguments(doctor)
    plan = commands.add_parser(
        "plan",
        help="recommend a method and its settings for a cluster: time, bytes, expected loss",
        description="Estimates how long a run takes with each method, how much it sends, and how "
        "much higher than DDP's its loss is expected to be; recommends one, with the command to "
        "run and the arithmetic. Nothing is trained. Example: lightning-loco plan --parameters "
        "124e6 --workers 2 --step-s 0.5 --tokens-per-step 16384 --link lan",
    )
    plan_command.add_arguments(plan)
    lighthouse = commands.add_parser(
        "lighthouse",
        help="let workers join and leave a run (membership=elastic)",
        description="Tracks which workers are alive and decides which of them take part in a "
        "round. It needs few resources and may be restarted at any time. All workers must be able "
        "to reach it. Its web page shows the workers. Anybody who can reach it can disturb the "
        "run, so keep it inside your network.",
    )
    add_lighthouse_arguments(lighthouse)
    syncer = commands.add_parser(
        "syncer",
        help="merge what decoupled learners push, on a machine that they can reach",
        description="Learners join and leave at any time, and only they open connections. The "
        "first one brings the model and the settings. Each merge is saved in the folder before "
        "learners get it, so a syncer that was stopped or killed continues when it is started "
        "again. It computes on the CPU. SIGTERM and Ctrl-C save and end it. Exit status: 0 after "
        "these and --idle-exit; 1 if the folder cannot be used, another syncer uses it, or "
        "something cannot be saved; 2 if an argument cannot work.",
    )
    add_syncer_arguments(syncer)
    replay = commands.add_parser(
        "replay",
        help="repeat the merges of a syncer from its tape, and show where a result differs",
        description="Repeats each merge on the tape of lightning-loco syncer --keep-pushes, from "
        "the recorded pushes and weights, and compares the result bit for bit. Exit status: 0 if "
        "all are equal, 1 if one differs, 2 if there is no tape, 3 if none differs but some cannot "
        "be repeated, because pushes were not kept or are missing.",
    )
    add_replay_arguments(replay)
    topology = commands.add_parser(
        "topology",
        help="show a graph of gossip: neighbours, spectral gap, chi, settings of GASLoC, picture",
        description="Prints who exchanges with whom on a graph, how fast averaging brings the "
        "workers to their mean, and the settings that GASLoC chooses on it.",
    )
    add_topology_arguments(topology)
    report = commands.add_parser(
        "report",
        help="draw the page of a run, or one that compares several",
        description="Of one run its page is drawn again, from run.json in its folder. Of several "
        "a page is written that shows their losses against steps, time and bytes beside each "
        "other, and how their settings differ.",
    )
    report_command.add_arguments(report)
    keys = commands.add_parser(
        "keys",
        help="write a key file, which protects parameters sent between machines",
        description="Writes a certificate and its private key to a new file that only its owner "
        "can read. Copy it to every machine of the job in a safe way, such as scp, and pass "
        "key_file=FILE there. Workers that have it connect only to each other, over TLS.",
    )
    keys.add_argument("file", metavar="FILE", help="path of the new file; it must not exist")
    name = next((one for one in sys.argv[1:] if not one.startswith("-")), "")
    if name and name not in commands.choices:
        instead, known = suggestion(name, commands.choices), ", ".join(commands.choices)
        parser.error(f"there is no command {name}.{instead} There are {known}.")
    args = parser.parse_args()
    if args.command == "keys":
        return write_keys(args.file)
    try:
        if args.command == "lighthouse":
            check_lighthouse(args)
            become_lighthouse(args)
        if args.command == "syncer":
            check_syncer(args)
        status: int = importlib.import_module(MODULES[args.command]).run(args)
    except (ValueError, FileNotFoundError) as error:
        commands.choices[args.command].error(str(error))
    except KeyboardInterrupt:
        return 130
    return status
