"""Small models, optimizers, batches and profiles: the same in every rank and in the references."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, StepLR
from torch.utils.checkpoint import checkpoint

from offbeat import Profile
from offbeat.profile import Bucket, Link

ROWS = 6


@dataclass(frozen=True)
class Case:
    """Names of a model, an optimizer and a scheduler, and the dtype of all floats."""

    model: str = "mlp"
    optimizer: str = "sgd"
    scheduler: str = "none"
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        return f"{self.model}-{self.optimizer}-{self.scheduler}"


@dataclass(frozen=True)
class Loop:
    """What a user's loop does beside the usual.

    `clear`: how gradients are cleared (by the optimizer, the model, set to None, or never);
    `micro`: batches per step, all but the last in `no_sync()` unless `sync`; `clip`: largest norm;
    `scale`: of a GradScaler; `overflow` and `idle`: (rank, iteration) in which a loss is infinite,
    or there is no backward at all;
    `dropped` and `twice`: iterations in which a step is left out, and gradients are cleared or
    added to. `skipped`: (rank, iteration) that ends with `skip_step()`, in place of backward too if
    `early`. `hook`: largest norm, in a hook before the step. Clipping, scaling and what `alters`
    names begin in iteration `since`.
    """

    clear: str = "optimizer"
    micro: int = 1
    sync: bool = False
    closure: bool = False
    evaluate: bool = False
    autocast: bool = False
    clip: float | None = None
    scale: float | None = None
    overflow: frozenset[tuple[int, int]] = frozenset()
    idle: frozenset[tuple[int, int]] = frozenset()
    dropped: frozenset[int] = frozenset()
    twice: frozenset[int] = frozenset()
    skipped: frozenset[tuple[int, int]] = frozenset()
    early: bool = False
    since: int = 0
    alters: str = ""
    hook: float | None = None

    def alter(self, model: nn.Module, optimizer: torch.optim.Optimizer, t: int) -> None:
        """Between backward and step: other settings, other weights, or other gradients."""
        if t < self.since:
            return
        if self.alters in ("lr", "momentum", "weight_decay"):
            for group in optimizer.param_groups:
                group[self.alters] = (0.03, 0.02, 0.04)[t % 3]
        for p in model.parameters():
            if self.alters == "weights":
                with torch.no_grad():
                    p.mul_(0.9)
            elif self.alters == "data":
                p.data.clamp_(-0.2, 0.2)
            elif self.alters == "gradients" and p.grad is not None:
                p.grad.data.mul_(0.5)  # changes no version counter
            elif self.alters == "memory" and p.grad is not None:
                p.grad.data = p.grad.data * 0.5


USUAL = Loop()


def mlp() -> nn.Module:
    """Four buckets and a frozen layer."""
    frozen = nn.Linear(5, 6).requires_grad_(False)
    return nn.Sequential(
        frozen, nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 7), nn.Tanh(),
        nn.Linear(7, 3),
    )  # fmt: skip


def conv() -> nn.Module:
    """Five buckets, two of them with running statistics, and a frozen layer.

    No bias before a normalization: its gradient is rounding noise, which Adam blows up.
    """
    frozen = nn.Conv2d(2, 2, 1).requires_grad_(False)
    return nn.Sequential(
        frozen, nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.Tanh(),
        nn.Conv2d(4, 3, 3, bias=False), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(),
        nn.Linear(12, 3),
    )  # fmt: skip


def deep() -> nn.Module:
    """Sixteen buckets."""
    layers = [layer for _ in range(15) for layer in (nn.Linear(5, 5), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(5, 3))


class Backwards(nn.Module):
    """Registered in the reverse of the order in which it runs; a wide last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(9, 3)
        self.middle = nn.Linear(8, 9)
        self.first = nn.Linear(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class Tied(nn.Module):
    """An embedding and a head that share one weight, as GPT-2's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(tokens))))


class Branches(nn.Module):
    """Two branches; which one runs depends on the sign of the first input."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 6)
        self.positive = nn.Linear(6, 6)
        self.negative = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.positive if x[0, 0] > 0 else self.negative
        return self.head(torch.tanh(branch(torch.tanh(self.trunk(x)))))


class Checkpointed(Backwards):
    """Every layer's activations are computed again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.middle, self.head):
            x = checkpoint(layer, torch.tanh(x), use_reentrant=False)
        return x


class Compiled(Backwards):
    """Every layer is compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        for name, layer in list(self.named_children()):
            setattr(self, name, torch.compile(layer, backend="aot_eager"))


class Mixed(nn.Module):
    """A bfloat16 layer between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.middle = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(torch.tanh(self.first(x)).to(self.middle.weight.dtype))
        return self.last(torch.tanh(x).to(self.last.weight.dtype))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp, "conv": conv, "deep": deep, "backwards": Backwards, "tied": Tied,
    "branches": Branches, "checkpointed": Checkpointed, "compiled": Compiled, "mixed": Mixed,
}  # fmt: skip


STATE_COPIES = {"sgd": 0, "nesterov": 1, "groups": 1, "adam": 2, "adamw": 2}


def build_model(case: Case, seed: int = 0) -> nn.Module:
    # `torch.manual_seed` also formats a stack for each kind of device, which takes milliseconds.
    torch.default_generator.manual_seed(seed)
    model = MODELS[case.model]().to(case.dtype)
    if isinstance(model, Mixed):
        model.middle.to(torch.bfloat16)
    return model


def build_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    halves = [
        {"params": parameters[::2], "lr": 0.02},
        {"params": parameters[1::2], "lr": 0.01, "weight_decay": 0.02},
    ]
    # foreach: what CUDA uses by default, so that both implementations are seen
    return {
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.1),
        "nesterov": lambda: torch.optim.SGD(
            parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01
        ),
        "adam": lambda: torch.optim.Adam(parameters, lr=0.01, foreach=True),
        "adamw": lambda: torch.optim.AdamW(halves, lr=0.01, weight_decay=0.1),
        "groups": lambda: torch.optim.SGD(halves, lr=0.05, momentum=0.8, dampening=0.1),
    }[case.optimizer]()


def build_scheduler(case: Case, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    if case.scheduler == "step":
        return StepLR(optimizer, step_size=3, gamma=0.7)
    return CosineAnnealingLR(optimizer, T_max=10) if case.scheduler == "cosine" else None


def batch(case: Case, rank: int, iteration: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one rank in one iteration."""
    generator = torch.Generator().manual_seed(1000 * iteration + rank + 1)
    how: dict[str, Any] = {"generator": generator, "device": "cpu"}  # whatever the default device
    if case.model == "tied":
        tokens = torch.randint(11, (2, ROWS + 1), **how)
        return tokens[0, :-1], torch.nn.functional.one_hot(tokens[1, :-1], 11).to(case.dtype)
    shape = (ROWS, 2, 4, 4) if case.model == "conv" else (ROWS, 5)
    x = torch.randn(shape, dtype=torch.float64, **how)
    y = torch.randn((ROWS, 3), dtype=torch.float64, **how)
    return x.to(case.dtype), y.to(case.dtype)


def loss_of(model: nn.Module, x: Tensor, y: Tensor, loop: Loop = USUAL) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=loop.autocast):
        return torch.nn.functional.mse_loss(model(x), y)


def profile_of(case: Case, world_size: int, links: Sequence[str] = ("net",)) -> Profile:
    """One bucket per module with trainable parameters, last module first, with made-up times:
    communication costs about as much as backward, so that no planner has an easy choice."""
    return _profile_of(case, world_size, tuple(links))


@cache
def _profile_of(case: Case, world_size: int, links: tuple[str, ...]) -> Profile:
    buckets = []
    with torch.random.fork_rng(devices=()):
        model = build_model(case)
    for i, (name, module) in enumerate(reversed(list(model.named_modules()))):
        mine = {
            f"{name}.{n}".lstrip("."): p
            for n, p in module.named_parameters(recurse=False)
            if p.requires_grad
        }
        floats = {f"{name}.{n}": b for n, b in module.named_buffers(recurse=False) if b.dim()}
        if mine:
            size = sum(p.nbytes for p in mine.values())
            buckets.append(
                Bucket(
                    name=name,
                    forward_s=0.5,
                    backward_s=0.6 + 0.2 * (i % 3),
                    size_bytes=size,
                    buffer_bytes=sum(b.nbytes for b in floats.values()),
                    state_bytes=STATE_COPIES[case.optimizer] * size,
                    tensors=(*mine, *floats),
                )
            )
    total = sum(bucket.size_bytes for bucket in buckets)
    return Profile(
        buckets=tuple(buckets),
        links=tuple(Link(name, 0.1, total / (1.5 * len(buckets))) for name in links),
        world_size=world_size,
        update_s=0.1,
        broadcast_bytes=sum(b.nbytes for b in model.buffers()),
    )
