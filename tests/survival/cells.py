"""What happens to a job when something happens to one of its ranks, by strategy and event."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from typing import Any

from support import checkpoint_jobs as jobs
from support import failing
from support.models import Case
from support.worlds import Outcome, WorldError, run_world, watch_world

from offbeat.strategies import Strategy
from offbeat.strategies import create as _create

TIMEOUT_S, LIMIT_S = 4.0, 60.0
CASE = Case("mlp", "nesterov")
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
    "fedavg": ("fedavg", {"local_steps": 2}),
    "local-sgd": ("local-sgd", {"period": 2}),
    "partial-sync": ("partial-sync", {"period": 2}),
    "selsync": ("selsync", {"delta": 0.2}),
    "ps-bsp": ("ps-bsp", {}),
    "ssp": ("ssp", {"silent_s": 1.0}),
    "a2cid2": ("a2cid2", {"topology": "complete", "silent_s": 1.0}),
    "ad-psgd": ("ad-psgd", {"topology": "complete", "silent_s": 1.0}),
}
NAMES, ENDS = "names it", "ends"
GOES_ON, WAITS = "goes on", "waits"
EXACT, WEIGHTS, SNAPSHOT = "same bits", "weights", "snapshot"
MEANINGS = {
    NAMES: "the other ranks end with an error that names the rank; start the job again",
    ENDS: "the other ranks end with an error that names no rank; start the job again",
    GOES_ON: "the other ranks train on",
    WAITS: "the other ranks wait, and no bit of the result changes",
    EXACT: "a job that loads its newest checkpoint ends with the bits of an undisturbed one",
    WEIGHTS: "a job that loads its newest checkpoint continues from its weights",
    SNAPSHOT: "`offbeat.save` is refused; a new job continues from the snapshot of the servers",
}
ACCUSED = re.compile(
    r"[Rr]ank (\d+)(?: \(\S+\))? "
    r"(?:has died or stands still|has left|keeps the others|cannot be reached|failed)"
)


def strategy_of(name: str) -> Strategy:
    return _create(*STRATEGIES[name])


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
    who = who if who >= 0 else 3  # the server is the last rank
    doomed = () if how == "raises" else (who,)
    outcomes = watch_world(
        live, 3 + servers, strategy, servers, how, who, timeout_s=LIMIT_S, doomed=doomed
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
    ranks = run_world(
        failing.stop_for_a_moment, 3 + servers, strategy, 0.3, servers, timeout_s=LIMIT_S
    )
    found = [pair for pair in ranks if pair]
    assert all(pair[1] == found[0][1] for pair in found), "replicas differ"
    return WAITS if all(len(set(pair)) == 1 for pair in found) else GOES_ON


def _restarted(name: str) -> str:
    strategy = strategy_of(name)
    if strategy.needs.no_checkpoint is not None:
        return SNAPSHOT
    trials = [jobs.Trial(strategy, CASE, 3)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            expected = run_world(jobs.train_and_save, 2, trials, folder)
            found = run_world(jobs.resume_everywhere, 2, trials, folder)
        except WorldError:  # exchanges of gossip are chance
            assert strategy.needs.allows_joining
            return WEIGHTS
    for mine, ((_, digests),) in zip(expected, found, strict=True):
        assert {digest for _, digest in digests} == set(mine), name
    return EXACT


EVENTS: dict[str, Callable[[str], str]] = {
    "a rank is killed": lambda name: _disturbed(name, "is killed", 1),
    "rank 0 is killed": lambda name: _disturbed(name, "is killed", 0),
    "a rank raises": lambda name: _disturbed(name, "raises", 1),
    "a rank is stopped": lambda name: _disturbed(name, "is stopped", 1),
    "a rank is stopped for .3 s": _paused,
    "the job starts again": _restarted,
}
