"""Training loops in the idioms of public scripts, as they are written for one device."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from cases.strangers import Batch, Script, all_batches, batch_of, loss_of
from cases.workers import rank, world_size
from offbeat import WFBP, Profile, Strategy
from offbeat.testing import inspect

STEPS = 6


@dataclass(frozen=True)
class Idiom:
    """How a script builds its model and optimizer, and how it trains."""

    loop: Script
    build: Callable[[], tuple[nn.Module, Any]]

    def __str__(self) -> str:
        return self.loop.__name__


Case = tuple[Idiom, Strategy]


class Agent(nn.Module):
    """Actor and critic, both used through methods; nobody calls the module."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 6), nn.Tanh())
        self.actor, self.critic = nn.Linear(6, 3), nn.Linear(6, 1)
        self.log_std = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.actor(self.body(x))

    def get_value(self, x: Tensor) -> Tensor:
        return self.critic(self.body(x))

    def get_action_and_value(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        spread = self.log_std.exp()
        return -(((y - self.actor(hidden)) / spread) ** 2).sum(1), self.critic(hidden)

    def compute_loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self(x), y)

    def losses(self, x: Tensor, y: Tensor) -> Iterator[Tensor]:
        for scale in (0.5, 1.0):
            yield nn.functional.mse_loss(self(x), scale * y)

    @torch.no_grad()
    def generate(self, x: Tensor) -> Tensor:
        return self(x)

    def describe(self) -> str:
        return f"{self.log_std.sum().item():.3f}"


def agent() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Agent().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def updates_by_method(model: Any, optimizer: Any, batch: Batch) -> None:
    """Proximal policy optimization: a roll-out without gradients, updates through a method."""
    for t in range(STEPS):
        x, y = batch(t)
        with torch.no_grad():
            baseline = model.get_value(x)
        log_probability, value = model.get_action_and_value(x, y)
        loss = ((value - y.sum(1, keepdim=True)) ** 2).mean() - 0.1 * log_probability.mean()
        loss = loss + 0.1 * baseline.mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()


def computes_loss_inside(model: Any, optimizer: Any, batch: Batch) -> None:
    """A method that calls the module; another one that does not train, in training mode."""
    for t in range(STEPS):
        x, y = batch(t)
        y = y + 0.1 * model.generate(x) * 0.0
        optimizer.zero_grad()
        model.compute_loss(x, y).backward()
        optimizer.step()
        if rank() == 0:
            model.describe()


def alternates_methods(model: Any, optimizer: Any, batch: Batch) -> None:
    """Every second iteration begins with another part of the model."""
    for t in range(STEPS):
        x, y = batch(t)
        optimizer.zero_grad()
        if t % 2:
            loss = nn.functional.mse_loss(model(x), y) + 0.0 * model.log_std.sum()
        else:
            loss = model.get_value(x).square().mean()
        loss.backward()
        optimizer.step()


def steps_within_a_generator(model: Any, optimizer: Any, batch: Batch) -> None:
    for t in range(STEPS // 2):
        for loss in model.losses(*batch(t)):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def calls_submodules(model: Any, optimizer: Any, batch: Batch) -> None:
    for t in range(STEPS):
        x, y = batch(t)
        optimizer.zero_grad()
        nn.functional.mse_loss(model.actor(model.body(x)), y).backward()
        optimizer.step()


def trains_in_eval_mode(model: Any, optimizer: Any, batch: Batch) -> None:
    model.eval()
    for t in range(STEPS):
        x, y = batch(t)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def trains_a_head(model: Any, optimizer: Any, batch: Batch) -> None:
    """Everything but the head in evaluation mode, set anew before every iteration."""
    for t in range(STEPS):
        model.eval()
        model.actor.train()
        x, y = batch(t)
        optimizer.zero_grad()
        model.compute_loss(x, y).backward()
        optimizer.step()


def sets_gradients(model: Any, optimizer: Any, batch: Batch) -> None:
    for t in range(STEPS):
        x, y = batch(t)
        parameters = [p for name, p in model.named_parameters() if not name.endswith("log_std")]
        parameters = [p for p in parameters if p.shape[0] != 1]
        loss = nn.functional.mse_loss(model(x), y)
        for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = gradient
        optimizer.step()


# ---- optimizers -----------------------------------------------------------------------------


def optimized(make: Callable[[nn.Module], Any]) -> Callable[[], tuple[nn.Module, Any]]:
    """A plain network with an optimizer, or several."""
    return partial(build, make)


def build(make: Callable[[nn.Module], Any]) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return model, make(model)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization round another optimizer (Foret et al. 2021), with the methods
    that public implementations have."""

    def __init__(self, parameters: Any, rho: float = 0.5):
        super().__init__(parameters, {"rho": rho})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.05, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        found = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in found]).norm()
        for p in found:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad, alpha=0.5 / float(norm))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first_step(zero_grad=True)
        torch.enable_grad()(closure)()
        self.second_step()


class Averaging(torch.optim.SGD):
    """Has the mean of all weights in evaluation mode, as schedule-free optimizers do."""

    @torch.no_grad()
    def eval(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["kept"] = p.clone()
            p.lerp_(self.state[p]["mean"], 0.5)

    @torch.no_grad()
    def train(self) -> None:
        for p in self.param_groups[0]["params"]:
            if "kept" in self.state[p]:
                p.copy_(self.state[p].pop("kept"))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("mean", p.clone()).lerp_(p, 0.3)


def takes_two_steps(model: Any, optimizer: Any, batch: Batch) -> None:
    for t in range(STEPS):
        loss_of(model, batch(t)).backward()
        optimizer.first_step(zero_grad=True)
        loss_of(model, batch(t)).backward()
        optimizer.second_step(zero_grad=True)


def steps_by_closure(model: Any, optimizer: Any, batch: Batch) -> None:
    for t in range(STEPS):

        def closure(t: int = t) -> Tensor:
            loss = loss_of(model, batch(t))
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)
        optimizer.zero_grad()


def switches_modes(model: Any, optimizer: Any, batch: Batch) -> None:
    for t in range(STEPS):
        optimizer.train()
        model.train()
        optimizer.zero_grad()
        loss_of(model, batch(t)).backward()
        optimizer.step()
        optimizer.eval()
        model.eval()
        with torch.no_grad():
            assert torch.isfinite(loss_of(model, batch(t)))
    optimizer.train()


def steps_both(model: Any, optimizers: Any, batch: Batch) -> None:
    """Each with a scheduler, which steps before the other optimizer."""
    decay = torch.optim.lr_scheduler.ExponentialLR
    schedulers = [decay(optimizer, 0.5) for optimizer in optimizers]
    for t in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, batch(t)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5 if t < 0 else 1e9)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=bool(t % 2))


def steps_in_turn(model: Any, optimizers: Any, batch: Batch) -> None:
    """As the two networks of a GAN do: each optimizer has a backward of its own."""
    for t in range(STEPS):
        for optimizer, sign in zip(optimizers, (1.0, -0.1), strict=True):
            optimizer.zero_grad()
            (sign * loss_of(model, batch(t))).backward()
            optimizer.step()


def attacks_weights(model: Any, optimizer: Any, batch: Batch) -> None:
    """Adversarial training: weights are perturbed and put back through `.data`."""
    for t in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(t)).backward()
        kept = {name: p.data.clone() for name, p in model.named_parameters()}
        for p in model.parameters():
            p.data.add_(0.01)
        loss_of(model, batch(t)).backward()
        for name, p in model.named_parameters():
            p.data = kept[name]
        optimizer.step()


def sam(model: nn.Module) -> Any:
    return SAM(model.parameters())


def averaging(model: nn.Module) -> Any:
    return Averaging(model.parameters(), lr=0.05)


def plain(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def both(model: nn.Module) -> Any:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW(others, lr=0.01, weight_decay=0.1)
    return [torch.optim.SGD(matrices, lr=0.05, momentum=0.9), adam]


OPTIMIZERS = [
    Idiom(takes_two_steps, optimized(sam)),
    Idiom(steps_by_closure, optimized(sam)),
    Idiom(switches_modes, optimized(averaging)),
    Idiom(steps_both, optimized(both)),
    Idiom(steps_in_turn, optimized(both)),
    Idiom(attacks_weights, optimized(plain)),
]

METHODS = [
    updates_by_method,
    computes_loss_inside,
    alternates_methods,
    steps_within_a_generator,
    calls_submodules,
    trains_in_eval_mode,
    trains_a_head,
    sets_gradients,
]


# ---- running them ---------------------------------------------------------------------------


def differences(cases: list[Case], **options: Any) -> dict[tuple[str, str], float | str]:
    """Per loop and strategy the largest difference of a weight from one process that has all data,
    or how the loop has ended."""
    found: dict[tuple[str, str], float | str] = {}
    options = {"observe": 2, "min_bucket_bytes": 1, "timeout_s": 20.0, **options}
    for idiom, strategy in cases:
        plain, optimizer = idiom.build()
        idiom.loop(plain, optimizer, all_batches)
        model, optimizer = idiom.build()
        mine, steps = offbeat.prepare(model, optimizer, strategy, **options)
        key = str(idiom), str(strategy)
        try:
            idiom.loop(mine, steps, lambda t: batch_of(t, rank()))
            pairs = zip(mine.parameters(), plain.parameters(), strict=True)
            found[key] = max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)
        except Exception as error:
            found[key] = f"{type(error).__name__}: {error}"
        mine.close()
    return found


# ---- how forward passes are seen ------------------------------------------------------------

FORWARD_S, BACKWARD_S, OTHER_S = 0.02, 0.04, 0.03


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        time.sleep(BACKWARD_S)
        return gradient


class Sleeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Slow.apply(self.first(x)))

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()


def profile_of_a_sleeper(how: str) -> Profile:
    """What is measured if the forward is a call of a method, or another one."""
    module = Sleeper()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = offbeat.prepare(module, optimizer, observe=4, min_bucket_bytes=1)
    model.train(how != "eval")
    x, parameters = torch.ones(2, 3), list(model.parameters())
    for _ in range(4):
        time.sleep(OTHER_S)
        with torch.no_grad():
            model(x)
        optimizer.zero_grad()
        if how == "method":
            loss = model.loss(x)
        elif how == "parts":
            loss = model.last(Slow.apply(model.first(x))).square().mean()
        else:
            loss = model(x).square().mean()
        if how == "by hand":
            for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                p.grad = gradient
        else:
            loss.backward()
        optimizer.step()
    profile = inspect(model).profile
    model.close()
    return profile


def iterations_begun() -> list[bool]:
    """At each forward of a part of the model, whether an iteration has begun."""
    module, optimizer = agent()
    model, optimizer = offbeat.prepare(module, optimizer, observe=1, min_bucket_bytes=1)
    engine, x, begun = model._session.engine, torch.ones(2, 5, dtype=torch.float64), []
    module.body.register_forward_pre_hook(lambda *_: begun.append(engine.cursor.now is not None))
    for _ in range(3):
        model.generate(x)
        model.describe()
        assert engine.cursor.now is None
        model.get_value(x).sum().backward()
        optimizer.step()
    model.close()
    return begun


def iterations_of_both(strategy: Strategy) -> tuple[int, int]:
    """Iterations, and averages of weights, in as many steps of two optimizers; the first two
    iterations are observed."""
    model, optimizers = build(both)
    options = {"observe": 2, "min_bucket_bytes": 1}
    mine, steps = offbeat.prepare(model, optimizers, strategy, **options)
    averages = 0
    for t in range(STEPS):
        loss_of(mine, batch_of(t, rank())).backward()
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()
        flat = torch.cat([p.detach().reshape(-1) for p in mine.parameters()])
        seen = [torch.empty_like(flat) for _ in range(world_size())]
        dist.all_gather(seen, flat)
        averages += t >= 2 and torch.equal(seen[0], seen[1])
    found = offbeat.iteration(mine), averages
    mine.close()
    return found


def overflow_of_one_optimizer() -> tuple[bool, bool, float]:
    """Whether matrices and vectors change in an iteration in which the gradient of a vector is
    infinite on one rank, and the scale after it."""
    model = nn.Sequential(nn.Linear(5, 6, bias=False), nn.LayerNorm(6), nn.Linear(6, 5, bias=False))
    options = {"observe": 2, "min_bucket_bytes": 1}
    mine, steps = offbeat.prepare(model, both(model), WFBP(fusion="none"), **options)
    scaler, x = torch.amp.GradScaler("cpu", 1024.0), torch.ones(2, 5)
    for t in range(STEPS):
        before = [p.detach().clone() for p in model.parameters()]
        factor = torch.inf if t == STEPS - 1 and rank() == 1 else 1.0
        handle = model[1].weight.register_hook(lambda g, factor=factor: g * factor)
        scaler.scale((mine(x) ** 2).sum()).backward()
        for optimizer in steps:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in steps:
            optimizer.zero_grad()
        handle.remove()
    changed = [not torch.equal(old, p) for old, p in zip(before, model.parameters(), strict=True)]
    mine.close()
    return changed[0] and changed[3], changed[1] or changed[2], scaler.get_scale()


def attributes() -> dict[str, Any]:
    model, optimizer = build(sam)
    optimizer.scale = 1.0
    mine, steps = offbeat.prepare(model, optimizer, observe=1)
    steps.scale = 0.25
    loss_of(mine, batch_of(0, 0)).backward()
    steps.first_step(zero_grad=True)
    found = {
        "isinstance": isinstance(steps, SAM) and isinstance(steps, torch.optim.Optimizer),
        "rho": steps.defaults["rho"],
        "set": optimizer.scale,
        "name": steps.__class__.__name__,
        "state": steps.state is optimizer.state,
    }
    mine.close()
    return found


def hooked_parameters(strategy: str) -> dict[str, int]:
    """Parameters that ever had a hook after their gradient, before there is a plan and with it."""
    model, optimizer = build(plain)
    mine, steps = offbeat.prepare(model, optimizer, strategy, observe=2, min_bucket_bytes=1)
    counts = {}
    for when, iterations in (("observed", 1), ("planned", 4)):
        for i in range(iterations):
            steps.zero_grad()
            loss_of(mine, batch_of(0, i)).backward()
            steps.step()
        hooks = [p._post_accumulate_grad_hooks for p in model.parameters()]
        counts[when] = sum(found is not None for found in hooks)
    mine.close()
    return counts | {"all": len(hooks)}


def model_protocol() -> dict[str, Any]:
    """What scripts that were written for DistributedDataParallel, or for a Sequential, use."""
    model, optimizer = build(plain)
    mine, steps = offbeat.prepare(model, optimizer, observe=2, min_bucket_bytes=1)
    found: dict[str, Any] = {"len": len(mine), "layer": mine[0] is model[0]}
    names = [name for name, _ in (*mine.named_parameters(), *mine.named_buffers())]
    found["names"] = set(names) == set(mine.state_dict())
    gradients = []
    for sync in (False, True):
        mine.require_backward_grad_sync = sync
        loss_of(mine, batch_of(0, rank())).backward()
        gradient = model[0].weight.grad.clone()
        seen = [torch.empty_like(gradient) for _ in range(world_size())]
        dist.all_gather(seen, gradient)
        gradients.append(torch.equal(*seen))
    steps.step()
    found["local"], found["averaged"] = not gradients[0], gradients[1]
    found["refused"] = 0
    for use in (lambda: pickle.dumps(mine), lambda: mine.join, lambda: mine.register_comm_hook):
        try:
            use()
        except (TypeError, AttributeError) as error:
            found["refused"] += "model" in str(error) or "strategy" in str(error)
    mine.close()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world_size(),))
    sharded, whole = fully_shard(nn.Linear(4, 4), mesh=mesh), nn.Linear(4, 4)
    cases: list[tuple[nn.Module, dict[str, Any]]] = [
        (sharded, {}),
        (whole, {"mesh": mesh.mesh}),
        (whole, {"process_group": 1}),
    ]
    for case, options in cases:
        try:
            offbeat.prepare(case, torch.optim.SGD(case.parameters()), **options)
        except ValueError as error:
            found["refused"] += any(word in str(error) for word in options or ["sharded"])
    return found
