"""Modules and names that most ranks need. The server that forks the ranks imports this module.

A module that is missing here is imported by every rank of every world, after the fork.
"""

import gc
import os

import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401

from offbeat.core.runtime import plan_session  # noqa: F401
from offbeat.core.sim import prediction  # noqa: F401
from offbeat.experiments.record import recorder  # noqa: F401
from offbeat.gossip import session as gossip_session  # noqa: F401
from offbeat.jobs import observer, stopping  # noqa: F401
from offbeat.server import session as server_session  # noqa: F401
from offbeat.strategies import levels  # noqa: F401
from support import strategy_lists, workers  # noqa: F401

# The path is for this import. Scripts that ranks start get what the server's parent has.
_, *paths = os.environ.pop("PYTHONPATH").split(os.pathsep)
if paths:
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)

gc.freeze()  # collections in ranks neither visit nor copy what they share
