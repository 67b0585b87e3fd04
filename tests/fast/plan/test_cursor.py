"""The cursor: flushes and drops, saves and drains at every iteration of random plans."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
from fast.plan.test_random_plans import first_accepted, iterations_of
from harness.threads import MemoryControl
from oracle import quadratic
from oracle.quadratic import Quadratic, model_of
from oracle.random_plans import random_plan, ranks_of

from offbeat.core.derive.drained import drained_plan
from offbeat.core.derive.windows import Windows
from offbeat.core.guards.finite import FiniteGuard
from offbeat.core.plan.cursor import Cursor, Progress
from offbeat.core.plan.program import Program
from offbeat.core.runtime.engine import Engine
from offbeat.core.verify.check import check
from offbeat.core.verify.interpreter import Interpreter
from offbeat.plan import Apply, Moment, Payload, Phases, Plan, Transfer, Vote, local

SAVED, DRAINED = 60, 30  # plans
TOLERANCE = 1e-12


class Log:
    """Actions that record their order; a wait for a message in `blocked` raises."""

    def __init__(self, program: Program) -> None:
        self.steps, self.done, self.blocked = program.steps, list[str](), set[int]()
        self.excluded, self.in_rule, self.applied = False, lambda: None, list[int]()

    def create(self, planned: int) -> Progress:
        return Progress(planned=planned, steps=self.steps(planned))

    def receive(self, iteration: Progress, index: int) -> None:
        if iteration.planned in self.blocked:
            raise BlockingIOError
        self.done.append(f"receive {iteration.planned}")

    def apply(self, iteration: Progress, apply: Any) -> None:
        self.in_rule()
        self.done.append(f"{apply.rule} {iteration.planned}")
        self.applied.append(apply.buckets.start)

    def release(self, iteration: Progress, index: int) -> bool:
        self.done.append(f"release {iteration.planned}")
        return not self.excluded

    def is_released(self, iteration: Progress, index: int) -> bool:
        return True

    def pass_unsent_messages(self, iteration: Progress) -> None:
        self.done.append(f"pass {iteration.planned}")

    def decide(self, iteration: Progress, vote: Any) -> None:
        raise AssertionError

    cast_votes = decide

    def mark(self) -> None:
        return None

    def record_times(self, *_: Any) -> None:
        pass


def at_next_forward(*more: Apply, buckets: int = 1) -> tuple[Cursor[Progress], Log]:
    """The cursor of a plan that averages the gradients of each bucket until its next forward."""
    transfers, applies = [], list(more)
    for b in range(buckets):
        due, run = Moment("forward", b, lag=1), range(b, b + 1)
        transfers.append(Transfer(Payload("grad", run), Moment("grad", b), due, Phases([0]), "net"))
        applies.append(Apply("local", run, due, Phases([0])))
    plan = Plan("late", buckets, tuple(transfers), tuple(applies))
    program = Program(plan)
    log = Log(program)
    return Cursor(program, log), log


def iterate(cursor: Cursor[Progress], log: Log) -> None:
    cursor.begin(log.create)
    cursor.walk(cursor.program.end)
    cursor.end()


def test_the_forward_does_what_earlier_iterations_left() -> None:
    cursor, log = at_next_forward()
    iterate(cursor, log)
    iterate(cursor, log)
    assert log.done == ["release 0", "receive 0", "local 0", "release 1"]
    assert cursor.now is None
    assert cursor.planned == 2


def test_a_flush_is_done_once() -> None:
    cursor, log = at_next_forward()
    iterate(cursor, log)
    cursor.flush()
    cursor.flush()
    assert log.done == ["release 0", "receive 0", "local 0"]
    iterate(cursor, log)
    assert log.done[3:] == ["release 1"]
    cursor.flush()
    assert log.done[4:] == ["receive 1", "local 1"]


def test_a_flush_decides_a_vote_before_the_rule_that_needs_its_outcome() -> None:
    class Voting(Log):
        def cast_votes(self, iteration: Progress, votes: Any) -> None:
            self.done.append(f"ask {iteration.planned}")

        def decide(self, iteration: Progress, vote: Any) -> None:
            self.done.append(f"decide {iteration.planned}")

    due, run = Moment("forward", 0, lag=1), range(1)
    vote = Vote("odd", "any", Moment("grad", 0), due, Phases([0]))
    update = Apply("local", run, due, Phases([0]), when="odd")
    program = Program(Plan("voting", 1, (), (update,), votes=(vote,)))
    log = Voting(program)
    cursor: Cursor[Progress] = Cursor(program, log)
    iterate(cursor, log)
    cursor.flush()
    assert log.done == ["ask 0", "decide 0", "local 0"]
    iterate(cursor, log)
    assert log.done[3:] == ["ask 1"]


def test_a_rule_that_reads_weights_does_not_flush_again() -> None:
    cursor, log = at_next_forward(buckets=2)
    iterate(cursor, log)
    log.in_rule = cursor.flush
    cursor.flush()
    assert log.applied == [1, 0]


def test_a_rule_that_walks_again_is_applied_once() -> None:
    cursor, log = at_next_forward()
    iterate(cursor, log)
    cursor.begin(log.create)
    log.in_rule = lambda: cursor.walk(0)
    cursor.walk(0)
    assert log.applied == [0]


def test_a_rule_that_a_flush_refuses_is_not_passed_over() -> None:
    def refuse() -> None:
        raise ValueError

    cursor, log = at_next_forward()
    iterate(cursor, log)
    log.in_rule = refuse
    for _ in range(2):
        with pytest.raises(ValueError):
            cursor.flush()
    log.in_rule = lambda: None
    cursor.flush()
    assert log.applied == [0]


def test_an_excluded_message_is_not_awaited() -> None:
    update = local(1, Moment("grad", 0), Phases([0]))
    cursor, log = at_next_forward(update)
    log.excluded = True
    iterate(cursor, log)
    assert cursor.iterations[0].complete
    cursor.flush()
    assert log.done == ["local 0", "release 0", "local 0"]


def test_only_iterations_that_have_ended_are_awaited() -> None:
    cursor, log = at_next_forward()
    iterate(cursor, log)
    cursor.begin(log.create)
    cursor.receive_all()
    assert log.done == ["release 0", "receive 0"]


def test_a_restarted_plan_forgets_its_iterations() -> None:
    cursor, log = at_next_forward()
    for _ in range(3):
        iterate(cursor, log)
    cursor.flush()
    cursor.receive_all()
    cursor.restart()
    iterate(cursor, log)
    assert [one.planned for one in cursor.recent()] == [0]


@pytest.mark.parametrize("call", ["flush", "walk"])
def test_a_blocked_wait_is_taken_up_again(call: str) -> None:
    cursor, log = at_next_forward()
    iterate(cursor, log)
    log.blocked = {0}
    if call == "walk":
        cursor.begin(log.create)
    act = cursor.flush if call == "flush" else lambda: cursor.walk(0)
    for _ in range(2):
        with pytest.raises(BlockingIOError):
            act()
    assert log.done == ["release 0"]
    log.blocked = set()
    act()
    assert log.done == ["release 0", "receive 0", "local 0"]


@pytest.mark.parametrize("before", ["nothing", "flushed", "walked"])
def test_a_dropped_iteration_keeps_its_number(before: str) -> None:
    cursor, log = at_next_forward()
    iterate(cursor, log)
    if before == "flushed":
        cursor.flush()
    cursor.begin(log.create)
    if before == "walked":
        cursor.walk(0)
    cursor.drop()
    assert (cursor.now, cursor.planned) == (None, 1)
    assert log.done == ["release 0", "receive 0", "local 0", "pass 1"]
    assert [one.planned for one in cursor.recent()] == [0]
    iterate(cursor, log)
    assert log.done[4:] == ["release 1"]


def trained(plan: Plan, task: Quadratic, **options: Any) -> np.ndarray:
    """The weights that every forward has seen in the interpreter, by rank and iteration."""
    seen: list[list[np.ndarray]] = [[] for _ in range(task.ranks)]
    Interpreter(plan, model_of(task), task.ranks, **options).run(
        task.iterations, seed=1, after=lambda w, _: seen[w.rank].append(w.seen.copy())
    )
    return np.array(seen)


def task_of(plan: Plan, seed: int, iterations: int) -> Quadratic:
    sizes = tuple(Random(seed).choice((1, 3, 5)) for _ in range(plan.buckets))
    return Quadratic(sizes, ranks_of(plan), iterations, seed)


@pytest.mark.long
def test_a_new_cursor_at_every_iteration_changes_nothing() -> None:
    outstanding = 0
    for seed, plan in first_accepted(SAVED):
        iterations = iterations_of(plan)
        task = task_of(plan, seed, iterations)
        plain = trained(plan, task)
        every = trained(plan, task, resumes=range(1, iterations))
        assert np.array_equal(plain, every), f"seed {seed}\n{plan}"
        outstanding += any(t.before.lag for t in plan.transfers)
    assert outstanding > SAVED / 4


@cache
def plans_with_windows() -> list[tuple[int, Plan]]:
    found, seed = [], 0
    while len(found) < DRAINED:
        plan = random_plan(Random(seed), broken=0)
        if Windows(plan).late and not check(plan):
            found.append((seed, plan))
        seed += 1
    return found


@pytest.mark.long
def test_drained_anywhere_the_runtime_computes_what_the_interpreter_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = 0
    for seed, plan in plans_with_windows():
        rng, iterations = Random(seed), iterations_of(plan) + 2
        task = task_of(plan, seed, iterations)
        at = sorted(rng.sample(range(1, iterations), 2))
        expected = trained(plan, task, drains=at)
        count = [0] * task.ranks

        class Drained(Engine):
            def step(self, skip_update=False, count=count, at=at) -> None:
                super().step(skip_update)
                rank, own = self.control.rank, self.iteration
                if own in at and count[rank] < own:
                    count[rank] = own
                    self.drain()

        with monkeypatch.context() as patch:
            patch.setattr(quadratic, "Engine", Drained)
            found = np.array(quadratic.ran(plan, task))
        apart = np.abs(found - expected).max()
        assert apart < TOLERANCE, f"seed {seed}, drained at {at}: {apart:.1e} apart\n{plan}"
        derived = drained_plan(plan, at[0])
        sent += derived is not None and len(derived.transfers) > 1
    assert sent > 2, "too few plans had messages of a closed window left"


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_drain_refuses_values_that_are_not_finite(
    monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    class Guarded(Engine):
        def adopt(self, plan: Plan, planned: int = 0) -> None:
            place, refuse = (self.control.rank, self.control.world_size), self.waiting.fail_with
            self.suspects = guard = FiniteGuard("raise", *place, str, refuse)
            for link in self.links.values():
                link.guard = guard.run
            super().adopt(plan, planned)

        def step(self, skip_update: bool = False) -> None:
            super().step(skip_update)
            if self.iteration == at:
                self.drain()

    monkeypatch.setattr(quadratic, "Engine", Guarded)
    for seed, plan in plans_with_windows()[:8]:
        if plan.groups:
            continue
        task = task_of(plan, seed, at + 1)
        task.numbers[2][1, at - 1] = np.nan  # the last gradients of rank 1 before the drain
        with pytest.raises(RuntimeError, match="rank 1 sent values that are not finite"):
            quadratic.ran(plan, task)


def test_a_drained_plan_is_sound() -> None:
    """It conserves what was accumulated: no gradient is applied twice or left."""
    for seed, plan in plans_with_windows():
        for planned in range(1, plan.prologue + 2 * plan.period):
            derived = drained_plan(plan, planned)
            windows = Windows(plan)
            closed, opened = windows.window(planned, age=1), windows.window(planned)
            ages = [apply.arg("age") for apply in derived.applies] if derived else []
            assert ages == [1] * bool(closed) + [0] * (opened.start < planned), (seed, planned)


def test_failure_reports_name_the_next_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    message = Transfer(
        Payload("grad", range(2)), Moment("grad", 1), Moment("step"), Phases([0]), "net"
    )
    plan = Plan("synchronous", 2, (message,), (local(2, Moment("step"), Phases([0])),))
    published: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(MemoryControl, "set_iteration", lambda _, number: published.append(number))
        quadratic.ran(plan, Quadratic((3, 5), 2, 6, 0))
    assert sorted(published) == sorted([*range(1, 7)] * 2)
