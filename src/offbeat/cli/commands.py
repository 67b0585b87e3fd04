"""Commands that run a script in a lab, and its profile: run, join, compare, demo, profile."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from offbeat.cli import texts
from offbeat.cli.entry import MODULE, app, misplaced_option_notes
from offbeat.cli.options import (
    WHERE,
    DeviceSpeed,
    EverySetting,
    Json,
    OutDir,
    ReuseProfile,
    Script,
    ScriptArgs,
    Settings,
    Verbose,
    Where,
    number,
    option,
    require_one_folder,
    setup_of,
)
from offbeat.cli.output import (
    exit_code,
    print_result,
    show_run,
)
from offbeat.core.profile import Profile

if TYPE_CHECKING:  # imported only by the commands that need them
    from offbeat.experiments.comparison import Comparison

DEMO, DEMO_STRATEGIES = "offbeat.experiments.demo", "ddp,local-sgd,dreamddp"
REPEAT = 2  # runs of each strategy of a comparison
DEMO_LEAST = 20  # least number of iterations: leaves two periods to measure
# Seconds of the demo per host on two processors: launches and profile, and of each iteration of
# the three strategies. Emulated hosts share the processors, so both grow with their number.
DEMO_HOST_S, DEMO_ITERATION_S = 32.0, 0.85
ADVISED = "advised"  # value of --strategies that stands for the result of `offbeat advise`


@app.command
def run(
    script: Script,
    /,
    *args: ScriptArgs,
    strategy: Annotated[
        str | None,
        option("Name; see `offbeat strategies`.  [default: the script's, or wfbp]"),
    ] = None,
    set_: Settings = None,
    profile: ReuseProfile = None,
    where: Where = WHERE,
    checkpoint: Annotated[Path | None, option("Folder of checkpoints.")] = None,
    every: Annotated[int | None, number("Iterations between two checkpoints.")] = None,
    resume: Annotated[
        bool, option("Resume from the newest checkpoint; see offbeat.iteration for the loop.")
    ] = False,
    out: OutDir = None,
    json_: Json = False,
    verbose: Verbose = False,
) -> int:
    """Run a script in the lab under one strategy.

    Example: offbeat run --rate 50mbit --strategy dreamddp --set period=8 train.py --steps 100
    """
    from offbeat.experiments.comparison import CheckpointOptions, Comparison, Contestant

    if checkpoint is None and (every is not None or resume):
        raise ValueError("--every and --resume need --checkpoint, a folder")
    keeping = None if checkpoint is None else CheckpointOptions(checkpoint, every, resume)
    chosen = None
    if strategy is not None:
        chosen = (Contestant(strategy, texts.strategy(strategy, set_)),)
    elif set_:
        raise ValueError(f"setting ({set_[0]}) needs --strategy NAME, which has it")
    setup = setup_of(where, script, args)
    notes = misplaced_option_notes("run", args)
    comparison = Comparison(setup, chosen, profile=profile, keeping=keeping, notes=notes)
    return _compare(comparison, out, json_, verbose)


@app.command
def join(
    address: Annotated[str, Parameter(help="HOST:PORT of any worker of the job.")],
    script: Script,
    /,
    *args: ScriptArgs,
    worker: Annotated[
        int | None, number("Take the place of this worker, which has died.", "--as")
    ] = None,
    secret: Annotated[
        Path | None, option("File with the job's secret, instead of OFFBEAT_SECRET.")
    ] = None,
    strategy: Annotated[
        str | None, option("The job's strategy, if the script names none: a2cid2, ad-psgd.")
    ] = None,
    set_: Settings = None,
) -> int:
    """Run a script as an additional worker of a running gossip job, with the job's secret.

    Example: offbeat join --secret secret.txt 10.0.0.1:40123 train.py --steps 100
    """
    from offbeat.experiments.joining import run_joined

    texts.set_secret(secret)
    chosen = None if strategy is None else texts.strategy(strategy, set_)
    return run_joined(address, (script, *args), worker, chosen)


@app.command
def compare(
    script: Script,
    /,
    *args: ScriptArgs,
    strategies: Annotated[
        str,
        option(
            "Names, separated by commas, with settings: ddp,dreamddp:period=8; or advised: the "
            "choice of `offbeat advise` (advised:max_staleness=19)."
        ),
    ] = "ddp,local-sgd,dreamddp",
    set_: EverySetting = None,
    args_of: Annotated[
        list[str] | None, option('Arguments of one: dreamddp="--lr 3e-4".', "--args")
    ] = None,
    repeat: Annotated[int | None, number("Runs of each, in turns.  [default: 2]")] = None,
    seeds: Annotated[str | None, option("Instead of --repeat: a run per seed, 0,1,2.")] = None,
    target: Annotated[str | None, option("Report the time to loss=4.3 or accuracy=.97.")] = None,
    target_loss: Annotated[float | None, Parameter("--target-loss", show=False)] = None,
    keep_disturbed: Annotated[
        bool, option("Do not repeat runs that other programs disturbed.")
    ] = False,
    profile: ReuseProfile = None,
    device_speed: DeviceSpeed = None,
    where: Where = WHERE,
    out: OutDir = None,
    resume: Annotated[Path | None, option("Interrupted run of this command, to complete.")] = None,
    json_: Json = False,
    verbose: Verbose = False,
) -> int:
    """Run a script under several strategies in the same lab, in turns, and report.

    Example: offbeat compare --strategies ddp,dreamddp:period=8 --repeat 3 train.py
    """
    from offbeat.experiments.compare import given_profile
    from offbeat.experiments.comparison import Comparison

    device = texts.parse_device_speed(device_speed)
    if repeat is not None:
        texts.require_range("--repeat", repeat, 1, "it is how often each contestant runs")
    given = texts.parse_seeds(seeds, repeat, where.seed)
    repeat = len(given) or repeat or REPEAT
    metric, target_loss = texts.parse_target(target, target_loss)
    compared = partial(
        Comparison,
        repeat_disturbed=not keep_disturbed,
        device=device,
        given_seeds=given,
        target=metric,
    )
    require_one_folder(out, resume)
    if resume is not None and profile is None and (resume / "profile.json").exists():
        known = resume / "profile.json"
    else:
        known = profile
    shown = partial(_compare, out=resume or out, json_=json_, verbose=verbose)
    resumed = resume is not None
    setup, notes = setup_of(where, script, args), misplaced_option_notes("compare", args)
    if strategies.partition(":")[0] != ADVISED:
        chosen = texts.with_arguments(texts.contestants(strategies, set_ or []), args_of)
        comparison = compared(setup, chosen, repeat, target_loss, profile, notes=notes)
        return shown(comparison, resume=resumed)
    from offbeat.cli import advise as advising

    with advising.open_profile(setup, known, stderr=json_) as (path, outcome):
        if path is None:
            return exit_code(outcome, "no profile was written")
        facts = given_profile(setup, path).profile
        chosen = advising.advised_contestants(facts, strategies, set_ or [])
        chosen = texts.with_arguments(chosen, args_of)
        comparison = compared(setup, chosen, repeat, target_loss, path, notes=notes)
        return shown(comparison, resume=resumed)


@app.command
def demo(
    *,
    hosts: Annotated[int, number("Number of emulated hosts.")] = 4,
    rate: Annotated[str, option("Rate of every link.")] = "25mbit",
    iterations: Annotated[int, number(f"Iterations of each strategy, at least {DEMO_LEAST}.")] = 24,
    lab: Annotated[
        Literal["auto", "none"], option("none: loopback, unshaped, no privileges needed.")
    ] = "auto",
    out: Annotated[Path | None, option("New directory for the run.  [default: runs/TIME-demo]")] = (
        None
    ),
    json_: Json = False,
    verbose: Verbose = False,
) -> int:
    """Compare three strategies on a small GPT and four emulated hosts, in a few minutes.

    Example: offbeat demo
    """
    from offbeat.experiments.comparison import Comparison

    texts.require_range("--hosts", hosts, 2, "one host sends nothing")
    texts.require_range("--iterations", iterations, DEMO_LEAST, "a shorter run measures too little")
    where = Where(hosts=hosts, rate=rate, lab=lab)
    setup = setup_of(where, MODULE, (DEMO, "--iterations", str(iterations)))
    chosen = texts.contestants(DEMO_STRATEGIES, [])
    if not json_:
        print(f"a small GPT trains for {iterations} iterations under each of {DEMO_STRATEGIES}")
        minutes = hosts * (DEMO_HOST_S + DEMO_ITERATION_S * iterations) / 60
        print(f"this takes about {minutes:.0f} minutes on two free processors", flush=True)
    return _compare(Comparison(setup, chosen), out, json_, verbose, name="demo", sentence_last=True)


@app.command
def profile(
    script: Script,
    /,
    *args: ScriptArgs,
    out: Annotated[
        Path, option("File to write; may also come last, after the script.", "--output", "-o")
    ] = Path("profile.json"),
    where: Where = WHERE,
    json_: Json = False,
) -> int:
    """Measure a script's model and the cluster's links.

    Example: offbeat profile --hosts 4 --rate 100mbit -o profile.json train.py
    """
    from offbeat.experiments.launcher import measure_profile
    from offbeat.experiments.progress import Progress

    setup, progress = setup_of(where, script, args), Progress(stderr=json_)
    for note in misplaced_option_notes("profile", args):
        progress.print_error(f"note: {note}")
    outcome = measure_profile(setup, out, progress)
    if outcome.measured:
        print_result(json_, Profile.load(out).to_dict(), f"measured: {out}")
    return exit_code(outcome, "no profile was written")


def _compare(
    comparison: Comparison,
    out: Path | None,
    json_: bool,
    verbose: bool,
    *,
    name: str | None = None,
    sentence_last: bool = False,
    resume: bool = False,
) -> int:
    """Run a comparison, print its result and return the exit code.

    `name` stands for the script in the default name of the run directory.
    """
    from offbeat.experiments import compare as comparing
    from offbeat.experiments.new_run import default_run_dir
    from offbeat.experiments.progress import Progress
    from offbeat.experiments.script import script_name

    run_dir = out or default_run_dir(name or script_name(comparison.setup.script))
    progress = Progress(stderr=json_)
    outcome = comparing.compare(comparison, run_dir, progress, resume=resume)
    logs = comparing.logs_of(comparison, run_dir)
    show_run(run_dir, outcome.report, json_, verbose, logs, sentence_last=sentence_last)
    kept = "what was measured is" if outcome.measured else "nothing was measured, the logs are"
    several = len(comparison.contestants or ()) > 1 and name is None  # the demo does not resume
    kept = f"{kept} in {run_dir}" + f"; --resume {run_dir} completes it" * several
    return exit_code(outcome, kept)
