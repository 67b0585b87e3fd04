"""`offbeat rehearse`: losses of a script on many ranks, against simulated time."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from offbeat.cli import texts
from offbeat.cli.commands import (
    FAILED,
    INTERRUPTED,
    DeviceSpeed,
    Json,
    OutDir,
    Script,
    ScriptArgs,
    Verbose,
    Where,
    _exit_code,
    _misplaced_option_notes,
    _setup,
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
    profile: Annotated[
        Path | None, option("Measured profile (JSON); otherwise the script is measured here.")
    ] = None,
    ranks: Annotated[
        int | None, number("Number of ranks.  [default: those of the profile]")
    ] = None,
    rate: Annotated[str | None, option("Rate of every link.  [default: the profile's]")] = (None),
    cluster: Annotated[
        Path | None, option("Cluster file (TOML), instead of --ranks and --rate.")
    ] = None,
    device_speed: DeviceSpeed = None,
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

    Example: offbeat rehearse --ranks 32 --rate 100mbit --jitter .1 train.py --steps 500
    """
    from offbeat.cli.advise import open_profile
    from offbeat.core.profile.elsewhere import extrapolate
    from offbeat.experiments.compare import default_run_dir
    from offbeat.experiments.progress import Progress
    from offbeat.rehearsal.command import MEASURED, ScriptRehearsal, rehearse_script

    for name, value in (("--iterations", iterations), ("--processes", processes)):
        if value is not None:
            texts.require_range(name, value, 1, "leave it out")
    if resume is not None and out is not None:
        raise ValueError(f"--out ({out}) is the folder of --resume ({resume}); leave --out out")
    metric, target_loss = texts.parse_target(target, None)
    if metric is not None:
        raise ValueError(f"--target ({target}) must be a loss in a rehearsal, as in loss=4.3")
    if ranks is not None:
        texts.require_range("--ranks", ranks, 2, "one rank sends nothing")
    if profile is None and cluster is None and (ranks is None or rate is None):
        raise ValueError(
            "rehearse needs a network: add --ranks 32 --rate 100mbit, --cluster FILE, or --profile "
            "FILE of a measured one"
        )
    defined = partial(
        ScriptRehearsal,
        script=(script, *args),
        contestants=texts.contestants(strategies, set_ or []),
        iterations=iterations,
        sample=sample,
        seeds=texts.parse_seeds(seeds, None, 0),
        processes=processes,
        target_loss=target_loss,
    )
    known = resume / MEASURED if profile is None and resume is not None else profile
    setup = _setup(Where(hosts=1, lab="none", pace="none"), script, args)
    with open_profile(setup, known, stderr=json_) as (path, measured):
        if path is None:
            return _exit_code(measured, "no profile was written")
        facts = texts.load_profile(path)
    if device := texts.parse_device_speed(device_speed):
        facts = device.apply(facts)
    there = _place(facts, ranks, rate, cluster)
    there = there if jitter is None else extrapolate(there, jitter=jitter)
    rehearsal = defined(profile=there, measured=facts)
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


def _place(profile: Profile, ranks: int | None, rate: str | None, cluster: Path | None) -> Profile:
    """Return the profile of the rehearsed job."""
    from offbeat.experiments.advice.place import place_of, place_on_cluster
    from offbeat.lab import Cluster
    from offbeat.lab.units import parse_rate_bps

    if cluster is None:
        return place_of(profile, ranks, parse_rate_bps(rate, "--rate")).profile
    if ranks is not None or rate is not None:
        raise ValueError("--cluster replaces --ranks and --rate; give one or the other")
    texts.require_file(cluster, 'write one with the lines hosts = 32 and rate = "100mbit"')
    return place_on_cluster(profile, Cluster.load(cluster)).profile
