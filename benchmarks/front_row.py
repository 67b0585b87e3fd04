"""A further row of the result `front`: one strategy beside DDP, and the figure of the README.

    python benchmarks/front_row.py dear [--task gpt] [--hosts 4] [--repetitions 3]

Measures the strategy and DDP in the same launches: held-out losses of three seeds, then seconds and
bytes per iteration at 10, 25 and 100 Mbit/s. Then it writes the row into results/front.json, and
makes the figure, the text of the README beside it, and all tables again. Finished parts are kept
in front-row-*.json, and a second start goes on from there. The row is refused if DDP takes another
time than in the result. Needs the lab and a quiet machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from statistics import median
from typing import Any

import hero
import tables

RATES = hero.RATES
SEEDS = 3
ALIKE = 0.03  # largest relative difference of DDP's time from the one in the result
TORCH_LAST = "post-local-sgd"  # the row after which exact strategies stand

Run = Mapping[str, Any]  # seconds, bytes and prediction of one launch, as `front.times` returns


def spread(values: Sequence[float], digits: int) -> Any:
    """Return a cell: the median, with the least and the greatest of several values."""
    shown = [Decimal(f"{f(values):.{digits}f}") for f in (median, min, max)]
    shown = [int(value) for value in shown] if digits == 0 else shown
    return shown if len(values) > 1 else shown[0]


def row(
    label: str,
    needed: Sequence[float | None],
    last: Sequence[float],
    runs: Mapping[int, Sequence[Run]],
) -> list[Any]:
    """Return the cells of a strategy.

    Args:
        label: name of the strategy in the table.
        needed: iterations until the loss of DDP, by seed; None if the loss was not reached.
        last: loss at the end, by seed.
        runs: launches by rate in Mbit/s.
    """
    reached = [n for n in needed if n is not None]
    never = len(needed) - len(reached)
    sent = median(run["sent_bytes"] for each in runs.values() for run in each)
    cells: list[Any] = [label, spread(reached, 0) if reached else None, never, spread(last, 3)]
    cells.append(round(sent / 1e3, 1))
    for rate in RATES:
        each_s = [run["iteration_s"] for run in runs[rate]]
        off = [run["predicted_s"] / run["iteration_s"] - 1 for run in runs[rate]]
        cells += [spread([1e3 * s for s in each_s], 1), round(100 * median(off), 1)]
        cells.append("never" if never else round(median(each_s) * median(reached), 1))
    return cells


def require_like(known: Mapping[str, Any], measured: Sequence[Any], columns: list[str]) -> None:
    """Exit if DDP takes another time here than in the result."""
    for rate in RATES:
        name = f"ms at {rate} Mbit/s"
        was, now = map(hero.middle, (known[name], measured[columns.index(name)]))
        if abs(float(now) / float(was) - 1) > ALIKE:
            sys.exit(
                f"DDP takes {now} ms per iteration at {rate} Mbit/s, and {was} ms in the result; "
                "measure on a quiet machine, or the whole table again with front.py"
            )


def add(result: dict[str, Any], table_name: str, ddp: list[Any], new: list[Any]) -> None:
    """Put a row behind those of torch, in place of an earlier one; exit if DDP's time differs."""
    [table] = [table for table in result["tables"] if table["name"] == table_name]
    columns, label = table["columns"], new[0]
    [known] = [line for line in table["rows"] if line[0] == "ddp"]
    require_like(dict(zip(columns, known, strict=True)), ddp, columns)
    kept = [line for line in table["rows"] if line[0] != label]
    place = [line[0] for line in kept].index(TORCH_LAST) + 1
    table["rows"] = [*kept[:place], new, *kept[place:]]
    shown = table.get("page", {}).get("rows", [])
    if shown and label not in shown:
        shown.insert(shown.index(TORCH_LAST) + 1, label)
    day = datetime.now(UTC).date().isoformat()
    about = f"`{label}` of {table_name} was measured later ({day}), beside DDP"
    note = f"{about}, whose times are within {ALIKE:.0%} of those in the table."
    result["notes"] = [*(text for text in result["notes"] if f"`{label}` of" not in text), note]


def measured_rows(label: str, task: str, hosts: int, repetitions: int) -> list[list[Any]]:
    """Measure DDP and a strategy, and return their rows."""
    import front  # needs torch and scikit-learn
    from threads import remembered

    chosen, keep = ["ddp", label], Path("front-row-profiles")
    curves = [
        remembered(
            Path("front-row-losses.json"),
            f"{label}, {task}, {hosts} hosts, seed {seed}",
            lambda seed=seed: front.losses(task, hosts, seed, chosen),
        )
        for seed in range(SEEDS)
    ]
    runs: dict[int, list[Run]] = {rate: [] for rate in RATES}
    for number in range(repetitions):
        for rate in RATES:
            turns = chosen[:: -1 if number % 2 else 1]
            found = remembered(
                Path("front-row-times.json"),
                f"{label}, {task}, {hosts} hosts, {rate} Mbit/s, {number}",
                lambda rate=rate, turns=turns: front.times(
                    task, hosts, rate, turns, keep, advised=False
                ),
            )
            runs[rate].append(found)
    return [
        row(
            name,
            [front.reached(c[name], front.aim_of(c["ddp"], task)) for c in curves],
            [c[name][-1][1] for c in curves],
            {rate: [found[name] for found in each] for rate, each in runs.items()},
        )
        for name in chosen
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("label", help="a strategy of offbeat with its settings")
    parser.add_argument("--task", default="gpt")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    ddp, new = measured_rows(options.label, options.task, options.hosts, options.repetitions)
    result = tables.load("front")
    add(result, f"{options.task}-{options.hosts}", ddp, new)
    tables.save("front", result)
    hero.main()
    tables.main([])


if __name__ == "__main__":
    main()
