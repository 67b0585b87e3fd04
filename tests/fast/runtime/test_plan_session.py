"""Parts of sessions: counts of iterations, boundaries, positions, no_sync and bounded waits."""

from __future__ import annotations

import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from offbeat.core.derive.traits import PlanTraits
from offbeat.core.observers import Observer
from offbeat.core.rules import RULES
from offbeat.core.runtime import waiting
from offbeat.core.runtime.actions import TensorActions
from offbeat.core.runtime.flat_session import FlatSession
from offbeat.core.runtime.hooks import ALL
from offbeat.core.runtime.iteration import Iteration, Timestamps
from offbeat.core.runtime.planner import Planner
from offbeat.core.runtime.session import Position
from offbeat.core.runtime.session_guards import SessionGuards
from offbeat.core.runtime.waiting import Waiting
from offbeat.core.transport.device import CPU
from offbeat.elastic.profile import MEMBER_ITERATIONS
from offbeat.elastic.session import MemberSession
from offbeat.plan import Apply, Moment, Phases, Plan, transfer
from offbeat.sessions.loop_session import LoopSession


def test_iterations_continue_from_a_checkpoint_that_is_loaded_in_mid_run() -> None:
    session: Any = SimpleNamespace(
        _cluster=Mock(), _guards=Mock(), engine=Mock(iteration=5), _earlier_iterations=0
    )
    FlatSession.resume(session, 12, None)
    assert FlatSession.iteration.fget(session) == 12  # type: ignore[attr-defined]
    session.engine.iteration += 1
    assert FlatSession.iteration.fget(session) == 13  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("observes", "synchronous", "allowed"),
    [(False, False, True), (True, True, True), (True, False, False)],
)
def test_other_optimizers_wait_for_the_plan_of_a_strategy_that_averages_parameters(
    observes: bool, synchronous: bool, allowed: bool
) -> None:
    """The iterations that are measured average gradients, which the plan will not."""
    rule = transfer(
        "grad", range(1), after=Moment("grad", 0), before=Moment("step"), phases=[0], link="net"
    )
    guards: Any = SimpleNamespace(
        _engine=SimpleNamespace(traits=PlanTraits(Plan("bsp", 1, (rule,)))),
        _cluster=SimpleNamespace(links={}),
        _strategy=SimpleNamespace(synchronous=synchronous),
    )
    SessionGuards.note_plan(guards, observes=observes)
    assert guards.shares_optimizer is allowed


def test_all_ranks_expect_the_backward_passes_of_the_rank_with_the_most() -> None:
    hooks = SimpleNamespace(added_passes=2, held=ALL)
    control = SimpleNamespace(gather=lambda own: [own, 3, 0])
    planner: Any = SimpleNamespace(
        _engine=SimpleNamespace(hooks=hooks, control=control), is_trial=False, convergence=None
    )
    planner._expect_passes = lambda: Planner._expect_passes(planner)
    change = Planner.on_step_end(planner)
    assert hooks.held == 1  # of this rank, until all have told theirs
    assert change is not None
    change()
    assert hooks.held == 3


CLOSE = Apply("close", range(1), Moment("end"), Phases([0]))


@pytest.mark.parametrize(
    ("buffer", "late", "united", "alike"),
    [
        ("grad", (), False, True),
        ("grad", (CLOSE,), False, False),  # gradients that are not applied are state of their own
        ("param", (), False, False),
        ("param", (), True, True),
    ],
)
def test_positions_that_a_job_of_any_size_can_continue_from(
    buffer: str, late: tuple[Apply, ...], united: bool, alike: bool
) -> None:
    rule = transfer(
        buffer, range(1), after=Moment("grad", 0), before=Moment("step"), phases=[0], link="net"
    )
    session: Any = SimpleNamespace(
        _cluster=Mock(),
        observing=False,
        iteration=9,
        engine=SimpleNamespace(iteration=4, traits=PlanTraits(Plan("some", 1, (rule,), late))),
        planner=SimpleNamespace(capture=lambda: {"plan": "x"}),
        _united=4 if united else 3,
    )
    assert FlatSession.capture_position(session) == Position(9, alike, {"plan": "x"})


@pytest.mark.parametrize(("period", "step"), [(3, 3), (1, MEMBER_ITERATIONS)])
def test_boundaries_are_the_ends_of_periods_after_the_prologue(period: int, step: int) -> None:
    def is_at_boundary(planned: int) -> bool:
        session: Any = SimpleNamespace(
            observing=False,
            planner=SimpleNamespace(is_trial=False),
            is_in_iteration=False,
            engine=SimpleNamespace(cursor=SimpleNamespace(planned=planned)),
            plan=SimpleNamespace(prologue=2, period=period),
        )
        return MemberSession.is_at_boundary.fget(session)  # type: ignore[attr-defined]

    boundaries = [planned for planned in range(2 + 3 * step) if is_at_boundary(planned)]
    assert boundaries == [2, 2 + step, 2 + 2 * step]


def test_the_end_of_an_inner_no_sync_does_not_end_the_outer_one() -> None:
    hooks = SimpleNamespace(accumulating=False)
    session: Any = SimpleNamespace(engine=SimpleNamespace(hooks=hooks))
    with FlatSession.no_sync(session):
        with FlatSession.no_sync(session):
            assert hooks.accumulating
        assert hooks.accumulating
    assert not hooks.accumulating


def test_written_buffers_are_compared_in_the_first_iteration_and_then_periodically() -> None:
    """Forward may begin to write a buffer later."""
    compared: list[int] = []

    def gather(names: list[str]) -> list[list[str]]:
        compared.append(guards._agreed_on_buffers)
        return [names]

    buffers = SimpleNamespace(changed_names=lambda: ["mean"], share=lambda _: [])
    guards: Any = SimpleNamespace(
        _watch=SimpleNamespace(compare_every=3),
        _agreed_on_buffers=0,
        _cluster=SimpleNamespace(control=SimpleNamespace(gather=gather)),
        _engine=SimpleNamespace(module_buffers=buffers),
    )
    for _ in range(8):
        SessionGuards.agree_on_buffers(guards)
    assert compared == [0, 3, 6]


def test_rules_that_use_a_message_that_the_members_have_skipped_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    applied: list[tuple[str, int]] = []
    monkeypatch.setitem(
        RULES, "copy", lambda _, rule: applied.append((rule.arg("source"), rule.buckets.start))
    )
    sent = transfer(
        "param", range(1), after=Moment("step"), before=Moment("end"), phases=[0], link="net"
    )
    link = Mock()
    actions: Any = TensorActions.__new__(TensorActions)
    actions.lost, actions.repeats = [], lambda _: False
    actions.votes, actions.context = Mock(), Mock()
    actions._links = {"net": link}
    actions._flat = Mock()
    message = SimpleNamespace(transfer=sent, contents=Mock())
    iteration: Any = SimpleNamespace(messages=[message], planned=4)
    assert not actions.release(iteration, 0)
    link.skip.assert_called_once_with(message)
    for source, bucket in (("param", 0), ("param", 1), ("anchor", 0)):
        args = (("source", source), ("target", "other"))
        run = range(bucket, bucket + 1)
        actions.apply(iteration, Apply("copy", run, Moment("end"), Phases([0]), args=args))
    assert applied == [("param", 1), ("anchor", 0)]


def test_a_session_without_a_plan_publishes_the_iteration_that_follows_a_step() -> None:
    """Failure reports name it."""
    published: list[int] = []
    control = SimpleNamespace(set_iteration=published.append)
    session: Any = SimpleNamespace(
        _cluster=SimpleNamespace(require_open=lambda: None, device=CPU(), control=control),
        _done=Iteration(4, Timestamps(), []),
        _update=lambda _: None,
        _new_iteration=lambda number: Iteration(number, Timestamps(), []),
        _recorder=None,
        _report=lambda _: None,
    )
    LoopSession.step(session, False)
    assert published == [session._done.number] == [5]


@pytest.mark.parametrize(
    ("needs_abort", "timeout_s", "words"),
    [
        (True, 60.0, "will not arrive: another rank has failed or given up"),
        (False, 0.0, "has not arrived in 0 s"),
    ],
)
def test_a_wait_ends_after_its_timeout_or_the_failure_of_another_rank(
    monkeypatch: pytest.MonkeyPatch, needs_abort: bool, timeout_s: float, words: str
) -> None:
    """Such a wait looks for failures a few times, and this rank has failed afterwards."""
    monkeypatch.setattr(waiting, "LOOK_EVERY_S", 0.0)
    looks = iter(range(3))
    rule = transfer(
        "grad", range(1), after=Moment("grad", 0), before=Moment("step"), phases=[0], link="net"
    )
    message: Any = SimpleNamespace(
        transfer=rule,
        iteration=7,
        done=False,
        settled=False,
        error=None,
        released=None,
    )
    message.wait = lambda _: next(looks) is None
    control: Any = SimpleNamespace(
        rank=1,
        needs_abort=needs_abort,
        waiting=lambda _: nullcontext(),
        report_failure=lambda **_: "Rank 0 has died.",
    )
    flat: Any = SimpleNamespace(buckets=[SimpleNamespace(name="w")])
    failures: list[BaseException] = []
    waits = Waiting(CPU(), control, timeout_s, Observer(), failures.append)
    with pytest.raises(RuntimeError, match=rf"^rank 1: grad of bucket w .*{words}\. Rank 0 has"):
        waits.wait(message, flat)
    assert len(failures) == 1


@pytest.mark.parametrize(
    ("needs_abort", "words"),
    [
        (True, "rank 1: grad of bucket w .* will not arrive: another rank has failed or given up"),
        (False, "rank 1: grad of bucket w .* may not arrive: the store of the ranks is lost"),
    ],
)
def test_a_rank_that_cannot_recover_with_the_other_members_has_failed(
    monkeypatch: pytest.MonkeyPatch, needs_abort: bool, words: str
) -> None:
    """After another rank has reported a failure, and after the loss of the store."""
    monkeypatch.setattr(waiting, "LOOK_EVERY_S", 0.0)
    rule = transfer(
        "grad", range(1), after=Moment("grad", 0), before=Moment("step"), phases=[0], link="net"
    )
    message: Any = SimpleNamespace(transfer=rule, iteration=7, done=False, settled=False)
    looks = iter(range(3))
    message.wait = lambda _: next(looks) is None
    control: Any = SimpleNamespace(
        rank=1, needs_abort=needs_abort, has_lost_store=True, waiting=lambda _: nullcontext()
    )
    failures: list[BaseException] = []
    waits = Waiting(CPU(), control, 60.0, Observer(), failures.append)
    waits.recover = Mock(side_effect=ConnectionError("no member responds"))
    flat: Any = SimpleNamespace(buckets=[SimpleNamespace(name="w")])
    with pytest.raises(ConnectionError, match="no member responds"):
        waits.wait(message, flat)
    [failure] = waits.recover.call_args.args
    assert re.match(words, str(failure))
    assert len(failures) == 1
