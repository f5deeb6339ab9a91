"""`python -m tests.exploration`."""

import sys

from tests.exploration.command import main

if __name__ == "__main__":
    sys.exit(main())
