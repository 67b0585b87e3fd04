"""Plans whose messages are encoded: what they keep, what they cost, and settings of codecs."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest
from cases.coding import SIZES, codec_of, profile_of

from offbeat.cli.texts import contestants
from offbeat.core.codecs import Codec, register, way
from offbeat.core.codecs.cost import Encoded, coding_s
from offbeat.core.strategy.parsing import parse
from offbeat.core.verify.check import check
from offbeat.plan import Moment, Payload, Plan, Wire, local, transfer
from offbeat.profile import Bucket, CodecSpeed, Link, Profile
from offbeat.sim import predict_plan
from offbeat.strategies import BSP, WFBP, Cyclic, DeAR, DreamDDP, LocalSGD
from offbeat.strategies.compressible import profile_for_wire, with_wire


def test_each_link_has_errors_of_its_own_where_two_carry_a_bucket():
    """Their messages have no order; a link that carries other buckets needs no room of its own."""

    def residuals(links):
        moves = [
            transfer(
                "grad",
                range(b, b + 1),
                after=Moment("grad", b),
                before=Moment("step"),
                phases=(phase,),
                link=link,
            )
            for (b, phase), link in links.items()
        ]
        plan = Plan("both", 2, tuple(moves), (local(2, Moment("step"), range(2)),), period=2)
        wired = with_wire(plan, Wire("int8"), profile_of((300, 300)))
        assert check(wired) == []
        return {t.wire.error for t in wired.transfers}

    apart = {(0, 0): "net", (0, 1): "net", (1, 0): "aux", (1, 1): "aux"}
    assert residuals(apart) == {"residual_grad"}
    both = {(0, 0): "net", (0, 1): "aux", (1, 0): "aux", (1, 1): "net"}
    assert residuals(both) == {"residual_grad of net", "residual_grad of aux"}


def test_what_wires_keep_is_counted_in():
    everything = 4 * sum(SIZES)
    made = [
        DreamDDP(period=3, due="delayed", wire=wire, error_feedback=feedback).plan(profile_of())
        for wire, feedback in (("none", True), ("int4", False), ("int4", True))
    ]
    extra = [plan.fact("memory_bytes") - made[0].fact("memory_bytes") for plan in made]
    assert extra == [0, everything, 2 * everything]  # anchor, residual


def test_cyclic_encodes_sums_and_parameters():
    plan = Cyclic(wire="int4").plan(profile_of(ranks=3))
    assert plan.fact("wire") == "int4 by send"
    assert plan.fact("uncompressed") is None
    random = Cyclic(wire="int4", rule="random").plan(profile_of(ranks=3))
    assert random.fact("uncompressed") == ["parameters"]


def test_few_ranks_gather_and_many_scatter():
    def via(ranks):
        plan = BSP(wire="int4").plan(profile_of((400_000,), ranks))
        return plan.transfers[0].wire.arg("via")

    assert via(2) == "gather"
    assert via(16) == "scatter"


def test_messages_cost_what_their_codes_take():
    profile = profile_of((256 * 1000,))
    plain, wired = (predict_plan(s.plan(profile), profile) for s in (BSP(), BSP(wire="int4")))
    assert plain.bytes_per_iteration["net"] == 256 * 1000 * 4
    assert wired.bytes_per_iteration["net"] == 130 * 1000
    outside_s = 0.01 + 0.02 + 0.001
    assert plain.iteration_s == pytest.approx(outside_s + 1e-3 + 10.24)
    assert wired.iteration_s == pytest.approx(outside_s + 0.5e-3 + 1.3)  # of a half
    slow = profile_of((256 * 1000,), codecs=(CodecSpeed("int4", 1e-6, 1e-6),))
    later = predict_plan(BSP(wire="int4").plan(slow), slow)
    assert later.iteration_s == pytest.approx(wired.iteration_s + 3 * 1.024)


INT8 = [Wire("int8", {"via": via}) for via in ("gather", "scatter")]
RANK2 = Wire("powersgd", {"rank": 2})
SLOW, SPEED = Link("net", 1e-3, 1e6), (1e-7, 2e-7, 3e-4, 5e-4, 7e-4)
FLOOR = Link("net", 1e-3, 1e9, small=((1000, 0.01), (100_000, 0.05)))
HALF = replace(SLOW, halves={"all_gather": (4e-4, 3e6)})
SMALL_HALF = replace(HALF, small_halves={"all_gather": ((1000, 0.01), (1_000_000, 0.4))})


@pytest.mark.parametrize(
    ("wire", "link", "given"),
    [
        *((wire, SLOW, {}) for wire in (*INT8, RANK2)),  # bytes
        *((wire, link, {}) for wire, link in zip(INT8, (FLOOR, SMALL_HALF), strict=True)),
        *((wire, HALF, {"net": 0.2}) for wire in (*INT8, RANK2)),  # measured
    ],
)
def test_planners_are_told_what_messages_take(wire, link, given):
    """The links that they plan with take as long as the wire, also after a pause, and as much of
    compute: also where a floor, a half of an all-reduce or a bucket was measured."""
    pauses = ((100, 0.1), (10_000_000, 0.9))
    link = replace(link, cpu_s_per_message=0.3, cpu_s_per_byte=1e-5, after_pause=pauses)
    buckets = (Bucket("b", 0.01, 0.02, 80_000, given),) * 2
    profile = Profile(buckets, (link,), 4, codecs=(CodecSpeed(wire.name, *SPEED),))
    ways = [(range(1), "all_reduce"), (range(2), "all_reduce"), (range(2), "send")]
    for run, verb in ways[:1] if wire is RANK2 else ways[: 2 if given else 3]:
        payload = Payload("grad", run)
        told = profile_for_wire(profile, wire, sends=verb == "send")
        takes = Encoded(profile, payload, wire, verb)
        # Blocks are filled up.
        assert told.message_s(payload, "net", verb) == pytest.approx(takes.seconds("net"), rel=5e-3)
        told_s = told.link("net").additional_s(profile.bytes_of(payload), verb, 4)
        assert told_s == pytest.approx(link.additional_s(takes.bytes, verb, 4), rel=5e-3)
        if verb == "all_reduce" and not given:
            assert told.sending_s(payload, "net") == pytest.approx(takes.sending_s("net"), rel=5e-3)


def test_what_wires_add_to_a_message():
    """Another latency for another round; encoding and decoding, as often as codes go round. A
    scatter encodes all shards at once and then the mean of one, decodes all shards twice, and is
    two messages."""
    profile = profile_of(
        (20_000,), 4, codecs=(CodecSpeed("int8", 1e-6, 1e-9, 1.0, 100.0, 10_000.0),)
    )
    seconds = Encoded(profile, Payload("grad", range(1)), RANK2, "all_reduce").seconds("net")
    assert seconds == pytest.approx(2e-3 + (142 + 141) * 2 * 4 / 1e5)
    expected = {  # seconds of a message, and per byte
        "gather": (10_101, 1e-6 + 4e-9),
        "scatter": (20_202, 1.25e-6 + 2e-9),
        "reduce": (10_101, 1e-6 + 1e-9),
        "send": (10_101, 1e-6 + 1e-9),
        "encode": (10_001, 1e-6),
    }
    for way_of, takes in expected.items():
        assert coding_s(profile, codec_of("int8"), way_of) == pytest.approx(takes, rel=1e-9)
    assert coding_s(profile, codec_of("int4"), "gather") == (0, 0)


def test_planners_know_what_codes_take():
    """The bound is that of messages that are as short, and so are the sets."""
    profile = profile_of((20_000,) * 6)
    plain, wired = (s.plan(profile) for s in (DreamDDP(period=4), DreamDDP(period=4, wire="int4")))
    assert wired.bound_s < plain.bound_s / 2
    assert predict_plan(wired, profile).iteration_s < predict_plan(plain, profile).iteration_s / 2
    assert predict_plan(wired, profile).iteration_s >= wired.bound_s * (1 - 1e-9)


def test_what_is_sent_as_it_is_is_said():
    bucket = Bucket("b", 0.01, 0.02, 4000, buffer_bytes=80, state_bytes=8000)
    profile = Profile((bucket,), (Link("net", 1e-3, 1e6),), 2)
    plan = LocalSGD(period=2, wire="int4", state="averaged").plan(profile)
    assert plan.fact("uncompressed") == ["running statistics", "optimizer state"]
    assert [t.wire is None for t in plan.transfers] == [False, True]


def test_text():
    strategy = parse("dreamddp:period=10:wire=topk:0.01:error_feedback=false")
    assert strategy == DreamDDP(period=10, wire="topk:0.01", error_feedback=False)
    [contestant] = contestants("dreamddp:period=10:wire=topk:0.01", [])
    assert contestant.strategy == DreamDDP(period=10, wire="topk:0.01")
    assert parse("dreamddp:period=10:wire=int4") == DreamDDP(period=10, wire="int4")


def test_one_bit_without_error_feedback_warns():
    with pytest.warns(UserWarning, match="error_feedback"):
        WFBP(wire="sign", error_feedback=False)


def test_a_lone_rank_encodes_nothing():
    assert all(t.wire is None for t in WFBP(wire="int4").plan(profile_of(ranks=1)).transfers)
    assert way("int4", {}) == "gather"


def test_an_empty_part_takes_no_time():
    """Of one byte, the first half."""
    link = Link("net", 1e-3, 1e6, cpu_s_per_message=0.5, cpu_s_per_byte=0.5)
    profile = Profile((Bucket("b", 0.0, 0.0, 1),), (link,), 2)
    halves = [
        Encoded(profile, Payload("grad", range(1), n, 2), Wire("topk", {"fraction": 0.5}), verb)
        for n in (0, 1)
        for verb in ("all_reduce", "send")
    ]
    assert [one.sending_s("net") > 0 for one in halves] == [False, False, True, True]
    assert [one.seconds("net") > 0 for one in halves] == [False, False, True, True]


@pytest.mark.parametrize("sends", [False, True])
def test_without_bytes_links_are_as_they_were(sends):
    bucket = Bucket("b", 0.1, 0.1, 0, {"net": 0.125})  # measured seconds of an empty message
    profile = Profile((bucket,), (Link("net", 1e-3, 1e6),), 2)
    assert profile_for_wire(profile, Wire("int4"), sends=sends) == profile


# Settings that are refused, and the setting and the value that the error names.
WIRES = {
    "int5": "wire ('int5')",
    "topk": "wire ('topk')",
    "topk:0": "fraction (0)",
    "topk:1.5": "fraction (1.5)",
    "powersgd:0": "rank (0)",
    "powersgd:x": "wire ('powersgd:x')",
    "int4:3": "wire ('int4:3')",
    "int4:": "wire ('int4:')",
}
REFUSED = [
    *((partial(WFBP, wire=wire), named) for wire, named in WIRES.items()),
    (partial(WFBP, wire="int4", error_feedback="no"), "error_feedback ('no')"),
    # 820 numbers are 29 rows of 29, and 58 x 14 = 812.
    (lambda: BSP(wire="powersgd:15").plan(profile_of()), "rank (15)"),
    (partial(Cyclic, wire="randomk:0.1"), "randomk"),  # must be summed up
    (partial(DeAR, wire="int8"), "int8"),  # halves
    (lambda: register(type("Taken", (Codec,), {"name": "int8"})), "codec ('int8')"),
    (lambda: register(type("Taken", (Codec,), {"name": "clip"})), "codec ('clip')"),
]


@pytest.mark.parametrize(("act", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_what_cannot_be(act, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        act()


def test_a_rank_whose_factors_are_smaller_than_the_matrix():
    assert BSP(wire="powersgd:14").plan(profile_of()).fact("wire")
