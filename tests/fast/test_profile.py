"""Profiles: message times, JSON, and what is refused."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import random_timelines

from offbeat.plan import Payload
from offbeat.profile import Bucket, Link, Profile, ScriptUsage

# The public form: what a user may write by hand.
CONTRACT = {
    "schema": 1,
    "world_size": 16,
    "update_s": 0.0,
    "links": [{"name": "net", "latency_s": 1e-4, "bytes_per_s": 1.25e8}],
    "buckets": [
        {
            "name": "h.0",
            "forward_s": 0.001,
            "backward_s": 0.002,
            "size_bytes": 1000000,
            "communication_s": {"net": 0.02},
        }
    ],
}
NET, AUX = Link("net", 0.5, 4.0), Link("aux", 0.25, 8.0, fit_error=0.0)
PROFILE = Profile(
    (
        Bucket("out", 1.0, 2.0, 8, state_bytes=16),
        Bucket("hidden", 0.5, 1.0, 4, {"net": 2.0}, buffer_bytes=2, state_bytes=8),
        Bucket("empty", 0.0, 0.5, 0),
    ),
    (NET, AUX),
    world_size=4,
    update_s=0.75,
)


def altered(change, where=None):
    """The contract with some fields changed (None: left out)."""
    data = json.loads(json.dumps(CONTRACT))
    target = data if where is None else data[where][0]
    target.update(change)
    for key in [key for key, value in target.items() if value is None]:
        del target[key]
    return data


def test_the_public_json_form():
    profile = Profile.from_dict(CONTRACT)
    assert profile.to_dict() == CONTRACT
    assert profile.world_size == 16
    assert profile.communication_s("net") == (0.02,)
    assert profile.default_link == Link("net", 1e-4, 1.25e8)


def test_what_may_be_left_out():
    profile = Profile.from_dict(altered({"update_s": None}))
    bucket = altered({"communication_s": None}, "buckets")
    assert profile.update_s == 0.0
    assert Profile.from_dict(bucket).communication_s("net") == (1e-4 + 1e6 / 1.25e8,)


links = st.builds(
    Link,
    st.sampled_from(["net", "aux"]),
    st.floats(0, 10),
    st.floats(1, 1e12),
    st.none() | st.floats(0, 1),
)


@settings(max_examples=20, deadline=None)
@given(random_timelines.profiles(), links, st.text(), st.integers(0, 10**9), st.booleans())
def test_json_round_trip(profile, link, text, broadcast_bytes, clips):
    profile = replace(
        profile,
        usage=ScriptUsage(changes=clips, backwards=1 + broadcast_bytes % 3),
        broadcast_bytes=broadcast_bytes,
        links=(*(other for other in profile.links if other.name != link.name), link),
        buckets=tuple(replace(b, communication_s={}, tensors=(text,)) for b in profile.buckets),
        model=text,
    )
    assert Profile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile


def test_files(tmp_path):
    path = tmp_path / "runs" / "profile.json"
    PROFILE.save(path)
    assert Profile.load(path) == PROFILE
    assert [p.name for p in path.parent.iterdir()] == ["profile.json"]
    path.write_text("{")
    with pytest.raises(ValueError, match=r"profile.json is not JSON \(.*\); measure it again"):
        Profile.load(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"profile.json: schema \(None\) of the profile must be 1"):
        Profile.load(path)


def test_sums():
    assert (PROFILE.forward_s, PROFILE.backward_s) == (1.5, 3.5)
    assert PROFILE.ready_s == (2.0, 3.0, 3.5)
    assert PROFILE.bucket_update_s == (0.5, 0.25, 0.0)


def test_updates_of_buckets_without_sizes_take_equal_time():
    buckets = tuple(replace(b, size_bytes=0) for b in PROFILE.buckets)
    assert replace(PROFILE, buckets=buckets).bucket_update_s == (0.25, 0.25, 0.25)


@pytest.mark.parametrize(
    ("link", "kind", "alone_s"),
    [
        ("aux", "grad", (0.25 + 8 / 8, 0.25 + 4 / 8, 0.0)),
        ("aux", "param", (0.25 + 8 / 8, 0.25 + 6 / 8, 0.0)),
        ("aux", "state", (0.25 + 16 / 8, 0.25 + 8 / 8, 0.0)),
        # 2 s are given for bucket 1's 4 bytes: 0.5 s of latency and 1.5 s in proportion to size.
        ("net", "grad", (0.5 + 8 / 4, 2.0, 0.0)),
        ("net", "param", (0.5 + 8 / 4, 0.5 + 1.5 * 6 / 4, 0.0)),
        ("net", "state", (0.5 + 16 / 4, 0.5 + 1.5 * 8 / 4, 0.0)),
    ],
)
def test_message_times(link, kind, alone_s):
    latency_s = PROFILE.link(link).latency_s
    assert PROFILE.communication_s(link, kind) == alone_s
    assert PROFILE.transfer_s(link, kind) == tuple(max(s - latency_s, 0.0) for s in alone_s)
    assert PROFILE.message_s(Payload(kind, range(3)), link) == sum(alone_s) - latency_s
    assert PROFILE.message_s(Payload(kind, range(1, 1)), link) == 0.0


def test_a_given_time_below_the_latency_is_taken_as_it_is():
    bucket = Bucket("b", 0.0, 1.0, 4, {"net": 0.125})
    profile = Profile((bucket, bucket), (NET,), 2)
    assert profile.communication_s("net") == (0.125, 0.125)
    assert profile.transfer_s("net") == (0.0, 0.0)


def test_a_given_time_holds_without_a_size():
    profile = Profile((Bucket("b", 0.0, 1.0, 0, {"net": 3.0}),), (NET,), 2)
    assert profile.communication_s("net", "grad") == (3.0,)
    assert profile.communication_s("net", "param") == (3.0,)
    assert profile.communication_s("net", "state") == (0.0,)


def test_payload_bytes():
    assert [PROFILE.payload_bytes(k, range(3)) for k in ("grad", "param", "state")] == [12, 14, 24]


def test_the_slowest_rank_plans():
    profile = replace(PROFILE, rank_scale=(0.5, 2.0, 1.0, 1.0), other_s=1.0)
    slowest = profile.slowest()
    assert (slowest.forward_s, slowest.backward_s, slowest.update_s) == (3.0, 7.0, 1.5)
    assert (slowest.other_s, slowest.rank_scale) == (1.0, ())
    assert PROFILE.slowest() is PROFILE


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ([], "a profile must be a JSON object"),
        (altered({"schema": 3}), r"schema \(3\) of the profile must be 1; measure it again"),
        (altered({"links": None}), "the profile lacks 'links'"),
        (
            altered({"speed": 1}),
            r"profile field \('speed'\) must be one of broadcast_bytes, buckets, codecs",
        ),
        (altered({"world_size": 0}), r"world_size \(0\) must be an integer of at least 1"),
        (altered({"world_size": 1.5}), r"world_size \(1.5\) must be an integer"),
        (altered({"update_s": -1}), r"update_s \(-1\) must be a finite number of at least 0"),
        (altered({"other_s": "1"}), r"other_s \('1'\) must be a finite number"),
        (altered({"element_bytes": 0}), r"element_bytes \(0\) must be a finite number above 0"),
        (altered({"buckets": []}), r"buckets \(\[\]\) must not be empty"),
        (altered({"links": []}), r"links \(\[\]\) must not be empty"),
        (altered({"links": CONTRACT["links"] * 2}), r"link name \('net'\) must be unique"),
        (altered({"rank_scale": [1.0]}), r"rank_scale \(1 entries\) must have one entry per rank"),
        (altered({"rank_scale": [0.0] * 16}), r"rank_scale\[0\] \(0.0\) must be a finite number"),
        (
            altered({"usage": {"changes": 1}}),
            r"changes \(1\) of the script's usage must be true or",
        ),
        (
            altered({"usage": {"backwards": 0}}),
            r"backwards \(0\) .* must be an integer of at least 1",
        ),
        (
            altered({"usage": {"clips": True}}),
            r"field \('clips'\) must be one of alters, backwards",
        ),
        (altered({"buckets": ["h.0"]}), r"bucket \('h.0'\) must be a JSON object"),
        (
            altered({"size": 1}, "buckets"),
            r"bucket 'h.0' field \('size'\) must be one of backward_s",
        ),
        (altered({"forward_s": None}, "buckets"), "bucket 'h.0' must have the fields"),
        (
            altered({"state_bytes": -1}, "buckets"),
            r"state_bytes of bucket 'h.0' \(-1\) must be a finite number of at least 0",
        ),
        (
            altered({"backward_s": float("nan")}, "buckets"),
            r"backward_s of bucket 'h.0' \(nan\) must be a finite number of at least 0",
        ),
        (
            altered({"communication_s": {"nat": 1.0}}, "buckets"),
            r"communication_s of bucket 'h.0' names the link 'nat', which must be one of net",
        ),
        (
            altered({"communication_s": {"net": -1.0}}, "buckets"),
            r"communication_s\['net'\] of bucket 'h.0' \(-1.0\) must be a finite number",
        ),
        (
            altered({"communication_s": 1.0}, "buckets"),
            "communication_s of bucket 'h.0' must map link names to seconds",
        ),
        (
            altered({"bytes_per_s": 0}, "links"),
            r"bytes_per_s of link 'net' \(0\) must be a finite number above 0",
        ),
    ],
)
def test_malformed_profiles(data, text):
    with pytest.raises(ValueError, match=text):
        Profile.from_dict(data)


def test_an_unknown_link():
    with pytest.raises(ValueError, match=r"link \('x'\) must be one of the profile's links: net"):
        PROFILE.link("x")


SMALL = Link("net", 0.001, 1e6, small=((1000, 0.004), (2000, 0.0035), (3000, 0.008)))
SIZES = (500, 2000, 10_000, 0)
FLOORED = Profile(tuple(Bucket(str(i), 0.1, 0.1, n) for i, n in enumerate(SIZES)), (SMALL,), 2)


def grad_s(buckets, parts=1, verb="all_reduce"):
    return FLOORED.message_s(Payload("grad", buckets, 0, parts), "net", verb)


def test_small_messages_take_what_was_measured():
    assert Profile.from_dict(json.loads(json.dumps(FLOORED.to_dict()))) == FLOORED
    assert FLOORED.communication_s("net") == pytest.approx((0.004, 0.004, 0.011, 0.0))
    assert grad_s(range(2)) == pytest.approx(0.006)  # 2500 bytes
    assert FLOORED.transfer_s("net") == pytest.approx((0.0005, 0.002, 0.010, 0.0))
    assert grad_s(range(2, 3), parts=10) == pytest.approx(0.004)
    assert grad_s(range(2, 3), parts=10, verb="all_gather") == pytest.approx(0.002)


def test_more_bytes_never_take_less_time_and_no_size_jumps():
    """Neither where a smaller message was measured slower, nor where measured sizes end."""
    sizes = range(1, 9000)
    profile = Profile(tuple(Bucket(str(n), 0.0, 0.0, n) for n in sizes), (SMALL,), 2)
    times_s = profile.communication_s("net")
    steps_s = [later - earlier for earlier, later in pairwise(times_s)]
    assert min(steps_s) >= 0
    assert max(steps_s) < 5e-6  # the steepest piece: 4 ms over 1000 bytes
    assert times_s[2999] == times_s[6998] == pytest.approx(0.008)  # where the line overtakes
    assert times_s[-1] == pytest.approx(0.001 + 0.008999)


@settings(max_examples=40, deadline=None)
@given(profile=random_timelines.profiles(most_buckets=6), small=st.booleans())
def test_messages_together_take_what_they_take_one_by_one(profile, small):
    table = ((1, 0.5), (3, 0.25), (6, 2.0)) if small else ()
    profile = replace(profile, links=tuple(replace(link, small=table) for link in profile.links))
    for kind in ("grad", "param", "state"):
        for stop in range(len(profile.buckets) + 1):
            assert profile.messages_ending_s("net", kind, 0, stop).tolist() == [
                profile.message_s(Payload(kind, range(start, stop)), "net") for start in range(stop)
            ]


def test_slices_of_every_bucket_at_once():
    for kind in ("grad", "param", "state"):
        for parts in (1, 3):
            assert FLOORED.bucket_message_s("net", kind, parts) == [
                FLOORED.message_s(Payload(kind, range(b, b + 1), 0, parts), "net") for b in range(4)
            ]


def test_equal_buckets_take_equal_times_behind_others():
    """A bucket's time is its own, and not the difference of sums over the buckets before it."""
    sizes = [10**9 + 7, 12_347, 3, 12_347, 12_347]
    profile = Profile(
        tuple(Bucket(str(i), 0.0, 0.0, size) for i, size in enumerate(sizes)),
        (Link("net", 0.001, 3e6),),
        2,
    )
    expected_s = [0.001 + size / 3e6 for size in sizes]
    assert profile.bucket_message_s("net", "grad") == expected_s
    alone = [Payload("grad", range(i, i + 1)) for i in range(len(sizes))]
    assert [profile.message_s(payload, "net") for payload in alone] == expected_s
    assert [
        profile.messages_ending_s("net", "grad", 0, i + 1)[-1] for i in range(len(sizes))
    ] == expected_s
    assert sum(map(profile.message_transfer_s, alone, ["net"] * 5)) == sum(s / 3e6 for s in sizes)


def test_processor_time_of_a_message():
    link = replace(NET, cpu_s_per_message=0.25, cpu_s_per_byte=0.125)
    profile = replace(PROFILE, links=(link,), jitter=0.5, step_s=0.25)
    assert profile.bucket_step_s == (0.75, 0.5, 0.25)
    assert Profile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile
    payloads = [
        Payload("grad", range(1)),
        Payload("grad", range(1), 0, 4),
        Payload("grad", range(2, 3)),
    ]
    assert [profile.sending_s(p, "net") for p in payloads] == [1.25, 0.5, 0.0]
    assert profile.sending_s(payloads[0], "net", "all_gather") == 0.625
    assert PROFILE.sending_s(payloads[0], "net") == 0.0


def test_halves_of_known_pairs_have_their_own_steps():
    """As measured over a distant link, where gloo's all_gather has a delay more."""
    link = Link("net", 0.234186, 5.7e6, pair_bytes_per_s=5.953e6)
    profile = Profile((Bucket("all", 0.1, 0.2, 1_624_232),), (link,), world_size=4)

    def half_s(profile, verb):
        return profile.message_s(Payload("grad", range(1)), "net", verb)

    assert half_s(profile, "reduce_scatter") == pytest.approx(0.3217, abs=1e-4)
    assert half_s(profile, "all_gather") == pytest.approx(0.3607, abs=1e-4)
    assert link.half("reduce_scatter", 4) == pytest.approx((0.234186 / 2, 5.953e6 * 4 / 3))
    plain = replace(link, pair_bytes_per_s=None)
    assert plain.half("all_gather", 4) == (0.234186 / 2, 2 * 5.7e6)
    measured = replace(link, halves={"all_gather": (0.1, 1e7)})
    assert measured.half("all_gather", 4) == (0.1, 1e7)


def test_bytes_of_elements_survive_a_file():
    half = replace(PROFILE, element_bytes=2.5)
    assert Profile.from_dict(json.loads(json.dumps(half.to_dict()))) == half
    assert "element_bytes" not in PROFILE.to_dict()
