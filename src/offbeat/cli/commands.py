"""Commands and entry point of the command line."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from cyclopts import App, CycloptsError, Parameter

from offbeat.cli import texts
from offbeat.cli.options import (
    REHEARSING,
    WHERE,
    DeviceSpeed,
    EverySetting,
    Json,
    OutDir,
    ProfileIn,
    Rehearsing,
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
    FAILED,
    INTERRUPTED,
    WRONG_USE,
    exit_code,
    print_or_write,
    print_result,
    show_run,
    terminal_width,
)
from offbeat.core.files import write_text
from offbeat.core.profile import Profile
from offbeat.experiments.advice import MAX_STALENESS
from offbeat.strategies import find, strategy_names

if TYPE_CHECKING:  # imported only by the commands that need them
    from offbeat.core.sim import Prediction
    from offbeat.experiments.comparison import Comparison

SCRIPT_COMMANDS = ("run", "profile", "compare", "join", "rehearse", "advise")
PREDICTING_COMMANDS = ("rehearse", "advise")  # their own options may follow the script
DEMO, DEMO_STRATEGIES = "offbeat.experiments.demo", "ddp,local-sgd,dreamddp"
REPEAT = 2  # runs of each strategy of a comparison
DEMO_LEAST = 20  # least number of iterations: leaves two periods to measure
MODULE = "-m"  # as for python: the module's name and arguments follow
ADVISED = "advised"  # value of --strategies that stands for the result of `offbeat advise`
ADVICE_WIDTH = 80  # of `advise` if the output is no terminal

app = App(
    name="offbeat",
    version=metadata.version("offbeat"),
    help_format="plaintext",
    help=(
        "Train data-parallel over slow networks: measure, plan, predict, run, compare.\n\n"
        "Example: offbeat compare --hosts 4 --rate 100mbit train.py --steps 50\n"
        "Options come before the script; what follows the script belongs to the script."
    ),
)


# --- commands ------------------------------------------------------------------------------------


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
    iterations: Annotated[int, number("Iterations of each strategy.")] = 24,
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
        print("this takes three to four minutes on two free processors", flush=True)
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


@app.command
def plan(
    *,
    profile: ProfileIn,
    strategy: Annotated[str, option("Name; see `offbeat strategies`.")],
    set_: Settings = None,
    out: Annotated[Path | None, option("File for the plan (JSON).", "--output", "-o")] = None,
    json_: Json = False,
) -> int:
    """Show a strategy's plan: which transfers it sends at which moments.

    Example: offbeat plan --profile profile.json --strategy dreamddp --set period=5
    """
    made = texts.strategy(strategy, set_).plan(texts.load_profile(profile))
    if out is not None:
        write_text(out, json.dumps(made.to_dict(), indent=1))
    facts = [
        f"{f.name}: "
        + (f"{f.value:.4g}" if isinstance(f.value, float) else str(f.value))
        + (f" ({f.meaning})" if f.meaning else "")
        for f in made.facts
    ]
    print_result(json_, made.to_dict(), "\n".join([made.text(), *facts]))
    return 0


@app.command
def simulate(
    *,
    profile: ProfileIn,
    plan: Annotated[Path | None, option("File with a plan, instead of a strategy.")] = None,
    strategy: Annotated[
        str | None, option("One or more names, separated by commas; see `offbeat strategies`.")
    ] = None,
    set_: Settings = None,
    rate: Annotated[
        str | None, option("Rates of the links instead of the measured ones: 10mbit,100mbit.")
    ] = None,
    hosts: Annotated[
        str | None, option("Numbers of replicas instead of the profile's: 4,32.")
    ] = None,
    per_node: Annotated[str | None, option("Numbers of ranks that share a replica: 1,4,8.")] = None,
    inside: Annotated[
        str | None, option("Rate between the ranks of a node, instead of the measured one.")
    ] = None,
    jitter: Annotated[
        str | None, option("Relative deviations of compute instead of the measured one: 0,.1.")
    ] = None,
    period: Annotated[str | None, option("Values of the setting `period`: 5,10.")] = None,
    iterations: Annotated[int | None, number("Least number of iterations to simulate.")] = None,
    csv: Annotated[bool, Parameter("--csv", help="Print a table as CSV.", negative="")] = False,
    servers: Annotated[int, number("Number of servers, in addition to the profile's ranks.")] = 1,
    votes: Annotated[
        str | None,
        option("Share of accepted votes of the plan, such as .2, or a run's record (rank0.jsonl)."),
    ] = None,
    device_speed: DeviceSpeed = None,
    json_: Json = False,
) -> int:
    """Predict the seconds per iteration of a plan or of strategies, as a table for lists.

    Example: offbeat simulate --profile profile.json --strategy dreamddp --period 5,10 --hosts 4,32
    """
    from offbeat.cli import sweep
    from offbeat.core import sim
    from offbeat.core.profile.device_speed import Compute

    if (plan is None) == (strategy is None):
        raise ValueError("simulate takes either --plan FILE or --strategy NAME")
    if plan is not None and period is not None:
        raise ValueError(f"period ({period}) is the plan's already; give --strategy NAME instead")
    facts, speed = texts.load_profile(profile), texts.parse_device_speed(device_speed)
    compute = Compute.of(facts, speed)
    if speed is not None:
        facts = speed.apply(facts)
    contestants: list[tuple[dict[str, Any], sweep.Predict]] = []
    if plan is not None:
        made = texts.load_plan(plan, facts)
        columns = {"strategy": made.strategy, "period": made.period}
        predict = partial(
            sim.predict_plan,
            made,
            iterations=iterations,
            votes=texts.parse_votes(votes, made, facts),
        )
        contestants = [(columns, predict)]
    else:
        assert strategy is not None
        named = texts.parse_strategies(strategy, set_)
        if servers != 1 and not any(chosen.needs.servers for chosen in named):
            raise ValueError(
                f"servers ({servers}) must be left out with {strategy}, which trains without them; "
                "choose one that has servers: ssp, ps-bsp"
            )
        for chosen in sweep.with_periods(named, period):
            columns = {"strategy": str(chosen), "period": getattr(chosen, "period", None)}
            outcomes = texts.parse_votes(votes, chosen, facts) if votes else None
            predict = partial(
                sim.predict, chosen, iterations=iterations, servers=servers, votes=outcomes
            )
            contestants.append((columns, predict))
    if inside is not None and per_node is None:
        raise ValueError(f"--inside ({inside}) needs --per-node, the number of ranks of a node")
    axes = sweep.Axes.of(rate, hosts, jitter, per_node, inside)
    results = sweep.rows(axes, facts, contestants)
    added = {"compute": compute.record()}
    if csv:
        print(sweep.csv_text(results))
    elif len(results) > 1:
        rows = [{**row, "prediction": row["prediction"].to_dict(), **added} for row in results]
        print_result(json_, rows, sweep.table(results))
    else:
        one = results[0]["prediction"]
        print_result(json_, {**one.to_dict(), **added}, _prediction_text(one))
    if compute.text and not json_:
        print(f"note: {compute.text}", file=sys.stderr if csv else sys.stdout)
    return 0


@app.command
def advise(
    script: Annotated[
        str | None, Parameter(help="A training script to measure on one device, without --profile.")
    ] = None,
    /,
    *args: ScriptArgs,
    profile: Annotated[Path | None, option("Measured profile (JSON) instead of a script.")] = None,
    hosts: Annotated[int | None, number("Number of machines.  [default: the profile's]")] = None,
    rate: Annotated[str | None, option("Rate of the network.  [default: as measured]")] = None,
    per_host: Annotated[
        int | None,
        number(
            "Devices of each machine, which share a replica.  [default: the profile's, or 1]",
            "--per-host",
            "--per-node",
        ),
    ] = None,
    cluster: Annotated[
        Path | None, option("Cluster file (TOML), instead of --hosts and --rate.")
    ] = None,
    samples: Annotated[str | None, option("Samples in all, such as 10M; needs --batch.")] = None,
    batch: Annotated[int | None, number("Samples per iteration of one device.")] = None,
    iterations: Annotated[
        str | None,
        option(
            "Iterations that one device would need.  [default: 1000]  With --rehearse: of each "
            "strategy."
        ),
    ] = None,
    rehearse: Annotated[
        bool,
        Parameter(
            "--rehearse",
            help="Train the script's replicas here under each strategy, for times to a loss.",
            negative="",
            show_default=False,
        ),
    ] = False,
    how: Rehearsing = REHEARSING,
    max_staleness: Annotated[
        int, number("Largest number of iterations until an update has reached all workers.")
    ] = MAX_STALENESS,
    device_speed: DeviceSpeed = None,
    iteration_s: Annotated[
        str | None, option("Measured seconds of compute per iteration of your device.")
    ] = None,
    device_memory: Annotated[str | None, option("Memory of a device, such as 24GB.")] = None,
    price: Annotated[float | None, option("Price of a machine and hour.")] = None,
    out: Annotated[
        Path | None, option("File for the verdict (JSON), for OFFBEAT_VERDICT.", "--out", "-o")
    ] = None,
    json_: Json = False,
    verbose: Verbose = False,
) -> int:
    """Decide how to train: hours of one machine, of DDP, ZeRO-3 and the strategies.

    Example: offbeat advise --hosts 4 --rate 200mbit --samples 10M --batch 32 train.py
    """
    from offbeat.cli import advise as advising
    from offbeat.experiments.advice.work import Work

    speed = texts.parse_compute_speed(device_speed, iteration_s)
    counts = [
        texts.parse_count(*each) for each in (("--samples", samples), ("--iterations", iterations))
    ]
    question = advising.Question(
        work=Work.of() if rehearse else Work.of(counts[0], batch, counts[1]),
        hosts=hosts,
        rate=rate,
        devices=per_host,
        cluster=cluster,
        max_staleness=max_staleness,
        device=speed,
        device_text=device_speed,
        device_memory=texts.parse_size("--device-memory", device_memory),
        price=price,
        jitter=how.jitter,
        everything=verbose,
        script=() if script is None else (script, *args),
    )
    _require_advice_options(script, profile, rehearse, how, samples, batch)
    settings = how.settings(None if counts[1] is None else round(counts[1])) if rehearse else {}
    facts, code = None, 0
    if script is not None:
        facts, code = advising.profile_here(script, args, profile, how.resume, stderr=True)
    elif profile is not None:
        facts = texts.load_profile(profile)
    if facts is None:
        return code
    if not rehearse:
        answer = advising.answer(question, facts, profile)
    else:
        found, code = advising.answer_with_losses(question, facts, profile, settings, how.resume)
        if found is None:
            return code
        answer = found
    if out is not None:
        write_text(out, json.dumps(answer.data, indent=1))
    print_result(json_, answer.data, answer.text(terminal_width(ADVICE_WIDTH), verbose=verbose))
    return 0


def _require_advice_options(
    script: str | None,
    profile: Path | None,
    rehearse: bool,
    how: Rehearsing,
    samples: str | None,
    batch: int | None,
) -> None:
    """Raise ValueError if options of `advise` contradict each other."""
    if rehearse:
        if script is None:
            raise ValueError("--rehearse needs a script to train, as in advise --rehearse train.py")
        if samples is not None or batch is not None:
            raise ValueError(
                "--samples and --batch must be left out with --rehearse, whose verdict is the time "
                "to a loss; give --target loss=4.3"
            )
        return
    if how != replace(REHEARSING, jitter=how.jitter):
        raise ValueError(
            "--sample, --seeds, --processes, --target and --resume are for --rehearse; add it, or "
            "leave them out"
        )
    if (script is None) == (profile is None):
        raise ValueError(
            "advise takes a script to measure, or --profile FILE; give one of both, as in offbeat "
            "advise --hosts 4 --rate 200mbit train.py"
        )


@app.command
def report(
    run_dir: Annotated[
        Path,
        Parameter(help="Directory of `offbeat compare`, or folder of a job, or of several jobs."),
    ],
    /,
    *more: Annotated[Path, Parameter(help="Folders of the same job on other hosts.")],
    export: Annotated[
        Literal["csv", "json", "latex", "svg"] | None,
        option(
            "Print numbers (csv, json), or of a comparison the table (latex) or the figures (svg) "
            "instead."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        option("File for the export, or for the page of a job.", "--output", "-o"),
    ] = None,
    prune: Annotated[
        float | None, option("Remove the jobs of the folder that ended this many days ago.")
    ] = None,
    json_: Json = False,
    verbose: Verbose = False,
) -> int:
    """Write report.html again from the files of a run, or export its results. Report a job from its
    record, also while it runs; of several jobs in a folder the newest one.

    Example: offbeat report runs/20250102-030405-train
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
        return _report_job(folders, export, output, json_)
    if more:
        raise ValueError(f"folder ({run_dir}) must hold the record of a job; it holds none")
    if export is not None:
        if json_:
            raise ValueError("--json must not be given with --export; --export csv prints numbers")
        text = reports.export(reports.load(run_dir), export)
        print_or_write(text, output)
        return 0
    if output is not None:
        raise ValueError(f"--output ({output}) must be given with --export csv, latex or svg")
    show_run(run_dir, reports.write(run_dir), json_, verbose)
    return 0


def _report_job(
    folders: Sequence[Path], export: str | None, output: Path | None, json_: bool
) -> int:
    """Print the report of a job and write its page, or export its intervals."""
    from offbeat.experiments.report import job, job_export, job_page

    if export is not None:
        if export not in get_args(job_export.Form):
            raise ValueError(f"--export ({export}) must be csv or json for a job")
        print_or_write(job_export.export(folders, export), output)  # type: ignore[arg-type]
        return 0
    report, page = job.read_report(folders), None
    text = job.as_text(report, terminal_width())
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
def watch(
    folder: Annotated[Path, Parameter(help="Folder of a run, or of runs: the newest one.")],
    /,
    *,
    once: Annotated[
        bool, Parameter("--once", help="Print one screen.", negative="", show_default=False)
    ] = False,
    json_: Json = False,
) -> int:
    """Show a running job: its pace, its ranks, and the rank that delays the others.

    Exit code 1: the job was stopped, or a rank has failed or is silent.

    Example: offbeat watch runs
    """
    from offbeat.jobs.watch import watch as show_job

    return show_job(folder, terminal_width(), once=once, as_json=json_)


@app.command
def strategies(
    name: Annotated[str | None, Parameter(help="Explain this strategy and its settings.")] = None,
    /,
    *,
    json_: Json = False,
) -> int:
    """List the strategies with their settings and sources, or explain one.

    Example: offbeat strategies dreamddp
    """
    from offbeat.cli import explained

    if name is not None:
        cls = find(name)
        text = explained.full_text(name, cls, terminal_width())
        print_result(json_, explained.full_record(name, cls), text)
        return 0
    known = {name: find(name) for name in strategy_names()}
    rows = [explained.record_of(*item) for item in known.items()]
    print_result(json_, rows, "\n".join(explained.short_text(*item) for item in known.items()))
    return 0


# --- options to objects --------------------------------------------------------------------------


def misplaced_option_notes(command: str, args: Sequence[str]) -> tuple[str, ...]:
    """Return a note for each option of the command that stands after the script.

    Such options are passed to the script.
    """
    known = {n for a in app[command].assemble_argument_collection() for n in a.names}
    typed = dict.fromkeys(arg.partition("=")[0] for arg in args)
    return tuple(
        f"{name} stands after the script, so only the script gets it; put it before "
        "the script to have offbeat use it"
        for name in typed
        if name in known and name.startswith("--")
    )


def _prediction_text(prediction: Prediction) -> str:
    bound = "unknown" if prediction.bound_s is None else f"{prediction.bound_s:.6g}"
    return (
        f"{prediction.strategy}, seconds per iteration: {prediction.iteration_s:.6g}\n"
        f"  lower bound: {bound}\n  exposed communication: {prediction.exposed_s:.6g}"
    )


# --- running and showing -------------------------------------------------------------------------


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
    if outcome.report is not None:
        logs = comparing.logs_of(comparison, run_dir)
        show_run(run_dir, outcome.report, json_, verbose, logs, sentence_last=sentence_last)
    elif json_:
        print_result(True, {"run_dir": str(run_dir), "report": None, "rows": []}, "")
    kept = "what was measured is" if outcome.measured else "nothing was measured, the logs are"
    several = len(comparison.contestants or ()) > 1 and name is None  # the demo does not resume
    kept = f"{kept} in {run_dir}" + f"; --resume {run_dir} completes it" * several
    return exit_code(outcome, kept)


# --- entry ---------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code.

    0: success, 1: the script failed, 2: wrong use, 130: interrupted with Ctrl-C.
    """
    typed = list(sys.argv[1:] if argv is None else argv)
    try:
        if moved := moved_options(typed):
            text = f"{', '.join(moved)} after the script: taken as offbeat {typed[0]}'s"
            print(f"offbeat: note: {text}; options of the script follow --", file=sys.stderr)
        command, bound, *_ = app.parse_args(
            mark_script(typed), exit_on_error=False, print_error=False
        )
        return command(*bound.args, **bound.kwargs) or 0
    except KeyboardInterrupt:
        return _print_error("interrupted", INTERRUPTED)
    except CycloptsError as error:
        where = " ".join(["offbeat", *typed[:1]]) if typed[0] in app else "offbeat"
        return _print_error(f"{' '.join(str(error).split())} See `{where} --help`.", WRONG_USE)
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        path = "" if error.filename is None else f"{error.filename}: "
        return _print_error(f"{path}{error.strerror or error}; check the path", WRONG_USE)
    except ValueError as error:
        return _print_error(str(error), WRONG_USE)
    except RuntimeError as error:
        from offbeat.lab import LabError

        if not isinstance(error, LabError):
            raise
        return _print_error(str(error), WRONG_USE)


def _print_error(text: str, code: int) -> int:
    print(f"offbeat: {text}", file=sys.stderr)
    return code


def mark_script(argv: list[str]) -> list[str]:
    """Insert "--" before the script, so that all arguments after it are passed to the script."""
    if not argv or argv[0] not in SCRIPT_COMMANDS:
        return argv
    if argv[0] == "profile":
        argv = _output_first(argv)
    at = _script_position(argv)
    if argv[at : at + 1] in ([], ["--"]):
        return argv
    if argv[0] in PREDICTING_COMMANDS:
        return _options_first(argv, at)
    return [*argv[:at], "--", *argv[at:]]


def _option_tokens(command: str) -> dict[str, int]:
    """Return the number of values of each option of a command."""
    arguments = app[command].assemble_argument_collection()
    return {name: argument.token_count()[0] for argument in arguments for name in argument.names}


def _script_position(argv: Sequence[str]) -> int:
    """Return the index of the script, or of "--" before it; the length of `argv` without one."""
    tokens, at = _option_tokens(argv[0]), 1
    while at < len(argv) and argv[at].startswith("-") and argv[at] not in (MODULE, "--"):
        at += 1 + tokens.get(argv[at], 0)
    return min(at, len(argv))


def _options_first(argv: Sequence[str], at: int) -> list[str]:
    """Move the command's options that follow the script before it, up to "--"."""
    tokens, end = _option_tokens(argv[0]), at + (2 if argv[at] == MODULE else 1)
    own, passed, rest = list[str](), list[str](), [*argv[end:]]
    while rest and rest[0] != "--":
        name, has_value, _ = rest[0].partition("=")
        is_own = name.startswith("--") and name in tokens
        count = 1 + (tokens[name] if is_own and not has_value else 0)
        (own if is_own else passed).extend(rest[:count])
        del rest[:count]
    return [*argv[:at], *own, "--", *argv[at:end], *passed, *rest[1:]]


def moved_options(argv: Sequence[str]) -> list[str]:
    """Return the options of a command that predicts, where they follow the script."""
    if not argv or argv[0] not in PREDICTING_COMMANDS or "--help" in argv:
        return []
    at = _script_position(argv)
    if argv[at : at + 1] in ([], ["--"]):
        return []
    first = _options_first(argv, at)
    return [text for text in first[at : first.index("--", at)] if text.startswith("--")]


def _output_first(argv: list[str]) -> list[str]:
    """Move a final `-o FILE.json` of `profile` before the script, unless one is there already."""
    names = {"-o", "--output"}
    if len(argv) < 4 or not argv[-1].endswith(".json") or argv[-2] not in names:
        return argv
    return argv if names & set(argv[:-2]) else [argv[0], *argv[-2:], *argv[1:-2]]
