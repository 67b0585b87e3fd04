"""Which plans leave gradients to the optimizer alone, and how few updates in backward they need."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offbeat.core.derive.lean import keeps_gradients, lean
from offbeat.plan import Apply, Buffer, Moment, Phases, Plan, Vote, local, transfer

SIZE = 5


def moved(buffer: str, buckets: range, phases: list[int]):
    after = Moment("grad", buckets[-1])
    return transfer(buffer, buckets, after=after, before=Moment("end"), phases=phases, link="net")


def plan(*transfers, period: int = 2, at: str = "grad") -> Plan:
    applies = (local(SIZE, Moment(at), range(period)),)
    return Plan("made up", SIZE, transfers, applies, period=period)


def leaner(made: Plan, phase: int):
    """Updates of a lean plan in a phase: those in backward, and those in the step."""
    active = [a for a in lean(made).applies if a.rule == "local" and phase in a.phases]
    early = [(a.at.bucket, a.buckets) for a in active if a.at.point == "grad"]
    return early, [a.buckets for a in active if a.at.point == "step"]


def test_only_what_leaves_is_updated_in_backward() -> None:
    made = plan(moved("param", range(1, 3), [0]), moved("param", range(4, 5), [0]))
    early, rest = leaner(made, 0)
    assert early == [(2, range(1, 3)), (4, range(4, 5))], "right before it leaves"
    assert rest == [range(1), range(3, 4)]
    assert leaner(made, 1) == ([], [range(SIZE)])


def test_a_bucket_that_leaves_twice_is_updated_once() -> None:
    made = plan(moved("param", range(2), [0]), moved("state", range(2), [0]))
    assert leaner(made, 0) == ([(1, range(2))], [range(2, 5)])


def test_other_rules_in_backward_leave_updates_as_they_are() -> None:
    made = plan(moved("param", range(1), [0]))
    more = Apply("reset", range(1), Moment("grad", 0), Phases([0]))
    made = replace(made, applies=(*made.applies, more))
    assert leaner(made, 0) == ([(None, range(SIZE))], [])
    assert leaner(made, 1) == ([], [range(SIZE)])


def test_an_update_at_the_step_comes_before_other_rules_of_the_step() -> None:
    made = plan(moved("param", range(SIZE), [0]), at="step")
    assert leaner(made, 0) == leaner(made, 1) == ([], [range(SIZE)])
    other = Apply("reset", range(2), Moment("step"), made.applies[0].phases)
    made = replace(made, applies=(*made.applies, other))
    assert [a.rule for a in lean(made).applies] == ["local", "reset"]


def test_an_update_after_another_rule_of_the_step_stays_there() -> None:
    made = plan(moved("param", range(SIZE), [0]), at="step")
    other = Apply("reset", range(2), Moment("step"), made.applies[0].phases)
    assert lean(replace(made, applies=(other, *made.applies))).applies == (other, *made.applies)


def test_parameters_that_leave_before_their_update_are_not_updated_before() -> None:
    made = plan(moved("param", range(2), [0]), at="step")
    assert leaner(made, 0) == ([], [range(SIZE)])


def test_a_plan_that_sends_gradients_stays_as_it_is() -> None:
    made = plan(moved("grad", range(SIZE), [0]))
    assert lean(made) is made


def with_applies(*applies: Apply) -> Plan:
    made = plan(moved("param", range(SIZE), [0]))
    return replace(made, applies=(*made.applies, *applies))


def rule(name: str, **args) -> Apply:
    return Apply(
        name, range(SIZE), Moment("end"), plan().applies[0].phases, args=tuple(args.items())
    )


@pytest.mark.parametrize(
    ("made", "keeps"),
    [
        (plan(), True),
        (plan(moved("param", range(SIZE), [0]), at="step"), True),
        (with_applies(rule("reset"), rule("copy", source="param", target="anchor")), True),
        (plan(moved("grad", range(SIZE), [0])), False),
        (with_applies(rule("clip", buffer="grad", norm=1.0)), False),
        (with_applies(rule("clear", buffer="grad")), False),
        (with_applies(rule("measure")), False),
        (with_applies(rule("of somebody else")), False),
        (replace(plan(), applies=(local(SIZE, Moment("step"), [0], age=1),)), False),
        (replace(plan(), source=0), False),
        (
            replace(plan(), votes=(Vote("v", "changed", Moment("step"), Moment("step"), (0,)),)),
            False,
        ),
        (replace(plan(), buffers=(Buffer("grad", "grad", copies=2),)), False),
    ],
)
def test_plans_that_leave_gradients_alone(made: Plan, keeps: bool) -> None:
    assert keeps_gradients(made) is keeps
