"""What the ranks do: train under the checker, some with a wait that is missing on purpose."""

from __future__ import annotations

import sys
import tempfile
import threading
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
from offbeat.core.buckets.flat import Flat
from offbeat.core.codecs.spares import Spares
from offbeat.core.runtime import (
    active_plan,
    connecting,
    known_profile,
    messages,
    plan_choice,
    updates,
)
from offbeat.core.runtime.plan_runner import PlanRunner
from offbeat.core.transport import cluster, collectives
from offbeat.core.transport.link import LinkThread, Message
from offbeat.gossip import state as gossip_state

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
STEPS, LAST = 7, 2  # iterations, and the last ones, in which waits of the host count: after all
# looks at weights (`FIRST_LOOKS` in `core/runtime/updates.py`), of which each waits
# Iterations of jobs whose script only trains. Waits of the host count in the last two, after a
# single look at weights; they do not count with codes, in nodes or with a missing wait.
SHORT = 5
# Iterations before which a member leaves, and whose message it does not receive.
LEAVES, DEAF = 2, 1
SHARDED = Shards(PAIRS)
GPU = torch.device("cuda")
MOST_ITERATIONS, EXCHANGES = 5000, 2  # of gossip


# ---- offbeat on streams -------------------------------------------------------------------------


@contextmanager
def on_streams() -> Iterator[pytest.MonkeyPatch]:
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
        patch.setattr(plan_choice, "raise_if_wrong", lambda *_: None)
        patch.setattr(known_profile, "compare_network", lambda *_: None)
        yield patch


# ---- missing waits ------------------------------------------------------------------------------


def no_follow(patch: pytest.MonkeyPatch) -> None:
    """Compute does not wait for messages."""
    patch.setattr(Streams, "follow", lambda *_: watch_thread())


def no_release(patch: pytest.MonkeyPatch) -> None:
    """A link does not wait for compute."""
    run, nothing = Streams.run, CHECKER.mark()
    patch.setattr(Streams, "run", lambda self, _, *args: run(self, nothing, *args))


def early_end(patch: pytest.MonkeyPatch) -> None:
    """The end of a message is marked before its work."""

    def run(self: Streams, *args: Any) -> Any:
        start, _ = plain(self, *args)
        return start, start

    plain = Streams.run
    patch.setattr(Streams, "run", run)


def early_release(patch: pytest.MonkeyPatch) -> None:
    """The release of a message is marked before the work that it follows."""
    mark, first = Streams.mark, CHECKER.mark()
    patch.setattr(Streams, "mark", lambda self: first if caller() == "release" else mark(self))


def no_copy(patch: pytest.MonkeyPatch) -> None:
    """A staged message sends the storage itself, which training changes meanwhile."""
    clone = Tensor.clone

    def alias(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        in_messages = sys._getframe(1).f_code.co_filename == messages.__file__
        return self if in_messages else clone(self, *args, **kwargs)

    patch.setattr(Tensor, "clone", alias)


def unfollowed(function: str) -> Plant:
    """Return a plant: the waits of one function do not order compute after the message."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        def follow(self: Streams, mark: Any) -> None:
            if caller(2) != function:
                plain(self, mark)

        plain = Streams.follow
        patch.setattr(Streams, "follow", follow)

    return plant


def forgotten_sends(patch: pytest.MonkeyPatch) -> None:
    """Sends that have arrived are forgotten, although the link has changed their anchors."""

    def forget(self: messages.Messages) -> None:
        self._sent = [message for message in self._sent if not message.wait(1.0)]

    patch.setattr(messages.Messages, "_follow_sends", forget)


def no_host_wait(patch: pytest.MonkeyPatch) -> None:
    """gloo sends pinned memory before the copy to it has ended."""
    nothing = SimpleNamespace(synchronize=lambda: None)
    patch.setattr(torch.cuda, "current_stream", lambda _: nothing)


def no_wait_before_free(patch: pytest.MonkeyPatch) -> None:
    """Pinned memory that is too small is freed before copies from it have ended."""
    stream, nothing = torch.cuda.current_stream, SimpleNamespace(synchronize=lambda: None)
    patch.setattr(
        torch.cuda, "current_stream", lambda _: nothing if caller() == "reserve" else stream(_)
    )


def unmarked_side_stream(patch: pytest.MonkeyPatch) -> None:
    """A hook that FSDP calls on a stream of its own marks the stream of compute."""

    def mark(_: Streams) -> Any:
        in_hook = threading.current_thread() is threading.main_thread()
        return CHECKER.mark(COMPUTE if in_hook else None)

    patch.setattr(Streams, "mark", mark)


def by_module(patch: pytest.MonkeyPatch) -> None:
    """Averages of shards are complete when a module begins, and not when the model does."""
    hooks = active_plan.ForwardHooks

    def watch_modules(model: Any, flat: Flat, *args: Any) -> Any:
        with pytest.MonkeyPatch.context() as whole:
            whole.setattr(Flat, "is_sharded", False)
            return hooks(model, flat, *args)

    patch.setattr(active_plan, "ForwardHooks", watch_modules)


def no_wait_for_results(patch: pytest.MonkeyPatch) -> None:
    """The result of a message is sent to another member before its copy to the host has ended."""
    copy = Tensor.cpu

    def copy_without_wait(self: Tensor) -> Tensor:
        return self.to("cpu", non_blocking=True) if caller() == "exchange_results" else copy(self)

    patch.setattr(Tensor, "cpu", copy_without_wait)


def no_wait_to_repeat(patch: pytest.MonkeyPatch) -> None:
    """Survivors average gradients on the host before their copies to the host have ended."""
    move = Tensor.to

    def move_without_wait(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if caller() == "_try" and args == ("cpu",):
            return move(self, *args, non_blocking=True)
        return move(self, *args, **kwargs)

    patch.setattr(Tensor, "to", move_without_wait)


def no_gossip_order(patch: pytest.MonkeyPatch) -> None:
    """The lock of gossip orders the host alone."""

    def enter(self: Any) -> None:
        self._lock.acquire()
        watch_thread()

    patch.setattr(gossip_state.DeviceLock, "__enter__", enter)


def stale_gossip_order(patch: pytest.MonkeyPatch) -> None:
    """A holder of the lock of gossip follows the first holder instead of the last."""
    patch.setattr(gossip_state.DeviceLock, "__exit__", lambda self, *_: self._lock.release())


def unfinished(function: str) -> Plant:
    """Return a plant: a function of the session of servers does not wait for its copies."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        def finish(self: Streams) -> None:
            if caller() != function:
                plain(self)

        plain = Streams.finish
        patch.setattr(Streams, "finish", finish)

    return plant


def caller(depth: int = 1) -> str:
    """Return the name of the function that has called the caller of this function."""
    return sys._getframe(depth + 1).f_code.co_name


PLANTS: dict[str, Plant] = {
    "no_follow": no_follow,
    "no_release": no_release,
    "early_end": early_end,
    "early_release": early_release,
    "no_copy": no_copy,
    "no_host_wait": no_host_wait,
    "unmarked_side_stream": unmarked_side_stream,
    "by_module": by_module,
    "no_wait_for_results": no_wait_for_results,
    "no_wait_to_repeat": no_wait_to_repeat,
    "failed_messages": unfinished("_issue"),
    "complete": unfollowed("complete"),
    "capture": unfollowed("_capture_iteration"),
    "wait_for_sends": unfollowed("wait_for_sends"),
    "forgotten_sends": forgotten_sends,
    "no_gossip_order": no_gossip_order,
    "stale_gossip_order": stale_gossip_order,
    "collect": unfinished("_collect"),
    "push": unfinished("_push"),
    "load_pulled": unfinished("_copy_incoming"),
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
            "staged save": the same, with messages that are copies. "unused": layers without
            gradients.
        case: model and optimizer.
        build: returns the model, and further arguments of `prepare`.
    """
    options: dict[str, Any] = {"compare_every": 0, "timeout_s": 20.0}
    case = UNUSED if action == "unused" else case
    if action == "observe":
        options |= {"observe": 2, "min_bucket_bytes": 1}
    else:
        options["profile"] = profile_of(case, world_size())
    before = Counter[Place]()
    with on_streams() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if action == "staged save":
            stage_messages(patch)
        if plant == "by_module":  # the plan registers its hooks in `prepare`
            by_module(patch)
        model, more = (build_model(case), {}) if build is None else build()
        optimizer = build_optimizer(case, model)
        model, optimizer = offbeat.prepare(model, optimizer, strategy, **(options | more))
        CHECKER.reset()
        with Watch():
            if plant is not None and plant != "by_module":
                PLANTS[plant](patch)
            if action is None and plant is None and build is None and "wire=" not in strategy:
                patch.setattr(updates, "FIRST_LOOKS", 1)
            steps = SHORT if action is None else STEPS
            for t in range(steps):
                if t == steps - LAST:
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


def stage_messages(patch: pytest.MonkeyPatch) -> None:
    """Let all messages be copies, as where the members of the job may change."""
    run = PlanRunner.run_from

    def run_from(self: PlanRunner, *args: Any, **kwargs: Any) -> None:
        self.engine.staged = True
        run(self, *args, **kwargs)

    patch.setattr(PlanRunner, "run_from", run_from)


def findings(waits: Counter[Place]) -> dict[str, Any]:
    return {
        "races": dict(CHECKER.races.most_common(4)),
        "waits": {str(place): count for place, count in waits.items()},
        "operations": dict(CHECKER.operations),
    }


def act(action: str | None, model: Any, optimizer: Any) -> None:
    """Do between iterations what some scripts do."""
    if action in ("save", "staged save"):
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
            counts = model._session._gossip.counts
            for t in range(MOST_ITERATIONS):
                optimizer.zero_grad()
                loss_of(model, *batch(CASE, rank(), t)).backward()
                optimizer.step()
                if sum(counts.exchanges.values()) >= EXCHANGES:
                    break
            exchanged = sum(counts.exchanges.values())
            model.consolidate()
            found = findings(Counter())
        model.close()
    return {**found, "exchanges": exchanged}


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
    """Train as one of three members.

    Args:
        strategy: text of the strategy.
        plant: name of the missing wait; None: nothing is missing.
        action: "leave": member 1 leaves. "deaf": member 2 fails to receive a message.
        service: address of the membership service.
    """
    who = rank()
    with on_streams() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dist.is_initialized():
            dist.destroy_process_group()
        for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            patch.delenv(name)
        patch.setenv("OFFBEAT_SECRET", member_jobs.SECRET)
        if action == "deaf" and who == 2:
            fail_to_receive(patch)
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
        member = model._session.changes._member
        with Watch():
            if plant is not None:
                PLANTS[plant](patch)
            while (t := offbeat.iteration(model)) < STEPS and not model.has_left:
                if (action, who, t) == ("leave", 1, LEAVES):
                    model.request_leave()
                    member_jobs._await(lambda: member_jobs.who_leaves(member))
                optimizer.zero_grad()
                loss_of(model, *batch(CASE, who, t)).backward()
                optimizer.step()
            found = findings(Counter())
        epochs = member.epoch.number
        model.close()
    return {**found, "epochs": epochs}


def fail_to_receive(patch: pytest.MonkeyPatch) -> None:
    """Let the links of this process fail after a message."""
    send = LinkThread._send

    def send_and_fail(link: LinkThread, message: Message) -> None:
        send(link, message)
        if message.iteration == DEAF:
            raise RuntimeError("the connection of this test has failed")

    patch.setattr(LinkThread, "_send", send_and_fail)


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
