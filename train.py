"""Train with a configuration: ``python train.py algorithm=gasloc topology=ring``.

The program is ``lightning_loco/app/command_line.py``.
"""

import os

# --help does not wait for PyTorch and Lightning.
os.environ["LIGHTNING_LOCO_LAZY"] = str(os.getpid())
from lightning_loco.app.command_line import main

del os.environ["LIGHTNING_LOCO_LAZY"]

if __name__ == "__main__":
    main()
