"""How evenly ranks send over an iteration, measured and predicted, of a comparison's run.

    python benchmarks/link_load.py RUN_DIR

Time steps are an iteration / 2N long. Of each contestant the link whose largest step is furthest
above its mean, and the rate at which the largest step of any link is sent.
"""

from __future__ import annotations

import sys

from offbeat.experiments.record.run_directory import count_skipped
from offbeat.experiments.report import Run, load
from offbeat.experiments.report.traffic import LinkLoad, link_loads


def table(run: Run) -> str:
    """Markdown, a row per contestant."""
    lines = [
        "| strategy | largest/mean, measured | predicted | peak Mbit/s, measured | predicted |",
        "|---|---|---|---|---|",
    ]
    for contestant in run.contestants:
        measured = [
            x for rep in contestant.complete for x in link_loads(rep.trace, count_skipped(run, rep))
        ]
        predicted = link_loads(contestant.predicted) if contestant.predicted else []
        pairs = [_worst(measured), _worst(predicted)]
        cells = [pair[kind] for kind in (0, 1) for pair in pairs]
        lines.append(f"| {contestant.label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _worst(loads: list[LinkLoad]) -> tuple[str, str]:
    if not loads:
        return "", ""
    uneven = max(x.unevenness for x in loads)
    peak = max(x.peak_bytes_per_s for x in loads)
    return f"{uneven:.2f}", f"{peak * 8e-6:.1f}"


if __name__ == "__main__":
    print(table(load(sys.argv[1])))
