"""Jobs whose members leave, fail and join while they train, against equations in float64."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from cases.member_checks import NEAR, check, compare, numbers_of, run
from cases.member_jobs import (
    BATCH_SIZE,
    Scenario,
    after_votes,
    by_plan,
    epochs_of,
    every,
    largest_difference,
    membership_service,
    train_member,
    train_twice,
    with_moments,
    with_states,
)
from cases.member_stopping import STOPPED, STOPS_AT
from cases.member_stopping import train as train_stopping
from harness.ranks import free_port, run_ranks, watch_ranks
from oracle.late_averages import weights_at_forward

from offbeat import (
    P3,
    WFBP,
    DiLoCo,
    DreamDDP,
    FedAvg,
    LocalSGD,
    SelSync,
    Strategy,
)
from offbeat.strategies import create


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


def test_a_message_that_one_member_has_received_lands_on_all() -> None:
    """Process 2 does not receive the average of iteration 2, and gets it from another one."""
    scenario = Scenario(LocalSGD(period=3), 12, deaf={2: 2})
    epochs = check(scenario, every(3))
    assert [len(e.members) for e in epochs] == [3, 3]
    assert epochs[1].details["lost_from"] == 3
    assert epochs[1].details["landed"]["net"]["missing"]


@pytest.mark.parametrize(
    "strategy",
    [
        DreamDDP(period=3, fill=False, split=False),
        SelSync(delta=1e9, max_period=4),
        FedAvg(local_steps=3),
        create("des-loc", {"period": 3, "first": 2}),
    ],
    ids=["dreamddp", "selsync", "fedavg", "des-loc"],
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


def test_a_failure_that_is_noticed_between_iterations_loses_no_samples() -> None:
    """The members have read the samples of the next iteration, which is still of the old epoch."""
    changes = {"kills": {0: 7}, "lost_at": {1: 8, 2: 8}}
    outcomes, epochs = run(Scenario(LocalSGD(period=6), 100, samples=161, **changes))
    assert [len(e.members) for e in epochs] == [3, 2]
    kept = epochs[1].details["lost_from"]
    read = [i for o in outcomes if o for batch in o.samples.values() for i in batch]
    assert len(read) == len(set(read))
    assert 161 - len(read) - BATCH_SIZE * kept < 2


def test_a_member_that_is_behind_trains_on_until_the_new_epoch() -> None:
    """Process 1 notices the failure two iterations before process 2."""
    scenario = Scenario(LocalSGD(period=6), 20, kills={0: 7}, lost_at={1: 8, 2: 10})
    epochs = check(scenario, every(6))
    assert [(len(e.members), e.first_iteration) for e in epochs] == [(3, 0), (2, 10)]


def test_a_vote_that_has_landed_keeps_no_samples_of_a_failed_member() -> None:
    """Process 1 has voted in iteration 6, and dies in the average of iteration 7. Its samples since
    the average of iteration 3 are read by others."""
    changes = {"kills": {1: 6}, "kill_in_message": True}
    strategy = SelSync(delta=1e9, max_period=4)
    outcomes, epochs = run(Scenario(strategy, 100, samples=161, **changes))
    assert [len(e.members) for e in epochs] == [3, 2]
    assert epochs[1].details["lost_from"] == 4
    read = [i for o in outcomes if o for batch in o.samples.values() for i in batch]
    assert len(read) == len(set(read))
    assert 161 - len(read) - BATCH_SIZE * 4 < 2


@pytest.mark.parametrize(
    "strategy",
    [
        DreamDDP(period=3, due="forward", fill=False, split=False),
        DiLoCo(period=4, delay=1),
    ],
    ids=["forward", "delayed with an outer step"],
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


def test_gradients_are_averaged_over_the_members_of_each_iteration() -> None:
    """After a failure the survivors average the gradients of that iteration among themselves.
    Slices are due in the next forward; those of nodes, below, in the step."""
    scenario = Scenario(P3(), 24, kills={1: 5}, joins={3: 11}, join_after=1, leaves={0: 16})
    epochs = check(scenario, every(1))
    assert [len(e.members) for e in epochs] == [3, 2, 3, 2]


def test_local_steps_of_a_joined_member_survive_a_failure() -> None:
    """It joins without the state of a member: its momentum is empty."""
    scenario = Scenario(LocalSGD(period=3), 16, first=2, joins={2: 4}, kills={1: 10}, state="fresh")
    epochs = check(scenario, every(3))
    assert [len(e.members) for e in epochs] == [2, 3, 2]
    assert not epochs[2].details["united"]


def test_a_stopped_member_joins_again(tmp_path: Path) -> None:
    """It is stopped in the message of iteration 5, and continues when the others have left it out
    after the timeout. Its error states what to do, and its process is started again."""
    scenario = Scenario(LocalSGD(period=3), 15, joins={3: 10}, join_after=1, folder=str(tmp_path))
    with membership_service() as address:
        ended = watch_ranks(scenario.processes, train_stopping, address, scenario, timeout_s=110)
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
        survivor, _ = watch_ranks(
            2, train_member, address, scenario, timeout_s=110, doomed=[*scenario.kills]
        )
        [epoch] = epochs_of(address)
    assert survivor.kind == "RuntimeError", survivor
    words = " ".join(survivor.error.split())
    assert "least (2) in Members must be at most the number of members that are left (1)" in words
    assert f"after the failure of member {epoch.members[1]}; start the job again from" in words


def test_a_process_trains_again_after_it_has_closed_its_model() -> None:
    scenario = Scenario(LocalSGD(period=2), 4, first=2)
    with membership_service() as address:
        (first, again), *others = run_ranks(2, train_twice, address, scenario)
        assert [len(e.members) for e in epochs_of(address)] == [2, 2]
    for weights in (again, *(weights for other in others for weights in other)):
        assert all(weights[name].equal(value) for name, value in first.items())


# ---- members of several ranks ---------------------------------------------------------------


def test_nodes_of_two_ranks_join_fail_and_leave() -> None:
    """A rank of the second node is killed, so the other one ends with an error."""
    ports = tuple(free_port() for _ in range(3))
    scenario = Scenario(
        WFBP(), 24, first=2, ranks=2, ports=ports, joins={4: 4, 5: 4}, kills={3: 11},
        orphans=(2,), leaves={0: 17}, samples=1000,
    )  # fmt: skip
    outcomes, epochs = run(scenario)
    compare(scenario, every(1), outcomes, epochs)
    assert [len(e.members) for e in epochs] == [2, 3, 2, 1]
    for a, b in ((0, 1), (4, 5)):
        left, right = outcomes[a], outcomes[b]
        assert left is not None
        assert right is not None
        for t, weights in left.weights.items():
            assert all(weights[n].equal(right.weights[t][n]) for n in weights), t
    read = [i for o in outcomes if o for batch in o.samples.values() for i in batch]
    assert len(read) == len(set(read))


def test_a_failure_before_the_plan_ends_the_job_with_its_name() -> None:
    scenario = Scenario(LocalSGD(period=3), 12, kills={1: 1}, orphans=(0, 2), measures=True)
    run(scenario)
