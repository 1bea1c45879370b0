"""Run the command line: ``python -m fusedonebit``."""

import sys

from .apps.cli import main

if __name__ == "__main__":
    sys.exit(main())
