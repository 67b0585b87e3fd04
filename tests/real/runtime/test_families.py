"""Every family of plans on real processes and sockets computes what its equations say."""

from functools import cached_property

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_world
from oracle.plan_families import CENTER, FAMILIES, SIZE, SLOPE, START, N, T, World
from oracle.quadratic import Quadratic, train

from offbeat.core.transport.cluster import connect
from offbeat.core.transport.device import CPU
from offbeat.core.transport.interfaces import LinkSpec
from offbeat.plan import base_link, vote_channel

TIMEOUT_S = 20.0


class Task(Quadratic):
    """The families' numbers."""

    @cached_property
    def numbers(self):
        a, c = SLOPE.reshape(len(SLOPE), -1), CENTER.reshape(*CENTER.shape[:2], -1)
        return START.reshape(-1), a, c


def seen_by(names, workers):
    """By family: the weights that this rank's forwards have seen."""
    dist.init_process_group("gloo")
    found = {}
    for name in names:
        plan = FAMILIES[name].plan
        links = dict.fromkeys(["net", *map(base_link, plan.links)])
        specs = [LinkSpec(link, backend="gloo") for link in links]
        cluster = connect(specs, torch.device("cpu"), CPU(), TIMEOUT_S)
        votes = [vote_channel("net")] if plan.votes else []
        cluster.open([*plan.links, *votes], plan.groups)
        task = Task((SIZE,) * N, workers, T, decay=0.0)
        found[name] = train(plan, task, cluster.control.rank, cluster.links, cluster.control)
        assert cluster.everyone.size() == workers  # of broadcasts and repairs
        cluster.close()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("workers", sorted({family.workers for family in FAMILIES.values()}))
def test_equals_its_equations_on_real_processes(workers):
    names = [name for name, family in FAMILIES.items() if family.workers == workers]
    ranks = run_world(seen_by, workers, names, workers)
    for name in names:
        family = FAMILIES[name]
        world, advance = World(workers), family.equations()
        for i in range(T):
            weights = world.w.copy()
            if name == "delayed" and advance.snapshot is not None:  # due when the forward begins
                weights = weights + advance.snapshot.mean(axis=0) - advance.snapshot
            for rank in family.compared:
                used = np.asarray(ranks[rank][name][i]).reshape(N, SIZE)
                np.testing.assert_allclose(used, weights[rank], rtol=0, atol=1e-12, err_msg=name)
            advance(world, i)
