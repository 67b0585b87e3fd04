"""The table of states: every pair of state and event, in sequences, and in docs/design.md."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from offbeat.core.runtime.machine import (
    AGAIN,
    TABLE,
    Event,
    Machine,
    OutOfOrderError,
    State,
)

DESIGN = Path(__file__).parents[3] / "docs" / "design.md"


class Log:
    """Actions that record their names; one of them fails, if it is named."""

    is_broken = False

    def __init__(self, failing: str = "") -> None:
        self.done, self.failing = list[str](), failing

    def __getattr__(self, name: str):
        def act() -> None:
            if name == self.failing:
                raise BlockingIOError
            self.done.append(name)

        return act


def at(state: State, actions: object) -> Machine:
    machine = Machine(actions)
    machine.state = state
    return machine


PAIRS = [(state, event) for state in State for event in Event]


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_an_event_acts_or_is_refused_and_changes_nothing(state: State, event: Event) -> None:
    log = Log()
    machine, row = at(state, log), TABLE[state].get(event)
    if row is None:
        with pytest.raises(RuntimeError):
            machine.fire(event)
        assert (machine.state, log.done) == (state, [])
        return
    expected = [*row] + ([*TABLE[row[-1][1]][event]] if row[-1][0] == AGAIN else [])
    machine.fire(event)
    assert log.done == [name for name, _ in expected if name not in ("", AGAIN)]
    assert machine.state is expected[-1][1]


@pytest.mark.parametrize(("state", "event"), [(s, e) for s, e in PAIRS if e in TABLE[s]])
def test_an_action_that_raises_leaves_the_state_of_the_last_completed_one(
    state: State, event: Event
) -> None:
    row = TABLE[state][event]
    for place, (name, _) in enumerate(row):
        if name in ("", AGAIN):
            continue
        machine = at(state, Log(name))
        with pytest.raises(BlockingIOError):
            machine.fire(event)
        assert machine.state is ([state] + [then for _, then in row])[place]


def test_random_scripts_update_once_per_backward_and_end_between_iterations() -> None:
    updates = refused = 0
    for seed in range(3000):
        rng, log = Random(seed), Log()
        machine = Machine(log)
        for _ in range(30):
            event = rng.choice(list(Event))
            if event not in TABLE[machine.state]:
                refused += 1
                with pytest.raises(OutOfOrderError):
                    machine.fire(event)
                continue
            machine.fire(event)
        # Every iteration that has begun has ended once, or is in progress.
        begun = log.done.count("begin_iteration")
        ended = sum(log.done.count(name) for name in ("update", "drop", "forget"))
        assert begun - ended == (machine.state is not State.IDLE), (seed, log.done)
        # Nothing is updated before backward has completed.
        last = None
        for name in log.done:
            if name in ("complete_backward", "conclude"):
                last = name
            if name == "update":
                assert last is not None, (seed, log.done)
                last, updates = None, updates + 1
            if name in ("begin_iteration", "reopen"):
                last = None
    assert min(updates, refused) > 1000


def test_within_an_action_only_reads_mean_nothing_new() -> None:
    class Nested(Log):
        def update(self) -> None:
            machine.fire(Event.READ)
            with pytest.raises(OutOfOrderError):
                machine.fire(Event.ZERO)

    machine = at(State.READY, Nested())
    machine.fire(Event.STEP)
    assert machine.state is State.IDLE


def test_a_backward_that_has_ended_with_an_exception_is_one() -> None:
    machine = at(State.HELD, log := Log())
    log.is_broken = True
    with pytest.raises(OutOfOrderError, match="ended with an exception"):
        machine.fire(Event.STEP)
    assert machine.state is State.BACKWARD


def test_a_failure_within_an_action_is_final() -> None:
    class Failing(Log):
        def conclude(self) -> None:
            machine.fail(ConnectionError("gone"))
            raise BlockingIOError

    machine = at(State.FORWARD, Failing())
    with pytest.raises(BlockingIOError):
        machine.fire(Event.STEP)
    for event in (Event.FORWARD, Event.STEP, Event.PAUSE, Event.ZERO):
        with pytest.raises(RuntimeError, match="this worker has failed") as raised:
            machine.fire(event)
        assert isinstance(raised.value.__cause__, ConnectionError)
    machine.close()
    assert machine.state is State.FAILED


def test_the_design_page_has_the_table() -> None:
    assert table_text() in DESIGN.read_text()


def table_text() -> str:
    """Return the table in Markdown: a row for each event, a column for each state."""
    states = [s for s in State if s not in (State.FAILED, State.CLOSED)]
    lines = ["| event | " + " | ".join(f"`{s.name}`" for s in states) + " |"]
    lines.append("|---" * (len(states) + 1) + "|")
    for event in Event:
        cells = [_cell(state, TABLE[state].get(event)) for state in states]
        lines.append(f"| `{event.name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(state: State, row: object) -> str:
    if row is None:
        return ""
    names = ", ".join(name for name, _ in row if name) or "nothing"  # type: ignore[attr-defined]
    then = row[-1][1]  # type: ignore[index]
    return names if then is state else f"{names} → {then.name}"
