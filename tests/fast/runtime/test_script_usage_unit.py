"""Habits of scripts, and what of a plan they rule out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases.models import Case, profile_of
from harness.ranks import run_ranks
from harness.threads import MemoryControl, World

from offbeat import BSP, P3, WFBP, PartialSync, Strategy
from offbeat.core.derive.deferred import defer_updates
from offbeat.core.guards.gradients_read import ReadHook
from offbeat.core.guards.script_usage import UsageRecorder, combine_usage, conflict_with
from offbeat.plan import Apply, Buffer, Moment, Phases, Vote, local
from offbeat.profile import ScriptUsage

CASE = Case("mlp", "nesterov", "step")
AFTER = PartialSync(period=3)
CLEAR = Apply("clear", range(1), Moment("end"), Phases((0,)), args=(("buffer", "param"),))
GRADIENTS = WFBP().plan(profile_of(CASE, 2)).transfers
VOTE = Vote("sync", "changed", Moment("step"), Moment("end"), Phases((0,)))
UNFIT: list[tuple[Strategy, dict[str, Any]]] = [
    (AFTER, {"votes": (VOTE,)}),
    (AFTER, {"source": 0}),
    (AFTER, {"buffers": (Buffer("anchor"),)}),
    (AFTER, {"transfers": GRADIENTS}),
    (AFTER, {"applies": CLEAR}),
    (P3(), {"applies": CLEAR}),
    (P3(), {"applies": local(1, Moment("grad"), (0,))}),
    (P3(), {"period": 2}),
    (P3(), {"prologue": 1}),
]


@pytest.mark.parametrize(
    ("strategy", "more"),
    UNFIT,
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else str(one),
)
def test_what_cannot_be_put_off(strategy: Strategy, more: dict[str, Any]) -> None:
    """What depends on updates, or on when they happen."""
    plan = strategy.plan(profile_of(CASE, 2))
    assert defer_updates(plan) is not None
    if "applies" in more:
        more = {"applies": (*plan.applies, more["applies"])}
    assert defer_updates(replace(plan, **more)) is None


def test_what_one_rank_does_counts_for_all() -> None:
    def both(world: World, rank: int) -> ScriptUsage:
        mine = [
            ScriptUsage(True, scales=True, alters=True),
            ScriptUsage(reads=True, skips=True, backwards=3, hooks=True),
        ][rank]
        return combine_usage(mine, MemoryControl(world, rank))  # type: ignore[arg-type]

    assert (
        run_ranks(2, both, where="threads")
        == [ScriptUsage(True, True, True, True, 3, alters=True, hooks=True)] * 2
    )


def test_habits_of_a_loop() -> None:
    watched = UsageRecorder()
    watched.record_dropped_gradients()  # zero_grad before the first backward
    watched.record_step(changed=False, skipped=True)  # in place of a backward
    assert watched.usage == ScriptUsage()
    for changed in (True, False):
        watched.record_backward()
        watched.record_backward()
        watched.record_step(changed=changed, skipped=False)
    watched.record_backward()
    watched.record_step(changed=False, skipped=False)
    assert watched.usage == ScriptUsage(changes=True, backwards=2)
    watched.record_backward()
    watched.record_dropped_gradients()
    for skipped in (False, True):
        watched.record_backward()
        watched.record_backward()
        watched.record_step(changed=False, skipped=skipped)
        assert watched.usage == ScriptUsage(changes=True, skips=True, backwards=2)


@pytest.mark.parametrize(
    ("habits", "backward", "forward"),
    [
        (ScriptUsage(), True, True),
        (ScriptUsage(changes=True), False, False),
        (ScriptUsage(scales=True), False, False),
        (ScriptUsage(reads=True), True, False),
        (ScriptUsage(skips=True), False, True),
        (ScriptUsage(backwards=2), True, False),
        (ScriptUsage(alters=True), False, True),
        (ScriptUsage(hooks=True), False, False),
    ],
    ids=str,
)
def test_which_habits_suit_which_updates(
    habits: ScriptUsage, backward: bool, forward: bool
) -> None:
    """Those in backward have not been put off, and happen before the script has its say."""
    profile = profile_of(CASE, 2)
    suits = [conflict_with(habits, s.plan(profile)) is None for s in (BSP(), AFTER, P3())]
    assert suits == [True, backward, forward]


def test_reads_of_gradients_are_heard_only_meanwhile_and_only_of_these() -> None:
    watched, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    calls: list[int] = []
    looks = ReadHook(watched.parameters(), lambda: calls.append(1))
    others = ReadHook(other.parameters(), lambda: None)
    looks.open()
    other(watched(torch.ones(2))).sum().backward()
    assert other.weight.grad is not None
    assert not calls  # autograd writes, nobody reads
    torch.nn.utils.clip_grad_norm_(watched.parameters(), 1.0)
    assert calls
    others.open()  # of another model
    others.close()
    calls.clear()
    assert watched.weight.grad is not None
    assert calls
    looks.close()
    looks.close()
    calls.clear()
    assert watched.weight.grad is not None
    assert not calls
    assert "grad" not in vars(torch.nn.Parameter)
    ReadHook([], lambda: None).open()
    assert "grad" not in vars(torch.nn.Parameter)  # every read would take longer, for nothing
