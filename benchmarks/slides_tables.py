"""The tables of `slides.py`: what runs have learnt, and how long hosts would take for it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from slides_tasks import Task, methods

from offbeat.plan import Plan
from offbeat.profile import Profile
from offbeat.report import load, summarize
from offbeat.run.compare import SKIP
from offbeat.sim import Ranks, predict, simulate
from offbeat.sim.served import _compute_s, run_served, server_of
from offbeat.strategies import SSP

Run = Mapping[str, Any]
LAST = 3  # looks at held-out data that make the final quality

HEAD = (
    "| method | LSSR | bytes | {figure} | s/iteration | s to BSP's quality | speed-up "
    "| s/iteration, pace 1 | speed-up, pace 1 |"
)


@dataclass(frozen=True)
class Course:
    """One run on hosts of one pace: iterations, seconds after them, quality then."""

    iterations: list[int]
    seconds: list[float]
    figures: list[float]
    iteration_s: float

    @property
    def final(self) -> float:
        """Quality at the end: the mean of the last looks."""
        return fmean(self.figures[-LAST:])

    def reached_s(self, task: Task, target: float) -> float | None:
        """When it is first as good as BSP in the end, less the tolerance."""
        pairs = zip(self.seconds, self.figures, strict=True)
        return next((s for s, figure in pairs if task.reached(figure, target)), None)


def table(task: Task, paces: Mapping[str, Profile], out: Path) -> Iterator[str]:
    """One model on so many hosts; `paces`: profiles by what runs call them, "lab" first."""
    hosts = paces["lab"].world_size
    found = [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]
    found = [run for run in found if (run["model"], run["hosts"]) == (task.name, hosts)]
    seeds = sorted({run["seed"] for run in found})
    length = found[0]["iterations"]
    yield f"\n### {task.name}, {hosts} hosts, {length} iterations, {len(seeds)} seeds\n"
    figure = "accuracy" if task.figure((0.0, 1.0)) else "held-out loss"
    yield HEAD.format(figure=figure)
    yield "|" + "---|" * (HEAD.count("|") - 1)
    plans = _plans(task, paces, seeds)
    courses = {
        (run["method"], pace, run["seed"]): _course(task, run, plans, pace, paces[pace])
        for run in found
        for pace in ([run["pace"]] if "pace" in run else paces)
    }
    targets = {s: courses["BSP", "lab", s].final for s in seeds}
    sent = {run["seed"]: _bytes(run) for run in found if run["method"] == "BSP"}
    for name in dict.fromkeys(run["method"] for run in found):
        mine = [r for r in found if r["method"] == name and r.get("pace", "lab") == "lab"]
        lssr = [_local_share(run, plans.get((name, "lab", run["seed"]))) for run in mine]
        if "times_s" in mine[0]:  # pushes; an all-reduce passes more through each host
            cells = ["–", f"{hosts / (2 * (hosts - 1)):.2f}"]
        else:
            cells = [_of(lssr, 2), _of([_bytes(r) / sent[r["seed"]] for r in mine], 2)]
        cells.append(_of([courses[name, "lab", r["seed"]].final for r in mine], 3))
        for pace in paces:
            these = [(s, courses[name, pace, s]) for s in seeds if (name, pace, s) in courses]
            reached = [course.reached_s(task, targets[s]) for s, course in these]
            bsp = [courses["BSP", pace, s].reached_s(task, targets[s]) for s, _ in these]
            cells.append(_of([course.iteration_s for _, course in these], 3))
            if pace == "lab":
                cells.append(_of(reached, 1))
            cells.append(_of([b and r and b / r for b, r in zip(bsp, reached, strict=True)], 2))
        yield f"| {name} | " + " | ".join(cells) + " |"


def iterations_apart(every: Sequence[tuple[Task, Mapping[str, Profile]]]) -> Iterator[str]:
    """A local and a synchronous iteration of SelSync, predicted."""
    yield "\n| model | hosts | pace | SelSync | local, s | synchronous, s |"
    yield "|---|---|---|---|---|---|"
    for task, paces in every:
        for profile in paces.values():
            where = f"| {task.name} | {profile.world_size} | {profile.pace:g} "
            for name in ("PA", "GA", "layers"):
                strategy = methods(1, 0)[f"SelSync 0.3, {name}"]
                votes = [vote.name for vote in strategy.plan(profile).votes]
                cells = [
                    f"{predict(strategy, profile, votes=dict.fromkeys(votes, yes)).iteration_s:.3f}"
                    for yes in (0.0, 1.0)
                ]
                yield f"{where}| {name} | {' | '.join(cells)} |"


def measured(tasks: Sequence[Task], out: Path) -> Iterator[str]:
    """What the lab has measured. Workers of a server go at their own pace: each kind by itself."""
    yield "\n| model | method | LSSR | measured, s | predicted, s | error |"
    yield "|---|---|---|---|---|---|"
    for task in tasks:
        directory = out / f"lab-{task.name}"
        for row in summarize(load(directory)):
            lssr = "–" if row.lssr is None else f"{row.lssr:.2f}"
            cells = [(row.label, row.iteration_s, row.predicted_s)]
            if row.strategy.startswith("ssp"):
                cells = _by_kind(row.label, directory)
            for label, seen, said in cells:
                assert seen is not None
                assert said is not None
                numbers = f"{seen:.3f} | {said:.3f} | {100 * (said / seen - 1):+.1f} %"
                yield f"| {task.name} | {label} | {lssr} | {numbers} |"


def _by_kind(label: str, directory: Path) -> list[tuple[str, float, float]]:
    """Mean seconds per clock of the fast workers and of the slow one, measured and simulated over
    as many clocks."""
    profile = Profile.load(directory / "profile.json")
    records = sorted((directory / label / "rep0").glob("rank*.json"))
    told = [json.loads(path.read_text()) for path in records]
    ends_s = [record["trace"]["ends_s"][0] for record in told]
    strategy = SSP(**json.loads((directory / label / "rep0" / "job.json").read_text())["settings"])
    made = run_served(
        server_of(profile, 1),
        _compute_s(profile, Ranks(), len(ends_s[0]), 0),
        strategy.s,
        each_push=strategy.apply == "push",
    )
    seen, said = (
        [(ends[-1] - ends[SKIP - 1]) / (len(ends) - SKIP) for ends in every]
        for every in (ends_s, made.ends_s)
    )
    fast, slow = f"{label}, fast workers", f"{label}, slow worker"
    return [(fast, fmean(seen[:-1]), fmean(said[:-1])), (slow, seen[-1], said[-1])]


def _plans(
    task: Task, paces: Mapping[str, Profile], seeds: Sequence[int]
) -> dict[tuple[str, str, int], Plan]:
    found = {}
    for pace, profile in paces.items():
        for seed in seeds:
            every = methods(task.steps_per_epoch(profile.world_size), seed)
            for name, strategy in every.items():
                if strategy.planned:
                    found[name, pace, seed] = strategy.plan(profile)
    return found


def _course(
    task: Task, run: Run, plans: Mapping[tuple[str, str, int], Plan], pace: str, profile: Profile
) -> Course:
    iterations = [int(row[0]) for row in run["quality"]]
    figures = [task.figure((row[1], row[2])) for row in run["quality"]]
    if "times_s" in run:
        return Course(iterations, run["times_s"], figures, run["times_s"][-1] / iterations[-1])
    plan = plans[run["method"], pace, run["seed"]]
    trace = simulate(plan, profile, iterations=run["iterations"], votes=run["outcomes"] or None)
    ends_s = [max(ends) for ends in zip(*trace.ends_s, strict=True)]
    seconds = [ends_s[i - 1] for i in iterations]
    return Course(iterations, seconds, figures, seconds[-1] / iterations[-1])


def _bytes(run: Run) -> float:
    """Payload of a worker's messages, votes included."""
    return sum(run["bytes"].values())


def _local_share(run: Run, plan: Plan | None) -> float:
    """LSSR: local over local and synchronous, by bytes where layers have votes of their own."""
    if run.get("sent_bytes"):
        return run["spared_bytes"] / (run["sent_bytes"] + run["spared_bytes"])
    if plan is None:
        return 0.0
    return 1 - fmean(any(p in t.phases for t in plan.transfers) for p in range(plan.period))


def _of(values: Sequence[float | None], digits: int) -> str:
    """Median and range over seeds; "never" where it is not known."""
    known = [value for value in values if value is not None]
    if not known:
        return "never"
    low, middle, high = (f"{f(known):.{digits}f}" for f in (min, median, max))
    text = middle if low == high else f"{middle} [{low}, {high}]"
    missing = len(values) - len(known)
    return f"{text}, {missing} never" if missing else text
