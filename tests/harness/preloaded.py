"""Modules and names that most ranks need. The server that forks the ranks imports this module.

A module that is missing here is imported by every rank of every world, after the fork.
"""

import gc
import os

gc.disable()  # imports make objects that stay

import encodings.idna  # noqa: E402  of sockets
import encodings.latin_1  # noqa: E402, F401  of checkpoints

import numpy.ma  # noqa: E402, F401  of fits to measured times
import pytest  # noqa: E402, F401  of functions that are in a test's own file
import torch._dynamo  # noqa: E402  800 modules that the first optimizer of a process imports
import torch.distributed.checkpoint.default_planner  # noqa: E402
import torch.distributed.checkpoint.filesystem  # noqa: E402
import torch.distributed.checkpoint.state_dict  # noqa: E402
import torch.distributed.fsdp  # noqa: E402
import torch.distributed.tensor.parallel  # noqa: E402
import torch.profiler._cupti_monitor  # noqa: E402
import torch.utils.serialization.config  # noqa: E402, F401
from cases import strategy_lists, workers  # noqa: E402, F401

from harness import commands  # noqa: E402, F401
from offbeat.core.runtime import flat_session, prepare  # noqa: E402, F401
from offbeat.core.sim import prediction  # noqa: E402, F401
from offbeat.gossip import session as gossip_session  # noqa: E402, F401
from offbeat.jobs import observer, stopping  # noqa: E402, F401
from offbeat.server import session as server_session  # noqa: E402, F401
from offbeat.strategies import levels  # noqa: E402, F401

# The path is for this import. Scripts that ranks start get what the server's parent has.
_, *paths = os.environ.pop("PYTHONPATH").split(os.pathsep)
if paths:
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)

gc.freeze()  # collections in ranks neither visit nor copy what they share
gc.enable()
DONE = True
