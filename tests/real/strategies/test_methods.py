"""Published methods: each plan computes what a plain program of its paper computes, in float64.

The programs share nothing with the strategies: loops over workers, no worlds, no codecs.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.parts import code, codec, moment_count
from numpy.typing import NDArray

from offbeat import OuterSGD
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import predict
from offbeat.strategies import Strategy, create
from offbeat.testing.conformance import conforms, interpret_plan
from offbeat.testing.equations import Optimizer, Task, adam, momentum

Array = NDArray[np.float64]
Program = Callable[[Task, int, int, Optimizer], list[Array]]
TOLERANCE = 1e-12


def profile_of(ranks: int, moments: int = 2, buckets: int = 3) -> Profile:
    sizes = [4000 * (b + 1) for b in range(buckets)]
    return Profile(
        tuple(Bucket(f"b{b}", 0.01, 0.02, n, state_bytes=moments * n) for b, n in enumerate(sizes)),
        (Link("net", 0.001, 1e6),),
        world_size=ranks,
    )


class Worker:
    """Weights and optimizer of one worker."""

    def __init__(self, task: Task, rank: int, optimizer: Optimizer) -> None:
        self.task, self.rank, self.optimizer = task, rank, optimizer
        self.w = task.start.copy()
        self.state: Any = np.zeros_like(self.w)
        if optimizer is adam:
            self.state = [np.zeros_like(self.w), np.zeros_like(self.w)]

    def gradient(self, iteration: int) -> Array:
        return self.task.gradient(self.rank, iteration, range(len(self.task.sizes)), self.w)

    def step(self, gradient: Array) -> None:
        self.optimizer(self.w, self.state, gradient)


def train(
    task: Task,
    ranks: int,
    iterations: int,
    optimizer: Optimizer,
    period: int,
    meet: Callable[[list[Worker], int], None],
) -> list[Array]:
    """Local steps, and what happens after every period; the weights of every forward."""
    workers = [Worker(task, rank, optimizer) for rank in range(ranks)]
    used = []
    for t in range(iterations):
        used.append(np.array([worker.w for worker in workers]))
        for worker in workers:
            worker.step(worker.gradient(t))
        if (t + 1) % period == 0:
            meet(workers, (t + 1) // period - 1)
    return used


def eager(period: int, lr: float, beta: float, nesterov: bool) -> Program:
    """2502.12996, Algorithm 2, with d(0) = 0."""

    def program(task: Task, ranks: int, iterations: int, optimizer: Optimizer) -> list[Array]:
        theta = [task.start.copy() for _ in range(ranks)]
        velocity = [np.zeros_like(task.start) for _ in range(ranks)]
        last = [np.zeros_like(task.start) for _ in range(ranks)]

        def meet(workers: list[Worker], _: int) -> None:
            arrived = sum(last) / ranks  # the all-reduce that began a period ago
            for k, worker in enumerate(workers):
                own = theta[k] - worker.w
                g = own / ranks + (arrived - last[k] / ranks)
                velocity[k] = beta * velocity[k] + g
                theta[k] = theta[k] - lr * (g + beta * velocity[k] if nesterov else velocity[k])
                last[k], worker.w = own, theta[k].copy()

        return train(task, ranks, iterations, optimizer, period, meet)

    return program


def round_to_bf16(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float64).float().bfloat16())


def largest_in_two_bits(x: Array, fraction: float) -> Array:
    """Each chunk's largest elements: a sign and one of two sizes."""
    out = np.zeros_like(x)
    for at in range(0, len(x), 4096):
        chunk = x[at : at + 4096]
        count = max(1, int(len(chunk) * fraction))
        chosen = sorted(range(len(chunk)), key=lambda i, c=chunk: -abs(c[i]))[:count]
        sizes = [abs(chunk[i]) for i in chosen]
        limit = 0.0 if 0.0 in sizes else math.fsum(sizes) / count
        groups = [s for s in sizes if s <= limit], [s for s in sizes if s > limit]
        levels = [round_to_bf16(math.fsum(g) / len(g)) if g else 0.0 for g in groups]
        for i in chosen:
            level = levels[int(abs(chunk[i]) > limit)]
            out[at + i] = math.copysign(level, chunk[i])
    return out


def sparseloco(period: int, fraction: float, decay: float, lr: float) -> Program:
    """2508.15706, Algorithm 1."""

    def program(task: Task, ranks: int, iterations: int, optimizer: Optimizer) -> list[Array]:
        theta = [task.start.copy()]
        errors = [np.zeros_like(task.start) for _ in range(ranks)]

        def meet(workers: list[Worker], _: int) -> None:
            sent = []
            for k, worker in enumerate(workers):
                errors[k] = decay * errors[k] + (theta[0] - worker.w)
                sent.append(largest_in_two_bits(errors[k], fraction))
                errors[k] = errors[k] - sent[k]
            theta[0] = theta[0] - lr * sum(sent) / ranks
            for worker in workers:
                worker.w = theta[0].copy()

        return train(task, ranks, iterations, optimizer, period, meet)

    return program


def noloco(
    period: int, lr: float, beta: float, gamma: float, rounds: int = 16, seed: int = 0
) -> Program:
    """2506.10911, Section 3.2, for pairs."""

    def program(task: Task, ranks: int, iterations: int, optimizer: Optimizer) -> list[Array]:
        phi = [task.start.copy() for _ in range(ranks)]
        delta = [np.zeros_like(task.start) for _ in range(ranks)]

        def meet(workers: list[Worker], done: int) -> None:
            order = list(range(ranks))
            random.Random(f"{seed} {done % rounds}").shuffle(order)
            new = [x.copy() for x in phi]
            while order:
                group, order = order[:2], order[2:]
                for i in group:
                    outer = sum(workers[j].w - phi[j] for j in group) / len(group)
                    apart = phi[i] - sum(phi[j] for j in group) / len(group)
                    delta[i] = beta * delta[i] + lr * outer - gamma * apart
                    new[i] = phi[i] + delta[i]
            for i, worker in enumerate(workers):
                phi[i], worker.w = new[i], new[i].copy()

        return train(task, ranks, iterations, optimizer, period, meet)

    return program


def des_loc(period: int, first: int, second: int) -> Program:
    """2505.22549, Algorithm 1, with averages after the step."""

    def program(task: Task, ranks: int, iterations: int, optimizer: Optimizer) -> list[Array]:
        def meet(workers: list[Worker], done: int) -> None:
            mean = np.mean([worker.w for worker in workers], axis=0)
            for worker in workers:
                worker.w = mean.copy()
            for moment, each in ((0, first), (1, second)):
                if (done + 1) % each == 0:
                    mean = sum(worker.state[moment] for worker in workers) / ranks
                    for worker in workers:
                        worker.state[moment][:] = mean

        return train(task, ranks, iterations, optimizer, period, meet)

    return program


def cosine_components(x: Array, fraction: float) -> Array:
    """The largest components of the two-dimensional cosine transform of 64 x 64 elements."""
    out = np.zeros_like(x)
    for at in range(0, len(x), 4096):
        chunk = x[at : at + 4096]
        rows = -(-len(chunk) // 64)
        grid = np.zeros((rows, 64))
        grid.flat[: len(chunk)] = chunk
        basis = {}
        for n in {rows, 64}:
            k, i = np.arange(n)[:, None], np.arange(n)[None]
            basis[n] = np.sqrt((1 + (k > 0)) / n) * np.cos(np.pi * k * (i + 0.5) / n)
        found = np.einsum("ki,ij,lj->kl", basis[rows], grid, basis[64])
        count = max(1, int(rows * 64 * fraction))
        least = np.sort(np.abs(found).ravel())[-count]
        found[np.abs(found) < least] = 0
        back = np.einsum("ki,kl,lj->ij", basis[rows], found, basis[64])
        out[at : at + 4096] = back.ravel()[: len(chunk)]
    return out


def demo(fraction: float, beta: float, sign: bool) -> Program:
    """2411.19870, Algorithm 1."""

    def program(task: Task, ranks: int, iterations: int, optimizer: Optimizer) -> list[Array]:
        workers = [Worker(task, rank, optimizer) for rank in range(ranks)]
        kept = [np.zeros_like(task.start) for _ in range(ranks)]
        used = []
        for t in range(iterations):
            used.append(np.array([worker.w for worker in workers]))
            sent = []
            for k, worker in enumerate(workers):
                kept[k] = beta * kept[k] + worker.gradient(t)
                sent.append(cosine_components(kept[k], fraction))
                kept[k] = kept[k] - sent[k]
            mean = np.mean(sent, axis=0)
            for worker in workers:
                worker.step(np.sign(mean) if sign else mean)
        return used

    return program


def delayed(period: int, delay: int, gain: float, sets: Sequence[Sequence[int]]) -> Program:
    """Snapshots after the step; what is learnt since then stays. `sets`: the buckets of each
    iteration."""

    def program(task: Task, ranks: int, iterations: int, optimizer: Optimizer) -> list[Array]:
        workers = [Worker(task, rank, optimizer) for rank in range(ranks)]
        ends = np.cumsum([0, *task.sizes])
        used, taken = [], []
        for t in range(iterations):
            used.append(np.array([worker.w for worker in workers]))
            for worker in workers:
                worker.step(worker.gradient(t))
            taken.append(np.array([worker.w for worker in workers]))
            for b in sets[(t - delay) % period] if t >= delay else ():
                part = slice(ends[b], ends[b + 1])
                then = taken[t - delay][:, part]
                for k, worker in enumerate(workers):
                    worker.w[part] += gain * (then.mean(axis=0) - then[k])
        return used

    return program


SMALL, LARGE = (7, 12, 5), (4100, 300, 70)
CASES: list[tuple[str, dict[str, Any], Program, Sequence[int], Optimizer]] = [
    ("eager", {"period": 3, "outer": "0.7/0.9"}, eager(3, 0.7, 0.9, True), SMALL, momentum),
    ("eager", {"period": 1, "outer": "0.8/0.3/plain"}, eager(1, 0.8, 0.3, False), SMALL, adam),
    ("sparseloco", {"period": 3, "fraction": 0.2}, sparseloco(3, 0.2, 0.95, 1), SMALL, momentum),
    (
        "sparseloco",
        {"period": 2, "fraction": 0.02, "decay": 0.9, "lr": 0.7},
        sparseloco(2, 0.02, 0.9, 0.7),
        LARGE,
        momentum,
    ),
    ("noloco", {"period": 3}, noloco(3, 0.7, 0.5, 0.7), SMALL, momentum),
    (
        "noloco",
        {"period": 2, "gamma": 0.9, "rounds": 5, "seed": 4},
        noloco(2, 0.7, 0.5, 0.9, 5, 4),
        SMALL,
        adam,
    ),
    ("des-loc", {"period": 2, "first": 2, "second": 3}, des_loc(2, 2, 3), SMALL, adam),
    ("demo", {"fraction": 0.1, "beta": 0.9}, demo(0.1, 0.9, True), SMALL, momentum),
    ("demo", {"fraction": 0.03, "sign": False}, demo(0.03, 0.999, False), LARGE, momentum),
]


# Chunks of large buckets do not depend on the number of ranks.
RUNS = [(case, ranks) for case in CASES for ranks in ((2, 3, 4) if case[3] is SMALL else (3,))]


@pytest.mark.parametrize(
    ("case", "ranks"), RUNS, ids=[f"{case[0]}-{case[1]}-{ranks}" for case, ranks in RUNS]
)
def test_computes_what_a_plain_program_computes(case: Any, ranks: int) -> None:
    name, settings, program, sizes, optimizer = case
    strategy = create(name, settings)
    plan = strategy.plan(profile_of(ranks))
    task, iterations = Task(sizes), 14
    two = any(buffer.name == "state.1" for buffer in plan.buffers)
    if optimizer is adam and not two:
        optimizer = momentum
    trained = interpret_plan(plan, task, ranks, iterations, optimizer, seed=1)
    expected = program(task, ranks, iterations, optimizer)
    assert np.ptp(expected[-1], axis=0).max() > 0 or name in ("sparseloco", "demo")
    for t, (found, wanted) in enumerate(zip(trained, expected, strict=True)):
        assert abs(found - wanted).max() <= TOLERANCE, f"iteration {t}"


@pytest.mark.parametrize(("period", "delay", "gain"), [(3, 1, 0.5), (4, 3, 0.7), (4, 2, 1.0)])
def test_delayed_averages_are_those_of_a_plain_program(
    period: int, delay: int, gain: float
) -> None:
    settings = {"period": period, "due": "delayed", "delay": delay, "gain": gain}
    plan = create("dreamddp", settings).plan(profile_of(4))
    [kept] = {apply.arg("kept", 0.0) for apply in plan.applies if apply.rule == "delta"}
    assert kept == pytest.approx(1 - gain)
    sets: list[list[int]] = [[] for _ in range(period)]
    for t in plan.transfers:
        sets[next(iter(t.phases))] += t.payload.buckets
    assert sorted(b for members in sets for b in members) == [0, 1, 2]
    task = Task(SMALL)
    trained = interpret_plan(plan, task, 4, 14, momentum, seed=1)
    expected = delayed(period, delay, gain, sets)(task, 4, 14, momentum)
    for t, (found, wanted) in enumerate(zip(trained, expected, strict=True)):
        assert abs(found - wanted).max() <= TOLERANCE, f"iteration {t}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_conforms(case: Any) -> None:
    strategy: Strategy = create(case[0], case[1])
    conforms(strategy, profile_of(2))
    assert predict(strategy, profile_of(4)).iteration_s > 0


class Parabolas(Task):
    """Functions slope w^2 / 2, the same on all ranks and in all iterations."""

    def __init__(self, slopes: Array) -> None:
        super().__init__([1, 1, len(slopes) - 2])
        self.slopes, self.start = slopes, np.ones_like(slopes)

    def gradient(self, rank: int, iteration: int, buckets: range, weights: Array) -> Array:
        return self.slopes[self.span(buckets)] * weights


def farthest(outer: str | None, slopes: Array, ranks: int) -> float:
    """Distance to the minimum, from 1, after many outer steps with one local step of rate 1."""

    def descend(weights: Array, _: Any, gradients: Array) -> None:
        weights -= gradients

    settings = {"period": 1} | ({} if outer is None else {"outer": outer})
    plan = create("eager", settings).plan(profile_of(ranks))
    return float(abs(interpret_plan(plan, Parabolas(slopes), ranks, 150, descend)[-1]).max())


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_default_of_eager_converges_wherever_local_steps_do(ranks: int) -> None:
    """A local step of rate 1 comes closer to the minimum if the slope is in (0, 2)."""
    assert farthest(None, np.linspace(0.15, 1.95, 13), ranks) < 1e-3


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_limit_of_the_outer_rate_of_eager(ranks: int) -> None:
    """Without momentum the limit of the rate is 1 / (c (1 - 1 / K))."""
    c = 1.9
    limit = 1 / (c * (1 - 1 / ranks))
    assert farthest(f"{0.9 * limit}/0", np.full(3, c), ranks) < 1e-2
    assert farthest(f"{1.1 * limit}/0", np.full(3, c), ranks) > 10


def test_the_default_of_diloco_lets_late_changes_add_up() -> None:
    assert farthest(str(OuterSGD()), np.full(3, 1.5), 4) > 10


def test_a_plan_in_a_file_brings_its_rules(tmp_path: Path) -> None:
    """Another process has not imported the strategy."""
    profile, strategy = profile_of(4), create("eager", {"period": 3})
    profile.save(tmp_path / "profile.json")
    (tmp_path / "plan.json").write_text(json.dumps(strategy.plan(profile).to_dict()))
    argv = ["simulate", "--profile", "profile.json", "--plan", "plan.json"]
    done = subprocess.run(
        [sys.executable, "-m", "offbeat", *argv],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_plans_of_the_default_settings_are_right(ranks: int) -> None:
    for name in sorted({case[0] for case in CASES}):
        conforms(create(name), profile_of(ranks), ranks=())


def test_pairs_of_noloco_are_a_matching_and_differ_between_rounds() -> None:
    from harness.parts import draw_pairs

    for ranks in (2, 5, 8):
        drawn = [draw_pairs(ranks, 0, done) for done in range(16)]
        for pairs in drawn:
            assert sorted(rank for pair in pairs for rank in pair) == list(range(ranks))
            assert sum(len(pair) == 1 for pair in pairs) == ranks % 2
        assert len(set(map(str, drawn))) > (ranks > 2)


@pytest.mark.parametrize("name", ["topk2", "dct-topk"])
@pytest.mark.parametrize("size", [1, 3, 64, 200, 4096, 4097, 9000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_codecs_on_tensors_compute_what_they_mean(name: str, size: int, dtype: torch.dtype) -> None:
    used = codec(name, {"fraction": 0.02})
    numbers = np.random.default_rng(size).normal(size=(3, size))
    x = torch.tensor(numbers, dtype=dtype)
    codes = torch.zeros(3, used.bytes_of(size, dtype.itemsize), dtype=torch.uint8)
    errors, decoded, total = x.clone(), torch.zeros_like(x), torch.zeros(size, dtype=dtype)
    code(used).encode(errors, codes)
    code(used).add(codes, decoded)
    code(used).add_all(codes, total)
    expected = np.stack([used.round_trip(row.double().numpy()) for row in x])
    # In float32 a level may round to the next bf16.
    rtol, atol = (1e-2, 1e-5) if dtype == torch.float32 else (1e-12, 1e-12)
    np.testing.assert_allclose(decoded.numpy(), expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(errors, x - decoded)
    torch.testing.assert_close(total, decoded.sum(0))
    one, its = x[1].clone(), torch.zeros_like(codes[1])
    code(used).encode(one, its)  # a row alone, as in a table
    torch.testing.assert_close(one, errors[1])


def test_codecs_send_few_bytes() -> None:
    assert codec("topk2", {"fraction": 1 / 64}).bytes_of(4096) == 4 + 96 + 16
    assert codec("dct-topk", {"fraction": 1 / 128}).bytes_of(4096) == 32 * 4 + 48


def test_zeros_stay_zeros_in_two_bits() -> None:
    x = np.zeros(100)
    x[3], x[70] = 2.0, -1.0
    found = codec("topk2", {"fraction": 0.1}).round_trip(x)
    assert set(np.flatnonzero(found)) == {3, 70}


@pytest.mark.parametrize(
    ("sizes", "moments"),
    [
        ([(7000, 7000), (3000, 6000)], 2),
        ([(1000, 1300)], 2),  # a bucket with parameters of both kinds
        ([(1000, 1000), (2000, 0)], 1),  # the optimizer steps a third of the model
        ([(3000, 1000)], 1),
        ([(1000, 2000), (0, 0)], 2),
        ([(1000, 0)], 0),
    ],
)
def test_moments_are_those_of_the_parameters_with_the_most(
    sizes: Sequence[tuple[int, int]], moments: int
) -> None:
    """By bucket, the bytes of its parameters and those of their moments."""
    buckets = tuple(
        Bucket(f"b{b}", 0.01, 0.02, size, state_bytes=state)
        for b, (size, state) in enumerate(sizes)
    )
    profile = Profile(buckets, (Link("net", 0.001, 1e6),), world_size=2)
    assert moment_count(profile) == moments
    kept = [buffer.name for buffer in create("des-loc").plan(profile).buffers]
    assert kept == [f"state.{k}" for k in range(moments)]


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("eager", {"outer": None}, "outer"),
        ("eager", {"period": 0}, "period"),
        ("sparseloco", {"fraction": 0}, "fraction"),
        ("sparseloco", {"decay": 1.5}, "decay"),
        ("sparseloco", {"lr": 0}, "lr"),
        ("noloco", {"gamma": 2}, "gamma"),
        ("noloco", {"momentum": 1}, "momentum"),
        ("noloco", {"rounds": 0}, "rounds"),
        ("des-loc", {"first": 0}, "first"),
        ("demo", {"beta": 1}, "beta"),
        ("demo", {"fraction": 2}, "fraction"),
    ],
)
def test_wrong_settings_are_refused(name: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        create(name, settings)
