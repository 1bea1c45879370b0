"""Runs the lab."""

import sys

from .command import main

if __name__ == "__main__":  # processes that it starts import this, too
    sys.exit(main())
