"""What scripts do, one function each, written as for one GPU.

Weights and what a script notes are compared afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from cases.matrix.job import ROWS, Job

Script = Callable[[Job], None]


@dataclass(frozen=True)
class Feature:
    """`yardstick`: torch's DDP trains so, and what is left is compared with it. `tolerance`: of
    what is left. `find_unused`: DDP must be told that some parameters have no gradient."""

    title: str
    script: Script
    yardstick: bool = True
    find_unused: bool = False
    tolerance: float = 1e-12
    not_for: tuple[str, ...] = ()


FEATURES: dict[str, Feature] = {}


def feature(title: str, **options: Any) -> Callable[[Script], Script]:
    def registered(script: Script) -> Script:
        FEATURES[script.__name__] = Feature(title, script, **options)
        return script

    return registered


# ---- models and optimizers ------------------------------------------------------------------


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().double()


def mlp() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(
            nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)
        )
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.05, momentum=0.9, weight_decay=0.01)


def nothing(_: int) -> None:
    pass


def usual(
    job: Job,
    model: Any,
    optimizer: Any,
    before: Callable[[int], Any] = nothing,
    after: Callable[[int], Any] = nothing,
) -> None:
    """The loop of every tutorial; `before` comes between backward and step."""
    for t in range(job.steps):
        optimizer.zero_grad()
        loss = job.loss(model, t)
        loss.backward()
        before(t)
        optimizer.step()
        after(t)


def trains(job: Job, module: nn.Module) -> tuple[Any, Any]:
    """The usual loop on a model of its own."""
    model, optimizer = job.prepare(module, sgd(module))
    usual(job, model, optimizer)
    return model, optimizer


def with_optimizer(job: Job, build: Callable[[Any], torch.optim.Optimizer]) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, build(module.parameters()))
    usual(job, model, optimizer)


# ---- gradients ------------------------------------------------------------------------------


@feature("nothing special")
def plain(job: Job) -> None:
    trains(job, mlp())


@feature("`clip_grad_norm_`")
def clip_norm(job: Job) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, sgd(module))
    usual(job, model, optimizer, before=lambda _: clip_grad_norm_(model.parameters(), 0.1))


@feature("`clip_grad_value_`")
def clip_value(job: Job) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, sgd(module))
    usual(job, model, optimizer, before=lambda _: clip_grad_value_(model.parameters(), 0.05))


@feature("`clip_grad_norm_` from the third iteration on")
def clip_later(job: Job) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, sgd(module))

    def clip(t: int) -> None:
        if t >= 2:
            clip_grad_norm_(model.parameters(), 0.1)

    usual(job, model, optimizer, before=clip)


@feature("gradient norm logged")
def gradients_logged(job: Job) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, sgd(module))

    def log(_: int) -> None:
        job.note(*(p.grad.norm() for p in module.parameters() if p.grad is not None))

    usual(job, model, optimizer, before=log)


@feature("gradient norm logged in the fourth iteration")
def gradients_logged_later(job: Job) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, sgd(module))

    def log(t: int) -> None:
        if t == 3:
            job.note(*(p.grad.norm() for p in module.parameters() if p.grad is not None))

    usual(job, model, optimizer, before=log)


@feature("`zero_grad(set_to_none=False)`")
def zeroed_in_place(job: Job) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, sgd(module))
    for t in range(job.steps):
        optimizer.zero_grad(set_to_none=False)
        job.loss(model, t).backward()
        optimizer.step()


@feature("`p.grad = None`")
def gradients_taken(job: Job) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, sgd(module))
    for t in range(job.steps):
        for p in module.parameters():
            p.grad = None
        job.loss(model, t).backward()
        optimizer.step()


@feature("`backward(create_graph=True)`", yardstick=False)
def create_graph(job: Job) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, sgd(module))
    for t in range(job.steps):
        optimizer.zero_grad()
        job.loss(model, t).backward(create_graph=True)
        optimizer.step()


@feature("gradient penalty (`autograd.grad(create_graph=True)`)")
def gradient_penalty(job: Job) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, sgd(module))
    for t in range(job.steps):
        optimizer.zero_grad()
        x, y = job.batch(t)
        x = x.clone().requires_grad_()
        output = model(x)
        [slope] = torch.autograd.grad(output.sum(), x, create_graph=True)
        (nn.functional.mse_loss(output, y) + slope.square().mean()).backward()
        optimizer.step()


# ---- mixed precision ------------------------------------------------------------------------


def scaled(job: Job, clip: float | None = None, overflow: bool = False) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, sgd(module))
    scaler = torch.amp.GradScaler("cpu", 1024.0)
    for t in range(job.steps):
        optimizer.zero_grad()
        loss = job.loss(model, t)
        if overflow and t == 2 and job.rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()


@feature("GradScaler")
def scaler(job: Job) -> None:
    scaled(job)


@feature("GradScaler, `unscale_`, `clip_grad_norm_`")
def scaler_and_clip(job: Job) -> None:
    scaled(job, clip=0.1)


@feature("GradScaler, overflow on one rank")
def scaler_overflow(job: Job) -> None:
    scaled(job, overflow=True)


@feature("bf16 autocast", tolerance=1e-6)
def autocast(job: Job) -> None:
    module = mlp().float()
    model, optimizer = job.prepare(module, sgd(module))
    for t in range(job.steps):
        optimizer.zero_grad()
        x, y = job.batch(t)
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(model(x.float()), y.float())
        loss.backward()
        optimizer.step()


# ---- several backwards, and none ------------------------------------------------------------


@feature("accumulation under `no_sync`")
def accumulation(job: Job) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, sgd(module))
    for t in range(job.steps):
        optimizer.zero_grad()
        with model.no_sync():
            (job.loss(model, 2 * t) / 2).backward()
        (job.loss(model, 2 * t + 1) / 2).backward()
        optimizer.step()


def accumulated(job: Job, clip: float | None = None) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, sgd(module))
    for t in range(2 * job.steps - 1):
        (job.loss(model, t) / 2).backward()
        if t % 2 or t == 2 * job.steps - 2:  # the last step is of one batch
            if clip is not None:
                clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()


@feature("accumulation without `no_sync`, the last step sooner")
def accumulation_without_no_sync(job: Job) -> None:
    accumulated(job)


@feature("accumulation without `no_sync`, `clip_grad_norm_`")
def accumulation_and_clip(job: Job) -> None:
    accumulated(job, clip=0.1)


@feature("two backwards of one forward")
def two_losses(job: Job) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, sgd(module))
    for t in range(job.steps):
        optimizer.zero_grad()
        x, y = job.batch(t)
        output = model(x)
        nn.functional.mse_loss(output, y).backward(retain_graph=True)
        output.square().mean().backward()
        optimizer.step()


@feature("a step left out, `zero_grad` on all ranks")
def dropped(job: Job) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, sgd(module))
    for t in range(job.steps):
        job.loss(model, t).backward()
        if t != 2:
            optimizer.step()
        optimizer.zero_grad()


@feature("`skip_step()` on all ranks")
def skipped(job: Job) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, sgd(module))
    for t in range(job.steps):
        optimizer.zero_grad()
        job.loss(model, t).backward()
        if t == 2:
            job.skip(model, optimizer)
        else:
            optimizer.step()


@feature("`skip_step()` in place of backward, on all ranks")
def skipped_early(job: Job) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, sgd(module))
    for t in range(job.steps):
        optimizer.zero_grad()
        loss = job.loss(model, t)
        if t == 2:
            job.skip(model, optimizer)
            continue
        loss.backward()
        optimizer.step()


@feature("`skip_step()` in place of backward, on one rank", yardstick=False, not_for=("DDP",))
def skipped_alone(job: Job) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, sgd(module))
    for t in range(job.steps):
        optimizer.zero_grad()
        loss = job.loss(model, t)
        if t == 2 and job.rank == 1:
            model.skip_step()
            continue
        loss.backward()
        optimizer.step()


@feature("a rank without a batch steps all the same", yardstick=False, not_for=("DDP",))
def idle(job: Job) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, sgd(module))
    for t in range(job.steps):
        optimizer.zero_grad()
        if t != 2 or job.rank == 0:
            job.loss(model, t).backward()
        optimizer.step()


@feature("`step(closure)`")
def closure(job: Job) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, sgd(module))
    for t in range(job.steps):

        def again(t: int = t) -> Tensor:
            optimizer.zero_grad()
            loss = job.loss(model, t)
            loss.backward()
            return loss

        job.note(optimizer.step(again))


@feature("a batch of another size on one rank")
def uneven(job: Job) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, sgd(module))
    for t in range(job.steps):
        optimizer.zero_grad()
        job.loss(model, t, rows=1 if job.rank and t == job.steps - 1 else ROWS).backward()
        optimizer.step()


@feature("NaN loss on one rank")
def nan(job: Job) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, sgd(module))
    for t in range(job.steps):
        optimizer.zero_grad()
        (job.loss(model, t) * (float("nan") if (job.rank, t) == (1, 2) else 1)).backward()
        optimizer.step()


# ---- models ---------------------------------------------------------------------------------


@feature("frozen parameters")
def frozen(job: Job) -> None:
    module = mlp()
    module[0].requires_grad_(False)  # type: ignore[index]
    trains(job, module)


class Adapted(nn.Module):
    """A frozen layer beside a low-rank one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 6).requires_grad_(False)
        self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x) + self.up(self.down(x))))


@feature("LoRA")
def lora(job: Job) -> None:
    trains(job, seeded(Adapted))


class Tied(nn.Module):
    """Reads tokens and predicts them with one weight."""

    def __init__(self, sparse: bool = False, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5, sparse=sparse)
        self.middle = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[:, 0].abs() * 10).long() % 7
        return self.head(torch.tanh(self.middle(self.embedding(tokens))))[:, :3]


@feature("tied weights")
def tied(job: Job) -> None:
    trains(job, seeded(Tied))


@feature("sparse embeddings")
def sparse(job: Job) -> None:
    module = seeded(lambda: Tied(sparse=True, tied=False))
    model, optimizer = job.prepare(module, torch.optim.SGD(module.parameters(), lr=0.05))
    usual(job, model, optimizer)


@feature("sparse embeddings under `SparseAdam`")
def sparse_adam(job: Job) -> None:
    module = seeded(lambda: Tied(sparse=True, tied=False))
    for part in (module.middle, module.head):
        part.requires_grad_(False)
    model, optimizer = job.prepare(module, torch.optim.SparseAdam([module.embedding.weight]))
    usual(job, model, optimizer)


@feature("BatchNorm")
def batch_norm(job: Job) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))

    trains(job, seeded(build))


@feature("dropout")
def dropout(job: Job) -> None:
    module = seeded(lambda: nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.3), nn.Linear(6, 3)))
    torch.manual_seed(job.rank)  # once, so that whatever else draws would be seen
    model, optimizer = job.prepare(module, sgd(module))
    for t in range(job.steps):
        optimizer.zero_grad()
        job.loss(model, t).backward()
        optimizer.step()


class Recurrent(nn.Module):
    """An LSTM over the inputs, one number a step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.unsqueeze(2))[0][:, -1])


@feature("LSTM")
def lstm(job: Job) -> None:
    trains(job, seeded(Recurrent))


class Branches(nn.Module):
    """One of two branches runs, by the number of a call and the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(5, 6), nn.Linear(6, 3)
        self.branches = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.which = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.branches[self.which](torch.tanh(self.trunk(x)))))


def branching(job: Job, which: Callable[[int], int]) -> None:
    module: Any = seeded(Branches)
    model, optimizer = job.prepare(module, sgd(module))
    for t in range(job.steps):
        module.which = which(t)
        optimizer.zero_grad()
        job.loss(model, t).backward()
        optimizer.step()


@feature("parameters that no rank uses", find_unused=True)
def unused(job: Job) -> None:
    branching(job, lambda t: t % 2)


@feature("parameters that one rank does not use", find_unused=True)
def unused_by_one(job: Job) -> None:
    branching(job, lambda t: (t + job.rank) % 2)


class Checkpointed(nn.Sequential):
    """Computes activations again in backward."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@feature("activation checkpointing")
def checkpointing(job: Job) -> None:
    trains(job, seeded(lambda: Checkpointed(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))))


@feature("reentrant activation checkpointing")
def reentrant(job: Job) -> None:
    module = seeded(lambda: Checkpointed(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)))
    module.reentrant = True  # type: ignore[assignment]
    model, optimizer = job.prepare(module, sgd(module))
    for t in range(job.steps):
        optimizer.zero_grad()
        x, y = job.batch(t)
        nn.functional.mse_loss(model(x.clone().requires_grad_()), y).backward()
        optimizer.step()


@feature("a compiled block")
def compiled(job: Job) -> None:
    module = mlp()
    module[0].compile(backend="eager")  # type: ignore[index]
    trains(job, module)


@feature("GAN, two prepared models")
def gan(job: Job) -> None:
    generator = mlp()
    critic = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    g, g_optimizer = job.prepare(generator, sgd(generator))
    d, d_optimizer = job.prepare(critic, sgd(critic))
    for t in range(job.steps):
        x, y = job.batch(t)
        d_optimizer.zero_grad()
        with torch.no_grad():
            made = g(x)
        (d(torch.cat([made, y]))[:ROWS].mean() - d(y).mean()).backward()
        d_optimizer.step()
        g_optimizer.zero_grad()
        d(g(x)).mean().neg().backward()
        g_optimizer.step()


# ---- optimizers -----------------------------------------------------------------------------


@feature("AdamW")
def adamw(job: Job) -> None:
    with_optimizer(job, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, amsgrad=True))


@feature("RMSprop")
def rmsprop(job: Job) -> None:
    with_optimizer(job, lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5))


@feature("LBFGS", yardstick=False)
def lbfgs(job: Job) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, torch.optim.LBFGS(module.parameters()))
    optimizer.step(lambda: job.loss(model, 0))


@feature("several param groups")
def groups(job: Job) -> None:
    module: Any = mlp()
    first = {"params": list(module[0].parameters()), "lr": 0.01, "weight_decay": 0.1}
    rest = {"params": list(module[2:].parameters())}
    model, optimizer = job.prepare(module, torch.optim.SGD([first, rest], lr=0.05, momentum=0.9))
    usual(job, model, optimizer)


@feature("an LR scheduler per iteration")
def scheduled(job: Job) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, sgd(module))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    usual(job, model, optimizer, after=lambda _: scheduler.step())


@feature("another learning rate on one rank", yardstick=False)
def rate_of_one(job: Job) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, torch.optim.SGD(module.parameters(), 0.1 + job.rank))
    usual(job, model, optimizer)


@feature("step hooks of the optimizer")
def step_hooks(job: Job) -> None:
    module = mlp()
    inner = sgd(module)
    model, optimizer = job.prepare(module, inner)

    def decay(*_: Any) -> None:
        with torch.no_grad():
            for group in inner.param_groups:
                for p in group["params"]:
                    p *= 0.99

    inner.register_step_post_hook(decay)
    usual(job, model, optimizer)


# ---- looking at the model, and changing it --------------------------------------------------


def evaluated(job: Job, model: Any) -> None:
    model.eval()
    with torch.no_grad():
        job.note(job.loss(model, 100))
    model.train()


@feature("evaluation between iterations")
def evaluation(job: Job) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, sgd(module))
    usual(job, model, optimizer, after=lambda _: evaluated(job, model))


@feature("evaluation without `no_grad`")
def evaluation_with_grad(job: Job) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, sgd(module))
    usual(job, model, optimizer, after=lambda t: job.note(job.loss(model, 100 + t)))


@feature("evaluation of the bare module on rank 0 alone")
def evaluation_on_rank_0(job: Job) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, sgd(module))

    def evaluate(_: int) -> None:
        if job.rank == 0:
            evaluated(job, model.module)

    usual(job, model, optimizer, after=evaluate)


@feature("weights clamped after the step")
def clamped(job: Job) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, sgd(module))

    def clamp(_: int) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.2, 0.2)

    usual(job, model, optimizer, after=clamp)


@feature("weights changed on one rank")
def changed_on_one(job: Job) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, sgd(module))

    def change(t: int) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * (job.rank == 1 and t == 1))

    usual(job, model, optimizer, after=change)


@feature("EMA of the weights (`AveragedModel`)")
def ema(job: Job) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, sgd(module))
    mean = AveragedModel(module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))

    def update(_: int) -> None:
        mean.update_parameters(model.module)
        job.note(*(p.sum() for p in mean.parameters()))

    usual(job, model, optimizer, after=update)


@feature("a deep copy in the middle")
def copied(job: Job) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, sgd(module))

    def look(t: int) -> None:
        if t == 2:
            job.note(*(p.sum() for p in copy.deepcopy(model.module).parameters()))

    usual(job, model, optimizer, after=look)


@feature("a checkpoint saved and loaded in the middle")
def loaded(job: Job) -> None:
    module = mlp()
    model, optimizer = job.prepare(module, sgd(module))
    kept: dict[int, Any] = {}

    def travel(t: int) -> None:
        if t == 1:
            kept[0] = copy.deepcopy((model.module.state_dict(), optimizer.state_dict()))
        if t == 3:
            model.module.load_state_dict(kept[0][0])
            optimizer.load_state_dict(kept[0][1])

    usual(job, model, optimizer, after=travel)


@feature("parameters frozen in the middle", find_unused=True)
def frozen_later(job: Job) -> None:
    module: Any = mlp()
    model, optimizer = job.prepare(module, sgd(module))
    usual(job, model, optimizer, after=lambda _: module[0].requires_grad_(False))


@feature("parameters unfrozen in the middle")
def unfrozen_later(job: Job) -> None:
    module: Any = mlp()
    module[0].requires_grad_(False)
    model, optimizer = job.prepare(module, sgd(module))
    usual(job, model, optimizer, after=lambda _: module[0].requires_grad_(True))


@feature("a layer added in the middle")
def added_later(job: Job) -> None:
    module: Any = mlp()
    model, optimizer = job.prepare(module, sgd(module))

    def add(t: int) -> None:
        if t == 1:
            module.append(nn.Linear(3, 3).double())

    usual(job, model, optimizer, after=add)
