"""Commands that show the record of a run or of a job, also of a running one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from offbeat.cli.entry import app
from offbeat.cli.output import print_or_write, print_result, show_run, terminal_width


@app.command
def report(
    run_dir: Path,
    /,
    *more: Path,
    export: Literal["csv", "json"] | None = None,
    output: Annotated[Path | None, Parameter(("--output", "-o"))] = None,
    prune: float | None = None,
    json_: bool = False,
    verbose: bool = False,
) -> int:
    """Write report.html again from the files of a run, or export its results. Report a job from its
    record, also while it runs; of several jobs in a folder the newest one.

    Example: offbeat report runs/20250102-030405-train

    Args:
        run_dir: Directory of `offbeat compare`, or folder of a job, or of several jobs.
        more: Folders of the same job on other hosts.
        export: Print the numbers of a comparison instead.
        output: File for the export, or for the page of a job.
        prune: Remove the jobs of the folder that ended this many days ago.
        json_: Print only JSON.
        verbose: Print all numbers.
    """
    from offbeat.experiments import report as reports
    from offbeat.experiments.report import job as jobs
    from offbeat.jobs import record_folder

    if prune is not None:
        if more or prune < 0 or not record_folder.find_runs(run_dir):
            raise ValueError(
                f"--prune ({prune:g}) must be a number of days of at least 0, for one folder with "
                f"records of jobs ({run_dir})"
            )
        removal = record_folder.remove_older(run_dir, prune)
        text = record_folder.describe_removal(removal) if removal.runs else "no run is older"
        print_result(json_, {"runs": removal.runs, "freed_bytes": removal.freed_bytes}, text)
        return 0
    if (folders := jobs.find_record([run_dir, *more])) is not None:
        if export is not None:
            raise ValueError(
                f"--export ({export}) must be left out for a job, whose record is JSON lines"
            )
        return _report_job(folders, output, json_)
    if more:
        raise ValueError(f"folder ({run_dir}) must hold the record of a job; it holds none")
    if export is not None:
        if json_:
            raise ValueError("--json must not be given with --export; --export csv prints numbers")
        text = reports.export(reports.load(run_dir), export)
        print_or_write(text, output)
        return 0
    if output is not None:
        raise ValueError(f"--output ({output}) must be given with --export csv or json")
    show_run(run_dir, reports.write(run_dir), json_, verbose)
    return 0


def _report_job(folders: Sequence[Path], output: Path | None, json_: bool) -> int:
    """Print the report of a job and write its page."""
    from offbeat.experiments.report import job, job_page, job_text

    report, page = job.read_report(folders), None
    text = job_text.as_text(report, terminal_width())
    try:
        page = job_page.write(folders, time.time(), output)
        text += f"\n{page}"
    except OSError as error:
        if output is not None:
            raise
        text += f"\nno page: {error.filename} cannot be written ({error.strerror}); give --output"
    print_result(json_, report.to_dict() | {"report": page and str(page)}, text)
    return 0


@app.command
def watch(folder: Path, /, *, once: bool = False, json_: bool = False) -> int:
    """Show a running job: its pace, its ranks, and the rank that delays the others.

    Exit code 1: the job was stopped, or a rank has failed or is silent.

    Example: offbeat watch runs

    Args:
        folder: Folder of a run, or of runs: the newest one.
        once: Print one screen.
        json_: Print only JSON.
    """
    from offbeat.jobs.watch import watch as show_job

    return show_job(folder, terminal_width(), once=once, as_json=json_)
