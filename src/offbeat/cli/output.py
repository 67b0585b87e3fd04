"""Output of commands: JSON or text, the result of a run, exit codes."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.core.files import write_text

if TYPE_CHECKING:  # report and rich are imported only by the commands that need them
    from offbeat.experiments.launcher import Outcome

WRONG_USE, FAILED, INTERRUPTED = 2, 1, 130  # exit codes
PLAIN_WIDTH = 100  # characters per line of a table if the output is no terminal
LEAST_WIDTH = 60  # least width of a table in characters; a narrower terminal wraps its lines


def exit_code(outcome: Outcome, kept: str) -> int:
    """Return the exit code of a comparison or a rehearsal. After Ctrl-C print the text `kept`."""
    if outcome.interrupted:
        print(f"offbeat: interrupted; {kept}", file=sys.stderr)
        return INTERRUPTED
    return FAILED if outcome.failures else 0


def show_run(  # noqa: C901
    run_dir: Path,
    page: Path | None,
    json_: bool,
    verbose: bool,
    logs: str | None = None,
    *,
    sentence_last: bool = False,
) -> None:
    """Print the results of a run: table, headline, reservations, and path of the report.

    With `json_` print the contents of summary.json. With `sentence_last` the headline is the last
    line. Without a report (`page` None) there are no results.
    """
    if page is None:
        if json_:
            print_result(True, {"run_dir": str(run_dir), "report": None, "rows": []}, "")
        return
    from offbeat.experiments import report as reports
    from offbeat.experiments.report import table
    from offbeat.experiments.report.breakdown import explain_error

    if json_:
        summary = json.loads((run_dir / "summary.json").read_text())
        print_result(True, {"run_dir": str(run_dir), "report": str(page), **summary}, "")
        return
    run = reports.load(run_dir)
    rows, width = reports.summarize(run), terminal_width()
    print(table.render(run, rows, width, sentence=not sentence_last))
    if verbose:
        print(table.render_details(rows, width))
        for row in rows:
            if row.split is not None and row.iteration_s:
                print(f"{row.label}: {explain_error(row.split, row.iteration_s)}")
        if logs is not None:
            print(f"output of the script: {logs}")
    texts = [f"note: {note}" for note in run.notes]
    if run.given is not None and run.given["computed"]:
        texts.insert(0, f"predicted from a computed profile: {run.given['text']}")
    for text in texts:
        print(*table.wrap(text, width, "  "), sep="\n")
    print(f"Report: {page}")
    if sentence_last:
        print("", *table.wrap(reports.headline(run, rows).sentence, width), sep="\n")


def terminal_width(plain: int = PLAIN_WIDTH) -> int:
    """Return the characters per line: `COLUMNS`, else those of the terminal, else `plain`."""
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        return plain
    return max(LEAST_WIDTH, shutil.get_terminal_size((plain, 0)).columns)


def print_result(json_: bool, data: Any, text: str) -> None:
    """Print the data of a command as JSON, or its text."""
    print(json.dumps(data, indent=1) if json_ else text)


def print_or_write(text: str, output: Path | None) -> None:
    """Print a text, or write it to a file."""
    if output is None:
        print(text, end="")
    else:
        write_text(output, text)
