"""Failures of members while an earlier failure, a change or an average is handled."""

from __future__ import annotations

import pytest
from cases.member_checks import check, compare, run
from cases.member_jobs import Scenario, after_votes, every
from harness.ranks import free_port

from offbeat import BSP, P3, DiLoCo, LocalSGD, SelSync


def test_a_vote_in_which_a_member_dies_is_settled_at_once() -> None:
    """Process 1 waits for the vote when it notices that the store of process 0 is lost."""
    scenario = Scenario(
        SelSync(delta=1e9, max_period=4), 12, kills={0: 5}, kill_in_message=True, kill_in_vote=True,
        inject={1: "hold a vote"},
    )  # fmt: skip
    epochs = check(scenario, after_votes(4))
    assert [(len(e.members), e.first_iteration) for e in epochs] == [(3, 0), (2, 6)]


def test_a_member_dies_in_an_average_that_is_repeated() -> None:
    """Process 1 dies in the average of iteration 5. Then process 2 dies after its repetition, while
    process 3 does not receive the result, and gets it from process 0."""
    scenario = Scenario(
        BSP(), 12, first=4, kills={1: 5}, kill_in_message=True, survivors_later=1,
        inject={2: "end after repeat", 3: "lose repeat"},
    )  # fmt: skip
    epochs = check(scenario, every(1))
    assert [(len(e.members), e.first_iteration) for e in epochs] == [(4, 0), (3, 6), (2, 6)]


def test_a_member_dies_while_another_one_leaves_with_averages_that_are_due_later() -> None:
    """Process 1 leaves at the boundary in which process 2 dies, and the averages of iteration 7,
    which the next forward would await, have arrived on no rank. The boundary of a plan with a
    prologue of one iteration is one iteration later."""
    strategy = DiLoCo(period=8, delay=1)
    inject = {1: "send in union", 2: "end before union"}
    outcomes, epochs = run(Scenario(strategy, 12, leaves={1: 4}, inject=inject))
    found = [(len(e.members), e.first_iteration) for e in epochs]
    assert found == [(3, 0), (2, 9), (1, 9)]
    assert [o and o.has_left for o in outcomes] == [False, True, None]


def test_a_member_dies_while_a_process_joins() -> None:
    """The survivors leave it out, and the process joins again."""
    scenario = Scenario(
        LocalSGD(period=3), 15, joins={3: 4}, inject={1: "end in begin"}, samples=301
    )
    outcomes, epochs = run(scenario)
    compare(scenario, every(3), outcomes, epochs)
    assert [len(e.members) for e in epochs] == [3, 4, 2, 3]
    assert epochs[1].first_iteration == epochs[2].first_iteration
    read = [i for o in outcomes if o for batch in o.samples.values() for i in batch]
    assert len(read) == len(set(read))


@pytest.mark.parametrize("inject", [{0: "end after store"}, {2: "end in fourth group"}], ids=str)
def test_a_member_dies_while_the_others_connect(inject: dict[int, str]) -> None:
    """The others do not wait for it until the timeout, which is longer than this test may last."""
    scenario = Scenario(
        LocalSGD(period=3), 15, joins={3: 0}, joins_again=4,
        inject=inject, samples=301, timeout_s=900.0,
    )  # fmt: skip
    outcomes, epochs = run(scenario)
    compare(scenario, every(3), outcomes, epochs)
    assert [len(e.members) for e in epochs] == [3, 4, 2, 3]
    read = [i for o in outcomes if o for batch in o.samples.values() for i in batch]
    assert len(read) == len(set(read))


def test_a_member_dies_in_the_change_to_a_plan_that_the_script_needs() -> None:
    """The script writes gradients before the first step, so that updates of buckets must wait for
    the step. Process 1 ends when the ranks agree on that plan."""
    scenario = Scenario(
        P3(slice_elements=8), 6, scales_gradients=True, inject={1: "end in plan change"}
    )
    epochs = check(scenario, lambda *_: None)
    assert [(len(e.members), e.first_iteration) for e in epochs] == [(3, 0), (2, 1)]


def test_an_epoch_that_has_begun_on_some_ranks_begins_on_all() -> None:
    """Process 2 loses its connection when all ranks have planned for the joined process, and the
    others have begun."""
    scenario = Scenario(LocalSGD(period=3), 15, joins={3: 4}, inject={2: "lose begin"}, samples=301)
    outcomes, epochs = run(scenario)
    compare(scenario, every(3), outcomes, epochs)
    assert [len(e.members) for e in epochs] == [3, 4, 4]
    assert epochs[2].details["begun"] == 1
    read = [i for o in outcomes if o for batch in o.samples.values() for i in batch]
    assert len(read) == len(set(read))


def test_consolidate_survives_a_failure() -> None:
    """A rank without the result of the average gets it from another one."""
    scenario = Scenario(LocalSGD(period=4), 8, unions=(1,), inject={2: "lose union"})
    epochs = check(scenario, every(4))
    assert [len(e.members) for e in epochs] == [3, 3]
    assert epochs[1].details["united"]
    assert epochs[1].first_iteration == 2


def test_both_ranks_of_a_node_that_joins_notice_that_a_member_has_died() -> None:
    """Rank 5 waits for a message that rank 4 would pass on. The timeout is longer than this test
    may last, so rank 4 must close its connections before it joins again."""
    ports = tuple(free_port() for _ in range(3))
    scenario = Scenario(
        LocalSGD(period=3), 15, first=2, ranks=2, ports=ports, joins={4: 4, 5: 4}, joins_again=7,
        inject={0: "end in joining"}, orphans=(1,), timeout_s=900.0,
    )  # fmt: skip
    epochs = check(scenario, every(3))
    assert [len(e.members) for e in epochs] == [2, 3, 1, 2]
