"""Plans between replicas of several ranks, with gradients averaged inside."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from offbeat import WFBP, Profile, SelSync, Strategy
from offbeat.core.derive.deferred import early_remedy
from offbeat.core.measuring.sending import busy_throughout
from offbeat.core.profile.elsewhere import extrapolate
from offbeat.core.sim import event_engine, fast_engine
from offbeat.core.sim.ranks import Ranks
from offbeat.core.sim.simulation import make_job
from offbeat.core.strategy.parsing import parse
from offbeat.plan import INSIDE, Apply, Moment, Phases, Plan, check
from offbeat.profile import Bucket, Contention, Link
from offbeat.sim import predict, simulate
from offbeat.strategies.ddp import with_replica_per_rank
from offbeat.strategies.levels import variant_of


def profile_of(
    replicas: int = 2, each: int = 2, *, buckets: int = 4, rank_scale: tuple[float, ...] = ()
) -> Profile:
    made = tuple(
        Bucket(f"b{b}", 0.5, 0.8, 100 * (b + 1), state_bytes=100 * (b + 1)) for b in range(buckets)
    )
    total = sum(bucket.size_bytes for bucket in made)
    return Profile(
        made,
        (Link("net", 0.1, total / 8.0),),
        replicas,
        update_s=0.1,
        rank_scale=rank_scale,
        topology=(each,) * replicas,
        inside=Link(INSIDE, 0.01, total / 1.0),
    )


GRADIENTS = ["wfbp", "bsp", "dear", "p3", "bytescheduler", "us-byte", "asc-wfbp", "deft", "ddp"]
PARAMETERS = [
    "local-sgd:period=3",
    "partial-sync:period=3",
    "dreamddp:period=3",
    "dreamddp:period=3:due=forward",
    "dreamddp:period=3:due=delayed",
    "dreamddp:period=3:clip=1",
    "dreamddp:period=3:wire=int8",
    "diloco:period=3",
    "diloco:period=3:delay=1",
    "fedavg:local_steps=3:fraction=.5",
    "eager:period=3",
    "sparseloco:period=3",
    "des-loc:period=3",
    "selsync:delta=.1",
    "selsync:delta=.1:vote_lag=1",
    "selsync:scope=layer:max_period=3",
]


def inside_of(plan: Plan) -> list[tuple[int, int]]:
    """(bucket, phase) of every average of a gradient inside."""
    return [
        (b, phase)
        for t in plan.transfers
        if t.link == INSIDE
        for b in t.payload.buckets
        for phase in t.phases
    ]


@pytest.mark.parametrize("text", GRADIENTS + PARAMETERS)
def test_is_a_sound_plan_of_replicas(text: str) -> None:
    strategy, profile = parse(text), profile_of()
    plan = strategy.plan(profile)
    assert check(plan, profile) == []
    assert plan.uniform
    assert Plan.from_dict(plan.to_dict()) == plan
    expected = [] if text in GRADIENTS else [(b, p) for b in range(4) for p in plan.phases]
    assert sorted(inside_of(plan)) == sorted(expected)
    if text in GRADIENTS:
        assert not plan.groups
    else:
        assert plan.groups == {INSIDE: ((0,), (1,))}
        assert "link inside within each replica" in str(plan)
    between = predict(strategy, profile.of_replicas()).iteration_s
    if text != "ddp" and not text.startswith("selsync:scope"):
        assert predict(strategy, profile).iteration_s >= between * (1 - 1e-9)


def test_inside_a_machine_without_idle_processors_gradients_are_one_message() -> None:
    """Nothing hides a message there: several take 3.2 + 1 s, too, and .01 s more for each."""
    profile = profile_of()
    assert profile.inside is not None
    hidden = parse("local-sgd:period=3").plan(profile)
    full = replace(profile, inside=busy_throughout(profile.inside, 1.0))
    alone = parse("local-sgd:period=3").plan(full)
    sent = [[t for t in plan.transfers if t.link == INSIDE] for plan in (hidden, alone)]
    assert len(sent[0]) > 1
    assert [t.payload.buckets for t in sent[1]] == [range(4)]


def test_gradients_that_the_strategy_averages_itself_are_not_averaged_inside() -> None:
    plan = parse("local-sgd:period=3:warmup=2").plan(profile_of())
    assert sorted(inside_of(plan)) == sorted((b, p) for b in range(4) for p in (2, 3, 4))


@pytest.mark.parametrize(
    ("text", "variant"),
    [
        ("wfbp", "wfbp"),
        ("local-sgd:period=3", "local-sgd:period=3"),
        ("dreamddp:period=3", "dreamddp:period=3:average=before_update"),
        ("dreamddp:due=forward", "dreamddp:average=before_update"),
        ("selsync:scope=layer", "selsync"),
    ],
)
def test_the_variant_that_uses_gradients_at_the_step(text: str, variant: str) -> None:
    strategy = variant_of(parse(text), profile_of())
    assert strategy == parse(variant)
    assert strategy.plan(profile_of()) == parse(text).plan(profile_of())


@pytest.mark.long
def test_shards_have_the_plan_of_their_variant_alone() -> None:
    """FSDP averages the gradients inside, and updates run at the step."""
    sharded = replace(profile_of(), sharded=True, inside=None)
    for text in (*GRADIENTS, *PARAMETERS):
        strategy = parse(text)
        plan = strategy.plan(sharded)
        assert check(plan, sharded) == []
        assert early_remedy(plan) is None
        assert not inside_of(plan)
        assert plan == variant_of(strategy, sharded).plan_of_replicas(sharded)
        seconds = predict(strategy, sharded).iteration_s
        assert seconds == pytest.approx(predict(strategy, sharded, ran=plan).iteration_s)
    assert variant_of(parse("dreamddp"), sharded) == parse("dreamddp:average=before_update")
    assert variant_of(parse("wfbp"), sharded) == parse("wfbp")
    with pytest.raises(ValueError, match=r"must update in optimizer.step\(\) where"):
        Early(period=3).plan(sharded)


class Early(type(parse("dreamddp"))):  # type: ignore[misc]
    """Has no variant that updates at the step."""

    def at_step(self) -> Strategy | None:
        return None


def test_a_strategy_without_such_a_variant_is_refused() -> None:
    with pytest.raises(ValueError, match="uses gradients in backward, where they are not yet"):
        Early(period=3).plan(profile_of())


class ByVote(SelSync):
    """Votes on gradients in backward, as if every rank had a replica of its own."""

    def schedule(self, profile: Profile) -> Plan:
        return super().schedule(profile.of_replicas())


def test_a_vote_on_gradients_that_are_not_averaged_yet_is_refused() -> None:
    with pytest.raises(ValueError, match="uses gradients in backward, where they are not yet"):
        ByVote(aggregate="gradients").plan(profile_of())


class ClippingEarly(WFBP):
    """Clips the gradients of each rank before they are averaged."""

    def schedule(self, profile: Profile) -> Plan:
        plan = super().schedule(profile)
        args = (("buffer", "grad"), ("norm", 1.0))
        clip = Apply("clip", range(4), Moment("grad", 3), Phases((0,)), args=args)
        return replace(plan, applies=(clip, *plan.applies))


def test_a_rule_on_gradients_that_are_not_averaged_yet_is_refused() -> None:
    with pytest.raises(ValueError, match="uses gradients in backward, where they are not yet"):
        ClippingEarly().plan(profile_of())


class Sometimes(SelSync):
    """Averages gradients between replicas only after a vote of the iteration before."""

    def schedule(self, profile: Profile) -> Plan:
        plan = super().schedule(profile)
        moments = {"after": Moment("grad", 3), "before": Moment("step")}
        sent = (
            replace(t, payload=replace(t.payload, buffer="grad"), **moments) for t in plan.transfers
        )
        return replace(plan, transfers=tuple(sent))


def test_gradients_are_averaged_inside_where_a_vote_may_leave_them_out() -> None:
    plan = Sometimes(vote_lag=1).plan(profile_of())
    assert [t.when for t in plan.transfers if t.link != INSIDE] == ["sync"]
    assert sorted(inside_of(plan)) == [(b, 0) for b in range(4)]


SHARDED = replace(profile_of(), inside=None, sharded=True)


@pytest.mark.parametrize("text", ["wfbp", "local-sgd:period=3", "fedavg:fraction=.5"])
def test_sharded_replicas_average_inside_themselves(text: str) -> None:
    strategy = parse(text)
    assert strategy.plan(SHARDED) == strategy.plan_of_replicas(SHARDED)


@pytest.mark.parametrize(
    ("text", "profile"),
    [("noloco:period=3", profile_of()), ("noloco:period=3", SHARDED), ("cyclic", SHARDED)],
    ids=["whole", "sharded", "sums"],
)
def test_messages_between_single_replicas_of_several_ranks_are_refused(
    text: str, profile: Profile
) -> None:
    with pytest.raises(ValueError, match="must average over all replicas where these have several"):
        parse(text).plan(profile)


def test_times_by_hand() -> None:
    """Forward .5, backward .8, gradients inside 1.01, update .1, average 8.1; then the next one."""
    plan = parse("local-sgd:period=2").plan(profile_of(buckets=1))
    trace = simulate(plan, profile_of(buckets=1), iterations=2)
    first = 0.5 + 0.8 + 1.01 + 0.1
    assert trace.ends_s == (pytest.approx((first, 2 * first + 8.1)),)
    assert trace.notes["ranks"] == 2


@pytest.mark.parametrize("text", ["local-sgd:period=3", "dreamddp:period=3", "selsync:delta=.1"])
def test_both_engines_agree(text: str) -> None:
    """Also where replicas differ, so that messages inside end at different times."""
    profile = profile_of(3, 2, rank_scale=(0.8, 1.0, 1.2))
    plan = parse(text).plan(profile)
    job = make_job(plan, profile, Ranks(jitter=0.1), 9, seed=1)
    fast, slow = fast_engine.run(job), event_engine.run(job)
    np.testing.assert_allclose(fast.ends_s, slow.ends_s, rtol=1e-12)
    np.testing.assert_allclose(fast.waited_s, slow.waited_s, rtol=0, atol=1e-9)
    for name, rows in fast.queues.items():
        for rank, queue in enumerate(slow.queues[name]):
            row = rows[min(rank, len(rows) - 1)]
            np.testing.assert_allclose(row.ends_s, queue.ends_s, rtol=1e-12, err_msg=name)


def test_alike_replicas_are_simulated_as_one() -> None:
    profile = profile_of(64, 8, buckets=25)
    plan = parse("local-sgd:period=50").plan(profile)
    trace = simulate(plan, profile, iterations=50)
    assert len(trace.ends_s) == 1
    two = profile_of(2, 8, buckets=25)
    few = simulate(parse("local-sgd:period=50").plan(two), two, iterations=50)
    assert trace.ends_s == few.ends_s


def test_links_that_slow_each_other_down_inside_and_between() -> None:
    """The link inside has one queue per replica, so the fluid model of all replicas runs."""
    profile = replace(
        profile_of(2, 2, rank_scale=(0.5, 1.5)),
        contention=(Contention(("net", INSIDE), (0.5, 0.5)),),
    )
    plan = parse("partial-sync:period=2:average=before_update").plan(profile)
    slowed = simulate(plan, profile, iterations=6)
    alone = simulate(plan, replace(profile, contention=()), iterations=6)
    assert max(e[-1] for e in slowed.ends_s) > max(e[-1] for e in alone.ends_s)


# ---- profiles -------------------------------------------------------------------------------


def test_a_profile_of_nodes_in_json() -> None:
    profile = profile_of(2, 3)
    data = profile.to_dict()
    assert Profile.from_dict(data) == profile
    assert (profile.ranks, profile.world_size) == (6, 2)
    assert profile.link(INSIDE) == profile.inside
    flat = profile.of_replicas().to_dict()
    assert not {"topology", "inside", "sharded"} & set(flat)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"topology": (2,)}, r"topology \(\(2,\)\) must be the number of ranks of each of 2"),
        ({"topology": (2, 0)}, "must be the number of ranks of each of 2 replicas"),
        ({"topology": ()}, r"topology \(\(\)\) must be given"),
        ({"inside": None}, "inside must be the link between the ranks of a replica unless"),
        ({"sharded": True}, "inside must be the link between the ranks of a replica unless"),
        ({"sharded": True, "inside": None, "topology": (2, 3)}, "must be equal numbers of ranks"),
        ({"inside": Link("other", 0.1, 1.0)}, "link 'inside' must be the one between the ranks"),
        ({"inside": Link(INSIDE, -0.1, 1.0)}, "latency_s of link 'inside'"),
    ],
)
def test_wrong_profiles_of_nodes(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(profile_of(), **changes)


def test_more_nodes_of_as_many_ranks() -> None:
    more = extrapolate(profile_of(2, 3), hosts=4)
    assert (more.world_size, more.topology) == (4, (3, 3, 3, 3))
    assert more.inside == profile_of(2, 3).inside
    assert more.with_pace(2.0).inside == more.inside


def test_a_replica_per_rank() -> None:
    """A ring of 6 ranks has 10 steps of a sixth, one of 2 ranks 2 steps of a half."""
    profile = profile_of(2, 3)
    flat = with_replica_per_rank(profile)
    assert (flat.world_size, flat.topology, flat.inside) == (6, (), None)
    assert flat.links[0].latency_s == pytest.approx(5 * profile.links[0].latency_s)
    assert flat.links[0].bytes_per_s == pytest.approx(profile.links[0].bytes_per_s * 0.6)
    assert predict(parse("ddp"), profile).iteration_s > predict(parse("wfbp"), profile).iteration_s
