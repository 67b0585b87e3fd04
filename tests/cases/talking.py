"""What ranks tell each other in the tests of control messages."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from cases.workers import rank
from offbeat.core.transport.control import Control
from offbeat.core.transport.packed import broadcast_state

STATE = {"step": 3, "moments": [torch.arange(5.0), torch.zeros(0)], "first": (True, None)}


def tell_all_sorts() -> list[Any]:
    """Values of very different sizes, a state, and what one rank cannot say."""
    dist.init_process_group("gloo")
    control = Control(20.0)
    found: list[Any] = [
        control.gather(None),
        control.gather({"rank": rank(), "long": ("x" * 5000 * rank(), 0.1 + rank())}),
    ]
    given = broadcast_state(STATE if rank() == 1 else None, 1, control.group)
    found.append({**given, "moments": [moment.tolist() for moment in given["moments"]]})
    try:
        control.gather([0, {3} if rank() == 1 else 3])
    except ValueError as error:
        found.append(str(error))
    found.append(control.gather("still together"))
    dist.destroy_process_group()
    return found
