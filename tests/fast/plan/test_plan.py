"""Plans: phases, text, JSON."""

import json
from dataclasses import replace
from random import Random

import pytest
from harness.parts import POINTS
from oracle.plan_families import FAMILIES

from offbeat.plan import (
    Apply,
    Buffer,
    Fact,
    Moment,
    Payload,
    Phases,
    Plan,
    Vote,
    Wire,
    base_link,
    channel,
    local,
    parse_moment,
    transfer,
)

STEP, END = Moment("step"), Moment("end")
PLAN = Plan(
    "mixed",
    3,
    (
        transfer("grad", range(3), after=Moment("grad", 2), before=STEP, phases=[0], link="net"),
        transfer(
            "param",
            range(2, 3),
            after=STEP,
            before=Moment("forward", 2, lag=1),
            phases=[1, 2],
            link="aux#1",
            part=1,
            parts=4,
            width=2,
            when="sync",
        ),
        transfer(
            "grad",
            range(1),
            after=Moment("grad", 0),
            before=END,
            phases=[2],
            link="net",
            verb="send",
            ranks=(0, 1),
            into="sum",
            age=1,
            wire=Wire("topk", {"fraction": 0.5}, "residual"),
        ),
    ),
    (
        local(3, Moment("grad"), range(2), merge="mean", age=1),
        Apply("add", range(1), END, Phases([2]), (1,), "sync", {"source": "sum", "target": "grad"}),
    ),
    (Vote("sync", "changed", Moment("grad", 2), STEP, Phases([1, 2]), {"threshold": 0.1}),),
    (
        Buffer("grad", "grad", copies=2),
        Buffer("sum", "grad"),
        Buffer("residual", "grad", kept=False),
    ),
    {"node": ((0, 1), (2, 3))},
    period=2,
    prologue=1,
    bound_s=0.25,
    facts=(Fact("sets", [[0], [1, 2]], "what is averaged"),),
)  # fmt: skip
TEXT = """\
mixed: 3 buckets, period 2 iterations after a prologue of 1
   buffer grad like grad, starts as zero, 2 copies
   buffer sum like grad, starts as zero
   buffer residual like grad, starts as zero
   link node within 0,1 | 2,3
   grad[0:3]                          after grad(2)  before step          in 0    on net
   param[2:3]/2-3of4                  after step     before forward(2)+1  in 1-2  on aux#1 when sync
   send grad~1[0:1] 0->1 into sum     after grad(0)  before end           in 2    on net as topk(fraction=0.5)
   vote sync                          at grad(2)     due step             in 1-2  by changed(threshold=0.1)
   local[0:3](age=1, merge=mean)      at each grad                        in 0-1
   add[0:1](source=sum, target=grad)  at end                              in 2    rank 1 when sync"""  # noqa: E501


def test_text():
    assert str(PLAN) == TEXT


def test_text_with_arrows():
    marked = [PLAN.transfers[1], PLAN.applies[1], PLAN.votes[0]]
    lines, plain = PLAN.text(mark=marked).splitlines(), TEXT.splitlines()
    assert [i for i, line in enumerate(lines) if line.startswith("->")] == [6, 8, 10]
    assert [line[3:] for line in lines[1:]] == [line[3:] for line in plain[1:]]


def test_text_without_rules():
    assert str(Plan("alone", 1)) == "alone: 1 bucket, period 1 iteration"


def test_phases_of_iterations():
    assert [PLAN.phase(i) for i in range(6)] == [0, 1, 2, 1, 2, 1]
    assert (PLAN.phases, PLAN.cycle) == (range(3), range(1, 3))
    assert PLAN.links == ("net", "aux#1")


@pytest.mark.parametrize("plan", [PLAN, *(f.plan for f in FAMILIES.values())], ids=str)
def test_json_round_trip(plan):
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert (again.digest, str(again)) == (plan.digest, str(plan))
    assert again.facts == plan.facts


def test_the_digest_is_of_what_ranks_must_agree_on():
    assert replace(PLAN, facts=(), bound_s=None).digest == PLAN.digest
    others = [
        replace(PLAN, transfers=PLAN.transfers[::-1]),
        replace(PLAN, applies=PLAN.applies[::-1]),
        replace(PLAN, votes=()),
        replace(PLAN, buffers=PLAN.buffers[:2]),
        replace(PLAN, groups={}),
        replace(PLAN, period=3),
        replace(PLAN, prologue=2),
        replace(PLAN, buckets=4),
        replace(PLAN, transfers=(replace(PLAN.transfers[0], link="wifi"), *PLAN.transfers[1:])),
    ]
    digests = [plan.digest for plan in (PLAN, *others)]
    assert len(set(digests)) == len(digests)


def test_facts_are_known_by_name():
    assert PLAN.fact("sets") == [[0], [1, 2]]
    assert PLAN.fact("merges") is None
    assert PLAN.fact("merges", []) == []


def test_uniform_plans_are_the_same_on_all_ranks():
    plan = FAMILIES["wfbp"].plan
    assert plan.uniform
    assert not replace(plan, groups={"net": ((0, 1),)}).uniform
    assert not FAMILIES["cyclic"].plan.uniform
    assert not replace(plan, applies=(replace(plan.applies[0], ranks=(0,)),)).uniform


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("bucket", [None, 0, 20])
@pytest.mark.parametrize("lag", [0, 1, 12])
def test_moments_round_trip_through_text(point, bucket, lag):
    moment = Moment(point, bucket, lag)
    assert parse_moment(str(moment)) == moment


def test_names():
    assert [t.id for t in PLAN.transfers] == [
        "grad[0:3]@net",
        "param[2:3]/2-3of4@aux#1",
        "send grad~1[0:1] 0->1 into sum@net",
    ]
    assert str(Payload("state", range(4, 9))) == "state[4:9]"
    assert [channel("net", i) for i in range(2)] == ["net", "net#1"]
    assert [base_link(name) for name in ("net", "net#1")] == ["net", "net"]


def test_slices_lay_a_bucket_end_to_end():
    for size in (0, 1, 7, 12):
        cuts = [Payload("grad", range(1), part, 5).slice_of(size) for part in range(5)]
        assert [i for cut in cuts for i in range(size)[cut]] == list(range(size))
        wide = Payload("grad", range(1), 1, 5, 3).slice_of(size)
        assert (wide.start, wide.stop) == (cuts[1].start, cuts[3].stop)


# ---- phases ---------------------------------------------------------------------------------


def sets_of_phases():
    rng = Random(0)
    return [{p for p in range(12) if rng.random() < share} for share in (0, 0.2, 0.5, 0.8, 1) * 6]


def test_empty_runs_are_no_phases():
    assert Phases.of_runs([(3, 3), (0, 1), (5, 5)]).runs == ((0, 1),)
    assert not Phases.of_runs([(2, 2)])


def test_phases_are_sets():
    for members in sets_of_phases():
        phases = Phases(members)
        assert phases == members == set(phases)
        assert (sorted(phases), len(phases)) == (sorted(members), len(members))
        assert [p in phases for p in range(-1, 14)] == [p in members for p in range(-1, 14)]
        assert all(a[1] < b[0] for a, b in zip(phases.runs, phases.runs[1:], strict=False))
        assert Phases.parse(str(phases)) == phases
        assert hash(Phases(sorted(members))) == hash(phases)
        for others in sets_of_phases():
            other = Phases(others)
            assert (phases <= other) == (members <= others)
            assert phases.isdisjoint(other) == members.isdisjoint(others)
            assert phases | other == members | others
            assert phases - other == members - others


@pytest.mark.parametrize(
    ("phases", "text"),
    [((), "none"), ((3,), "3"), ((0, 1, 2, 5), "0-2,5"), ((7, 1, 6), "1,6-7")],
)
def test_phases_are_written_as_runs(phases, text):
    assert str(Phases(phases)) == text


def test_long_phases_cost_nothing():
    many, last = Phases(range(10**12)), Phases([10**12 - 1])
    assert len(many) == 10**12
    assert last <= many
    assert not many <= last
    assert not many.isdisjoint(last)
    assert Phases(range(10**12, 2 * 10**12)).isdisjoint(many)


# ---- malformed ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"schema": 1}, r"schema \(1\) of the plan must be 2; write the plan again with"),
        ({"period": None}, r"the plan lacks the field 'period'"),
        ({"applies": None}, r"the plan lacks the field 'applies'"),
        ({"applies": 3}, r"field 'applies' of the plan \(3\) is malformed"),
        ({"applies": [3]}, r"is malformed"),
        ({"groups": [1]}, r"field 'groups' of the plan \(\[1\]\) is malformed"),
        ({"facts": [["a", 1, "b", "c"]]}, r"field 'facts' of the plan .* is malformed"),
    ],
)
def test_malformed_plans(change, text):
    data = {k: v for k, v in (PLAN.to_dict() | change).items() if v is not None}
    with pytest.raises(ValueError, match=text):
        Plan.from_dict(data)


@pytest.mark.parametrize(
    ("where", "change", "text"),
    [
        ("transfers", {"verb": "mean"}, r"verb \('mean'\) must be one of all_reduce, reduce_scat"),
        ("transfers", {"after": "tick(2)"}, r"moment \('tick'\) must be one of forward, grad, st"),
        ("transfers", {"link": None}, r"the plan lacks the field 'link'"),
        ("buffers", {"kind": "gard"}, r"kind \('gard'\) must be one of grad, param, state"),
        ("buffers", {"start": "one"}, r"start \('one'\) must be one of zero, param"),
        ("applies", {"at": "updated"}, r"moment \('updated'\) must be one of forward, grad, step"),
        ("votes", {"due": None}, r"the plan lacks the field 'due'"),
        ("votes", {"due": 3}, r"field 'due' of the plan \(3\) is malformed"),
        ("transfers", {"buckets": 3}, r"field 'buckets' of the plan \(3\) is malformed"),
        (
            "transfers",
            {"wire": {"name": "topk", "args": 1}},
            r"field 'wire' of the plan .* is malf",
        ),
        ("applies", {"phases": 3}, r"field 'phases' of the plan \(3\) is malformed"),
        ("applies", {"args": [1]}, r"is malformed"),
    ],
)
def test_malformed_rules(where, change, text):
    data = PLAN.to_dict()
    row = data[where][0] | change
    data[where][0] = {k: v for k, v in row.items() if v is not None}
    with pytest.raises(ValueError, match=text):
        Plan.from_dict(data)
