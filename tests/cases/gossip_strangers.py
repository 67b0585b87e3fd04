"""Scripts that nobody wrote with gossip in mind; a module of its own, so that processes can import
it. Each takes a model and what trains it and returns nothing."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel

import offbeat
from cases.workers import rank
from offbeat.gossip.strategies import Gossip
from offbeat.testing import inspect

STEPS = 9
Step = Callable[[int], None]


class Net(nn.Module):
    """A layer that nobody uses, and one that is frozen, beside three others."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(5, 6).requires_grad_(False)
        self.first, self.last = nn.Linear(6, 7), nn.Linear(7, 2)
        self.norm, self.unused = nn.BatchNorm1d(7), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(self.frozen(x)))))


@dataclass
class Part:
    """A model, prepared or as it is, and its optimizer."""

    model: Any
    optimizer: Any

    def loss(self, t: int) -> Tensor:
        random = torch.Generator().manual_seed(100 * rank() + t)
        dtype = next(self.model.parameters()).dtype
        x, y = (torch.randn(4, n, generator=random).to(dtype) for n in (5, 2))
        return mse_loss(self.model(x), y)

    def backward(self, t: int) -> None:
        self.optimizer.zero_grad()
        self.loss(t).backward()


def plain(part: Part) -> None:
    for t in range(STEPS):
        part.backward(t)
        part.optimizer.step()


def looks_without_no_grad(part: Part) -> None:
    for t in range(STEPS):
        part.loss(50 + t)  # in training mode
        part.backward(t)
        part.optimizer.step()
        part.model.eval()
        part.loss(70 + t)
        part.model.train()


def skips_steps_on_one_rank(part: Part) -> None:
    for t in range(STEPS):
        part.backward(t)
        if rank() == 0 or t % 3:
            part.optimizer.step()


def learns_faster_on_one_rank(part: Part) -> None:
    for group in part.optimizer.param_groups:
        group["lr"] *= 1 + rank()
    plain(part)


def schedules(part: Part) -> None:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(part.optimizer, 0.1, total_steps=STEPS)
    for t in range(STEPS):
        part.backward(t)
        part.optimizer.step()
        scheduler.step()


def accumulates(part: Part) -> None:
    for t in range(STEPS):
        part.optimizer.zero_grad()
        for micro in range(3):
            (part.loss(10 * t + micro) / 3).backward()
        part.optimizer.step()


def clips(part: Part) -> None:
    for t in range(STEPS):
        part.backward(t)
        nn.utils.clip_grad_norm_(part.model.parameters(), 0.05)
        part.optimizer.step()


def averages_weights(part: Part) -> None:
    average = AveragedModel(part.model)
    for t in range(STEPS):
        part.backward(t)
        part.optimizer.step()
        average.update_parameters(part.model)


def closes_over(part: Part) -> None:
    for t in range(STEPS):

        def closure(t: int = t) -> Tensor:
            part.backward(t)
            return part.loss(t)

        part.optimizer.step(closure)


def loads_what_it_saved(part: Part) -> None:
    plain(part)
    saved = deepcopy((part.model.state_dict(), part.optimizer.state_dict()))
    part.backward(0)
    part.optimizer.step()
    part.model.load_state_dict(saved[0])
    part.optimizer.load_state_dict(saved[1])
    plain(part)


LOOPS = [
    plain, looks_without_no_grad, skips_steps_on_one_rank, learns_faster_on_one_rank, schedules,
    accumulates, clips, averages_weights, closes_over, loads_what_it_saved,
]  # fmt: skip


@dataclass
class Found:
    """By script: what one rank has at the end, before and after `consolidate`, and what it has
    without gossip; its updates are added up."""

    start: dict[str, Tensor] = field(default_factory=dict)
    moved: dict[str, Tensor] = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    alone: dict[str, Tensor] = field(default_factory=dict)
    exchanges: dict[str, int] = field(default_factory=dict)


def made(dtype: torch.dtype = torch.float64) -> Part:
    torch.manual_seed(3)
    model = Net().to(dtype)
    return Part(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


def flat(part: Part) -> Tensor:
    bare = getattr(part.model, "module", part.model)
    return torch.cat([p.detach().flatten().clone() for p in bare.parameters()])


def run(strategy: Gossip, names: list[str], exchanges: int = 0) -> Found:
    """These scripts, one after the other; then more of the plain one until there were exchanges."""
    found, known = Found(), {loop.__name__: loop for loop in LOOPS}
    for name in names:
        part = made()
        known[name](part)
        found.alone[name] = flat(part)
        part = made()
        found.start[name] = flat(part)
        found.moved[name] = torch.zeros_like(found.start[name])
        count_updates(part, found.moved[name])
        part = Part(*offbeat.prepare(part.model, part.optimizer, strategy, timeout_s=20.0))
        known[name](part)
        seen = inspect(part.model)
        while sum(seen.exchanges.values()) < exchanges:
            plain(part)
        found.before[name] = flat(part)
        part.model.consolidate()
        found.after[name] = flat(part)
        found.exchanges[name] = sum(seen.exchanges.values())
        part.model.close()
    return found


def count_updates(part: Part, total: Tensor) -> None:
    """Add up what the optimizer does to the parameters."""
    before: list[Tensor] = []
    bare = Part(part.model, None)
    part.optimizer.register_step_pre_hook(lambda *_: before.append(flat(bare)))
    part.optimizer.register_step_post_hook(lambda *_: total.add_(flat(bare) - before.pop()))


# ---- two models, and scripts that cannot be ------------------------------------------------------


def adversaries(strategy: Gossip) -> tuple[Tensor, ...]:
    """A generator and a discriminator, prepared apart: both, after `consolidate`; their updates."""
    torch.manual_seed(0)
    nets = nn.Linear(3, 5).double(), nn.Linear(5, 1).double()
    bare = [Part(net, torch.optim.Adam(net.parameters(), lr=0.01)) for net in nets]
    starts = [flat(part) for part in bare]
    totals = [torch.zeros_like(start) for start in starts]
    for part, total in zip(bare, totals, strict=True):
        count_updates(part, total)
    made = [offbeat.prepare(p.model, p.optimizer, strategy, timeout_s=20.0) for p in bare]
    (maker, of_maker), (judge, of_judge) = made
    counts = [inspect(model) for model, _ in made]
    t = 0
    while t < STEPS or not all(seen.exchanges for seen in counts):
        t += 1
        random = torch.Generator().manual_seed(100 * rank() + t)
        true = torch.randn(4, 5, generator=random, dtype=torch.float64)
        noise = torch.randn(4, 3, generator=random, dtype=torch.float64)
        of_judge.zero_grad()
        (judge(maker(noise).detach()).mean() - judge(true).mean()).backward()
        of_judge.step()
        of_maker.zero_grad()
        (-judge(maker(noise)).mean()).backward()
        of_maker.step()
    for model, _ in made:
        model.consolidate()
    after = [flat(Part(model, None)) for model, _ in made]
    for model, _ in reversed(made):
        model.close()
    return torch.cat(starts), torch.cat(totals), torch.cat(after)


HOW = ("second optimizer", "clamp", "vector", "hook")  # a script writes to the weights itself


def changes_weights(strategy: Gossip) -> list[str]:
    """The words of the error, for each way."""
    return [_changed(strategy, how) for how in HOW]


def _changed(strategy: Gossip, how: str) -> str:
    part = made()
    of_last = torch.optim.SGD(part.model.last.parameters(), lr=0.1)
    if how == "hook":

        def clamp(*_: Any) -> None:
            with torch.no_grad():
                for p in part.model.parameters():
                    p.clamp_(-0.1, 0.1)

        part.optimizer.register_step_post_hook(clamp)
    prepared = Part(*offbeat.prepare(part.model, part.optimizer, strategy, timeout_s=20.0))
    try:
        for t in range(STEPS):
            prepared.backward(t)
            prepared.optimizer.step()
            if how == "second optimizer":
                of_last.step()
            elif how == "clamp":
                with torch.no_grad():
                    for p in prepared.model.parameters():
                        p.clamp_(-0.1, 0.1)
            elif how == "vector":
                vector = nn.utils.parameters_to_vector(prepared.model.parameters())
                nn.utils.vector_to_parameters(vector.clamp(-0.1, 0.1), prepared.model.parameters())
        prepared.model.consolidate()
    except RuntimeError as error:
        return str(error)
    finally:
        prepared.model.close()
    return ""


def fails_early(strategy: Gossip) -> Tensor:
    """Rank 1 ends by an exception in its loop; what the others have at the end."""
    part = made()
    part = Part(*offbeat.prepare(part.model, part.optimizer, strategy, timeout_s=20.0))
    seen = inspect(part.model)
    try:
        while not seen.exchanges:
            plain(part)
        if rank() == 1:
            raise ZeroDivisionError
        part.model.consolidate()
    except ZeroDivisionError:
        return torch.zeros(0)
    finally:
        part.model.close()
    return flat(part)


def of_half_precision(strategy: Gossip) -> tuple[Tensor, Tensor, Tensor]:
    """A bf16 model: where it began, how it moved, and what it has after `consolidate`."""
    part = made(torch.bfloat16)
    start = flat(part).double()
    total = torch.zeros_like(start)
    count_updates(part, total)
    part = Part(*offbeat.prepare(part.model, part.optimizer, strategy, timeout_s=20.0))
    seen = inspect(part.model)
    t = 0
    while t < STEPS or sum(seen.exchanges.values()) < 3:
        plain(part)
        t += STEPS
    part.model.consolidate()
    after = flat(part)
    part.model.close()
    return start, total, after
