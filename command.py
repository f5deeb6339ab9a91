"""Everything but training: ``python command.py doctor`` and other commands.

The program is ``lightning_loco/tools/command.py``.
"""

import os
import sys

# The doctor also works where PyTorch does not.
os.environ["LIGHTNING_LOCO_LAZY"] = str(os.getpid())
from lightning_loco.tools.command import main

del os.environ["LIGHTNING_LOCO_LAZY"]

if __name__ == "__main__":
    sys.exit(main())
