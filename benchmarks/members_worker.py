"""Processes of the jobs of `members.py`: each trains as one member and records what it does.

A process appends to files of its own, which outlive a kill: `batches{n}` (one JSON line per
iteration, before the forward), `weights{n}` (float64 numbers per iteration: the iteration, the time
and all parameters by bucket), `times{n}` and `sizes{n}`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from members_equations import (
    LAYERS,
    MOMENTUM,
    RATE,
    WIDTH,
    data,
    initial_weights,
    profile,
    tensor_names,
)

SECRET = "secret of this benchmark"
SECRET_NAMES = {"OFFBEAT_SECRET": SECRET, "OMP_NUM_THREADS": "1"}
BATCH = 4
PAUSE_S = 0.02  # of the script in each iteration, so that a join takes some of them
REQUEST_S = 30.0  # longest wait for the request of a process that joins
SIZE_EVERY_S = 5.0


@contextlib.contextmanager
def process_of(job: dict[str, Any], who: int, name: str = "") -> Iterator[Path]:
    """Prepare this process: output, environment, and a file with the error if there is one."""
    folder, name = Path(job["folder"]), name or str(who)
    log = os.open(folder / f"log{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(SECRET_NAMES)
    try:
        yield folder
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        (folder / f"error{name}").write_text(text)
        sys.stderr.write(text)
        os._exit(1)
    os._exit(0)


def append(path: Path) -> Callable[[bytes], None]:
    """Return a function that appends to a file, one write per call."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    return lambda content: (os.write(file, content), None)[1]


# ---- kills and joins --------------------------------------------------------------------------


class Victim:
    """Place at which this process, or the membership service, is killed."""

    def __init__(self, job: dict[str, Any], who: int) -> None:
        case = job["case"]
        self._folder, self._case = Path(job["folder"]), case
        self._is_armed = case.get("victim") == who
        self._draw = random.Random(f"{case.get('seed')} {who}")
        self._count, self.iteration = case.get("skip", 0), -1  # iteration that runs

    def die(self, *_: object) -> None:
        if not self._is_armed:
            return
        self._is_armed = False
        with (self._folder / "killed").open("w") as file:
            file.write(str(time.time()))
            file.flush()
        if self._case["service"]:
            with contextlib.suppress(OSError):
                os.kill(int((self._folder / "service.pid").read_text()), signal.SIGKILL)
        if self._case["place"] != "service":
            os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        """Let this process die in a method of offbeat, if that is the place."""
        if not self._is_armed:
            return
        from offbeat.core.transport.link import LinkThread
        from offbeat.elastic.changes import MemberChanges
        from offbeat.elastic.members import JobMember
        from offbeat.elastic.session import MemberSession

        places: dict[str, list[tuple[Any, str]]] = {
            "update": [(import_module("torch.optim.sgd"), "sgd")],
            "message": [(LinkThread, "_send")],
            "boundary": [(MemberChanges, "_handle_requests")],
            "leave": [(MemberSession, "unite")],
            "join": [(JobMember, "open_group"), (MemberSession, "begin_epoch"),
                     (MemberSession, "join")],
        }  # fmt: skip
        for owner, name in places.get(self._case["place"], ()):
            setattr(owner, name, self._dying(getattr(owner, name)))

    def _dying(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if self._is_due(args[0]):
                delay_s = self._case["delay_s"]
                if not delay_s:
                    self.die()
                threading.Timer(delay_s, self.die).start()
            return method(*args, **more)

        return call

    def _is_due(self, owner: Any) -> bool:
        if not self._is_armed:
            return False
        if self._case["place"] == "join":
            epoch = getattr(owner, "epoch", None)  # of a JobMember
            is_due = epoch is None or epoch.number > 0
        else:
            is_due = self.iteration >= self._case["iteration"]
        self._count -= is_due
        return self._count < 0

    def begin(self, model: Any, t: int) -> None:
        """Handle the begin of an iteration."""
        self.iteration = t
        if not self._is_armed or t < self._case["iteration"]:
            return
        layer = model.module[2 * self._case["layer"]]
        if self._case["place"] == "forward":
            layer.register_forward_pre_hook(self.die)
        elif self._case["place"] == "backward":
            layer.weight.register_hook(self.die)
        elif self._case["place"] == "service":
            self.die()


def train(job: dict[str, Any], who: int) -> None:
    """Train as one process of a case of `kills` or `joins`, until no sample remains."""
    with process_of(job, who) as folder:
        import torch
        from torch import nn

        import offbeat
        from offbeat.data import MemberSampler

        case, first, per_node = job["case"], job["first"], job["per_node"]
        torch.set_num_threads(1)
        member, rank = divmod(who, per_node)
        if member >= first:
            _await_iteration(folder, case["join_at"])
        set_ranks(job, member, rank)
        layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(LAYERS)]
        model = nn.Sequential(*[m for one in layers for m in (one, nn.Tanh())][:-1])
        named = dict(model.named_parameters())
        with torch.no_grad():
            for bucket, flat in enumerate(initial_weights()):
                weight, bias = (named[name] for name in tensor_names(bucket))
                weight.copy_(torch.from_numpy(flat[: WIDTH * WIDTH]).view(WIDTH, WIDTH))
                bias.copy_(torch.from_numpy(flat[WIDTH * WIDTH :]))
                if member >= first:  # it must get the state of a member
                    weight.add_(1.0)
        victim = Victim(job, who)
        victim.install()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
        model, optimizer = offbeat.prepare(
            model,
            optimizer,
            offbeat.strategies.create(case["strategy"], case["settings"]),
            profile=profile(first, per_node),
            nodes="auto" if per_node > 1 else None,
            timeout_s=job["timeout_s"],
            members=offbeat.Members(job["address"], first=first),
        )
        names = [name for bucket in range(LAYERS) for name in tensor_names(bucket)]

        def state(t: int) -> bytes:
            own = dict(model.module.named_parameters())
            parts = [own[name].detach().numpy().ravel() for name in names]
            return np.concatenate([[t, time.time()], *parts]).tobytes()

        batches, weights = append(folder / f"batches{who}"), append(folder / f"weights{who}")
        if member >= first:
            (folder / f"joined{who}").write_bytes(state(offbeat.iteration(model)))
        x, y = map(torch.from_numpy, data(job["size"]))
        for batch in MemberSampler(job["size"], BATCH, model):
            t = offbeat.iteration(model)
            if case.get("join_at") == t and who == 0:
                _await_request(job)
            if case.get("leaver") == member and rank == 0 and case["leave_at"] == t:
                model.request_leave()
            batches(f"{json.dumps([t, batch])}\n".encode())
            victim.begin(model, t)
            optimizer.zero_grad()
            (model(x[batch]) - y[batch]).square().mean().backward()
            optimizer.step()
            weights(state(t))
            time.sleep(PAUSE_S)
        model.close()


def set_ranks(job: dict[str, Any], member: int, rank: int) -> None:
    """Set the variables that a launcher of the ranks of a member sets."""
    per_node = job["per_node"]
    if member < job["first"]:
        os.environ["RANK" if per_node == 1 else "GROUP_RANK"] = str(member)
    if per_node > 1:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": per_node}
        ranks |= {"LOCAL_WORLD_SIZE": per_node, "MASTER_PORT": job["ports"][member]}
        os.environ.update({name: str(value) for name, value in ranks.items()})
        os.environ["MASTER_ADDR"] = "127.0.0.1"


def _await_iteration(folder: Path, t: int) -> None:
    """Wait until the first process has finished `t` iterations."""
    path, end_s = folder / "batches0", time.monotonic() + 4 * REQUEST_S
    while not path.exists() or path.read_bytes().count(b"\n") < t:
        if time.monotonic() > end_s:
            raise RuntimeError(f"iteration {t} has not begun")
        time.sleep(0.005)


def _await_request(job: dict[str, Any]) -> None:
    """Wait until a process has requested to join, or has joined."""
    from offbeat.membership import MembershipClient

    client = MembershipClient(job["address"])
    end_s = time.monotonic() + REQUEST_S
    while time.monotonic() < end_s:
        state = client.state()
        if state.joining or (state.epoch is not None and state.epoch.number):
            break
        time.sleep(0.01)
    client.close()


# ---- cost -------------------------------------------------------------------------------------


def wide_model(size_bytes: float) -> Any:
    """Return a model of eight equal layers."""
    from torch import nn

    width = round((size_bytes / 4 / 8) ** 0.5)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8)))


def train_wide(job: dict[str, Any], who: int) -> None:
    """Train a model of a given size until the file `stop` exists; leave if `leave{n}` exists."""
    with process_of(job, who) as folder:
        import torch

        torch.manual_seed(0)
        torch.set_num_threads(1)
        model = wide_model(job["size_bytes"])
        width = model[0].in_features
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        run = _run_torchft if job["library"] == "torchft" else _run_offbeat
        times = append(folder / f"times{who}")

        def iterate(model: Any, optimizer: Any) -> bool:
            """Run an iteration; return whether to go on."""
            optimizer.zero_grad()
            model(torch.ones(4, width)).square().mean().backward()
            optimizer.step()
            time.sleep(PAUSE_S)
            times(np.float64(time.time()).tobytes())
            return not (folder / "stop").exists()

        run(job, who, model, optimizer, iterate)


Iterate = Callable[[Any, Any], bool]


def _run_offbeat(job: dict[str, Any], who: int, model: Any, inner: Any, iterate: Iterate) -> None:
    import offbeat

    if who < job["first"]:
        os.environ["RANK"] = str(who)
    service = offbeat.Members(job["address"], first=job["first"])
    model, optimizer = offbeat.prepare(
        model, inner, job["strategy"], observe=5, timeout_s=job["timeout_s"],
        members=service,
    )  # fmt: skip
    leave = Path(job["folder"]) / f"leave{who}"
    while iterate(model, optimizer) and not model.has_left:
        if leave.exists():
            leave.unlink()
            model.request_leave()
    model.close()


def _run_torchft(job: dict[str, Any], who: int, model: Any, inner: Any, iterate: Iterate) -> None:
    """The same loop with torchft: `wfbp` is its DDP, `local-sgd` its LocalSGD."""
    import torchft  # pyright: ignore[reportMissingImports]
    from torch.distributed import TCPStore

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    local = not job["strategy"].startswith("wfbp")
    limit = timedelta(seconds=job["timeout_s"])

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=limit),
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        use_async_quorum=not local,
        timeout=limit,
        quorum_timeout=limit,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=job["lighthouse"],
        replica_id=f"member{who}",
    )
    leave = Path(job["folder"]) / f"leave{who}"
    if local:
        from torchft.local_sgd import LocalSGD  # pyright: ignore[reportMissingImports]

        period = int(job["strategy"].partition("period=")[2])
        with LocalSGD(manager, model, inner, sync_every=period):
            while iterate(model, inner) and not leave.exists():
                pass
    else:
        wrapped, optimizer = torchft.DistributedDataParallel(manager, model), None
        optimizer = torchft.Optimizer(manager, inner)
        while iterate(wrapped, optimizer) and not leave.exists():
            pass
    manager.shutdown(wait=False)


# ---- chaos ------------------------------------------------------------------------------------

INPUTS, HIDDEN, CLASSES, SAMPLES = 32, 256, 10, 50_000
VALIDATION = 2_000


def task() -> tuple[Any, Any]:
    """Return inputs and noisy classes of a random network; the last samples are for validation."""
    import torch

    draw = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES + VALIDATION, INPUTS, generator=draw)
    first = torch.randn(INPUTS, 64, generator=draw)
    logits = torch.tanh(x @ first) @ torch.randn(64, CLASSES, generator=draw)
    return x, (logits + 2 * torch.randn(logits.shape, generator=draw)).argmax(1)


def train_long(job: dict[str, Any], who: int, name: str) -> None:
    """Train until this process is killed; record loss, memory, descriptors and threads."""
    with process_of(job, who, name) as folder:
        import torch
        from torch import nn

        import offbeat
        from offbeat.data import MemberSampler

        torch.manual_seed(0)
        torch.set_num_threads(1)
        os.environ["RANK"] = str(who)
        model = nn.Sequential(
            nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(),
            nn.Linear(HIDDEN, CLASSES),
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        model, optimizer = offbeat.prepare(
            model, optimizer, job["strategy"], observe=10, timeout_s=job["timeout_s"],
            members=offbeat.Members(job["address"], first=job["first"]),
        )  # fmt: skip
        x, y = task()
        sizes, alive = append(folder / f"sizes{name}"), folder / f"alive{who}"
        sampler = MemberSampler(SAMPLES, 32, model, passes=10_000)
        reader, due_s, losses = model._session.samples, 0.0, list[float]()
        for batch in sampler:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            time.sleep(PAUSE_S)
            if time.monotonic() > due_s:
                due_s = time.monotonic() + SIZE_EVERY_S
                alive.touch()
                t = offbeat.iteration(model)
                with torch.no_grad():
                    found = model.module(x[SAMPLES:])
                    validation = nn.functional.cross_entropy(found, y[SAMPLES:]).item()
                line = {
                    "t": time.time(),
                    "iteration": t,
                    "samples": reader.read_count(t),
                    "loss": sum(losses) / len(losses),
                    "validation": validation,
                    "rss": int(Path("/proc/self/statm").read_text().split()[1]) * 4096,
                    "descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
                    "threads": sum(1 for _ in Path("/proc/self/task").iterdir()),
                }
                losses = []
                sizes(f"{json.dumps(line)}\n".encode())
