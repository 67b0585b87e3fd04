"""`python -m offbeat`: the command line."""

import sys
from importlib import import_module

if __name__ == "__main__":
    sys.exit(import_module("offbeat.cli").main())  # as text: the command line is the top floor
