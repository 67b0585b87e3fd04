"""Jobs whose members change: what their processes do, and the equations of what they must have."""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import offbeat
from cases import member_failures
from cases.models import Case, batch, build_model, build_optimizer, loss_of, profile_of
from cases.node_jobs import profile_in
from cases.workers import snapshot
from offbeat import Members, Profile, Strategy
from offbeat.core.transport.link import LinkThread, Message
from offbeat.data import MemberSampler
from offbeat.elastic import feed as member_feed
from offbeat.elastic.profile import for_members
from offbeat.membership import Epoch, MembershipClient
from offbeat.membership.ledger import Ledger
from offbeat.membership.service import MembershipService

CASE = Case("mlp", "nesterov")
BATCH_SIZE = 4
SECRET = "members of a test"
TIMEOUT_S = 20.0
WAIT_S = 45.0  # for a process that starts on a loaded machine
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Scenario:
    """What happens to a job.

    Attributes:
        strategy: strategy of the job.
        iterations: number of iterations of the job.
        first: number of members at the start; their processes have the numbers 0 to first - 1.
        leaves: by process, the iteration before which it requests to leave.
        signals: by process, the iteration before which it receives SIGTERM.
        joins: by process that joins, the iteration before which the members wait for its request.
        joins_again: iteration before which the members wait for a process that has failed to join;
            -1: none.
        states: by iteration before which the members wait, the detail of a request to join for
            which they wait: "state", or "lost" for a lost connection. If there are any, joining
            processes receive the optimizer's state before members change.
        join_after: number of the epoch after whose beginning processes request to join.
        kills: by process, the iteration in which it ends; in its message, or after its step.
        kill_in_message: whether the process ends in its first message from that iteration on that
            is no vote, or in its first vote if `kill_in_vote`.
        deaf: by process, the iteration whose message it sends but fails to receive.
        loses: by process, further messages that it fails to receive, one after the other: the first
            one from an iteration on with a bucket, as (iteration, bucket).
        state: `join_state` of joining processes.
        least: smallest number of members with which the job continues after a failure.
        samples: number of samples that the members read once; 0: no sampler.
        lost_at: by process that remains, the iteration whose samples it has read when it notices
            that the store of the first member is lost.
        ranks: number of ranks of each member. Process p is a rank of the member p // ranks.
        ports: by member of several ranks, a free port of its node.
        orphans: processes that end with an error, because another rank of their member has.
        unions: iterations after which all members call `consolidate`.
        scales_gradients: whether the script writes gradients before the step, so that another plan
            follows the first iteration.
        inject: by process, the name of a failure in `cases.member_failures`.
        saves: iterations after which all members save a checkpoint.
        folder: folder of the checkpoints.
        snapshots: whether OFFBEAT_CHECKPOINT names the folder.
        measures: whether the first iterations are measured.
        survivors_later: number of epochs after that of a failure, whose members average the
            gradients of its last iteration.
        timeout_s: timeout of waits for other members, in seconds.
        at_forward: whether the recorded weights are those with which iterations compute, and in
            place of an iteration after the last one, those at the end.
    """

    strategy: Strategy
    iterations: int
    first: int = 3
    leaves: Mapping[int, int] = field(default_factory=dict)
    signals: Mapping[int, int] = field(default_factory=dict)
    joins: Mapping[int, int] = field(default_factory=dict)
    joins_again: int = -1
    states: Mapping[int, str] = field(default_factory=dict)
    join_after: int = 0
    kills: Mapping[int, int] = field(default_factory=dict)
    kill_in_message: bool = False
    kill_in_vote: bool = False
    deaf: Mapping[int, int] = field(default_factory=dict)
    loses: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)
    state: Any = "copy"
    least: int = 1
    samples: int = 0
    lost_at: Mapping[int, int] = field(default_factory=dict)
    ranks: int = 1
    ports: tuple[int, ...] = ()
    orphans: tuple[int, ...] = ()
    unions: tuple[int, ...] = ()
    scales_gradients: bool = False
    inject: Mapping[int, str] = field(default_factory=dict)
    saves: tuple[int, ...] = ()
    folder: str = ""
    snapshots: bool = False
    measures: bool = False
    survivors_later: int = 1
    timeout_s: float = TIMEOUT_S
    at_forward: bool = False

    @property
    def founders(self) -> int:
        """Number of the processes of the first members."""
        return self.first * self.ranks

    @property
    def processes(self) -> int:
        return self.founders + len(self.joins)

    @property
    def profile(self) -> Profile:
        if self.ranks == 1:
            return profile_of(CASE, self.first)
        firsts = range(0, self.founders, self.ranks)
        return profile_in(CASE, [[*range(a, a + self.ranks)] for a in firsts])


@dataclass
class Outcome:
    """What a process has after training: weights and samples of each iteration, its name in the
    job, the weights with which it has begun, the texts of its checkpoints, and by iteration digests
    of the anchors with which it begins."""

    name: str
    weights: dict[int, Weights]
    has_left: bool
    samples: dict[int, list[int]] = field(default_factory=dict)
    start: Weights = field(default_factory=dict)
    saved: list[str] = field(default_factory=list)
    anchors: dict[int, str] = field(default_factory=dict)


@contextmanager
def membership_service() -> Iterator[str]:
    """Yield the address of a membership service in a thread of this process."""
    listener = socket.create_server(("127.0.0.1", 0))
    service = MembershipService(Ledger(), listener, SECRET.encode())
    thread = threading.Thread(target=service.serve, daemon=True)
    thread.start()
    try:
        yield service.address
    finally:
        service.stop()
        thread.join(10)


def epochs_of(address: str) -> list[Epoch]:
    """Return all epochs that a service has written."""
    client = MembershipClient(address, SECRET.encode())
    newest = client.state().epoch
    assert newest is not None
    found = [client.epoch(number) for number in range(newest.number + 1)]
    client.close()
    return [epoch for epoch in found if epoch is not None]


def train_member(address: str, scenario: Scenario) -> Outcome:  # noqa: C901
    """Train as one process of a scenario."""
    who = enter_environment(scenario)
    if scenario.snapshots:
        os.environ["OFFBEAT_CHECKPOINT"] = scenario.folder
    if who >= scenario.founders:
        _await(lambda: _has_epoch(address, scenario.join_after))
    model = build_model(CASE, seed=who)
    optimizer = build_optimizer(CASE, model)
    if scenario.states:
        member_feed.LEAST_BYTES, member_feed.LEAST_S, member_feed.FEED_SHARE = 1, 0.0, 1e9
    _fail_in_messages(scenario, who)
    if who in scenario.inject:
        member_failures.inject(scenario.inject[who])
    model, optimizer = offbeat.prepare(
        model,
        optimizer,
        scenario.strategy,
        profile=None if scenario.measures else scenario.profile,
        timeout_s=scenario.timeout_s,
        nodes=scenario.ranks if scenario.ranks > 1 else None,
        members=Members(
            address, first=scenario.first, least=scenario.least, join_state=scenario.state
        ),
    )
    member = model._session.changes._member
    founders = set(member.epoch.members)
    history: dict[int, Weights] = {}
    if scenario.at_forward:
        record_forwards(model, history)
    start, savings = snapshot(dict(model.module.named_parameters())), list[Any]()
    batches, read, anchors = iter(repeat([0])), dict[int, list[int]](), dict[int, str]()
    if scenario.samples:
        batches = iter(MemberSampler(scenario.samples, BATCH_SIZE, model))
    while (t := offbeat.iteration(model)) < scenario.iterations:
        if scenario.leaves.get(who) == t:
            model.request_leave()
            _await(lambda: who_leaves(member))
        if scenario.signals.get(who) == t:
            os.kill(os.getpid(), signal.SIGTERM)
            _await(lambda: who_leaves(member))
        if t in (*scenario.joins.values(), scenario.joins_again) and who < scenario.founders:
            _await(lambda: has_joining(member, founders))
        if t in scenario.states and who < scenario.founders:
            _await(lambda: has_request_with(member, founders, scenario.states[t]))
        if (indices := next(batches, None)) is None:
            break
        read[t] = indices
        anchors[t] = digest_anchors(model)
        if scenario.lost_at.get(who) == t:
            _await(lambda: model._session._cluster.control.has_lost_store)
        optimizer.zero_grad()
        loss_of(model, *batch(CASE, who, t)).backward()
        for p in model.parameters() if scenario.scales_gradients else ():
            if p.grad is not None:
                p.grad.mul_(1.0)
        optimizer.step()
        if t in scenario.unions:
            model.consolidate()
        if t in scenario.saves:
            savings.append(offbeat.save(scenario.folder, model, optimizer))
        if not scenario.at_forward:
            history[t] = snapshot(dict(model.module.named_parameters()))
        if scenario.kills.get(who) == t and not scenario.kill_in_message:
            if (writer := getattr(model._session._recorder, "_writer", None)) is not None:
                assert writer.flush(WAIT_S)  # its thread has had time for the first files
            os._exit(9)
        if model.has_left:
            break
    if scenario.at_forward:
        history[offbeat.iteration(model)] = snapshot(dict(model.named_parameters()))
    has_left, saved = model.has_left, [saved_text(saving) for saving in savings]
    model.close()
    return Outcome(member.name, history, has_left, read, start, saved, anchors)


def digest_anchors(model: Any) -> str:
    """Return a digest of the anchors of the codecs of this rank."""
    engine, digest = model._session.engine, hashlib.sha256()
    wires = [t.wire for t in engine.plan.transfers if t.wire is not None]
    for name in sorted({wire.anchor for wire in wires if wire.anchor is not None}):
        for tensor in engine.flat.parameters_of(name, range(len(engine.flat.buckets))):
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def record_forwards(model: Any, history: dict[int, Weights]) -> None:
    """Record the weights of each module when its forward ends. Reading them between two iterations
    would complete averages that the next forward awaits."""

    def record(name: str, module: nn.Module, *_: Any) -> None:
        own = {f"{name}.{key}": p for key, p in module.named_parameters(recurse=False)}
        history.setdefault(offbeat.iteration(model), {}).update(snapshot(own))

    for name, module in model.module.named_children():
        module.register_forward_hook(partial(record, name))


def train_twice(address: str, scenario: Scenario) -> list[Weights]:
    """Return the weights after two jobs of this process, one after the other."""
    who, found = enter_environment(scenario), list[Weights]()
    for _ in range(2):
        model = build_model(CASE, seed=0)
        model, optimizer = offbeat.prepare(
            model,
            build_optimizer(CASE, model),
            scenario.strategy,
            profile=scenario.profile,
            timeout_s=scenario.timeout_s,
            members=Members(address, first=scenario.first),
        )
        for t in range(scenario.iterations):
            optimizer.zero_grad()
            loss_of(model, *batch(CASE, who, t)).backward()
            optimizer.step()
        found.append(snapshot(dict(model.module.named_parameters())))
        model.close()
    return found


def saved_text(saving: Any) -> str:
    """Return the name of a checkpoint, or why it was not saved."""
    try:
        return saving.wait().name
    except RuntimeError as error:
        return str(error)


def enter_environment(scenario: Scenario) -> int:
    """Set the variables of a process of a scenario. Return its number."""
    who, ranks = int(os.environ.pop("RANK")), scenario.ranks
    for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    os.environ["OFFBEAT_SECRET"] = SECRET
    order = "RANK" if ranks == 1 else "GROUP_RANK"
    if who < scenario.founders:
        os.environ[order] = str(who // ranks)  # the order of the first members
    if ranks > 1:
        local = str(who % ranks)
        os.environ |= {"RANK": local, "LOCAL_RANK": local, "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        os.environ["MASTER_PORT"] = str(scenario.ports[who // ranks])
    return who


def train_recorded_member(folder: str, address: str, scenario: Scenario) -> Outcome:
    """Train as one process of a scenario with a record and a log, which also holds the arguments of
    the process and the reports of its link to the service."""
    who = os.environ["RANK"]
    os.environ |= {"OFFBEAT_RECORD": f"{folder}/runs", "OFFBEAT_LOG": "json"}
    logging.basicConfig(level=logging.DEBUG, filename=f"{folder}/debug{who}")
    with Path(folder, f"log{who}").open("w") as log:
        print(Path("/proc/self/cmdline").read_text(), flush=True, file=log)
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        return train_member(address, scenario)


def who_leaves(member: Any) -> bool:
    """Whether the watch of a member has seen the member's request to leave."""
    state = member.watch.state
    return state is not None and member.name in {one.member for one in state.leaving}


def has_joining(member: Any, founders: set[str]) -> bool:
    """Whether the watch of a member has seen a request to join, or its acceptance."""
    state = member.watch.state
    has_joined = bool({*member.epoch.members} - founders)
    return has_joined or (state is not None and bool(state.joining))


def has_request_with(member: Any, founders: set[str], detail: str) -> bool:
    """Whether the watch of a member has seen a request to join with a detail, or its acceptance."""
    state = member.watch.state
    return bool({*member.epoch.members} - founders) or any(
        request.details.get(detail) for request in (state.joining if state else ())
    )


def _has_epoch(address: str, number: int) -> bool:
    client = MembershipClient(address)
    epoch = client.state().epoch
    client.close()
    return epoch is not None and epoch.number >= number


def _await(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, "the condition does not hold within the timeout"
        time.sleep(0.005)


def _fail_in_messages(scenario: Scenario, who: int) -> None:
    """Let this process end in a message, or fail to receive one."""
    send, loses = LinkThread._send, [*scenario.loses.get(who, ())]

    def send_or_fail(link: LinkThread, message: Message) -> None:
        payload, kills = message.transfer.payload, scenario.kills.get(who, math.inf)
        is_chosen = (payload.buffer == "vote") == scenario.kill_in_vote
        if scenario.kill_in_message and is_chosen and message.iteration >= kills:
            os._exit(9)
        given = message.tensors
        send(link, message)
        is_lost = scenario.deaf.get(who) == message.iteration
        if loses and payload.buffer in ("param", "average"):
            iteration, bucket = loses[0]
            if message.iteration >= iteration and bucket in payload.buckets:
                del loses[0]
                is_lost = True
        if is_lost:
            message.tensors, message.errors = given, ()
            raise RuntimeError("the connection of this test has failed")

    if who in (*scenario.kills, *scenario.deaf, *scenario.loses):
        LinkThread._send = send_or_fail  # type: ignore[method-assign]


# ---- equations ------------------------------------------------------------------------------


Average = Callable[[int, Sequence["Replica"]], None]
"""Averages of an iteration, counted from the start of the epoch, over its members."""


class Replica:
    """Model and optimizer of one process, and its values of the strategy."""

    def __init__(self, who: int, ranks: int = 1):
        self.who = who
        self.processes = range(who * ranks, (who + 1) * ranks)
        self.model = build_model(CASE, seed=0)
        self.optimizer = build_optimizer(CASE, self.model)
        self.buffers: dict[str, Weights] = {}
        self.steps = 0

    def copy_from(self, other: Replica, state: str) -> None:
        """Begin with the state of a member, but with an empty optimizer state if it is "fresh"."""
        self.model.load_state_dict(other.model.state_dict())
        if state == "copy":
            self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
        self.buffers = snapshot(other.buffers)

    @property
    def weights(self) -> Weights:
        return {n: p.data for n, p in self.model.named_parameters()}

    def compute_gradients(self, t: int) -> None:
        """Compute the mean of the gradients of the processes."""
        self.optimizer.zero_grad()
        for process in self.processes:
            (loss_of(self.model, *batch(CASE, process, t)) / len(self.processes)).backward()

    def step(self, t: int) -> None:
        self.compute_gradients(t)
        self.optimizer.step()
        self.steps += 1


def step_together(replicas: Sequence[Replica], t: int) -> None:
    """Step all replicas by the mean of their gradients."""
    for replica in replicas:
        replica.compute_gradients(t)
    for same in zip(*(replica.model.parameters() for replica in replicas), strict=True):
        gradients = [p.grad for p in same if p.grad is not None]
        if gradients:
            mean = torch.stack(gradients).mean(0)
            for p in same:
                p.grad = mean.clone()
    for replica in replicas:
        replica.optimizer.step()


def average(replicas: Sequence[Replica], names: Sequence[str] | None = None) -> None:
    """Set weights of all replicas to their mean."""
    for name in replicas[0].weights if names is None else names:
        mean = torch.stack([r.weights[name] for r in replicas]).mean(0)
        for r in replicas:
            r.weights[name].copy_(mean)


def expected(  # noqa: C901
    scenario: Scenario,
    epochs: Sequence[Epoch],
    processes: Mapping[str, int],
    average_at: Average,
) -> dict[tuple[int, int], Weights]:
    """Return the weights by process and iteration that the equations of a scenario give.

    Args:
        scenario: what happens.
        epochs: the epochs as recorded by the service.
        processes: numbers of the processes by their names in the job.
        average_at: averages of the strategy.

    In an epoch that ends with a failure, all averages after the last one that has landed are left
    out. The service records that iteration.
    """
    replicas: dict[int, Replica] = {}
    states: dict[tuple[int, int], Any] = {}  # of optimizers, by process and finished iterations
    found: dict[tuple[int, int], Weights] = {}
    lasts = [*(epoch.first_iteration for epoch in epochs[1:]), scenario.iterations]
    for number, (epoch, last) in enumerate(zip(epochs, lasts, strict=True)):
        known, members = {*replicas}, [processes[name] for name in epoch.members]
        replicas = begin_epoch(scenario, replicas, members)
        for name, who in zip(epoch.members, members, strict=True):
            origin = epoch.details.get("states", {}).get(name)
            if known and who not in known and origin is not None:
                earlier = states[processes[origin["member"]], origin["iteration"]]
                groups = replicas[who].optimizer.state_dict()["param_groups"]
                both = {"state": earlier, "param_groups": groups}
                replicas[who].optimizer.load_state_dict(both)
        after = epochs[number + 1].details if number + 1 < len(epochs) else {"lost_from": last}
        for t in range(epoch.first_iteration, last):
            if getattr(scenario.strategy, "synchronous", False):
                alive = [*replicas.values()]
                if t >= after.get("lost_from", last):  # the members of a later epoch
                    later = epochs[number + scenario.survivors_later].members
                    alive = [replicas[processes[name]] for name in later]
                step_together(alive, t)
                found |= {(p, t): snapshot(r.weights) for r in alive for p in r.processes}
                continue
            for replica in replicas.values():
                replica.step(t)
            if t < after.get("lost_from", last):
                average_at(t - epoch.first_iteration, [*replicas.values()])
            if t == last - 1 and ("lost_from" not in after or after.get("united")):
                # The change was requested; another one after a failure within it may follow.
                average([*replicas.values()])
            elif t in scenario.unions:
                survivors = epochs[number + 1].members if t == last - 1 else epoch.members
                average([replicas[processes[name]] for name in survivors])
            if scenario.states:
                states |= {
                    (who, t + 1): copy.deepcopy(replica.optimizer.state_dict()["state"])
                    for who, replica in replicas.items()
                }
            found |= {
                (process, t): snapshot(replica.weights)
                for replica in replicas.values()
                for process in replica.processes
            }
    return found


def begin_epoch(
    scenario: Scenario, replicas: Mapping[int, Replica], members: Sequence[int]
) -> dict[int, Replica]:
    """Return the replicas of an epoch. A new one begins with the state of the first member."""
    found, source = dict[int, Replica](), replicas.get(members[0])
    for who in members:
        if (one := replicas.get(who)) is None:
            one = Replica(who, scenario.ranks)
            if source is not None:
                one.copy_from(source, scenario.state)
            else:
                common = snapshot(one.weights)
                velocity = {name: torch.zeros_like(w) for name, w in common.items()}
                one.buffers = {"common": common, "velocity": velocity}
        found[who] = one
    return found


def every(period: int) -> Average:
    """Averages of local SGD."""

    def average_at(t: int, replicas: Sequence[Replica]) -> None:
        if (t + 1) % period == 0:
            average(replicas)

    return average_at


def with_states(average_at: Average) -> Average:
    """Averages of weights and of momentum."""

    def average_both(t: int, replicas: Sequence[Replica]) -> None:
        before = snapshot([replica.weights for replica in replicas])
        average_at(t, replicas)
        moved = any(
            not replica.weights[name].equal(was[name])
            for replica, was in zip(replicas, before, strict=True)
            for name in was
        )
        if moved:
            average_momentum(replicas)

    return average_both


def average_momentum(replicas: Sequence[Replica]) -> None:
    """Set momentum of all replicas to its mean."""
    states = [[*replica.optimizer.state.values()] for replica in replicas]
    for same in zip(*states, strict=True):
        mean = torch.stack([state["momentum_buffer"] for state in same]).mean(0)
        for state in same:
            state["momentum_buffer"].copy_(mean)


def with_moments(period: int, first: int) -> Average:
    """Averages of DES-LOC: of weights every `period` iterations, and of the momentum of every
    `first`-th of these iterations."""

    def average_at(t: int, replicas: Sequence[Replica]) -> None:
        if (t + 1) % period == 0:
            average(replicas)
        if (t + 1) % (period * first) == 0:
            average_momentum(replicas)

    return average_at


def after_votes(period: int) -> Average:
    """Averages of SelSync with a threshold that no norm reaches: a process votes yes only in its
    first iteration, and the last iteration of a period needs no vote."""

    def average_at(t: int, replicas: Sequence[Replica]) -> None:
        if (t + 1) % period == 0 or any(replica.steps == 1 for replica in replicas):
            average(replicas)

    return average_at


def by_plan(scenario: Scenario) -> Average:
    """Averages of a plan by bucket, each followed by its outer step if the plan has one."""
    profile = scenario.profile
    tensors = [list(bucket.tensors) for bucket in profile.buckets]

    def average_at(t: int, replicas: Sequence[Replica]) -> None:
        plan = scenario.strategy.plan(for_members(profile, len(replicas)))
        for transfer in plan.transfers:
            if plan.phase(t) in transfer.phases:
                average(replicas, [n for b in transfer.payload.buckets for n in tensors[b]])
        for apply in plan.applies:
            if apply.rule == "outer" and plan.phase(t) in apply.phases:
                for replica in replicas:
                    for name in (n for b in apply.buckets for n in tensors[b]):
                        weight = replica.weights[name]
                        weight.copy_(outer_step(replica, name, weight, dict(apply.args)))

    return average_at


def outer_step(replica: Replica, name: str, mean: Tensor, args: Mapping[str, Any]) -> Tensor:
    """Return the weights after a step of SGD with Nesterov's momentum from the common weights
    towards their mean (DiLoCo, Algorithm 1)."""
    common, velocity = replica.buffers["common"], replica.buffers["velocity"]
    gradient = common[name] - mean
    velocity[name] = args["momentum"] * velocity[name] + gradient
    common[name] = common[name] - args["rate"] * (gradient + args["momentum"] * velocity[name])
    return common[name]


def largest_difference(
    found: Sequence[Outcome | None], right: Mapping[tuple[int, int], Weights]
) -> float:
    """Return the largest difference of a weight between outcomes, by process, and the equations."""
    differences = [
        (right[who, t][name] - value).abs().max().item()
        for who, outcome in enumerate(found)
        if outcome is not None
        for t, weights in outcome.weights.items()
        for name, value in weights.items()
    ]
    assert differences
    return max(differences)
