"""Clients of a job's store that connect as soon as rank 0 listens."""

from __future__ import annotations

import socket
import time
from functools import partial
from importlib import import_module
from typing import Any

from offbeat.core.transport import rendezvous

LISTENS_S, LOOK_EVERY_S = 1.0, 0.005


def connect_at_once() -> None:
    """Let clients look every few milliseconds whether their host listens.

    torch repeats a refused connection after 250 to 750 ms, longer than most jobs of the tests take.
    """
    # As an attribute of its package, this name is a function.
    torch_rendezvous: Any = import_module("torch.distributed.rendezvous")
    for module in (torch_rendezvous, rendezvous):
        module.TCPStore = partial(_open_store, module.TCPStore)


def _open_store(make: Any, *args: Any, is_master: bool, timeout: Any, **options: Any) -> Any:
    address = args[:2] or (options["host_name"], options["port"])
    end_s = time.monotonic() + min(LISTENS_S, timeout.total_seconds() / 2)
    while not is_master and (left_s := end_s - time.monotonic()) > 0:
        try:
            socket.create_connection(address, timeout=left_s).close()
            break
        except socket.gaierror:  # torch reports it
            break
        except OSError:
            time.sleep(LOOK_EVERY_S)
    return make(*args, is_master=is_master, timeout=timeout, **options)
