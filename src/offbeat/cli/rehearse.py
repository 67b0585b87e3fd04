"""`offbeat rehearse`: losses of a script on many ranks, against simulated time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from offbeat.cli import texts
from offbeat.cli.commands import app
from offbeat.cli.options import (
    REHEARSING,
    DeviceSpeed,
    EverySetting,
    Json,
    OutDir,
    Rehearsing,
    Script,
    ScriptArgs,
    Verbose,
    number,
    option,
    require_one_folder,
)
from offbeat.cli.output import FAILED, INTERRUPTED, print_result, show_run

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
    set_: EverySetting = None,
    profile: Annotated[
        Path | None, option("Measured profile (JSON); otherwise the script is measured here.")
    ] = None,
    ranks: Annotated[
        int | None, number("Number of ranks.  [default: those of the profile]")
    ] = None,
    rate: Annotated[str | None, option("Rate of every link.  [default: the profile's]")] = None,
    cluster: Annotated[
        Path | None, option("Cluster file (TOML), instead of --ranks and --rate.")
    ] = None,
    device_speed: DeviceSpeed = None,
    iterations: Annotated[
        int | None, number("Iterations of each strategy.  [default: until the script ends]")
    ] = None,
    how: Rehearsing = REHEARSING,
    out: OutDir = None,
    json_: Json = False,
    verbose: Verbose = False,
) -> int:
    """Train all replicas of a script on this machine, one after the other, and report losses
    against simulated time.

    Example: offbeat rehearse --ranks 32 --rate 100mbit --jitter .1 train.py --steps 500
    """
    from offbeat.cli.advise import profile_here
    from offbeat.core.profile.elsewhere import extrapolate
    from offbeat.experiments.new_run import default_run_dir
    from offbeat.experiments.progress import Progress
    from offbeat.experiments.script import script_name
    from offbeat.rehearsal.command import ScriptRehearsal, rehearse_script

    require_one_folder(out, how.resume)
    settings = how.settings(iterations)
    if ranks is not None:
        texts.require_range("--ranks", ranks, 2, "one rank sends nothing")
    if profile is None and cluster is None and (ranks is None or rate is None):
        raise ValueError(
            "rehearse needs a network: add --ranks 32 --rate 100mbit, --cluster FILE, or --profile "
            "FILE of a measured one"
        )
    contestants = texts.contestants(strategies, set_ or [])
    facts, code = profile_here(script, args, profile, how.resume, stderr=json_)
    if facts is None:
        return code
    if device := texts.parse_device_speed(device_speed):
        facts = device.apply(facts)
    there = _place(facts, ranks, rate, cluster)
    there = there if how.jitter is None else extrapolate(there, jitter=how.jitter)
    progress = Progress(stderr=json_)
    whole = (script, *args)
    run_dir = how.resume or out or default_run_dir(script_name(whole), "rehearsal-")
    outcome = rehearse_script(
        ScriptRehearsal(whole, contestants, there, measured=facts, **settings),
        run_dir,
        progress,
        resume=how.resume is not None,
    )
    if outcome.report is not None:
        show_run(run_dir, outcome.report, json_, verbose)
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
