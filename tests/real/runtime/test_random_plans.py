"""What `check` accepts, the runtime executes, with the interpreter's meaning."""

from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness.parts import CPU, LinkSpec, NodeClaim, Program, connect, two_levels
from harness.ranks import run_ranks
from oracle.quadratic import Nodes, Quadratic, interpreted, ran, train
from oracle.random_plans import random_plan, ranks_of

from offbeat import Plan, Planned
from offbeat.plan import INSIDE, check, vote_channel
from offbeat.profile import Bucket, Link, Profile

PLANS, PARTS = 160, 2  # accepted ones, in so many tests
BETWEEN_NODES = 30
TOLERANCE = 1e-12


def accepted(part):
    """Random plans that `check` accepts, with their seeds."""
    seed, found = part, 0
    while found < PLANS // PARTS:
        plan = random_plan(Random(seed), broken=0.2)
        if not check(plan):
            found += 1
            yield seed, plan
        seed += PARTS


def parts_of(plan):
    """What is executed, and when."""
    return {
        ("prologue", plan.prologue > 0),
        ("uniform", plan.uniform),
        *(("rule", a.rule, a.at.point) for a in plan.applies),
        *(("verb", t.verb, t.wire is not None) for t in plan.transfers),
        *((t.link, t.after.point, t.before.point) for t in plan.transfers),
    }


def varied(plans):
    """Those plans, the last of each tuple, that have a part which none before them has."""
    seen = set()
    for one in plans:
        parts = parts_of(one[-1])
        if not parts <= seen:
            seen |= parts
            yield one


def task_of(plan, seed):
    rng = Random(seed)
    weighted = any(apply.rule in ("scale", "select") for apply in plan.applies)  # by rank
    more = rng.choice((2, 2, 3)) if plan.uniform and not weighted else 0
    ranks = max(ranks_of(plan), more)
    # One period and whatever it has under way, or two so that it meets itself.
    iterations = plan.prologue + rng.choice((1, 2)) * plan.period + Program(plan).lag + 1
    sizes = tuple(rng.choice((1, 3, 5, 8)) for _ in range(plan.buckets))
    return Quadratic(sizes, ranks, iterations, seed)


@pytest.mark.parametrize("part", range(PARTS))
def test_runtime_computes_what_the_interpreter_computes(part):
    for seed, plan in varied(accepted(part)):
        task = task_of(plan, seed)
        expected = np.array(interpreted(plan, task, seed=seed))
        found = np.array(ran(plan, task))
        apart = np.abs(found - expected).max()
        assert apart < TOLERANCE, f"seed {seed}: {apart:.1e} apart\n{plan}"


# ---- between nodes --------------------------------------------------------------------------


@dataclass(frozen=True)
class Given(Planned):
    """A plan as it is."""

    given: Plan
    name: ClassVar[str] = "given"
    citation: ClassVar[str] = ""
    synchronous: ClassVar[bool] = False

    def schedule(self, profile):
        return self.given

    def bound_s(self, profile):
        return 0.0


def profile_of(task):
    """Two nodes of two ranks, where several messages inside are faster than one."""
    buckets = tuple(Bucket(f"b{b}", 0.5, 0.8, 8 * size) for b, size in enumerate(task.sizes))
    links = (Link("net", 0.1, 20.0), Link("aux", 0.1, 20.0))
    return Profile(buckets, links, 2, topology=(2, 2), inside=Link(INSIDE, 0.01, 100.0))


def plans_of_nodes():
    """Random plans of two replicas without codes, whose blocks begin at other places in nodes; the
    same with averages of gradients inside; tasks first."""
    seed = 0
    while True:
        seed += 1
        plan = random_plan(Random(seed), broken=0.2)
        if ranks_of(plan) > 2 or any(t.wire for t in plan.transfers) or check(plan):
            continue
        task = task_of(plan, seed)
        task = Nodes(task.sizes, 2, task.iterations, seed)
        try:
            yield task, two_levels(Given(plan), profile_of(task)), plan
        except ValueError:  # single replicas send, or a rule uses gradients in backward
            continue


def run_in_nodes(jobs):
    """The weights that this rank's forwards have seen, by plan."""
    dist.init_process_group("gloo")
    specs = [LinkSpec("net", None, "gloo"), LinkSpec("aux", None, "gloo")]
    nodes = NodeClaim("test", nodes=((0, 1), (2, 3)))
    specs.append(LinkSpec(INSIDE, "lo", "gloo"))
    cluster = connect(specs, torch.device("cpu"), CPU(), 30.0, nodes)
    cluster.open([vote_channel("net"), *(link for plan, _ in jobs for link in plan.links)])
    found = [
        train(plan, task, dist.get_rank(), cluster.links, cluster.control, cluster.replica)
        for plan, task in jobs
    ]
    cluster.close()
    return found


def test_nodes_compute_what_the_interpreter_computes_for_replicas():
    """A replica's gradient is the mean of its ranks', and their parameters have equal bits."""
    plans = list(varied(islice(plans_of_nodes(), BETWEEN_NODES)))
    ranks = run_ranks(4, run_in_nodes, [(both, task.by_member) for task, both, _ in plans])
    for i, (task, both, plan) in enumerate(plans):
        expected = np.array(interpreted(plan, task, seed=task.seed))
        found = np.array([rank[i] for rank in ranks])
        apart = np.abs(found - expected[[0, 0, 1, 1]]).max()
        assert apart < TOLERANCE, f"seed {task.seed}: {apart:.1e} apart\n{both}"
        assert found[::2].tobytes() == found[1::2].tobytes(), f"seed {task.seed}\n{both}"
