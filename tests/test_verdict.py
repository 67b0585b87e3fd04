"""Verdicts: equations and simulations against slow references, rates, machines, memory, texts."""

import heapq
import json
import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean

import pytest
import torch

from offbeat.cli import entry as cli
from offbeat.core.plan import INSIDE
from offbeat.core.profile.elsewhere import extrapolate, with_slower_links
from offbeat.core.strategy.parsing import text_of
from offbeat.core.strategy.registry import strategy_names
from offbeat.experiments.advice import methods as making
from offbeat.experiments.advice import needs
from offbeat.experiments.advice.commands import launch_command
from offbeat.experiments.advice.other_networks import Network, on_networks, with_smaller_messages
from offbeat.experiments.advice.place import Place, place_of, place_on_cluster
from offbeat.experiments.advice.question import Question
from offbeat.experiments.advice.sharded import hsdp, zero3
from offbeat.experiments.advice.verdict import decide, predict_methods
from offbeat.experiments.advice.verdict_text import least_rate, rate, span, verdict_text
from offbeat.experiments.advice.work import Work
from offbeat.experiments.progress import Progress
from offbeat.jobs.verdict_file import KeptVerdict
from offbeat.lab import Cluster
from offbeat.plan import Payload
from offbeat.profile import Bucket, GradientNoise, Link, Profile
from offbeat.rehearsal import methods as rehearsed_methods
from offbeat.rehearsal.command import RehearsalOutcome
from offbeat.rehearsal.methods import Losses, target_at_equal_times
from offbeat.rehearsal.rehearse import RehearsedCurve
from offbeat.sim import Ranks, predict, predict_plan
from offbeat.strategies import DDP, SSP, WFBP, A2CiD2, Cyclic, DeFT, DiLoCo, DreamDDP, LocalSGD
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


# --- sharded methods -----------------------------------------------------------------------------


def events_of_zero3(profile):
    """Iteration of ZeRO-3 by events: a device that computes layers in order, a link that sends one
    message at a time in the order of issue. A layer's gather is issued when the layer before it
    begins, its reduce-scatter when its backward ends."""
    link = profile.default_link.name
    layers = [*range(len(profile.buckets))[::-1], *range(len(profile.buckets))]
    count = len(profile.buckets)

    def message_s(layer, kind, verb):
        return profile.message_s(Payload(kind, range(layer, layer + 1)), link, verb)

    events, order = [], 0
    queue, link_busy, gathered = [], False, set()
    now = last_s = 0.0
    step, running = 0, False

    def issue(what, position):
        queue.append((what, position))

    def push(at_s, what, position):
        nonlocal order
        order += 1
        heapq.heappush(events, (at_s, order, what, position))

    def begin_phase(position):
        if position < len(layers) and position % count == 0:
            issue("gather", position)  # the first gather of a forward or a backward

    begin_phase(0)
    while True:
        if queue and not link_busy:
            what, position = queue.pop(0)
            kind, verb = ("param", "all_gather") if what == "gather" else ("grad", "reduce_scatter")
            link_busy = True
            push(now + message_s(layers[position], kind, verb), what, position)
        if not running and step < len(layers) and step in gathered:
            running, layer = True, profile.buckets[layers[step]]
            push(now + (layer.forward_s if step < count else layer.backward_s), "compute", step)
            if step + 1 < len(layers) and (step + 1) % count:
                issue("gather", step + 1)
            continue
        if not events:
            break
        now, _, what, position = heapq.heappop(events)
        last_s = max(last_s, now)
        if what == "compute":
            running, step = False, step + 1
            if position >= count:
                issue("scatter", position)
            begin_phase(step)
        else:
            link_busy = False
            if what == "gather":
                gathered.add(position)
    return last_s + profile.other_s + profile.update_s / profile.world_size


@pytest.mark.parametrize("ratio", [0.05, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(5))
def test_zero3_is_what_events_give(seed, ratio):
    profile = profile_of(seed, ratio=ratio, ranks=2 + seed)
    found = zero3(profile)
    assert found.iteration_s == pytest.approx(events_of_zero3(profile), rel=1e-12)
    assert found.bound_s <= found.iteration_s <= found.unhidden_s * (1 + 1e-12)


def test_zero3_of_equal_layers_has_a_closed_form():
    """Messages that take longer than compute follow each other: only the last layer of the forward
    and, if the gather of the next layer precedes it, nothing else delays the link."""
    layers, gather_s, scatter_s = 5, 0.3, 0.3
    buckets = tuple(Bucket(f"b{i}", 0.1, 0.2, 600_000) for i in range(layers))
    profile = Profile(buckets, (Link("net", 0.0, 1e6),), 2)
    forward_s = layers * gather_s + 0.1
    backward_s = layers * (gather_s + scatter_s)
    assert zero3(profile).iteration_s == pytest.approx(forward_s + backward_s)
    fast = replace(profile, links=(Link("net", 0.0, 1e9),))
    assert zero3(fast).iteration_s == pytest.approx(layers * 0.3, rel=5e-3)
    # 3 (M - 1) / M of the bytes where an all-reduce has 2: 1.5 payloads.
    assert zero3(profile).sent_bytes == 1.5 * layers * 600_000


@pytest.mark.parametrize("seed", range(3))
def test_hsdp_costs_what_unfused_gradients_cost(seed):
    profile = profile_of(seed)
    unfused = WFBP(fusion="none")
    expected_s = predict(unfused, profile).iteration_s - profile.update_s * 3 / 4
    assert hsdp(profile, shards=4).iteration_s == pytest.approx(expected_s)


# --- methods of other libraries ------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 5])
def test_accumulation_averages_in_the_last_of_its_batches(count):
    """One bucket: its message follows the last backward."""
    profile = Profile((Bucket("b", 0.1, 0.2, 10**6),), (Link("net", 0.05, 1e6),), 4, update_s=0.03)
    plan = making.accumulating_plan(DDP().plan(profile), count)
    expected_s = (count * 0.3 + 0.05 + 1.0 + 0.03) / count
    assert predict_plan(plan, profile).iteration_s == pytest.approx(expected_s)


def test_accumulation_stops_when_compute_takes_enough():
    method = making.accumulation(Place(profile_of(ratio=3.0)))
    batches = int(method.label.split()[1])
    needed_s = profile_of(ratio=3.0).compute_s
    assert needed_s >= 0.9 * method.iteration_s
    half = making.accumulating_plan(DDP().plan(profile_of(ratio=3.0)), batches // 2)
    assert needed_s < 0.9 * predict_plan(half, profile_of(ratio=3.0)).iteration_s
    assert making.accumulation(Place(profile_of(ratio=500.0))).label == "ddp, 32 batches"


def test_the_fp16_hook_halves_bytes_and_keeps_latency():
    profile = profile_of()
    smaller = with_smaller_messages(profile, 0.5)
    everything = Payload("grad", range(len(profile.buckets)))
    whole_s, half_s = (p.message_s(everything, "net") for p in (profile, smaller))
    assert half_s == pytest.approx(1e-3 + (whole_s - 1e-3) / 2)
    measured = replace(
        profile,
        links=(replace(profile.links[0], small=((4096, 0.02), (8192, 0.03))),),
        buckets=tuple(replace(b, communication_s={"net": 0.101}) for b in profile.buckets),
    )
    there = with_smaller_messages(measured, 0.5)
    assert there.links[0].small == ((8192, 0.02), (16384, 0.03))
    assert there.communication_s("net") == pytest.approx([0.051] * len(profile.buckets))
    method = making.half_precision(Place(profile))
    assert method.iteration_s == predict(DDP(), smaller).iteration_s
    assert method.change == "lossy"


def test_uncertainty_is_that_of_messages_and_of_the_model():
    fast, slow = profile_of(ratio=0.01), profile_of(ratio=50.0)
    measured, estimated = (
        making.of_strategy(DDP(), Place(slow, estimated=known)) for known in (False, True)
    )
    assert measured.uncertainty == pytest.approx(0.06, abs=0.01)
    assert 0.2 < estimated.uncertainty < 0.3
    assert making.of_strategy(DDP(), Place(fast, estimated=True)).uncertainty < 0.04
    for method in making.outsiders(Place(profile_of(), 2)):
        assert method.low_s <= method.iteration_s <= method.high_s


def test_every_strategy_is_listed():
    methods = [*making.default_methods(Place(profile_of()))]
    assert {method.label.partition(":")[0] for method in methods} == set(strategy_names())
    assert all(method.changes for method in methods)


# --- memory --------------------------------------------------------------------------------------

SIZE = sum(bucket.size_bytes for bucket in profile_of().buckets)


@pytest.mark.parametrize(
    "strategy",
    [
        DreamDDP(5),
        DreamDDP(5, due="delayed", delay=2),
        DiLoCo(10),
        DiLoCo(10, delay=2),
        DiLoCo(10, wire="int4"),
        LocalSGD(3, wire="int8", outer="0.8/0.3"),
    ],
    ids=str,
)
def test_buffers_are_those_that_the_plan_reports(strategy):
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
    assert copies > 1
    assert DeFT().memory(profile, late).buffers_bytes == (copies - 1) * SIZE
    assert A2CiD2().memory(profile).buffers_bytes == 4 * SIZE
    wired = DreamDDP(2, wire="int8").plan(profile)
    sent = [
        sum(profile.bytes_of(t.payload) for t in wired.transfers if phase in t.phases)
        for phase in wired.cycle
    ]
    assert DreamDDP(2, wire="int8").memory(profile, wired).staged_bytes == max(sent)
    assert DreamDDP(2).memory(profile, DreamDDP(2).plan(profile)).staged_bytes == 0


@pytest.mark.parametrize(
    ("strategy", "copies"), [(NoLoCo(2, rounds=3), 1), (NoLoCo(2, rounds=3, gamma=0.1), 2)], ids=str
)
@pytest.mark.parametrize("ranks", [1, 2, 7, 8])
def test_copies_of_messages_between_pairs_are_those_of_one_rank(strategy, copies, ranks):
    profile = profile_of(ranks=ranks)
    assert strategy.memory(profile, strategy.plan(profile)).staged_bytes == copies * SIZE


def test_a_rank_of_a_chain_holds_copies_of_its_own_sends():
    """Of the plan's sends, counted one by one for each rank and iteration."""
    profile, strategy = profile_of(ranks=5), Cyclic()
    plan, found = strategy.plan(profile), Counter()
    for t in plan.transfers:
        kind = plan.all_buffers[t.payload.buffer].kind
        size = profile.bytes_of(replace(t.payload, buffer=kind))
        for phase in (phase for phase in t.phases if phase >= plan.prologue):
            for iteration in range(phase, phase + t.before.lag + 1):
                for rank in t.ranks:
                    found[rank, (iteration - plan.prologue) % plan.period] += size
    assert strategy.memory(profile, plan).staged_bytes == max(found.values())


def test_shards_are_divided_and_activations_are_not():
    buckets = tuple(replace(b, activation_bytes=1000) for b in profile_of().buckets)
    place = Place(replace(profile_of(), buckets=buckets), 2)
    full, hybrid = making.full_shards(place).memory, making.hybrid_shards(place).memory
    assert full.state_bytes == 2 * SIZE / 8
    assert hybrid.state_bytes == 2 * SIZE / 2
    assert full.activations_bytes == hybrid.activations_bytes == 1000 * len(buckets)
    sizes = sorted(bucket.size_bytes for bucket in buckets)
    assert full.buffers_bytes == sizes[-1] + sizes[-2] + sizes[-1]


def test_devices_hold_whole_replicas_unless_methods_that_average_divide_them():
    place = place_of(profile_of(ratio=3.0), None, None, 4)
    for method in (*making.outsiders(place), *making.default_methods(place)):
        divided = method.sharded_memory
        if method.label in ("zero-3", "hsdp"):
            assert divided is None
        elif method.label == "one machine" or method.change == "averaged":
            assert divided is None or divided.total_bytes == method.memory.total_bytes / 4
        if method.label.startswith(("ddp", "wfbp", "deft")):
            assert divided is None
    predicted = predict_methods(place, max_staleness=4)
    whole = 4 * SIZE  # parameters, gradients, two moments
    verdict = decide(place, Work.of(), predicted=predicted, device_memory=whole - 1, shares=())
    assert not verdict.row("ddp").fits
    taken = verdict.best
    assert taken.sharded
    assert taken.memory == taken.method.sharded_memory
    assert launch_command(verdict) == (
        f"OFFBEAT_STRATEGY={taken.method.label} torchrun --nnodes 4 --nproc-per-node 4 train.py"
    )
    roomy = decide(place, Work.of(), predicted=predicted, device_memory=1e12, shares=())
    assert "OFFBEAT_NODES=auto torchrun --nnodes 4 --nproc-per-node 4" in launch_command(roomy)
    assert roomy.best.memory.total_bytes >= whole
    alone = decide(Place(profile_of(ratio=3.0)), Work.of(), max_staleness=1, shares=())
    assert launch_command(alone) is None


def test_devices_of_a_machine_train_by_the_plans_of_nodes():
    """Updates at the step, as gradients are averaged inside a machine first; torch's DDP averages
    over all devices in one ring."""
    flat = replace(profile_of(ratio=3.0), noise=GradientNoise(1.0, 4.0, 8.0, 0.1))
    place = place_of(flat, None, None, 4)
    assert place.profile.ranks == 16
    assert needs.critical_machines(place.profile) == needs.critical_machines(flat) / 4
    for strategy in (DreamDDP(5, due="forward"), DreamDDP(5)):
        method = making.of_strategy(strategy, place)
        at_step = predict(strategy.at_step(), flat).iteration_s
        assert method.iteration_s == pytest.approx(at_step, rel=1e-3)
        assert method.low_s < method.iteration_s < method.high_s
    everyone = place.by_device
    assert everyone.world_size == 16
    ddp = making.of_strategy(DDP(), place)
    assert ddp.iteration_s == predict(DDP(), everyone).iteration_s
    slower = predict(DDP(), with_slower_links(everyone, 1.03)).iteration_s
    assert ddp.high_s == pytest.approx(slower * 1.03, rel=1e-3)
    several = making.accumulation(place)
    plan = making.accumulating_plan(DDP().plan(everyone), int(several.label.split()[1]))
    assert several.iteration_s == predict_plan(plan, everyone).iteration_s
    half = predict(DDP(), with_smaller_messages(everyone, 0.5)).iteration_s
    assert making.half_precision(place).iteration_s == pytest.approx(half, rel=1e-6)


def test_the_command_of_machines_with_several_devices(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    profile_of(ranks=1).save("one.json")
    (tmp_path / "nodes.toml").write_text('hosts = 2\nranks = 2\nrate = "20mbit"')
    (tmp_path / "one.toml").write_text('hosts = 2\nrate = "20mbit"')
    there = ["--hosts", "2", "--rate", "20mbit", "--per-host", "2"]
    expected = {
        tuple(there): "--per-node 2 --strategies",
        ("--cluster", "nodes.toml"): "--cluster nodes.toml --strategies",
        ("--cluster", "one.toml", "--per-host", "2"): None,
    }
    for argv, words in expected.items():
        options = ["--profile", "one.json", "--max-staleness", "0", "--json"]
        assert cli.main(["advise", *argv, *options]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["devices"] == 2
        assert found["command"] is None if words is None else words in found["command"]
        if words is not None:
            assert cli.main([*found["command"].split()[1:-1], "missing.py"]) == 2
            assert "missing.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("delay", "profiled"), [('latency = "20ms"', False), ("", True)], ids=["delayed", "plain"]
)
def test_the_command_takes_a_profile_that_can_be_converted(
    delay, profiled, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    profile_of().save("p.json")
    (tmp_path / "c.toml").write_text(f'hosts = 4\nrate = "20mbit"\n{delay}')
    argv = ["--profile", "p.json", "--cluster", "c.toml", "--iteration-s", ".035", "--json"]
    assert cli.main(["advise", *argv, "--max-staleness", "0"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert ("--profile p.json" in found["command"]) == profiled
    assert "--device-speed 0.035s" in found["command"]
    assert cli.main([*found["command"].split()[1:-1], "missing.py"]) == 2
    assert "missing.py" in capsys.readouterr().err


# --- places --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "delay_s", "measured_s"),
    [(2, 0.02, 0.083), (4, 0.02, 0.2454), (2, 0.05, 0.203), (4, 0.05, 0.6057)],
)
def test_estimated_latency_is_that_of_measured_messages(ranks, delay_s, measured_s):
    """64 KB at 100 Mbit/s, back to back (benchmarks, connections)."""
    there = on_networks(profile_of(), ranks, [Network("net", 1e8, delay_s)])
    link = there.default_link
    assert link.latency_s + 65536 / link.bytes_per_s == pytest.approx(measured_s, rel=0.06)


def test_loss_limits_the_rate_of_a_connection():
    """4 MB between two ranks at 100 Mbit/s with 20 ms and 0.1 % took 2.9 s over one connection and
    1.17 s over four (benchmarks, connections)."""
    for connections, measured_s in ((1, 2.8948), (4, 1.1717)):
        network = Network("net", 1e8, 0.02, 0.001, connections)
        link = on_networks(profile_of(), 2, [network]).default_link
        assert link.latency_s + 2**22 / link.bytes_per_s == pytest.approx(measured_s, rel=0.3)
    assert Network("net", 1e8, 0.02).tcp_rate_bps == 1e8


def test_places_of_one_device_and_of_a_measured_network():
    one = replace(profile_of(ranks=1), noise=GradientNoise(1.0, 4.0, 8.0, 0.1))
    place = place_of(one, 4, 2e8)
    assert (place.machines, place.rate_bps, place.estimated) == (4, 2e8, True)
    assert place.profile.compute_s == pytest.approx(one.compute_s)
    assert place.profile.noise.noise_sq == 2.0  # of the mean of four batches
    many = profile_of(ranks=4)
    assert place_of(many, None, None).profile == many
    assert place_of(many, 8, None).profile == extrapolate(many, hosts=8)
    assert not place_of(many, None, None).estimated
    assert place_of(many, 8, None).estimated
    assert place.by_device == place.profile
    assert replace(place, devices=2).by_device.world_size == 8
    for hosts, rate_bps in ((None, 1e8), (4, None), (1, 1e8)):
        with pytest.raises(ValueError, match=r"hosts|rate"):
            place_of(one, hosts, rate_bps)


def test_places_of_cluster_files():
    cluster = Cluster.from_toml(
        """
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
    )
    one = replace(profile_of(ranks=1), other_s=0.0)
    place = place_on_cluster(one, cluster)
    assert place.rate_bps == 20e6  # of the slowest uplink
    assert place.profile.default_link.asked_latency_s == 0.03
    times = [place.profile.compute_s * scale for scale in place.profile.rank_scale]
    assert times == pytest.approx([one.compute_s * x for x in (1, 2, 1)])
    assert place.fastest_machine.compute_s == pytest.approx(one.compute_s)
    # In 2 s, two fast machines and a slow one compute 2 + 2 + 1 batches.
    even = place.with_even_times().profile
    assert even.slowest().compute_s == pytest.approx(2 * one.compute_s * 3 / 5)
    rest = place.without_slowest()
    assert rest.machines == 2
    assert rest.profile.slowest().compute_s == pytest.approx(one.compute_s)
    assert rest.without_slowest() is None
    assert rest.with_even_times() is None
    with pytest.raises(ValueError, match="rate of link 'net'"):
        place_on_cluster(profile_of(), Cluster.simple(2))


def test_loss_also_limits_other_rates_of_a_measured_network():
    network = Network("net", 1e9, 0.02, 0.01)
    described = on_networks(profile_of(), 4, [network])
    for rate_bps in (5e8, 2e9, 2e6):
        there = Place(described).at_rate(rate_bps).profile.default_link
        expected = on_networks(profile_of(), 4, [replace(network, rate_bps=rate_bps)]).default_link
        assert there.bytes_per_s == pytest.approx(expected.bytes_per_s)
        assert there.asked_rate_bps == rate_bps
    better = replace(described, links=(replace(described.default_link, bytes_per_s=1e6),))
    twice = Place(better).at_rate(2e9).profile.default_link
    assert twice.bytes_per_s == pytest.approx(1e6)  # more than by the formula, and no less than now


def test_another_rate_changes_all_networks_by_the_same_factor():
    networks = (Network("net", 5e7), Network("fast", 1e9))
    profile = on_networks(profile_of(), 4, networks)
    for place in (Place(profile), Place(profile, networks=networks)):
        rates = [link.asked_rate_bps for link in place.at_rate(1e8).profile.links]
        assert rates == [1e8, pytest.approx(2e9)]
        assert place.at_rate(5e7).profile.links[1].bytes_per_s == pytest.approx(
            profile.links[1].bytes_per_s
        )


def nodes_of(*sizes):
    inside = Link(INSIDE, 1e-4, 1e9)
    return replace(profile_of(ranks=len(sizes)), topology=sizes, inside=inside)


def test_noise_of_measured_nodes_is_that_of_their_ranks():
    """The mean of two nodes of four ranks is that of eight gradients."""
    nodes = replace(nodes_of(4, 4), noise=GradientNoise(1.0, 4.0, 8.0, 0.1))
    for per_host, expected in ((None, 8.0), (8, 4.0), (1, 32.0)):
        place = Question(Work.of(), devices=per_host).place(nodes)
        assert place.profile.noise.noise_sq == expected
        assert place.profile.topology == (() if per_host == 1 else (per_host or 4,) * 2)


def test_machines_of_unequal_sizes_are_refused():
    file = 'hosts = 2\nranks = 8\nrate = "1gbit"\n[[overrides]]\nhost = 1\nranks = 4'
    with pytest.raises(ValueError, match=r"ranks of the hosts \(8, 4\) must be equal"):
        place_on_cluster(profile_of(ranks=1), Cluster.from_toml(file))
    nodes = nodes_of(8, 4)
    with pytest.raises(ValueError, match=r"topology of the profile \(8, 4\) must be equal"):
        Question(Work.of()).place(nodes)
    own = Cluster.from_toml('hosts = 2\nrate = "20mbit"\nprocesses_per_host = 2')
    with pytest.raises(ValueError, match=r"processes_per_host \(2\) must be 1"):
        place_on_cluster(profile_of(ranks=1), own)


def test_jitter_of_the_question_replaces_that_of_the_hosts(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('hosts = 2\nrate = "20mbit"\n[[overrides]]\nhost = 1\njitter = 0.1')
    for jitter, expected in ((0.2, [0.2, 0.2]), (None, [0.0, 0.1])):
        place = Question(Work.of(), cluster=file, jitter=jitter).place(profile_of(ranks=1))
        assert [*place.profile.jitters] == expected


def test_uplinks_bound_collectives_and_not_servers():
    """A ring sends as fast as the slowest uplink; pulls from a server do not pass uplinks of
    workers."""
    text = 'hosts = 4\nrate = "80mbit"\nuplink = "{}"'
    thin, plain = (
        place_on_cluster(profile_of(ranks=1), Cluster.from_toml(text.format(up)))
        for up in ("8mbit", "80mbit")
    )
    slow = place_of(profile_of(ranks=1), 4, 8e6)
    assert thin.profile == slow.profile
    assert plain.ranks == slow.ranks == Ranks()

    def seconds(place):
        return [making.of_strategy(one, place).iteration_s for one in (DDP(), SSP(s=0))]

    (ring_s, served_s), (slow_ring_s, slow_served_s) = map(seconds, (thin, slow))
    assert ring_s == slow_ring_s
    assert served_s < slow_served_s
    # The server sends to four workers at 8 Mbit/s. If it receives slowly, too, all pushes share its
    # link from the first one on, which follows the first pull; otherwise each has its uplink.
    size_bytes = sum(bucket.size_bytes for bucket in thin.profile.buckets)
    pull_s = size_bytes / (0.94 * 8e6 / 8)
    first_s = pull_s * sum(0.95**n for n in range(4))
    compute_s = thin.profile.compute_s
    assert served_s == pytest.approx(4 * pull_s + compute_s + pull_s, rel=1e-3)
    assert slow_served_s == pytest.approx(first_s + compute_s + 4 * pull_s, rel=1e-3)
    assert thin.at_rate(1e8).ranks == thin.with_machines(5).ranks == Ranks()


# --- needs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [DDP(), LocalSGD(5), DreamDDP(3)], ids=str)
def test_needed_rates_are_those_of_a_scan(strategy):
    place = Place(profile_of())
    method = making.of_strategy(strategy, place)
    found = needs.rates_of(method.seconds_at, place, now_s=method.iteration_s)
    needed_s = place.profile.compute_s
    grid = [place.rate_bps * 1.02**i for i in range(-150, 250)]
    shares = [needed_s / method.seconds_at(place.at_rate(rate_bps)) for rate_bps in grid]
    for share, rate_bps in found.items():
        reached = [r for r, s in zip(grid, shares, strict=True) if s >= share]
        if rate_bps is None:
            assert not reached
        else:
            assert reached[0] / 1.03 <= rate_bps <= reached[0] * needs.TOLERANCE * 1.001
    known = [rate_bps for rate_bps in found.values() if rate_bps is not None]
    assert known == sorted(known)


def bisected_rate(share_at, share):
    """The least rate for a share by plain bisection, if the share rises with the rate."""
    lower, upper = needs.LEAST_RATE_BPS, needs.MOST_RATE_BPS
    if share_at(upper) < share:
        return None
    if share_at(lower) >= share:
        return lower
    while upper > lower * needs.TOLERANCE:
        middle = math.sqrt(lower * upper)
        lower, upper = (middle, upper) if share_at(middle) < share else (lower, middle)
    return upper


@pytest.mark.parametrize(
    "strategy",
    [DDP(), LocalSGD(5), DreamDDP(3, due="forward"), DreamDDP(4, due="delayed")],
    ids=str,
)
def test_needed_rates_with_jitter_are_those_of_a_bisection_that_tries_twice_as_many(strategy):
    place = Place(replace(profile_of(layers=4), jitter=0.1))
    method = making.of_strategy(strategy, place)
    needed_s, tried = place.profile.compute_s, {}

    def seconds_at(there):
        rate_bps = round(there.rate_bps, 3)
        if rate_bps not in tried:
            tried[rate_bps] = method.seconds_at(there)
        return tried[rate_bps]

    def share_at(rate_bps):
        return needed_s / seconds_at(place.at_rate(rate_bps))

    found = needs.rates_of(seconds_at, place, now_s=method.iteration_s, bound_at=method.bound_at)
    count = len(tried)
    slow = {share: bisected_rate(share_at, share) for share in found}
    assert 2 * count <= len(tried)
    for share, rate_bps in slow.items():
        if rate_bps is None:
            assert found[share] is None
            continue
        # A plan that is made anew may be slower at a greater rate, which a bisection misses.
        failed = max(r for r, seconds in tried.items() if needed_s / seconds < share)
        least, most = max(rate_bps, failed) / needs.TOLERANCE, max(rate_bps, failed)
        assert least * (1 - 1e-3) <= found[share] <= most * needs.TOLERANCE * (1 + 1e-3)


def test_waiting_on_a_line_is_known_from_three_rates():
    tried = []

    def share_at(rate_bps):
        tried.append(rate_bps)
        return 1 / (1 + 1e8 / rate_bps)

    found = needs.rates_for(share_at, needs.SHARES, known={1e6: 1 / 101})
    assert found == pytest.approx({s: 1e8 / (1 / s - 1) for s in needs.SHARES}, rel=1e-3)
    assert len(tried) <= 3


def test_a_needed_rate_lies_above_all_rates_that_fail():
    def share_at(rate_bps):
        return 0.3 if 4e8 < rate_bps < 6e8 else rate_bps / (rate_bps + 1e8)

    found = needs.rates_for(share_at, (0.5, 0.95), known={5e8: 0.3})
    assert 6e8 <= found[0.5] <= 6e8 * needs.TOLERANCE
    assert found[0.95] == pytest.approx(1.9e9, rel=0.05)
    assert needs.rates_for(lambda _: 0.4, (0.5,), known={1e6: 0.4}) == {0.5: None}
    assert needs.rates_for(lambda _: 1.0, (0.5,), known={1e6: 1.0})[0.5] == needs.LEAST_RATE_BPS


@pytest.mark.parametrize("latency_s", [1e-3, 0.03, 0.2])
def test_the_last_machine_that_pays_is_that_of_a_scan(latency_s):
    place = Place(profile_of(ratio=0.3, latency_s=latency_s))
    seconds_at = making.of_strategy(LocalSGD(4), place).seconds_at
    alone_s = place.profile.compute_s
    speeds = [1 / alone_s] + [n / seconds_at(place.with_machines(n)) for n in range(2, 20)]
    gains = [(b - a) * alone_s for a, b in pairwise(speeds)]
    expected = max((n for n, gain in enumerate(gains, 2) if gain >= needs.PAYS), default=1)
    assert needs.last_paying_machine(seconds_at, place, most=19) == expected


@pytest.mark.parametrize(("exposed", "expected"), [(0.4, 19), (2.0, 1)])
def test_a_second_machine_that_does_not_pay_does_not_end_the_search(exposed, expected):
    """From one machine to two, a ring begins to send; from two to many, bytes only double."""
    place = Place(profile_of(ratio=0.3))
    compute_s = place.profile.compute_s

    def seconds_at(there):
        return compute_s * (1 + exposed * 2 * (there.machines - 1) / there.machines)

    second = 2 / seconds_at(place.with_machines(2)) - 1 / compute_s
    assert second < needs.PAYS / compute_s
    assert needs.last_paying_machine(seconds_at, place, most=19) == expected


def test_noise_gives_the_machines_that_double_the_samples():
    noise = GradientNoise(1.0, gradient_sq=2.0, noise_sq=3.0, step_size=0.1)
    assert needs.critical_machines(replace(profile_of(), noise=noise)) == 4 * 3.0 / 2.0
    assert needs.critical_machines(profile_of()) is None


# --- work ----------------------------------------------------------------------------------------


def test_work_counts_batches_of_one_device():
    assert Work.of(samples=1e6, batch=50).batches == 20_000
    assert Work.of(iterations=300).batches == 300
    assert Work.of().batches == 1000
    assert Work.of(iterations=300).batches_of("deft") == (300,)
    by_label = Work.to_loss(4.25, {"ddp": [100.0, 120.0], "local-sgd": [150.0]})
    assert by_label.text == "to loss 4.25"
    assert by_label.batches_of("local-sgd", None) == (150,)
    assert by_label.batches_of("wfbp", "ddp") == (100, 120)
    assert by_label.batches_of("deft") is None
    for given in ({"samples": 1e6}, {"samples": 5, "batch": 1, "iterations": 2}, {"batch": 0}):
        with pytest.raises(ValueError, match=r"must|need|give"):
            Work.of(**given)


# --- verdicts ------------------------------------------------------------------------------------


def test_one_machine_is_best_where_messages_take_too_long():
    place = Place(profile_of(ratio=300.0, ranks=2))
    verdict = decide(place, Work.of(), max_staleness=0)
    assert verdict.best.method.label == "one machine"
    # At the rate from which machines pay, they do; below they do not.
    rate_bps = verdict.worthwhile_bps
    faster = decide(place.at_rate(1.1 * rate_bps), Work.of(), max_staleness=0, shares=())
    slower = decide(place.at_rate(rate_bps / 1.1), Work.of(), max_staleness=0, shares=())
    assert faster.row(verdict.rows[0].method.label) is not None
    times = [
        min(row.seconds for row in one.rows if row.method.machines == 2 and row.method.strategy)
        < one.row("one machine").seconds
        for one in (faster, slower)
    ]
    assert times == [True, False]


def test_what_does_not_fit_is_not_taken():
    place = Place(profile_of(ratio=3.0))
    free = decide(place, Work.of(), max_staleness=1, shares=())
    most = free.best.method.memory.total_bytes
    rows = {row.method.label: row for row in free.rows}
    lighter = [r for r in rows.values() if r.method.memory.total_bytes < most]
    verdict = (
        decide(place, Work.of(), max_staleness=1, device_memory=most - 1, shares=())
        if lighter
        else None
    )
    if verdict is not None:
        assert verdict.best.fits
        assert verdict.best.method.memory.total_bytes < most
        assert not verdict.row(free.best.method.label).fits
    least = min(row.method.memory.total_bytes for row in free.rows)
    with pytest.raises(ValueError, match=r"device_memory \(.+ GB\) must be at least"):
        decide(place, Work.of(), max_staleness=1, device_memory=least - 1, shares=())


def test_hours_and_cost_follow_from_the_iteration():
    place = Place(profile_of(ratio=3.0), devices=2)
    verdict = decide(
        place, Work.of(samples=64_000, batch=16), max_staleness=1, price=3.0, shares=()
    )
    for row in verdict.rows:
        machines = row.method.machines
        expected_s = 4000 / (machines * 2) * row.method.iteration_s
        assert row.seconds == pytest.approx(expected_s)
        assert row.cost == pytest.approx(3.0 * machines * expected_s / 3600)
    times = [row.seconds for row in verdict.rows]
    assert times == sorted(times)


def test_help_is_what_a_simulation_there_gives():
    place = Place(profile_of(ratio=3.0), estimated=True)
    verdict = decide(place, Work.of(), max_staleness=1, shares=(), rate_text=rate)
    strategy = verdict.best.method.strategy
    now_s = predict(strategy, place.profile).iteration_s / 4
    saved = {one.text: one.saved for one in verdict.helps}
    twice = extrapolate(place.profile, rate_bps=2 * place.rate_bps)
    fifth = extrapolate(place.profile, hosts=5)
    expected = {
        rate(2 * place.rate_bps): 1 - predict(strategy, twice).iteration_s / 4 / now_s,
        "a fifth machine": 1 - predict(strategy, fifth).iteration_s / 5 / now_s,
    }
    assert saved == pytest.approx(expected)


def test_a_verdict_to_a_loss_is_for_the_batches_of_each_method():
    """Times by hand; the spread over seeds widens the range; other machines have no losses."""
    place = Place(profile_of(ratio=3.0))
    predicted = predict_methods(place, max_staleness=3)
    labels = [text_of(strategy) for strategy in predicted.learnt_differently]
    assert labels[0] == "ddp"
    slow, *others = labels[1:]
    work = Work.to_loss(2.0, {"ddp": [400.0, 480.0], slow: [4000.0, 3600.0], "one machine": [300]})
    verdict = decide(place, work, predicted=predicted, shares=())
    for row in verdict.rows:
        if row.method.label in (*others, "ddp, fp16 hook"):
            assert row.seconds is row.range_s is None
        elif row.method.same_numbers:  # zero-3 and others that send every gradient
            assert row.seconds == pytest.approx(440 / 4 * row.method.iteration_s)
            assert row.range_s == pytest.approx(
                (100 * row.method.low_s, 120 * row.method.high_s), rel=1e-12
            )
    assert verdict.row("one machine").seconds == pytest.approx(300 * place.profile.compute_s)
    known = [row.seconds for row in verdict.rows if row.seconds is not None]
    assert verdict.best.seconds == min(known)
    assert [one.text for one in verdict.helps if "machine" in one.text] == []
    overlapping = {
        row.method.label
        for row in verdict.rows
        if row.batches
        and row is not verdict.best
        and min(row.batches) * row.method.batch_s
        <= max(verdict.best.batches) * verdict.best.method.batch_s
    }
    assert {row.method.label for row in verdict.rows_within_spread} == overlapping
    with pytest.raises(ValueError, match="no method has reached the loss"):
        decide(place, Work.to_loss(2.0, {}), predicted=predicted, shares=())


def test_one_machine_is_best_to_a_loss_if_more_batches_at_once_do_not_help():
    """All machines together need more iterations than one, so no rate is enough."""
    place = Place(profile_of(ratio=1.0))
    predicted = predict_methods(place, max_staleness=0)
    work = Work.to_loss(1.0, {"ddp": [500.0], "one machine": [100.0]})
    verdict = decide(place, work, predicted=predicted, shares=())
    assert verdict.best.method.label == "one machine"
    assert verdict.worthwhile_bps is None
    half = Work.to_loss(1.0, {"ddp": [200.0], "one machine": [100.0]})  # half of the iterations
    verdict = decide(place.at_rate(1e6), half, predicted=None, max_staleness=0, shares=())
    rate_bps = verdict.worthwhile_bps
    for times, is_faster in ((1.1, True), (1 / 1.1, False)):
        there = decide(place.at_rate(times * rate_bps), half, max_staleness=0, shares=())
        assert (there.together.seconds < there.row("one machine").seconds) == is_faster


def first_sentences(verdict):
    text = verdict_text(verdict, notes=(), command=None, width=80, verbose=False)
    return " ".join(text.partition("\n\n")[0].split())


def test_the_sentence_about_help_states_a_rate_once():
    """Twice the rate is enough, too, but the least rate states it already."""
    verdict = decide(Place(profile_of(ratio=3.0, ranks=2)), Work.of(), max_staleness=0, shares=())
    twice = rate(2 * verdict.place.rate_bps)
    verdict = replace(verdict, helps=(replace(verdict.helps[0], text=twice, saved=0.9),))
    name = verdict.together.method.label
    expected = f"With {rate(verdict.worthwhile_bps)} or more, all machines together ({name}) are"
    assert f"{expected} faster than one." in first_sentences(verdict)
    nearly = replace(verdict.together, batches=tuple(b * 1e-3 for b in verdict.together.batches))
    equal = replace(verdict, together=nearly)
    assert f"({name}) are faster by at most 2 %." in first_sentences(equal)


def test_the_sentence_about_no_help_states_the_share_of_compute():
    place = Place(profile_of(ratio=0.05))
    predicted = predict_methods(place, max_staleness=0)
    to_loss = Work.to_loss(1.0, {"ddp": [100.0], "one machine": [1000.0]})
    for work, words in (
        (to_loss, "bit/s would not help: compute takes "),
        (Work.of(), "would save"),
    ):
        verdict = decide(place, work, predicted=predicted, shares=(), rate_text=rate)
        assert words in first_sentences(verdict)
    verdict = decide(place, to_loss, predicted=predicted, shares=(), rate_text=rate)
    share = place.profile.compute_s / verdict.best.method.iteration_s
    # ZeRO-3 divides the update, so its iteration may take less than the compute of one device.
    assert f"compute takes {min(100, 100 * share):.0f} % of the time." in first_sentences(verdict)
    two = replace(verdict, helps=2 * verdict.helps)
    assert f"Neither {two.helps[0].text} nor {two.helps[0].text} would" in first_sentences(two)


def test_loss_limits_rates_until_there_are_more_connections():
    text = 'hosts = 3\nrate = "200mbit"\nlatency = "40ms"\nloss = 0.001'
    lossy = place_on_cluster(profile_of(ranks=1), Cluster.from_toml(text))
    assert lossy.at_rate(1e9).profile.links[0].bytes_per_s == lossy.profile.links[0].bytes_per_s
    one_bps = Network("net", 2e8, 0.04, 0.001).tcp_rate_bps
    count, there = needs.more_connections(lossy)
    assert count == min(math.ceil(2e8 / one_bps), needs.MOST_CONNECTIONS)
    assert there.networks[0].tcp_rate_bps == min(2e8, count * one_bps)
    assert needs.more_connections(place_of(profile_of(ranks=1), 3, 2e8)) is None
    helps = decide(lossy, Work.of(), max_staleness=1, shares=()).helps
    assert f"{count} connections per link" in [one.text for one in helps]


@pytest.mark.parametrize(("delay_ms", "noted"), [(10, False), (50, True)])
def test_a_window_that_linux_does_not_allow_is_noted(delay_ms, noted):
    """1 Gbit/s have 2.5 MB and 12.5 MB under way in a round trip."""
    text = f'hosts = 3\nrate = "1gbit"\nlatency = "{delay_ms}ms"'
    place = place_on_cluster(profile_of(ranks=1), Cluster.from_toml(text))
    assert place.networks[0].window_bytes == pytest.approx(1e9 / 8 * 2 * delay_ms / 1e3)
    assert place.with_connections(5).networks[0].window_bytes == pytest.approx(
        place.networks[0].window_bytes / 5
    )
    found = decide(place, Work.of(), max_staleness=1, shares=())
    words = verdict_text(found, notes=(), command=None, width=80, verbose=False).split()
    assert ("are 12.5 MB under way on a connection" in " ".join(words)) is noted


def test_slower_links_take_longer_in_every_method():
    place = Place(profile_of(ratio=2.0))
    slower = replace(place, profile=with_slower_links(place.profile, 3.0))
    for method in making.outsiders(place):
        assert method.seconds_at(slower) >= method.seconds_at(place) * (1 - 1e-9)


# --- the command ---------------------------------------------------------------------------------


def test_texts_of_rates_and_times():
    assert rate(5e4) == "50 kbit/s"
    assert [least_rate(x) for x in (None, 1e5, 9.96e8, 1.234e8, 2e12)] == [
        *("-", "any", "1 Gbit/s", "120 Mbit/s", "2 Tbit/s"),
    ]
    assert [span(x) for x in (2.0, 400.0, 40 * 3600, 40 * 86400)] == [
        *("2.0 s", "6.7 min", "40 h", "40 d"),
    ]


def test_the_verdict_of_a_profile_of_one_device(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    profile_of(ranks=1).save("one.json")
    argv = ["advise", "--profile", "one.json", "--hosts", "4", "--rate", "20mbit"]
    argv += [
        "--max-staleness",
        "1",
        "--samples",
        "2M",
        "--batch",
        "32",
        "--price",
        "1.5",
        "--device-memory",
        "24GB",
    ]
    assert cli.main([*argv, "-o", "v.json", "--iteration-s", ".5"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    kept = json.loads((tmp_path / "v.json").read_text())
    assert "4 machines at 20 Mbit/s, 2 M samples in batches of 32: " in printed
    assert f"{kept['best']} takes " in printed
    assert "Every method fits into 24 GB" in printed
    assert "at 1.5 per machine and hour" in printed
    assert "500 ms of compute per iteration" in printed
    rows = {row["method"]: row for row in kept["methods"]}
    assert rows["one machine"]["seconds"] == pytest.approx(2e6 / 32 * 0.5)
    assert {"one machine", "ddp", "zero-3"} <= rows.keys()
    assert cli.main(["compare", *kept["command"].split()[2:-1], "missing.py"]) == 2
    assert "missing.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "advise takes a script to measure, or --profile"),
        (["t.py"], "hosts and rate (not given) must describe the network"),
        (["--hosts", "4", "t.py"], "rate (not given) must describe the network"),
        (["--hosts", "1", "--rate", "1gbit", "t.py"], "hosts (1) must be at least 2"),
        (["--hosts", "2", "--rate", "fast", "t.py"], "--rate ('fast')"),
        (["--profile", "one.json"], "hosts and rate (not given) must"),
        (["--profile", "one.json", "--hosts", "4"], "rate (not given) must"),
        (["--profile", "p.json", "--samples", "1M"], "add --batch N"),
        (["--profile", "p.json", "--samples", "many", "--batch", "2"], "as in 10M or 2e6"),
        (["--profile", "p.json", "--device-memory", "24"], "as in 24GB"),
        (["--profile", "p.json", "--iteration-s", "0"], "must be a number of seconds above 0"),
        (["--profile", "p.json", "--iteration-s", "1", "--device-speed", "2x"], "give one"),
        (["--hosts", "2", "--rate", "1gbit", "--price", "-1", "t.py"], "price (-1) must be a nu"),
        (["--profile", "p.json", "--max-staleness", "-1"], "max_staleness (-1) must be at least"),
        (["--profile", "p.json", "--rate", "unlimited"], "--rate (unlimited) must be a number"),
        (["--profile", "p.json", "--per-host", "0"], "--per-host (0) must be at least 1"),
        (["--profile", "p.json", "--cluster", "c.toml", "--hosts", "2"], "--cluster replaces"),
        (["--profile", "p.json", "--rehearse"], "--rehearse needs a script"),
        (["--profile", "p.json", "--seeds", "0,1"], "are for --rehearse"),
        (["--rehearse", "--samples", "1M", "--batch", "2", "t.py"], "must be left out with --reh"),
        (["--rehearse", "--target", "accuracy=.9", "t.py"], "must be a loss in a rehearsal"),
        (
            ["--rehearse", "--profile", "p.json", "--per-host", "2", "--sample", "2", "t.py"],
            "sample must be left out where replicas have several ranks",
        ),
    ],
)
def test_wrong_questions_are_one_line(argv, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    profile_of(ranks=1).save("one.json")
    profile_of().save("p.json")
    (tmp_path / "t.py").write_text("")
    assert cli.main(["advise", *argv]) == 2
    printed = capsys.readouterr().err
    assert words in printed
    assert printed.count("\n") == 1


SCRIPT = """
import sys, torch, offbeat
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
optimizer = torch.optim.Adam(model.parameters())
model, optimizer = offbeat.prepare(model, optimizer)
for _ in range(40):
    optimizer.zero_grad()
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.usefixtures("forked_ranks")
def test_a_script_is_measured_on_one_device(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    argv = ["advise", "--hosts", "3", "--rate", "50mbit", "--max-staleness", "0", "--json"]
    argv += ["train.py", "--lr", "1"]
    assert cli.main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["machines"], found["rate_bps"]) == (3, 50e6)
    memory = {row["method"]: row["memory_bytes"] for row in found["methods"]}["one machine"]
    parameters = 4 * (64 * 256 + 256 + 256 * 8 + 8)
    assert memory["parameters_bytes"] == parameters
    assert math.isclose(memory["state_bytes"], 2 * parameters, rel_tol=0.01)
    assert memory["activations_bytes"] > 0
    assert found["compute"]["iteration_s"] > 0
    assert "--profile" not in found["command"]


LEARNING = """
import sys, torch, offbeat
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), float(sys.argv[1]))
model, optimizer = offbeat.prepare(model, optimizer)
weights = torch.arange(8.0) / 4
for _ in range(int(sys.argv[2])):
    optimizer.zero_grad()
    x = torch.randn(16, 8)
    (model(x)[:, 0] - x @ weights).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.usefixtures("forked_rehearsals")
def test_rehearsed_losses_decide(tmp_path, capsys, monkeypatch):
    """Times are those of the rehearsed iterations, and the verdict keeps them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(LEARNING)
    buckets = (Bucket("b", 0.01, 0.02, 36, tensors=("weight", "bias")),)
    Profile(buckets, (Link("net", 0.2, 1e6),), 2).save("p.json")
    argv = ["advise", "--rehearse", "--profile", "p.json", "--max-staleness", "0"]
    argv += ["--target", "loss=0.5", "-o", "v.json"]
    assert cli.main([*argv, "train.py", "0.05", "60"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    found = json.loads((tmp_path / "v.json").read_text())
    assert "2 machines at" in printed
    assert "to loss 0.5: " in printed
    assert "losses are those of a rehearsal of 60 iterations with one seed" in printed
    assert "--target loss=0.5" in printed
    counts = found["rehearsal"]["iterations"]
    rows = {row["method"]: row for row in found["methods"]}
    assert counts.keys() == {"ddp", "one machine"}
    for label, (count,) in counts.items():
        assert rows[label]["seconds"] == pytest.approx(count * rows[label]["iteration_s"])
    assert rows["zero-3"]["seconds"] == counts["ddp"][0] * rows["zero-3"]["iteration_s"]
    (folder,) = (tmp_path / "runs").iterdir()
    for label, path in (("ddp", "ddp"), ("one machine", "one-machine/one-machine")):
        curve = json.loads((folder / path / "rep0" / "curve.json").read_text())
        means = [sum(curve["losses"][i : i + 10]) / 10 for i in range(51)]
        assert counts[label] == [next(i for i, x in enumerate(means) if x <= 0.5) + 10]
        ends_s = [rows[label]["iteration_s"] * (i + 1) for i in range(60)]
        assert curve["ends_s"] == pytest.approx(ends_s, rel=1e-6)
    kept = KeptVerdict.from_dict(found)
    assert kept.target_loss == 0.5
    assert kept.best.to_loss_s[1] == rows[found["best"]]["seconds"]

    again = [word.replace("loss=0.5", "loss=0.0") for word in argv]
    assert cli.main([*again, "--resume", str(folder), "train.py", "0.05", "60"]) == 1
    assert "no loss has decreased to loss 0" in " ".join(capsys.readouterr().err.split())


def test_rehearsed_methods_have_the_rates_of_each_machine(tmp_path, monkeypatch):
    """Gossip and servers send at the rates of their own machines."""
    (tmp_path / "train.py").write_text("")
    text = 'hosts = 3\nrate = "100mbit"\n[[overrides]]\nhost = 1\nrates = { net = "20mbit" }'
    place = place_on_cluster(profile_of(ranks=1), Cluster.from_toml(text))
    defined = []

    def interrupt(rehearsal, run_dir, *_, **__):
        defined.append(rehearsal)
        return RehearsalOutcome(run_dir, interrupted=True)

    monkeypatch.setattr(rehearsed_methods, "rehearse_script", interrupt)
    losses = rehearsed_methods.rehearse_methods(
        predict_methods(place, max_staleness=0),
        (str(tmp_path / "train.py"),),
        {"seeds": (0,)},
        profile_of(ranks=1),
        tmp_path / "runs",
        Progress(),
        resume=False,
    )
    assert losses.interrupted
    assert place.ranks != Ranks()
    assert [one.differences for one in defined] == [place.ranks]


SEEDED = LEARNING.replace(
    "torch.manual_seed(0)",
    "import os\ntorch.manual_seed(10 * int(os.environ['OFFBEAT_SEED']) + int(os.environ['RANK']))",
)


def losses_of(seed, ranks, count):
    """Losses of the script on ranks that average their gradients."""
    models, batches = [], []
    for rank in range(ranks):
        torch.manual_seed(10 * seed + rank)
        models.append(torch.nn.Linear(8, 1))
        batches.append([torch.randn(16, 8) for _ in range(count)])
    model, weights = models[0], torch.arange(8.0) / 4
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for x in map(torch.cat, zip(*batches, strict=True)):
        optimizer.zero_grad()
        loss = (model(x)[:, 0] - x @ weights).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.timeout(300)  # a rehearsal of each method and seed
@pytest.mark.usefixtures("forked_rehearsals")
def test_rehearsed_losses_of_machines_with_several_devices(tmp_path, capsys, monkeypatch):
    """All devices have batches of their own, and the spread over seeds widens the range."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SEEDED)
    buckets = (Bucket("b", 0.01, 0.02, 36, tensors=("weight", "bias")),)
    Profile(buckets, (Link("net", 0.2, 1e6),), 2).save("p.json")
    argv = ["advise", "--rehearse", "--profile", "p.json", "--per-host", "2", "--seeds", "0,1"]
    argv += ["--max-staleness", "0", "--iterations", "30", "--target", "loss=0.5", "--json"]
    assert cli.main([*argv, "train.py", "0.05", "60"]) == 0
    found = json.loads(capsys.readouterr().out)
    counts = found["rehearsal"]["iterations"]
    rows = {row["method"]: row for row in found["methods"]}
    for label, ranks, iterations in (("ddp", 4, 30), ("one machine", 2, 60)):
        expected = []
        for seed in range(2):
            losses = losses_of(seed, ranks, iterations)
            means = [sum(losses[i : i + 10]) / 10 for i in range(iterations - 9)]
            expected.append(next(i for i, mean in enumerate(means) if mean <= 0.5) + 10)
        assert counts[label] == expected
        row = rows[label]
        assert row["batches_by_seed"] == [ranks * count for count in expected]
        assert row["seconds"] == pytest.approx(fmean(expected) * row["iteration_s"])
        low_s, high_s = row["iteration_range_s"]
        assert row["range_s"] == pytest.approx([min(expected) * low_s, max(expected) * high_s])
    assert len(set(counts["ddp"])) == 2
    assert rows["hsdp"]["seconds"] == pytest.approx(
        fmean(counts["ddp"]) * rows["hsdp"]["iteration_s"]
    )
    (folder,) = (tmp_path / "runs").iterdir()
    for path, ranks, label in (("ddp", 4, "ddp"), ("one-machine/one-machine", 2, "one machine")):
        curve = json.loads((folder / path / "rep0" / "curve.json").read_text())
        assert (curve["ranks"], curve["trained"]) == (ranks, ranks)
        first_s, *_, last_s = curve["ends_s"]
        each_s = (last_s - first_s) / (len(curve["ends_s"]) - 1)
        assert each_s == pytest.approx(rows[label]["iteration_s"], rel=1e-6)


def curve_of(label, losses, iteration_s, *, ranks=4, input_elements=0.0):
    ends_s = tuple(iteration_s * (i + 1) for i in range(len(losses)))
    return RehearsedCurve(label, ranks, ranks, tuple(losses), ends_s, input_elements=input_elements)


def test_losses_of_all_seeds_count():
    predicted = predict_methods(Place(profile_of(ratio=3.0)), max_staleness=3)
    ddp, other, *_ = (text_of(strategy) for strategy in predicted.learnt_differently)
    times = {method.label: method.iteration_s for method in predicted.methods}
    falls = [[9.0] * 20 + [1.0] * 20, [9.0] * 25 + [1.0] * 15]
    curves = {
        ddp: [curve_of(ddp, fall, times[ddp]) for fall in falls],
        other: [curve_of(other, fall, 1.2 * times[other]) for fall in (falls[0], [9.0] * 40)],
    }
    losses = Losses(1.0, curves, ("late: it failed",), False, Path("runs/x"))
    assert losses.work.batches_by_label == {ddp: [4 * 30.0, 4 * 35.0]}
    notes = "\n".join(losses.notes(predicted))
    assert "a rehearsal of 40 iterations with each of 2 seeds" in notes
    assert f"loss 1 was not reached by {other}\n" in notes
    assert "ddp, fp16 hook" in notes.partition("without a rehearsal: ")[2]
    assert f"{other} took" in notes
    assert f"{ddp} took" not in notes
    assert notes.endswith("late: it failed")
    assert "OFFBEAT_SEED" not in notes
    alone = [curve_of("one machine", falls[0], times["one machine"])] * 2
    same = {ddp: [curve_of(ddp, falls[0], times[ddp])] * 2, "one machine": alone}
    notes = "\n".join(Losses(1.0, same, (), False, Path("runs/x")).notes(predicted))
    assert "the script must use OFFBEAT_SEED" in notes
    assert "the script must divide the data by RANK" in notes
    assert losses.record()["iterations"] == {ddp: [30, 35], other: [30, None]}


@pytest.mark.parametrize(("elements", "noted"), [(64.0, True), (120.0, False), (0.0, False)])
def test_a_batch_that_the_script_divides_is_noted(elements, noted):
    """One machine alone trains on 128 input elements; 0 is a curve without the number."""
    predicted = predict_methods(Place(profile_of()), max_staleness=0)
    whole = 128.0 if elements else 0.0
    curves = {
        "ddp": [curve_of("ddp", [2.0] * 10 + [1.0] * 10, 0.1, input_elements=elements)],
        "one machine": [
            curve_of("one machine", [3.0] * 20, 0.1, ranks=1, input_elements=whole),
        ],
    }
    notes = " ".join(Losses(1.5, curves, (), False, Path("runs/x")).notes(predicted))
    words = "a rank trains on 64 input elements per iteration with 4 ranks and on 128 with 1: "
    assert (f"{words}the script divides its batch by WORLD_SIZE" in notes) is noted
    assert ("WORLD_SIZE" in notes) is noted


def test_a_method_that_had_less_time_raises_the_target():
    """100 iterations: ddp reaches 1.0 after 80 s, the others train for 20, 5, 10 and 200 s."""

    def fall(lowest):
        return [9.0] * 40 + [lowest] * 60

    curves = {
        "ddp": [curve_of("ddp", [9.0] * 60 + [0.9] * 40, 80 / 70)],
        "fast": [curve_of("fast", fall(low), 0.2) for low in (2.0, 3.0)],
        "faster": [curve_of("faster", fall(3.5), 0.05)],
        "rises": [curve_of("rises", [9.0] * 50 + [20.0] * 50, 0.1)],
        "slow": [curve_of("slow", fall(1.5), 2.0)],
    }
    target, raised = target_at_equal_times(1.0, curves)
    assert (target, raised) == (3.5, ("fast", "faster"))
    assert target_at_equal_times(4.0, curves) == (4.0, ())
    alone = {label: curves[label] for label in ("ddp", "slow", "rises")}
    assert target_at_equal_times(1.0, alone) == (1.0, ())
    assert target_at_equal_times(0.1, {"rises": curves["rises"]}) == (0.1, ())
