"""Commands that run a script in a lab, and its profile: run, join, compare, demo, profile."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from offbeat.cli import texts
from offbeat.cli.entry import MODULE, app
from offbeat.cli.options import OUTPUT, WHERE, Count, RunOutput, Where, number, require_one_folder
from offbeat.cli.output import exit_code, print_result, show_run
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
    script: str,
    /,
    *args: str,
    strategy: str | None = None,
    set_: list[str] | None = None,
    profile: Path | None = None,
    where: Where = WHERE,
    checkpoint: Path | None = None,
    every: Count = None,
    resume: bool = False,
    output: RunOutput = OUTPUT,
) -> int:
    """Run a script in the lab under one strategy.

    Example: offbeat run --rate 50mbit --strategy dreamddp --set period=8 train.py --steps 100

    Args:
        script: The training script, or -m and the name of a module.
        args: Passed to the script as they are.
        strategy: Name; see `offbeat strategies`.  [default: the script's, or wfbp]
        set_: Setting of the strategy, as in --set period=5; repeatable.
        profile: Reuse this profile instead of measuring one.
        checkpoint: Folder of checkpoints.
        every: Iterations between two checkpoints.
        resume: Resume from the newest checkpoint; see offbeat.iteration for the loop.
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
    comparison = Comparison(where.setup(script, *args), chosen, profile=profile, keeping=keeping)
    return _compare(comparison, output)


@app.command
def join(
    address: str,
    script: str,
    /,
    *args: str,
    worker: Annotated[int | None, number(0, None, "--as")] = None,
    secret: Path | None = None,
    strategy: str | None = None,
    set_: list[str] | None = None,
) -> int:
    """Run a script as an additional worker of a running gossip job, with the job's secret.

    Example: offbeat join --secret secret.txt 10.0.0.1:40123 train.py --steps 100

    Args:
        address: HOST:PORT of any worker of the job.
        script: The training script, or -m and the name of a module.
        args: Passed to the script as they are.
        worker: Take the place of this worker, which has died.
        secret: File with the job's secret, instead of OFFBEAT_SECRET.
        strategy: The job's strategy, if the script names none: a2cid2, ad-psgd.
        set_: Setting of the strategy, as in --set period=5; repeatable.
    """
    from offbeat.experiments.joining import run_joined

    texts.set_secret(secret)
    chosen = None if strategy is None else texts.strategy(strategy, set_)
    return run_joined(address, (script, *args), worker, chosen)


@app.command
def compare(
    script: str,
    /,
    *args: str,
    strategies: str = DEMO_STRATEGIES,
    set_: list[str] | None = None,
    args_of: Annotated[list[str] | None, Parameter("--args")] = None,
    repeat: Count = None,
    seeds: str | None = None,
    target: str | None = None,
    keep_disturbed: bool = False,
    profile: Path | None = None,
    device_speed: str | None = None,
    where: Where = WHERE,
    resume: Path | None = None,
    output: RunOutput = OUTPUT,
) -> int:
    """Run a script under several strategies in the same lab, in turns, and report.

    Example: offbeat compare --strategies ddp,dreamddp:period=8 --repeat 3 train.py

    Args:
        script: The training script, or -m and the name of a module.
        args: Passed to the script as they are.
        strategies: Names with settings: ddp,dreamddp:period=8; advised: as `offbeat advise`.
        set_: Setting of all strategies that have it (period=5), or of one (dreamddp.period=5).
        args_of: Arguments of one: dreamddp="--lr 3e-4".
        repeat: Runs of each, in turns.  [default: 2]
        seeds: Instead of --repeat: a run per seed, 0,1,2.
        target: Report the time to loss=4.3 or accuracy=.97.
        keep_disturbed: Do not repeat runs that other programs disturbed.
        profile: Reuse this profile instead of measuring one.
        device_speed: Predicted device: 20x this machine, or 35ms.
        resume: Interrupted run of this command, to complete.
    """
    from offbeat.experiments.compare import given_profile
    from offbeat.experiments.comparison import Comparison

    device, given = texts.parse_device(device_speed), texts.parse_seeds(seeds, repeat, where.seed)
    metric, target_loss = texts.parse_target(target)
    require_one_folder(output.out, resume)
    setup = where.setup(script, *args)
    compared = partial(
        Comparison,
        setup,
        repetitions=len(given) or repeat or REPEAT,
        target_loss=target_loss,
        repeat_disturbed=not keep_disturbed,
        device=device,
        given_seeds=given,
        target=metric,
    )
    shown = partial(_compare, output=replace(output, out=resume or output.out), resume=bool(resume))
    if strategies.partition(":")[0] != ADVISED:
        chosen = texts.with_arguments(texts.contestants(strategies, set_ or []), args_of)
        return shown(compared(chosen, profile=profile))
    from offbeat.cli import advise as advising

    if resume is not None and profile is None and (resume / "profile.json").exists():
        profile = resume / "profile.json"
    with advising.open_profile(setup, profile, stderr=output.json_) as (path, outcome):
        if path is None:
            return exit_code(outcome, "no profile was written")
        facts = given_profile(setup, path).profile
        chosen = advising.advised_contestants(facts, strategies, set_ or [])
        return shown(compared(texts.with_arguments(chosen, args_of), profile=path))


@app.command
def demo(
    *,
    hosts: Annotated[int, number(2)] = 4,
    rate: str = "25mbit",
    iterations: Annotated[int, number(DEMO_LEAST)] = 24,
    lab: Literal["auto", "none"] = "auto",
    output: RunOutput = OUTPUT,
) -> int:
    """Compare three strategies on a small GPT and four emulated hosts, in a few minutes.

    Example: offbeat demo

    Args:
        hosts: Number of emulated hosts.
        rate: Rate of every link.
        iterations: Iterations of each strategy, at least 20.
        lab: none: loopback, unshaped, no privileges needed.
    """
    from offbeat.experiments.comparison import Comparison

    where = Where(hosts=hosts, rate=rate, lab=lab)
    setup = where.setup(MODULE, DEMO, "--iterations", str(iterations))
    chosen = texts.contestants(DEMO_STRATEGIES, [])
    if not output.json_:
        print(f"a small GPT trains for {iterations} iterations under each of {DEMO_STRATEGIES}")
        minutes = hosts * (DEMO_HOST_S + DEMO_ITERATION_S * iterations) / 60
        print(f"this takes about {minutes:.0f} minutes on two free processors", flush=True)
    return _compare(Comparison(setup, chosen), output, name="demo")


@app.command
def profile(
    script: str,
    /,
    *args: str,
    out: Annotated[Path, Parameter(("--output", "-o"))] = Path("profile.json"),
    where: Where = WHERE,
    json_: bool = False,
) -> int:
    """Measure a script's model and the cluster's links.

    Example: offbeat profile --hosts 4 --rate 100mbit -o profile.json train.py

    Args:
        script: The training script, or -m and the name of a module.
        args: Passed to the script as they are.
        out: File to write.
        json_: Print only JSON.
    """
    from offbeat.experiments.launcher import measure_profile
    from offbeat.experiments.progress import Progress

    outcome = measure_profile(where.setup(script, *args), out, Progress(stderr=json_))
    if outcome.measured:
        print_result(json_, Profile.load(out).to_dict(), f"measured: {out}")
    return exit_code(outcome, "no profile was written")


def _compare(
    comparison: Comparison, output: RunOutput, *, name: str | None = None, resume: bool = False
) -> int:
    """Run a comparison, print its result and return the exit code.

    `name` stands for the script of the demo, which does not resume, in the default name of the run
    directory.
    """
    from offbeat.experiments import compare as comparing
    from offbeat.experiments.new_run import default_run_dir
    from offbeat.experiments.progress import Progress
    from offbeat.experiments.script import script_name

    run_dir = output.out or default_run_dir(name or script_name(comparison.setup.script))
    outcome = comparing.compare(comparison, run_dir, Progress(stderr=output.json_), resume=resume)
    logs = comparing.logs_of(comparison, run_dir)
    show_run(run_dir, outcome.report, output.json_, output.verbose, logs, sentence_last=bool(name))
    kept = "what was measured is" if outcome.measured else "nothing was measured, the logs are"
    several = len(comparison.contestants or ()) > 1 and name is None
    kept = f"{kept} in {run_dir}" + f"; --resume {run_dir} completes it" * several
    return exit_code(outcome, kept)
