"""What the ranks do: train under the checker, some with a wait that is missing on purpose."""

from __future__ import annotations

import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from weakref import finalize

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

import offbeat
from cases import member_jobs, models
from cases.happens_before.checker import (
    CHECKER,
    COMPUTE,
    Place,
    SideEvent,
    SideStream,
    Streams,
    Watch,
    current_stream,
    host_memory_noted,
    on_stream,
    place_of,
    watch_thread,
)
from cases.models import Case, batch, build_model, build_optimizer, loss_of, profile_of
from cases.node_jobs import PAIRS, Shards, profile_in
from cases.workers import rank, world_size
from offbeat.core.codecs.spares import Spares
from offbeat.core.runtime import job_profile, planner
from offbeat.core.start import connecting
from offbeat.core.transport import cluster, collectives

Plant = Callable[[pytest.MonkeyPatch], None]


class Blocks(nn.Sequential):
    """Blocks of two layers, which `fully_shard` gathers as a whole."""

    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 7)),
            nn.Sequential(nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)),
        )


class Unused(nn.Module):
    """Two layers that no forward uses, of which each is a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(5, 3)
        self.one, self.other = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


models.MODELS |= {"blocks": Blocks, "unused": Unused}
CASE, BLOCKS, UNUSED = (
    Case(name, "nesterov", "none", torch.float32) for name in ("conv", "blocks", "unused")
)
# Iterations, and the last ones, in which waits of the host count: after all looks at weights, of
# which each waits.
STEPS, LAST = 7, 2
# Iterations before which a member asks to leave, of the others then, with a pause after each, in
# which they hear of it, and whose messages a member does not receive.
LEAVES, AFTERWARDS, PAUSE_S, DEAF = 2, 20, 0.05, 1
SHARDED = Shards(PAIRS)
GPU = torch.device("cuda")
# Of gossip, and operations of its threads, which are some exchanges.
MOST_ITERATIONS, EXCHANGES, PAUSE_FOR_GOSSIP_S = 5000, 60, 0.01


# ---- offbeat on streams -------------------------------------------------------------------------


@contextmanager
def on_streams() -> Iterator[pytest.MonkeyPatch]:  # noqa: C901
    """Let offbeat use the checker as its device, and do all else that it does for a GPU."""
    plain = collectives.collectives

    def on_gpu(group: Any, backend: str, _: torch.device, *args: Any) -> Any:
        return plain(group, backend, GPU, *args)

    def pinned(size: int, dtype: torch.dtype) -> Tensor:
        made = torch.empty(size, dtype=dtype, device="cpu")
        key = made.untyped_storage()._cdata
        finalize(made, CHECKER.free_on_host, key).atexit = False
        return made

    def reserve_like(self: collectives.Scratch, tensor: Tensor, size: int) -> Tensor:
        made = reserve(self, tensor, size)
        if CHECKER.is_host(tensor) and not CHECKER.is_host(made):
            CHECKER.add(made, place_of("host memory"), is_host=True)
        return made

    def stream(_: object) -> Any:
        return SimpleNamespace(synchronize=lambda: CHECKER.synchronize(place_of("synchronize")))

    def run(self: threading.Thread) -> None:
        if self.name.startswith("offbeat-gossip"):
            watch_thread()
        started(self)

    def fill(tensor: Tensor) -> None:
        is_empty = tensor.untyped_storage().nbytes() == 0
        fill_storage(tensor)
        if is_empty:
            CHECKER.fill(tensor)

    started, reserve = threading.Thread.run, collectives.Scratch.reserve
    fill_storage = _fsdp_param.alloc_storage
    with pytest.MonkeyPatch.context() as patch, host_memory_noted():
        patch.setattr(threading.Thread, "run", run)
        patch.setattr(connecting, "device_of", lambda _: Streams())
        patch.setattr(cluster, "collectives", on_gpu)
        patch.setattr(collectives, "is_on_host", CHECKER.is_host)
        patch.setattr(collectives, "pinned_memory", pinned)
        patch.setattr(collectives.Scratch, "reserve", reserve_like)
        patch.setattr(torch.cuda, "current_stream", stream)
        # FSDP's streams are those of its device.
        for name, stand_in in (
            ("Stream", SideStream),
            ("Event", SideEvent),
            ("stream", on_stream),
            ("current_stream", current_stream),
        ):
            patch.setattr(torch.cpu, name, stand_in)
        patch.setattr(torch.accelerator, "current_stream", current_stream)
        for module in (_fsdp_param, _fsdp_param_group):
            patch.setattr(module, "alloc_storage", fill, raising=False)
        # A GPU's memory returns to torch's allocator.
        patch.setattr(Spares, "take", lambda _, n, dtype, __: torch.empty(n, dtype=dtype))
        patch.setattr(Spares, "give", lambda *_: None)
        # Other tests check plans and networks.
        patch.setattr(planner, "raise_if_wrong", lambda *_: None)
        patch.setattr(job_profile, "compare_network", lambda *_: None)
        yield patch


# ---- missing waits ------------------------------------------------------------------------------
# Each breaks one method of the interface to a device, or torch.


def no_follow(patch: pytest.MonkeyPatch) -> None:
    """Compute does not wait for messages, nor a holder of gossip's lock for the one before."""
    patch.setattr(Streams, "follow", lambda *_: watch_thread())


def no_release(patch: pytest.MonkeyPatch) -> None:
    """A link does not wait for compute."""
    run, nothing = Streams.run, CHECKER.mark()
    patch.setattr(Streams, "run", lambda self, _, *args: run(self, nothing, *args))


def no_finish(patch: pytest.MonkeyPatch) -> None:
    """The host does not wait for copies to it, nor the thread of a link for a failed message."""
    patch.setattr(Streams, "finish", lambda _: None)


def no_host_wait(patch: pytest.MonkeyPatch) -> None:
    """gloo sends pinned memory before the copy to it has ended."""
    nothing = SimpleNamespace(synchronize=lambda: None)
    patch.setattr(torch.cuda, "current_stream", lambda _: nothing)


def unmarked_side_stream(patch: pytest.MonkeyPatch) -> None:
    """A hook that FSDP calls on a stream of its own marks the stream of compute."""

    def mark(_: Streams) -> Any:
        in_hook = threading.current_thread() is threading.main_thread()
        return CHECKER.mark(COMPUTE if in_hook else None)

    patch.setattr(Streams, "mark", mark)


PLANTS: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (no_follow, no_release, no_finish, no_host_wait, unmarked_side_stream)
}


# ---- jobs ---------------------------------------------------------------------------------------


def train(
    strategy: str,
    plant: str | None = None,
    action: str | None = None,
    *,
    case: Case = CASE,
    build: Callable[[], tuple[nn.Module, dict[str, Any]]] | None = None,
) -> dict[str, Any]:
    """Train, and return the races, and the waits of the host in the last two iterations.

    Args:
        strategy: text of the strategy.
        plant: name of the missing wait; None: nothing is missing.
        action: what the script does beside training: "observe" without a profile, "save", "load"
            or "evaluate" in the middle and at the end, "accumulate" two backward passes per step.
            "unused": layers without gradients.
        case: model and optimizer.
        build: returns the model, and further arguments of `prepare`.
    """
    options: dict[str, Any] = {"compare_every": 0, "timeout_s": 20.0}
    case = UNUSED if action == "unused" else case
    if action == "observe":
        options |= {"observe": 2, "min_bucket_bytes": 1}
    else:
        options["profile"] = profile_of(case, world_size())
    with on_streams() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, more = (build_model(case), {}) if build is None else build()
        optimizer = build_optimizer(case, model)
        model, optimizer = offbeat.prepare(model, optimizer, strategy, **(options | more))
        CHECKER.reset()
        with Watch():
            if plant is not None:
                PLANTS[plant](patch)
            for t in range(STEPS):
                if t == STEPS - LAST:
                    act(action, model, optimizer)
                    before = Counter(CHECKER.waits)
                optimizer.zero_grad()
                if action == "accumulate":
                    with model.no_sync():
                        loss_of(model, *batch(case, rank(), STEPS + t)).backward()
                loss_of(model, *batch(case, rank(), t)).backward()
                optimizer.step()
            waits = CHECKER.waits - before
            act(action, model, optimizer)
            found = findings(waits)
        model.close()
    return found


def findings(waits: Counter[Place]) -> dict[str, Any]:
    return {
        "races": dict(CHECKER.races.most_common(4)),
        "waits": {str(place): count for place, count in waits.items()},
        "operations": dict(CHECKER.operations),
    }


def act(action: str | None, model: Any, optimizer: Any) -> None:
    """Do between iterations what some scripts do."""
    if action == "save":
        with tempfile.TemporaryDirectory() as folder:
            offbeat.save(folder, model, optimizer).wait()
    elif action == "load":
        model.consolidate()
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    elif action == "evaluate":
        model.eval()
        with torch.no_grad():
            model(batch(CASE, 0, 0)[0])
        model.train()


def gossip(strategy: str, plant: str | None = None) -> dict[str, Any]:
    """Train with gossip until this worker has exchanged a few times."""
    with on_streams() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        CHECKER.reset()
        if plant is not None:
            PLANTS[plant](patch)
        with Watch():
            model = build_model(CASE)
            optimizer = build_optimizer(CASE, model)
            model, optimizer = offbeat.prepare(model, optimizer, strategy, timeout_s=20.0)
            for t in range(MOST_ITERATIONS):
                optimizer.zero_grad()
                loss_of(model, *batch(CASE, rank(), t)).backward()
                optimizer.step()
                time.sleep(PAUSE_FOR_GOSSIP_S)
                operations = Counter(CHECKER.operations)
                if operations.total() - operations[COMPUTE] >= EXCHANGES:
                    break
            model.consolidate()
            found = findings(Counter())
        model.close()
    return found


def serve(strategy: str, plant: str | None = None) -> dict[str, Any]:
    """Train with the last rank as a server."""
    with on_streams() as patch, warnings.catch_warnings():
        patch.setenv("OFFBEAT_SERVERS", "1")
        warnings.simplefilter("ignore")
        CHECKER.reset()
        if plant is not None:
            PLANTS[plant](patch)
        model = build_model(CASE)
        optimizer = build_optimizer(CASE, model)
        try:
            with Watch():
                model, optimizer = offbeat.prepare(model, optimizer, strategy, timeout_s=20.0)
                for t in range(STEPS):
                    optimizer.zero_grad()
                    loss_of(model, *batch(CASE, rank(), t)).backward()
                    optimizer.step()
                found = findings(Counter(CHECKER.waits))
        except SystemExit:
            return {"races": {}, "waits": {}, "operations": {}}
        model.close()
    return found


def replicate(strategy: str, plant: str | None = None, action: str | None = None) -> dict[str, Any]:
    """Train two nodes of two ranks, which hold the whole model."""
    options = {"nodes": PAIRS, "profile": profile_in(CASE, PAIRS)}
    return train(strategy, plant, action, build=lambda: (build_model(CASE), options))


@cache
def mesh() -> Any:
    from cases.sharded_jobs import mesh_of

    return mesh_of(SHARDED)


def shard(strategy: str, plant: str | None = None, action: str | None = None) -> dict[str, Any]:
    """Train two nodes of two ranks, which share the model block by block."""

    def build() -> tuple[nn.Module, dict[str, Any]]:
        return sharded_blocks(), {"mesh": mesh()["between"], "profile": profile_in(BLOCKS, SHARDED)}

    return train(strategy, plant, action, case=BLOCKS, build=build)


def sharded_blocks() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = build_model(BLOCKS)
    for block in model.children():
        fully_shard(block, mesh=mesh()["inside"])
    fully_shard(model, mesh=mesh()["inside"])
    with torch.no_grad():  # the first forward reads all shards at its start
        model(batch(BLOCKS, rank(), 0)[0])
    return model


def change_members(
    strategy: str, plant: str | None, action: str | None, service: str
) -> dict[str, Any]:
    """Train as one of three members, whose messages are copies.

    Args:
        strategy: text of the strategy.
        plant: name of the missing wait; None: nothing is missing.
        action: "leave": member 1 leaves. "deaf": member 2 fails to receive a message. "save": as
            of `train`.
        service: address of the membership service.
    """
    who, now, steps = rank(), [0], AFTERWARDS if action == "leave" else STEPS
    with on_streams() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dist.is_initialized():
            dist.destroy_process_group()
        for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            patch.delenv(name)
        patch.setenv("OFFBEAT_SECRET", member_jobs.SECRET)
        CHECKER.reset()
        model = build_model(CASE)
        optimizer = build_optimizer(CASE, model)
        model, optimizer = offbeat.prepare(
            model,
            optimizer,
            strategy,
            profile=profile_of(CASE, 3),
            compare_every=0,
            on_nonfinite="ignore",  # the check of a message waits for the device
            timeout_s=20.0,
            members=offbeat.Members(service, first=3),
        )
        if action == "deaf" and who == 2:
            fail_to_receive(patch, now)
        with Watch():
            if plant is not None:
                PLANTS[plant](patch)
            while (t := offbeat.iteration(model)) < steps and not model.has_left:
                now[0] = t
                if (action, who, t) == ("leave", 1, LEAVES):
                    model.request_leave()
                if t == STEPS - LAST:
                    act(action, model, optimizer)
                optimizer.zero_grad()
                loss_of(model, *batch(CASE, who, t)).backward()
                optimizer.step()
                if action == "leave":
                    time.sleep(PAUSE_S)
            act(action, model, optimizer)
            found = findings(Counter())
        model.close()
    return found


def fail_to_receive(patch: pytest.MonkeyPatch, now: list[int]) -> None:
    """Let the links of this process fail after messages of iteration `DEAF` have arrived."""
    run = Streams.run

    def fail(self: Streams, *args: Any) -> Any:
        marks = run(self, *args)
        if now[0] == DEAF:
            raise RuntimeError("the connection of this test has failed")
        return marks

    patch.setattr(Streams, "run", fail)


def each(calls: Sequence[tuple[str, ...]]) -> list[Any]:
    """Return the findings of several calls, or the error of one, so that the others count.

    A call is the name of a function of this module, and its arguments.
    """
    found: list[Any] = []
    for function, *args in calls:
        try:
            found.append(globals()[function](*(arg or None for arg in args)))
        except Exception as error:
            found.append({"error": "".join(traceback.format_exception(error)), "races": {}})
    return found
