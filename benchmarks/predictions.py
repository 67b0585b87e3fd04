"""Predictions against measurements: 21 strategies, nine models, four rates, two numbers of hosts,
and links with and without delay.

    python benchmarks/predictions.py measure [--minutes 120] [--launches 1] [--cells 7 11 12]
    python benchmarks/predictions.py tables         writes results/predictions.json
    python benchmarks/predictions.py recompute      predicts all stored cells anew

A cell is one strategy, model (`zoo.py`), rate, number of hosts and delay. The 150 cells of
results/predictions_planned.json were drawn from a seed before the first measurement, in random
order. Each pair of values of two factors is in at least one cell, except for strategy and model:
there are 189 such pairs, and 150 cells contain 150 of them.

`measure` stores each complete cell in results/cells, with its profile, its seconds and whatever
else its prediction depends on. A cell is one profile and `--launches` launches. A profile or launch
that its record marks as disturbed (other programs on the processors, or hosts behind their pace) is
measured once more, and the second one counts. Cells with a file are left out; delete it, and the
cell's folder in `--out`, to measure a cell anew. The others follow in rounds of one cell of each
strategy, so that the cells of any prefix are a fair sample of all. A further start continues an
interrupted cell and tries cells last that have failed. With `--minutes N` it stops N minutes after
its start, within a launch if need be; that launch is repeated by the next start. At the end it
prints the table of errors.

`tables` keeps the published row of a cell without a file. `recompute` makes plans and predictions
of the stored cells anew, with two processes, and prints them beside the stored ones. Its exit code
is 1 if a cell with a plan or their median is worse than stored, or if cells with servers or gossip
exceed their limits (`complaints`).

Hosts have an emulated pace, the smallest that this machine can emulate. The rates are those of the
kernel. A delay is made by netem, or by the lab's switch in user space if the kernel has no netem,
which takes processor time. Needs the lab and an otherwise idle machine; 2 to 4 minutes per cell.
"""

from __future__ import annotations

import argparse
import json
import lzma
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from warnings import catch_warnings

import tables

HERE = Path(__file__).parent
PLANNED, RESULT = "predictions_planned", "predictions"
STORED = tables.RESULTS / "cells"  # one file per measured cell
COMMAND = "python benchmarks/predictions.py"
COUNT, LAUNCHES = 150, 3
STEPS = 22  # iterations of a launch: the first period, of at most 5 iterations, is left out
LAUNCH_S = 900.0  # a launch that takes longer has failed
FAILED = "failures.txt"  # in the directory of a cell
NEEDED = {"llama": "transformers"}  # packages of models
# Largest error in % of the median cell and of each cell. The second pair holds for 8 hosts, delay
# and cyclic plans, which use links fully.
LIMITS, HARD_LIMITS = (2, 5), (3, 7)
WORSE = 0.3  # largest growth of an error of a planned cell that `recompute` accepts, in %
ROUNDING = 0.005  # as WORSE, for the median
UNPLANNED_LIMITS = 5, 19  # as LIMITS, for `recompute` of cells with servers and gossip

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
        return self.hosts > 4 or self.delay_ms > 0 or self.strategy == "cyclic"

    def name(self, number: int) -> str:
        """Return the name of the cell's folder."""
        strategy = self.strategy.replace(":", "-").replace("=", "-")
        network = f"{self.rate_mbps}mbit-{self.hosts}hosts-{self.delay_ms}ms"
        return f"{number:03d}-{strategy}-{self.model}-{network}"


COLUMNS = [
    *("strategy", "model", "Mbit/s", "hosts", "delay, ms"),
    *("measured", "predicted", "error, %", "launches", "undisturbed launches", "date", "remarks"),
]
ERROR, LAUNCHED, UNDISTURBED, DAY = 7, 8, 9, 10  # places of columns
ERRORS = [
    *("cells", "measured", "median error, %", "largest, %"),
    *("within the first limit, % of cells", "within the second", "limits, %"),
]


def planned_cells() -> list[Cell]:
    """Return the drawn cells of the file."""
    [table] = tables.load(PLANNED)["tables"]
    return [Cell(*row) for row in table["rows"]]


def measuring_order(cells: Sequence[Cell]) -> list[int]:
    """Return the numbers of the cells in rounds, each with one cell of every strategy that is left.

    Within a round they keep their order, which is random.
    """
    seen: Counter[str] = Counter()
    rounds: dict[int, int] = {}
    for number, cell in enumerate(cells, 1):
        rounds[number] = seen[cell.strategy]
        seen[cell.strategy] += 1
    return sorted(rounds, key=rounds.__getitem__)


# ---- measuring ------------------------------------------------------------------------------


def missing_package(model: str) -> str | None:
    """Return the package that a model needs and that is not installed; None without one."""
    package = NEEDED.get(model)
    return package if package and find_spec(package) is None else None


def setup_of(cell: Cell, steps: int = STEPS) -> Any:
    """Return script and cluster of a cell."""
    from offbeat.core.strategy.parsing import parse
    from offbeat.experiments.comparison import Setup
    from offbeat.lab import Cluster

    servers = int(parse(cell.strategy).needs.servers)
    delay = f"{cell.delay_ms}ms" if cell.delay_ms else None
    cluster = Cluster.simple(cell.hosts + servers, f"{cell.rate_mbps}mbit", latency=delay)
    script = (str(HERE / "zoo.py"), "--model", cell.model, "--steps", str(steps))
    return Setup(script, cluster, pace="auto", servers=servers, timeout_s=LAUNCH_S)


def measure(cell: Cell, directory: Path, launches: int, steps: int = STEPS) -> list[str]:
    """Measure one cell, or continue its measurement; return its failures.

    They are written to `FAILED` in the directory, and the next call begins anew.

    Args:
        cell: combination to measure.
        directory: run directory of the cell.
        launches: number of launches.
        steps: iterations of a launch.

    Raises:
        KeyboardInterrupt: the cell is not complete.
    """
    from offbeat.core.strategy.parsing import parse
    from offbeat.experiments.compare import compare
    from offbeat.experiments.comparison import Comparison, Contestant
    from offbeat.experiments.record.run_directory import PROFILING, load_in

    strategy = parse(cell.strategy)
    contestant = Contestant(strategy.name, strategy)
    setup = setup_of(cell, steps)
    comparison = Comparison(setup, (contestant,), launches, repeat_disturbed=True)
    interrupted_profile = load_in(directory / PROFILING) is None
    if directory.exists() and (interrupted_profile or (directory / FAILED).exists()):
        shutil.rmtree(directory)
    resume = (directory / "run.json").exists()
    try:
        ended = compare(comparison, directory, resume=resume)
    except ValueError:
        if not resume:
            raise
        shutil.rmtree(directory)  # of other settings, or not readable
        ended = compare(comparison, directory)
    if ended.interrupted:
        raise KeyboardInterrupt
    if ended.failures:
        (directory / FAILED).write_text("\n".join(ended.failures) + "\n")
    return ended.failures


def measure_all(out: Path, numbers: Iterable[int], launches: int, steps: int) -> None:
    """Measure and store the cells without a file until all are or the process is interrupted.

    A failure is printed, and the next cell is measured. Cells that have failed before come last.
    """
    cells, wanted = planned_cells(), set(numbers)
    folders = {n: out / cells[n - 1].name(n) for n in measuring_order(cells) if n in wanted}
    for number in sorted(folders, key=lambda n: (folders[n] / FAILED).exists()):
        cell, folder = cells[number - 1], folders[number]
        path, package = stored_path(folder.name), missing_package(cell.model)
        if package or path.exists():
            print(folder.name, f"needs {package}" if package else "is stored", flush=True)
            continue
        try:
            failures = measure(cell, folder, launches, steps)
            if not failures:
                save_cell(path, stored_cell(cell, folder))
        except Exception as error:  # of the lab, or of a file
            failures = [f"{type(error).__name__}: {error}"]
        row = row_of(cell, number, {})[len(cell) :]
        print(folder.name, *(failures or row), flush=True)


@contextmanager
def time_limit(minutes: float | None) -> Iterator[None]:
    """Raise KeyboardInterrupt in the body after some minutes (None: never) or at SIGTERM."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    signals = signal.SIGALRM, signal.SIGTERM
    before = [signal.signal(number, interrupt) for number in signals]
    signal.setitimer(signal.ITIMER_REAL, 60 * minutes if minutes else 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


# ---- stored cells ---------------------------------------------------------------------------


def stored_path(name: str) -> Path:
    """Return the file of a cell."""
    return STORED / f"{name}.json.xz"


def save_cell(path: Path, stored: Mapping[str, Any]) -> None:
    """Write the file of a cell in one step."""
    path.parent.mkdir(exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_bytes(lzma.compress(json.dumps(stored, separators=(",", ":")).encode()))
    draft.replace(path)


def load_cell(path: Path) -> dict[str, Any]:
    """Return the content of the file of a cell."""
    return json.loads(lzma.decompress(path.read_bytes()))


def stored_cell(cell: Cell, directory: Path) -> dict[str, Any]:
    """Return what is stored of a measured cell.

    Its prediction is computed as `recompute` does, which gives that of the run.

    Raises:
        ValueError: a launch is not complete.
    """
    from offbeat.experiments.predictions import vote_outcomes
    from offbeat.experiments.record.run_directory import count_skipped, load
    from offbeat.experiments.report.summary import iteration_s, summarize

    run = load(directory)
    [contestant], [row] = run.contestants, summarize(run)
    launches = [
        {
            "seed": run.seeds[rep.index],
            "iterations": rep.trace.iterations,
            "iteration_s": iteration_s(run, rep),
            "period_s": rep.trace.period_seconds(count_skipped(run, rep)),
            "disturbed": rep.disturbance.text if rep.disturbance else "",
            "repeated": rep.repeated,
        }
        for rep in contestant.repetitions
        if rep.complete
    ]
    known = None not in (run.profile, row.predicted_s, row.iteration_s)
    if len(launches) < run.repetitions or not known:
        raise ValueError(f"{directory} is not complete: {'; '.join(run.failures())}")
    disturbance, plan = run.profile_disturbed, contestant.plan
    stored = {
        "cell": cell,
        "date": run.started[:10],
        "machine": tables.machine(),
        "settings": contestant.settings,
        "launches": launches,
        "predicted_by_run_s": row.predicted_s,
        "profile_disturbed": disturbance.text if disturbance else "",
        "broadcasts": any(t.verb == "broadcast" for t in plan.transfers) if plan else False,
        "votes": vote_outcomes(directory / contestant.label / "rep0"),
        "profile": json.loads((directory / "profile.json").read_text()),
    }
    predicted_s, digest = predict(stored)
    return {**stored, "predicted_s": predicted_s, "plan": digest}


def predict(stored: Mapping[str, Any]) -> tuple[float, str | None]:
    """Return the predicted seconds per iteration of a stored cell, and the digest of its plan.

    The plan is made anew, as the runtime made it. Strategies with servers and gossip have none.
    """
    from offbeat.core.derive.broadcast import with_broadcast
    from offbeat.core.guards.suitable_strategy import strategy_that_runs
    from offbeat.core.profile import Profile
    from offbeat.core.strategy.parsing import parse
    from offbeat.experiments import predictions
    from offbeat.strategies import Planned

    cell, profile = Cell(*stored["cell"]), Profile.from_dict(stored["profile"])
    strategy, setup = parse(cell.strategy), setup_of(cell)
    plan = iterations = None
    with TemporaryDirectory() as folder, catch_warnings(action="ignore"):  # of DeFT without windows
        if isinstance(strategy, Planned):
            plan = strategy_that_runs(strategy, profile).plan(profile)
            if stored["broadcasts"]:
                plan = with_broadcast(plan, profile.default_link.name)
        elif setup.servers:
            iterations = max(launch["iterations"] for launch in stored["launches"])
        predicted_s = predictions.predict(
            strategy,
            profile,
            Path(folder),
            plan,
            votes=stored["votes"],
            servers=setup.servers,
            ranks=None if plan else setup.ranks,
            iterations=iterations,
        )
    return predicted_s, plan and plan.digest


# ---- tables ---------------------------------------------------------------------------------


def published() -> dict[str, Any]:
    """Return the result of earlier measurements; without tables if there is none."""
    return tables.load(RESULT) if RESULT in tables.names() else {"tables": []}


def published_rows() -> dict[Cell, list[Any]]:
    """Return the rows of measured cells in the result."""
    found = (table["rows"] for table in published()["tables"] if table["name"] == "cells")
    return {Cell(*row[:5]): row for rows in found for row in rows if row[LAUNCHED]}


def row_of(cell: Cell, number: int, before: Mapping[Cell, list[Any]]) -> list[Any]:
    """Return the row of a cell, from its file or else from `before`; columns are `COLUMNS`."""
    path = stored_path(cell.name(number))
    if path.exists():
        return stored_row(load_cell(path))
    return before.get(cell) or [*cell, None, None, None, 0, 0, "", "not measured"]


def stored_row(stored: Mapping[str, Any]) -> list[Any]:
    """Return the row of a stored cell."""
    launches, predicted_s = stored["launches"], stored["predicted_s"]
    measured_s, *spread_s = measured(stored)
    remarks = [launch["disturbed"] for launch in launches if launch["disturbed"]]
    undisturbed = len(launches) - len(remarks)
    if stored["profile_disturbed"]:
        remarks.append(f"profile: {stored['profile_disturbed']}")
        undisturbed = 0  # the prediction is as doubtful as a disturbed measurement
    if repeated := sum(launch["repeated"] for launch in launches):
        remarks.append(f"{repeated} repeated")
    if abs(stored["predicted_by_run_s"] / predicted_s - 1) > 1e-9:
        remarks.append(f"predicted by the run: {1e3 * stored['predicted_by_run_s']:.1f}")
    measured_ms = [round(1e3 * seconds, 1) for seconds in (measured_s, *spread_s)]
    error = round(100 * (predicted_s / measured_s - 1), 1)
    counts = len(launches), undisturbed
    columns = measured_ms, round(1e3 * predicted_s, 1), error, *counts, stored["date"]
    return [*stored["cell"], *columns, "; ".join(remarks)]


def measured(stored: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return the median of the launches and their extremes, of one launch its quartiles."""
    seconds = [launch["iteration_s"] for launch in stored["launches"]]
    periods_s = stored["launches"][0]["period_s"]
    if len(seconds) > 1 or len(periods_s) < 2:
        return median(seconds), min(seconds), max(seconds)
    low, _, high = quantiles(periods_s, n=4, method="inclusive")
    return seconds[0], low, high


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


def result() -> dict[str, Any]:
    """Return the result of all cells, with the misses and notes of the earlier one."""
    earlier, before = published(), published_rows()
    rows = [row_of(cell, n, before) for n, cell in enumerate(planned_cells(), 1)]
    summary = [*summary_rows(rows)]
    return {
        "title": "Predictions against measurements over strategies, models and networks",
        "what": WHAT.format(measured=summary[-1][1]),
        "how": ["emulated", "predicted"],
        "date": str(max((row[DAY] for row in rows), default="")),
        "machine": tables.machine(),
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


# ---- recomputing ----------------------------------------------------------------------------


class Recomputed(NamedTuple):
    """New prediction of a stored cell."""

    name: str
    is_planned: bool
    is_undisturbed: bool
    measured_s: float
    stored_s: float
    new_s: float
    same_plan: bool

    @property
    def errors(self) -> tuple[float, float]:
        """Errors of the stored and the new prediction in %."""
        before, now = (100 * (s / self.measured_s - 1) for s in (self.stored_s, self.new_s))
        return before, now

    @property
    def worse(self) -> float:
        """Growth of the error in %; with another plan, which was not measured, of the time."""
        before, now = self.errors
        return abs(now) - abs(before) if self.same_plan else now - before


def recomputed(path: Path) -> Recomputed | str:
    """Return the new prediction of a stored cell, or why there is none."""
    name = path.name.partition(".")[0]
    try:
        stored = load_cell(path)
        new_s, plan = predict(stored)
        launches, undisturbed = stored_row(stored)[LAUNCHED : UNDISTURBED + 1]
    except Exception as error:  # the other cells go on
        return f"{name}: {type(error).__name__}: {error}"
    facts = stored["plan"] is not None, launches == undisturbed, measured(stored)[0]
    return Recomputed(name, *facts, stored["predicted_s"], new_s, plan == stored["plan"])


def recompute() -> list[str]:
    """Print the new prediction of every stored cell beside the stored one; return complaints."""
    with ProcessPoolExecutor(2) as pool:
        found = list(pool.map(recomputed, sorted(STORED.glob("*.json.xz"))))
    cells = [cell for cell in found if not isinstance(cell, str)]
    print(f"{'ms per iteration':54} measured   stored      new  change, %  error, %")
    for cell in cells:
        before, now = cell.errors
        seconds = cell.measured_s, cell.stored_s, cell.new_s
        numbers = "".join(f"{1e3 * s:9.1f}" for s in seconds) + f"{now - before:11.2f}{now:10.2f}"
        print(f"{cell.name:54}{numbers}{'' if cell.same_plan else '  another plan'}")
    return [text for text in found if isinstance(text, str)] + complaints(cells)


def complaints(cells: Sequence[Recomputed]) -> list[str]:
    """Return what is worse than stored or exceeds a limit. Medians and limits of cells with servers
    and gossip are those of undisturbed cells; one cell has no median."""
    planned = [cell for cell in cells if cell.is_planned]
    found = [f"{c.name}: worse by {c.worse:.2f} %" for c in planned if c.worse > WORSE]
    if not cells:
        found.append(f"{STORED} has no cell; measure some")
    for is_planned, name in ((True, "with plans"), (False, "with servers or gossip")):
        errors = [c.errors for c in cells if c.is_planned is is_planned and c.is_undisturbed]
        if not errors:
            continue
        before, now = ([*map(abs, some)] for some in zip(*errors, strict=True))
        words = f"{len(now)} cells {name}: median {median(now):.2f} %, largest {max(now):.2f} %"
        print(f"{words}; stored {median(before):.2f} % and {max(before):.2f} %")
        limits = (median(before) + ROUNDING, max(now)) if is_planned else UNPLANNED_LIMITS
        if (median(now) > limits[0] and len(now) > 1) or max(now) > limits[1]:
            found.append(f"{words}; limits {limits[0]:.2f} % and {limits[1]:.2f} %")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("tables", "recompute"):
        commands.add_parser(name)
    more = commands.add_parser("measure")
    more.add_argument("--out", type=Path, default=Path("runs", "predictions"))
    more.add_argument("--cells", type=int, nargs="+", help="numbers; default: all")
    more.add_argument("--steps", type=int, default=STEPS)
    more.add_argument("--launches", type=int, default=LAUNCHES, help="launches of each cell")
    more.add_argument("--minutes", type=float, help="stop after this time")
    options = parser.parse_args()
    if options.command == "tables":
        tables.save(RESULT, result())
    elif options.command == "recompute":
        if found := recompute():
            sys.exit("\n".join(found))
    else:
        numbers = options.cells or range(1, COUNT + 1)
        try:
            with time_limit(options.minutes):
                measure_all(options.out, numbers, options.launches, options.steps)
        except KeyboardInterrupt:
            print("interrupted; the next start continues", flush=True)
        found = result()
        print(tables.table_text(found, found["tables"][0], selected=False))


if __name__ == "__main__":
    main()
