"""`offbeat timetable`: what the placements of cyclic data parallelism take, and their picture."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from offbeat.cli.commands import Json, app, option
from offbeat.cli.sweep import aligned
from offbeat.files import write_text

COLUMNS = (
    "placement", "order", "devices", "activations", "parameters", "volume", "handed", "messages",
    "steps",
)  # fmt: skip


@app.command
def timetable(
    *,
    stages: Annotated[int, option("Stages of the model, and micro-batches.")] = 4,
    placement: Annotated[
        str,
        option("single, workers, pyramid, pipeline, zero; several with commas between, or all."),
    ] = "all",
    backward: Annotated[float, option("Time of backward, in that of forward.")] = 1.0,
    out: Annotated[Path | None, option("Draw them into this file (HTML).")] = None,
    json_: Json = False,
) -> int:
    """Show what each placement of micro-batches and stages takes, cyclic and parallel.

    Example: offbeat timetable --stages 4 --placement pyramid,zero --out timetable.html
    """
    rows = [_row(*way, stages, backward) for way in _ways(placement)]
    if out is not None:
        from offbeat.report.timetable import page

        panels = [_panel(*way, stages, backward) for way in _ways(placement)]
        write_text(out, page(f"{stages} micro-batches in {stages} stages", panels))
    if json_:
        print(json.dumps(rows, indent=1))
    else:
        print(_text(rows))
    return 0


def _ways(asked: str) -> list[tuple[Any, bool]]:
    """Placements and orders."""
    from offbeat.solve.timetable import PLACEMENTS

    names = PLACEMENTS if asked == "all" else asked.split(",")
    return [
        (name, cyclic) for name in names for cyclic in (False, True) if cyclic or name != "pipeline"
    ]


def _row(placement: Any, cyclic: bool, stages: int, backward: float) -> dict[str, Any]:
    from offbeat.sim.placements import StageFacts, costs, simulate
    from offbeat.solve.timetable import Timetable

    table = Timetable(placement, stages, cyclic)
    if not 0 < backward < float("inf"):
        raise ValueError(f"backward ({backward}) must be a time above 0, in that of forward")
    run = simulate(table, StageFacts.unit(stages, backward))
    return {
        "placement": placement,
        "order": "cyclic" if cyclic else "parallel",
        **asdict(costs(table)),
        "steps": run.iteration_s,
    }


def _panel(placement: Any, cyclic: bool, stages: int, backward: float) -> Any:
    from offbeat.report.timetable import Panel
    from offbeat.sim.placements import StageFacts, in_steps, simulate
    from offbeat.solve.timetable import Timetable

    table, facts = Timetable(placement, stages, cyclic), StageFacts.unit(stages, backward)
    run = in_steps(table) if backward == 1 else simulate(table, facts)
    title = f"{placement}, {'cyclic' if cyclic else 'parallel'}"
    return Panel(title, "simulated", run, facts)


def _text(rows: list[dict[str, Any]]) -> str:
    lines = [[*COLUMNS], *([_cell(row[name]) for name in COLUMNS] for row in rows)]
    return "\n".join(
        [
            aligned(lines),
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
