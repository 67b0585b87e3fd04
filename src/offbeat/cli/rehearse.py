"""`offbeat rehearse`: losses of a script on many ranks, against simulated time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from offbeat.cli import texts
from offbeat.cli.commands import (
    FAILED,
    INTERRUPTED,
    Json,
    OutDir,
    Script,
    ScriptArgs,
    Verbose,
    _misplaced_option_notes,
    _show_run,
    app,
    number,
    option,
    print_result,
)

if TYPE_CHECKING:
    from offbeat.core.profile import Profile


@app.command
def rehearse(
    script: Script,
    /,
    *args: ScriptArgs,
    strategies: Annotated[
        str, option("Names, separated by commas, with settings: ddp,dreamddp:period=8.")
    ] = "ddp,local-sgd,dreamddp",
    set_: Annotated[
        list[str] | None,
        option(
            "Setting of all strategies that have it (period=5), or of one (dreamddp.period=5).",
            "--set",
        ),
    ] = None,
    profile: Annotated[Path, option("Measured profile of the script's model (JSON).")],
    ranks: Annotated[
        int | None, number("Number of ranks.  [default: those of the profile]")
    ] = None,
    rate: Annotated[str | None, option("Rate of every link.  [default: the profile's]")] = (None),
    jitter: Annotated[float | None, option("Relative standard deviation of compute times.")] = None,
    iterations: Annotated[
        int | None, number("Iterations of each strategy.  [default: until the script ends]")
    ] = None,
    sample: Annotated[
        int | None, number("Replicas to train, if memory cannot hold all.  [default: all ranks]")
    ] = None,
    seeds: Annotated[str, option("One rehearsal of each strategy per seed, as in 0,1,2.")] = "0",
    processes: Annotated[int, number("Strategies that are rehearsed at the same time.")] = 1,
    target: Annotated[str | None, option("Report the time to loss=4.3.")] = None,
    out: OutDir = None,
    resume: Annotated[
        Path | None, option("Interrupted rehearsal of this command, to complete.")
    ] = None,
    json_: Json = False,
    verbose: Verbose = False,
) -> int:
    """Train all replicas of a script on this machine, one after the other, and report losses
    against simulated time.

    Example: offbeat rehearse --profile profile.json --ranks 32 --rate 100mbit train.py --steps 500
    """
    from offbeat.experiments.compare import default_run_dir
    from offbeat.experiments.progress import Progress
    from offbeat.rehearsal.command import ScriptRehearsal, rehearse_script

    for name, value in (("--iterations", iterations), ("--processes", processes)):
        if value is not None:
            texts.require_range(name, value, 1, "leave it out")
    if resume is not None and out is not None:
        raise ValueError(f"--out ({out}) is the folder of --resume ({resume}); leave --out out")
    metric, target_loss = texts.parse_target(target, None)
    if metric is not None:
        raise ValueError(f"--target ({target}) must be a loss in a rehearsal, as in loss=4.3")
    rehearsal = ScriptRehearsal(
        script=(script, *args),
        contestants=texts.contestants(strategies, set_ or []),
        profile=_profile(profile, ranks, rate, jitter),
        iterations=iterations,
        sample=sample,
        seeds=texts.parse_seeds(seeds, None, 0),
        processes=processes,
        target_loss=target_loss,
    )
    progress = Progress(stderr=json_)
    for note in _misplaced_option_notes("rehearse", args):
        progress.print_error(f"note: {note}")
    run_dir = resume or out or default_run_dir(f"rehearsal-{Path(script).name}")
    outcome = rehearse_script(rehearsal, run_dir, progress, resume=resume is not None)
    if outcome.report is not None:
        _show_run(run_dir, outcome.report, json_, verbose)
    elif json_:
        print_result(True, {"run_dir": str(run_dir), "report": None, "rows": []}, "")
    if outcome.interrupted:
        progress.print_error(f"interrupted; complete it with --resume {run_dir}")
        return INTERRUPTED
    return FAILED if outcome.failures else 0


def _profile(path: Path, ranks: int | None, rate: str | None, jitter: float | None) -> Profile:
    """Return the profile of the rehearsed job."""
    from offbeat.core.profile.elsewhere import extrapolate
    from offbeat.lab.units import parse_rate_bps

    if ranks is not None:
        texts.require_range("--ranks", ranks, 2, "one rank sends nothing")
    rate_bps = None if rate is None else parse_rate_bps(rate, "--rate")
    return extrapolate(texts.load_profile(path), hosts=ranks, rate_bps=rate_bps, jitter=jitter)
