"""Synthetic run directories in the format that runtime and CLI write, small and realistic."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from typing import Any

from cases.tiny_runs import write_record
from offbeat.core.derive.windows import Windows
from offbeat.core.sim.trace import COMPUTE, Span, Trace
from offbeat.plan import (
    Apply,
    Buffer,
    Fact,
    Moment,
    Phases,
    Plan,
    Transfer,
    channel,
    local,
    transfer,
)
from offbeat.profile import Bucket, Link, Profile

STEP, END = Moment("step"), Moment("end")


def profile(buckets: int = 20, world_size: int = 4, links: Sequence[Link] = ()) -> Profile:
    """A model of 0.3 s per iteration and 8.4 MB whose deep layers are the large ones."""
    shares = [1 + 2 * (buckets - i) / buckets for i in range(buckets)]
    total = sum(shares)
    return Profile(
        buckets=tuple(
            Bucket(
                name=f"layers.{buckets - 1 - i}.linear",
                forward_s=0.1 / buckets,
                backward_s=0.2 / buckets,
                size_bytes=int(8.4e6 * share / total),
            )
            for i, share in enumerate(shares)
        ),
        links=tuple(links) or (Link("net", 1.2e-3, 8.2e6, 0.013),),
        world_size=world_size,
        update_s=0.012,
        other_s=0.004,
        model="synthetic",
    )


def every_gradient(facts: Profile, name: str = "ddp", fuse: int = 5) -> Plan:
    """Gradients in groups, first in first out, the step waits for all."""
    size, links = len(facts.buckets), facts.links
    rules = [
        _send("grad", group, Moment("grad", group[-1]), STEP, links[n % len(links)].name)
        for n, group in enumerate(_groups(size, fuse))
    ]
    return Plan(name, size, tuple(rules), (local(size, STEP, [0]),))


def layer_sets(facts: Profile, name: str = "dreamddp", period: int = 5) -> Plan:
    """Each iteration of the period averages its own share of the parameters."""
    size, links = len(facts.buckets), facts.links
    rules = [
        _send("param", range(b, b + 1), Moment("grad", b), END, links[b % len(links)].name,
              [b * period // size])
        for b in range(size)
    ]  # fmt: skip
    return Plan(
        name, size, tuple(rules), (local(size, Moment("grad"), range(period)),), period=period
    )


def whole_model(facts: Profile, name: str = "local-sgd", period: int = 5) -> Plan:
    """All parameters at once in the last iteration of the period."""
    size = len(facts.buckets)
    rule = _send("param", range(size), STEP, END, facts.links[0].name, [period - 1])
    return Plan(name, size, (rule,), (local(size, STEP, range(period)),), period=period)


NEAR_AND_FAR = (Link("net", 1.2e-3, 26e6, 0.013), Link("slow", 2e-3, 14e6, 0.02))


def merged(facts: Profile, name: str = "deft") -> Plan:
    """Windows of two iterations and of one in turn, late, the rest of each on a slow link."""
    size = len(facts.buckets)
    third, half = range(size // 3), range(size // 2)
    near, far = facts.links[0].name, facts.links[-1].name
    rest, middle = range(half.stop, size), range(third.stop, half.stop)
    forward, early = Moment("forward", size - 1), Moment("grad", third.stop - 1)
    late, next_late = Moment("step", lag=1), Moment("step", lag=2)
    rules = (
        _send("grad", rest, forward, late, near, [3], age=1),  # the rest of what closed in 2
        _send("grad", middle, forward, STEP, far, [4], age=1),
        _send("grad", half, Moment("grad", half.stop - 1), late, near, [1, 4]),
        _send("grad", rest, forward, STEP, near, [2, 5], age=1),
        _send("grad", third, early, next_late, far, [2, 5]),  # what closes in 2, 5
    )
    tries = [
        {"capacity": 1.0, "ratio": 1.0214, "merges": [2], "accepted": False},
        {"capacity": 1.1, "ratio": 1.0087, "merges": [2, 1], "accepted": True},
    ]
    closes = Phases([1, 2, 4, 5])
    return Plan(
        name,
        size,
        rules,
        (local(size, STEP, closes, age=1), Apply("close", range(size), END, closes)),
        buffers=(Buffer("grad", "grad", copies=2),),
        period=3,
        prologue=3,
        facts=(Fact("merges", [2, 1]), Fact("coverage_rate", 1.12), Fact("tries", tries)),
    )


def halves(facts: Profile, name: str = "dear", fuse: int = 5) -> Plan:
    """Reduce-scatter under backward, all-gather on a second channel under the next forward."""
    size, link = len(facts.buckets), facts.links[0].name
    groups = _groups(size, fuse)
    rules = [
        _send("grad", group, Moment("grad", group[-1]), STEP, link, verb="reduce_scatter")
        for group in groups
    ]
    rules += [
        _send("grad", group, STEP, Moment("forward", group[-1], lag=1), channel(link, 1),
              verb="all_gather")
        for group in reversed(groups)
    ]  # fmt: skip
    return Plan(name, size, tuple(rules), (local(size, Moment("forward", lag=1), [0]),))


def _send(
    buffer: str,
    buckets: range,
    after: Moment,
    before: Moment,
    link: str,
    phases: Sequence[int] = (0,),
    **more: Any,
) -> Transfer:
    return transfer(buffer, buckets, after=after, before=before, phases=phases, link=link, **more)


def _groups(size: int, fuse: int) -> list[range]:
    return [range(i, min(size, i + fuse)) for i in range(0, size, fuse)]


@dataclass
class Clock:
    """Where every rank's compute and every link stand, in seconds."""

    now: list[float]
    free: dict[str, float]


def timeline(
    facts: Profile, plan: Plan, iterations: int, *, noise: float = 0.0, seed: int = 0
) -> Trace:
    """A plausible timeline: compute with noise, transfers FIFO per link once all ranks released;
    only deadlines in the same iteration are waited for."""
    rng = random.Random(seed)
    ranks = range(facts.world_size)
    clock = Clock([0.0 for _ in ranks], dict.fromkeys(plan.links, 0.0))
    spans: list[Span] = []
    ends: list[list[float]] = [[] for _ in ranks]
    for iteration in range(iterations):
        _iterate(facts, plan, iteration, clock, spans, lambda s: s * rng.lognormvariate(0, noise))
        for rank in ranks:
            ends[rank].append(clock.now[rank])
    return Trace(
        source="simulated",
        strategy=plan.strategy,
        ends_s=tuple(map(tuple, ends)),
        starts_s=tuple(0.0 for _ in ranks),
        spans=tuple(spans),
        period=plan.period,
    )


def _iterate(facts, plan, iteration, clock, spans, jitter) -> None:
    size, ranks = len(facts.buckets), range(facts.world_size)
    in_backward = any(apply.at.point == "grad" for apply in plan.applies)

    def compute(rank, kind, seconds, buckets=None):
        start = clock.now[rank]
        clock.now[rank] += seconds
        spans.append(Span(rank, COMPUTE, kind, iteration, start, clock.now[rank], buckets))

    ready = [[0.0] * size for _ in ranks]
    began = max(clock.now)
    for rank in ranks:
        compute(rank, "other", jitter(facts.other_s))
        for b in reversed(range(size)):
            compute(rank, "forward", jitter(facts.buckets[b].forward_s), (b, b + 1))
        for b in range(size):
            compute(rank, "backward", jitter(facts.buckets[b].backward_s), (b, b + 1))
            if in_backward:
                compute(rank, "update", jitter(facts.update_s / size), (b, b + 1))
            ready[rank][b] = clock.now[rank]
    late = 0.0
    phase = plan.phase(iteration)
    for rule in (rule for rule in plan.transfers if phase in rule.phases):
        last = rule.after.bucket if rule.after.bucket is not None else size - 1
        released = max(ready[rank][last] for rank in ranks)
        start = max(clock.free[rule.link], began if rule.after.point == "forward" else released)
        end = start + jitter(facts.message_s(rule.payload, rule.link, rule.verb))
        clock.free[rule.link] = end
        late = max(late, end if rule.before.lag == 0 else 0.0)
        spans += [_message(facts, plan, rule, rank, iteration, start, end) for rank in ranks]
    for rank in ranks:
        if late > clock.now[rank]:
            compute(rank, "wait", late - clock.now[rank])
        if not in_backward and Windows(plan).applied_window(iteration):
            compute(rank, "update", jitter(facts.update_s))


def _message(facts, plan, rule: Transfer, rank, iteration, start, end) -> Span:
    buckets = (rule.payload.buckets.start, rule.payload.buckets.stop)
    kind = rule.payload.buffer if rule.verb == "all_reduce" else rule.verb
    windows = Windows(plan)
    held = windows.window(iteration, rule.payload.age)
    carries = (held.start, held.stop) if windows.late else None
    size = facts.bytes_of(rule.payload)
    return Span(rank, rule.link, kind, iteration, start, end, buckets, size, carries)


@dataclass(frozen=True)
class Entry:
    """One contestant of a synthetic run; `pace` is how fast its loss falls per iteration."""

    label: str
    strategy: str
    plan: Plan
    pace: float = 0.03
    settings: Mapping[str, Any] | None = None
    decisions: Sequence[tuple[int, str]] = ()


def write_run(
    path: Path,
    facts: Profile,
    entries: Sequence[Entry],
    *,
    iterations: int = 120,
    repetitions: int = 2,
    recorded: int = 30,
    **overrides: Any,
) -> Path:
    """Write a whole run directory; `recorded` last iterations keep their spans."""
    path.mkdir(parents=True, exist_ok=True)
    links = [{"name": link.name, "rate": "100mbit", "latency": None} for link in facts.links]
    run = {
        "schema": 1,
        "command": ["offbeat", "compare"],
        "script": ["examples/gpt.py", "--steps", str(iterations)],
        "cluster": {
            "hosts": facts.world_size,
            "processes_per_host": 1,
            "threads": 1,
            "congestion_control": "cubic",
            "links": links,
            "overrides": [{"host": 1, "rates": {"net": "60mbit"}, "threads": None}],
        },
        "lab": "netns",
        "note": None,
        "emulated": False,
        "versions": {"offbeat": "0.1.0", "torch": "2.13.0", "python": "3.11.2", "kernel": "6.1.0"},
        "seed": 0,
        "started": "2026-11-20T14:00:00Z",
        "contestants": [
            {"label": e.label, "strategy": e.strategy, "settings": dict(e.settings or {})}
            for e in entries
        ],
        "repetitions": repetitions,
        "target_loss": None,
        "skip": 2,
    }
    _dump(path / "run.json", {**run, **overrides})
    facts.save(path / "profile.json")
    for number, entry in enumerate(entries):
        _write_contestant(path / entry.label, facts, entry)
        for rep in range(repetitions):
            trace = timeline(facts, entry.plan, iterations, noise=0.05, seed=10 * number + rep)
            _write_repetition(path / entry.label / f"rep{rep}", entry, trace, rep, recorded)
    return path


def _write_contestant(folder: Path, facts: Profile, entry: Entry) -> None:
    _dump(folder / "plan.json", entry.plan.to_dict())
    period = entry.plan.period
    whole = timeline(facts, entry.plan, 2 * period)
    spans = tuple(span for span in whole.spans if span.iteration >= period)
    steady = Trace(
        source="simulated",
        strategy=whole.strategy,
        ends_s=tuple(ends[period:] for ends in whole.ends_s),
        starts_s=tuple(ends[period - 1] for ends in whole.ends_s),
        spans=spans,
        first=period,
        period=period,
    )
    compute = facts.forward_s + facts.backward_s + facts.update_s + facts.other_s
    seconds = steady.iteration_s()
    busy = sum(s.end_s - s.start_s for s in spans if s.rank == 0 and s.lane == facts.links[0].name)
    notes = {
        "iteration_s": seconds,
        "bound_s": max(compute, busy / period) if period == 1 else compute * 0.99,
        "exposed_s": max(0.0, seconds - compute),
    }
    _dump(folder / "predicted.json", {**replace(steady, notes=notes).to_dict()})


def _write_repetition(folder: Path, entry: Entry, trace: Trace, rep: int, recorded: int) -> None:
    rng = random.Random(f"{entry.label}{rep}")
    since = trace.iterations - recorded
    for rank in range(trace.world_size):
        mine = tuple(s for s in trace.spans if s.rank == rank and s.iteration >= since)
        own = Trace(
            source="measured",
            strategy=entry.plan.strategy,
            ends_s=(trace.ends_s[rank],),
            starts_s=(trace.starts_s[rank],),
            spans=mine,
            period=trace.period,
        )
        losses = [
            [i, end, 2.2 + 1.9 * exp(-entry.pace * i) + rng.gauss(0, 0.06)]
            for i, end in enumerate(trace.ends_s[rank])
        ]
        sent = sum(s.bytes for s in trace.spans if s.rank == rank and s.lane != COMPUTE)
        record = {
            "rank": rank,
            "strategy": str(entry.plan.strategy),
            "observed": 0,
            "emulated": False,
            "losses": losses,
            "without_update": [
                i for i in range(trace.iterations) if not Windows(entry.plan).applied_window(i)
            ],
            "bytes": {"net": sent},
            "trace": own.to_dict(),
            "warnings": ["gloo chose the interface by itself"] if rank == 1 else [],
            "decisions": list(entry.decisions),
        }
        write_record(folder, record)
        (folder / f"rank{rank}.log").write_text(f"rank {rank} started\nstep 0\n")


def three(facts: Profile) -> list[Entry]:
    """DDP, local SGD and layer sets."""
    return [
        Entry("ddp", "ddp", every_gradient(facts), pace=0.045),
        Entry("local-sgd-5", "local-sgd", whole_model(facts), 0.034, {"period": 5}),
        Entry("dreamddp-5", "dreamddp", layer_sets(facts), 0.040, {"period": 5}),
    ]


def late(facts: Profile) -> list[Entry]:
    """DDP, merged generations on two links, and halves on two channels."""
    again = (40, "planned again with more capacity")
    return [
        Entry("ddp", "ddp", every_gradient(facts), pace=0.045),
        Entry("deft", "deft", merged(facts), 0.036, decisions=[again]),
        Entry("dear", "dear", halves(facts), 0.045),
    ]


def _dump(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))
