"""Processor time of messages and of the optimizer's calls, and jitter, as they are measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_ranks
from torch import nn

from offbeat.core.measuring.jitter import cluster_jitter, jitter_of, spread_of
from offbeat.core.measuring.optimizer_calls import call_s
from offbeat.core.measuring.sending import (
    are_single_machines,
    busy_throughout,
    crowding,
    fit_message_costs,
    measure_sending,
)
from offbeat.core.measuring.timing import Budget
from offbeat.core.runtime.flat_session import build_flat
from offbeat.core.transport.cluster import connect
from offbeat.core.transport.device import CPU
from offbeat.core.transport.interfaces import LinkSpec
from offbeat.profile import Link

TOTAL = 200_000


def measured(threads: int, seconds: float) -> tuple[Link, int, float]:
    """A link with its processor time; what counts as its traffic; what is left of the budget."""
    torch.set_num_threads(threads)
    dist.init_process_group("gloo")
    cluster = connect([LinkSpec("a", None, "gloo")], torch.device("cpu"), CPU(), 30.0)
    like = build_flat(nn.Linear(2, 2), None).parameter_tensors()[0]
    budget = Budget(seconds, 20 * TOTAL)
    [link] = measure_sending(cluster, [Link("a", 1e-3, 1e8)], like, TOTAL, budget)
    sent = cluster.links["a"].bytes_sent
    assert cluster.close()
    return link, sent, budget.size_bytes


def test_every_rank_knows_the_same_processor_time() -> None:
    first, second = run_ranks(2, measured, 64, 3.0)  # more threads than any machine here
    assert first == second
    link, sent, left_bytes = first
    assert 0 < link.cpu_s_per_message + link.cpu_s_per_byte * TOTAL < 1
    assert sent == 0
    assert left_bytes < 20 * TOTAL


def test_without_a_budget_nothing_is_sent() -> None:
    for link, _, left_bytes in run_ranks(2, measured, 64, 1e-4):
        assert link == Link("a", 1e-3, 1e8)
        assert left_bytes == 20 * TOTAL


def test_a_link_takes_processors_that_compute_would_use() -> None:
    two, three, eight, many = ((1 << count) - 1 for count in (2, 3, 8, 16))
    assert crowding([("a", many, 1), ("a", many, 1)]) == 0
    assert crowding([("a", two, 1), ("a", two, 1)]) == 1  # two threads of links, no processor left
    assert crowding([("a", three, 1), ("a", three, 1)]) == 0.5
    assert crowding([("a", eight, 8), ("b", eight, 4)]) == 0.5  # only the first machine is full
    assert crowding([("a", 1, 4)]) == 1
    assert crowding([("a", two << at, 1) for at in (0, 2, 4)]) == 0  # each has two of its own


def test_two_sizes_tell_the_message_from_its_bytes() -> None:
    assert fit_message_costs((100, 3.0), (300, 7.0)) == pytest.approx((1.0, 0.02))
    assert fit_message_costs((100, 3.0), (300, 2.0)) == (
        3.0,
        0.0,
    )  # noise: larger ones are no cheaper
    assert fit_message_costs((100, 1.0), (300, 7.0)) == (0.0, 0.03)


def test_a_node_is_a_single_machine_or_not() -> None:
    a, b = ("a", 2, 1), ("b", 2, 1)
    assert are_single_machines([[0, 1], [2, 3]], [a, a, b, b])
    assert not are_single_machines([[0, 1], [2, 3]], [a, a, b, a])


def test_inside_a_machine_a_message_takes_processors_for_all_its_seconds() -> None:
    link = Link("inside", 0.5, 100.0, small=((10, 0.75), (20, 0.9)), cpu_s_per_message=0.6)
    full = busy_throughout(link, 1.0)
    assert (full.cpu_s_per_message, full.cpu_s_per_byte) == (0.75, 0.01)
    half = busy_throughout(link, 0.5)  # the measured time of the threads is more
    assert (half.cpu_s_per_message, half.cpu_s_per_byte) == (0.6, 0.005)


def test_jitter_is_the_deviation_without_hiccups() -> None:
    assert jitter_of([]) == jitter_of([1.0]) == jitter_of([2.0, 2.0, 2.0, 9.0]) == 0.0
    draws = np.random.default_rng(0).normal(10.0, 2.0, 4001)
    assert jitter_of(draws.tolist()) == pytest.approx(0.2, rel=0.05)
    assert jitter_of([*draws, 1e6]) == pytest.approx(0.2, rel=0.05)


def test_spread_of_a_few_messages_of_each_size() -> None:
    rng = np.random.default_rng(1)
    series = [(s * rng.normal(1, 0.1, 3)).tolist() for s in rng.uniform(1, 100, 4000)]
    assert spread_of(series) == pytest.approx(0.1, rel=0.1)  # the median of ranges is a bit less
    assert spread_of([[1.0, 1.0, 9.0], [2.0, 2.0, 2.0], [4.0, 4.0, 4.0]]) == 0.0
    assert spread_of([[1.0, 1.02, 1.01]]) == spread_of([[1.0]]) == spread_of([]) == 0.0


def test_a_rank_far_above_the_others_keeps_its_own_jitter() -> None:
    assert cluster_jitter([0.01, 0.02, 0.02, 0.03]) == (0.0, ())
    assert cluster_jitter([0.05, 0.1, 0.15, 0.1]) == (pytest.approx(0.1), ())
    assert cluster_jitter([0.0, 0.01, 0.2, 0.01]) == (pytest.approx(0.055), (0.0, 0.0, 0.2, 0.0))


class Wrapper(torch.optim.SGD):
    """Hands its step on."""

    def __init__(self, inner: torch.optim.Optimizer):
        super().__init__(inner.param_groups)
        self.inner = inner


class Failing(torch.optim.SGD):
    """Cannot step anything but the model that it knows."""

    def step(self, closure: Any = None) -> None:
        raise LookupError


def test_a_call_of_the_optimizer_leaves_the_users_alone() -> None:
    model = nn.Linear(3, 3)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    random = torch.get_rng_state()
    assert 0 < call_s(optimizer, CPU()) < 1
    assert not optimizer.state
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("kind", [Wrapper, Failing])
def test_an_optimizer_that_cannot_be_tried_counts_as_free(kind: type) -> None:
    inner = torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)
    assert call_s(Wrapper(inner) if kind is Wrapper else Failing(inner.param_groups), CPU()) == 0.0
