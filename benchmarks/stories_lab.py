"""Questions of `stories.py` in small, in the lab: advice, and what it is about, measured.

    python benchmarks/stories_lab.py [--stories two-sites,...] [--launches 2] [--seconds 12]
                                     [--out runs/stories] [--save]

A question that the lab can pose is one of hosts with equal or unlike speed, of a rate and a delay.
Each has a profile of the hosts, the verdict of advice for it, and launches of one machine, of DDP
and of the advised strategy. Hosts compute at an emulated pace, the smallest that this machine can
emulate; messages, losses and links are real. Messages take .6 to 31 times the compute, where those
of some questions take more than 100 times. Predictions follow from the measured profile; a further
column has predictions from rate, delay and the compute of one machine alone, which need no network.

A launch computes for about `--seconds`, and for two periods at least. A further start with the same
`--out` continues. `--save` writes results/stories_lab.json. Needs the lab and an otherwise idle
machine; 6 to 8 minutes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tables
from stories import STORIES

from offbeat.core.strategy.parsing import text_of
from offbeat.core.strategy.registry import BASELINE, create
from offbeat.experiments.advice.methods import ALONE, Method, of_strategy, one_machine
from offbeat.experiments.advice.place import place_of, place_on_cluster
from offbeat.experiments.advice.selection import MAX_STALENESS
from offbeat.experiments.advice.verdict import Verdict, Work, decide, predict_methods
from offbeat.experiments.compare import compare
from offbeat.experiments.comparison import Comparison, Contestant, Setup
from offbeat.experiments.launcher import measure_profile
from offbeat.experiments.report import load, summarize
from offbeat.experiments.report.summary import Row
from offbeat.lab import Cluster
from offbeat.profile import Profile

HERE = Path(__file__).parent
RESULT = "stories_lab"
LEAST_STEPS, MOST_STEPS = 8, 40  # iterations of a launch; the first two are not measured
LAUNCH_S = 300.0  # a launch that takes longer has failed


@dataclass(frozen=True)
class SmallStory:
    """A question in small.

    Attributes:
        name: name of the question in `stories.py`.
        model: model of `zoo.py`.
        cluster: text of the cluster file.
        max_staleness: largest staleness of the advised strategy.
    """

    name: str
    model: str
    cluster: str
    max_staleness: int = MAX_STALENESS

    @property
    def question(self) -> str:
        return next(story.question for story in STORIES if story.name == self.name)

    def script(self, steps: int = MOST_STEPS) -> tuple[str, ...]:
        return (str(HERE / "zoo.py"), "--model", self.model, "--steps", str(steps))

    def setup(self) -> Setup:
        """Return the hosts with the smallest pace that this machine can emulate."""
        cluster = Cluster.from_toml(self.cluster)
        return Setup(self.script(), cluster, pace="auto", timeout_s=LAUNCH_S)


UNLIKE = """\
hosts = 4
rate = "50mbit"
[[overrides]]
host = 2
speed = 0.667
[[overrides]]
host = 3
speed = 0.667
"""
SMALL = (
    SmallStory("four-consumers", "gpt", 'hosts = 4\nrate = "20mbit"\n'),
    SmallStory("two-sites", "gpt", 'hosts = 2\nrate = "10mbit"\nlatency = "20ms"\n'),
    SmallStory("unlike-gpus", "resnet", UNLIKE),
    SmallStory("one-is-best", "gpt", 'hosts = 2\nrate = "20mbit"\n', max_staleness=0),
)


# ---- measuring ------------------------------------------------------------------------------


def profile_of(story: SmallStory, folder: Path) -> Profile:
    """Return the profile of all hosts, measured if it is not in the folder."""
    path = folder / "profile.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        outcome = measure_profile(story.setup(), path)
        if outcome.interrupted:
            raise KeyboardInterrupt
        if not outcome.measured:
            sys.exit(f"{story.name}: {'; '.join(outcome.failures)}")
    return Profile.load(path)


def verdict_of(story: SmallStory, profile: Profile) -> Verdict:
    """Return the verdict for the hosts of a profile."""
    place = place_of(profile, None, None)
    return decide(predict_methods(place, max_staleness=story.max_staleness), Work.of())


def methods_of(verdict: Verdict) -> list[Method]:
    """Return DDP and the advised strategy."""
    labels = dict.fromkeys((BASELINE, text_of(verdict.advice.chosen.strategy)))
    rows = [verdict.row(label) for label in labels]
    return [row.method for row in rows if row is not None]


def contestant_of(method: Method, seconds: float) -> Contestant:
    """Return a contestant with the iterations of a launch that computes for some seconds."""
    strategy = method.strategy or create(BASELINE)  # one machine runs any
    steps = ("--steps", str(steps_of(method, seconds)))
    return Contestant(text_of(strategy).replace(":", "-"), strategy, steps)


def steps_of(method: Method, seconds: float) -> int:
    """Return the iterations of a launch that computes for some seconds: at least three periods,
    the first of which is left out."""
    least = max(LEAST_STEPS, 3 * getattr(method.strategy, "period", 1))
    return max(least, min(MOST_STEPS, round(seconds / method.iteration_s)))


def run(
    setup: Setup,
    chosen: Mapping[str, Contestant],
    launches: int,
    folder: Path,
    profile: Path | None = None,
) -> tuple[dict[str, Row], list[str]]:
    """Run contestants, or complete their run.

    Returns:
        The rows of the report by label, without contestants that have failed, and their failures.

    Raises:
        SystemExit: the run has failed as a whole.
    """
    contestants = tuple(chosen.values())
    comparison = Comparison(setup, contestants, launches, profile=profile, repeat_disturbed=True)
    outcome = compare(comparison, folder, resume=(folder / "run.json").exists())
    if outcome.interrupted:
        raise KeyboardInterrupt
    rows = {row.label: row for row in summarize(load(folder)) if row.iteration_s is not None}
    kept = {label: rows[one.label] for label, one in chosen.items() if one.label in rows}
    failed_launches = launches * (len(chosen) - len(kept))  # at most, of these contestants
    if not outcome.measured or len(outcome.failures) > failed_launches:
        sys.exit("; ".join(outcome.failures))
    return kept, outcome.failures


@dataclass(frozen=True)
class Measured:
    """A question in small with its verdict and its measured methods.

    Attributes:
        story: the question.
        profile: profile of the hosts.
        verdict: verdict for this profile.
        rows: measured rows by label of the method.
        failures: failures of methods without a row.
    """

    story: SmallStory
    profile: Profile
    verdict: Verdict
    rows: dict[str, Row]
    failures: Sequence[str] = ()

    def batch_s(self, label: str) -> float:
        """Return the measured seconds per batch of one machine."""
        replicas = 1 if label == ALONE else self.verdict.place.machines
        return (self.rows[label].iteration_s or 0.0) / replicas

    @property
    def fastest_label(self) -> str:
        """Return the label of the method that was measured to be the fastest."""
        return min(self.rows, key=self.batch_s)

    @property
    def advised_label(self) -> str:
        """Return the label of one machine if it is the best one, else of the advised strategy."""
        if self.verdict.best.method.label == ALONE:
            return ALONE
        return text_of(self.verdict.advice.chosen.strategy)


def measure(
    story: SmallStory,
    folder: Path,
    launches: int,
    seconds: float,
    choose: Callable[[Verdict], Sequence[Method]] = methods_of,
) -> Measured:
    """Return a question with its measured methods: one machine, and the chosen ones."""
    profile = profile_of(story, folder)
    verdict = verdict_of(story, profile)
    chosen = {method.label: contestant_of(method, seconds) for method in choose(verdict)}
    rows, failures = run(story.setup(), chosen, launches, folder / "all", folder / "profile.json")
    alone = verdict.row(ALONE)
    assert alone is not None
    compute = verdict.place.one_machine
    compute.save(folder / "one.json")
    host = f"hosts = 1\n[[overrides]]\nhost = 0\njitter = {compute.jitters[0]}\n"
    one = Setup(story.script(), Cluster.from_toml(host), timeout_s=LAUNCH_S)
    chosen = {ALONE: contestant_of(alone.method, seconds / 2)}
    row, more = run(one, chosen, launches, folder / "one", folder / "one.json")
    return Measured(story, profile, verdict, rows | row, [*failures, *more])


# ---- tables ---------------------------------------------------------------------------------


def from_rate(one: Measured) -> dict[str, Method]:
    """Return by label the methods as predicted from rate and delay, with the compute of the fastest
    machine."""
    there = one.verdict.place
    place = place_on_cluster(there.fastest_machine, Cluster.from_toml(one.story.cluster))
    found = {ALONE: one_machine(place)}
    for row in one.verdict.rows:
        if row.method.label in one.rows and row.method.strategy is not None:
            method = of_strategy(row.method.strategy, place)
            if method is not None:  # else it falls back to another strategy there
                found[row.method.label] = method
    return found


def method_rows(one: Measured) -> Iterator[list[Any]]:
    rated = from_rate(one)
    for label, row in one.rows.items():
        verdict_row = one.verdict.row(label)
        assert verdict_row is not None
        assert row.iteration_s is not None
        predicted_s = verdict_row.method.iteration_s
        spread_s = row.iteration_s, *(row.spread_s or (row.iteration_s,) * 2)
        there = rated.get(label)
        rated_s = () if there is None else (there.iteration_s, there.low_s, there.high_s)
        remarks = [disturbance.text for disturbance in row.disturbed]
        yield [
            one.story.name,
            label + " (advised)" * (label == one.advised_label),
            _ms(spread_s),
            round(1e3 * predicted_s, 1),
            round(100 * (predicted_s / row.iteration_s - 1), 1),
            _ms(rated_s) or None,
            float(f"{one.batch_s(ALONE) / one.batch_s(label):.3g}"),
            float(f"{_batch_s(one, ALONE) / _batch_s(one, label):.3g}"),
            row.repetitions,
            "; ".join(remarks),
        ]


def _ms(seconds: Sequence[float]) -> list[float]:
    return [round(1e3 * one, 1) for one in seconds]


def _batch_s(one: Measured, label: str) -> float:
    row = one.verdict.row(label)
    assert row is not None
    return row.method.batch_s


def verdict_rows(found: Sequence[Measured]) -> Iterator[list[Any]]:
    for one in found:
        place, link = one.verdict.place, one.profile.default_link
        compute_s = place.profile.slowest().compute_s
        message_s = sum(place.profile.communication_s(link.name, "grad"))
        small = " ".join(line for line in one.story.cluster.split("\n") if "=" in line)
        yield [
            one.story.question,
            small.replace('"', "").replace("[[overrides]]", "").strip(),
            one.story.model,
            float(f"{message_s / compute_s:.2g}"),
            one.advised_label,
            one.fastest_label,
            "yes" if one.advised_label == one.fastest_label else "no",
        ]


def result(found: Sequence[Measured], launches: int) -> dict[str, Any]:
    names = ",".join(one.story.name for one in found)
    options = f"--stories {names} --launches {launches}"
    rows = [row for one in found for row in method_rows(one)]
    wrong = [one for one in found if one.advised_label != one.fastest_label]
    return {
        "title": "Questions in small: verdicts beside measured launches",
        "what": (
            "Questions of the result `stories` in small: hosts with an emulated pace, real "
            "messages, rates and delays of the lab. Advice decides from a profile of the hosts; "
            "then one machine, DDP and the advised strategy are launched in turns."
        ),
        "how": ["emulated", "predicted"],
        "date": time.strftime("%Y-%m-%d"),
        "machine": tables.machine(),
        "command": f"python benchmarks/stories_lab.py {options} --save",
        "tables": [
            {
                "name": "verdicts",
                "title": "Verdicts",
                "columns": [
                    *("question", "in small", "model", "messages / compute"),
                    *("advised", "fastest measured", "agree"),
                ],
                "rows": [*verdict_rows(found)],
            },
            {
                "name": "methods",
                "title": "Milliseconds per iteration, and samples per second beside one machine",
                "spread": "median [least, greatest] of the launches, of one launch its quartiles; "
                "estimates with their range",
                "columns": [
                    *("question", "method", "measured, ms", "predicted, ms", "error, %"),
                    *("from the rate, ms", "speed, measured", "speed, predicted"),
                    *("launches", "remarks"),
                ],
                "rows": rows,
                "page": {
                    "columns": [
                        *("question", "method", "measured, ms", "predicted, ms"),
                        *("from the rate, ms", "speed, measured"),
                    ]
                },
            },
        ],
        "misses": [
            f"{one.story.name}: {one.advised_label} is advised; {one.fastest_label} was faster."
            for one in wrong
        ],
        "notes": [
            "Loss of packets is left out of the two sites, and messages take fewer times the "
            "compute than in the questions: DDP would take hours.",
            "Two machines with ZeRO-3 cannot be emulated; its bytes and times are those of "
            "`stories`. Result `nodes` has ZeRO-3 on emulated hosts of one rank.",
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stories", default=",".join(story.name for story in SMALL))
    parser.add_argument("--launches", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=12.0, help="compute of a launch")
    parser.add_argument("--out", type=Path, default=Path("runs", "stories"))
    parser.add_argument("--save", action="store_true", help="write results/stories_lab.json")
    options = parser.parse_args()
    found = []
    for name in options.stories.split(","):
        story = next(story for story in SMALL if story.name == name)
        begin_s = time.time()
        try:
            one = measure(story, options.out / name, options.launches, options.seconds)
        except KeyboardInterrupt:
            sys.exit("interrupted; the next start continues")
        if one.failures:
            sys.exit("; ".join(one.failures))
        found.append(one)
        made = result([one], options.launches)
        print(*(tables.table_text(made, table, selected=False) for table in made["tables"]))
        print(f"{name}: {time.time() - begin_s:.0f} s", flush=True)
    if options.save:
        tables.save(RESULT, result(found, options.launches))


if __name__ == "__main__":
    main()
