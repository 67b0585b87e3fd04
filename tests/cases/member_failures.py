"""Failures of a process of a job whose members change, at a place that a test names."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from offbeat.core.checkpoint import saving, shard
from offbeat.core.guards import replicas
from offbeat.core.transport.control import Control
from offbeat.core.transport.link import LinkThread, Message
from offbeat.elastic import feed as member_feed
from offbeat.elastic.members import JobMember
from offbeat.elastic.repeated_averages import RepeatedAverages
from offbeat.elastic.session import MemberSession
from offbeat.elastic.state import Feeding

VOTE = 5  # iteration of a vote
HELD = 9  # iteration before which a state for a joining process is held
BOUNDARY = 7  # last iteration before the first boundary of plans with a period of one iteration


def inject(name: str) -> None:
    """Let this process fail at the first call of a function: end before it, or lose the connection
    to all other processes after it."""
    FAILURES[name]()


def _end(*_: Any, **__: Any) -> Any:
    os._exit(9)


def _lose_after(act: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that fails after its first call as if its last message had not arrived."""
    calls: list[int] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        result = act(*args, **kwargs)
        calls.append(1)
        if len(calls) > 1:
            return result
        raise dist.DistNetworkError("the connection of this test has failed")

    return call


def _end_after_repeat() -> None:
    act = RepeatedAverages._try

    def average(self: RepeatedAverages, name: str, number: int) -> Any:
        act(self, name, number)
        os._exit(9)

    RepeatedAverages._try = average  # type: ignore[method-assign]


def _lose_repeat() -> None:
    """Receive no result of the first average that is repeated."""
    act, calls = RepeatedAverages._try, list[int]()

    def average(self: RepeatedAverages, name: str, number: int) -> Any:
        failure = act(self, name, number)
        calls.append(1)
        if len(calls) > 1 or failure is not None:
            return failure
        del self.results[name]
        return RuntimeError("the connection of this test has failed")

    RepeatedAverages._try = average  # type: ignore[method-assign]


def _end_in_plan_change() -> None:
    """End when the ranks agree on the plan that follows the first one."""
    act, plans = Control.agree, list[int]()

    def agree(self: Control, what: str, *args: Any) -> None:
        plans.extend([1] if what == "the plan" else [])
        if len(plans) == 2:
            os._exit(9)
        act(self, what, *args)

    Control.agree = agree  # type: ignore[method-assign]


def _end_in_begin() -> None:
    MemberSession.begin_epoch = _end  # type: ignore[method-assign]


def _end_in_joining() -> None:
    """End when the joining process has received the weights."""
    Feeding.send_state = _end  # type: ignore[method-assign]


def _lose_begin() -> None:
    MemberSession.begin_epoch = _lose_after(MemberSession.begin_epoch)  # type: ignore[method-assign]


def _end_before_union() -> None:
    MemberSession.unite = _end  # type: ignore[method-assign]


def _send_in_union() -> None:
    """Send the messages of iteration `BOUNDARY` when the replicas are united before a change."""
    send, unite, begun = LinkThread._send, MemberSession.unite, threading.Event()

    def send_later(self: LinkThread, message: Message) -> None:
        if message.iteration == BOUNDARY:
            begun.wait()
        send(self, message)

    def unite_and_send(self: MemberSession) -> None:
        begun.set()
        unite(self)

    LinkThread._send = send_later  # type: ignore[method-assign]
    MemberSession.unite = unite_and_send  # type: ignore[method-assign]


def _hold_vote() -> None:
    """Let the first vote of an iteration `VOTE` end only after this process has noticed a failure.
    An epoch counts its iterations anew."""
    send, held = LinkThread._send, list[Message]()

    def send_or_hold(self: LinkThread, message: Message) -> None:
        if message.transfer.payload.buffer == "vote" and message.iteration == VOTE:
            held.append(message)
        while held == [message]:
            if self._detached:
                raise RuntimeError("the connection of this test has failed")
            time.sleep(0.01)
        send(self, message)

    LinkThread._send = send_or_hold  # type: ignore[method-assign]


def _lose_union() -> None:
    replicas._require_same = _lose_after(replicas._require_same)


def _end_in_save() -> None:
    """End in the second checkpoint, before all ranks have begun to save it."""
    act, calls = saving.Saver.save, list[int]()

    def save(self: saving.Saver, *args: Any) -> Any:
        calls.append(1)
        self.settle()  # the first checkpoint
        return act(self, *args) if len(calls) == 1 else os._exit(9)

    saving.Saver.save = save  # type: ignore[method-assign]


def _end_in_write() -> None:
    """End while the second checkpoint is written."""
    act, begin, calls = shard.write, saving.Saver.save, list[int]()

    def save(self: saving.Saver, *args: Any) -> Any:
        result = begin(self, *args)
        self.settle()  # this process does not train on before its end
        return result

    saving.Saver.save = save  # type: ignore[method-assign]

    def write(path: Path, *args: Any) -> None:
        calls.append(1)
        act(path, *args)
        if len(calls) > 1:
            os._exit(9)

    shard.write = write


def _end_after_store() -> None:
    """End when the store of an epoch after the first one is open, and others know its address."""
    act = JobMember._open_store

    def open_store(self: JobMember, *args: Any, **kwargs: Any) -> Any:
        store = act(self, *args, **kwargs)
        return store if self.epoch.number == 0 else os._exit(9)

    JobMember._open_store = open_store  # type: ignore[method-assign]


def _hold_state() -> None:
    """Send the tensors of a state for a joining process only after iteration `HELD` has begun."""
    step, begun = MemberSession.step, threading.Event()

    def step_and_note(self: MemberSession, skip_update: bool) -> None:
        if self.iteration == HELD:
            begun.set()
        step(self, skip_update)

    def wait(*_: Any) -> float:
        begun.wait()
        return 0.0

    MemberSession.step = step_and_note  # type: ignore[method-assign]
    member_feed.Pace.reserve = wait  # type: ignore[method-assign]


def _keep_state() -> None:
    """Send no tensor of a state for a joining process, which has connected before training goes
    on."""
    select, connected = member_feed.StateSenders.select, threading.Event()

    def select_and_wait(self: member_feed.StateSenders, requests: Any) -> Any:
        result = select(self, requests)
        if self._senders:
            connected.wait()
        return result

    def wait(*_: Any) -> float:
        connected.set()
        return 1e6

    member_feed.StateSenders.select = select_and_wait  # type: ignore[method-assign]
    member_feed.Pace.reserve = wait  # type: ignore[method-assign]


def _end_in_receiving() -> None:
    member_feed._receive_copy = _end


def _lose_state() -> None:
    """Lose the first connection to the sender of a state."""
    act, calls = member_feed._receive_copy, list[int]()

    def receive(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise ConnectionResetError("the connection of this test has failed")
        return act(*args)

    member_feed._receive_copy = receive


class _EndingStore(dist.Store):
    """Store whose process ends when it needs a key of another one, after it has set its own."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    get = wait = multi_get = _end

    def has_extended_api(self) -> bool:
        return False


def _end_in_connecting(number: int) -> Callable[[], None]:
    """Return a function that lets this process end in the creation of a process group, when the
    others know its address and it has connected to none."""

    def install() -> None:
        patched: Any = distributed_c10d
        before, calls = patched.ProcessGroupGloo, list[int]()

        class Ending(before):
            def __init__(self, store: Any, *args: Any, **kwargs: Any) -> None:
                calls.append(1)
                own = _EndingStore(store) if len(calls) == number else store
                super().__init__(own, *args, **kwargs)

        patched.ProcessGroupGloo = Ending

    return install


FAILURES: dict[str, Callable[[], None]] = {
    "end after repeat": _end_after_repeat,
    "lose repeat": _lose_repeat,
    "end in plan change": _end_in_plan_change,
    "end in begin": _end_in_begin,
    "end in joining": _end_in_joining,
    "lose begin": _lose_begin,
    "end before union": _end_before_union,
    "send in union": _send_in_union,
    "hold a vote": _hold_vote,
    "lose union": _lose_union,
    "hold state": _hold_state,
    "keep state": _keep_state,
    "end in receiving": _end_in_receiving,
    "lose state": _lose_state,
    "end in save": _end_in_save,
    "end in write": _end_in_write,
    "end after store": _end_after_store,
    # Each epoch has the default group, then that of the link.
    "end in fourth group": _end_in_connecting(4),
}
