"""Measuring: fits, halves and contention, from real processes on the loopback; what it costs, on
a link of arithmetic."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness.ranks import in_turn, run_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import offbeat
from offbeat.core.buckets.layout import BucketSpec
from offbeat.core.codecs import WIRES
from offbeat.core.measuring import effort
from offbeat.core.measuring import links as measuring_links
from offbeat.core.measuring import observe as observe_module
from offbeat.core.measuring.codec_speed import measure_codecs
from offbeat.core.measuring.contention import RUNS, _rate, load_bytes
from offbeat.core.measuring.effort import THOROUGH
from offbeat.core.measuring.jitter import are_alike, scale_of_replicas
from offbeat.core.measuring.links import (
    BUDGET_MODELS,
    BUDGET_SIZES,
    LAYOUT,
    MOST_S,
    PAIR_S,
    TOGETHER,
    at_observed_rate,
    exchange_in_pairs,
    explore,
    fit_link,
    least_times,
    measure_cluster,
    measure_link,
    measure_pairs,
    measure_two_sizes,
    never_falling,
    worthwhile_bytes,
)
from offbeat.core.measuring.observe import ProfileObserver, least_message_s, timed_modules
from offbeat.core.measuring.processors import processors
from offbeat.core.measuring.timing import Budget, Probe
from offbeat.core.profile import records
from offbeat.core.runtime import job_profile
from offbeat.core.runtime.flat_session import build_flat
from offbeat.core.runtime.iteration import Timestamps
from offbeat.core.transport.cluster import Cluster, connect
from offbeat.core.transport.collectives import Ring
from offbeat.core.transport.device import CPU
from offbeat.core.transport.interfaces import LinkSpec
from offbeat.core.transport.topology import Topology
from offbeat.profile import Bucket, Link, Profile

HOST = torch.device("cpu")


def measured(names: list[str], dtype: torch.dtype) -> tuple[Any, Any, dict[str, int], float]:
    """Links and contention of a model with three layers; bytes that count as traffic; and how many
    times the model was sent for it in all. The budget is one of bytes, so that a slow machine
    measures the same."""
    effort.use(effort.Effort(links_s=1e6))
    dist.init_process_group("gloo")
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).to(dtype)
    specs = [LinkSpec(name, None, "gloo") for name in names]
    cluster = connect(specs, HOST, CPU(), 30.0)
    flat = build_flat(model, None)
    sizes = count_bytes()
    worthwhile_bytes(cluster, flat)
    links, contention = measure_cluster(cluster, flat)
    sent = {name: link.bytes_sent for name, link in cluster.links.items()}
    models = sum(sizes) / sum(p.nbytes for p in model.parameters())
    check_codecs(cluster, links)
    assert cluster.close()
    return links, contention, sent, models


def check_codecs(cluster: Cluster, links: tuple[Link, ...]) -> None:
    """All ranks have the same speeds; what messages take in a group is part of them."""
    bucket, ranks = Bucket("all", 1e-3, 1e-3, 1 << 16), cluster.control.world_size
    profile = Profile((bucket,), links, ranks)
    found = measure_codecs(cluster, profile)
    assert [speed.name for speed in found.codecs] == [*WIRES]
    assert cluster.control.gather(found.to_dict()) == [found.to_dict()] * ranks
    free = tuple(Link(link.name, 0.0, 1e12) for link in links)
    slower = measure_codecs(cluster, replace(profile, links=free))
    assert ranks == 1 or min(speed.s_per_message for speed in slower.codecs) > 0


def count_bytes() -> list[int]:
    """The payload of every collective from now on, but for numbers that ranks agree on."""
    sizes: list[int] = []

    def counting(collective: Any, at: int) -> Any:
        def counted(*args: Any, **settings: Any) -> Any:
            if settings.get("op") == dist.ReduceOp.AVG or at == 1:
                sizes.append(args[at].nbytes)
            return collective(*args, **settings)

        return counted

    dist.all_reduce = counting(dist.all_reduce, 0)
    for name in ("reduce_scatter", "all_gather"):
        setattr(Ring, name, counting(getattr(Ring, name), 1))
    return sizes


@pytest.mark.parametrize(
    ("names", "pairs", "dtype"),
    [
        (["a"], [("a", "a")], torch.bfloat16),
        (["a", "b", "c"], [("a", "a"), ("a", "b"), ("a", "c"), ("b", "c")], torch.float32),
    ],
)
def test_every_link_and_every_pair(
    names: list[str], pairs: list[tuple[str, str]], dtype: torch.dtype
) -> None:
    first, second = run_ranks(2, measured, names, dtype)
    assert [c.links for c in first[1]] == pairs
    assert first[1] == second[1], "every rank has the same speeds"
    assert first[3] == second[3], "every rank has sent as much"
    for links, contention, sent, models in (first, second):
        assert 1 < models <= 20
        assert [link.name for link in links] == names
        for link in links:
            check(link)
        for c in contention:
            assert all(0 < speed <= 1 for speed in c.speeds)
        assert sent == dict.fromkeys([*names, "a#1"], 0)


def check(link: Link) -> None:
    halves = {"reduce_scatter", "all_gather"}  # too many bytes for so small a model, perhaps
    assert set(link.halves) <= halves
    assert set(link.small_halves) <= halves
    for small in link.small_halves.values():
        assert [size for size, _ in small] == sorted({size for size, _ in small})
        assert all(0 < seconds < math.inf for _, seconds in small)
    for latency_s, bytes_per_s in ((link.latency_s, link.bytes_per_s), *link.halves.values()):
        assert 0 <= latency_s < math.inf
        assert 0 < bytes_per_s < math.inf
    assert link.vote_s is not None
    assert 0 < link.vote_s < math.inf


def test_alone_there_is_nothing_to_share() -> None:
    [(links, contention, *_)] = run_ranks(1, measured, ["a", "b"], torch.float32)
    assert [link.name for link in links] == ["a", "b"]
    assert all(link.bytes_per_s > 0 and not link.halves for link in links)
    assert contention == ()


@given(
    latency=st.floats(0, 1),
    rate=st.floats(1e3, 1e12),
    sizes=st.lists(st.integers(1, 10**9), min_size=2, max_size=6, unique=True),
)
def test_a_fit_finds_what_made_the_times(latency: float, rate: float, sizes: list[int]) -> None:
    points = [(size, latency + size / rate) for size in sizes]
    link = fit_link("net", points)
    for size, seconds in points:
        assert link.latency_s + size / link.bytes_per_s == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize("last_s", [0.0250, 0.0251, 0.0251 + 1e-12])
def test_a_rate_that_noise_hides_stays_finite(last_s: float) -> None:
    """Messages of a small model take the latency of the link. Its bytes take at least .1 %."""
    link = fit_link("net", [(4096, 0.0251), (14_800, last_s)])
    assert link.bytes_per_s <= 1000 * 14_800 / last_s * (1 + 1e-9)
    assert link.latency_s + 14_800 / link.bytes_per_s == pytest.approx(last_s, rel=0.01)


def test_rate_counts_what_is_cut_off_in_proportion() -> None:
    spans = [(0.0, 2.0), (2.0, 3.0), (4.0, 8.0)]
    assert _rate(spans, 0.0, 8.0) == pytest.approx(3 / 8)
    assert _rate(spans, 1.0, 5.0) == pytest.approx((1 / 2 + 1 + 1 / 4) / 4)
    assert _rate(spans, 3.0, 4.0) == 0


# --- what it costs -------------------------------------------------------------------------------

MEAN, HALF = "mean", "half"
VERBS: dict[Any, Any] = {"all_reduce": MEAN, "reduce_scatter": HALF, "all_gather": HALF}


class Arithmetic:
    """A link of arithmetic: alpha and beta, a least time, and every n-th message late."""

    ranks = 4
    agreement_s = 0.0

    def __init__(self, latency_s: float, bytes_per_s: float, least_s: float = 0.0, late: int = 0):
        self.latency_s, self.bytes_per_s, self.least_s = latency_s, bytes_per_s, least_s
        self.late = late
        self.clock = 0.0
        self.sent: list[int] = []

    def read_clock(self) -> float:
        return self.clock

    def seconds(self, size: float) -> float:
        return max(self.least_s, self.latency_s + size / self.bytes_per_s)

    def send(self, collective: Any, size_bytes: int) -> float:
        self.sent.append(size_bytes)
        seconds = self.seconds(size_bytes) / (2 if collective is HALF else 1)
        if self.late and len(self.sent) % self.late == 0:
            seconds += 0.01
        self.clock += seconds
        return seconds

    def agree(self, values: Any) -> list[list[float]]:
        seconds = self.seconds(8 * len(values))
        self.agreement_s += seconds
        self.clock += seconds
        return [list(values)]


MODELS = (1_000, 50_000, 3_468_288, 500_000_000)
LINKS = {
    "1 Mbit/s": (0.002, 7.8e4, 0.004),
    "10 Mbit/s": (0.002, 7.8e5, 0.004),
    "100 Mbit/s": (0.0, 7.8e6, 0.0035),
    "10 Gbit/s": (1e-4, 8e8, 2e-4),
    "far away": (0.1, 1e6, 0.0),
}


def test_a_budget_that_is_raised_has_larger_shares() -> None:
    budget = Budget(4.0, 100.0)
    budget.pay(1.0, 10.0)
    budget.allow(10.0)
    assert (budget.seconds, budget.share(0.5).seconds) == (9.0, 5.0)
    budget.allow(8.0)
    assert (budget.seconds, budget.share(0.5).seconds) == (9.0, 5.0)


def start_other_programs() -> list[int]:
    """Start a loop for every processor, and return their ids. They are no descendants of the ranks'
    parent, because their own parent has ended."""
    loop = "import time\nend_s = time.monotonic() + 20\nwhile time.monotonic() < end_s: pass"
    code = (
        "import subprocess, sys\n"
        f"loops = [subprocess.Popen([sys.executable, '-S', '-c', {loop!r}], stdout=2, stderr=2) "
        f"for _ in range({processors()})]\n"
        "print(*(one.pid for one in loops))"
    )
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    return [int(pid) for pid in done.stdout.split()]


def train_beside_other_programs(path: str) -> None:
    model = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = offbeat.prepare(model, optimizer, offbeat.WFBP(), observe=2, profile=path)
    others = start_other_programs() if dist.get_rank() == 0 else []
    try:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 32)).sum().backward()
            optimizer.step()
        model.consolidate()
    finally:
        for pid in others:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_profile_holds_the_share_of_other_programs_that_disturbed_it(tmp_path: Path) -> None:
    run_ranks(2, train_beside_other_programs, str(tmp_path / "profile.json"))
    assert Profile.load(tmp_path / "profile.json").foreign_share > 0.1


def test_one_late_update_does_not_count() -> None:
    """Neither where all other iterations are alike, nor beside one in which compute was slow."""
    observer = object.__new__(ProfileObserver)
    usual = {"forward": {"a": 1.0}, "backward": {"a": 2.0}, "update": 0.5, "other": 0.25}
    late = [{}, {"update": 9.0}, {"other": 8.0}, {"forward": {"a": 7.0}, "compute": 9.0}, {}, {}]
    observer._times = [SimpleNamespace(**({"compute": 3.0} | usual | one)) for one in late]
    assert observer._per_bucket([BucketSpec("a", ("a",))]) == [1.0, 2.0, 0.5, 0.25]


@pytest.mark.parametrize("total", MODELS)
@pytest.mark.parametrize("name", LINKS)
def test_measuring_keeps_to_its_budget(name: str, total: int) -> None:
    probe = Arithmetic(*LINKS[name])
    whole = Budget(THOROUGH.links_s, BUDGET_SIZES * total)
    explore(probe, MEAN, max(total // 4, 4096), whole.share(LAYOUT))
    link = measure_link("net", probe, VERBS, -(-total // 20), total, whole)
    share = whole.share(TOGETHER)
    load = load_bytes(link, 1, share)
    together_s = RUNS * THOROUGH.load * (probe.seconds(load) if load else 0)
    most_s = max(THOROUGH.links_s, min(MOST_S, BUDGET_MODELS * 1.1 * probe.seconds(total)))
    assert probe.clock + together_s <= most_s
    assert sum(probe.sent) + RUNS * THOROUGH.load * load <= BUDGET_SIZES * total
    assert link.vote_s == pytest.approx(probe.seconds(16), rel=1e-9)  # also if it takes seconds
    if total < 1_000_000:  # around the least time no line is exact
        return
    for size in (total // 20, total // 4, total):
        seconds = link.seconds(link.latency_s, size / link.bytes_per_s, size)
        assert seconds == pytest.approx(probe.seconds(size), rel=0.02)
    for latency_s, bytes_per_s in link.halves.values():
        line = latency_s + total / bytes_per_s
        assert line == pytest.approx(probe.seconds(total) / 2, rel=0.02)


def test_where_a_model_takes_seconds_its_halves_are_measured_all_the_same() -> None:
    probe, total = Arithmetic(0.002, 1.7e6), 3_468_288
    link = measure_link(
        "net", probe, VERBS, total // 20, total, Budget(THOROUGH.links_s, 20.0 * total)
    )
    assert sorted(link.halves) == ["all_gather", "reduce_scatter"]
    assert THOROUGH.links_s < probe.clock <= MOST_S


def test_where_a_delay_hides_the_rate_large_messages_tell_it() -> None:
    """A ring overlaps delay and bytes: only where the bytes take longer do they count."""
    probe, total = Arithmetic(0.0, 8.3e6, 0.125), 3_468_288
    link = measure_link("net", probe, VERBS, total // 20, total, Budget(3.0, 20.0 * total))
    predicted_s = link.seconds(link.latency_s, total / link.bytes_per_s, total)
    assert predicted_s == pytest.approx(probe.seconds(total), rel=0.07)
    assert probe.clock <= THOROUGH.links_s


class Pairs(Arithmetic):
    """Messages between two ranks of some. The last of an odd number sends nothing."""

    def __init__(self, ranks: int) -> None:
        super().__init__(0.04, 12e6)
        self.ranks = ranks

    def agree(self, values: Any) -> list[list[float]]:
        idle = [[0.0] * len(values)] * (self.ranks % 2)
        return [list(values)] * (self.ranks - len(idle)) + idle


@pytest.mark.parametrize("ranks", [2, 4, 5])
def test_over_a_distant_link_the_rate_of_pairs_is_measured(ranks: int) -> None:
    """An all-reduce of 2 (K - 1) steps that hides three tenths of its bytes behind delay."""
    steps, total = 2 * (ranks - 1), 2_784_168
    link = Link("net", 0.04 * steps, 12e6 * ranks / steps / 0.7)
    assert link.has_long_steps(ranks)
    probe = Pairs(ranks)
    found = measure_pairs(link, probe, MEAN, total)
    assert found == replace(link, pair_bytes_per_s=pytest.approx(12e6))
    send_s = found.seconds(found.latency_s, total / found.bytes_per_s, total, "send", ranks)
    assert send_s == pytest.approx(probe.seconds(total))
    assert probe.clock < 5 * probe.seconds(total)
    large = Pairs(ranks)  # no message takes long, however large the model is
    assert measure_pairs(link, large, MEAN, 10**10).pair_bytes_per_s == pytest.approx(12e6)
    assert large.clock < 7 * PAIR_S
    assert measure_pairs(link, probe, MEAN, 4096) == link
    assert not replace(link, latency_s=1e-3 * steps).has_long_steps(ranks)


def test_over_a_distant_link_halves_are_measured_although_they_are_mostly_latency() -> None:
    """Each half has half of the steps, and so half of the latency."""
    probe, total = Arithmetic(0.24, 23e6), 2_843_368
    link = measure_link(
        "net", probe, VERBS, 95_616, total, Budget(THOROUGH.links_s, BUDGET_SIZES * total)
    )
    assert sorted(link.halves) == ["all_gather", "reduce_scatter"]
    for latency_s, bytes_per_s in link.halves.values():
        assert latency_s == pytest.approx(0.12, rel=0.01)
        assert bytes_per_s == pytest.approx(46e6, rel=0.01)
    assert probe.clock < THOROUGH.links_s + 3.0
    other, whole = Arithmetic(0.24, 23e6), Budget(THOROUGH.links_s, BUDGET_SIZES * total)
    assert measure_link("net", other, VERBS, 95_616, total, whole, pairs=True).halves == {}
    assert other.clock < probe.clock
    near, whole = Arithmetic(0.004, 23e8), Budget(0.05, BUDGET_SIZES * total)
    assert measure_link("net", near, VERBS, 95_616, total, whole, pairs=True).halves
    short = Budget(THOROUGH.links_s, 4.0 * total)
    assert measure_two_sizes(lambda *_: [], (total // 4, total), short) == []


def exchanged_in_pairs() -> tuple[list[float], float | None]:
    records.DISTANT_S = 0.0
    dist.init_process_group("gloo")
    cluster = connect([LinkSpec("net", None, "gloo")], HOST, CPU(), 30.0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    held = torch.full((3,), float(rank))
    exchange_in_pairs(cluster.links["net"].collectives.swap, ranks)(held)
    flat = build_flat(nn.Sequential(nn.Linear(2048, 2048)), None)
    (link,), _ = measure_cluster(cluster, flat)
    assert cluster.close()
    return held.tolist(), link.pair_bytes_per_s


def test_pairs_of_three_ranks_exchange() -> None:
    (zero, rate), *others = run_ranks(3, exchanged_in_pairs)
    assert [zero, *(held for held, _ in others)] == [[1.0] * 3, [0.0] * 3, [2.0] * 3]
    assert rate is not None
    assert [other for _, other in others] == [rate] * 2


def test_late_messages_count_where_they_will_again() -> None:
    """Not in the rate; in what small messages take as often as they come, but for one."""
    clean, late = (Arithmetic(0.0, 7.8e6, 0.0035, late=n) for n in (0, 4))
    links = [
        measure_link("net", probe, VERBS, 170_000, 3_400_000, Budget(THOROUGH.links_s, 68e6))
        for probe in (clean, late)
    ]
    assert len(links[0].small) == 6
    assert len(links[1].small) >= 5
    more_s = [b - a for (_, a), (_, b) in zip(links[0].small, links[1].small, strict=False)]
    assert all(0 <= s <= 0.01 / 3 for s in more_s)
    assert max(more_s) > 0
    assert links[1].bytes_per_s == pytest.approx(7.8e6, rel=0.05)


@given(st.lists(st.floats(1e-4, 1), min_size=1, max_size=6))
def test_least_times_never_fall(seconds: list[float]) -> None:
    points = list(enumerate(seconds))
    least = [least_s for _, least_s in least_times(points)]
    assert least == [min(seconds[i:]) for i in range(len(seconds))]


@given(st.lists(st.floats(1e-4, 1), min_size=1, max_size=7))
def test_neighbours_that_fall_have_their_mean(seconds: list[float]) -> None:
    """Isotonic regression by its closed form: the largest of the least means around each."""
    found = [s for _, s in never_falling([*enumerate(seconds)])]
    size = len(seconds)
    for i, value in enumerate(found):
        means = (
            min(sum(seconds[j : k + 1]) / (k + 1 - j) for k in range(i, size)) for j in range(i + 1)
        )
        assert value == pytest.approx(max(means))


def test_agreements_are_added_up_until_they_are_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    group: Any = type("Alone", (), {"size": lambda _: 1, "rank": lambda _: 0})()
    probe, seconds = Probe(group, torch.ones(1), CPU()), iter([0.0, 1.0, 5.0, 7.0])
    monkeypatch.setattr(probe, "read_clock", lambda: next(seconds))
    assert [probe.agree([float(n)]) for n in range(2)] == [[[0.0]], [[1.0]]]
    assert probe.agreement_s == 3.0


# --- ranks ---------------------------------------------------------------------------------------


def test_like_ranks_seldom_seem_to_differ_and_slow_ones_always_do() -> None:
    rng = np.random.default_rng(0)

    def seem_alike(scale: list[float]) -> float:
        """Share of clusters whose ranks seem alike, after 5 iterations with a jitter of 5 %."""
        found = []
        for _ in range(400):
            seconds = np.array(scale)[:, None] * (1 + 0.05 * rng.standard_normal((len(scale), 5)))
            means = seconds.mean(axis=1)
            spreads = [float(s) for s in seconds.std(axis=1, ddof=1) / means]
            found.append(are_alike((means / means.mean()).tolist(), spreads, 5))
        return float(np.mean(found))

    for ranks in (2, 8):
        assert seem_alike([1.0] * ranks) == pytest.approx(0.95, abs=0.04)
        assert seem_alike([1.25] + [1.0] * (ranks - 1)) < 0.02
    assert are_alike([0.995, 1.005], [0.0, 0.0], 5)
    assert not are_alike([0.98, 1.02], [0.0, 0.0], 5)


def test_a_node_is_as_slow_as_its_slowest_rank() -> None:
    assert scale_of_replicas([0.5, 1.5, 1.25, 0.75], ((0, 3), (1, 2))) == (0.75, 1.5)


@pytest.mark.parametrize(("nodes", "group"), [(((0, 1), (2, 3)), "all"), (((0,), (1,)), None)])
def test_a_vote_is_measured_as_it_is_cast(
    nodes: Any, group: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between all ranks, also where messages pass between nodes; without nodes these are equal."""
    votes, groups = list[Any](), list[Any]()

    def note(*given: Any) -> tuple[tuple[()], None]:
        votes.append(given[-1])
        return (), None

    monkeypatch.setattr(measuring_links, "_measure_links", note)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **how: groups.append(how["group"]))
    topology, control = Topology(nodes), SimpleNamespace(world_size=1)
    cluster: Any = SimpleNamespace(topology=topology, everyone="all", specs=(), control=control)
    measure_cluster(cluster, SimpleNamespace())  # type: ignore[arg-type]
    for vote in votes:
        if vote is not None:
            vote(torch.zeros(1))
    assert (len(votes), groups) == (1, [group] * (group is not None))


class Compiled(nn.Module):
    """A module as torch.compile returns it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def test_no_module_inside_a_compiled_one_is_timed() -> None:
    """The compiled module is, with the name of the first parameters in it."""
    first, frozen, last = (nn.Linear(2, 2) for _ in range(3))
    frozen.requires_grad_(False)
    block = Compiled(nn.Sequential(frozen, nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)))
    model = nn.Sequential(first, block, last)
    assert [*timed_modules(model)] == [("0", first), ("1._orig_mod.1.0", block), ("2", last)]
    whole = Compiled(model)
    assert [*timed_modules(whole)] == [("_orig_mod.0", whole)]


def test_gradients_of_an_earlier_forward_have_no_negative_times() -> None:
    """A discriminator's real samples are backward before the forward of its made samples."""
    observer = ProfileObserver.__new__(ProfileObserver)
    observer._device = SimpleNamespace(seconds=float)
    observer._tap = SimpleNamespace(began=None, ended=None, take=lambda: None)
    observer._times, observer._losses, observer.order = [], [], []
    observer._entered, observer._ready = [("a", 2.0)], [("a", 1.0), ("b", 5.0)]
    marks = Timestamps(
        begin=0.0, forward=2.0, forward_end=3.0, backward_end=5.0, waited=5.0, step=5.0, stepped=6.0
    )
    observer._record_times(marks)
    assert dict(observer._times[0].backward) == {"b": 2.0}
    observer._ready = [("a", 1.0)]
    observer._record_times(replace(marks, backward_end=1.0))
    assert len(observer._times) == 1  # no time of a backward is known


def test_recomputed_modules_add_no_time_to_the_forward() -> None:
    """The backward of checkpointed modules enters them again, after the end of the forward."""
    observer = ProfileObserver.__new__(ProfileObserver)
    observer._device = SimpleNamespace(seconds=float)
    observer._tap = SimpleNamespace(began=None, ended=None, take=lambda: None)
    observer._times, observer._losses, observer.order = [], [], []
    observer._entered = [("a", 1.0), ("b", 2.0), ("b", 4.0), ("a", 5.5)]
    observer._ready = [("b", 5.0), ("a", 7.0)]
    marks = Timestamps(
        begin=0.0, forward=1.0, forward_end=3.0, backward_end=7.0, waited=7.0, step=7.0, stepped=8.0
    )
    observer._record_times(marks)
    [times] = observer._times
    assert dict(times.forward) == {"a": 1.0, "b": 1.0}
    assert times.backward == {"b": 2.0, "a": 2.0}


# --- messages of observed iterations -------------------------------------------------------------


def test_the_least_message_has_no_waiting() -> None:
    rank_0, rank_1 = [9.0, 1.0, 1.2, 5.0, 1.4], [9.5, 4.0, 1.2, 5.0, 4.4]
    messages = [list(enumerate(rank_0)), list(enumerate(rank_1))]
    assert least_message_s(messages) == 1.0
    assert least_message_s([messages[0], messages[1][2:]]) is None, "too few remain"
    assert least_message_s([[], []]) is None


def test_an_observed_message_corrects_the_rate_where_it_takes_longer() -> None:
    link = Link("eth0", 0.1, 1e6, halves={"reduce_scatter": (0.05, 2e6)})
    for seconds in (0.05, 1.0, 2.1, 2.115):
        assert at_observed_rate(link, 2_000_000, seconds) is link
    slower = at_observed_rate(link, 2_000_000, 2.6)
    assert slower.latency_s == link.latency_s
    assert slower.latency_s + 2e6 / slower.bytes_per_s == pytest.approx(2.6)
    assert slower.halves == {"reduce_scatter": (0.05, pytest.approx(2e6 / 1.25))}


def profile_of_a_fast_link(observe: int) -> tuple[float, float | None]:
    """Seconds of a message of the model by the profile of a job whose link was measured as too
    fast, and the least seconds of its observed messages."""
    least: list[float | None] = []
    profiles: list[Profile] = []
    build = ProfileObserver.profile

    def fast(cluster: Cluster, *_: Any, **__: Any) -> tuple[tuple[Link, ...], tuple[()]]:
        return (Link(next(iter(cluster.specs)), 0.0, 1e15),), ()

    def remember(messages: Any) -> float | None:
        least.append(least_message_s(messages))
        return least[-1]

    def profile(*args: Any) -> Profile:
        profiles.append(build(*args))
        return profiles[-1]

    job_profile.measure_cluster, observe_module.least_message_s = fast, remember
    ProfileObserver.profile = profile
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = offbeat.prepare(model, optimizer, "wfbp", observe=observe)
    for _ in range(observe + 1):
        optimizer.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    model.close()
    total = sum(bucket.size_bytes for bucket in profiles[0].buckets)
    return total / profiles[0].links[0].bytes_per_s, least[0]


def test_a_job_plans_with_the_rate_of_its_own_messages() -> None:
    many, few = zip(*run_ranks(2, in_turn, profile_of_a_fast_link, [(6,), (2,)]), strict=True)
    for seconds, least_s in many:
        assert seconds == pytest.approx(least_s)
    for seconds, least_s in few:
        assert least_s is None
        assert seconds < 1e-9
