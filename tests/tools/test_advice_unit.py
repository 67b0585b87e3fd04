"""Pure functions of advice: sharded methods, memory, places, needed rates, targets."""

from __future__ import annotations

import shlex
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from offbeat.core.plan import INSIDE
from offbeat.core.strategy.interface import Planned
from offbeat.core.strategy.registry import find, strategy_names
from offbeat.experiments.advice import methods as making
from offbeat.experiments.advice.place import Place, place_of, place_on_cluster
from offbeat.experiments.advice.question import Question, answer
from offbeat.experiments.advice.sharded import hsdp, zero3
from offbeat.experiments.advice.verdict import Work, critical_machines
from offbeat.experiments.elsewhere import described_link, with_slower_links, with_smaller_messages
from offbeat.lab import Cluster
from offbeat.plan import Payload
from offbeat.profile import Bucket, GradientNoise, Link, Profile
from offbeat.rehearsal.methods import target_at_equal_times
from offbeat.rehearsal.rehearse import RehearsedCurve
from offbeat.sim import predict, predict_plan
from offbeat.strategies import DDP, WFBP, A2CiD2, DeFT, DiLoCo, DreamDDP, LocalSGD
from offbeat.strategies.ddp import with_replica_per_rank
from offbeat.strategies.methods.noloco import NoLoCo


def profile_of(seed=0, layers=6, ranks=4, ratio=2.0, latency_s=1e-3):
    """Layers of unequal size; an average of all gradients takes `ratio` times the compute."""
    rng = Random(seed)
    sizes = [rng.randrange(1, 40) * 25_000 for _ in range(layers)]
    backward_s = [rng.uniform(0.002, 0.03) for _ in sizes]
    compute = 1.5 * sum(backward_s)
    return Profile(
        tuple(
            Bucket(f"b{i}", s / 2, s, size, state_bytes=2 * size)
            for i, (s, size) in enumerate(zip(backward_s, sizes, strict=True))
        ),
        (Link("net", latency_s, sum(sizes) / (ratio * compute)),),
        world_size=ranks,
        update_s=0.1 * compute,
        other_s=0.01 * compute,
    )


def size_of(profile):
    return sum(bucket.size_bytes for bucket in profile.buckets)


SIZE = size_of(profile_of())


# --- methods of other libraries ------------------------------------------------------------------


def test_sharded_iterations_on_gpus_have_closed_forms():
    """Messages that take longer than compute follow each other: only the last layer of the forward
    and, if the gather of the next layer precedes it, nothing else delays the link."""
    layers, message_s = 5, 0.3
    buckets = tuple(Bucket(f"b{i}", 0.1, 0.2, 600_000) for i in range(layers))
    profile = Profile(buckets, (Link("net", 0.0, 1e6),), 2, device="cuda")
    found = zero3(profile)
    assert found.iteration_s == pytest.approx(3 * layers * message_s + 0.1)
    assert found.bound_s <= found.iteration_s <= found.unhidden_s * (1 + 1e-12)
    fast = replace(profile, links=(Link("net", 0.0, 1e9),))
    assert zero3(fast).iteration_s == pytest.approx(layers * 0.3, rel=5e-3)
    # 3 (M - 1) / M of the bytes where an all-reduce has 2: 1.5 payloads.
    assert found.sent_bytes == 1.5 * layers * 600_000
    assert zero3(Profile.from_dict(profile.to_dict())) == found
    uneven = replace(profile_of(), device="cuda")
    expected_s = predict(WFBP(fusion="none"), uneven).iteration_s - uneven.update_s * 3 / 4
    assert hsdp(uneven, shards=4).iteration_s == pytest.approx(expected_s)


def test_sharded_iterations_on_cpus_hide_nothing():
    """As measured with gloo, whose reduce-scatter sends a whole all-reduce (result `nodes`)."""
    profile = profile_of()
    compute_s, payloads = profile.compute_s, [Payload("grad", range(b, b + 1)) for b in range(6)]
    reduce_s = sum(profile.message_s(one, "net") for one in payloads)
    gather_s = sum(profile.message_s(one, "net", "all_gather") for one in payloads)
    for found, messages_s, passes, shards in (
        (zero3(profile), 2 * gather_s + reduce_s, 2, 4),
        (hsdp(profile, shards=3), reduce_s, 1, 3),
    ):
        expected_s = compute_s - profile.update_s * (1 - 1 / shards) + messages_s
        assert found.iteration_s == pytest.approx(expected_s)
        assert found.sent_bytes == passes * SIZE
        assert found.bound_s == found.unhidden_s == found.iteration_s


def test_accumulation_averages_in_the_last_of_its_batches():
    """One bucket: its message follows the last backward. The number of batches is the least one for
    which compute takes nine tenths of the time, at most 32."""
    profile = Profile((Bucket("b", 0.1, 0.2, 10**6),), (Link("net", 0.05, 1e6),), 4, update_s=0.03)
    for count in (2, 5):
        plan = making.accumulating_plan(DDP().plan(profile), count)
        expected_s = (count * 0.3 + 0.05 + 1.0 + 0.03) / count
        assert predict_plan(plan, profile).iteration_s == pytest.approx(expected_s)
    there = profile_of(ratio=3.0)
    method = making.accumulation(Place(there))
    half = making.accumulating_plan(DDP().plan(there), int(method.label.split()[1]) // 2)
    assert there.compute_s >= 0.9 * method.iteration_s
    assert there.compute_s < 0.9 * predict_plan(half, there).iteration_s
    assert "32" in making.accumulation(Place(profile_of(ratio=500.0))).label


def test_the_fp16_hook_halves_bytes_and_keeps_latency():
    profile = profile_of()
    smaller = with_smaller_messages(profile, 0.5)
    everything = Payload("grad", range(len(profile.buckets)))
    whole_s, half_s = (p.message_s(everything, "net") for p in (profile, smaller))
    assert half_s == pytest.approx(1e-3 + (whole_s - 1e-3) / 2)
    small = replace(profile.links[0], small=((4096, 0.02), (8192, 0.03)))
    there = with_smaller_messages(replace(profile, links=(small,)), 0.5)
    assert there.links[0].small == ((8192, 0.02), (16384, 0.03))
    assert making.half_precision(Place(profile)).iteration_s == predict(DDP(), smaller).iteration_s


def test_every_strategy_with_a_plan_is_a_method():
    found = {one.label.partition(":")[0] for one in making.default_methods(Place(profile_of()))}
    assert found == {name for name in strategy_names() if issubclass(find(name), Planned)}


def test_no_method_is_faster_on_slower_links():
    place = Place(profile_of())
    slower = replace(place, profile=with_slower_links(place.profile, 3.0))
    for method in making.outsiders(place):
        assert method.seconds_at(slower) >= method.seconds_at(place) * (1 - 1e-9)


def test_devices_of_a_machine_train_by_the_plans_of_nodes():
    """Updates at the step, as gradients are averaged inside a machine first; torch's DDP averages
    over all devices in one ring."""
    flat = profile_of(ratio=3.0)
    place = place_of(flat, None, None, 4)
    assert place.profile.ranks == 16
    for strategy in (DreamDDP(5, due="forward"), DreamDDP(5)):
        at_step = predict(strategy.at_step(), flat).iteration_s
        assert making.of_strategy(strategy, place).iteration_s == pytest.approx(at_step, rel=1e-3)
    ddp_s = making.of_strategy(DDP(), place).iteration_s
    assert ddp_s == predict(DDP(), with_replica_per_rank(place.profile)).iteration_s


# --- memory --------------------------------------------------------------------------------------


def test_buffers_are_those_that_the_plan_reports():
    for strategy in (
        DreamDDP(5),
        DreamDDP(5, due="delayed", delay=2),
        DiLoCo(10, delay=2),
        DiLoCo(10, wire="int4"),
        LocalSGD(3, wire="int8", outer="0.8/0.3"),
    ):
        plan = strategy.plan(profile_of())
        memory = strategy.memory(profile_of(), plan)
        assert memory.buffers_bytes == plan.fact("memory_bytes", 0)
        held = (memory.parameters_bytes, memory.gradients_bytes, memory.state_bytes)
        assert held == (SIZE, SIZE, 2 * SIZE)
        assert memory.total_bytes == sum(held) + memory.buffers_bytes + memory.staged_bytes


def test_copies_of_gradients_and_messages_count():
    profile = profile_of(ratio=1.5)
    assert DDP().memory(profile).buffers_bytes == SIZE  # buckets
    late = DeFT().plan(profile)
    copies = late.all_buffers["grad"].copies
    assert DeFT().memory(profile, late).buffers_bytes == (copies - 1) * SIZE > 0
    assert A2CiD2().memory(profile).buffers_bytes == 3 * SIZE
    strategy = DreamDDP(2, wire="int8")
    wired = strategy.plan(profile)
    sent = [
        sum(profile.bytes_of(t.payload) for t in wired.transfers if phase in t.phases)
        for phase in wired.cycle
    ]
    largest = max(profile.bytes_of(t.payload) for t in wired.transfers)
    codes = strategy.memory(profile, wired).staged_bytes - max(sent)
    assert largest / 4 < codes < largest / 3  # int8 by scatter
    for ranks in (1, 7, 8):
        pairs, averaging = profile_of(ranks=ranks), NoLoCo(2, rounds=3)
        assert averaging.memory(pairs, averaging.plan(pairs)).staged_bytes == SIZE


def test_shards_are_divided():
    place = Place(profile_of(), 2)
    full, hybrid = making.full_shards(place).memory, making.hybrid_shards(place).memory
    assert (full.state_bytes, hybrid.state_bytes) == (2 * SIZE / 8, 2 * SIZE / 2)
    sizes = sorted(bucket.size_bytes for bucket in profile_of().buckets)
    assert full.buffers_bytes == sizes[-1] + sizes[-2] + sizes[-1]


# --- places --------------------------------------------------------------------------------------


def test_estimated_messages_take_as_long_as_measured_ones():
    """64 KB at 100 Mbit/s, back to back, and 4 MB between two ranks with 20 ms and 0.1 % of loss,
    over one connection and over four (benchmarks, connections)."""
    for ranks, delay_s, measured_s in (
        *((2, 0.02, 0.083), (4, 0.02, 0.2454), (2, 0.05, 0.203), (4, 0.05, 0.6057)),
    ):
        link = described_link("net", ranks, 1e8, delay_s)
        found_s = link.latency_s + 65536 / link.bytes_per_s
        assert found_s == pytest.approx(measured_s, rel=0.06)
    for connections, measured_s in ((1, 2.8948), (4, 1.1717)):
        link = described_link("net", 2, 1e8, 0.02, 0.001, connections)
        assert link.latency_s + 2**22 / link.bytes_per_s == pytest.approx(measured_s, rel=0.3)


def test_places_of_one_device_and_of_nodes():
    one = replace(profile_of(ranks=1), noise=GradientNoise(1.0, 4.0, 8.0, 0.1))
    place = place_of(one, 4, 2e8)
    assert (place.machines, place.rate_bps, place.estimated) == (4, 2e8, True)
    assert place.profile.noise.noise_sq == 2.0  # of the mean of four batches
    assert critical_machines(place.profile) == 4 * 2.0 / 4.0
    inside = Link(INSIDE, 1e-4, 1e9)
    nodes = replace(profile_of(ranks=2), topology=(4, 4), inside=inside, noise=one.noise)
    for per_host, noise_sq in ((None, 8.0), (8, 4.0), (1, 32.0)):
        there = Question(Work.of(), devices=per_host).place(nodes).profile
        assert there.noise.noise_sq == noise_sq
        assert there.topology == (() if per_host == 1 else (per_host or 4,) * 2)


def test_places_of_cluster_files():
    text = """
        hosts = 3
        rate = "100mbit"
        [[overrides]]
        host = 1
        rates = { net = "20mbit" }
        speed = 0.5
        [[pairs]]
        hosts = [0, 2]
        latencies = { net = "30ms" }
        """
    one = replace(profile_of(ranks=1), other_s=0.0)
    place = place_on_cluster(one, Cluster.from_toml(text))
    assert place.rate_bps == 20e6  # of the slowest uplink
    assert place.profile.default_link.asked_latency_s == 0.03
    times = [place.profile.compute_s * scale for scale in place.profile.rank_scale]
    assert times == pytest.approx([one.compute_s * x for x in (1, 2, 1)])
    # In 2 s, two fast machines and a slow one compute 2 + 2 + 1 batches.
    even_s = place.with_even_times().profile.slowest().compute_s
    assert even_s == pytest.approx(2 * one.compute_s * 3 / 5)
    rest = place.without_slowest()
    assert rest.machines == 2
    assert rest.profile.slowest().compute_s == pytest.approx(one.compute_s)
    for wrong, name in (
        ("hosts = 2", "rate of link 'net'"),
        ('hosts = 2\nranks = 8\nrate = "1gbit"\n[[overrides]]\nhost = 1\nranks = 4', "ranks"),
        ('hosts = 2\nrate = "20mbit"\nprocesses_per_host = 2', "processes_per_host"),
    ):
        with pytest.raises(ValueError, match=name):
            place_on_cluster(profile_of(ranks=1), Cluster.from_toml(wrong))


def test_the_printed_command_has_the_words_of_the_script():
    question = Question(Work.of(), script=("t.py", "--note", "a --b 'c'"), max_staleness=0)
    found = answer(question, profile_of(layers=2), None)
    printed = found.text(40).partition("  offbeat compare ")[2].replace("\\\n", "")
    assert shlex.split(found.command) == ["offbeat", "compare", *shlex.split(printed)]
    assert shlex.split(printed)[-3:] == [*question.script]


# --- needs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [DDP(), DreamDDP(3)], ids=str)
@pytest.mark.parametrize("share", [0.5, 0.9, 0.95])
def test_the_least_rate_is_that_of_a_scan(strategy, share):
    place = Place(profile_of())
    method = making.of_strategy(strategy, place)
    rate_bps, needed_s = making.least_rate(method, place, share), place.profile.compute_s
    grid = [place.rate_bps * 1.02**i for i in range(-150, 250)]
    shares = [needed_s / method.seconds_at(place.at_rate(rate_bps)) for rate_bps in grid]
    reached = [r for r, s in zip(grid, shares, strict=True) if s >= share]
    if rate_bps is None:
        assert not reached
    else:
        assert reached[0] / 1.03 <= rate_bps <= reached[0] * making.TOLERANCE * 1.001


@pytest.mark.parametrize("latency_s", [1e-3, 0.03, 0.2])
def test_the_last_machine_that_pays_is_that_of_a_scan(latency_s):
    place = Place(profile_of(ratio=0.3, latency_s=latency_s))
    method = making.of_strategy(LocalSGD(4), place)
    alone_s = place.profile.compute_s
    speeds = [1 / alone_s] + [n / method.seconds_at(place.with_machines(n)) for n in range(2, 20)]
    gains = [(b - a) * alone_s for a, b in pairwise(speeds)]
    expected = max((n for n, gain in enumerate(gains, 2) if gain >= making.PAYS), default=1)
    assert making.last_paying_machine(method, place, most=19) == expected


# --- targets of rehearsals -----------------------------------------------------------------------


def curve_of(label, losses, iteration_s):
    ends_s = tuple(iteration_s * (i + 1) for i in range(len(losses)))
    return RehearsedCurve(label, 4, tuple(losses), ends_s)


def test_a_method_that_had_less_time_raises_the_target():
    """100 iterations: ddp reaches 1.0 after 80 s, the others train for 20, 5 and 200 s."""

    def fall(lowest):
        return [9.0] * 40 + [lowest] * 60

    curves = {
        "ddp": [curve_of("ddp", [9.0] * 60 + [0.9] * 40, 80 / 70)],
        "fast": [curve_of("fast", fall(low), 0.2) for low in (2.0, 3.0)],
        "faster": [curve_of("faster", fall(3.5), 0.05)],
        "slow": [curve_of("slow", fall(1.5), 2.0)],
    }
    assert target_at_equal_times(1.0, curves) == (3.5, ("fast", "faster"))
    assert target_at_equal_times(4.0, curves) == (4.0, ())
