"""Commands, options and entry point of the command line."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from cyclopts import App, CycloptsError, Parameter

from offbeat.cli import texts
from offbeat.core.files import write_text
from offbeat.core.profile import Profile
from offbeat.experiments.advice import MAX_STALENESS
from offbeat.strategies import find, strategy_names

if TYPE_CHECKING:  # lab, report and rich are imported only by the commands that need them
    from offbeat.core.sim import Prediction
    from offbeat.experiments.compare import Comparison, Outcome, Setup
    from offbeat.lab import Cluster

WRONG_USE, FAILED, INTERRUPTED = 2, 1, 130
SCRIPT_COMMANDS = ("run", "profile", "compare", "join", "rehearse", "advise")
DEMO, DEMO_STRATEGIES = "offbeat.experiments.demo", "ddp,local-sgd,dreamddp"
REPEAT = 2  # runs of each strategy of a comparison
DEMO_LEAST = 20  # least number of iterations: leaves two periods to measure
MODULE = "-m"  # as for python: the module's name and arguments follow
ADVISED = "advised"  # value of --strategies that stands for the result of `offbeat advise`
PLAIN_WIDTH = 100  # characters per line of a table if the output is no terminal
ADVICE_WIDTH = 80  # of `advise` if the output is no terminal
LEAST_WIDTH = 60  # least width of a table in characters; a narrower terminal wraps its lines

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


def option(help_: str, *names: str) -> Parameter:
    """Return the declaration of an option. Flags have no --no- form."""
    # Accept values that begin with a hyphen, so that errors name a negative number as the value.
    return Parameter(name=names or None, help=help_, negative="", allow_leading_hyphen=True)


def number(help_: str, *names: str) -> Parameter:
    """Return the declaration of an option whose value is a whole number."""
    return Parameter.combine(option(help_, *names), Parameter(converter=texts.parse_whole_number))


Verbose = Annotated[
    bool, Parameter("--verbose", help="Print all numbers.", negative="", show_default=False)
]
Json = Annotated[
    bool, Parameter("--json", help="Print only JSON.", negative="", show_default=False)
]
Settings = Annotated[
    list[str] | None, option("Setting of the strategy, as in --set period=5; repeatable.", "--set")
]
ScriptArgs = Annotated[str, Parameter(help="Passed to the script as they are.")]
Script = Annotated[str, Parameter(help="The training script, or -m and the name of a module.")]
OutDir = Annotated[
    Path | None, option("New directory for the run.  [default: runs/TIME-SCRIPT]", "--out")
]
ProfileIn = Annotated[Path, option("Measured profile (JSON).", "--profile")]
ReuseProfile = Annotated[
    Path | None, option("Reuse this profile instead of measuring one.", "--profile")
]
DeviceSpeed = Annotated[
    str | None,
    option("Predicted device: 20x this machine, or 35ms."),
]


@Parameter(name="*")
@dataclass(frozen=True)
class Where:
    """Options of all commands that run a script."""

    hosts: Annotated[int | None, number("Number of hosts.  [default: 4]")] = None
    rate: Annotated[str | None, option("Rate of every link.  [default: 100mbit]")] = None
    per_node: Annotated[
        int | None, number("Ranks on each host, which share a replica.  [default: 1]")
    ] = None
    inside: Annotated[
        str | None, option("Rate between the ranks of a host.  [default: unlimited]")
    ] = None
    servers: Annotated[int, number("More hosts, for parameter servers (ssp, ps-bsp).")] = 0
    cluster: Annotated[
        Path | None, option("Cluster file (TOML), instead of --hosts and --rate.")
    ] = None
    lab: Annotated[
        Literal["auto", "none"], option("none: loopback, unshaped, no privileges needed.")
    ] = "auto"
    links: Annotated[str | None, option("With --lab none: interfaces, as in eth0*2,gloo:eth1.")] = (
        None
    )
    seed: Annotated[int, number("OFFBEAT_SEED; each repetition adds 1.")] = 0
    secret: Annotated[
        Path | None,
        option("File with the job's secret; else OFFBEAT_SECRET."),
    ] = None
    timeout: Annotated[float | None, option("Longest time of a launch, in seconds.")] = None
    wait: Annotated[float, option("Longest wait for a rank, in seconds.")] = 120.0
    pace: Annotated[
        str | None,
        option(
            "Hosts compute at 1/K of a core: K, auto (the least K) or none.  "
            "[default: auto where ranks outnumber cores]"
        ),
    ] = None
    min_bucket_bytes: Annotated[
        int | None,
        number("Smallest size of a bucket, in bytes.", "--min-bucket"),
    ] = None


WHERE = Where()

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
    from offbeat.experiments.compare import CheckpointOptions, Comparison, Contestant

    if checkpoint is None and (every is not None or resume):
        raise ValueError("--every and --resume need --checkpoint, a folder")
    keeping = None if checkpoint is None else CheckpointOptions(checkpoint, every, resume)
    chosen = None
    if strategy is not None:
        chosen = (Contestant(strategy, texts.strategy(strategy, set_)),)
    elif set_:
        raise ValueError(f"setting ({set_[0]}) needs --strategy NAME, which has it")
    setup = _setup(where, script, args)
    notes = _misplaced_option_notes("run", args)
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
    set_: Annotated[
        list[str] | None,
        option(
            "Setting of all strategies that have it (period=5), or of one (dreamddp.period=5).",
            "--set",
        ),
    ] = None,
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
    from offbeat.experiments.compare import Comparison, given_profile

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
    if resume is not None and out is not None:
        raise ValueError(f"--out ({out}) is the folder of --resume ({resume}); leave --out out")
    if resume is not None and profile is None and (resume / "profile.json").exists():
        known = resume / "profile.json"
    else:
        known = profile
    shown = partial(_compare, out=resume or out, json_=json_, verbose=verbose)
    resumed = resume is not None
    setup, notes = _setup(where, script, args), _misplaced_option_notes("compare", args)
    if strategies.partition(":")[0] != ADVISED:
        chosen = texts.with_arguments(texts.contestants(strategies, set_ or []), args_of)
        comparison = compared(setup, chosen, repeat, target_loss, profile, notes=notes)
        return shown(comparison, resume=resumed)
    from offbeat.cli import advise as advising

    with advising.open_profile(setup, known, stderr=json_) as (path, outcome):
        if path is None:
            return _exit_code(outcome, "no profile was written")
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
    from offbeat.experiments.compare import Comparison

    texts.require_range("--hosts", hosts, 2, "one host sends nothing")
    texts.require_range("--iterations", iterations, DEMO_LEAST, "a shorter run measures too little")
    where = Where(hosts=hosts, rate=rate, lab=lab)
    setup = _setup(where, MODULE, (DEMO, "--iterations", str(iterations)))
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
    from offbeat.experiments.compare import Progress, measure_profile

    setup, progress = _setup(where, script, args), Progress(stderr=json_)
    for note in _misplaced_option_notes("profile", args):
        progress.print_error(f"note: {note}")
    outcome = measure_profile(setup, out, progress)
    if outcome.measured:
        print_result(json_, Profile.load(out).to_dict(), f"measured: {out}")
    return _exit_code(outcome, "no profile was written")


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
        str | None, option("Iterations that one device would need.  [default: 1000]")
    ] = None,
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
        work=Work.of(counts[0], batch, counts[1]),
        hosts=hosts,
        rate=rate,
        devices=per_host,
        cluster=cluster,
        max_staleness=max_staleness,
        device=speed,
        device_text=device_speed,
        device_memory=texts.parse_size("--device-memory", device_memory),
        price=price,
        everything=verbose,
    )
    if (script is None) == (profile is None):
        raise ValueError(
            "advise takes a script to measure, or --profile FILE; give one of both, as in offbeat "
            "advise --hosts 4 --rate 200mbit train.py"
        )
    if profile is not None:
        answer = advising.answer(question, texts.load_profile(profile), profile)
    else:
        assert script is not None
        setup = _setup(Where(hosts=1, lab="none", pace="none"), script, args)
        with advising.open_profile(setup, None, stderr=True) as (path, outcome):
            if path is None:
                return _exit_code(outcome, "no profile was written")
            answer = advising.answer(question, texts.load_profile(path), None)
    if out is not None:
        write_text(out, json.dumps(answer.data, indent=1))
    print_result(json_, answer.data, answer.text(terminal_width(ADVICE_WIDTH), verbose=verbose))
    return 0


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
        _print_or_write(text, output)
        return 0
    if output is not None:
        raise ValueError(f"--output ({output}) must be given with --export csv, latex or svg")
    _show_run(run_dir, reports.write(run_dir), json_, verbose)
    return 0


def _report_job(
    folders: Sequence[Path], export: str | None, output: Path | None, json_: bool
) -> int:
    """Print the report of a job and write its page, or export its intervals."""
    from offbeat.experiments.report import job, job_export, job_page

    if export is not None:
        if export not in get_args(job_export.Form):
            raise ValueError(f"--export ({export}) must be csv or json for a job")
        _print_or_write(job_export.export(folders, export), output)  # type: ignore[arg-type]
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


def _print_or_write(text: str, output: Path | None) -> None:
    if output is None:
        print(text, end="")
    else:
        write_text(output, text)


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


def _setup(where: Where, script: str, args: Sequence[str]) -> Setup:
    from offbeat.experiments.compare import NO_LIMIT_S, Setup

    cluster = _cluster(where)
    for name, value in (("--timeout", where.timeout), ("--wait", where.wait)):
        if value is not None:
            texts.require_duration(name, value, NO_LIMIT_S)
    if where.min_bucket_bytes is not None:
        texts.require_range("--min-bucket", where.min_bucket_bytes, 1, "leave it out")
    texts.set_secret(where.secret)
    return Setup(
        script=(script, *args),
        cluster=cluster,
        shaped=where.lab == "auto",
        seed=where.seed,
        timeout_s=NO_LIMIT_S if where.timeout is None else where.timeout,
        wait_s=where.wait,
        links=tuple(link.strip() for link in where.links.split(",")) if where.links else (),
        pace=texts.parse_pace(where.pace),
        servers=where.servers * cluster.processes_per_host,
        min_bucket_bytes=where.min_bucket_bytes,
    )


def _misplaced_option_notes(command: str, args: Sequence[str]) -> tuple[str, ...]:
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


def _cluster(where: Where) -> Cluster:
    texts.require_range("--servers", where.servers, 0, "leave it out for none")
    cluster = _worker_cluster(where)
    if not where.servers:
        return cluster
    more = {"hosts": cluster.hosts + where.servers}
    return type(cluster).model_validate({**cluster.record(), **more})


def _worker_cluster(where: Where) -> Cluster:
    from offbeat.lab import Cluster
    from offbeat.lab.description import MAX_HOSTS
    from offbeat.lab.units import parse_rate_bps

    if where.cluster is None:
        hosts, rate = where.hosts, where.rate
        if hosts is not None:
            texts.require_range("--hosts", hosts, 1, "give the number of hosts", MAX_HOSTS)
        parse_rate_bps(rate, "--rate")
        # As text of a cluster file, so that errors are the same as there.
        short = f"hosts = {4 if hosts is None else hosts}\nrate = {json.dumps(rate or '100mbit')}"
        if where.per_node is not None:
            texts.require_range("--per-node", where.per_node, 1, "give the number of ranks")
            short += f"\nranks = {where.per_node}"
        if where.inside is not None:
            parse_rate_bps(where.inside, "--inside")
            short += f"\ninside = {json.dumps(where.inside)}"
        return Cluster.from_toml(short)
    for name in ("hosts", "rate", "per_node", "inside"):
        if getattr(where, name) is not None:
            given = name.replace("_", "-")
            raise ValueError(
                "--cluster replaces --hosts and --rate; give one or the other"
                if name in ("hosts", "rate")
                else f"--{given} must be left out with --cluster; put it into the cluster file"
            )
    texts.require_file(where.cluster, 'write one with the lines hosts = 4 and rate = "100mbit"')
    return Cluster.load(where.cluster)


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
    from offbeat.experiments.script import script_name

    run_dir = out or comparing.default_run_dir(name or script_name(comparison.setup.script))
    progress = comparing.Progress(stderr=json_)
    outcome = comparing.compare(comparison, run_dir, progress, resume=resume)
    if outcome.report is not None:
        logs = comparing.logs_of(comparison, run_dir)
        _show_run(run_dir, outcome.report, json_, verbose, logs, sentence_last=sentence_last)
    elif json_:
        print_result(True, {"run_dir": str(run_dir), "report": None, "rows": []}, "")
    kept = "what was measured is" if outcome.measured else "nothing was measured, the logs are"
    several = len(comparison.contestants or ()) > 1 and name is None  # the demo does not resume
    kept = f"{kept} in {run_dir}" + f"; --resume {run_dir} completes it" * several
    return _exit_code(outcome, kept)


def _exit_code(outcome: Outcome, kept: str) -> int:
    if outcome.interrupted:
        print(f"offbeat: interrupted; {kept}", file=sys.stderr)
        return INTERRUPTED
    return FAILED if outcome.failures else 0


def _show_run(
    run_dir: Path,
    page: Path,
    json_: bool,
    verbose: bool,
    logs: str | None = None,
    *,
    sentence_last: bool = False,
) -> None:
    """Print the results of a run: table, headline, reservations, and path of the report.

    With `json_` print the contents of summary.json. With `sentence_last` the headline is the last
    line.
    """
    from offbeat.experiments import report as reports
    from offbeat.experiments.report import table
    from offbeat.experiments.report.breakdown import explain_error
    from offbeat.jobs.verdict_file import verdict_of_run

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
    if run.given is not None and run.given["computed"]:
        print(f"predicted from a computed profile: {run.given['text']}")
    if (kept := verdict_of_run(run_dir)) is not None:
        hosts = int(run.cluster.get("hosts", 0))
        for row in rows:
            text = f"verdict: {kept.compare(row.strategy, hosts, row.iteration_s)}"
            print(*table.wrap(text, width), sep="\n")
    for note in run.notes:
        print(f"note: {note}")
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


# --- entry ---------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code.

    0: success, 1: the script failed, 2: wrong use, 130: interrupted with Ctrl-C.
    """
    typed = list(sys.argv[1:] if argv is None else argv)
    try:
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
    arguments = app[argv[0]].assemble_argument_collection()
    tokens = {name: argument.token_count()[0] for argument in arguments for name in argument.names}
    at = 1
    while at < len(argv) and argv[at].startswith("-") and argv[at] != MODULE:
        if argv[at] == "--":
            return argv
        at += 1 + tokens.get(argv[at], 0)
    return [*argv[:at], "--", *argv[at:]] if at < len(argv) else argv


def _output_first(argv: list[str]) -> list[str]:
    """Move a final `-o FILE.json` of `profile` before the script, unless one is there already."""
    names = {"-o", "--output"}
    if len(argv) < 4 or not argv[-1].endswith(".json") or argv[-2] not in names:
        return argv
    return argv if names & set(argv[:-2]) else [argv[0], *argv[-2:], *argv[1:-2]]
