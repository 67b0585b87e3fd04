"""What the ranks of the tests' worlds do; a module of its own, so that processes can import it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from cases.models import (
    USUAL,
    Case,
    Loop,
    batch,
    build_model,
    build_optimizer,
    build_scheduler,
    loss_of,
    profile_of,
)
from cases.untouched import within
from offbeat.plan import BUILT_IN, Buffer, Plan, Transfer
from offbeat.profile import Profile
from offbeat.strategies import Strategy
from offbeat.testing import Inspection, inspect

TIMEOUT_S = 20.0
_open: list[Any] = []  # models of `prepared`, until they are closed


@dataclass
class Trained:
    """What one rank has after training."""

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    plan: Plan | None = None
    # (iteration, link, payload) of every message by its start, and with verb and bytes sent
    messages: list[tuple[int, str, str]] = field(default_factory=list)
    sent: list[tuple[int, str, str, int]] = field(default_factory=list)
    profile: Profile | None = None
    united: str = ""  # hash of all bits after consolidate()
    place: tuple[int, int] = (0, 0)  # replica of this rank, and its index within the node


def rank() -> int:
    return int(os.environ["RANK"])


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


@contextmanager
def prepared(
    model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy, **options: Any
) -> Iterator[tuple[Any, Any]]:
    """prepare, and close at the end so that another session can follow in this process."""
    options.setdefault("timeout_s", TIMEOUT_S)
    model, optimizer = offbeat.prepare(model, optimizer, strategy, **options)
    _open.append(model)
    yield model, optimizer
    model.close()
    _open.remove(model)


def snapshot(value: Any) -> Any:
    """Copies of all tensors in nested containers."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: snapshot(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(snapshot(v) for v in value)
    return value


def bits(model: nn.Module) -> str:
    """Hash of every bit of every tensor, frozen ones and buffers too."""
    state = model.state_dict()
    return bits_of(state.values(), "".join(state))


def bits_of(tensors: Iterable[Tensor], names: str = "") -> str:
    """Hash of every bit of some tensors, and of their names."""
    digest = hashlib.sha256(names.encode())
    for tensor in tensors:
        whole = tensor.detach().contiguous().view(-1)
        digest.update(whole.view(torch.uint8).numpy().data)
    return digest.hexdigest()


# ---- one training run -----------------------------------------------------------------------


def train(
    case: Case,
    strategy: Strategy,
    iterations: range,
    *,
    loop: Loop = USUAL,
    load: tuple[dict[str, Any], dict[str, Any]] | None = None,
    unites: bool = False,
    slow: int | None = None,
    profile: Profile | None = None,
    setting: str = "",
    **options: Any,
) -> Trained:
    """Train on this rank's batches. Ranks begin with different weights: rank 0's must count.
    Without a profile but with `observe` in the options, the runtime measures its own. Replicas are
    united at the end if `unites`, which takes more messages than the training; `slow` is late.
    Global states stay as they are, under the usual settings or another one of `untouched`."""
    model = build_model(case, seed=rank())
    optimizer = build_optimizer(case, model)
    if profile is None and "observe" not in options:
        profile = profile_of(case, world_size())
    session = prepared(model, optimizer, strategy, profile=profile, **options)
    with within(setting, session) as (model, optimizer):
        scheduler = build_scheduler(case, optimizer)
        if load is not None:
            model.load_state_dict(load[0])
            optimizer.load_state_dict(load[1])
        seen, user = inspect(model), User(case, model, optimizer, loop)
        for t in iterations:
            user.iterate(t)
            if scheduler is not None:
                scheduler.step()
        trained = Trained(snapshot(model.state_dict()), snapshot(optimizer.state_dict()))
        trained.plan, trained.profile = seen.plan, seen.profile
        trained.place = model.replica, model.member
        if unites:
            trained.united = average_replicas(model, slow)
    note_messages(trained, seen)
    assert "grad" not in vars(torch.nn.Parameter)  # nobody listens to reads any more
    return trained


def average_replicas(model: Any, slow: int | None) -> str:
    """Consolidate replicas that differ in their frozen parameters too; one rank comes late."""
    with torch.no_grad():
        for p in model.parameters():
            if not p.requires_grad:
                p += rank()
    if rank() == slow:
        time.sleep(0.1)
    model.consolidate(repair=True)
    return bits(model)


class User:
    """A user's training loop."""

    def __init__(self, case: Case, model: Any, optimizer: Any, loop: Loop):
        self.case, self.model, self.optimizer, self.loop = case, model, optimizer, loop
        if loop.hook is not None:
            inner, parameters = getattr(optimizer, "inner", optimizer), [*model.parameters()]

            def clip(*_: Any) -> None:
                torch.nn.utils.clip_grad_norm_(parameters, loop.hook)

            inner.register_step_pre_hook(clip)
        scale = loop.scale or 1.0
        self.scaler = torch.amp.GradScaler("cpu", scale, enabled=loop.scale is not None)

    def iterate(self, t: int) -> None:
        if self.loop.closure:
            assert self.optimizer.step(lambda: self.backward(t)) is not None
            return
        if (rank(), t) in self.loop.skipped:
            if self.loop.early:
                self.clear()
                self.loss(*batch(self.case, rank(), t), t)
            else:
                self.backward(t)
            self.model.skip_step()
            return
        self.backward(t)
        if t < self.loop.since:
            self.optimizer.step()
            return
        if t in self.loop.dropped:
            self.clear()
            return
        if t in self.loop.twice:
            loss_of(self.model, *batch(self.case, rank(), t), self.loop).backward()
        if self.loop.clip is not None:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.loop.clip)
        self.loop.alter(self.model, self.optimizer, t)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.loop.evaluate:
            self.evaluate()

    @torch.enable_grad()
    def backward(self, t: int) -> Tensor:
        self.clear()
        if (rank(), t) in self.loop.idle:
            return torch.zeros(())
        x, y = batch(self.case, rank(), t)
        n = self.loop.micro
        for part in range(n - 1):
            with contextlib.nullcontext() if self.loop.sync else self.model.no_sync():
                (self.loss(x[part::n], y[part::n], t) / n).backward()
        loss = self.loss(x[n - 1 :: n], y[n - 1 :: n], t) / n
        loss.backward()
        return loss

    def loss(self, x: Tensor, y: Tensor, t: int) -> Tensor:
        loss = loss_of(self.model, x, y, self.loop)
        if (rank(), t) in self.loop.overflow:
            loss = loss * float("inf")
        return self.scaler.scale(loss) if t >= self.loop.since else loss

    def clear(self) -> None:
        if self.loop.clear == "optimizer":
            self.optimizer.zero_grad()
        elif self.loop.clear == "model":
            self.model.zero_grad(set_to_none=True)
        elif self.loop.clear == "in place":
            self.model.zero_grad(set_to_none=False)
        elif self.loop.clear == "none":
            for p in self.model.parameters():
                p.grad = None

    def evaluate(self) -> None:
        """Of other data, in evaluation mode; ranks do not do the same."""
        self.model.eval()
        with torch.no_grad():
            for t in range(rank() + 1):
                loss_of(self.model, *batch(self.case, 7, 100 + t))
        self.model.train()


def note_messages(trained: Trained, seen: Inspection) -> None:
    """Note the messages of a closed model, by their order on each link."""
    buffers = BUILT_IN if trained.plan is None else trained.plan.all_buffers
    for m in seen.messages:
        trained.messages.append((m.iteration, m.link, name_of(m.transfer, buffers)))
        trained.sent.append((m.iteration, m.link, promise_of(m.transfer), m.sent_bytes))


def name_of(t: Transfer, buffers: Mapping[str, Buffer]) -> str:
    """A message's name in a trace."""
    kind = t.payload.buffer if t.verb == "all_reduce" else t.verb
    if kind in buffers:  # votes have none
        kind = buffers[kind].kind
    return f"{kind}[{t.payload.buckets.start}:{t.payload.buckets.stop}]"


def promise_of(t: Transfer) -> str:
    """Verb and payload."""
    return f"{t.verb} {t.payload}"


# ---- conformance ----------------------------------------------------------------------------


def train_and_hear(*args: Any) -> tuple[Trained, list[str]]:
    """As `train_with`, and the messages that this rank has printed, one per line."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        return train_with(*args), said.getvalue().replace("\n         ", " ").splitlines()


def train_with(
    case: Case,
    strategy: Strategy,
    iterations: range,
    loop: Loop,
    options: Mapping[str, Any] | tuple[tuple[str, Any], ...],
) -> Trained:
    return train(case, strategy, iterations, loop=loop, **dict(options))


def train_in_turn(
    case: Case, strategies: Sequence[Strategy], iterations: range, options: dict[str, Any]
) -> list[Trained]:
    return [train(case, strategy, iterations, **options) for strategy in strategies]


def attempts(calls: Sequence[tuple[Any, ...]]) -> list[tuple[Any, str, str]]:
    """Result of each call, or None with kind and text of its exception. What a call has left, its
    open models and variables of the environment, does not reach the next."""
    found: list[tuple[Any, str, str]] = []
    variables = dict(os.environ)
    for function, *args in calls:
        try:
            found.append((function(*args), "", ""))
        except (Exception, SystemExit) as error:
            found.append((None, type(error).__name__, str(error)))
        while _open:
            with contextlib.suppress(RuntimeError, ValueError):  # of the same cause
                _open.pop().close()
        os.environ.clear()
        os.environ.update(variables)
    return found


def train_and_unite(strategy: Strategy, case: Case, iterations: int) -> Trained:
    """Replicas are united at the end, where the last rank is a straggler."""
    return train(case, strategy, range(iterations), unites=True, slow=world_size() - 1)


def train_with_torch(case: Case, iterations: int) -> Trained:
    """torch's own DistributedDataParallel, without any of offbeat."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = build_model(case)
    optimizer = build_optimizer(case, model)
    scheduler = build_scheduler(case, optimizer)
    ddp = DistributedDataParallel(model)
    for t in range(iterations):
        optimizer.zero_grad()
        loss_of(ddp, *batch(case, rank(), t)).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return Trained(snapshot(model.state_dict()), snapshot(optimizer.state_dict()))


def train_all_with_torch(cases: Sequence[Case], iterations: int) -> list[Trained]:
    return [train_with_torch(case, iterations) for case in cases]


def train_beside_torch(
    strategies: Sequence[Strategy], case: Case, iterations: int
) -> tuple[Trained, list[Trained]]:
    """What torch's DDP makes of a case, and what each strategy does."""
    theirs = train_with_torch(case, iterations)
    return theirs, [train(case, strategy, range(iterations)) for strategy in strategies]


def train_in_two_halves(case: Case, strategy: Strategy, iterations: int) -> tuple[Trained, Trained]:
    """Train, consolidate, save; load into a fresh prepare and train on."""
    half = iterations // 2
    model = build_model(case, seed=rank())
    optimizer = build_optimizer(case, model)
    profile = profile_of(case, world_size())
    with prepared(model, optimizer, strategy, profile=profile) as (model, optimizer):
        for t in range(half):
            optimizer.zero_grad()
            loss_of(model, *batch(case, rank(), t)).backward()
            optimizer.step()
        model.consolidate()
        saved = snapshot({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    first = Trained(saved["model"], saved["optimizer"])
    load = snapshot((saved["model"], saved["optimizer"]))  # torch loads without copying
    return first, train(case, strategy, range(half, iterations), load=load)


def destroys_the_world_first() -> bool:
    """Leave torch.distributed before the model, as `Accelerator.end_training` does."""
    case = Case()
    bare = build_model(case)
    strategy, known = offbeat.LocalSGD(period=2), profile_of(case, world_size())
    optimizer = build_optimizer(case, bare)
    model, optimizer = offbeat.prepare(bare, optimizer, strategy, profile=known)
    loss_of(model, *batch(case, rank(), 0)).backward()
    optimizer.step()
    model.consolidate()
    dist.destroy_process_group()
    model.close()
    return dist.is_initialized()
