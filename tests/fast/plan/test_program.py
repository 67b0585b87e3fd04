"""Programs: one order of the moments of an iteration, and what a rank does at each."""

from dataclasses import replace
from random import Random

import pytest
from oracle.plan_families import FAMILIES, H, N, dear_plan, deft_plan, dreamddp_plan, selsync_plan
from oracle.random_plans import moment_at, random_plan, ranks_of

from offbeat.core.derive.coalesced import coalesce_steps
from offbeat.core.derive.windows import Windows
from offbeat.core.plan.program import Program, position
from offbeat.plan import Apply, Buffer, Moment, Phases, Plan, local, transfer

STEP, END = Moment("step"), Moment("end")


def test_the_order_of_an_iteration():
    order = [*(Moment("forward", b) for b in (2, 1, 0)), *(Moment("grad", b) for b in (0, 1, 2))]
    order += [STEP, END]
    assert [position(moment, 3) for moment in order] == list(range(8))
    assert [moment_at(place, 3) for place in range(8)] == order
    assert position(Moment("forward"), 3) == position(Moment("forward", 2), 3)
    assert position(Moment("grad"), 3) == position(Moment("grad", 2), 3)


def told(plan, iteration, rank=0):
    """(moment, what is done there in its order) of every step."""
    program, found = Program(plan, rank), []
    for step in program.steps(iteration):
        done = [
            f"wait {program.transfers(iteration - lag)[number].payload}"
            for lag, number in step.wait
        ]
        done += [f"know {vote.name}" for _, vote in step.decide]
        done += [apply.id for _, apply in step.apply]
        done += [f"say {vote.name}" for vote in step.ask]
        done += [f"release {program.transfers(iteration)[i].payload}" for i in step.release]
        found.append((str(moment_at(step.position, plan.buckets)), done))
    return found


def test_a_forward_waits_steps_and_goes_on():
    first, second = (told(dear_plan(), i) for i in range(2))
    backward = [(f"grad({b})", [f"release grad[{b}:{b + 1}]"]) for b in range(N)]
    at_step = [f"wait grad[{b}:{b + 1}]" for b in range(N)]
    at_step += [f"release grad[{b}:{b + 1}]" for b in reversed(range(N))]
    assert first == [*backward, ("step", at_step)]
    forward = [
        (f"forward({b})", [f"wait grad[{b}:{b + 1}]", f"local[{b}:{b + 1}]"])
        for b in reversed(range(N))
    ]
    assert second == [*forward, *backward, ("step", at_step)]


def test_wait_know_apply_say_release():
    plan = selsync_plan()
    assert told(plan, 0) == [
        ("grad(2)", ["say sync"]),
        ("step", ["know sync", "local[0:3]", "release param[0:3]"]),
        ("end", ["wait param[0:3]"]),
    ]


def test_phases_and_lags():
    assert [told(deft_plan(), i) for i in range(6)] == [
        [],
        [("end", ["close[0:3]"])],
        [("forward(2)", ["release grad~1[0:3]"])],
        [("step", ["wait grad~1[0:3]", "local[0:3]"]), ("end", ["close[0:3]"])],
        [("forward(2)", ["release grad~1[0:3]"])],
        [("step", ["wait grad~1[0:3]", "local[0:3]"]), ("end", ["close[0:3]"])],
    ]


def test_who_sends_and_who_receives():
    one = range(1)
    plan = Plan(
        "pair",
        1,
        (
            transfer(
                "grad", one, after=Moment("grad", 0), before=END, phases=[0], link="net",
                verb="send", ranks=(0, 2),
            ),
        ),
        (Apply("local", one, STEP, Phases([0]), ranks=(0,)),),
    )  # fmt: skip
    assert told(plan, 0, 0) == [
        ("grad(0)", ["release grad[0:1]"]),
        ("step", ["local[0:1]"]),
    ]
    assert told(plan, 0, 1) == []
    assert told(plan, 0, 2) == [("end", ["wait grad[0:1]"])]


def test_both_ranks_of_an_exchange_release_and_wait():
    one = range(1)
    moved = transfer(
        "param", one, after=STEP, before=END, phases=[0], link="net",
        verb="exchange", ranks=(0, 2), into="theirs",
    )  # fmt: skip
    plan = Plan("pair", 1, (moved,), (local(1, STEP, [0]),), buffers=(Buffer("theirs"),))
    for rank in (0, 2):
        released = ["local[0:1]", "release param[0:1]"]
        assert told(plan, 0, rank) == [("step", released), ("end", ["wait param[0:1]"])]
    assert told(plan, 0, 1) == [("step", ["local[0:1]"])]
    assert moved.id == "exchange param[0:1] 0<->2 into theirs@net"
    assert (moved.way, moved.only_receives(2), moved.in_place) == (None, False, False)


@pytest.mark.parametrize("seed", range(40))
def test_steps_are_what_the_rules_say(seed):
    """Of random plans: every rule once where it belongs, and equal keys mean equal steps."""
    plan = random_plan(Random(seed), broken=0)
    for rank in range(ranks_of(plan)):
        program, known = Program(plan, rank), {}
        for i in range(plan.prologue + 2 * plan.period + program.lag):
            steps = program.steps(i)
            assert known.setdefault(program.key(i), steps) == steps
            assert [s.position for s in steps] == sorted({s.position for s in steps})
            assert all(lag == apply.at.lag for s in steps for lag, apply in s.apply)
            waited = sorted((i - due.lag, due.number) for s in steps for due in s.wait)
            released = sorted(index for s in steps for index in s.release)
            mine = [t for t in plan.transfers if t.ranks is None or rank in t.ranks]

            def at(j, mine=mine):
                return [t for t in mine if j >= 0 and plan.phase(j) in t.phases]

            assert program.transfers(i) == tuple(at(i))
            assert waited == sorted(
                (j, n)
                for j in range(max(0, i - program.lag), i + 1)
                for n, t in enumerate(at(j))
                if t.before.lag == i - j and t.ranks in (None, (*(t.ranks or ())[:1], rank))
            )
            assert released == [
                n for n, t in enumerate(at(i)) if t.ranks is None or t.ranks[0] == rank
            ]
            applied = sum(len(a.buckets) for s in steps for _, a in s.apply)
            assert applied == sum(
                len(a.buckets)
                for j in range(max(0, i - program.lag), i + 1)
                for a in plan.applies
                if a.at.lag == i - j and plan.phase(j) in a.phases
                if a.ranks is None or rank in a.ranks
            )


def test_long_plans_have_short_tables():
    plan = replace(
        dreamddp_plan(),
        transfers=tuple(
            replace(t, phases=Phases(range(t.phases.runs[0][0], 10**9, 10**8)))
            for t in dreamddp_plan().transfers
        ),
        applies=(local(N, Moment("grad"), range(10**9)),),
        period=10**9,
    )
    program = Program(plan)
    iterations = [*range(20), *range(10**9 - 10, 10**9 + 20), 10**12 + 7]
    assert len({program.key(i) for i in iterations}) <= 2 * len(program.bounds)


# ---- coalesced ------------------------------------------------------------------------------


def places(plan, iteration):
    return [
        (str(moment_at(s.position, plan.buckets)), [a.id for _, a in s.apply])
        for s in coalesce_steps(Program(plan).steps(iteration), plan.buckets)
    ]


def test_runs_of_applies_become_one():
    alone = Plan("alone", N, (), (local(N, Moment("grad"), [0]),))
    assert places(alone, 0) == [("grad(2)", ["local[0:3]"])]
    late = Plan("alone", N, (), (local(N, Moment("forward", lag=1), [0]),))
    assert places(late, 1) == [("forward(2)", ["local[0:3]"])]


def test_what_is_released_or_due_in_between_keeps_its_place():
    sent = transfer(
        "param", range(1, 2), after=Moment("grad", 1), before=END, phases=[0], link="net"
    )
    plan = Plan("alone", N, (sent,), (local(N, Moment("grad"), [0]),))
    assert places(plan, 0) == [
        ("grad(0)", ["local[0:1]"]),
        ("grad(1)", ["local[1:2]"]),
        ("grad(2)", ["local[2:3]"]),
        ("end", []),
    ]


def test_an_apply_elsewhere_than_at_its_own_moment_keeps_its_place():
    """Moved to the last of both moments it would no longer come too early."""
    applies = [
        Apply("local", range(b, b + 1), Moment("grad", 1 - b), Phases([0])) for b in range(2)
    ]
    plan = Plan("crossed", 2, (), tuple(applies))
    assert places(plan, 0) == [("grad(0)", ["local[1:2]"]), ("grad(1)", ["local[0:1]"])]


def test_different_rules_do_not_become_one():
    applies = (
        Apply("local", range(1), Moment("grad", 0), Phases([0])),
        Apply("local", range(1, 2), Moment("grad", 1), Phases([0]), args={"scale": 0.5}),
        Apply("reset", range(2, 3), Moment("grad", 2), Phases([0])),
    )
    assert len(places(Plan("three", 3, (), applies), 0)) == 3
    votes = [
        Apply("reset", range(b, b + 1), Moment("grad", b), Phases([0]), None, "ab"[b])
        for b in range(2)
    ]
    assert len(places(Plan("two", 2, (), tuple(votes)), 0)) == 2
    ages = [
        Apply("reset", range(b, b + 1), Moment("grad", b), Phases([0]), None, "a", ago=b)
        for b in range(2)
    ]
    assert len(places(Plan("two", 2, (), tuple(ages)), 0)) == 2


# ---- windows --------------------------------------------------------------------------------


def test_windows():
    windows = Windows(deft_plan())  # closes in 1 and 3, then every second iteration
    assert [windows.window(i) for i in range(6)] == [
        range(2), range(2), range(2, 4), range(2, 4), range(4, 6), range(4, 6),
    ]  # fmt: skip
    assert [windows.window(i, age=1) for i in range(5)] == [
        range(0), range(0), range(2), range(2), range(2, 4),
    ]  # fmt: skip
    assert [list(windows.applied_window(i)) for i in range(6)] == [[], [], [], [0, 1], [], [2, 3]]
    early = Windows(FAMILIES["wfbp"].plan)
    assert [list(early.applied_window(i)) for i in range(H)] == [[0], [1], [2]]
    assert [list(early.window(i)) for i in range(H)] == [[0], [1], [2]]
    assert [list(early.window(i, age=1)) for i in range(H)] == [[], [0], [1]]
