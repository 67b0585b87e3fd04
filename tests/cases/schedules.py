"""What the ranks do in the tests of updates on arrival, and loops for those of merged ones."""

from __future__ import annotations

import atexit
import copy
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from oracle.training import Replica, on_time, replicas
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import offbeat
from cases.models import (
    MODELS,
    USUAL,
    Backwards,
    Case,
    Loop,
    batch,
    build_model,
    build_optimizer,
    build_scheduler,
    loss_of,
    profile_of,
)
from cases.oddities import build
from cases.workers import Trained, User, prepared, rank, snapshot, world_size
from offbeat import Strategy

CASE = Case("mlp", "nesterov")

# ---- models whose parameters are not used where hooks see it -----------------------------------


class Attending(nn.Module):
    """Attention reads the weight of its output projection and never calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.attention = nn.MultiheadAttention(6, 2)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.head(self.attention(x, x, x, need_weights=False)[0])


class Reading(nn.Module):
    """Reads a child's weight without a call, and holds a parameter and a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.child = nn.Linear(5, 6)
        self.shifts = nn.ParameterList([torch.zeros(6), torch.ones(6)])
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.linear(x * self.scale, self.child.weight, self.child.bias)
        return self.head(torch.tanh(x) * self.shifts[1] + self.shifts[0])

    def encode(self, x: Tensor) -> Tensor:
        return self.forward(x)


class Peeking(nn.Module):
    """Reads a child's weight first and calls the child later."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.child(x @ self.child.weight.t())))


class Twice(Backwards):
    """Its middle is wide enough to be called twice; a weight is normalized on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = weight_norm(nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.head(self.middle(torch.tanh(self.middle(x))))


class Late(Backwards):
    """The middle is left out until the fourth training forward."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += self.training
        x = torch.tanh(self.first(x))
        return self.head(torch.tanh(self.middle(x)) if self.forwards > 3 else x)


class Earlier(Backwards):
    """From the fourth training forward on, reads weights of the last modules first: biases,
    which autograd does not keep, and with `keeps` a weight that it keeps."""

    keeps = False

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += self.training
        if self.forwards > 3:
            x = x + self.head.bias.sum() + self.middle.bias.sum()
            if self.keeps:
                x = x * self.head.weight.sum(1)[:1]
        return super().forward(x)


class Keeping(Earlier):
    keeps = True


class Blocks(Backwards):
    """One block is compiled in a wrapper, one in place; no machine code is made, for time."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.compile(self.first, backend="eager")  # type: ignore[assignment]
        self.middle.compile(backend="eager")


MODELS.update(
    attending=Attending, reading=Reading, peeking=Peeking, twice=Twice, late=Late, blocks=Blocks,
    earlier=Earlier, keeping=Keeping,
)  # fmt: skip

# ---- one training run, watched -----------------------------------------------------------------


@dataclass(frozen=True)
class Now:
    """An iteration that is just over, of a rank or of a replica."""

    model: Any
    optimizer: Any
    t: int
    rank: int


After = Callable[[Now], Any]


def nothing(_: Now) -> None:
    pass


@dataclass(frozen=True)
class Script:
    """A user's loop; `after` is called after every iteration, on the reference as well. `bare`:
    the module that was given to `prepare` is called, not what it returned."""

    case: Case = CASE
    loop: Loop = USUAL
    after: After = nothing
    bare: bool = False

    def __str__(self) -> str:
        words = [f"{k}={v}" for k, v in vars(self.loop).items() if v != getattr(USUAL, k)]
        words += [self.after.__name__] * (self.after is not nothing) + ["bare"] * self.bare
        return " ".join([str(self.case), *words])


class Clearing(User):
    """Clears gradients at other times, and past the objects that `prepare` returned."""

    def loss(self, x: Tensor, y: Tensor, t: int) -> Tensor:
        loss = super().loss(x, y, t)
        if self.loop.clear == "after forward":
            self.optimizer.zero_grad()
        return loss

    def iterate(self, t: int) -> None:
        super().iterate(t)
        if self.loop.clear == "after step":
            self.optimizer.zero_grad()
        elif self.loop.clear == "inner":
            self.optimizer.inner.zero_grad()
        elif self.loop.clear == "inner in place":
            self.optimizer.inner.zero_grad(set_to_none=False)
        elif self.loop.clear == "gradients in place":
            for p in self.model.parameters():
                if p.grad is not None:
                    p.grad.zero_()


def follow(
    script: Script, strategy: Strategy, iterations: int, **options: Any
) -> tuple[Trained, list[Any]]:
    """What this rank has in the end, and what it saw after every iteration."""
    case = script.case
    model = build_model(case, seed=rank())
    optimizer = build_optimizer(case, model)
    if "observe" not in options:
        options.setdefault("profile", profile_of(case, world_size()))
    seen: list[Any] = []
    with prepared(model, optimizer, strategy, **options) as (model, optimizer):
        scheduler = build_scheduler(case, optimizer)
        user = Clearing(case, model.module if script.bare else model, optimizer, script.loop)
        for t in range(iterations):
            user.iterate(t)
            if scheduler is not None:
                scheduler.step()
            seen.append(script.after(Now(model, optimizer, t, rank())))
        trained = Trained(snapshot(model.state_dict()), snapshot(optimizer.state_dict()))
    return trained, seen


def follow_observed(script: Script, strategy: Strategy, iterations: int) -> Trained:
    return follow(script, strategy, iterations, observe=3, min_bucket_bytes=1)[0]


def followed(script: Script, iterations: int, ranks: int = 2) -> list[tuple[Replica, list[Any]]]:
    """The reference: BSP, and what is seen of its plain models and optimizers."""
    world = replicas(script.case, ranks, script.loop)
    seen: list[list[Any]] = [[] for _ in world]
    for t in range(iterations):
        on_time(world, range(t, t + 1))
        for replica, mine in zip(world, seen, strict=True):
            mine.append(script.after(Now(replica.model, replica.optimizer, t, replica.rank)))
    return list(zip(world, seen, strict=True))


# ---- after an iteration ------------------------------------------------------------------------


def look(now: Now) -> Any:
    """The weights, in another way every time."""
    return snapshot(WAYS[now.t % len(WAYS)](now))


def evaluate(now: Now) -> Tensor:
    now.model.eval()
    with torch.no_grad():
        output = now.model(batch(CASE, 7, 100)[0])
    now.model.train()
    return output


WAYS: list[After] = [
    lambda now: now.model.state_dict(),
    lambda now: list(now.model.parameters()),
    lambda now: copy.deepcopy(now.model).state_dict(),
    lambda now: now.optimizer.state_dict(),
    lambda now: getattr(now.model, "module", now.model).state_dict(),
    lambda now: torch.optim.swa_utils.AveragedModel(now.model).module.state_dict(),
    evaluate,
]


def look_on_rank_0(now: Now) -> Any:
    """The other rank goes on at once."""
    return look(now) if now.rank == 0 else None


def evaluate_on_rank_0(now: Now) -> Any:
    return evaluate(now) if now.rank == 0 else None


def set_rates(now: Now) -> None:
    """A schedule by hand, of everything that a group holds."""
    group, t = now.optimizer.param_groups[0], now.t
    group["lr"], group["momentum"], group["weight_decay"] = 0.1 / (t + 2), 0.9 - 0.1 * t, 0.01 * t


def reload(now: Now) -> None:
    """Other weights after the fourth iteration, another rate after the sixth."""
    if now.t == 3:
        now.model.load_state_dict(build_model(CASE, seed=9).state_dict())
    if now.t == 5:
        state = snapshot(now.optimizer.state_dict())
        state["param_groups"][0]["lr"] = 0.02
        now.optimizer.load_state_dict(state)


# ---- alone, on arrival -------------------------------------------------------------------------


@contextmanager
def started(strategy: Strategy, case: Case, iterations: int) -> Iterator[tuple[Any, Any, Any]]:
    """(module, model, optimizer) after some iterations, the last one's update to come."""
    module, plain = build(case)
    profile = profile_of(case, world_size())
    with prepared(module, plain, strategy, profile=profile) as (model, optimizer):
        go_on(model, optimizer, case, range(iterations))
        yield module, model, optimizer


def go_on(model: Any, optimizer: Any, case: Case, iterations: range) -> None:
    for t in iterations:
        optimizer.zero_grad()
        loss_of(model, *batch(case, rank(), t)).backward()
        optimizer.step()


def when_updated(strategy: Strategy) -> list[bool]:
    """Whether a reference to a weight shows the update after step(), and after flush()."""
    with started(strategy, CASE, 2) as (module, model, optimizer):
        weight = module[6].weight  # an attribute of the module would be up to date
        before = torch.clone(weight)
        go_on(model, optimizer, CASE, range(2, 3))
        model.flush()
        assert not torch.equal(before, weight)
        before = torch.clone(weight)
        go_on(model, optimizer, CASE, range(3, 4))
        at_once = not torch.equal(before, weight)
        model.flush()
        return [at_once, not torch.equal(before, weight)]


def when_updated_in_forward(strategy: Strategy) -> list[bool]:
    """Whether the last weight shows the update when the first module runs, and after the forward.

    Before it the script makes a list of the modules, as a slice of a list of layers does.
    """
    with started(strategy, CASE, 2) as (module, model, optimizer):
        weight, updated = module[6].weight, list[bool]()
        go_on(model, optimizer, CASE, range(2, 3))
        before = torch.clone(weight)
        module[0].register_forward_pre_hook(
            lambda *_: updated.append(not torch.equal(before, weight))
        )
        nn.ModuleList(module)
        go_on(model, optimizer, CASE, range(3, 4))
        return [*updated, not torch.equal(before, weight)]


def look_through(strategy: Strategy, what: str) -> bool:
    """Whether weights that are reached through the prepared model are up to date."""
    case = Case("reading", "nesterov")
    x = batch(case, 7, 100)[0]
    ways: dict[str, Callable[[Any], Any]] = {
        "a submodule": lambda model: torch.clone(model.head.weight),
        "a submodule's state": lambda model: snapshot(model.module.head.state_dict())["weight"],
        "the bare module": lambda model: torch.clone(next(model.module.parameters())),
        "an attribute of the bare model": lambda _: torch.clone(bare.head.weight),
        "a parameter": lambda model: torch.clone(model.scale),
        "a method": lambda model: model.encode(x).detach(),
    }
    with started(strategy, case, 3) as (bare, model, _):
        before = ways[what](model)
        model.flush()
        return torch.equal(before, ways[what](model))


def evaluate_in_inference_mode(strategy: Strategy) -> list[Tensor]:
    """Weights after an evaluation in inference mode while the first update waits."""
    with started(strategy, CASE, 1) as (_, model, optimizer):
        with torch.inference_mode():
            model(batch(CASE, 7, 100)[0])
        go_on(model, optimizer, CASE, range(1, 4))
        return snapshot(list(model.parameters()))


def forward_again(strategy: Strategy, how: str) -> Tensor:
    """A weight in the end. After the last iteration a forward that nobody calls backward on, on
    rank 0 alone; then training goes on, or everybody leaves, or meets in consolidate first."""
    module, plain = build(CASE)
    profile = profile_of(CASE, world_size())
    model, optimizer = offbeat.prepare(module, plain, strategy, profile=profile, timeout_s=8)
    go_on(model, optimizer, CASE, range(3))
    if rank() == 0:
        loss_of(model, *batch(CASE, 0, 7))
    if how == "consolidates":
        model.consolidate()
    if how != "leaves":
        go_on(model, optimizer, CASE, range(3, 5))
    model.close()
    return module[6].weight.detach().clone()


def use_copies(strategy: Strategy) -> list[bool]:
    """Whether the model's update is still to come after copies of it were used, and what they
    hold is up to date."""
    with started(strategy, CASE, 2) as (module, model, optimizer):
        plain = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        equal = [
            torch.equal(a, b) for a, b in zip(plain.parameters(), module.parameters(), strict=True)
        ]
        weight = module[6].weight
        go_on(model, optimizer, CASE, range(2, 3))
        before = torch.clone(weight)  # p.clone() would complete the update
        plain.state_dict()
        loss_of(plain, *batch(CASE, rank(), 3)).backward()
        equal.append(torch.equal(weight, before))
        model.flush()
        return [*equal, not torch.equal(weight, before)]


def leave(how: str, strategy: Strategy) -> None:
    """Rank 0 saves a checkpoint before the others meet it at a barrier, or after the last
    iteration; or the last messages are slow. Then the process ends as a script does."""
    module, plain = build(CASE)
    profile = profile_of(CASE, world_size())
    model, optimizer = offbeat.prepare(module, plain, strategy, profile=profile, timeout_s=8)
    go_on(model, optimizer, CASE, range(3))
    if how == "meets":
        save_on_rank_0(model)
        dist.barrier()
    if how == "slow":
        dist.all_reduce = slowly(dist.all_reduce)
    go_on(model, optimizer, CASE, range(3, 4))
    if how == "saves":
        save_on_rank_0(model)
    atexit._run_exitfuncs()


def save_on_rank_0(model: Any) -> None:
    if rank() == 0:
        model.state_dict()


def slowly(collective: Callable[..., Any]) -> Callable[..., Any]:
    def slow(*args: Any, **more: Any) -> Any:
        time.sleep(0.35)  # together longer than a link waits to be closed
        return collective(*args, **more)

    return slow


def hooks_left(strategy: Strategy) -> int:
    with started(strategy, CASE, 2) as (module, _, _):
        pass
    hooks = [
        len(part._forward_pre_hooks)
        + len(part._state_dict_pre_hooks)
        + (type(part._parameters) is not dict)
        + ("named_parameters" in vars(part))
        for part in module.modules()
    ]
    return sum(hooks)
