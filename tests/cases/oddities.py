"""What the ranks do in the tests of single features: unusual models, optimizers and loops."""

from __future__ import annotations

import copy
import json
import os
import pickle
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import offbeat
from cases.models import Case, batch, build_model, build_optimizer, loss_of, profile_of
from cases.workers import Trained, bits, bits_of, prepared, rank, snapshot, train, world_size
from offbeat import WFBP, Plan, Planned, Profile, Strategy
from offbeat.plan import Moment, local, transfer
from offbeat.testing import inspect

CASE = Case("mlp", "nesterov", "step")


def inputs(t: int, like: Tensor | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(10 * t + rank())
    return torch.randn(
        4, 5, generator=generator, dtype=torch.float64 if like is None else like.dtype
    )


def go_on_without_a_step(strategy: Strategy, again: str) -> None:
    model, optimizer = build(CASE)
    profile = profile_of(CASE, world_size())
    with prepared(model, optimizer, strategy, profile=profile) as (model, optimizer):
        model(inputs(0)).sum().backward()
        optimizer.step()
        loss = model(inputs(0)).sum()
        loss.backward(retain_graph=again == "backward")
        if again == "zero_grad":
            optimizer.zero_grad()
        elif again == "backward":
            loss.backward()
        model(inputs(0)).sum().backward()


def drop_a_gradient(strategy: Strategy, since: int) -> bool:
    """Set a gradient to None between backward and step; whether its parameter stayed since."""
    model, optimizer = build(CASE)
    before = model[6].weight.detach().clone()
    with prepared(model, optimizer, strategy, profile=profile_of(CASE, 1)) as (model, optimizer):
        for t in range(3):
            optimizer.zero_grad()
            model(inputs(t)).sum().backward()
            if t >= since:
                model.module[6].weight.grad = None
            else:
                before = None
            optimizer.step()
            if before is None:
                before = model.module[6].weight.detach().clone()
        return bool(torch.equal(model.module[6].weight, before))


def backward_with_graph() -> None:
    model, optimizer = build(CASE)
    warnings.simplefilter("ignore")  # torch's own: it advises against create_graph
    with prepared(model, optimizer, WFBP(), profile=profile_of(CASE, 1)) as (model, optimizer):
        model(inputs(0)).sum().backward(create_graph=True)


def reentrant_checkpointing() -> None:
    class Blocks(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = checkpoint(layer, x, use_reentrant=True)
            return x

    model = Blocks(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with prepared(model, optimizer, WFBP(), observe=1) as (model, optimizer):
        model(inputs(0).requires_grad_()).sum().backward()


# ---- what a forward returns -----------------------------------------------------------------


@dataclass
class Output:
    loss: Tensor


class Plainly:
    """Tells nothing of its attributes."""

    __slots__ = ("loss",)


class Returning(nn.Module):
    """A model whose forward returns its loss in this way, or keeps it."""

    def __init__(self, model: nn.Module, kind: str):
        super().__init__()
        self.model, self.kind = model, kind
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        loss = self.model(x).pow(2).mean()
        self.kept = [loss]
        return RETURNS[self.kind](loss)


def hidden(loss: Tensor) -> Plainly:
    made = Plainly()
    made.loss = loss
    return made


RETURNS: dict[str, Callable[[Tensor], Any]] = {
    "a tensor": lambda loss: loss,
    "a dataclass": Output,
    "an object": hidden,
    "None": lambda _: None,
}


def train_returning(kind: str, strategy: Strategy) -> tuple[str, int]:
    """Bits of the weights, and iterations, after eight steps."""
    torch.manual_seed(0)
    plain, _ = build(CASE)
    inner = Returning(plain, kind)
    optimizer = torch.optim.SGD([p for p in inner.parameters() if p.requires_grad], lr=0.1)
    options = {"observe": 2, "min_bucket_bytes": 1}
    with prepared(inner, optimizer, strategy, **options) as (model, optimizer):
        for t in range(8):
            model(inputs(t))
            optimizer.zero_grad(set_to_none=t % 2 == 0)
            inner.kept[0].backward()
            optimizer.step()
        iterations = offbeat.iteration(model)
        model.consolidate()
        return bits(inner), iterations


# ---- the bare module ------------------------------------------------------------------------


def train_with_bare(strategy: Strategy, idiom: str) -> tuple[int, str, str, bool]:
    """Steps that were possible, bits of the weights and of what a script makes of them after each
    step, through the bare module and references of its own; and whether updates came late."""
    module, _ = build(CASE)
    kept = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(kept, lr=0.5)  # every update changes what pruning prunes
    average = AveragedModel(module) if idiom == "averages" else copy.deepcopy(module)
    made = [*average.parameters()]
    steps, late = 0, False
    try:
        with prepared(module, optimizer, strategy, profile=profile_of(CASE, 1)) as (model, outer):
            aliases = [p.data for p in kept]
            for steps in range(6):
                outer.zero_grad()
                model(inputs(steps)).pow(2).mean().backward()
                before = snapshot(aliases)
                outer.step()
                late |= any(map(torch.equal, aliases, before))
                with torch.no_grad():
                    look_at_bare(idiom, module, average, kept, aliases, steps)
            return 6, bits(module), bits_of(made), late
    except ValueError:
        return steps, "", "", late


def look_at_bare(  # noqa: C901
    idiom: str,
    module: Any,
    average: Any,
    kept: list[nn.Parameter],
    aliases: list[Tensor],
    step: int,
) -> None:
    """Read or write weights after a step."""
    trained = [p for p in average.parameters() if p.requires_grad]
    if idiom == "averages":
        average.update_parameters(module)
    elif idiom == "averages a part":
        for mine, p in zip(average[6].parameters(), module[6].parameters(), strict=True):
            mine.lerp_(p, 0.1)
    elif idiom == "averages what it keeps":
        for mine, p in zip(trained, kept, strict=True):
            mine.lerp_(p.detach(), 0.1)
    elif idiom == "clones what it keeps":
        for mine, p in zip(trained, kept, strict=True):
            mine.copy_(p.clone())
    elif idiom == "copies":
        average[6].load_state_dict(copy.deepcopy(module)[6].state_dict())
    elif idiom == "pickles":
        copied = pickle.loads(pickle.dumps(module))
        assert next(copied.parameters()) is copied[0].weight
        average[6].load_state_dict(copied[6].state_dict())
    elif idiom == "clamps":
        for p in module.parameters():
            p.data.clamp_(-0.1, 0.1)
    elif idiom == "clamps what it keeps":
        for p in kept:
            p.data.clamp_(-0.1, 0.1)
    elif idiom == "prunes":
        if step == 3:
            for i in (1, 4, 6):
                prune.l1_unstructured(module[i], "weight", 0.5)
    elif idiom == "prunes several":
        if step == 3:
            weights = [(module[i], "weight") for i in (1, 4, 6)]
            prune.global_unstructured(weights, prune.L1Unstructured, amount=0.5)
    elif idiom == "clamps aliases":
        for data in aliases:
            data.clamp_(-0.1, 0.1)
    else:
        assert idiom == "nothing"


# ---- step hooks -----------------------------------------------------------------------------


def act_in_hook(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Clip, decay or change settings within a hook of `optimizer.step()`."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if kind == "clips":
        torch.nn.utils.clip_grad_norm_(parameters, 0.05)
    elif kind == "clips if need be":  # the norm needs all gradients
        norm = sum(float(p.grad.norm()) for p in parameters if p.grad is not None)
        if norm > 1e6:
            torch.nn.utils.clip_grad_norm_(parameters, 1e6)
    elif kind == "sets lr":
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    elif kind == "decays":
        with torch.no_grad():
            for p in parameters:
                p.mul_(0.99)
    else:
        assert kind == "counts"


def train_hooked(
    strategy: Strategy, kind: str, moment: str = "pre", since: int = 0, registered: int = 0
) -> tuple[int, str]:
    """Steps that were possible, and bits of the weights. The hook does something from its
    iteration `since` on, and is there from iteration `registered` on."""
    module, optimizer = build(CASE)
    steps = 0

    def hook(*_: Any) -> None:
        if steps >= since:
            act_in_hook(kind, module, optimizer)

    register = getattr(optimizer, f"register_step_{moment}_hook")
    profile = profile_of(CASE, world_size())
    try:
        with prepared(module, optimizer, strategy, profile=profile) as (model, outer):
            for steps in range(6):
                if steps == registered:
                    register(hook)
                outer.zero_grad()
                model(inputs(steps)).pow(2).mean().backward()
                outer.step()
            model.consolidate()
            return 6, bits(module)
    except ValueError:
        return steps, ""


# ---- optimizers -----------------------------------------------------------------------------


class Counting(torch.optim.SGD):
    """Keeps a counter in its param groups, as schedule-free optimizers do."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


class Wrapper(torch.optim.Optimizer):
    """Steps another optimizer."""

    def __init__(self, inner: torch.optim.Optimizer):
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self.state = inner.state
        self.steps = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.steps += 1
        return self.inner.step(closure)


def train_counting(strategy: Strategy) -> int:
    model, _ = build(CASE)
    optimizer = Counting([p for p in model.parameters() if p.requires_grad], lr=0.1)
    steps(model, optimizer, strategy)
    return optimizer.param_groups[0]["k"]


def train_wrapped(strategy: Strategy) -> int:
    """Steps of an optimizer that wraps another; none may be made in secret."""
    model, inner = build(CASE)
    optimizer = Wrapper(inner)
    steps(model, optimizer, strategy)
    return optimizer.steps


def train_half(strategy: Strategy) -> list[bool]:
    """Whether the parameters moved that the optimizer has, and those that it does not have."""
    model, _ = build(CASE)
    optimizer = torch.optim.Adam(model[6].parameters(), lr=0.1)
    before = [model[i].weight.detach().clone() for i in (6, 4)]
    steps(model, optimizer, strategy)
    return [not torch.equal(model[i].weight, b) for i, b in zip((6, 4), before, strict=True)]


def build(case: Case) -> tuple[Any, torch.optim.Optimizer]:
    model = build_model(case)
    return model, build_optimizer(case, model)


def steps(model: Any, optimizer: torch.optim.Optimizer, strategy: Strategy) -> None:
    profile = profile_of(CASE, world_size())
    with prepared(model, optimizer, strategy, profile=profile) as (model, optimizer):
        for t in range(4):
            optimizer.zero_grad()
            model(inputs(t)).pow(2).mean().backward()
            optimizer.step()


# ---- links ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TwoLinks(Planned):
    """Every bucket by itself, the links in turn."""

    name: ClassVar[str] = "two-links"
    citation: ClassVar[str] = "tests"

    def schedule(self, profile: Profile) -> Plan:
        size = len(profile.buckets)
        transfers = tuple(
            transfer(
                "grad",
                range(b, b + 1),
                after=Moment("grad", b),
                before=Moment("step"),
                phases=[0],
                link=profile.links[b % 2].name,
            )
            for b in range(size)
        )
        return Plan(self.name, size, transfers, (local(size, Moment("step"), [0]),))

    def bound_s(self, profile: Profile) -> float:
        return 0.0


def train_on_two_links() -> Trained:
    links = [{"name": name, "interface": "lo"} for name in ("a", "b")]
    os.environ["OFFBEAT_LINKS"] = json.dumps(links)
    profile = profile_of(CASE, world_size(), links=("a", "b"))
    return train(CASE, TwoLinks(), range(8), profile=profile)


# ---- shapes ---------------------------------------------------------------------------------


class Odd(nn.Module):
    """A scalar, an empty parameter, channels_last and transposed weights, a buffer with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.conv = nn.Conv2d(4, 3, 2).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(3, 3).t())
        self.whole = torch.arange(4.0).repeat(3, 1)
        self.register_buffer("sliced", self.whole[:, ::2])
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("spectrum", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return (self.conv(x).mean((2, 3)) @ self.turned) * self.scale + self.empty.sum()


def train_odd_shapes(strategy: Strategy) -> dict[str, Any]:
    torch.manual_seed(rank())
    model = Odd()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with prepared(model, optimizer, strategy, observe=2, min_bucket_bytes=1) as (model, optimizer):
        for t in range(6):
            optimizer.zero_grad()
            x = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(10 * t + rank()))
            model(x).pow(2).sum().backward()
            optimizer.step()
        with torch.no_grad():
            for tensor in (model.sliced, model.count, model.spectrum):
                tensor += rank()
        model.mask[rank()] = True
        model.consolidate()
        return {
            "bits": bits(model),
            "strides": [model.conv.weight.stride(), model.turned.stride()],
            "between": model.whole[:, 1::2].tolist(),
        }


# ---- GPU ------------------------------------------------------------------------------------


def train_on_gpu(strategy: Strategy, scaled: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights of plain training and of training with a strategy, both alone on one GPU."""
    case = Case("conv", "adam")
    plain = build_model(case).cuda()
    train_on_cuda(plain, build_optimizer(case, plain), scaled)
    model = build_model(case).cuda()
    options = {"profile": profile_of(case, world_size())}
    with prepared(model, build_optimizer(case, model), strategy, **options) as (model, optimizer):
        train_on_cuda(model, optimizer, scaled)
        model.consolidate()
    return cpu(plain.state_dict()), cpu(model.state_dict())


def train_on_cuda(model: Any, optimizer: Any, scaled: bool) -> None:
    scaler = torch.amp.GradScaler("cuda", 1024.0, enabled=scaled)
    for t in range(12):
        optimizer.zero_grad()
        x, y = (tensor.cuda() for tensor in batch(Case("conv"), 0, t))
        scaler.scale(loss_of(model, x, y)).backward()
        scaler.step(optimizer)
        scaler.update()


def observe_on_gpu() -> Profile:
    """The profile that is measured with CUDA events."""
    case = Case("conv", "adam")
    model = build_model(case).cuda()
    optimizer = build_optimizer(case, model)
    with prepared(model, optimizer, WFBP(), observe=4, min_bucket_bytes=1) as (model, optimizer):
        train_on_cuda(model, optimizer, scaled=False)
        return inspect(model).profile


def cpu(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in state.items()}


def add_up(
    strategy: Strategy,
    passes: Sequence[int | tuple[int, ...]],
    *,
    quiet: bool = False,
    clip_at: int | None = None,
    **options: Any,
) -> list[Tensor]:
    """Weights after some iterations, each with so many backward passes, of all ranks or by rank;
    all but the last within `no_sync` if `quiet`. Iteration `clip_at` clips."""
    case = Case("mlp", "nesterov")
    module = build_model(case, seed=rank())
    plain = build_optimizer(case, module)
    if "observe" not in options:
        options["profile"] = profile_of(case, world_size())
    with prepared(module, plain, strategy, **options) as (model, optimizer):
        for t, count in enumerate(passes):
            count = count[rank()] if isinstance(count, tuple) else count
            optimizer.zero_grad()
            for i in range(count):
                loss = loss_of(model, *batch(case, rank(), 10 * t + i))
                with model.no_sync() if quiet and i < count - 1 else nullcontext():
                    loss.backward()
            if t == clip_at:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
        return snapshot([*model.state_dict().values()])


def add_up_both_ways(
    calls: Sequence[tuple[Strategy, Sequence[int], dict[str, Any], dict[str, Any]]],
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Per call: without and with `no_sync`."""
    return [
        (add_up(strategy, passes, **bare), add_up(strategy, passes, quiet=True, **quiet))
        for strategy, passes, bare, quiet in calls
    ]
