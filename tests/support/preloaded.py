"""Modules and names that most ranks need. The server that forks the ranks imports this module."""

import gc
import os

from offbeat.core.sim import prediction  # noqa: F401
from support import strategy_lists, workers  # noqa: F401

# The path is for this import. Scripts that ranks start get what the server's parent has.
_, *paths = os.environ.pop("PYTHONPATH").split(os.pathsep)
if paths:
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)

gc.freeze()  # collections in ranks neither visit nor copy what they share
