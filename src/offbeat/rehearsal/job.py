"""Rehearsal of one strategy: all replicas, one after the other, up to the last iteration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

from torch._C._distributed_c10d import HashStore

from offbeat.core.buckets.random_states import preserve_random_states
from offbeat.core.measuring.loss import LossTap
from offbeat.core.profile import Profile
from offbeat.core.runtime.prepare import REHEARSAL
from offbeat.core.strategy.interface import Strategy
from offbeat.core.transport.control import OPEN_CONTROL
from offbeat.core.transport.topology import Topology
from offbeat.rehearsal.cluster import Exchange, MemoryControl
from offbeat.rehearsal.links import MemoryNetwork
from offbeat.rehearsal.replica import Course, RandomStreams, Replica, ReplicaLog, _device
from offbeat.rehearsal.turns import ReplicaState, Turns


@dataclass(frozen=True)
class Run:
    """Result of the training of all replicas under one strategy.

    Attributes:
        logs: log of each replica.
        courses: plans in the order of their first iterations.
    """

    logs: tuple[ReplicaLog, ...]
    courses: tuple[Course, ...]


def train_replicas(
    life: Callable[[Replica], None],
    strategy: Strategy,
    profile: Profile,
    *,
    seed: int,
    states: Sequence[ReplicaState] | None = None,
) -> Run:
    """Train all replicas of a job and return their losses.

    Args:
        life: the training script of one replica; it calls `Replica.prepare` or `offbeat.prepare`.
        strategy: strategy of the job.
        profile: profile of the job, from which the strategy plans.
        seed: replica k starts with the random streams of seed `seed + k`.
        states: state of the process that belongs to each replica; None for its random streams.

    Raises:
        BaseException: the first error of a replica.
    """
    topology = topology_of(profile)
    ranks = topology.ranks
    turns = Turns(states or [RandomStreams(seed + k) for k in range(ranks)])
    network = MemoryNetwork(topology, turns)
    exchange = Exchange(ranks, turns)
    store, losses = HashStore(), LossTap()
    own = replace(profile, pace=0.0)  # an emulated host would sleep
    all_replicas = [
        Replica(rank, strategy, own, network, exchange, store, losses) for rank in range(ranks)
    ]

    def live(rank: int) -> None:
        replica = all_replicas[rank]
        REHEARSAL.set(replica.prepare)
        OPEN_CONTROL.set(partial(MemoryControl, rank, ranks, exchange, store))
        try:
            life(replica)
        except BaseException as error:
            turns.failure = turns.failure or error  # so that `close` waits for no other replica
            raise
        finally:
            if replica.session is not None:
                replica.session.close()

    try:
        with preserve_random_states([_device()]):
            turns.run(live)
    finally:
        losses.close()
        network.close()
    logs = [replica.recorder.log for replica in all_replicas]
    return Run(tuple(logs), tuple(all_replicas[0].recorder.courses))


def topology_of(profile: Profile) -> Topology:
    """Return the nodes of a rehearsal: runs of ranks with the sizes of the profile."""
    if not profile.topology:
        return Topology.flat(profile.world_size)
    edges = accumulate(profile.topology, initial=0)
    nodes = tuple(tuple(range(start, stop)) for start, stop in pairwise(edges))
    return Topology(nodes, source="profile")
