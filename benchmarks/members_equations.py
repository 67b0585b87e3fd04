"""Equations of a job whose members change, in float64 and NumPy, for `members.py`.

`Reference` trains all replicas of a job in one place: forward, backward and SGD with momentum are
written out, and so are averages and DiLoCo's outer step. Of offbeat it uses the plan, which states
the content and the order of the messages, the codecs in NumPy, and the record of the membership
service: members and first iteration of each epoch, and for each link the number of the last message
that has landed, and the ranks that have received it from others.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat import Strategy
from offbeat.core.codecs import codec, way
from offbeat.core.plan import INSIDE, base_link
from offbeat.core.plan.program import Program
from offbeat.elastic.profile import for_members
from offbeat.membership import Epoch
from offbeat.plan import Plan, Transfer
from offbeat.profile import Bucket, Link, Profile

LAYERS, WIDTH = 6, 8
RATE, MOMENTUM = 0.05, 0.9
Vector = NDArray[np.float64]
Flat = list[Vector]  # one vector per bucket: weight, then bias of a layer; last layer first


def data(size: int) -> tuple[Vector, Vector]:
    """Return inputs and targets, [size, WIDTH] each."""
    draw = np.random.default_rng(7)
    x = draw.standard_normal((size, WIDTH))
    return x, np.tanh(x @ draw.standard_normal((WIDTH, WIDTH)))


def initial_weights() -> Flat:
    """Return the weights with which every process begins."""
    draw = np.random.default_rng(11)
    size = WIDTH * WIDTH + WIDTH
    return [draw.standard_normal(size) / WIDTH**0.5 for _ in range(LAYERS)]


def tensor_names(bucket: int) -> tuple[str, str]:
    """Return the names of the parameters of a bucket in `nn.Sequential(Linear, Tanh, ...)`."""
    layer = 2 * (LAYERS - 1 - bucket)
    return f"{layer}.weight", f"{layer}.bias"


def profile(members: int, per_node: int = 1) -> Profile:
    """Return a made-up profile, whose messages take about as long as backward."""
    size = 8 * (WIDTH * WIDTH + WIDTH)
    buckets = [
        Bucket(tensor_names(b)[0].partition(".")[0], 1e-3, 2e-3, size, tensors=tensor_names(b))
        for b in range(LAYERS)
    ]
    return Profile(
        buckets=tuple(buckets),
        links=(Link("net", 2e-4, size / 1.5e-3),),
        world_size=members,
        update_s=1e-4,
        topology=(per_node,) * members if per_node > 1 else (),
        inside=Link("inside", 1e-4, size / 1e-3) if per_node > 1 else None,
    )


def gradients(weights: Flat, x: Vector, y: Vector) -> Flat:
    """Return the gradient of the mean squared error, by bucket."""
    matrices = [flat[: WIDTH * WIDTH].reshape(WIDTH, WIDTH) for flat in reversed(weights)]
    biases = [flat[WIDTH * WIDTH :] for flat in reversed(weights)]
    inputs, last = [x], LAYERS - 1
    for layer in range(LAYERS):
        z = inputs[-1] @ matrices[layer].T + biases[layer]
        inputs.append(z if layer == last else np.tanh(z))
    delta, found = 2 * (inputs[-1] - y) / y.size, list[Vector]()
    for layer in range(last, -1, -1):
        found.append(np.concatenate([(delta.T @ inputs[layer]).ravel(), delta.sum(0)]))
        delta = (delta @ matrices[layer]) * (1 - inputs[layer] ** 2)
    return found


def zeros() -> Flat:
    """Return zeros in the shape of the weights."""
    return [np.zeros_like(w) for w in initial_weights()]


@dataclass
class Replica:
    """Weights and states of one member. `common` and `outer` are those of DiLoCo, `errors` those of
    a codec."""

    weights: Flat
    momentum: Flat
    common: Flat
    outer: Flat
    errors: Flat
    gradient: Flat = field(default_factory=list)
    steps: int = 0

    @classmethod
    def first(cls) -> Replica:
        momentum, outer, errors = (zeros() for _ in range(3))
        return cls(initial_weights(), momentum, initial_weights(), outer, errors)

    @classmethod
    def joining(cls, other: Replica) -> Replica:
        """Return a replica that begins with the state of a member."""
        groups = other.weights, other.momentum, other.common, other.outer
        weights, momentum, common, outer = ([v.copy() for v in group] for group in groups)
        return cls(weights, momentum, common, outer, zeros())

    def step(self) -> None:
        for w, v, g in zip(self.weights, self.momentum, self.gradient, strict=True):
            v *= MOMENTUM
            v += g
            w -= RATE * v
        self.steps += 1

    def outer_step(self, bucket: int, rate: float, momentum: float) -> None:
        """Step of SGD with Nesterov's momentum from the common weights (DiLoCo, Algorithm 1)."""
        change = self.common[bucket] - self.weights[bucket]
        self.outer[bucket] = momentum * self.outer[bucket] + change
        self.common[bucket] = self.common[bucket] - rate * (change + momentum * self.outer[bucket])
        self.weights[bucket] = self.common[bucket].copy()


def average(flats: Sequence[Flat], transfer: Transfer | None = None) -> None:
    """Set the content of a message, or all buckets, to the mean over the replicas."""
    buckets = range(LAYERS) if transfer is None else transfer.payload.buckets
    joined = [np.concatenate([flat[b] for b in buckets]) for flat in flats]
    part = slice(None) if transfer is None else transfer.payload.slice_of(joined[0].size)
    mean = np.mean([one[part] for one in joined], axis=0)
    for flat, one in zip(flats, joined, strict=True):
        one[part] = mean
        for b, values in zip(buckets, np.split(one, len(buckets)), strict=True):
            flat[b] = values


class Reference:
    """Weights of all members by the equations.

    All ranks of a member have its weights. Its gradient is the mean of those of its ranks.

    Args:
        strategy: strategy of the job.
        epochs: epochs as the service has recorded them.
        number_of: numbers of members by their names in the job. Process p is a rank of the member
            p // per_node.
        batches: samples that each process has read, by process and iteration.
        stop: number of iterations of the job.
        size: number of samples.
        united: whether the average before a change has taken place if a member has failed within
            the change and no record states it.
        per_node: number of ranks of each member.
    """

    def __init__(
        self,
        strategy: Strategy,
        epochs: Sequence[Epoch],
        number_of: Mapping[str, int],
        batches: Mapping[tuple[int, int], Sequence[int]],
        stop: int,
        size: int,
        *,
        united: bool = True,
        per_node: int = 1,
    ) -> None:
        self._strategy, self._epochs, self._number_of = strategy, epochs, number_of
        self._per_node = per_node
        self._batches, self._stop, self._united = batches, stop, united
        self._x, self._y = data(size)
        self._profile = profile(len(epochs[0].members), per_node)
        self._replicas: dict[int, Replica] = {}
        self._anchors = initial_weights()
        self.weights: dict[tuple[int, int], Flat] = {}
        self.is_ambiguous = False  # whether no record states if an average has taken place
        for number in range(len(epochs)):
            self._run(number)

    def _run(self, number: int) -> None:  # noqa: C901
        epoch, own = self._epochs[number], self._replicas
        members = [self._number_of[name] for name in epoch.members]
        source = own.get(members[0])
        joined = {who: Replica.first() if source is None else Replica.joining(source)
                  for who in members if who not in own}  # fmt: skip
        self._replicas = own = {who: (own | joined)[who] for who in members}
        after = self._epochs[number + 1] if number + 1 < len(self._epochs) else None
        last = self._stop if after is None else after.first_iteration
        # A failure may follow the record of a requested change that has not begun on any rank. If
        # the ranks have dropped the links before, all messages have landed, and none is reported.
        later = self._epochs[number + 1 :]
        failure = next((one for one in later if one.details.get("begun") == number), None)
        landed, survivors = None, members
        if failure is not None and (failure is after or failure.details["landed"]):
            landed = failure.details["landed"]
            survivors = [who for who in members if who in self._numbers(failure)]
        plan = self._strategy.plan(for_members(self._profile, len(members)))
        program, counts = Program(plan), Counter[str]()
        self._memories = defaultdict[Any, dict[str, Any]](dict)
        if all(transfer.wire is None for transfer in plan.transfers):  # of a single member
            for replica in own.values():
                replica.errors = zeros()
        for t in range(epoch.first_iteration, last):
            # Gradients of a member are those of all its ranks.
            every = program.transfers(t - epoch.first_iteration)
            transfers = [one for one in every if base_link(one.link) != INSIDE]
            has_landed, absent = list[bool](), dict[str, Collection[str]]()
            for transfer in transfers:
                order = counts[transfer.link]
                counts[transfer.link] += 1
                newest = {"order": math.inf} if landed is None else landed.get(transfer.link)
                has_landed.append(newest is not None and order <= newest["order"])
                if newest is not None and order == newest["order"]:
                    absent[transfer.id] = newest["missing"]
            self._absent = absent
            batches = {who: self._batches_of(who, t) for who in own}
            present = {who: replica for who, replica in own.items() if all(batches[who])}
            for who, replica in present.items():
                parts = [
                    gradients(replica.weights, self._x[batch], self._y[batch])
                    for batch in batches[who]
                ]
                replica.gradient = [np.mean(same, axis=0) for same in zip(*parts, strict=True)]
            messages = list(zip(transfers, has_landed, strict=True))
            if getattr(self._strategy, "synchronous", False):
                self._average_gradients(messages, members, survivors)
                for replica in present.values():
                    replica.step()
            elif averages_first(plan):
                self._average_weights(messages, plan, t - epoch.first_iteration)
                for replica in present.values():
                    replica.step()
            else:
                for replica in present.values():
                    replica.step()
                self._average_weights(messages, plan, t - epoch.first_iteration)
            if t == last - 1 and after is not None and self._unites(number):
                average([replica.weights for replica in own.values()])
                self._anchors = [w.copy() for w in own[members[0]].weights]
            for who, replica in present.items():
                self.weights[who, t] = [w.copy() for w in replica.weights]

    def _batches_of(self, member: int, t: int) -> list[Sequence[int]]:
        """Return the batches of all ranks of a member; an empty one for a rank without a record."""
        ranks = range(member * self._per_node, (member + 1) * self._per_node)
        return [self._batches.get((rank, t), ()) for rank in ranks]

    def _average_gradients(
        self,
        messages: Sequence[tuple[Transfer, bool]],
        members: Sequence[int],
        survivors: Sequence[int],
    ) -> None:
        """A message that has landed is the mean over all members, any other over the survivors."""
        own = {who: [g.copy() for g in self._replicas[who].gradient] for who in members}
        for transfer, has_landed in messages:
            group = members if has_landed else survivors
            average([own[who] for who in group], transfer)
        for who in members:
            self._replicas[who].gradient = own[who]

    def _average_weights(  # noqa: C901
        self, messages: Sequence[tuple[Transfer, bool]], plan: Plan, planned: int
    ) -> None:
        own = self._replicas
        # Of SelSync, which averages after the step; see `CASES`.
        votes_yes = any(replica.steps == 1 for replica in own.values())
        averaged, lost = set[int](), set[int]()
        for transfer, has_landed in messages:
            if transfer.payload.buffer != "param":
                raise ValueError(f"the equations have no message of {transfer.payload.buffer}")
            if not has_landed:
                lost |= {*transfer.payload.buckets}
            elif transfer.when is None or votes_yes:
                if transfer.wire is None:
                    average([replica.weights for replica in own.values()], transfer)
                else:
                    self._average_codes(transfer, planned)
                averaged |= {*transfer.payload.buckets}
        for apply in plan.applies:
            if apply.rule == "outer" and plan.phase(planned) in apply.phases:
                if lost & {*apply.buckets}:  # the step needs all averages
                    continue
                rate, momentum = float(apply.arg("rate")), float(apply.arg("momentum"))
                for bucket in averaged & {*apply.buckets}:
                    for replica in own.values():
                        replica.outer_step(bucket, rate, momentum)
                        self._anchors[bucket] = replica.weights[bucket].copy()

    def _average_codes(self, transfer: Transfer, planned: int) -> None:
        """Set the content of a message to the anchor plus the mean of the decoded changes; each
        rank of a member encodes a shard of the change and of the errors. Errors are zero on ranks
        that have received the message from another one."""
        wire, payload, own = transfer.wire, transfer.payload, self._replicas
        assert wire is not None
        used, via = codec(wire.name, dict(wire.args)), way(wire.name, dict(wire.args))
        whole = slice(payload.buckets.start, payload.buckets.stop)
        joined = {who: np.concatenate(one.weights[whole]) for who, one in own.items()}
        errors = {who: np.concatenate(one.errors[whole]) for who, one in own.items()}
        anchor = np.concatenate(self._anchors[whole])
        part = payload.slice_of(anchor.size)
        size = part.stop - part.start
        each = -(-size // self._per_node)
        absent = set[tuple[int, int]]()
        for name in self._absent.get(transfer.id, ()):
            member, _, rank = name.partition("/")
            absent.add((self._number_of[member], int(rank or 0)))
        for rank in range(self._per_node):
            first, stop = (part.start + min(size, n * each) for n in (rank, rank + 1))
            cut = slice(first, stop)
            given = [joined[who][cut] - anchor[cut] + errors[who][cut] for who in own]
            memories = [self._memories[transfer.id, place, rank] for place in range(len(own))]
            mean, lost = used.average(given, via, planned, memories)
            anchor[cut] += mean
            for who, error in zip(own, lost, strict=True):
                errors[who][cut] = 0.0 if (who, rank) in absent else error
        for who, replica in own.items():
            joined[who][part] = anchor[part]
            parts = len(payload.buckets)
            replica.weights[whole] = [w.copy() for w in np.split(joined[who], parts)]
            replica.errors[whole] = [e.copy() for e in np.split(errors[who], parts)]
        self._anchors[whole] = [a.copy() for a in np.split(anchor, len(payload.buckets))]

    def _unites(self, number: int) -> bool:
        """Return whether the average before a requested change has taken place."""
        change, later = self._epochs[number + 1], self._epochs[number + 2 :]
        if getattr(self._strategy, "synchronous", False) or "landed" in change.details:
            return False
        failed = [e for e in later if e.first_iteration == change.first_iteration]
        if not failed or "landed" not in failed[0].details:
            return True
        if failed[0].details.get("united") or failed[0].details.get("begun", -1) >= change.number:
            return True
        if "begun" in failed[0].details:
            return False
        self.is_ambiguous = True
        return self._united

    def _numbers(self, epoch: Epoch) -> set[int]:
        return {self._number_of[name] for name in epoch.members}


def averages_first(plan: Plan) -> bool:
    """Return whether parameters are sent in backward and updated in the step, from the average."""
    sends_early = any(
        t.payload.buffer == "param" and t.after.point == "grad" for t in plan.transfers
    )
    return sends_early and all(a.at.point == "step" for a in plan.applies if a.rule == "local")


def lost_batches(
    epochs: Sequence[Epoch],
    number_of: Mapping[str, int],
    batches: Mapping[tuple[int, int], Any],
    per_node: int = 1,
) -> set[tuple[int, int]]:
    """Return the batches, by process and iteration, whose training was lost with their member. A
    process whose join has failed may join later under another name."""
    lost = set[tuple[int, int]]()
    for number, (before, after) in enumerate(pairwise(epochs)):
        if "lost_from" in after.details:
            first, members = after.details["lost_from"], {*before.members}
            if before.first_iteration == after.first_iteration and number:
                members |= {*epochs[number - 1].members}  # the failure was within a change
            for who in {number_of[n] for n in members if n not in after.members}:
                again = [
                    epoch.first_iteration
                    for epoch in epochs[number + 2 :]
                    if who in map(number_of.get, epoch.members)
                ]
                stop = again[0] if again else math.inf
                lost |= {(n, t) for n, t in batches if n // per_node == who and first <= t < stop}
    return lost
