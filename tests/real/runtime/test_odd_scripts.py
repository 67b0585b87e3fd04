"""Scripts that few users write train as without offbeat, or are refused with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from cases.batches import Batch, Call
from cases.workers import prepared
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils import prune

from offbeat.profile import Bucket, Link, Profile

# torch warns of itself when it first computes a derivative in forward mode.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

Wrap = Callable[[nn.Module, Any], Any]
Script = Callable[[Wrap], nn.Module]
LAYERS = ("4", "2", "0")  # of `net`, the last one first
BUCKETS = [Bucket(name, 0.5, 0.6, size) for name, size in zip(LAYERS, (28, 168, 48), strict=True)]
LINK = Link("net", latency_s=0.01, bytes_per_s=100.0)
PROFILE = Profile(tuple(BUCKETS), (LINK,), world_size=1, update_s=0.1, other_s=0.1)
ITERATIONS = 8  # two of them are observed, unless a profile is given
ONE = Batch(1)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))


def inputs(t: int) -> Tensor:
    return torch.randn(4, 1, generator=torch.Generator().manual_seed(t))


def trained(script: Script, strategy: str | None, observed: bool = False) -> list[Tensor]:
    """Weights after a script, with or without offbeat."""
    torch.manual_seed(0)
    with _wrapping(strategy, {"observe": 2} if observed else {"profile": PROFILE}) as wrap:
        return [p.detach().clone() for p in script(wrap).parameters()]


@contextmanager
def _wrapping(strategy: str | None, options: dict[str, Any]) -> Iterator[Wrap]:
    """What a script calls instead of `prepare`; the last prepared model is closed at the end."""
    opened: list[Any] = []

    def wrap(model: nn.Module, optimizer: Any) -> Any:
        if strategy is None:
            return model, optimizer
        opened.append(prepared(model, optimizer, strategy, min_bucket_bytes=1, **options))
        return opened[0].__enter__()

    yield wrap
    for one in opened:
        one.__exit__(None, None, None)


# ---- transforms of torch.func ---------------------------------------------------------------

DERIVATIVES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "gradients of samples": lambda f, x: vmap(grad(lambda t: f(t).squeeze()))(x),
    "forward mode": lambda f, x: jvp(f, (x,), (torch.ones_like(x),))[1],
    "other weights": lambda f, x: functional_call(
        f, {name: 2.0 * p for name, p in f.named_parameters()}, (x,)
    ),
    "of the bare module": lambda f, x: vmap(grad(lambda t: bare(f)(t).squeeze()))(x),
}


def bare(model: nn.Module) -> Any:
    return model if isinstance(model, nn.Sequential) else model.module


def differential_equation(kind: str, wrap: Wrap) -> nn.Module:
    """The loss holds derivatives of the model by its inputs."""
    module = net()
    model, optimizer = wrap(module, torch.optim.SGD(module.parameters(), 0.05, momentum=0.9))
    for t in range(ITERATIONS):
        optimizer.zero_grad()
        slope = DERIVATIVES[kind](model, inputs(t))
        (slope + model(inputs(t))).square().mean().backward()
        optimizer.step()
    return module


# ---- parameters that change -----------------------------------------------------------------

Moments = tuple[str, int, int]  # place in the iteration, and iterations of freezing and thawing


def freezing(moments: Moments, parts: int, wrap: Wrap) -> nn.Module:
    """Some layers are frozen for some iterations; `parts` optimizers step the model."""
    module = net()
    rest = [*module[2].parameters(), *module[4].parameters()]
    given: Any = [
        torch.optim.AdamW(module[0].parameters(), 1e-2, weight_decay=0.1),
        torch.optim.SGD(rest, 0.1, momentum=0.9),
    ]
    if parts == 1:
        given = torch.optim.AdamW(module.parameters(), 1e-2, weight_decay=0.1)
    model, optimizers = wrap(module, given)
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]

    def change(place: str, t: int) -> None:
        if place == moments[0] and t in moments[1:]:
            module[0].requires_grad_(t == moments[2])

    for t in range(ITERATIONS):
        change("before forward", t)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(inputs(t)).square().mean()
        change("before backward", t)
        loss.backward()
        change("before the step", t)
        for optimizer in optimizers:
            optimizer.step()
    return module


def changing(change: Callable[[nn.Sequential, Any], None], when: int, wrap: Wrap) -> nn.Module:
    module = net()
    inner = torch.optim.SGD([*module[0].parameters(), *module[4].parameters()], 0.1)
    model, optimizer = wrap(module, inner)
    for t in range(ITERATIONS):
        if t == when:
            change(module, inner)
        optimizer.zero_grad()
        model(inputs(t)).square().mean().backward()
        optimizer.step()
    return module


def remove(module: nn.Sequential, _: Any) -> None:
    del module[2]


def rename(module: nn.Sequential, _: Any) -> None:
    prune.identity(module[2], "weight")


def extend(module: nn.Sequential, inner: Any) -> None:
    inner.add_param_group({"params": [*module[2].parameters()]})


def within_backward(call: str, wrap: Wrap) -> nn.Module:
    module = net()
    model, _ = wrap(module, torch.optim.SGD(module.parameters(), 0.1))
    module[2].weight.register_hook(lambda _: getattr(model, call)())
    model(inputs(0)).square().mean().backward()
    return module


ROWS: list[tuple[Script, str, bool]] = [
    (partial(differential_equation, "gradients of samples"), "dear", False),
    (partial(differential_equation, "gradients of samples"), "dreamddp", True),
    (partial(differential_equation, "forward mode"), "p3", False),
    (partial(differential_equation, "other weights"), "us-byte", False),
    (partial(differential_equation, "of the bare module"), "dear", False),
    (partial(freezing, ("before forward", 0, 5), 1), "dear", True),
    (partial(freezing, ("before forward", 1, 2), 2), "wfbp", True),
    (partial(freezing, ("before backward", 4, 6), 1), "wfbp", False),
    (partial(freezing, ("before backward", 1, 5), 1), "local-sgd:period=1", True),
    (partial(freezing, ("before the step", 3, 5), 1), "dreamddp", False),
    (partial(changing, remove, 5), "dear", False),
    (partial(changing, extend, 5), "wfbp", False),
]
REFUSED: list[tuple[Script, str, bool, str]] = [
    (partial(changing, remove, 1), "wfbp", True, "'2.weight'"),
    (partial(changing, rename, 1), "dear", True, "'2.weight'"),
    (partial(changing, extend, 5), "dear", False, "param groups"),
    (partial(within_backward, "zero_grad"), "wfbp", False, "zero_grad()"),
    (partial(within_backward, "skip_step"), "dear", False, "skip_step()"),
    (partial(within_backward, "consolidate"), "dreamddp", False, "consolidate()"),
    (partial(within_backward, "close"), "wfbp", False, "close()"),
]


@ONE.each(trained, *ROWS)
def test_trained_as_without_offbeat(calls: list[Call]) -> None:
    for (script, *_), call in zip(ROWS, calls, strict=True):
        right = trained(script, None)
        for found in call.results:
            for mine, theirs in zip(found, right, strict=True):
                torch.testing.assert_close(mine, theirs)


@ONE.each(trained, *(row[:3] for row in REFUSED))
def test_refused_by_name(calls: list[Call]) -> None:
    for (*_, named), call in zip(REFUSED, calls, strict=True):
        for outcome in call.outcomes:
            assert outcome.kind == "ValueError"
            assert named in outcome.error
