"""Equations of jobs with members whose averages are due in a later forward."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from cases.member_jobs import Replica, Scenario, Weights, average, begin_epoch, outer_step
from cases.workers import snapshot
from torch import Tensor

from offbeat.core.plan.program import Program
from offbeat.elastic.profile import for_members
from offbeat.membership import Epoch


class Sent(NamedTuple):
    """Content of a message that lands: names of weights, and snapshots of them by replica; None if
    the weights themselves are averaged."""

    names: list[str]
    snapshots: list[Weights] | None


class LateAverages:
    """Averages of one epoch.

    Averages of weights land at the next forward, as `w = mean(w)`. Averages of snapshots `s` land
    after further iterations, as `w += mean(s) - s`, or with an outer optimizer as `w += common - s`
    with the result of its step on the mean.

    Args:
        scenario: what happens to the job.
        members: number of members of the epoch.
        landed: by link, the last message that has landed, if the epoch ends with a failure; None:
            all messages land.
    """

    def __init__(self, scenario: Scenario, members: int, landed: Mapping[str, Any] | None) -> None:
        profile = scenario.profile
        plan = scenario.strategy.plan(for_members(profile, members))
        self._program, self._landed = Program(plan), landed
        self._tensors = [list(bucket.tensors) for bucket in profile.buckets]
        self._orders = Counter[str]()
        self._due = defaultdict[int, list[Sent]](list)
        outer = [dict(apply.args) for apply in plan.applies if apply.rule == "outer"]
        self._outer = outer[0] if outer else None
        updates = [apply.at.point for apply in plan.applies if apply.rule == "local"]
        self._updates_late = "forward" in updates
        self._awaits_update = False

    def begin(self, t: int, replicas: Sequence[Replica]) -> None:
        """Let the averages land that the forward of an iteration of the epoch awaits."""
        for sent in self._due.pop(t, []):
            self._land(sent, replicas)
        if self._awaits_update:
            self._awaits_update = False
            for replica in replicas:
                replica.optimizer.step()

    def train(self, t: int, iteration: int, replicas: Sequence[Replica]) -> None:
        """Compute the gradients of an iteration, update, and send. An update from the average
        follows when it lands."""
        for replica in replicas:
            replica.compute_gradients(iteration)
            if not self._updates_late:
                replica.optimizer.step()
        self._awaits_update = self._updates_late
        snapshots = [snapshot(replica.weights) for replica in replicas]
        for transfer in self._program.transfers(t):
            order = self._orders[transfer.link]
            self._orders[transfer.link] += 1
            if self._landed is not None and order > self._last_order(transfer.link):
                continue
            payload, due = transfer.payload, transfer.before
            assert payload.parts == 1
            names = [name for b in payload.buckets for name in self._tensors[b]]
            sent = Sent(names, None if payload.buffer == "param" else snapshots)
            assert due.point == "forward"
            assert due.lag > 0
            self._due[t + due.lag].append(sent)

    def _last_order(self, link: str) -> int:
        assert self._landed is not None
        return self._landed[link]["order"] if link in self._landed else -1

    def _land(self, sent: Sent, replicas: Sequence[Replica]) -> None:
        if sent.snapshots is None:
            average(replicas, sent.names)
            for replica in replicas if self._outer is not None else ():
                for name in sent.names:
                    new = self._step(replica, name, replica.weights[name])
                    replica.weights[name].copy_(new)
            return
        for name in sent.names:
            mean = torch.stack([one[name] for one in sent.snapshots]).mean(0)
            for replica, own in zip(replicas, sent.snapshots, strict=True):
                new = mean if self._outer is None else self._step(replica, name, mean)
                replica.weights[name].add_(new - own[name])

    def _step(self, replica: Replica, name: str, mean: Tensor) -> Tensor:
        assert self._outer is not None
        return outer_step(replica, name, mean, self._outer)


def weights_at_forward(
    scenario: Scenario, epochs: Sequence[Epoch], processes: Mapping[str, int]
) -> dict[tuple[int, int], Weights]:
    """Return the weights by process and iteration with which the iterations compute; after the last
    iteration of a process, the weights that it has then.

    An epoch ends as if its next forward began. Averages that later forwards await are left out.

    Args:
        scenario: what happens.
        epochs: the epochs as recorded by the service.
        processes: numbers of the processes by their names in the job.
    """
    replicas: dict[int, Replica] = {}
    found: dict[tuple[int, int], Weights] = {}
    lasts = [*(epoch.first_iteration for epoch in epochs[1:]), scenario.iterations]
    for number, (epoch, last) in enumerate(zip(epochs, lasts, strict=True)):
        replicas = begin_epoch(scenario, replicas, [processes[n] for n in epoch.members])
        after = epochs[number + 1].details if number + 1 < len(epochs) else None
        landed = None if after is None else after.get("landed")
        late = LateAverages(scenario, len(replicas), landed)
        own, first = [*replicas.values()], epoch.first_iteration
        for t in range(first, last + 1):
            late.begin(t - first, own)
            if t == last and after is not None and landed is None:  # a requested change
                average(own)
            found |= {(one.who, t): snapshot(one.weights) for one in own}
            if t < last:
                late.train(t - first, t, own)
    return found
