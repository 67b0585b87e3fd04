"""Exchanges of gossip, distances between replicas, and the pace of hosts."""

from __future__ import annotations

import base64
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases.report_runs import THREE, gossiped
from cases.tiny_runs import record, steady, write_tiny
from torch import nn

from offbeat import A2CiD2, Profile, sim
from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.layout import BucketSpec
from offbeat.experiments.record.run_directory import Repetition
from offbeat.experiments.report import load
from offbeat.experiments.report.divergence import gamma, relative_distances
from offbeat.experiments.report.gossip import (
    Exchange,
    clock_differences_s,
    measured_gossip,
    predicted_gossip,
    trace_events,
    visible_part,
)
from offbeat.experiments.report.pace_notes import describe_pace
from offbeat.jobs.replica_sample import Sample
from offbeat.profile import Bucket, Link


def repetition(path, records):
    return load(write_tiny(path, {"a": [records]})).contestants[0].repetitions[0]


def test_exchanges_are_where_they_were_on_one_clock(tmp_path):
    """Also with one end, and with a worker that has joined from elsewhere."""
    expected = [
        Exchange(0, 1, (2.25, 2.75), (2.25, 2.75), 400),
        Exchange(1, 2, (3.5, 3.75), (3.5, 3.75), 400),
    ]
    joined = gossiped(0, [1, 2, 3, 4], [(1, 1, 2.25, 2.75, 400), (4, 1, 3.0, 3.5, 400)])
    for number, first in enumerate((THREE[0], gossiped(0, [1, 2, 3, 4], []), joined)):
        rep = repetition(tmp_path / str(number), [first, *THREE[1:]])
        found = measured_gossip(rep)
        assert [one for one in found.exchanges if one.j != 4] == expected
        events = trace_events(found, clock_differences_s(rep))
        begins = {(e["pid"], e["name"]): e["ts"] for e in events if e["ph"] == "X"}
        assert begins[1, "with 2"] == pytest.approx(-96.5e6)  # in the seconds of its own worker
        workers = [0, 1, 2, 4] if number == 2 else [0, 1, 2]
        assert {e["pid"] for e in events if e["name"] == "thread_name"} == {*workers}
        assert visible_part(found).workers == workers


def test_only_time_of_which_all_is_known_is_shown(tmp_path):
    """Of eight exchanges of each the last two are kept; who is fast ends early."""
    ends = [float(i + 1) for i in range(30)]
    pair = [
        gossiped(
            rank, ends, [(1 - rank, n, 20.0 + n, 20.5 + n, 8) for n in (7, 8)], counts={1 - rank: 8}
        )
        for rank in (0, 1)
    ]
    found = measured_gossip(repetition(tmp_path / "a", pair))
    assert found.window_s == (27.0, 30.0)
    fast = gossiped(1, [end / 3 for end in ends], [(0, 8, 28.0, 28.5, 8)], counts={0: 8})
    part = visible_part(measured_gossip(repetition(tmp_path / "b", [pair[0], fast])))
    assert (part.length_s, part.exchanges) == (0, [])


def test_predicted_exchanges_fit_the_graph_and_the_link():
    facts = Profile((Bucket("a", 0.1, 0.2, 4000),), (Link("net", 0.0, 1e5),), 4)
    facts = replace(facts, rank_scale=(1.0, 1.0, 2.0, 1.0))
    found = predicted_gossip(sim.predict(A2CiD2("0-1,1-2,2-3", rate=1.0), facts).trace)
    assert found.unit_s == pytest.approx((3 * 0.3 + 0.6) / 4)
    assert {(one.i, one.j) for one in found.exchanges} == {(0, 1), (1, 2), (2, 3)}
    # The link carries 1.5e5 bytes per second in one direction: 2 (n - 1) / n of a ring's rate.
    assert min(one.at_i[1] - one.at_i[0] for one in found.exchanges) >= 4000 / 1.5e5 - 1e-9


def test_distance_is_that_of_one_time(tmp_path):
    """Rank 1 is twice as slow: what it has at t is compared with what rank 0 has at t."""
    fast = gossiped(0, [1, 2, 3, 4, 5, 6], [], numbers=[0, 10, 14, 20, 24, 30])
    slow = gossiped(1, [2, 4, 6], [], numbers=[10, 20, 30])
    found = relative_distances(repetition(tmp_path / "a", [fast, slow]))
    # At 1 rank 1 has nothing yet; at 3 it has 10, at 5 20.
    assert found == pytest.approx({1: 0.0, 2: 2 / 12, 3: 0.0, 4: 2 / 22, 5: 0.0})
    alone = repetition(tmp_path / "b", [fast])
    assert relative_distances(Repetition(0, alone.ranks[:1])) == {}


def sample_of(model):
    names = [name for name, _ in model.named_parameters()]
    return Sample.of(Flat(model, [BucketSpec(name, (name,)) for name in reversed(names)]))


def test_a_sample_of_the_parameters_is_near_the_whole(tmp_path):
    """Gamma of random walks of three replicas."""
    ranks, seen = [], []
    for rank in range(3):
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2000))
        sample, course = sample_of(model), []
        for iteration in range(4):
            for p in model.parameters():
                p.data.add_(torch.randn_like(p) * 0.1)
            sample.take(iteration)
            course.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        seen.append(torch.stack(course).numpy())
        ranks.append(record(rank, steady(1.0, 4), sample=sample.record()))
    whole = np.array(seen, dtype=float)
    expected = ((whole - whole.mean(axis=0)) ** 2).sum(axis=2).mean(axis=0)
    found = gamma(repetition(tmp_path, ranks))
    assert [*found.values()] == pytest.approx(expected, rel=0.2)


def test_a_sample_of_any_memory_format_has_the_numbers_of_the_parameters():
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    sample = sample_of(model)
    sample.take(0)
    numbers = np.frombuffer(base64.b64decode(sample.record()["numbers"]))
    held = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double().numpy()
    assert {*numbers} <= {*held}


def test_late_hosts_are_named_with_their_share(tmp_path):
    def paced(rank, missed, worst, busy=0.1):
        pace = {"pace": 5.0, "iterations": 100, "missed": missed, "worst": worst, "busy": busy}
        return record(rank, [1.0], pace={**pace, "interrupts": 0.05})

    reps = [[paced(0, 2, 0.04), paced(1, 30, 0.5, 0.2)], [paced(0, 3, 0.06), paced(1, 10, 0.25)]]
    said = describe_pace(load(write_tiny(tmp_path / "a", {"one": reps})))
    assert "35 %" in said[0]  # .1 + .2 and .05 for interrupts
    assert len(said) == 2
    assert all(fact in said[1] for fact in ("one", "rank 1", "20 %", "50 %"))
    in_time = load(write_tiny(tmp_path / "b", {"one": [[paced(0, 3, 0.5)]]}))
    assert "rank" not in describe_pace(in_time)[1]
    assert describe_pace(load(write_tiny(tmp_path / "c", {"one": [[record(0, [1.0])]]}))) == []
