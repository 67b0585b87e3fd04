"""The tables of `slides.py`: what runs have learnt, and how long hosts would take for it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from slides_tasks import Task, methods

from offbeat.experiments.new_run import SKIP
from offbeat.experiments.record.run_directory import load_repetition
from offbeat.experiments.report import load, summarize
from offbeat.profile import Profile
from offbeat.server.simulation import ServedJob
from offbeat.sessions.separate_workers import compute_seconds, server_of
from offbeat.sim import Ranks, predict, simulate
from offbeat.strategies import SSP, Planned

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
    runs = _Runs(task, paces, out)
    if not runs.found:
        return
    length = runs.found[0]["iterations"]
    yield f"\n### {task.name}, {runs.hosts} hosts, {length} iterations, seeds: {len(runs.seeds)}\n"
    figure = "accuracy" if task.figure((0.0, 1.0)) else "held-out loss"
    yield HEAD.format(figure=figure)
    yield "|" + "---|" * (HEAD.count("|") - 1)
    for name in methods(1, 0):
        seeds = runs.of(name, "lab")
        if seeds:
            fewer = f" ({len(seeds)} of the seeds)" if len(seeds) < len(runs.seeds) else ""
            cells = [name + fewer, *runs.learnt(name), *runs.taken(name)]
            yield "| " + " | ".join(cells) + " |"


class _Runs:
    """The runs of one model on so many hosts, and what they would take at every pace."""

    def __init__(self, task: Task, paces: Mapping[str, Profile], out: Path) -> None:
        self.hosts, self._task, self._paces = paces["lab"].world_size, task, paces
        every = [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]
        mine = task.name, self.hosts
        self.found = [run for run in every if (run["model"], run["hosts"]) == mine]
        self.seeds = sorted({run["seed"] for run in self.found if run["method"] == "BSP"})
        self._plans = {
            (name, seed): strategy.plan(paces["lab"])
            for seed in self.seeds
            for name, strategy in methods(task.steps_per_epoch(self.hosts), seed).items()
            if isinstance(strategy, Planned)
        }
        self._courses = {
            (run["method"], pace, run["seed"]): (run, self._course(run, paces[pace]))
            for run in self.found
            for pace in ([run["pace"]] if "pace" in run else paces)
            if run["seed"] in self.seeds
        }

    def of(self, name: str, pace: str) -> dict[int, tuple[Run, Course]]:
        """A method's runs by seed."""
        keys = {seed: (name, pace, seed) for seed in self.seeds}
        return {seed: self._courses[key] for seed, key in keys.items() if key in self._courses}

    def learnt(self, name: str) -> list[str]:
        """LSSR, bytes, quality."""
        mine, bsp = self.of(name, "lab"), self.of("BSP", "lab")
        quality = _of([course.final for _, course in mine.values()], 3)
        if (name, self.seeds[0]) not in self._plans:  # pushes; an all-reduce sends more
            return ["–", f"{self.hosts / (2 * (self.hosts - 1)):.2f}", quality]
        shares = [self._local_share(run) for run, _ in mine.values()]
        sent = [_bytes(run) / _bytes(bsp[seed][0]) for seed, (run, _) in mine.items()]
        return [_of(shares, 2), _of(sent, 2), quality]

    def taken(self, name: str) -> list[str]:
        """Seconds per iteration, to BSP's quality, and the speed-up, at every pace."""
        cells = []
        for pace in self._paces:
            mine, bsp = self.of(name, pace), self.of("BSP", pace)
            targets = {seed: course.final for seed, (_, course) in bsp.items()}
            reached = [c.reached_s(self._task, targets[s]) for s, (_, c) in mine.items()]
            yardstick = [bsp[s][1].reached_s(self._task, targets[s]) for s in mine]
            pairs = zip(yardstick, reached, strict=True)
            cells.append(_of([course.iteration_s for _, course in mine.values()], 3))
            cells += [_of(reached, 1)] * (pace == "lab")
            cells.append(_of([b / s if b and s else None for b, s in pairs], 2))
        return cells

    def _course(self, run: Run, profile: Profile) -> Course:
        iterations = [int(row[0]) for row in run["quality"]]
        figures = [self._task.figure((row[1], row[2])) for row in run["quality"]]
        seconds = run.get("times_s")
        if seconds is None:
            plan, votes = self._plans[run["method"], run["seed"]], run["outcomes"] or None
            trace = simulate(plan, profile, iterations=run["iterations"], votes=votes)
            ends_s = [max(ends) for ends in zip(*trace.ends_s, strict=True)]
            seconds = [ends_s[i - 1] for i in iterations]
        return Course(iterations, seconds, figures, seconds[-1] / iterations[-1])

    def _local_share(self, run: Run) -> float:
        """LSSR: local over local and synchronous, by bytes where layers vote by themselves."""
        if run["sent_bytes"]:
            return run["spared_bytes"] / (run["sent_bytes"] + run["spared_bytes"])
        plan = self._plans[run["method"], run["seed"]]
        return 1 - fmean(any(p in t.phases for t in plan.transfers) for p in range(plan.period))


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
    told = load_repetition(directory / label / "rep0", 0).ranks
    ends_s = [record.trace.ends_s[0] for record in told]
    strategy = SSP(**json.loads((directory / label / "rep0" / "job.json").read_text())["settings"])
    made = ServedJob(
        server_of(profile, 1),
        compute_seconds(profile, Ranks(), len(ends_s[0]), 0),
        strategy.s,
        each_push=strategy.apply == "push",
    ).run()
    seen, said = (
        [(ends[-1] - ends[SKIP - 1]) / (len(ends) - SKIP) for ends in every]
        for every in (ends_s, made.ends_s)
    )
    fast, slow = f"{label}, fast workers", f"{label}, slow worker"
    return [(fast, fmean(seen[:-1]), fmean(said[:-1])), (slow, seen[-1], said[-1])]


def _bytes(run: Run) -> float:
    """Payload of a worker's messages, votes included."""
    return sum(run["bytes"].values())


def _of(values: Sequence[float | None], digits: int) -> str:
    """Median and range over seeds; "never" where it is not known."""
    known = [value for value in values if value is not None]
    if not values:
        return "–"
    if not known:
        return "never"
    low, middle, high = (f"{f(known):.{digits}f}" for f in (min, median, max))
    text = middle if low == high else f"{middle} [{low}, {high}]"
    missing = len(values) - len(known)
    return f"{text}, {missing} never" if missing else text
