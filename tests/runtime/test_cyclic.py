"""Cyclic data parallelism on real processes, beside a direct transcription of its equations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Case, batch, build_model, build_optimizer, loss_of, profile_of
from torch import Tensor, nn
from workers import prepared
from worlds import run_world

from offbeat.strategies.cyclic import Cyclic

ITERATIONS = 7
RULES = (
    Cyclic(),
    Cyclic(rule="v1"),
    Cyclic(rule="random", seed=3),
    Cyclic(start="skip"),
    Cyclic(stagger="paper"),
    Cyclic(stages=1),
    Cyclic(clip=0.05),
)


def trained(
    case: Case, strategies: tuple[Cyclic, ...]
) -> list[tuple[list[Any], dict[str, Tensor]]]:
    """By strategy: the parameters that this rank's forwards have used, and those in the end."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = []
    for strategy in strategies:
        model = build_model(case)
        used = watched(model)
        optimizer = build_optimizer(case, model)
        seen = []
        profile = profile_of(case, world_size)
        with prepared(model, optimizer, strategy, profile=profile) as (m, o):
            for i in range(ITERATIONS):
                o.zero_grad()
                loss_of(m, *batch(case, rank, i)).backward()
                o.step()
                seen.append(dict(used))
            m.consolidate()
            end = {k: v.detach().clone() for k, v in model.named_parameters()}
        found.append((seen, end))
    dist.destroy_process_group()
    return found


def watched(model: nn.Module) -> dict[str, Tensor]:
    """Fills with the parameters that forwards use."""
    used: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda m, _, name=name: used.update(named(name, m)))
    return used


def named(prefix: str, module: nn.Module) -> dict[str, Tensor]:
    own = module.named_parameters(recurse=False)
    return {f"{prefix}.{name}".lstrip("."): p.detach().clone() for name, p in own}


Theta = dict[str, Tensor]


def equations(
    case: Case, strategy: Cyclic, world_size: int, anew: int | None = None
) -> tuple[list[list[Theta]], Theta]:
    """Eq. 5 to 7 as they are printed: workers i and stages j count from 1, stages from the
    input. They begin `anew` in that iteration: theta_(t-1) = theta_t."""
    profile = profile_of(case, world_size)
    n = strategy.stages or world_size
    runs = strategy.plan(profile).fact("stages")[::-1]
    stage_of = {
        tensor: j
        for j, (start, stop) in enumerate(runs, 1)
        for bucket in profile.buckets[start:stop]
        for tensor in bucket.tensors
    }
    model = build_model(case)
    optimizer = build_optimizer(case, model)
    parameters = dict(model.named_parameters())
    theta = {k: p.detach().clone() for k, p in parameters.items()}
    before = theta
    seen, rules = [], strategy.rules(n)
    for t in range(ITERATIONS):
        before = theta if t == anew else before
        gradients = {k: torch.zeros_like(p) for k, p in parameters.items()}
        seen.append([])
        for place in range(1, world_size + 1):
            i = -(-place * n // world_size)

            def newest(j: int, i: int = i, t: int = t) -> bool:
                if strategy.rule == "random":
                    return rules[t % len(rules)][i - 1][n - j]
                return strategy.rule == "v2" and j >= n - i + 1

            hat = {k: theta[k] if newest(stage_of.get(k, n)) else before[k] for k in theta}
            seen[-1].append(hat)
            with torch.no_grad():
                for k, p in parameters.items():
                    p.copy_(hat[k])
            optimizer.zero_grad()
            loss_of(model, *batch(case, place % world_size, t)).backward()
            for k, p in parameters.items():
                if p.grad is not None:
                    gradients[k] += p.grad / world_size
        with torch.no_grad():
            for k, p in parameters.items():
                p.copy_(theta[k])
                p.grad = gradients[k].clone() if k in stage_of else None
        if strategy.clip is not None:
            for j in range(1, n + 1):
                mine = [parameters[k] for k, stage in stage_of.items() if stage == j]
                torch.nn.utils.clip_grad_norm_(mine, strategy.clip)
        if t or strategy.start != "skip":
            optimizer.step()
        before, theta = theta, {k: p.detach().clone() for k, p in parameters.items()}
    return seen, theta


@pytest.mark.parametrize(
    ("world_size", "optimizer", "strategies"),
    [
        (2, "adamw", RULES[:2]),
        (3, "nesterov", RULES),
        (4, "nesterov", (*RULES[:2], Cyclic(stages=2))),
    ],
)
def test_equals_its_equations(
    world_size: int, optimizer: str, strategies: tuple[Cyclic, ...]
) -> None:
    """Every worker, every stage, every iteration, and the parameters at the end."""
    case = Case(optimizer=optimizer)
    ranks = run_world(trained, world_size, case, strategies)
    for n, strategy in enumerate(strategies):
        seen, end = equations(case, strategy, world_size)
        for rank in range(world_size):
            used, last = ranks[rank][n]
            for t, by_worker in enumerate(seen):
                expected = by_worker[(rank or world_size) - 1]
                for name, value in used[t].items():
                    where = f"{strategy}, rank {rank}, iteration {t}: {name}"
                    torch.testing.assert_close(
                        value, expected[name], rtol=0, atol=1e-12, msg=lambda m, w=where: w + m
                    )
            for name, value in last.items():
                torch.testing.assert_close(value, end[name], rtol=0, atol=1e-12)


def interrupted(case: Case, strategies: tuple[Cyclic, ...]) -> list[Any]:
    """Parameters that forwards have used, and between iterations; consolidated before one, or a
    checkpoint loaded that is what was there."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = []
    for strategy, loads in [(s, loads) for s in strategies for loads in (False, True)]:
        model = build_model(case)
        used = watched(model)
        profile = profile_of(case, world_size)
        seen, between = [], []
        with prepared(model, build_optimizer(case, model), strategy, profile=profile) as (m, o):
            for i in range(ITERATIONS):
                if i == ANEW:
                    m.consolidate()
                    if loads:
                        m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()})
                    else:
                        with torch.no_grad():
                            m.eval()(batch(case, rank, i)[0])
                            m.train()
                o.zero_grad()
                loss_of(m, *batch(case, rank, i)).backward()
                o.step()
                seen.append(dict(used))
                between.append({k: v.clone() for k, v in m.state_dict().items()})
        found.append((seen, between))
    dist.destroy_process_group()
    return found


ANEW = 4


def test_begins_anew_after_consolidate_and_rank_0_always_has_the_newest() -> None:
    case, strategies = Case(optimizer="nesterov"), (Cyclic(), Cyclic(rule="v1"))
    ranks = run_world(interrupted, 3, case, strategies)
    for n, strategy in enumerate(s for s in strategies for _ in range(2)):
        expected, _ = equations(case, strategy, 3, ANEW)
        for rank in range(3):
            for t, by_worker in enumerate(expected):
                for name, value in ranks[rank][n][0][t].items():
                    close(value, by_worker[(rank or 3) - 1][name], f"{strategy} {rank} {t} {name}")
        # What rank 0 has after a step is what it uses next, or with v1 one iteration later.
        later = 1 if strategy.rule == "v2" else 2
        for t, by_worker in enumerate(expected[later:]):
            for name, value in by_worker[2].items():
                if t + later != ANEW or strategy.rule == "v2":
                    close(ranks[0][n][1][t][name], value, f"{strategy} between {t} {name}")


def close(value: Tensor, expected: Tensor, where: str) -> None:
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-12, msg=lambda m: where + m)
