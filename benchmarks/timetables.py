"""What the placements of cyclic data parallelism take, in both orders, and their picture.

    python benchmarks/timetables.py --stages 4 --placement pyramid,zero --out timetable.html

Simulated: every stage takes one step forward, and messages take none.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from timetable_costs import ParallelTimetable, StageFacts, costs, simulate, unit_time_run
from timetable_page import Panel, page

from offbeat.cli.sweep import align_columns
from offbeat.core.files import write_text
from offbeat.cyclic.timetable import PLACEMENTS, Timetable

COLUMNS = (
    "placement", "order", "devices", "activations", "parameters", "volume", "handed", "messages",
    "steps",
)  # fmt: skip


def _ways(asked: str) -> list[tuple[Any, bool]]:
    """Placements and orders."""
    names = PLACEMENTS if asked == "all" else asked.split(",")
    return [
        (name, cyclic) for name in names for cyclic in (False, True) if cyclic or name != "pipeline"
    ]


def _table(placement: Any, cyclic: bool, stages: int) -> Timetable:
    return (Timetable if cyclic else ParallelTimetable)(placement, stages)


def _row(placement: Any, cyclic: bool, stages: int, backward: float) -> dict[str, Any]:
    table = _table(placement, cyclic, stages)
    run = simulate(table, StageFacts.unit(stages, backward))
    return {
        "placement": placement,
        "order": "cyclic" if cyclic else "parallel",
        **asdict(costs(table)),
        "steps": run.iteration_s,
    }


def _panel(placement: Any, cyclic: bool, stages: int, backward: float) -> Panel:
    table, facts = _table(placement, cyclic, stages), StageFacts.unit(stages, backward)
    run = unit_time_run(table) if backward == 1 else simulate(table, facts)
    title = f"{placement}, {'cyclic' if cyclic else 'parallel'}"
    return Panel(title, "simulated", run, facts)


def _text(rows: list[dict[str, Any]]) -> str:
    lines = [[*COLUMNS], *([_cell(row[name]) for name in COLUMNS] for row in rows)]
    return "\n".join(
        [
            align_columns(lines),
            "",
            "activations   on one device at most, in those of one micro-batch",
            "parameters    on one device at most, in models",
            "volume        sent by all devices between two time steps at most, in models",
            "handed        the same of activations, in what all stages hand over",
            "messages      of one device that follow each other between two time steps at most",
            "steps         time of an iteration, forward of a stage being 1; messages take none",
        ]
    )


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stages", type=int, default=4, help="and micro-batches")
    parser.add_argument("--placement", default="all", help=f"some of {','.join(PLACEMENTS)}")
    parser.add_argument("--backward", type=float, default=1.0, help="its time, in that of forward")
    parser.add_argument("--out", type=Path, help="draw them into this file (HTML)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    rows = [_row(*way, args.stages, args.backward) for way in _ways(args.placement)]
    if args.out is not None:
        panels = [_panel(*way, args.stages, args.backward) for way in _ways(args.placement)]
        title = f"{args.stages} micro-batches in {args.stages} stages"
        write_text(args.out, page(title, panels))
    print(json.dumps(rows, indent=1) if args.json else _text(rows))


if __name__ == "__main__":
    main()
