"""What happens to a job when something happens to one of its ranks, by strategy and event."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from harness.ranks import Outcome, run_ranks, watch_ranks
from real.checkpoint.test_resume import TRIALS

from cases import failing
from cases.member_jobs import Scenario, epochs_of, membership_service, train_member
from offbeat.strategies import Strategy, create

TIMEOUT_S, LIMIT_S = 4.0, 60.0
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "wfbp": ("wfbp", {}),
    "asc-wfbp": ("asc-wfbp", {}),
    "bsp": ("bsp", {}),
    "bytescheduler": ("bytescheduler", {}),
    "dear": ("dear", {}),
    "p3": ("p3", {}),
    "us-byte": ("us-byte", {}),
    "cyclic": ("cyclic", {}),
    "deft": ("deft", {}),
    "diloco": ("diloco", {"period": 2}),
    "dreamddp": ("dreamddp", {"period": 3}),
    "dreamddp, due=forward": ("dreamddp", {"period": 3, "due": "forward"}),
    "dreamddp, due=delayed": ("dreamddp", {"period": 3, "due": "delayed"}),
    "dreamddp, wire=int4": ("dreamddp", {"period": 3, "wire": "int4"}),
    "fedavg": ("fedavg", {"local_steps": 2}),
    "local-sgd": ("local-sgd", {"period": 2}),
    "partial-sync": ("partial-sync", {"period": 2}),
    "selsync": ("selsync", {"delta": 0.2}),
    "demo": ("demo", {}),
    "des-loc": ("des-loc", {"period": 2}),
    "eager": ("eager", {"period": 2}),
    "noloco": ("noloco", {"period": 2}),
    "sparseloco": ("sparseloco", {"period": 2}),
    "ps-bsp": ("ps-bsp", {"silent_s": 1.0}),
    "ssp": ("ssp", {"silent_s": 1.0}),
    "a2cid2": ("a2cid2", {"topology": "complete", "silent_s": 1.0}),
    "ad-psgd": ("ad-psgd", {"topology": "complete", "silent_s": 1.0}),
}
RESUMED = {trial.strategy.name for trials in TRIALS.values() for trial in trials}
NAMES, ENDS = "names it", "ends"
GOES_ON, WAITS = "goes on", "waits"
EXACT, WEIGHTS, SNAPSHOT = "same bits", "weights", "snapshot"
REFUSED = "refused"
OUTCOMES = {NAMES, ENDS, GOES_ON, WAITS, EXACT, WEIGHTS, SNAPSHOT, REFUSED}
ACCUSED = re.compile(
    r"[Rr]ank (\d+)(?: \(\S+\))? "
    r"(?:has died or stands still|has left|keeps the others|cannot be reached|failed)"
)


def strategy_of(name: str) -> Strategy:
    return create(*STRATEGIES[name])


def live(strategy: Strategy, servers: int, how: str, who: int) -> str:
    """Train; something happens to one rank. A server returns when all workers have left."""
    if servers:
        os.environ["OFFBEAT_SERVERS"] = str(servers)
    try:
        return failing.train_until(strategy, how, who, TIMEOUT_S, observe=False)
    except SystemExit as end:
        return f"served {end.code}"


def _disturbed(name: str, how: str, who: int) -> str:
    """Return what the ranks do to which nothing happens."""
    strategy = strategy_of(name)
    servers = int(strategy.needs.servers)
    outcomes = watch_ranks(
        3 + servers, live, strategy, servers, how, who, timeout_s=LIMIT_S, doomed=[who]
    )
    others = [outcome for outcome in outcomes if outcome.rank != who]
    silent = [outcome.rank for outcome in others if outcome.kind == "silent"]
    assert not silent, f"ranks {silent} hang under {name}"
    if not any(outcome.kind for outcome in others):
        return GOES_ON
    workers = [outcome for outcome in others if not servers or outcome.rank < 3]
    assert all(outcome.kind for outcome in workers), f"only some ranks end under {name}"
    return NAMES if all(_names_only(outcome, who) for outcome in workers) else ENDS


def _names_only(outcome: Outcome, who: int) -> bool:
    found = {int(one) for one in ACCUSED.findall(outcome.error)}
    return found == {who} or f"(rank {who})" in outcome.error


def _paused(name: str) -> str:
    strategy = strategy_of(name)
    servers = int(strategy.needs.servers)
    ranks = run_ranks(
        3 + servers, failing.stop_for_a_moment, strategy, 0.3, servers, timeout_s=LIMIT_S
    )
    found = [pair for pair in ranks if pair]
    assert all(pair[1] == found[0][1] for pair in found), "replicas differ"
    if strategy.needs.survives_ranks:  # without exchanges there may be no difference
        return GOES_ON
    return WAITS if all(len(set(pair)) == 1 for pair in found) else GOES_ON


def _restarted(name: str) -> str:
    """Return what the tests of checkpoints show: those of `test_resume` are of all strategies with
    a plan, and compare bits at every position."""
    strategy = strategy_of(name)
    if strategy.needs.no_checkpoint is not None:
        return SNAPSHOT
    return EXACT if strategy.name in RESUMED else WEIGHTS


def _changed(name: str) -> str:
    """Return what a job with members does while one is killed, one joins, and the first leaves."""
    strategy = strategy_of(name)
    with membership_service() as address:
        founders = watch_ranks(3, train_member, address, Scenario(strategy, 2), timeout_s=LIMIT_S)
    kinds = {outcome.kind for outcome in founders}
    if kinds == {"ValueError"}:
        return REFUSED
    assert kinds == {""}, f"members do not train under {name}: {founders[0].error}"
    changes = {"kills": {1: 5}, "joins": {3: 17}, "join_after": 1, "leaves": {0: 25}}
    scenario = Scenario(strategy, 40, **changes)
    with membership_service() as address:
        outcomes = watch_ranks(4, train_member, address, scenario, timeout_s=LIMIT_S, doomed=[1])
        counts = [len(epoch.members) for epoch in epochs_of(address)]
    others = [outcome for outcome in outcomes if outcome.rank != 1]
    assert not any(outcome.kind for outcome in others), f"{name}: {others}"
    assert counts == [3, 2, 3, 2], f"members are {counts} under {name}"
    return GOES_ON


EVENTS: dict[str, Callable[[str], str]] = {
    "a rank is killed": lambda name: _disturbed(name, "is killed", 1),
    "rank 0 is killed": lambda name: _disturbed(name, "is killed", 0),
    "a rank is stopped": lambda name: _disturbed(name, "is stopped", 1),
    "a rank is stopped for .3 s": _paused,
    "the job starts again": _restarted,
    "members fail, join, leave": _changed,
}
