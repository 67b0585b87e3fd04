"""Workers of DataLoaders while their rank stops.

torchrun sends SIGTERM to all processes of a rank. A worker that it ends would end the rank by an
exception, before the rank has saved its checkpoint. So a worker ends by the signal only if its rank
has sent it. A worker also ends with its rank.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from typing import Any

from torch.utils.data._utils import worker

LOOK_EVERY_S = 1.0  # seconds between two looks whether the rank still runs
THREAD_NAME = "offbeat-worker"

_torch_loop = worker._worker_loop


def protect_workers() -> None:
    """Let workers that begin from now on ignore SIGTERM of other processes than their rank."""
    if hasattr(signal, "sigtimedwait"):  # not on macOS
        worker._worker_loop = _run_worker


def unprotect_workers() -> None:
    """Undo `protect_workers`."""
    worker._worker_loop = _torch_loop


def _run_worker(*args: Any) -> None:
    """Run torch's loop of a worker. torch calls it in a process of its own."""
    # Threads inherit the mask, so the signal waits for `_end_with_rank`.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    threading.Thread(target=_end_with_rank, name=THREAD_NAME, daemon=True).start()
    _torch_loop(*args)


def _end_with_rank() -> None:
    """End this process when the process of the rank has ended or sends SIGTERM."""
    rank = multiprocessing.parent_process()
    while rank is not None and rank.is_alive():
        received = signal.sigtimedwait([signal.SIGTERM], LOOK_EVERY_S)
        if received is not None and received.si_pid == rank.pid:
            break
    os._exit(0)
