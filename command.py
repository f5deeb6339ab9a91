"""Command line of what is not training: ``python command.py doctor``, or ``lightning-loco doctor``.

Nothing heavy is imported, so that it answers at once, and where PyTorch does not work.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import NoReturn


def room(name: str) -> ModuleType:
    """A room of ``lightning_loco``, without what ``import lightning_loco`` does: import PyTorch.

    Raises:
        ModuleNotFoundError: If the package is not there.
    """
    if "lightning_loco" not in sys.modules:
        spec = find_spec("lightning_loco")
        if spec is None:
            raise ModuleNotFoundError("There is no lightning_loco here: install lightning-loco.")
        sys.modules["lightning_loco"] = module_from_spec(spec)
    return importlib.import_module(f"lightning_loco.{name}")


def add_lighthouse_arguments(parser: argparse.ArgumentParser) -> None:
    """What a user may say of a lighthouse."""
    parser.add_argument(
        "--bind", default="[::]:29510", help="address and port; default %(default)s"
    )
    parser.add_argument(
        "--min-workers", type=int, default=1, help="fewer make no round; default %(default)s"
    )
    parser.add_argument(
        "--heartbeat-timeout",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="a worker that was not heard for so long is dead; default %(default)g",
    )
    parser.add_argument(
        "--join-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="longest wait for a worker that lives and does not come; default %(default)g",
    )


def become_lighthouse(args: argparse.Namespace) -> NoReturn:
    """Go on as torchft's program, so that signals reach it."""
    program = Path(sys.executable).with_name("torchft_lighthouse")
    if not program.exists():
        sys.exit("There is no torchft here: pip install 'lightning-loco[elastic]'.")
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
    """Write a key file; the exit status."""
    try:
        room("transport.certificate").write_certificate(path)
    except FileExistsError:
        print(f"{path} exists. Name another file, or delete it first.", file=sys.stderr)
        return 1
    except (OSError, RuntimeError) as error:
        print(f"Cannot write {path}: {error}", file=sys.stderr)
        return 1
    print(f"Wrote {path} (mode 600). Copy it to every machine and pass key_file={path}.")
    return 0


def main() -> int:
    """Run a command; its exit status."""
    parser = argparse.ArgumentParser(prog="lightning-loco", description="Tools beside training.")
    versions = room("doctor.facts").describe_versions()
    parser.add_argument("--version", action="version", version=versions)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    doctor = commands.add_parser(
        "doctor",
        help="find out within seconds whether this machine, or several together, can train",
        description="Run this on each machine at the same time. Each connects to all others, "
        "compares versions, and says what is wrong and what to do. Without arguments it shows this "
        "machine alone. Exit status: 0 if all is well, 1 if not.",
    )
    room("doctor.run").add_arguments(doctor)
    lighthouse = commands.add_parser(
        "lighthouse",
        help="let the workers of a run come and go (membership=elastic)",
        description="Hears which workers are alive, and says who takes part. It stays small, may "
        "be restarted at any time, and must be reached by all workers; its page in a browser shows "
        "them. Whoever reaches it can disturb the run: keep it inside your network.",
    )
    add_lighthouse_arguments(lighthouse)
    keys = commands.add_parser(
        "keys",
        help="write a key file, for parameters that travel between machines",
        description="Writes a certificate and its private key to a new file that only its owner "
        "can read. Copy it to every machine of the job by a safe way, such as scp, and pass "
        "key_file=FILE there: workers that hold it talk to each other by TLS, and to nobody else.",
    )
    keys.add_argument("file", metavar="FILE", help="does not exist yet")
    args = parser.parse_args()
    if args.command == "lighthouse":
        become_lighthouse(args)
    if args.command == "keys":
        return write_keys(args.file)
    try:
        status: int = room("doctor.run").run(args)
    except ValueError as error:
        doctor.error(str(error))
    except KeyboardInterrupt:
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
