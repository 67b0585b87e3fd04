"""Commands that plan and predict from a profile, and decide how to train."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from offbeat.cli import texts
from offbeat.cli.entry import app
from offbeat.cli.options import (
    REHEARSING,
    DeviceSpeed,
    Json,
    ProfileIn,
    Rehearsing,
    ScriptArgs,
    Settings,
    Verbose,
    number,
    option,
)
from offbeat.cli.output import print_result, terminal_width
from offbeat.core.files import write_text
from offbeat.core.guards.suitable_strategy import strategy_that_runs
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import Strategy, planned
from offbeat.core.strategy.parsing import text_of
from offbeat.experiments.advice.selection import MAX_STALENESS
from offbeat.strategies import find, strategy_names

if TYPE_CHECKING:  # imported only by the commands that need them
    from offbeat.core.sim import Prediction

ADVICE_WIDTH = 80  # of `advise` if the output is no terminal


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
    facts, chosen = texts.load_profile(profile), texts.strategy(strategy, set_)
    made = planned(chosen).plan(facts)
    if out is not None:
        write_text(out, json.dumps(made.to_dict(), indent=1))
    shown = [
        f"{f.name}: "
        + (f"{f.value:.4g}" if isinstance(f.value, float) else str(f.value))
        + (f" ({f.meaning})" if f.meaning else "")
        for f in made.facts
    ]
    print_result(json_, made.to_dict(), "\n".join([made.text(), *shown]))
    _print_variants([chosen], facts)
    return 0


@app.command
def simulate(  # noqa: C901
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
    from offbeat.experiments.device_speed import Compute

    if (plan is None) == (strategy is None):
        raise ValueError("simulate takes either --plan FILE or --strategy NAME")
    if plan is not None and period is not None:
        raise ValueError(f"period ({period}) is the plan's already; give --strategy NAME instead")
    if plan is not None and (set_ or servers != 1):
        raise ValueError(
            "--set and --servers must be left out with --plan, which is a finished plan; give "
            "--strategy NAME instead"
        )
    facts, speed = texts.load_profile(profile), texts.parse_device_speed(device_speed)
    compute = Compute.of(facts, speed)
    if speed is not None:
        facts = speed.apply(facts)
    contestants: list[tuple[dict[str, Any], sweep.Predict]] = []
    named: list[Strategy] = []
    if plan is not None:
        made = texts.load_plan(plan, facts)
        if speed is not None or any(axis is not None for axis in (rate, hosts, jitter, per_node)):
            made = replace(made, bound_s=None)  # that of the profile that the plan was made for
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
    _print_variants(named, facts)
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
    passes: Annotated[
        int | None,
        number("Backward passes per step and machine, on all hosts.  [default: as measured]"),
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
    json_: Json = False,
    verbose: Verbose = False,
) -> int:
    """Decide how to train: hours of one machine, of DDP, ZeRO-3 and the strategies.

    Example: offbeat advise --hosts 4 --rate 200mbit --samples 10M --batch 32 train.py
    """
    from offbeat.cli import advise as advising
    from offbeat.experiments.advice.place import given_rate_bps, require_network
    from offbeat.experiments.advice.question import Question, answer
    from offbeat.experiments.advice.work import Work

    speed = texts.parse_compute_speed(device_speed, iteration_s)
    counts = [
        texts.parse_count(*each) for each in (("--samples", samples), ("--iterations", iterations))
    ]
    question = Question(
        work=Work.of() if rehearse else Work.of(counts[0], batch, counts[1]),
        hosts=hosts,
        rate=rate,
        devices=per_host,
        cluster=cluster,
        max_staleness=max_staleness,
        device=speed,
        device_text=device_speed if iteration_s is None else f"{float(iteration_s):g}s",
        device_memory=texts.parse_size("--device-memory", device_memory),
        price=price,
        jitter=how.jitter,
        passes=passes,
        everything=verbose,
        script=() if script is None else (script, *args),
    )
    _require_advice_options(script, profile, rehearse, how, (samples, batch, passes))
    if passes is not None:
        texts.require_range("--passes", passes, 1, "leave it out for the measured number")
    if per_host is not None:
        texts.require_range("--per-host", per_host, 1, "it is the number of devices")
    if cluster is not None:
        texts.load_cluster(cluster, hosts=hosts, rate=rate)
    settings = how.settings(None if counts[1] is None else round(counts[1])) if rehearse else {}
    if profile is None and cluster is None:  # before a script is measured for minutes
        require_network(hosts, given_rate_bps(rate))
    facts, code = None, 0
    if script is not None:
        facts, code = advising.profile_here(script, args, profile, how.resume, stderr=True)
    elif profile is not None:
        facts = texts.load_profile(profile)
    if facts is None:
        return code
    if not rehearse:
        found = answer(question, facts, profile)
    else:
        found, code = advising.answer_with_losses(question, facts, profile, settings, how.resume)
        if found is None:
            return code
    print_result(json_, found.data, found.text(terminal_width(ADVICE_WIDTH), verbose=verbose))
    return 0


def _require_advice_options(
    script: str | None,
    profile: Path | None,
    rehearse: bool,
    how: Rehearsing,
    amounts: tuple[str | int | None, ...],
) -> None:
    """Raise ValueError if options of `advise` contradict each other."""
    if rehearse:
        if script is None:
            raise ValueError("--rehearse needs a script to train, as in advise --rehearse train.py")
        if any(amount is not None for amount in amounts):
            raise ValueError(
                "--samples, --batch and --passes must be left out with --rehearse, whose verdict "
                "is the time to a loss; give --target loss=4.3"
            )
        return
    if how != replace(REHEARSING, jitter=how.jitter):
        raise ValueError(
            "--seeds, --processes, --target and --resume are for --rehearse; add it, or leave them "
            "out"
        )
    if (script is None) == (profile is None):
        raise ValueError(
            "advise takes a script to measure, or --profile FILE; give one of both, as in offbeat "
            "advise --hosts 4 --rate 200mbit train.py"
        )


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


def _print_variants(strategies: Iterable[Strategy], profile: Profile) -> None:
    """Print a note on stderr for each strategy that the script of the profile does not allow as it
    is."""
    for strategy in strategies:
        try:
            suitable = strategy_that_runs(strategy, profile)
        except ValueError as error:
            note = str(error)
        else:
            if suitable is strategy:
                continue
            note = f"a job of this script runs {text_of(suitable)} instead of {text_of(strategy)}"
        print(f"note: {note}", file=sys.stderr)


def _prediction_text(prediction: Prediction) -> str:
    bound = "unknown" if prediction.bound_s is None else f"{prediction.bound_s:.6g}"
    return (
        f"{prediction.strategy}, seconds per iteration: {prediction.iteration_s:.6g}\n"
        f"  lower bound: {bound}\n  exposed communication: {prediction.exposed_s:.6g}"
    )
