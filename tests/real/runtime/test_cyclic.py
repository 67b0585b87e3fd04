"""Cyclic data parallelism on real processes, beside a direct transcription of its equations."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import workers
from cases.batches import Batch, Call
from cases.models import Case, batch, build_model, build_optimizer, loss_of, profile_of
from cases.workers import prepared
from harness.ranks import watch_ranks
from torch import Tensor, nn

import offbeat
from offbeat.strategies import Cyclic, create

ITERATIONS = 7
PROMPT = partial(Cyclic, stagger="least")  # by default planning simulates two plans in each rank
RULES = (
    Cyclic(),  # v2, in the order that planning finds
    PROMPT(rule="v1", start="skip"),
    PROMPT(rule="random", seed=3),
    Cyclic(stagger="paper", clip=0.05),
    PROMPT(stages=1, wire="topk:1"),  # a stage for all; codes that lose nothing
)


def trained(
    case: Case, strategies: tuple[Cyclic, ...]
) -> list[tuple[list[Any], dict[str, Tensor]]]:
    """By strategy: the parameters that this rank's forwards have used, and those in the end."""
    rank, world_size = join()
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
    return found


def join() -> tuple[int, int]:
    """This rank and the number of ranks."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


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


def equations(  # noqa: C901
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


CASE = Case(optimizer="nesterov")
TWO_OF_A_STAGE = Case(optimizer="adamw"), (PROMPT(stages=2),)
TWO, THREE, FOUR = Batch(2), Batch(3), Batch(4)
TRAINED = [
    (CASE, RULES, THREE.add(trained, CASE, RULES)),
    (*TWO_OF_A_STAGE, FOUR.add(trained, *TWO_OF_A_STAGE)),
]


@pytest.mark.parametrize(("case", "strategies", "call"), TRAINED, ids=["3", "4"])
def test_equals_its_equations(case: Case, strategies: tuple[Cyclic, ...], call: Call) -> None:
    """Every worker, every stage, every iteration, and the parameters at the end."""
    ranks, world_size = call.results, call.batch.world_size
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


def interrupted(case: Case, ways: tuple[tuple[Cyclic, bool], ...]) -> list[Any]:
    """Parameters that forwards have used, and between iterations; consolidated before one, or a
    checkpoint loaded that is what was there."""
    rank, world_size = join()
    found = []
    for strategy, loads in ways:
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
    return found


ANEW = 4


WAYS = ((PROMPT(), False), (PROMPT(rule="v1"), True), (PROMPT(wire="topk:1"), False))


@THREE.given(interrupted, CASE, WAYS)
def test_begins_anew_after_consolidate_and_rank_0_always_has_the_newest(call: Call) -> None:
    ranks = call.results
    for n, (strategy, _) in enumerate(WAYS):
        expected, _ = equations(CASE, strategy, 3, ANEW)
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


# ---- what goes wrong ------------------------------------------------------------------------


def clipped() -> str:
    """What happens to a script that clips between backward and step."""
    case, (rank, _) = Case(), join()
    model = build_model(case)
    profile, words = profile_of(case, 2), ""
    with prepared(model, build_optimizer(case, model), PROMPT(), profile=profile) as (m, o):
        loss_of(m, *batch(case, rank, 0)).backward()
        try:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            o.step()
        except ValueError as error:
            words = str(error)
    return words


@TWO.given(clipped)
def test_clipping_the_whole_gradient_is_refused(call: Call) -> None:
    for words in call.results:
        assert "let the strategy clip each stage (clip=...)" in words


def until_killed(doomed: int) -> str:
    case, (rank, _) = Case(), join()
    model = build_model(case)
    optimizer, profile = build_optimizer(case, model), profile_of(case, 3)
    m, o = offbeat.prepare(model, optimizer, PROMPT(), profile=profile, timeout_s=10)
    try:
        for i in range(100):
            if rank == doomed and i == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            o.zero_grad()
            loss_of(m, *batch(case, rank, i)).backward()
            o.step()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_a_worker_that_dies_is_named_by_its_neighbours() -> None:
    """Sums go from 1 to 2 to 0: of the others one had to do with rank 2 itself."""
    outcomes = watch_ranks(3, until_killed, 2, doomed=(2,), timeout_s=60)
    said = [outcomes[rank].result for rank in (0, 1)]
    assert all("failed" in words or "did not arrive" in words for words in said)
    assert any("rank 2" in words.split(" on link")[0] for words in said)


def spoilt(culprit: int, strategy: Cyclic) -> tuple[str, bool]:
    """What this rank says after the culprit's loss becomes NaN in the third iteration, and whether
    its weights are finite."""
    case, (rank, ranks), words = Case(), join(), "nothing"
    model = build_model(case)
    optimizer, profile = build_optimizer(case, model), profile_of(case, ranks)
    m, o = offbeat.prepare(model, optimizer, strategy, profile=profile, timeout_s=5)
    try:
        for i in range(5):
            o.zero_grad()
            loss = loss_of(m, *batch(case, rank, i))
            (loss * (torch.nan if (rank, i) == (culprit, 2) else 1)).backward()
            o.step()
    except RuntimeError as error:
        words = str(error)
    m.close()
    return words, all(bool(p.isfinite().all()) for p in model.parameters())


@THREE.each(spoilt, [2, PROMPT()], [2, PROMPT(wire="fp16")])
def test_a_gradient_that_is_not_finite_reaches_nobodys_weights(calls: list[Call]) -> None:
    """Sums go from 1 to 2 to 0, and whoever is handed a spoilt one knows who has spoilt it."""
    for results in (call.results for call in calls):
        assert all(finite and words != "nothing" for words, finite in results)
        assert results[0][0].startswith("rank 2 sent values that are not finite")
        assert "in iteration 2" in results[0][0]


def normalized() -> dict[str, Tensor]:
    """Running statistics after some iterations."""
    case, (rank, _) = Case("conv", "sgd"), join()
    found = {}
    for rule in ("v1", "v2"):
        model = build_model(case)
        seen: list[Tensor] = []
        inner = model[2]
        inner.register_forward_pre_hook(lambda _, x, seen=seen: seen.append(x[0].detach().clone()))
        profile = profile_of(case, 2)
        strategy = PROMPT(rule=rule)
        with prepared(model, build_optimizer(case, model), strategy, profile=profile) as (m, o):
            for i in range(5):
                o.zero_grad()
                loss_of(m, *batch(case, rank, i)).backward()
                o.step()
            m.consolidate()
            own = torch.zeros(4, dtype=torch.float64)
            for x in seen:
                own = 0.9 * own + 0.1 * x.mean((0, 2, 3))
            found[rule] = torch.stack([own, inner.running_mean])
    return found


@TWO.given(normalized)
def test_running_statistics_are_those_of_rank_0(call: Call) -> None:
    """Also with v1, where rank 0 changes between parameters of two versions."""
    first, second = call.results
    for rule in ("v1", "v2"):
        own, mean = first[rule]
        torch.testing.assert_close(mean, own, rtol=0, atol=1e-12)
        assert torch.equal(second[rule][1], mean)


PROFILE = profile_of(Case(), 4)
BAD = [
    (lambda: Cyclic(clip=-1.0), r"clip \(-1.0\) must be a norm above 0"),
    (lambda: Cyclic(chance=1.5), r"chance \(1.5\) must lie between"),
    (lambda: Cyclic(stages=0), r"stages \(0\)"),
    (lambda: Cyclic(rule="v3"), "must be one of v1, v2, random"),
    (lambda: Cyclic(split="times"), "did you mean 'time'"),
    (lambda: Cyclic(table=((2,),)), "must have a row of 0 and 1"),
    (lambda: Cyclic(stages=3).plan(PROFILE), r"stages \(3\) must divide the number of workers"),
    (lambda: Cyclic().plan(profile_of(Case(), 5)), r"stages \(5\) must be at least 1 and at most"),
    (lambda: Cyclic(split=(1, 1, 1, 2)).plan(PROFILE), r"split \(1/1/1/2\) must be 4 numbers"),
    (lambda: Cyclic(table=((1, 0), (0, 1))).plan(PROFILE), r"table \(2 rows\) must have 4 rows"),
    (
        lambda: Cyclic(stages=2, table=((1, 0), (0, 1))).plan(PROFILE),
        "worker 1 cannot have w_t in stage 1, .* from stage 2 on",
    ),
    (lambda: Cyclic(start="skip").plan(profile_of(Case(), 1)), "at least two workers"),
]


@pytest.mark.parametrize(("act", "words"), BAD, ids=[words for _, words in BAD])
def test_what_cannot_be(act: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        act()


def test_a_table_stands_for_a_rule() -> None:
    v2 = tuple(tuple(j >= 4 - i + 1 for j in range(1, 5)) for i in range(1, 5))
    assert Cyclic(table=v2).rules(4) == Cyclic().rules(4)
    assert Cyclic(table=((False,) * 4,) * 4).rules(4) == Cyclic(rule="v1").rules(4)
    assert create("cyclic", {"table": [[0, 1], [1, 1]]}).table == ((False, True), (True, True))


def stages_of(job: dict[str, Any]) -> tuple[int, int]:
    """Buckets and stages of a job's profile and plan, with buckets that were measured."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "job.json"
        path.write_text(json.dumps({"schema": 1, **job}))
        os.environ["OFFBEAT_JOB"] = str(path)
        trained = workers.train(Case("mlp", "sgd"), PROMPT(), range(4), observe=2)
        return len(trained.profile.buckets), len(trained.plan.fact("stages"))


JOBS: list[dict[str, Any]] = [{}, {"min_bucket_bytes": 1}, {"least_buckets": 3}]


@TWO.each(stages_of, *((job,) for job in JOBS))
def test_a_small_model_has_a_bucket_for_every_stage(calls: list[Call]) -> None:
    """Whatever small messages take: by their times it would be one bucket for two stages."""
    for (few, stages), (all_, _), (three, _) in zip(*(c.results for c in calls), strict=True):
        assert few >= stages == 2
        assert all_ == 4  # parameters that no bucket joins
        assert three >= 3
