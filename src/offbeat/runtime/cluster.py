"""The cluster as one process sees it: control, links, device."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from offbeat.transport.control import Control
from offbeat.transport.device import Device
from offbeat.transport.link import Link


@dataclass
class Cluster:
    """What this process is connected to: control, links with their groups, the device."""

    control: Control
    links: dict[str, Link]
    groups: dict[str, dist.ProcessGroup]
    device: Device
    timeout_s: float
    closed: bool = False
    leave: Callable[[], None] | None = None  # registered to run at exit; holds the session

    def close(self) -> bool:
        """Stop the links and drop the groups; False if a link is stuck in a collective, which
        nothing can interrupt: then the groups stay, as dropping them could abort the process."""
        self.closed = True
        if self.leave is not None:
            atexit.unregister(self.leave)
            self.leave = None
        closed = [link.close() for link in self.links.values()]
        if not all(closed):
            return False
        for group in (*self.groups.values(), self.control.group):
            dist.destroy_process_group(group)
        return True
