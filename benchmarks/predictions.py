"""Predictions against measurements: 21 strategies, nine models, four rates, two numbers of hosts,
and links with and without delay.

    python benchmarks/predictions.py draw                      draws the cells, before any launch
    python benchmarks/predictions.py measure --out DIR [--minutes 15] [--cells 1-20] [--launches 3]
    python benchmarks/predictions.py tables --out DIR          writes results/predictions.json

A cell is one strategy, model (`zoo.py`), rate, number of hosts and delay. `draw` writes
results/predictions_planned.json: 150 cells from a seed, in random order. Each pair of values of two
factors is in at least one cell, except for strategy and model: there are 189 such pairs, and 150
cells contain 150 of them. `draw --cells 189` contains all. With a given count the draw is the same
on each machine.

`measure` runs the cells in their order, which is random, so that the cells of any prefix are a fair
sample of all. A cell is one profile, its prediction and `--launches` launches. A launch that its
record marks as disturbed (other programs on the processors, or hosts behind their pace) is repeated
once; both are kept. A further start continues: complete cells and launches are kept, cells that
have failed are left out, and a larger number of launches adds the missing ones. Cells that have
their launches in results/predictions.json are left out, too, so that several machines can measure
one after the other; `tables` keeps their rows. With `--minutes N` it stops N minutes after its
start, within a launch if need be; that launch is repeated by the next start. At the end it prints
the table of errors.

    python benchmarks/predictions.py measure --minutes 15

Hosts have an emulated pace, the smallest that this machine can emulate. The rates are those of the
kernel. A delay is made by netem, or by the lab's switch in user space if the kernel has no netem,
which takes processor time. Needs the lab and an otherwise idle machine; about 2 minutes per cell.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import combinations, product
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

import tables

HERE = Path(__file__).parent
PLANNED, RESULT = "predictions_planned", "predictions"
COMMAND = "python benchmarks/predictions.py"
SEED, CELLS, LAUNCHES, TRIED = 42, 150, 3, 300
STEPS = (
    22  # iterations of a launch: periods are at most 5 iterations, of which the first is left out
)
LAUNCH_S = 900.0  # a launch that takes longer has failed
FAILED = "failures.txt"  # in the directory of a cell
MODELS = ("gpt", "resnet", "cnn", "mobilenet", "convnext", "vit", "lstm", "dlrm", "llama")
STRATEGIES = (
    "ddp",
    "wfbp",
    "asc-wfbp",
    "bsp",
    "bytescheduler",
    "dear",
    "p3",
    "us-byte",
    "cyclic",
    "deft",
    "diloco:period=5",
    "dreamddp",
    "dreamddp:due=delayed",
    "fedavg",
    "local-sgd",
    "partial-sync",
    "selsync",
    "ps-bsp",
    "ssp",
    "a2cid2",
    "ad-psgd",
)
RATES, HOSTS, DELAYS = (25, 50, 100, 200), (4, 8), (0, 20)  # Mbit/s, hosts, ms one-way
NEEDED = {"llama": "transformers"}  # packages of models
# Largest error in % of the median cell and of each cell. The second pair holds for 8 hosts, delay
# and cyclic plans, which use links fully.
LIMITS, HARD_LIMITS = (2, 5), (3, 7)


WHAT = (
    "The cells of `predictions_planned`, in random order, of which {measured} are measured without "
    "disturbance: seconds per iteration of the launches beside the prediction from the profile "
    "that was measured before them. Hosts compute at an emulated pace; messages, losses and links "
    "are real. A disturbed launch was repeated once."
)


class Cell(NamedTuple):
    """One measured combination."""

    strategy: str
    model: str
    rate_mbps: int
    hosts: int
    delay_ms: int

    @property
    def is_hard(self) -> bool:
        """Whether the larger limits hold."""
        return self.hosts > HOSTS[0] or self.delay_ms > 0 or self.strategy == "cyclic"

    def name(self, number: int) -> str:
        """Return the name of the cell's folder."""
        strategy = self.strategy.replace(":", "-").replace("=", "-")
        network = f"{self.rate_mbps}mbit-{self.hosts}hosts-{self.delay_ms}ms"
        return f"{number:03d}-{strategy}-{self.model}-{network}"


COLUMNS = [
    *("strategy", "model", "Mbit/s", "hosts", "delay, ms"),
    *("measured", "predicted", "error, %", "launches", "undisturbed launches", "date", "remarks"),
]
ERROR, LAUNCHED, UNDISTURBED = 7, 8, 9  # places of columns
ERRORS = [
    *("cells", "measured", "median error, %", "largest, %"),
    *("within the first limit, % of cells", "within the second", "limits, %"),
]
FACTORS = (STRATEGIES, MODELS, RATES, HOSTS, DELAYS)
Pair = tuple[int, Any, int, Any]  # factor and value, twice


# ---- drawing --------------------------------------------------------------------------------


def pairs_of(cell: Cell) -> Iterator[Pair]:
    """Yield the pairs of values in a cell."""
    for (i, a), (j, b) in combinations(enumerate(cell), 2):
        yield i, a, j, b


def all_pairs() -> set[Pair]:
    """Return all pairs of values of two factors."""
    return {
        (i, a, j, b)
        for (i, one), (j, other) in combinations(enumerate(FACTORS), 2)
        for a, b in product(one, other)
    }


def missing_pairs(cells: Iterable[Cell]) -> set[Pair]:
    """Return the pairs that no cell contains."""
    return all_pairs() - {pair for cell in cells for pair in pairs_of(cell)}


def is_strategy_and_model(pair: Pair) -> bool:
    """Return whether a pair is one of strategy and model."""
    return (pair[0], pair[2]) == (0, 1)


def draw(count: int = CELLS, seed: int = SEED) -> list[Cell]:
    """Return cells that cover as many pairs as possible, in random order.

    Each cell has another pair of strategy and model. One after the other is the best of `TRIED`
    random cells: those with the strategies and models that are in the fewest cells, and of these
    the one with the most missing pairs.

    Raises:
        ValueError: there are fewer pairs of strategy and model, or another pair is not covered.
    """
    rng, free = Random(seed), set(product(STRATEGIES, MODELS))
    if not 0 < count <= len(free):
        raise ValueError(f"count ({count}) must be at least 1 and at most {len(free)}")
    cells: list[Cell] = []
    used: Counter[str] = Counter()
    missing = all_pairs()
    while len(cells) < count:
        tried = [Cell(*map(rng.choice, FACTORS)) for _ in range(TRIED)]
        tried += [Cell(*pair, *map(rng.choice, FACTORS[2:])) for pair in sorted(free)]
        fitting = [cell for cell in tried if cell[:2] in free]
        best = max(
            fitting,
            key=lambda cell: (
                -used[cell.strategy],
                -used[cell.model],
                len(missing.intersection(pairs_of(cell))),
            ),
        )
        cells.append(best)
        free.remove(best[:2])
        used.update(best[:2])
        missing.difference_update(pairs_of(best))
    if other := [pair for pair in missing if not is_strategy_and_model(pair)]:
        raise ValueError(f"count ({count}) leaves {len(other)} pairs out; draw more cells")
    rng.shuffle(cells)
    return cells


def planned_result(count: int) -> dict[str, Any]:
    """Return the result with the drawn cells."""
    cells = draw(count)
    left = len(missing_pairs(cells))
    return {
        "title": "Cells of the predictions, drawn before the first measurement",
        "what": f"{count} of {len(STRATEGIES) * len(MODELS) * len(RATES) * len(HOSTS) * len(DELAYS)} combinations of strategy, model, rate, hosts and delay, in the order of their measurement. Each pair of values of two factors is in a cell, but for {left} of {len(STRATEGIES) * len(MODELS)} pairs of strategy and model: each cell contains one.",  # noqa: E501
        "how": ["predicted"],
        "date": time.strftime("%Y-%m-%d"),
        "machine": "not relevant: a draw from a seed",
        "command": "python benchmarks/predictions.py draw",
        "tables": [
            {
                "name": "planned",
                "title": f"Cells, seed {SEED}",
                "columns": ["strategy", "model", "Mbit/s", "hosts", "delay, ms"],
                "rows": [list(cell) for cell in cells],
            }
        ],
        "misses": [],
        "notes": [
            f"Each cell has {LAUNCHES} launches. Limits of errors, median and each: {LIMITS} %; "
            f"with 8 hosts, with delay and for cyclic plans {HARD_LIMITS} %."
        ],
    }


def planned_cells() -> list[Cell]:
    """Return the drawn cells of the file."""
    [table] = tables.load(PLANNED)["tables"]
    return [Cell(*row) for row in table["rows"]]


# ---- measuring ------------------------------------------------------------------------------


def missing_package(model: str) -> str | None:
    """Return the package that a model needs and that is not installed; None without one."""
    package = NEEDED.get(model)
    return package if package and find_spec(package) is None else None


def measure(cell: Cell, directory: Path, launches: int, steps: int = STEPS) -> bool:
    """Measure one cell, or continue its measurement; return whether it was not interrupted.

    Failures are written to `FAILED` in the directory.

    Args:
        cell: combination to measure.
        directory: run directory of the cell.
        launches: number of launches.
        steps: iterations of a launch.
    """
    from offbeat.core.strategy.parsing import parse
    from offbeat.experiments.compare import compare
    from offbeat.experiments.comparison import Comparison, Contestant, Setup
    from offbeat.experiments.record.run_directory import PROFILING, load_in
    from offbeat.lab import Cluster

    strategy = parse(cell.strategy)
    servers = int(strategy.needs.servers)
    delay = f"{cell.delay_ms}ms" if cell.delay_ms else None
    cluster = Cluster.simple(cell.hosts + servers, f"{cell.rate_mbps}mbit", latency=delay)
    script = (str(HERE / "zoo.py"), "--model", cell.model, "--steps", str(steps))
    setup = Setup(script, cluster, pace="auto", servers=servers, timeout_s=LAUNCH_S)
    contestant = Contestant(strategy.name, strategy)
    comparison = Comparison(setup, (contestant,), launches, repeat_disturbed=True)
    if directory.exists() and load_in(directory / PROFILING) is None:
        shutil.rmtree(directory)  # interrupted while the profile was measured
    try:
        ended = compare(comparison, directory, resume=(directory / "run.json").exists())
    except ValueError as error:  # settings that differ from those of the first start, for example
        print(f"{cell}: {error}", flush=True)
        return True
    if ended.failures:
        (directory / FAILED).write_text("\n".join(ended.failures) + "\n")
    return not ended.interrupted


def measure_all(out: Path, numbers: Iterable[int], launches: int, steps: int) -> None:
    """Measure cells in order until all are measured or the process is interrupted."""
    cells, before = planned_cells(), published_rows()
    for number in numbers:
        cell = cells[number - 1]
        directory = out / cell.name(number)
        row = row_of(cell, directory, before)
        if (
            missing_package(cell.model)
            or (directory / FAILED).exists()
            or row[LAUNCHED] >= launches
        ):
            print(number, *row, "(kept)", flush=True)
            continue
        if not measure(cell, directory, launches, steps):
            print("interrupted; the next start continues", flush=True)
            return
        print(number, *row_of(cell, directory, before), flush=True)


@contextmanager
def time_limit(minutes: float | None) -> Iterator[None]:
    """Raise KeyboardInterrupt in the body after some minutes, as Ctrl-C does; None for no limit."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 60 * minutes if minutes else 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def published() -> dict[str, Any]:
    """Return the result of earlier measurements; without tables if there is none."""
    return tables.load(RESULT) if RESULT in tables.names() else {"tables": []}


def published_rows() -> dict[Cell, list[Any]]:
    """Return the rows of measured cells in the result."""
    found = (table["rows"] for table in published()["tables"] if table["name"] == "cells")
    return {Cell(*row[:5]): row for rows in found for row in rows if row[LAUNCHED]}


def row_of(cell: Cell, directory: Path, before: Mapping[Cell, list[Any]]) -> list[Any]:
    """Return the row of a cell; its columns are `COLUMNS`.

    Args:
        cell: the cell.
        directory: run directory of the cell.
        before: rows of the result, which count for cells with fewer launches in their directory.
    """
    row, kept = measured_row(cell, directory), before.get(cell)
    return row if kept is None or row[LAUNCHED] >= kept[LAUNCHED] else kept


def measured_row(cell: Cell, directory: Path) -> list[Any]:
    """Return the row of the launches in the directory of a cell."""
    from offbeat.experiments.record.disturbed import disturbance_of
    from offbeat.experiments.record.run_directory import PROFILING, load_in
    from offbeat.experiments.report import load, summarize

    failures = directory / FAILED
    nothing = [*cell, None, None, None, 0, 0, ""]
    if package := missing_package(cell.model):
        return [*nothing, f"{package} is not installed"]
    if failures.exists():
        return [*nothing, "; ".join(failures.read_text().splitlines())]
    if not (directory / "run.json").exists():
        return [*nothing, "not measured"]
    row = next(iter(summarize(load(directory))), None)
    if row is None or row.iteration_s is None or row.predicted_s is None:
        return [*nothing, "not measured"]
    spread_s = (row.iteration_s, *(row.spread_s or (row.iteration_s,) * 2))
    error = 100 * (row.predicted_s / row.iteration_s - 1)
    remarks = [disturbance.text for disturbance in row.disturbed]
    undisturbed = row.repetitions - len(row.disturbed)
    if disturbance := disturbance_of(0, load_in(directory / PROFILING), {}):
        remarks.append(f"profile: {disturbance.text}")
        undisturbed = 0  # the prediction is as doubtful as a disturbed measurement
    if row.repeated:
        remarks.append(f"{row.repeated} repeated")
    measured_ms = [round(1e3 * seconds, 1) for seconds in spread_s]
    predicted_ms = round(1e3 * row.predicted_s, 1)
    counts = row.repetitions, undisturbed
    day = time.strftime("%Y-%m-%d", time.localtime((directory / "run.json").stat().st_mtime))
    return [*cell, measured_ms, predicted_ms, round(error, 1), *counts, day, "; ".join(remarks)]


def summary_rows(rows: Sequence[Sequence[Any]]) -> Iterator[list[Any]]:
    """Yield the row of `ERRORS` for both classes of cells and for all.

    Cells with a disturbed launch or profile do not count as measured.
    """
    classes = {False: ("4 hosts without delay", LIMITS), True: ("others", HARD_LIMITS)}
    total = [0, 0, 0, 0]
    every: list[float] = []
    for hard, (name, limits) in classes.items():
        cells = [row for row in rows if Cell(*row[:5]).is_hard is hard]
        errors = [abs(float(row[ERROR])) for row in cells if 0 < row[LAUNCHED] == row[UNDISTURBED]]
        within = [sum(error <= limit for error in errors) for limit in limits]
        counts = [len(errors), len(cells), *within]
        total = [a + b for a, b in zip(total, counts, strict=True)]
        every += errors
        yield summary_row(name, counts, errors, f"{limits[0]} and {limits[1]}")
    yield summary_row("all", total, every, "2 and 5, or 3 and 7")


def summary_row(
    name: str, counts: Sequence[int], errors: Sequence[float], limits: str
) -> list[Any]:
    """Return a row of `ERRORS`.

    Args:
        name: class of cells.
        counts: measured cells, all cells, and measured cells within each limit.
        errors: absolute errors of the measured cells in %.
        limits: the limits in words.
    """
    measured, cells, *within = counts
    found = (round(median(errors), 1), max(errors)) if errors else (None, None)
    shares = [round(100 * count / measured) if measured else None for count in within]
    return [name, f"{measured} of {cells}", *found, *shares, limits]


def result(out: Path) -> dict[str, Any]:
    """Return the result of all cells measured so far, with the misses and notes of the earlier
    one."""
    earlier, before = published(), published_rows()
    cells = enumerate(planned_cells(), 1)
    rows = [row_of(cell, out / cell.name(number), before) for number, cell in cells]
    summary = [*summary_rows(rows)]
    return {
        "title": "Predictions against measurements over strategies, models and networks",
        "what": WHAT.format(measured=summary[-1][1]),
        "how": ["emulated", "predicted"],
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "command": f"{COMMAND} measure; {COMMAND} tables",
        "tables": [
            {
                "name": "errors",
                "title": "Errors of predictions, without cells with a disturbed launch or profile",
                "columns": ERRORS,
                "rows": summary,
            },
            {
                "name": "cells",
                "title": "All cells, ms per iteration",
                "spread": "median [least, greatest] of the launches, of one launch its quartiles; "
                "where iterations differ (selsync, ssp) the mean",
                "columns": COLUMNS,
                "rows": rows,
            },
        ],
        "misses": earlier.get("misses", []),
        "notes": earlier.get("notes", []),
    }


def machine() -> str:
    """Return cores and versions of this machine."""
    import os
    import platform

    import torch

    version = torch.__version__.partition("+")[0]
    kernel, python = platform.release().split("-")[0], platform.python_version()
    return f"{os.cpu_count()} cores, Linux {kernel}, Python {python}, torch {version} on CPU, gloo"


def numbers_of(text: str, count: int) -> range:
    """Return the numbers of cells that a text such as `1-20` or `7` names.

    Raises:
        ValueError: the text names no cells.
    """
    first, _, last = text.partition("-")
    found = range(int(first), int(last or first) + 1)
    if not found or found[0] < 1 or found[-1] > count:
        raise ValueError(f"cells ({text}) must be numbers from 1 to {count}, such as 1-20")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw")
    drawing.add_argument("--cells", type=int, default=CELLS)
    for name in ("measure", "tables"):
        more = commands.add_parser(name)
        more.add_argument("--out", type=Path, default=Path("runs", "predictions"))
        if name == "measure":
            more.add_argument("--cells", default="", help="numbers, such as 1-20; default: all")
            more.add_argument("--steps", type=int, default=STEPS)
            text = "launches of each cell; a later start with more of them adds the others"
            more.add_argument("--launches", type=int, default=LAUNCHES, help=text)
            more.add_argument("--minutes", type=float, help="stop after this time")
    options = parser.parse_args()
    if options.command == "draw":
        if (tables.RESULTS / f"{RESULT}.json").exists():
            sys.exit(
                "results/predictions.json exists: cells are drawn before the first measurement"
            )
        tables.save(PLANNED, planned_result(options.cells))
    elif options.command == "tables":
        tables.save(RESULT, result(options.out))
    else:
        count = len(planned_cells())
        numbers = numbers_of(options.cells or f"1-{count}", count)
        try:
            with time_limit(options.minutes):
                measure_all(options.out, numbers, options.launches, options.steps)
        except KeyboardInterrupt:
            print("interrupted between two launches; the next start continues", flush=True)
        found = result(options.out)
        print(tables.table_text(found, found["tables"][0], selected=False))


if __name__ == "__main__":
    main()
