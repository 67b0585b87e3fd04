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

from offbeat.cli import sweep, texts
from offbeat.cli.entry import app
from offbeat.cli.options import REHEARSING, Count, Positive, Rehearsing, number, read
from offbeat.cli.output import print_result, terminal_width
from offbeat.core.files import write_text
from offbeat.core.guards.suitable_strategy import strategy_that_runs
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import Strategy, planned
from offbeat.core.strategy.parsing import text_of
from offbeat.core.units import parse_count, parse_given_rate_bps, parse_size
from offbeat.experiments.advice.selection import MAX_STALENESS
from offbeat.strategies import find, strategy_names

if TYPE_CHECKING:  # imported only by the commands that need them
    from offbeat.core.sim import Prediction

ADVICE_WIDTH = 80  # of `advise` if the output is no terminal
AXES = sweep.Axes()


@app.command
def plan(
    *,
    profile: Path,
    strategy: str,
    set_: list[str] | None = None,
    out: Annotated[Path | None, Parameter(("--output", "-o"))] = None,
    json_: bool = False,
) -> int:
    """Show a strategy's plan: which transfers it sends at which moments.

    Example: offbeat plan --profile profile.json --strategy dreamddp --set period=5

    Args:
        profile: Measured profile (JSON).
        strategy: Name; see `offbeat strategies`.
        set_: Setting of the strategy, as in --set period=5; repeatable.
        out: File for the plan (JSON).
        json_: Print only JSON.
    """
    facts, chosen = texts.load_profile(profile), texts.strategy(strategy, set_)
    made = planned(chosen).plan(facts)
    if out is not None:
        write_text(out, json.dumps(made.to_dict(), indent=1))
    shown = []
    for fact in made.facts:
        value = f"{fact.value:.4g}" if isinstance(fact.value, float) else fact.value
        shown.append(f"{fact.name}: {value}" + f" ({fact.meaning})" * bool(fact.meaning))
    print_result(json_, made.to_dict(), "\n".join([made.text(), *shown]))
    _print_variants([chosen], facts)
    return 0


@app.command
def simulate(
    *,
    profile: Path,
    plan: Path | None = None,
    strategy: str | None = None,
    set_: list[str] | None = None,
    axes: sweep.Axes = AXES,
    period: str | None = None,
    iterations: Count = None,
    csv: bool = False,
    servers: Positive = 1,
    votes: str | None = None,
    device_speed: str | None = None,
    json_: bool = False,
) -> int:
    """Predict the seconds per iteration of a plan or of strategies, as a table for lists.

    Example: offbeat simulate --profile profile.json --strategy dreamddp --period 5,10 --hosts 4,32

    Args:
        profile: Measured profile (JSON).
        plan: File with a plan, instead of a strategy.
        strategy: One or more names, separated by commas; see `offbeat strategies`.
        set_: Setting of the strategy, as in --set period=5; repeatable.
        period: Values of the setting `period`: 5,10.
        iterations: Least number of iterations to simulate.
        csv: Print a table as CSV.
        servers: Number of servers, in addition to the profile's ranks.
        votes: Share of accepted votes of the plan, such as .2, or a run's record (rank0.jsonl).
        device_speed: Predicted device: 20x this machine, or 35ms.
        json_: Print only JSON.
    """
    from offbeat.core import sim
    from offbeat.experiments.device_speed import Compute

    facts, speed = texts.load_profile(profile), texts.parse_device(device_speed)
    compute = Compute.of(facts, speed)
    facts = facts if speed is None else speed.apply(facts)
    contestants: list[tuple[dict[str, Any], sweep.Predict]] = []
    named = _named(plan, strategy, set_, period, servers)
    if plan is not None:
        made = texts.load_plan(plan, facts)
        if speed is not None or axes != AXES:
            made = replace(made, bound_s=None)  # that of the profile that the plan was made for
        outcomes = texts.parse_votes(votes, made, facts)
        predict = partial(sim.predict_plan, made, iterations=iterations, votes=outcomes)
        contestants = [({"strategy": made.strategy, "period": made.period}, predict)]
    for chosen in named:
        columns = {"strategy": str(chosen), "period": getattr(chosen, "period", None)}
        outcomes = texts.parse_votes(votes, chosen, facts) if votes else None
        predict = partial(
            sim.predict, chosen, iterations=iterations, servers=servers, votes=outcomes
        )
        contestants.append((columns, predict))
    results = sweep.rows(axes, facts, contestants)
    added = {"compute": compute.record()}
    if csv:
        print(sweep.csv_text(sweep.cells(results)))
    elif len(results) > 1:
        rows = [{**row, "prediction": row["prediction"].to_dict(), **added} for row in results]
        print_result(json_, rows, sweep.align_columns(sweep.cells(results)))
    else:
        one = results[0]["prediction"]
        print_result(json_, {**one.to_dict(), **added}, _prediction_text(one))
    if compute.text and not json_:
        print(f"note: {compute.text}", file=sys.stderr if csv else sys.stdout)
    _print_variants(named, facts)
    return 0


def _named(
    plan: Path | None,
    strategy: str | None,
    settings: list[str] | None,
    period: str | None,
    servers: int,
) -> list[Strategy]:
    """Return the strategies to predict, with each period; none with a plan."""
    if (plan is None) == (strategy is None):
        raise ValueError("simulate takes either --plan FILE or --strategy NAME")
    if strategy is None:
        if settings or period is not None or servers != 1:
            raise ValueError(
                "--set, --period and --servers must be left out with --plan, which is a finished "
                "plan; give --strategy NAME instead"
            )
        return []
    named = texts.parse_strategies(strategy, settings)
    if servers != 1 and not any(chosen.needs.servers for chosen in named):
        raise ValueError(
            f"servers ({servers}) must be left out with {strategy}, which trains without them; "
            "choose one that has servers: ssp, ps-bsp"
        )
    return sweep.with_periods(named, period)


@app.command
def advise(
    script: str | None = None,
    /,
    *args: str,
    profile: Path | None = None,
    hosts: Count = None,
    rate: str | None = None,
    per_node: Count = None,
    cluster: Path | None = None,
    samples: Annotated[float | None, read(parse_count)] = None,
    batch: Count = None,
    iterations: Annotated[float | None, read(parse_count)] = None,
    rehearse: bool = False,
    how: Rehearsing = REHEARSING,
    passes: Count = None,
    max_staleness: Annotated[int, number(0)] = MAX_STALENESS,
    device_speed: str | None = None,
    device_memory: Annotated[float | None, read(parse_size)] = None,
    price: float | None = None,
    json_: bool = False,
    verbose: bool = False,
) -> int:
    """Decide how to train: hours of one machine, of DDP, ZeRO-3 and the strategies.

    Example: offbeat advise --hosts 4 --rate 200mbit --samples 10M --batch 32 train.py

    Args:
        script: A training script to measure on one device, without --profile.
        args: Passed to the script as they are.
        profile: Measured profile (JSON) instead of a script.
        hosts: Number of machines.  [default: the profile's]
        rate: Rate of the network.  [default: as measured]
        per_node: Devices of each machine, which share a replica.  [default: the profile's, or 1]
        cluster: Cluster file (TOML), instead of --hosts and --rate.
        samples: Samples in all, such as 10M; needs --batch.
        batch: Samples per iteration of one device.
        iterations: Iterations of one device.  [default: 1000]  With --rehearse: of each strategy.
        rehearse: Train the script's replicas here under each strategy, for times to a loss.
        passes: Backward passes per step and machine, on all hosts.  [default: as measured]
        max_staleness: Largest number of iterations until an update has reached all workers.
        device_speed: Predicted device: 20x this machine, or 35ms.
        device_memory: Memory of a device, such as 24GB.
        price: Price of a machine and hour.
        json_: Print only JSON.
        verbose: Print all numbers.
    """
    from offbeat.cli import advise as advising
    from offbeat.experiments.advice.place import require_network
    from offbeat.experiments.advice.question import Question, answer
    from offbeat.experiments.advice.verdict import Work

    _require_advice_options(script, profile, rehearse, how, (samples, batch, passes))
    question = Question(
        work=Work.of() if rehearse else Work.of(samples, batch, iterations),
        hosts=hosts,
        rate=rate,
        devices=per_node,
        cluster=cluster,
        max_staleness=max_staleness,
        device=texts.parse_device(device_speed),
        device_memory=device_memory,
        price=price,
        jitter=how.jitter,
        passes=passes,
        everything=verbose,
        script=() if script is None else (script, *args),
    )
    if cluster is not None:
        texts.load_cluster(cluster, hosts=hosts, rate=rate)
    settings = how.settings(None if iterations is None else round(iterations)) if rehearse else {}
    if profile is None and cluster is None:  # before a script is measured for minutes
        require_network(hosts, parse_given_rate_bps(rate))
    facts, code = advising.profile_here(question.script, profile, how.resume, stderr=True)
    if facts is None:
        return code
    if rehearse:
        found, code = advising.answer_with_losses(question, facts, profile, settings, how.resume)
    else:
        found = answer(question, facts, profile)
    if found is not None:
        print_result(json_, found.data, found.text(terminal_width(ADVICE_WIDTH)))
    return code


def _require_advice_options(
    script: str | None,
    profile: Path | None,
    rehearse: bool,
    how: Rehearsing,
    amounts: tuple[float | None, ...],
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
            "--seeds, --target and --resume are for --rehearse; add it, or leave them out"
        )
    if (script is None) == (profile is None):
        raise ValueError(
            "advise takes a script to measure, or --profile FILE; give one of both, as in offbeat "
            "advise --hosts 4 --rate 200mbit train.py"
        )


@app.command
def strategies(name: str | None = None, /, *, json_: bool = False) -> int:
    """List the strategies with their settings and sources, or explain one.

    Example: offbeat strategies dreamddp

    Args:
        name: Explain this strategy and its settings.
        json_: Print only JSON.
    """
    from offbeat.cli import explained

    if name is not None:
        cls = find(name)
        text = explained.full_text(name, cls, terminal_width())
        print_result(json_, explained.record_of(name, cls), text)
        return 0
    rows = [explained.record_of(name, find(name)) for name in strategy_names()]
    print_result(json_, rows, "\n".join(map(explained.short_text, rows)))
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
