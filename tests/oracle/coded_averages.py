"""Equations of jobs with members whose averages of parameters are encoded."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from cases.member_jobs import Replica, Scenario, Weights, average, begin_epoch
from cases.workers import snapshot
from torch import Tensor

from offbeat import DreamDDP, LocalSGD, Profile
from offbeat.core.codecs import codec, way
from offbeat.core.plan.program import Program
from offbeat.core.transport.collectives import shard_slice
from offbeat.elastic.profile import for_members
from offbeat.membership import Epoch
from offbeat.plan import INSIDE, Payload, Phases, Plan, Transfer, Wire, base_link

LINK = "net"


@dataclass(frozen=True)
class MixedWires(LocalSGD):
    """One bucket per iteration, in turn, with the codec of this iteration of the period."""

    wires: tuple[Wire, ...] = ()

    name: ClassVar[str] = "mixed-wires"

    def encoded(self, plan: Plan, profile: Profile) -> Plan:
        plan = super().encoded(plan, profile)
        [whole] = plan.transfers
        transfers = tuple(
            replace(
                whole,
                payload=Payload("param", range(n % plan.buckets, n % plan.buckets + 1)),
                phases=Phases([n]),
                wire=whole.wire and replace(whole.wire, name=wire.name, args=wire.args),
            )
            for n, wire in enumerate(self.wires)
        )
        return replace(plan, transfers=transfers)


@dataclass(frozen=True)
class ScatteredWires(DreamDDP):
    """DreamDDP whose means are encoded again, so that codecs have a memory."""

    name: ClassVar[str] = "scattered-wires"

    def encoded(self, plan: Plan, profile: Profile) -> Plan:
        plan = super().encoded(plan, profile)
        transfers = tuple(
            t if t.wire is None else replace(t, wire=replace(t.wire, args=(("via", "scatter"),)))
            for t in plan.transfers
        )
        return replace(plan, transfers=transfers)


class Sent(NamedTuple):
    """Content of a message that lands."""

    transfer: Transfer
    planned: int
    snapshots: Mapping[int, Weights]
    absent: Sequence[tuple[int, int]]  # ranks that have not received it, as (member, rank of it)


class CodedAverages:
    """Weights, anchors and errors of all members.

    A message of vector s of each member, with anchor a and errors e, computes `p = s - a + e`,
    encodes p, and adds the mean of the decoded p to a. Parameters become a, or with a delay move by
    `gain (a - s)`. The error is what the code of p lacks, and zero on ranks that get the message
    from another one after a failure. A message that is skipped or dropped changes nothing.

    When members change, codecs begin anew; if all replicas were averaged, anchors begin with the
    average. A joining member has no errors, and a single member drops its own. Each rank of a node
    encodes a shard.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario, self._profile = scenario, scenario.profile
        self._tensors = [list(bucket.tensors) for bucket in self._profile.buckets]
        self._anchors = Replica(0).weights
        self._errors: dict[int, Weights] = {}
        self._replicas: dict[int, Replica] = {}
        self.found: dict[tuple[int, int], Weights] = {}

    def run(self, epochs: Sequence[Epoch], processes: Mapping[str, int]) -> None:
        """Compute the weights with which the iterations compute, by process and iteration; after
        the last iteration of a process, the weights that it has then."""
        lasts = [*(epoch.first_iteration for epoch in epochs[1:]), self._scenario.iterations]
        for number, (epoch, last) in enumerate(zip(epochs, lasts, strict=True)):
            self._begin([processes[name] for name in epoch.members])
            is_last = number + 1 == len(epochs)
            landed = None if is_last else epochs[number + 1].details.get("landed")
            newest, absent = None, list[tuple[int, int]]()
            if landed is not None:
                entry = landed.get(LINK, {"order": -1, "missing": []})
                newest = entry["order"]
                for name in entry["missing"]:
                    member, _, rank = name.partition("/")
                    absent.append((processes[member], int(rank or 0)))
            self._train(epoch.first_iteration, last, newest, absent)
            if not is_last and landed is None:  # a requested change
                self._unite(restarts=True)
            self._record(last)

    def _begin(self, members: Sequence[int]) -> None:
        self._replicas = begin_epoch(self._scenario, self._replicas, members)
        for who, replica in self._replicas.items():
            if who not in self._errors:
                zeros = {name: torch.zeros_like(w) for name, w in replica.weights.items()}
                self._errors[who] = zeros
        self._errors = {who: self._errors[who] for who in members}

    def _unite(self, *, restarts: bool) -> None:
        own = [*self._replicas.values()]
        average(own)
        if restarts:
            self._anchors = snapshot(own[0].weights)

    def _record(self, t: int) -> None:
        for who, replica in self._replicas.items():
            for process in replica.processes:
                self.found[process, t] = snapshot(self._replicas[who].weights)

    def _train(  # noqa: C901
        self, first: int, last: int, newest: int | None, absent: Sequence[tuple[int, int]]
    ) -> None:
        """Train in one epoch. If it ends with a failure, `newest` is the number of the last message
        that has landed."""
        plan = self._scenario.strategy.plan(for_members(self._profile, len(self._replicas)))
        if all(transfer.wire is None for transfer in plan.transfers):  # of a single member
            for error in (error for own in self._errors.values() for error in own.values()):
                error.zero_()
        program, orders = Program(plan), Counter[str]()
        due, begin = defaultdict[int, list[Sent]](list), first
        self._memories = defaultdict[Any, dict[str, Any]](dict)
        for t in range(first, last):
            for sent in due.pop(t, []):
                self._land(sent)
            self._record(t)
            for replica in self._replicas.values():
                replica.step(t)
            snapshots = {who: snapshot(one.weights) for who, one in self._replicas.items()}
            for transfer in program.transfers(t - begin):
                if base_link(transfer.link) == INSIDE:
                    continue
                order = orders[transfer.link]
                orders[transfer.link] += 1
                if newest is not None and order > newest:
                    continue
                lost = absent if order == newest else ()
                sent = Sent(transfer, t - begin, snapshots, lost)
                if transfer.before.point == "end":
                    self._land(sent)
                else:
                    assert transfer.before.point == "forward"
                    due[t + transfer.before.lag].append(sent)
            if t in self._scenario.unions:
                for sent in due.pop(t + 1, []):
                    self._land(sent)
                self._unite(restarts=False)
                self._memories.clear()
                due.clear()
                begin = t + 1
        for sent in due.pop(last, []):
            self._land(sent)

    def _land(self, sent: Sent) -> None:
        transfer = sent.transfer
        names = [name for b in transfer.payload.buckets for name in self._tensors[b]]
        anchor, gain = _vector(self._anchors, names), getattr(self._scenario.strategy, "gain", 1.0)
        whole = {who: _vector(one, names) for who, one in sent.snapshots.items()}
        errors = {who: _vector(self._errors[who], names) for who in whole}
        if transfer.wire is None:
            anchor = torch.stack([*whole.values()]).mean(0)
        else:
            self._decode(sent, transfer.wire, anchor, whole, errors)
            _write(anchor, self._anchors, names)
        for who, replica in self._replicas.items():
            _write(errors[who], self._errors[who], names)
            if transfer.payload.buffer == "param":
                _write(anchor, replica.weights, names)
            else:
                moved = _vector(replica.weights, names) + gain * (anchor - whole[who])
                _write(moved, replica.weights, names)

    def _decode(
        self,
        sent: Sent,
        wire: Wire,
        anchor: Tensor,
        whole: Mapping[int, Tensor],
        errors: Mapping[int, Tensor],
    ) -> None:
        """Add the mean of the decoded changes to the anchor, and set the errors."""
        used, ranks = codec(wire.name, dict(wire.args)), self._scenario.ranks
        for shard in range(ranks):
            cut = shard_slice(len(anchor), ranks, shard)
            given = [whole[who][cut] - anchor[cut] + errors[who][cut] for who in whole]
            keys = [(sent.transfer.id, place, shard) for place in range(len(given))]
            mean, lost = used.average(
                [one.numpy() for one in given],
                way(wire.name, dict(wire.args)),
                sent.planned,
                [self._memories[key] for key in keys],
            )
            anchor[cut] += torch.from_numpy(mean)
            for who, error in zip(whole, lost, strict=True):
                is_absent = (who, shard) in sent.absent
                errors[who][cut] = torch.zeros(len(error)) if is_absent else torch.from_numpy(error)


def _vector(weights: Weights, names: Sequence[str]) -> Tensor:
    """Return tensors end to end, as a message holds them."""
    return torch.cat([weights[name].reshape(-1) for name in names])


def _write(vector: Tensor, weights: Weights, names: Sequence[str]) -> None:
    parts = vector.split([weights[name].numel() for name in names])
    for name, part in zip(names, parts, strict=True):
        weights[name].copy_(part.view_as(weights[name]))
