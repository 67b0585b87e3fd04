"""Jobs whose members leave, fail and join while they train, against equations in float64."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from support.late_averages import weights_at_forward
from support.member_jobs import (
    BATCH_SIZE,
    Average,
    Outcome,
    Scenario,
    after_votes,
    by_plan,
    epochs_of,
    every,
    expected,
    largest_difference,
    membership_service,
    train_member,
    train_twice,
    with_moments,
    with_states,
)
from support.member_stopping import STOPPED, STOPS_AT
from support.member_stopping import train as train_stopping
from support.worlds import free_port, run_world, watch_world

from offbeat import (
    BSP,
    P3,
    WFBP,
    DiLoCo,
    DreamDDP,
    FedAvg,
    LocalSGD,
    SelSync,
    Strategy,
)
from offbeat.membership import Epoch
from offbeat.strategies import create

NEAR = 1e-12


def run(scenario: Scenario) -> tuple[list[Outcome | None], list[Epoch]]:
    """Run a scenario. Return the outcomes by process, None for killed ones, and the epochs."""
    ends = [who for who, name in scenario.inject.items() if name.startswith("end")]
    killed = [*scenario.kills, *scenario.signals, *ends]
    with membership_service() as address:
        ended = watch_world(
            train_member, scenario.processes, address, scenario, timeout_s=110, doomed=killed
        )
        epochs = epochs_of(address)
    for one in ended:
        if one.rank in scenario.orphans:
            assert one.kind == "RuntimeError", one
            assert re.search(r"rank \d+ \((rank \d of )?member \S+\) has failed", one.error), one
        else:
            assert one.rank in killed or not one.kind, one.error + one.traceback
    return [one.result for one in ended], epochs


def check(scenario: Scenario, average_at: Average) -> list[Epoch]:
    """Run a scenario and compare its weights with the equations. Return the epochs."""
    return compare(scenario, average_at, *run(scenario))


def compare(
    scenario: Scenario, average_at: Average, outcomes: list[Outcome | None], epochs: list[Epoch]
) -> list[Epoch]:
    """Compare the weights of a scenario with the equations. Return the epochs."""
    right = expected(scenario, epochs, numbers_of(scenario, outcomes, epochs), average_at)
    assert largest_difference(outcomes, right) < NEAR
    return epochs


def numbers_of(
    scenario: Scenario, outcomes: list[Outcome | None], epochs: list[Epoch]
) -> dict[str, int]:
    """Return the numbers of the members by their names in the job."""
    ranks = scenario.ranks
    names = {one.name: who // ranks for who, one in enumerate(outcomes) if one is not None}
    names |= {name: who for who, name in enumerate(epochs[0].members)}  # also of killed ones
    for name in (name for epoch in epochs for name in epoch.members):
        names.setdefault(name, max(scenario.joins, default=0) // ranks)  # requested to join twice
    return names


def test_a_member_leaves_at_a_boundary() -> None:
    scenario = Scenario(LocalSGD(period=3), 12, leaves={1: 4})
    epochs = check(scenario, every(3))
    assert [(len(e.members), e.first_iteration) for e in epochs] == [(3, 0), (2, 6)]


def test_the_first_member_leaves_on_sigterm() -> None:
    """Its process has opened the store of the epoch, and ends by the signal."""
    scenario = Scenario(LocalSGD(period=2), 8, signals={0: 3})
    epochs = check(scenario, every(2))
    assert [(len(e.members), e.first_iteration) for e in epochs] == [(3, 0), (2, 4)]


def test_a_message_in_which_a_member_dies_is_skipped() -> None:
    scenario = Scenario(LocalSGD(period=3), 12, kills={1: 5}, kill_in_message=True)
    epochs = check(scenario, every(3))
    assert [(len(e.members), e.first_iteration) for e in epochs] == [(3, 0), (2, 6)]
    assert epochs[1].details["lost_from"] == 3


def test_the_death_of_the_first_member_spoils_no_average() -> None:
    """Its message before has landed; the next average is left out."""
    scenario = Scenario(LocalSGD(period=3), 12, kills={0: 2})
    epochs = check(scenario, every(3))
    assert [len(e.members) for e in epochs] == [3, 2]
    assert epochs[1].details["lost_from"] == 3


def test_a_vote_in_which_a_member_dies_is_settled_at_once() -> None:
    """Process 1 waits for the vote when it notices that the store of process 0 is lost."""
    scenario = Scenario(
        SelSync(delta=1e9, max_period=4), 12, kills={0: 5}, kill_in_message=True,
        inject={1: "hold a vote"},
    )  # fmt: skip
    epochs = check(scenario, after_votes(4))
    assert [(len(e.members), e.first_iteration) for e in epochs] == [(3, 0), (2, 6)]


def test_a_message_that_one_member_has_received_lands_on_all() -> None:
    """Process 2 does not receive the average of iteration 2, and gets it from another one."""
    scenario = Scenario(LocalSGD(period=3), 12, deaf={2: 2})
    epochs = check(scenario, every(3))
    assert [len(e.members) for e in epochs] == [3, 3]
    assert epochs[1].details["lost_from"] == 3
    assert epochs[1].details["landed"]["net"]["missing"]


@pytest.mark.parametrize("state", ["copy", "fresh"])
def test_a_process_joins_with_the_state_of_a_member(state: str) -> None:
    """Its momentum is that of a member, or empty."""
    scenario = Scenario(LocalSGD(period=3), 12, first=2, joins={2: 4}, state=state)
    epochs = check(scenario, every(3))
    assert [len(e.members) for e in epochs] == [2, 3]


@pytest.mark.parametrize(
    "strategy",
    [
        DreamDDP(period=3, fill=False, split=False),
        DiLoCo(period=3),
        SelSync(delta=1e9, max_period=4),
        FedAvg(local_steps=3),
        create("des-loc", {"period": 3, "first": 2}),
    ],
    ids=["dreamddp", "diloco", "selsync", "fedavg", "des-loc"],
)
def test_members_fail_join_and_leave_under_other_strategies(strategy: Strategy) -> None:
    scenario = Scenario(strategy, 21, kills={1: 5}, joins={3: 11}, join_after=1, leaves={0: 16})
    averages = {
        "selsync": after_votes(4),
        "fedavg": every(3),
        "des-loc": with_moments(period=3, first=2),
    }
    epochs = check(scenario, averages.get(strategy.name) or by_plan(scenario))
    assert [len(e.members) for e in epochs] == [3, 2, 3, 2]


@pytest.mark.filterwarnings("ignore:rank 1 left out")
def test_the_average_before_a_change_leaves_out_values_that_are_not_finite() -> None:
    """The gradients of process 1 are NaN in the last iteration of the period, in which only some
    buckets are averaged. Its momentum remains NaN."""
    strategy = DreamDDP(period=3, fill=False, split=False)
    outcomes, epochs = run(Scenario(strategy, 9, leaves={2: 4}, spoils={1: 5}))
    assert [(len(e.members), e.first_iteration) for e in epochs] == [(3, 0), (2, 6)]
    states = [(o, t) for o in outcomes if o for t in (range(9) if o is outcomes[0] else [5])]
    for outcome, t in states:
        assert all(weight.isfinite().all() for weight in outcome.weights[t].values()), t


def test_each_sample_is_read_once_while_members_change() -> None:
    """The samples that the failed process has read in vain are read by others."""
    strategy = LocalSGD(period=3)
    changes = {"kills": {1: 7}, "joins": {3: 11}, "join_after": 1, "leaves": {0: 15}}
    outcomes, epochs = run(Scenario(strategy, 100, samples=301, **changes))
    assert [len(e.members) for e in epochs] == [3, 2, 3, 2]
    kept = epochs[1].details["lost_from"]
    assert kept == 6
    read = [i for o in outcomes if o for batch in o.samples.values() for i in batch]
    assert len(read) == len(set(read))
    unread = 301 - len(read) - BATCH_SIZE * kept  # of all processes that have not failed
    assert 0 <= unread < 2
    assert epochs[3].samples > epochs[2].samples > epochs[1].samples > 0


@pytest.mark.parametrize("strategy", [LocalSGD(period=6), WFBP()], ids=["local-sgd", "wfbp"])
def test_a_failure_that_is_noticed_between_iterations_loses_no_samples(strategy: Strategy) -> None:
    """The members have read the samples of the next iteration, which is still of the old epoch."""
    changes = {"kills": {0: 7}, "lost_at": 8}
    outcomes, epochs = run(Scenario(strategy, 100, samples=161, **changes))
    assert [len(e.members) for e in epochs] == [3, 2]
    kept = epochs[1].details["lost_from"]
    read = [i for o in outcomes if o for batch in o.samples.values() for i in batch]
    assert len(read) == len(set(read))
    assert 161 - len(read) - BATCH_SIZE * kept < 2


@pytest.mark.parametrize(
    "strategy",
    [
        DreamDDP(period=3, due="forward", fill=False, split=False),
        DreamDDP(period=2, average="before_update", due="forward", fill=False, split=False),
        DreamDDP(period=3, due="delayed", delay=2),
        DiLoCo(period=4, delay=1),
    ],
    ids=["forward", "before the update", "delayed", "delayed with an outer step"],
)
def test_averages_that_are_due_later_land_or_are_skipped(strategy: Strategy) -> None:
    """Process 1 dies in a message that the survivors await in a later forward. All replicas have
    the same bits after the average before a requested change."""
    scenario = Scenario(
        strategy, 24, kills={1: 5}, kill_in_message=True, joins={3: 9}, join_after=1,
        leaves={0: 16}, at_forward=True,
    )  # fmt: skip
    outcomes, epochs = run(scenario)
    assert [len(e.members) for e in epochs] == [3, 2, 3, 2]
    right = weights_at_forward(scenario, epochs, numbers_of(scenario, outcomes, epochs))
    assert largest_difference(outcomes, right) < NEAR
    for epoch, after in pairwise(epochs):
        if "landed" in after.details:
            continue
        members = [o for o in outcomes if o is not None and o.name in epoch.members]
        first, *others = (o.weights[after.first_iteration] for o in members)
        for weights in others:
            assert all(first[name].equal(weights[name]) for name in first)


def test_averaged_optimizer_states_continue() -> None:
    scenario = Scenario(
        LocalSGD(period=2, state="averaged"), 12, kills={1: 4}, joins={3: 7}, join_after=1
    )
    check(scenario, with_states(every(2)))


# Averages that are due in the step, and slices that are due in the next forward. Other strategies
# that average gradients send the same messages in other orders.
@pytest.mark.parametrize("strategy", [WFBP(), P3()], ids=lambda s: s.name)
def test_gradients_are_averaged_over_the_members_of_each_iteration(strategy: Strategy) -> None:
    """After a failure the survivors average the gradients of that iteration among themselves."""
    scenario = Scenario(strategy, 40, kills={1: 5}, joins={3: 17}, join_after=1, leaves={0: 25})
    epochs = check(scenario, every(1))
    assert [len(e.members) for e in epochs] == [3, 2, 3, 2]


def test_local_steps_of_a_joined_member_survive_a_failure() -> None:
    scenario = Scenario(LocalSGD(period=3), 16, first=2, joins={2: 4}, kills={1: 10})
    epochs = check(scenario, every(3))
    assert [len(e.members) for e in epochs] == [2, 3, 2]
    assert not epochs[2].details["united"]


def test_a_stopped_member_joins_again(tmp_path: Path) -> None:
    """It is stopped in the message of iteration 5, and continues when the others have left it out
    after the timeout. Its error states what to do, and its process is started again."""
    scenario = Scenario(LocalSGD(period=3), 15, joins={3: 10}, join_after=1, folder=str(tmp_path))
    with membership_service() as address:
        ended = watch_world(train_stopping, scenario.processes, address, scenario, timeout_s=110)
        epochs = epochs_of(address)
    stopped = ended[STOPPED]
    assert stopped.kind == "RuntimeError", stopped
    words = (
        f"The other members continue without rank {STOPPED} (member {epochs[0].members[STOPPED]})"
    )
    assert f"{words}, whose report came too late; start it again" in stopped.error
    assert not any(one.kind for one in ended if one is not stopped), ended
    assert [len(epoch.members) for epoch in epochs] == [3, 2, 3]
    assert epochs[1].first_iteration == STOPS_AT + 1
    compare(scenario, every(3), [one.result for one in ended], epochs)


def test_a_job_with_fewer_members_than_least_ends_with_their_names() -> None:
    scenario = Scenario(LocalSGD(period=2), 8, first=2, kills={1: 3}, least=2)
    with membership_service() as address:
        survivor, _ = watch_world(
            train_member, 2, address, scenario, timeout_s=110, doomed=[*scenario.kills]
        )
        [epoch] = epochs_of(address)
    assert survivor.kind == "RuntimeError", survivor
    words = " ".join(survivor.error.split())
    assert "least (2) in Members must be at most the number of members that are left (1)" in words
    assert f"after the failure of member {epoch.members[1]}; start the job again from" in words


# ---- a second failure while the first one is handled ----------------------------------------


@pytest.mark.parametrize(
    ("inject", "later"),
    [
        ({2: "end in repeat"}, 2),
        ({2: "end after repeat", 3: "lose repeat"}, 1),
    ],
    ids=["before", "received by one"],
)
def test_a_member_dies_in_an_average_that_is_repeated(inject: dict[int, str], later: int) -> None:
    """Process 1 dies in the average of iteration 5. Then process 2 dies in its repetition: before
    it, or after it while process 3 does not receive the result, and gets it from process 0."""
    scenario = Scenario(
        BSP(), 12, first=4, kills={1: 5}, kill_in_message=True, inject=inject, survivors_later=later
    )
    epochs = check(scenario, every(1))
    assert [(len(e.members), e.first_iteration) for e in epochs] == [(4, 0), (3, 6), (2, 6)]


# The boundary of a plan with a prologue of one iteration is one iteration later. Then the average
# of the last but one iteration has not arrived.
@pytest.mark.parametrize(
    ("strategy", "boundary"),
    [(P3(), 8), (DiLoCo(period=8, delay=1), 9)],
    ids=["gradients", "delayed with an outer step"],
)
def test_a_member_dies_while_another_one_leaves_with_averages_that_are_due_later(
    strategy: Strategy, boundary: int
) -> None:
    """Process 1 leaves at the boundary in which process 2 dies, and the averages of iteration 7,
    which the next forward would await, have arrived on no rank."""
    inject = {1: "send in union", 2: "end before union"}
    outcomes, epochs = run(Scenario(strategy, 12, leaves={1: 4}, inject=inject))
    found = [(len(e.members), e.first_iteration) for e in epochs]
    assert found == [(3, 0), (2, boundary), (1, boundary)]
    assert [o and o.has_left for o in outcomes] == [False, True, None]


@pytest.mark.parametrize("place", ["end in begin", "end in joining"])
def test_a_member_dies_while_a_process_joins(place: str) -> None:
    """The survivors leave it out, and the process joins again."""
    scenario = Scenario(LocalSGD(period=3), 15, joins={3: 4}, inject={1: place}, samples=301)
    outcomes, epochs = run(scenario)
    compare(scenario, every(3), outcomes, epochs)
    assert [len(e.members) for e in epochs] == [3, 4, 2, 3]
    assert epochs[1].first_iteration == epochs[2].first_iteration
    read = [i for o in outcomes if o for batch in o.samples.values() for i in batch]
    assert len(read) == len(set(read))


@pytest.mark.parametrize(
    ("inject", "members"),
    [
        ({3: "end in first group"}, [3, 4, 3]),
        ({0: "end after store"}, [3, 4, 2, 3]),
        ({0: "end in third group"}, [3, 4, 2, 3]),
        ({2: "end in fourth group"}, [3, 4, 2, 3]),
    ],
    ids=["the joining process", "the host of the store", "the first member", "in a link"],
)
def test_a_member_dies_while_the_others_connect(inject: dict[int, str], members: list[int]) -> None:
    """The others do not wait for it until the timeout, which is longer than this test may last."""
    scenario = Scenario(
        LocalSGD(period=3), 15, joins={3: 0}, joins_again=4 if 3 not in inject else -1,
        inject=inject, samples=301, timeout_s=900.0,
    )  # fmt: skip
    outcomes, epochs = run(scenario)
    compare(scenario, every(3), outcomes, epochs)
    assert [len(e.members) for e in epochs] == members
    read = [i for o in outcomes if o for batch in o.samples.values() for i in batch]
    assert len(read) == len(set(read))


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


@pytest.mark.parametrize(
    ("inject", "members"),
    [({1: "end in union"}, [3, 2]), ({2: "lose union"}, [3, 3])],
    ids=["before", "received by two"],
)
def test_consolidate_survives_a_failure(inject: dict[int, str], members: list[int]) -> None:
    """The survivors repeat the average, or a rank without its result gets it from another one."""
    scenario = Scenario(LocalSGD(period=4), 8, unions=(1,), inject=inject)
    epochs = check(scenario, every(4))
    assert [len(e.members) for e in epochs] == members
    assert bool(epochs[1].details["united"]) == (members == [3, 3])
    assert epochs[1].first_iteration == 2


def test_a_process_trains_again_after_it_has_closed_its_model() -> None:
    scenario = Scenario(LocalSGD(period=2), 4, first=2)
    with membership_service() as address:
        (first, again), *others = run_world(train_twice, 2, address, scenario)
        assert [len(e.members) for e in epochs_of(address)] == [2, 2]
    for weights in (again, *(weights for other in others for weights in other)):
        assert all(weights[name].equal(value) for name, value in first.items())


# ---- members of several ranks ---------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy", [LocalSGD(period=3), WFBP()], ids=["averages of parameters", "of gradients"]
)
def test_nodes_of_two_ranks_join_fail_and_leave(strategy: Strategy) -> None:
    """A rank of the second node is killed, so the other one ends with an error."""
    ports = tuple(free_port() for _ in range(3))
    scenario = Scenario(
        strategy, 24, first=2, ranks=2, ports=ports, joins={4: 4, 5: 4}, kills={3: 11},
        orphans=(2,), leaves={0: 17}, samples=1000,
    )  # fmt: skip
    outcomes, epochs = run(scenario)
    compare(scenario, every(3), outcomes, epochs)
    assert [len(e.members) for e in epochs] == [2, 3, 2, 1]
    for a, b in ((0, 1), (4, 5)):
        left, right = outcomes[a], outcomes[b]
        assert left is not None
        assert right is not None
        for t, weights in left.weights.items():
            assert all(weights[n].equal(right.weights[t][n]) for n in weights), t
    read = [i for o in outcomes if o for batch in o.samples.values() for i in batch]
    assert len(read) == len(set(read))


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


def test_a_failure_before_the_plan_ends_the_job_with_its_name() -> None:
    scenario = Scenario(LocalSGD(period=3), 12, kills={1: 1}, orphans=(0, 2), measures=True)
    run(scenario)


def test_a_process_that_has_failed_to_create_a_group_meets_the_others() -> None:
    scenario = Scenario(LocalSGD(period=2), 4, first=2, inject={1: "fail to create a group"})
    assert [len(e.members) for e in check(scenario, every(2))] == [2]
