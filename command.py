"""Command line of what is not training: ``python command.py doctor``, or ``lightning-loco doctor``.

Nothing heavy is imported, so that it answers at once, and where PyTorch does not work.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from importlib.util import find_spec, module_from_spec
from types import ModuleType


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


def main() -> int:
    """Run a command; its exit status."""
    parser = argparse.ArgumentParser(prog="lightning-loco", description="Tools beside training.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor = commands.add_parser(
        "doctor",
        help="find out within seconds whether several machines can train together",
        description="Run this on each machine at the same time. Each checks names, interfaces, "
        "ports, clock and versions against the others, and says what to mend. Exit status: 0 if "
        "all is well, 1 if not.",
    )
    room("doctor.place").add_arguments(doctor)
    args = parser.parse_args()
    try:
        status: int = room("doctor.run").run(args)
    except ValueError as error:
        doctor.error(str(error))
    except KeyboardInterrupt:
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
