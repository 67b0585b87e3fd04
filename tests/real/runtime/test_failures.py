"""Failures are words, on every rank that is left, and never a hang."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from cases import failing
from harness.commands import ForkedPython
from harness.ranks import Outcome, free_port, in_turn, run_ranks, variables, watch_ranks

from offbeat import DDP, WFBP, DeFT, DreamDDP, LocalSGD, PartialSync, Strategy

EAGER = WFBP(fusion="none")
AFTER = PartialSync(period=2)
TIMEOUT_S = 4.0
WAITED_S = 2.0  # where ranks wait for all of it
# The group's own timeout, then at most so long for asking who is behind.
PATIENCE_S = TIMEOUT_S + 12


def survivors(
    strategy: Strategy,
    how: str,
    who: int,
    *,
    world: int = 3,
    observe: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> list[Outcome]:
    """Outcomes of the ranks to which nothing happened; all of them must have ended in time."""
    doomed = () if how in ("raises", "has less data") else (who,)
    args = (strategy, how, who, timeout_s, observe)
    outcomes = watch_ranks(
        world, failing.train_until, *args, timeout_s=PATIENCE_S + 10, doomed=doomed
    )
    left = [o for o in outcomes if o.rank != who]
    for outcome in left:
        assert outcome.kind == "RuntimeError", outcome.error
        assert outcome.seconds < PATIENCE_S
    return left


WHERE = r"^rank \d: (grad|param) of bucket \S+ on link 'net' in iteration (\d+) (?:failed|has|will)"
SILENT = r"The store of rank 0 does not respond: rank 0 has failed, its host is gone, or the net"
HEARD = r"Last heard of: rank 0 \(\S+\): iteration \d, [^;]+, \d s ago; rank 1 .*; rank 2 "
LAST_HEARD = f"{HEARD}|{SILENT}"  # rank 0 fails as well, and here it does not linger
ACCUSED = (
    r"[Rr]ank (\d+)(?: \(\S+\))? "
    r"(?:has died or stands still|has left|keeps the others|cannot be reached|failed)"
)


def named(outcome: Outcome) -> list[int]:
    """The ranks that a report accuses."""
    return [int(rank) for rank in re.findall(ACCUSED, outcome.error)]


# What to do follows from the recorded cause.
LOOK = "Look for the cause in the log of rank 1 "
MEND = "Mend the error of rank 1,"
JOIN = r"The loop of rank 0 has fewer iterations: .* offbeat\.join"


@pytest.mark.parametrize(
    ("strategy", "iteration"),
    [(EAGER, "4"), (LocalSGD(period=2), "5"), (DreamDDP(period=2), "4")],
    ids=str,
)
def test_killed_peer(strategy: Strategy, iteration: str) -> None:
    """Bucket, link and iteration are named, and at once: nobody waits for the timeout."""
    for outcome in survivors(strategy, "is killed", 1):
        where = re.search(WHERE, outcome.error)
        assert where, outcome.error
        assert where[2] == iteration
        assert named(outcome) == [1], outcome.error
        assert re.search(LAST_HEARD, outcome.error), outcome.error
        assert re.search(LOOK, outcome.error), outcome.error
        assert "Timed out" not in outcome.error


def test_killed_rank_0() -> None:
    """Its store goes with it, so nobody knows who is behind; that is said."""
    for outcome in survivors(EAGER, "is killed", 0):
        assert re.search(WHERE, outcome.error), outcome.error
        assert re.search(SILENT, outcome.error), outcome.error
        assert named(outcome) == [0], outcome.error


def test_killed_peer_during_observation() -> None:
    for outcome in survivors(EAGER, "is killed", 1, world=2, observe=True):
        assert re.search(WHERE, outcome.error), outcome.error
        assert named(outcome) == [1], outcome.error


def test_silent_peer() -> None:
    for outcome in survivors(AFTER, "is stopped", 1, world=2, timeout_s=WAITED_S):
        assert re.search(WHERE, outcome.error), outcome.error
        assert re.search(r"rank 1 \(\S+\): .*, [1-9] s ago", outcome.error)
        assert named(outcome) == [1], outcome.error
        assert outcome.seconds > WAITED_S - 1


def test_a_rank_that_is_stopped_for_a_moment() -> None:
    """Shorter than any timeout: the others wait, and no bit changes."""
    calls = [(strategy, 0.3) for strategy in (DreamDDP(period=2, due="forward"), DeFT())]
    found = run_ranks(2, in_turn, failing.stop_for_a_moment, calls)
    for of_ranks in zip(*found, strict=True):
        assert len({bits for of_rank in of_ranks for bits in of_rank}) == 1


def test_stopped_rank_0() -> None:
    """Its store accepts questions and never answers them."""
    for outcome in survivors(EAGER, "is stopped", 0, world=2, timeout_s=WAITED_S):
        assert re.search(WHERE, outcome.error), outcome.error
        assert re.search(SILENT, outcome.error), outcome.error
        assert named(outcome) == [0], outcome.error


@pytest.mark.parametrize("strategy", [EAGER, DDP()], ids=str)
def test_a_rank_that_raises(strategy: Strategy) -> None:
    """Its own error is its own; the others end soon and say where they were."""
    for outcome in survivors(strategy, "raises", 2):
        assert "Timed out" not in outcome.error
        if strategy != DDP():  # torch's own words
            assert re.search(WHERE, outcome.error), outcome.error
            assert named(outcome) == [2], outcome.error


def test_a_rank_with_less_data() -> None:
    """It consolidates while the others train on: both sides time out, in words."""
    args = (EAGER, "has less data", 1, WAITED_S, False)
    other, early = watch_ranks(2, failing.train_until, *args, timeout_s=PATIENCE_S)
    assert re.search(WHERE, other.error), other.error
    assert "in consolidate, comparing values" in other.error, other.error
    remedy = "consolidate() was called on rank 1, but not on rank 0; call it on every rank, in "
    assert early.error.startswith(remedy), early.error
    assert "a collective of all ranks failed, " in early.error, early.error
    assert named(other) == named(early) == []


@pytest.mark.parametrize("strategy", [EAGER, DDP()], ids=str)
def test_consolidate_on_one_rank_names_the_others(strategy: Strategy) -> None:
    """Rank 0 is alone, as the store of these jobs ends with it."""
    args = (0, strategy, WAITED_S)
    alone, other = watch_ranks(2, failing.consolidate_on, *args, timeout_s=PATIENCE_S)
    assert other.result == "left"
    text = "consolidate() was called on rank 0, but not on rank 1; call it on every rank, in "
    assert alone.error.startswith(text), alone.error


def test_every_step_after_a_failure_refers_to_it() -> None:
    outcomes = watch_ranks(2, failing.train_on_after_failure, doomed=(1,), timeout_s=PATIENCE_S)
    first, second = outcomes[0].result
    assert re.search(WHERE, first)
    assert second == "this worker has failed; start it again"


@pytest.mark.parametrize(
    ("present", "cause"),
    [((0,), "rank 1 has not connected"), ((1,), ""), ((0, 2), "rank 1 has not connected")],
)
def test_missing_rank_at_start(present: tuple[int, ...], cause: str) -> None:
    """Every rank names it, unless it would host the store."""
    size = max(present) + 1 if len(present) > 1 else 2
    outcomes = watch_ranks(size, failing.meet, WAITED_S, only=present, timeout_s=PATIENCE_S)
    for rank, outcome in zip(present, outcomes, strict=True):
        assert outcome.kind == "RuntimeError", outcome
        assert re.match(
            rf"rank {rank} could not connect to all {size} ranks at 127.0.0.1:\d+ within 2 s: "
            f"{cause}",
            outcome.error,
        ), outcome.error
        assert outcome.seconds < PATIENCE_S


# ---- whole programs: how they leave ---------------------------------------------------------

SCRIPT = """
    import os, sys, time, torch, offbeat
    torch.set_num_threads(1)
    strategy, event, rank = sys.argv[1], sys.argv[2], int(os.environ["RANK"])
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = offbeat.prepare(model, optimizer, strategy, observe=1, timeout_s=20)
    for i in range(5):
        if i == 1 and rank == 1 and event == "raises":
            if not (child := os.fork()):
                raise KeyError("of a fork")
            print("fork", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        if i == 3 and rank == 1 and event == "raises":
            raise RuntimeError("DataLoader timed out after 5 seconds")
        if i == 3 and event == "rank 0 leaves":
            if rank == 0:
                sys.exit(0)
            time.sleep(3.5)  # rank 0 keeps its store open for a shorter time
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    print("trained")
"""


@pytest.mark.parametrize("strategy", ["bsp", "ddp"])
def test_script_that_raises(tmp_path: Path, strategy: str) -> None:
    """No abort, no hang, and a failure is one to the shell, on all ranks. (The examples' tests
    show programs that end well.) Rank 0 names the error of rank 1, whatever its words are. A fork
    that has raised before has not ended the job."""
    (code, output, errors), (code_1, output_1, errors_1) = run_scripts(tmp_path, strategy, "raises")
    assert code == code_1 == 1, errors
    assert "trained" not in output + output_1
    assert "terminate called" not in errors + errors_1
    assert "fork 1" in output_1, errors_1
    assert re.search(r"[Rr]ank 1 (?:\(\S+\) )?failed with RuntimeError: DataLoader", errors), errors
    if strategy != "ddp":  # torch's own words
        assert re.search(MEND, errors), errors


def test_rank_0_that_leaves_early(tmp_path: Path) -> None:
    """Its store ends with it, which is not a failure of the store."""
    (code, _, _), (code_1, _, errors) = run_scripts(tmp_path, "bsp", "rank 0 leaves")
    assert (code, code_1) == (0, 1), errors
    assert re.search(r"Rank 0 \(\S+\) has left after iteration 3", errors), errors
    assert re.search(JOIN, errors), errors
    assert not re.search(SILENT, errors)


def run_scripts(tmp_path: Path, *arguments: str) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of two ranks."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    port = free_port()
    ranks = [run_script(script, variables(rank, 2, port), *arguments) for rank in range(2)]
    ends = [process.communicate(timeout=60) for process in ranks]
    return [(process.returncode, *end) for process, end in zip(ranks, ends, strict=True)]


def run_script(script: Path, environment: dict[str, str], *arguments: str) -> ForkedPython:
    command = [sys.executable, str(script), *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return ForkedPython(command, env=environment, ends=True, **pipes)
