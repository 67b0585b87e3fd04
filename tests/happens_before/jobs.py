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
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models import Case, batch, build_model, build_optimizer, loss_of, profile_of
from support.workers import rank, world_size

import offbeat
from happens_before.checker import (
    CHECKER,
    Streams,
    Watch,
    host_memory_noted,
    place_of,
    watch_thread,
)
from offbeat.core.codecs.spares import Spares
from offbeat.core.runtime import messages, plan_session, prepare
from offbeat.core.transport import cluster, collectives
from offbeat.gossip import state as gossip_state

Plant = Callable[[pytest.MonkeyPatch], None]

CASE = Case("conv", "nesterov", "none", torch.float32)
STEPS, MEASURED = 7, 5  # iterations, and the first in which waits of the host count
GPU = torch.device("cuda")
MOST_ITERATIONS, EXCHANGES = 5000, 2  # of gossip


# ---- offbeat on streams -------------------------------------------------------------------------


@contextmanager
def on_streams() -> Iterator[pytest.MonkeyPatch]:
    """Let offbeat use the checker as its device, and do all else that it does for a GPU."""
    plain = collectives.collectives

    def on_gpu(group: Any, backend: str, _: torch.device, *args: Any) -> Any:
        return plain(group, backend, GPU, *args)

    def pinned(size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="cpu")

    def stream(_: object) -> Any:
        return SimpleNamespace(synchronize=lambda: CHECKER.synchronize(place_of("synchronize")))

    def run(self: threading.Thread) -> None:
        if self.name.startswith("offbeat-gossip"):
            watch_thread()
        started(self)

    started = threading.Thread.run
    with pytest.MonkeyPatch.context() as patch, host_memory_noted():
        patch.setattr(threading.Thread, "run", run)
        patch.setattr(prepare, "device_of", lambda _: Streams())
        patch.setattr(cluster, "collectives", on_gpu)
        patch.setattr(collectives, "is_on_host", CHECKER.is_host)
        patch.setattr(collectives, "pinned_memory", pinned)
        patch.setattr(torch.cuda, "current_stream", stream)
        # A GPU's memory returns to torch's allocator.
        patch.setattr(Spares, "take", lambda _, n, dtype, __: torch.empty(n, dtype=dtype))
        patch.setattr(Spares, "give", lambda *_: None)
        # Other tests check plans and networks.
        patch.setattr(plan_session, "raise_if_wrong", lambda *_: None)
        patch.setattr(prepare, "compare_network", lambda *_: None)
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
    clone = torch.Tensor.clone

    def alias(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        in_messages = sys._getframe(1).f_code.co_filename == messages.__file__
        return self if in_messages else clone(self, *args, **kwargs)

    patch.setattr(torch.Tensor, "clone", alias)


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
    "complete": unfollowed("complete"),
    "capture": unfollowed("_capture_iteration"),
    "wait_for_sends": unfollowed("wait_for_sends"),
    "forgotten_sends": forgotten_sends,
    "no_gossip_order": no_gossip_order,
    "stale_gossip_order": stale_gossip_order,
    "collect": unfinished("_collect"),
    "load_pulled": unfinished("_copy_incoming"),
}


# ---- jobs ---------------------------------------------------------------------------------------


def train(
    strategy: str,
    plant: str | None = None,
    action: str | None = None,
) -> dict[str, Any]:
    """Train, and return the races, and the waits of the host from iteration `MEASURED` on.

    Args:
        strategy: text of the strategy.
        plant: name of the missing wait; None: nothing is missing.
        action: what the script does beside training: "observe" without a profile, "save", "load"
            or "evaluate" in the middle and at the end, "accumulate" two backward passes per step.
    """
    options: dict[str, Any] = {"compare_every": 0, "timeout_s": 20.0}
    if action == "observe":
        options |= {"observe": 2, "min_bucket_bytes": 1}
    else:
        options["profile"] = profile_of(CASE, world_size())
    before = Counter[str]()
    with on_streams() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build_model(CASE)
        model, optimizer = offbeat.prepare(model, build_optimizer(CASE, model), strategy, **options)
        CHECKER.reset()
        with Watch():
            if plant is not None:
                PLANTS[plant](patch)
            for t in range(STEPS):
                if t == MEASURED:
                    act(action, model, optimizer)
                    before = Counter(CHECKER.waits)
                optimizer.zero_grad()
                if action == "accumulate":
                    with model.no_sync():
                        loss_of(model, *batch(CASE, rank(), STEPS + t)).backward()
                loss_of(model, *batch(CASE, rank(), t)).backward()
                optimizer.step()
            waits = CHECKER.waits - before
            act(action, model, optimizer)
            found = findings(waits)
        model.close()
    return found


def findings(waits: Counter[str]) -> dict[str, Any]:
    return {
        "races": dict(CHECKER.races.most_common(4)),
        "waits": dict(waits),
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


def each(calls: Sequence[tuple[str, ...]]) -> list[Any]:
    """Return the findings of several calls, or the error of one, so that the others count.

    A call is a function of this module, "train", "gossip" or "serve", and its arguments.
    """
    found: list[Any] = []
    for function, *args in calls:
        try:
            found.append(globals()[function](*(arg or None for arg in args)))
        except Exception as error:
            found.append({"error": "".join(traceback.format_exception(error)), "races": {}})
    return found
