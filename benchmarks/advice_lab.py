"""Advice in the lab: by how much the advised method is slower than the best of all that could be.

    python benchmarks/advice_lab.py draw [--settings 12] [--seed 42]
    python benchmarks/advice_lab.py measure [--settings 12] [--seed 42] [--numbers 1-3]
                                            [--minutes 30] [--out runs/advice]
    python benchmarks/advice_lab.py tables [--settings 12] [--seed 42] [--out runs/advice]

A setting is a model of `zoo.py`, a number of hosts, a rate, a kind of network or of hosts, and a
largest staleness. `draw` prints the settings of a seed. They follow from the seed alone, so they
are chosen before the first one is measured; each value of a factor is in as many settings as every
other one, up to one.

`measure` measures the profile of a setting, takes the advice for it, and launches in turns the
advised strategy, the fastest options of other families by prediction (`--contenders` in all), DDP,
and one machine alone. A family is a strategy with a kind of change. Where the verdict is one
machine, one machine is the advised method. Hosts have an emulated pace; messages, losses and links
are real. A disturbed launch is repeated once. A further start with the same `--out` keeps complete
launches and settings; with `--minutes N` it stops N minutes after its start, within a launch if
need be. A setting that has failed is kept, too, and so is one in which some methods have failed,
with the others; delete its folder to measure it again.

`tables` writes results/advice_lab.json. Needs the lab and an otherwise idle machine; 2 to 3 minutes
per setting.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, NamedTuple

import tables
from predictions import time_limit
from stories_lab import Measured, SmallStory, measure

from offbeat.core.strategy.registry import BASELINE, create
from offbeat.experiments.advice.methods import Method, of_option, of_strategy
from offbeat.experiments.advice.selection import MAX_STALENESS, Advice, Option
from offbeat.experiments.advice.verdict import Verdict
from offbeat.lab.errors import LabError

RESULT = "advice_lab"
SEED, SETTINGS, MOST_SETTINGS = 42, 12, 48
CONTENDERS, SECONDS = 4, 8.0  # strategies without DDP; compute of a launch
LIMIT = 10.0  # %, of the advised method over the fastest measured one
PART = "setting.json"  # in the folder of a complete setting

FACTORS: dict[str, tuple[Any, ...]] = {
    "model": ("gpt", "resnet", "cnn", "mobilenet", "convnext", "vit", "lstm", "dlrm"),
    "hosts": (2, 4, 8),
    "rate_mbps": (25, 50, 100, 200),
    "kind": ("even", "delay", "jitter", "uplink", "unlike"),
    "max_staleness": (0, MAX_STALENESS),
}


class Setting(NamedTuple):
    """One drawn setting."""

    model: str
    hosts: int
    rate_mbps: int
    kind: str
    max_staleness: int

    @property
    def cluster(self) -> str:
        """Return the text of the cluster file."""
        lines = [f"hosts = {self.hosts}", f'rate = "{self.rate_mbps}mbit"']
        last = ["[[overrides]]", f"host = {self.hosts - 1}"]
        if self.kind == "delay":
            lines.append('latency = "20ms"')
        elif self.kind == "jitter":
            for host in range(self.hosts):
                lines += ["[[overrides]]", f"host = {host}", "jitter = 0.1"]
        elif self.kind == "uplink":
            lines += [*last, f'uplinks = {{ net = "{self.rate_mbps // 2}mbit" }}']
        elif self.kind == "unlike":
            lines += [*last, "speed = 0.667"]
        return "\n".join(lines) + "\n"

    def name(self, number: int) -> str:
        """Return the name of the setting's folder."""
        network = f"{self.hosts}hosts-{self.rate_mbps}mbit-{self.kind}-{self.max_staleness}"
        return f"{number:02d}-{self.model}-{network}"


# ---- drawing --------------------------------------------------------------------------------


def draw(count: int = SETTINGS, seed: int = SEED) -> list[Setting]:
    """Return different settings, each value of a factor in as many as every other one, up to one.

    Raises:
        ValueError: the number of settings is out of range.
    """
    if not 1 <= count <= MOST_SETTINGS:
        raise ValueError(f"count ({count}) must be at least 1 and at most {MOST_SETTINGS}")
    rng = Random(seed)
    while True:
        columns = []
        for values in FACTORS.values():
            order = rng.sample(values, len(values))
            column = [order[i % len(order)] for i in range(count)]
            rng.shuffle(column)
            columns.append(column)
        settings = [Setting(*row) for row in zip(*columns, strict=True)]
        if len({*settings}) == count:
            return settings


# ---- measuring ------------------------------------------------------------------------------


def contenders(advice: Advice, count: int) -> list[Option]:
    """Return the advised option, and the fastest options of other families by prediction."""
    families = {family_of(option): option for option in reversed(advice.options)}
    families[family_of(advice.chosen)] = advice.chosen
    ranked = sorted(families.values(), key=lambda option: option.update_s)
    others = [option for option in ranked if option is not advice.chosen]
    return [advice.chosen, *others[: count - 1]]


def family_of(option: Option) -> tuple[str, str]:
    """Return the strategy's name and the kind of change."""
    return option.strategy.name, option.change


def methods_of(verdict: Verdict, count: int) -> list[Method]:
    """Return the methods to launch beside one machine, DDP last."""
    place = verdict.place
    found = [of_option(option, place) for option in contenders(verdict.advice, count)]
    yardstick = of_strategy(create(BASELINE), place)
    if yardstick is not None and yardstick.label not in [method.label for method in found]:
        found.append(yardstick)
    return found


@dataclass(frozen=True)
class Part:
    """Kept result of a complete setting.

    Attributes:
        advised: label of the advised method.
        rows: of each method: label, measured [median, least, greatest] and predicted milliseconds
            per iteration, measured milliseconds per batch of a machine, launches, remarks.
        failure: message of a setting that has failed; empty otherwise.
        failed: messages of methods that have failed, which have no row.
    """

    advised: str
    rows: list[list[Any]]
    failure: str = ""
    failed: list[str] = field(default_factory=list)

    @property
    def batch_ms(self) -> dict[str, float]:
        """Return the measured milliseconds per batch by method."""
        return {row[0]: row[3] for row in self.rows}

    @property
    def is_disturbed(self) -> bool:
        """Return whether a launch was disturbed, and so was its repetition."""
        return any(row[5] for row in self.rows)

    @property
    def behind(self) -> float | None:
        """Return by how many per cent the advised method is slower than the fastest one; None if
        its launch has failed."""
        if self.advised not in self.batch_ms:
            return None
        return round(percent_behind(self.batch_ms, self.advised), 1)


def percent_behind(batch_ms: Mapping[str, float], label: str) -> float:
    """Return by how many per cent a method is slower than the fastest one."""
    return 100 * (batch_ms[label] / min(batch_ms.values()) - 1)


def part_of(found: Measured) -> Part:
    """Return the part of a measured setting."""
    predicted = {row.method.label: row.method for row in found.verdict.rows}
    predicted |= {one.label: one for one in methods_of(found.verdict, len(found.rows))}
    rows = []
    for label, row in found.rows.items():
        seconds = row.iteration_s or 0.0
        times_ms = [1e3 * one for one in (seconds, *(row.spread_s or (seconds, seconds)))]
        remarks = "; ".join(disturbance.text for disturbance in row.disturbed)
        rows.append(
            [
                label,
                [round(one, 1) for one in times_ms],
                round(1e3 * predicted[label].iteration_s, 1),
                round(1e3 * found.batch_s(label), 3),
                row.repetitions,
                remarks,
            ]
        )
    return Part(found.advised_label, rows, failed=[*found.failures])


def measure_setting(setting: Setting, folder: Path, options: argparse.Namespace) -> Part:
    """Return the part of a setting, measured or completed if it is not kept."""
    if (part := kept_part(folder)) is not None:
        return part
    story = SmallStory(folder.name, setting.model, setting.cluster, setting.max_staleness)
    try:
        found = measure(
            story,
            folder,
            options.launches,
            options.seconds,
            lambda verdict: methods_of(verdict, options.contenders),
        )
        part = part_of(found)
    except (SystemExit, LabError) as failure:
        part = Part("", [], str(failure))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PART).write_text(json.dumps(asdict(part)))
    return part


def kept_part(folder: Path) -> Part | None:
    """Return the part of a complete setting; None if it is not complete."""
    path = folder / PART
    return Part(**json.loads(path.read_text())) if path.exists() else None


# ---- tables ---------------------------------------------------------------------------------


def setting_row(setting: Setting, part: Part | None) -> list[Any]:
    """Return the row of a setting."""
    if part is None or part.failure:
        return [*setting, None, None, None, part.failure if part else "not measured"]
    fastest = min(part.batch_ms, key=part.batch_ms.__getitem__)
    remarks = [*(["disturbed"] if part.is_disturbed else []), *part.failed]
    return [*setting, part.advised, fastest, part.behind, "; ".join(remarks)]


def launch_rows(number: int, part: Part) -> Iterator[list[Any]]:
    """Yield the rows of the methods of a setting."""
    for label, times_ms, predicted_ms, _, launches, remarks in part.rows:
        yield [
            number,
            label + " (advised)" * (label == part.advised),
            times_ms,
            predicted_ms,
            round(100 * (predicted_ms / times_ms[0] - 1), 1),
            round(percent_behind(part.batch_ms, label), 1),
            launches,
            remarks,
        ]


def undisturbed_behind(part: Part | None) -> float | None:
    """Return `Part.behind` of a measured setting without a disturbed launch, otherwise None."""
    return None if part is None or part.is_disturbed else part.behind


def summary_row(parts: Sequence[Part | None]) -> list[Any]:
    """Return the row of all settings, without those with a disturbed launch."""
    behind = [one for one in map(undisturbed_behind, parts) if one is not None]
    figures = (round(fmean(behind), 1), max(behind)) if behind else (None, None)
    within = sum(one <= LIMIT for one in behind)
    return [f"{len(behind)} of {len(parts)}", *figures, within]


def result(options: argparse.Namespace) -> dict[str, Any]:
    """Return the result of all settings measured so far."""
    settings = draw(options.settings, options.seed)
    parts = [
        kept_part(options.out / setting.name(number)) for number, setting in enumerate(settings, 1)
    ]
    rows = [setting_row(setting, part) for setting, part in zip(settings, parts, strict=True)]
    chosen = f"--settings {options.settings} --seed {options.seed}"
    return {
        "title": "Advised methods beside the best measured ones, on settings drawn before",
        "what": (
            f"{len(settings)} settings of seed {options.seed}, drawn before the first one was "
            "measured. Advice decides from a profile of the hosts; then the advised strategy, the "
            "fastest options of other families by prediction, DDP and one machine are launched in "
            "turns. Hosts have an emulated pace; messages, losses and links are real."
        ),
        "how": ["emulated", "predicted"],
        "date": time.strftime("%Y-%m-%d"),
        "machine": tables.machine(),
        "command": f"python benchmarks/advice_lab.py measure {chosen}; "
        f"python benchmarks/advice_lab.py tables {chosen}",
        "tables": [
            {
                "name": "summary",
                "title": "Time of the advised method over the fastest measured one, without "
                "settings with a disturbed launch",
                "columns": ["settings", "mean, %", "largest, %", f"within {LIMIT:g} %"],
                "rows": [summary_row(parts)],
            },
            {
                "name": "settings",
                "title": "Settings in the order of their draw",
                "columns": [
                    *("model", "hosts", "Mbit/s", "kind", "largest staleness"),
                    *("advised", "fastest measured", "advised slower by, %", "remarks"),
                ],
                "rows": rows,
            },
            {
                "name": "launches",
                "title": "All methods, ms per iteration",
                "spread": "median [least, greatest] of the launches, of one launch its quartiles",
                "columns": [
                    *("setting", "method", "measured", "predicted", "error, %"),
                    *("slower than the fastest by, %", "launches", "remarks"),
                ],
                "rows": [
                    row
                    for number, part in enumerate(parts, 1)
                    if part is not None
                    for row in launch_rows(number, part)
                ],
            },
        ],
        "misses": [
            f"Setting {number}: {row[5]} is advised, {row[-2]} % slower than {row[6]}."
            for number, (row, part) in enumerate(zip(rows, parts, strict=True), 1)
            if (undisturbed_behind(part) or 0.0) > LIMIT
        ],
        "notes": [
            "Times are per batch of a machine: one machine alone trains one batch where N machines "
            "train N.",
            "Kinds: `delay` is 20 ms one way, `jitter` has a sigma of .1 on every host, `uplink` "
            "halves that of the last host, and under `unlike` the last host has .667 of the speed.",
        ],
    }


def numbers_of(text: str, count: int) -> range:
    """Return the numbers of settings that a text such as `1-20` or `7` names.

    Raises:
        ValueError: the text names no settings.
    """
    first, _, last = text.partition("-")
    found = range(int(first), int(last or first) + 1)
    if not found or found[0] < 1 or found[-1] > count:
        raise ValueError(f"numbers ({text}) must be from 1 to {count}, such as 1-20")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("draw", "measure", "tables"))
    parser.add_argument("--settings", type=int, default=SETTINGS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--numbers", default="", help="settings to measure, such as 1-3")
    parser.add_argument("--launches", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="compute of a launch")
    parser.add_argument("--contenders", type=int, default=CONTENDERS)
    parser.add_argument("--minutes", type=float, help="stop after this time")
    parser.add_argument("--out", type=Path, default=Path("runs", "advice"))
    options = parser.parse_args()
    settings = draw(options.settings, options.seed)
    if options.what == "tables":
        tables.save(RESULT, result(options))
        return
    numbers = numbers_of(options.numbers or f"1-{len(settings)}", len(settings))
    if options.what == "draw":
        for number in numbers:
            print(number, *settings[number - 1])
        return
    try:
        with time_limit(options.minutes):
            for number in numbers:
                setting, begin_s = settings[number - 1], time.monotonic()
                part = measure_setting(setting, options.out / setting.name(number), options)
                seconds = f"{time.monotonic() - begin_s:.0f} s"
                print(number, *setting_row(setting, part), seconds, flush=True)
    except KeyboardInterrupt:
        print("interrupted; the next start continues", flush=True)
    made = result(options)
    print(*(tables.table_text(made, table, selected=False) for table in made["tables"]))


if __name__ == "__main__":
    main()
