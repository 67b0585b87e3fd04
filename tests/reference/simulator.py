"""Slow twin of offbeat.sim: longest paths through an explicit graph of every rank's events.

Nodes are moments of ranks and ends of messages; an edge says "not before that, plus so long".
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offbeat.plan import Moment, Plan, Transfer
from offbeat.profile import Profile

Node = tuple[object, ...]


class DeadlockError(Exception):
    """Some event waits for itself."""


@dataclass
class Timeline:
    """Results; `ends_s[rank][iteration]`, and per message (start per rank, end)."""

    ends_s: list[list[float]]
    waited_s: list[list[float]]
    messages: dict[tuple[int, str, int], tuple[list[float], float]]


class Graph:
    """Events and what they come after."""

    def __init__(self) -> None:
        self.after: dict[Node, list[tuple[Node, float]]] = {}
        self.times: dict[Node, float] = {("start",): 0.0}

    def edge(self, before: Node, node: Node, seconds: float = 0.0) -> None:
        self.after.setdefault(node, []).append((before, seconds))

    def time(self, node: Node, path: frozenset[Node] = frozenset()) -> float:
        """Longest path to a node; KeyError if it is beyond the horizon."""
        if node in path:
            raise DeadlockError(node)
        if node not in self.times:
            longer = path | {node}
            self.times[node] = max(
                self.time(before, longer) + seconds for before, seconds in self.after[node]
            )
        return self.times[node]


def simulate(
    plans: Sequence[Plan],
    profile: Profile,
    factors: Sequence[Sequence[float]],
    iterations: int,
    rates: dict[str, float] | None = None,
) -> Timeline:
    """Timeline of one plan per rank; `factors[rank][iteration]` multiplies compute times.

    `rates[link]` is the slowest rank's relative rate. Raises DeadlockError.
    """
    # Past the last iteration, every rank may wait for a later one of the next rank.
    most_lag = max((t.after.lag for p in plans for t in p.transfers), default=0)
    horizon = iterations + most_lag * len(plans)
    graph = Graph()
    chain: dict[tuple[int, int], list[Node]] = {}
    for rank, plan in enumerate(plans):
        previous: Node = ("start",)
        for i in range(horizon):
            chain[rank, i] = []
            for name, seconds in day(plan, profile, factors[rank][i]):
                node = (rank, i, *name)
                graph.edge(previous, node, seconds)
                chain[rank, i].append(previous := node)
    sent = add_messages(graph, plans, profile, horizon, rates or {})
    for rank in range(len(plans)):
        for i in range(iterations):
            for node in chain[rank, i]:
                graph.time(node)
    return read(graph, plans, chain, sent, iterations)


def day(plan: Plan, profile: Profile, factor: float) -> Iterator[tuple[Node, float]]:
    """Events of one iteration in order, each with the seconds since the one before."""
    size = plan.buckets
    seconds = profile.other_s
    for b in range(size - 1, -1, -1):
        yield ("forward", b), seconds
        seconds = profile.buckets[b].forward_s * factor
    for b in range(size):
        yield ("grad", b), seconds + profile.buckets[b].backward_s * factor
        seconds = 0.0
        if plan.updates == "in_backward":
            yield ("update", b), 0.0
            yield ("updated", b), profile.bucket_update_s[b] * factor
    yield ("step",), 0.0
    if plan.updates == "at_step":
        for b in range(size):
            yield ("update", b), 0.0
            yield ("updated", b), profile.bucket_update_s[b] * factor
    yield ("end",), 0.0


def name_of(moment: Moment, size: int) -> Node:
    if moment.point in ("step", "end"):
        return (moment.point,)
    return (moment.point, size - 1 if moment.bucket is None else moment.bucket)


def deadline_of(moment: Moment, size: int) -> Node:
    """What waits: an update waits before it begins."""
    point, *rest = name_of(moment, size)
    return ("update" if point == "updated" else point, *rest)


def add_messages(
    graph: Graph, plans: Sequence[Plan], profile: Profile, horizon: int, rates: dict[str, float]
) -> dict[tuple[int, str, int], tuple[Node | None, list[Node]]]:
    """Per message: the node of the message before it on its link, and its releases."""
    found = {}
    for link in profile.links:
        previous: Node | None = None
        for i in range(horizon):
            for k in range(len(on_link(plans[0], i, link.name))):
                node: Node = ("message", i, link.name, k)
                ours = [on_link(plan, i, link.name)[k] for plan in plans]
                payload = ours[0].payload
                seconds = profile.message_s(link.name, payload.kind, payload.buckets)
                seconds /= rates.get(link.name, 1.0)
                releases: list[Node] = []
                for rank, t in enumerate(ours):
                    size = plans[rank].buckets
                    release = (rank, i + t.after.lag, *name_of(t.after, size))
                    due = (rank, i + t.before.lag, *deadline_of(t.before, size))
                    graph.edge(release, node, seconds)
                    if i + t.before.lag < horizon:
                        graph.edge(node, due)
                    releases.append(release)
                if previous is not None:
                    graph.edge(previous, node, seconds)
                found[i, link.name, k] = (previous, releases)
                previous = node
    return found


def on_link(plan: Plan, iteration: int, link: str) -> list[Transfer]:
    return [t for t in plan.transfers if plan.phase(iteration) in t.phases and t.link == link]


def read(
    graph: Graph,
    plans: Sequence[Plan],
    chain: dict[tuple[int, int], list[Node]],
    sent: dict[tuple[int, str, int], tuple[Node | None, list[Node]]],
    iterations: int,
) -> Timeline:
    def waited(node: Node) -> float:
        own = graph.after[node][0]  # the edge from the event before, which was added first
        return graph.time(node) - (graph.time(own[0]) + own[1])

    ranks = range(len(plans))
    messages = {}
    for key, (previous, releases) in sent.items():
        if key[0] < iterations:
            end_s = graph.time(("message", *key))
            free_s = 0.0 if previous is None else graph.time(previous)
            messages[key] = ([max(graph.time(r), free_s) for r in releases], end_s)
    return Timeline(
        [[graph.time(chain[rank, i][-1]) for i in range(iterations)] for rank in ranks],
        [[sum(map(waited, chain[rank, i])) for i in range(iterations)] for rank in ranks],
        messages,
    )
