"""One worker: a process that reads its job from a line, does it, and reports."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from multiprocessing.connection import Connection

import torch

from libraries.library import Line


def main() -> None:
    handle = int(sys.argv[1])
    os.set_inheritable(handle, False)
    connection = Connection(handle)
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING)
    ended_well = False
    try:
        from libraries.training import train

        line = Line(connection)
        line.report(train(connection.recv(), line))
        ended_well = True
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if ended_well else 1)  # threads of some libraries do not end


if __name__ == "__main__":
    main()
