"""What the ranks of the tests of SIGTERM do."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils.data import DataLoader

import offbeat
from cases.checkpoint_jobs import Job
from cases.models import Case
from cases.workers import rank
from offbeat import DDP, SSP, LocalSGD
from offbeat.jobs import stopping

CASE = Case("mlp", "nesterov")
PERIODIC = LocalSGD(period=3)
AT = 4  # iteration in which signals arrive


def open_job(folder: str | None, strategy: offbeat.Strategy) -> Job:
    """A job with checkpoints in the folder; each rank writes its end there, and who it is."""
    if folder is None:
        return Job(strategy, CASE)
    os.environ["OFFBEAT_CHECKPOINT"] = f"{folder}/kept"
    made = Job(strategy, CASE)
    request = made.model._session.stop_request
    assert request is not None
    path = Path(folder, f"end{rank()}")
    request.on_end = lambda how, text: path.write_text(f"{how}: {text}")
    Path(folder, f"process{rank()}").write_text(str(os.getpid()))
    return made


def train_with_loader(folder: str) -> None:
    """The worker of a DataLoader receives SIGTERM, then its rank does, as from torchrun."""
    # Workers wait so many seconds for an index before they look for their rank.
    torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 0.5
    made = open_job(folder, PERIODIC)
    for t, _ in enumerate(DataLoader(range(1_000_000), num_workers=1)):
        if t == AT:
            (worker,) = multiprocessing.active_children()
            Path(folder, "worker").write_text(str(worker.pid))
            for target in (worker.pid, os.getpid()):  # sent by another process than the rank
                subprocess.run(["kill", "-TERM", str(target)], check=True)
        made.iterate(t)


def serve_and_train(folder: str) -> None:
    """The last rank serves. All ranks receive SIGTERM in an iteration, the server first."""
    os.environ |= {"OFFBEAT_RECORD": f"{folder}/runs", "OFFBEAT_SERVERS": "1"}
    Path(folder, f"process{rank()}").write_text(str(os.getpid()))
    made = Job(SSP(), CASE)
    for t in range(1_000_000):
        if t == AT and rank() == 0:
            for other in (2, 1, 0):
                send_signal(int(Path(folder, f"process{other}").read_text()))
                time.sleep(0.5)
        made.iterate(t)


def send_signal(target: int | None = None) -> None:
    os.kill(target or os.getpid(), signal.SIGTERM)


def train(
    folder: str | None,
    iterations: int,
    signalled: Sequence[int] = (),
    pauses_s: Sequence[float] = (0.0, 0.0),
    strategy: offbeat.Strategy = PERIODIC,
) -> str:
    """Digest after the iterations. The `signalled` ranks receive SIGTERM in iteration `AT`."""
    made = open_job(folder, strategy)
    for t in range(offbeat.iteration(made.model), iterations):
        if t == AT and rank() in signalled:
            send_signal()
        time.sleep(pauses_s[rank()])
        made.iterate(t)
        if folder is not None:
            Path(folder, f"at{rank()}").write_text(str(t))
    digest = made.digest()
    made.model.close()
    return digest


def lose_a_rank(folder: str) -> None:
    """Rank 1 is killed. Rank 0 receives SIGTERM while it is blocked in C++ code."""
    made = open_job(folder, DDP())
    made.train(range(AT))
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Timer(0.3, send_signal).start()
    _get_default_store().wait(["never"])


def receive_two(folder: str) -> None:
    """No rank ends its iteration. Both receive two signals."""
    stopping.SECOND_S = 0.2
    made = open_job(folder, DDP())
    made.train(range(AT))
    for delay_s in (0.1, 1.5):
        threading.Timer(delay_s, send_signal).start()
    time.sleep(30.0)


def block(folder: str) -> None:
    """Rank 0 is blocked in a collective, as rank 1 hangs in its script."""
    stopping.STOP_S, stopping.LOOK_EVERY_S = 1.5, 0.1
    made = open_job(folder, DDP())
    made.train(range(AT))
    if rank() == 1:
        time.sleep(30.0)
    threading.Timer(0.1, send_signal).start()
    made.iterate(AT)


def leave_by_handler(folder: str) -> None:
    """Rank 0 receives SIGTERM. Rank 1 has a handler of its own."""
    if rank() == 1:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
    train(folder, 1_000_000, signalled=(0,))


def keep_handlers(folder: str) -> tuple[list[str], int | None]:
    """Signals that handlers of the script receive, set before and after `prepare`, and the exit
    code of a fork."""
    received: list[str] = []
    own = signal.signal(signal.SIGTERM, lambda *_: received.append("before"))
    with contextlib.closing(open_job(folder, DDP()).model):
        send_signal()
    signal.signal(signal.SIGTERM, own)
    with contextlib.closing(open_job(folder, DDP()).model) as model:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30.0,))
        child.start()
        child.terminate()
        child.join(5.0)
        signal.signal(signal.SIGTERM, lambda *_: received.append("after"))
        send_signal()
        time.sleep(2 * stopping.WATCH_EVERY_S)
        assert model._session.stop_request._requester is None
    return received, child.exitcode
