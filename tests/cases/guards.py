"""What the ranks do in the tests of the guards."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cases.models import Case, batch, build_model, build_optimizer, loss_of, profile_of
from cases.workers import bits, prepared, rank, snapshot, world_size
from offbeat import LocalSGD, Strategy

CASE = Case("mlp", "nesterov")
WHEN = 2  # the iteration in which something goes wrong on rank 1; replicas are compared in it


# ---- replicas that drift apart --------------------------------------------------------------


def nothing(_model: Any, _optimizer: Any) -> None:
    pass


def rate(_model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 2


def decay(_model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.25


def state(model: Any, optimizer: Any) -> None:
    optimizer.state[model.get_parameter("4.weight")]["momentum_buffer"] *= 1.5


def loaded(model: Any, _optimizer: Any) -> None:
    saved = snapshot(model.state_dict())
    saved["4.bias"][1] += 0.25
    model.load_state_dict(saved)


def rounding(model: Any, optimizer: Any) -> None:
    """As another processor would round; the optimizer's settings too."""
    with torch.no_grad():
        model.get_parameter("4.bias").mul_(1 + 1e-12)
    optimizer.param_groups[0]["lr"] *= 1 + 1e-12


def frozen(model: Any, _optimizer: Any) -> None:
    model.get_parameter("4.bias").requires_grad_(False)


CAUSES: dict[str, Callable[[Any, Any], None]] = {
    f.__name__: f for f in (nothing, rate, decay, state, loaded, rounding, frozen)
}


def diverge(causes: Sequence[str], strategy: Strategy) -> list[tuple[int, str]]:
    """Per cause: the iteration that failed on this rank, and with which words; (-1, "") if none."""
    return [_diverge(cause, strategy) for cause in causes]


def _diverge(cause: str, strategy: Strategy) -> tuple[int, str]:
    model = build_model(CASE)
    optimizer = build_optimizer(CASE, model)
    options = {"profile": profile_of(CASE, world_size()), "compare_every": WHEN}
    with prepared(model, optimizer, strategy, **options) as (model, optimizer):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for t in range(2 * WHEN + 1):
            try:
                iterate(model, optimizer, t, cause)
            except RuntimeError as error:
                return t, str(error)
            if cause == "scheduler" and rank() == 0:
                scheduler.step()
        return -1, ""


def iterate(model: Any, optimizer: Any, t: int, cause: str = "nothing") -> None:
    optimizer.zero_grad()
    loss_of(model, *batch(CASE, rank(), t)).backward()
    if cause == "clipping" and rank() == 1:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    if t == WHEN and rank() == 1 and cause in CAUSES:
        CAUSES[cause](model, optimizer)
    optimizer.step()


def edit(kinds: Sequence[str], strategies: Sequence[Strategy]) -> list[tuple[str, str, list[str]]]:
    """Per strategy and kind of write between a step and the next forward: the warnings."""
    return [(str(s), kind, _edit(kind, s)) for s in strategies for kind in kinds]


def _edit(kind: str, strategy: Strategy) -> list[str]:
    model = build_model(CASE)
    optimizer = build_optimizer(CASE, model)
    weight = model.get_parameter("4.bias")
    options = {"profile": profile_of(CASE, world_size()), "compare_every": 4}
    with (
        warnings.catch_warnings(record=True) as said,
        prepared(model, optimizer, strategy, **options) as (prepared_model, optimizer),
    ):
        warnings.simplefilter("always")
        for t in range(12):
            if t == (1 if kind in ("data", "restored") else 6):  # contents are noted in iteration 1
                prepared_model.flush()
                _write(kind, prepared_model, weight)
            iterate(prepared_model, optimizer, t)
    return [str(w.message) for w in said if "was written between" in str(w.message)]


@torch.no_grad()
def _write(kind: str, model: Any, weight: Tensor) -> None:
    if kind == "all":
        weight.mul_(0.5)
    elif rank() == 1 and kind == "data":
        weight.data.mul_(0.5)
    elif rank() == 1 and kind == "in place":
        weight.mul_(0.5)
    elif rank() == 1 and kind == "restored":
        before = weight.clone()
        weight.zero_()
        weight.copy_(before)
    elif kind == "loaded":  # all ranks, as some strategies need; of rank 1 alone another weight
        saved = snapshot(model.state_dict())
        saved["4.bias"][1] += 0.25 * rank()
        model.load_state_dict(saved)


def prepare_with_other(what: str, strategy: Strategy) -> None:
    """Rank 1's optimizer has other settings, parameters or state when it is prepared."""
    model = build_model(CASE)
    optimizer = build_optimizer(CASE, model)
    for p in (p for p in model.parameters() if p.requires_grad):
        optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    if rank() == 1:
        group = optimizer.param_groups[0]
        if what == "settings":
            group["weight_decay"] = 0.25
        elif what == "members":
            group["params"].reverse()
        else:
            optimizer.state[group["params"][1]]["momentum_buffer"] += 1.0
    with prepared(model, optimizer, strategy, profile=profile_of(CASE, world_size())):
        pass


def consolidate_twice(strategy: Strategy) -> dict[str, Any]:
    """A bias and its momentum differ on rank 1: refused, then repaired, then trained on."""
    model = build_model(CASE)
    optimizer = build_optimizer(CASE, model)
    options = {"profile": profile_of(CASE, world_size()), "compare_every": 0}
    with prepared(model, optimizer, strategy, **options) as (model, optimizer):
        iterate(model, optimizer, 0)
        model.consolidate()
        bias = model.get_parameter("4.bias")
        momentum = optimizer.state[bias]["momentum_buffer"]
        with torch.no_grad():
            bias += rank()
            momentum += 2 * rank()
        before = snapshot([bias, momentum])
        try:
            model.consolidate()
            words = ""
        except RuntimeError as error:
            words = str(error)
        model.consolidate(repair=True)
        after = snapshot([bias, momentum])
        for t in range(2):
            iterate(model, optimizer, t)
        ends = bits(model)  # before consolidate could make them equal
        model.consolidate()
        return {"words": words, "before": before, "after": after, "ends": ends}


# ---- values that are not finite -------------------------------------------------------------


def spoil(strategy: Strategy, policy: str, what: str, iterations: int) -> dict[str, Any]:
    """Rank 1's gradients of one layer, or its weights, become NaN in iteration WHEN."""
    model = build_model(CASE)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    options = {"profile": profile_of(CASE, world_size()), "on_nonfinite": policy}
    with prepared(model, optimizer, strategy, **options) as (model, optimizer):
        weight = model.get_parameter("4.weight")
        now = [-1]
        weight.register_hook(lambda g: g * spoilt(now[0]) if what == "gradient" else g)
        for t in range(iterations):
            now[0] = t
            try:
                optimizer.zero_grad()
                loss_of(model, *batch(CASE, rank(), t)).backward()
                optimizer.step()
            except RuntimeError as error:
                return {"iteration": t, "words": str(error)}
            if what == "weight" and t == WHEN - 1 and rank() == 1:
                with torch.no_grad():
                    model.get_parameter("4.weight")[0, 0] = float("inf")
        return {"weights": snapshot(model.state_dict())}


def consolidate_spoilt(spoilt_ranks: Sequence[int]) -> dict[str, Any]:
    """The error of `consolidate`, where parameters of some ranks are NaN."""
    model = build_model(CASE)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    options = {"profile": profile_of(CASE, world_size())}
    with prepared(model, optimizer, LocalSGD(period=9), **options) as (model, optimizer):
        iterate(model, optimizer, 0)
        if rank() in spoilt_ranks:
            with torch.no_grad():
                model.get_parameter("4.weight").fill_(float("nan"))
        try:
            model.consolidate()
        except RuntimeError as error:
            return {"words": str(error)}
    return {"words": "nothing"}


def spoilt(t: int) -> float:
    return float("nan") if t == WHEN and rank() == 1 else 1.0


def refuse(coupled: type[torch.optim.Optimizer], strategy: Strategy) -> str:
    """What prepare says to an optimizer of this class; trains two iterations if it may."""
    model = build_model(CASE)
    optimizer = coupled([p for p in model.parameters() if p.requires_grad], lr=0.1)
    try:
        with prepared(model, optimizer, strategy, observe=1) as (model, optimizer):
            for t in range(3):
                iterate(model, optimizer, t)
    except ValueError as error:
        return str(error)
    return ""
