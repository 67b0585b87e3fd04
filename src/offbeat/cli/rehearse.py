"""`offbeat rehearse`: losses of a script on many ranks, against simulated time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from offbeat.cli import texts
from offbeat.cli.entry import app
from offbeat.cli.options import (
    OUTPUT,
    REHEARSING,
    Count,
    Rehearsing,
    RunOutput,
    number,
    require_one_folder,
)
from offbeat.cli.output import exit_code, show_run
from offbeat.core.units import parse_given_rate_bps

if TYPE_CHECKING:
    from offbeat.core.profile import Profile
    from offbeat.experiments.advice.place import Place


@app.command
def rehearse(
    script: str,
    /,
    *args: str,
    strategies: str = "ddp,local-sgd,dreamddp",
    set_: list[str] | None = None,
    profile: Path | None = None,
    ranks: Annotated[int | None, number(2)] = None,
    per_node: Count = None,
    rate: str | None = None,
    cluster: Path | None = None,
    device_speed: str | None = None,
    iterations: Count = None,
    how: Rehearsing = REHEARSING,
    output: RunOutput = OUTPUT,
) -> int:
    """Train all replicas of a script on this machine, as processes, and report losses against
    simulated time.

    Example: offbeat rehearse --ranks 32 --rate 100mbit --jitter .1 train.py --steps 500

    Args:
        script: The training script, or -m and the name of a module.
        args: Passed to the script as they are.
        strategies: Names, separated by commas, with settings: ddp,dreamddp:period=8.
        set_: Setting of all strategies that have it (period=5), or of one (dreamddp.period=5).
        profile: Measured profile (JSON); otherwise the script is measured here.
        ranks: Number of replicas.  [default: those of the profile]
        per_node: Ranks that share a replica.  [default: those of the profile]
        rate: Rate of every link.  [default: the profile's]
        cluster: Cluster file (TOML), instead of --ranks and --rate.
        device_speed: Predicted device: 20x this machine, or 35ms.
        iterations: Iterations of each strategy.  [default: until the script ends]
    """
    from offbeat.cli.advise import profile_here
    from offbeat.core.profile.elsewhere import extrapolate
    from offbeat.experiments.new_run import default_run_dir
    from offbeat.experiments.progress import Progress
    from offbeat.experiments.script import script_name
    from offbeat.rehearsal.command import rehearse_script

    require_one_folder(output.out, how.resume)
    settings = how.settings(iterations)
    if profile is None and cluster is None and (ranks is None or rate is None):
        raise ValueError(
            "rehearse needs a network: add --ranks 32 --rate 100mbit, --cluster FILE, or --profile "
            "FILE of a measured one"
        )
    contestants = texts.contestants(strategies, set_ or [])
    whole = (script, *args)
    facts, code = profile_here(whole, profile, how.resume, stderr=output.json_)
    if facts is None:
        return code
    measured = facts
    if device := texts.parse_device(device_speed):
        facts = device.apply(facts)
    there = _place(facts, ranks, rate, cluster, per_node).profile
    there = there if how.jitter is None else extrapolate(there, jitter=how.jitter)
    progress = Progress(stderr=output.json_)
    run_dir = how.resume or output.out or default_run_dir(script_name(whole), "rehearsal-")
    more = {**settings, "measured": measured, "resume": how.resume is not None}
    outcome = rehearse_script(whole, contestants, there, run_dir, progress, **more)
    show_run(run_dir, outcome.report, output.json_, output.verbose)
    return exit_code(outcome, f"complete it with --resume {run_dir}")


def _place(
    profile: Profile,
    ranks: int | None,
    rate: str | None,
    cluster: Path | None,
    per_node: int | None,
) -> Place:
    """Return the machines of the rehearsed job. Messages inside a node count as free, unless the
    profile has measured them."""
    from offbeat.experiments.advice.place import (
        place_of,
        place_on_cluster,
        require_network,
    )

    measured = 1
    if (per_node is not None or cluster is not None) and not profile.sharded:
        measured = max(profile.topology, default=1)
        profile = profile.of_replicas()
    if cluster is None:
        rate_bps = parse_given_rate_bps(rate)
        if profile.world_size == 1:
            require_network(ranks, rate_bps, "ranks")
        return place_of(profile, ranks, rate_bps, per_node or 1, measured)
    there = texts.load_cluster(cluster, example=32, ranks=ranks, rate=rate)
    return place_on_cluster(profile, there, per_node or 1, measured)
