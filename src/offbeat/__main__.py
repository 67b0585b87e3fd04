"""`python -m offbeat`: the command line."""

import sys
from importlib import import_module

if __name__ == "__main__":
    # Imported by name, because no module may import `cli`, the highest floor (docs/design.md).
    sys.exit(import_module("offbeat.cli").main())
