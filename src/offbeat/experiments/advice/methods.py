"""Methods of a verdict: strategies of the registry, and what other libraries do.

The uncertainty of a simulated method has two parts: messages that are slower or faster than
assumed, and the error of the simulator. Over 80 measured settings the simulator was at most 2.7 %
off (result `paced`). Published all-reduces of 4 and 8 machines at 50 Mbit/s to 5 Gbit/s took .94 to
1.23 times as long as estimated from rate and delay, with at most 10 ms of delay (result `stories`).
The uncertainty of equations extends from all messages hidden to none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

from offbeat.core.derive.lean import leaves_gradients
from offbeat.core.guards.suitable_strategy import strategy_that_runs
from offbeat.core.plan import INSIDE, Phases, Plan, base_link
from offbeat.core.profile import Profile
from offbeat.core.sim import Prediction, predict, predict_plan
from offbeat.core.strategy.interface import Planned, Strategy, planned
from offbeat.core.strategy.parsing import text_of
from offbeat.core.strategy.plan_memory import Memory, held_memory
from offbeat.core.strategy.registry import BASELINE, create, find, strategy_names
from offbeat.experiments.advice.options import CHANGES, Change, Option, describe_change, option_of
from offbeat.experiments.advice.other_networks import with_slower_links, with_smaller_messages
from offbeat.experiments.advice.place import Place
from offbeat.experiments.advice.selection import has_defaults
from offbeat.experiments.advice.sharded import ShardedIteration, hsdp, zero3
from offbeat.strategies.ddp import with_replica_per_rank

Basis = Literal["simulated", "equations"]
SecondsAt = Callable[[Place], float]
MODEL_ERROR = 0.03  # of the simulator, relative
MEASURED_ERROR = 0.03  # least relative error of measured message times
ESTIMATED = (0.93, 1.25)  # least and greatest time of estimated messages, relative
MOST_ACCUMULATED = 32  # batches per update
ENOUGH_COMPUTE = 0.9  # share of compute from which accumulation of more batches ends
HALF = 0.5  # bytes of fp16 relative to float32
ALONE = "one machine"
SERVERS = 1  # further machines of strategies with servers


@dataclass(frozen=True)
class Method:
    """A way to train, with its predicted iteration.

    Attributes:
        label: text of the strategy, or name of a method of other libraries.
        machines: number of machines.
        batches: batches per iteration, in those of one machine alone.
        iteration_s: seconds per iteration.
        low_s: least seconds per iteration by the uncertainty.
        high_s: greatest seconds per iteration by the uncertainty.
        sent_bytes: payload bytes that a machine sends per iteration.
        memory: memory on a device. Devices of a machine each hold the whole replica, except under
            HSDP and ZeRO-3.
        seconds_at: seconds per iteration in a place, planned anew there.
        strategy: strategy of the registry; None for a method of other libraries.
        change: kind of change of the mathematics against DDP.
        changes: phrase for this change.
        staleness: largest number of iterations until a gradient has reached all machines.
        sharded_memory: memory on a device if `fully_shard` divides the replica inside a machine;
            None if the method does not allow it.
        basis: origin of the prediction.
    """

    label: str
    machines: int
    batches: float
    iteration_s: float
    low_s: float
    high_s: float
    sent_bytes: float
    memory: Memory
    seconds_at: SecondsAt = field(repr=False, compare=False)
    strategy: Strategy | None = None
    change: Change = CHANGES[0]
    changes: str = "same numbers as DDP"
    staleness: int = 0
    sharded_memory: Memory | None = None
    basis: Basis = "simulated"

    @property
    def same_numbers(self) -> bool:
        """Return whether the method learns the same as DDP on all machines."""
        return self.change == CHANGES[0] and self.machines > 1

    @property
    def batch_s(self) -> float:
        """Return the seconds per batch of one machine alone."""
        return self.iteration_s / self.batches


def message_errors(place: Place) -> tuple[float, float]:
    """Return the least and the greatest message time relative to the one in the profile."""
    if place.estimated:
        return ESTIMATED
    fit = max((link.fit_error or 0.0 for link in place.profile.links), default=0.0)
    error = max(MEASURED_ERROR, fit)
    return 1 - error, 1 + error


def _at_errors(place: Place) -> Iterator[Place]:
    """Yield the place with the least and with the greatest message times."""
    for times in message_errors(place):
        yield replace(place, profile=with_slower_links(place.profile, times))


def _method(
    place: Place, label: str, iteration_s: float, others_s: Iterable[float], **facts: Any
) -> Method:
    """Return a method whose iteration takes `others_s` if messages take other times."""
    times_s = (iteration_s, *others_s)
    low_s, high_s = min(times_s) * (1 - MODEL_ERROR), max(times_s) * (1 + MODEL_ERROR)
    facts = {"machines": place.machines, "batches": place.batches, **facts}
    return Method(label, iteration_s=iteration_s, low_s=low_s, high_s=high_s, **facts)


def of_option(option: Option, place: Place) -> Method:
    """Return the method of a simulated option."""
    strategy, plan = option.strategy, option.plan
    kept = replace(plan, bound_s=None)  # its bound is that of this profile
    memory = strategy.memory(place.profile, plan)
    divided = place.devices > 1 and is_shardable(strategy, plan)
    return _method(
        place,
        text_of(strategy),
        option.iteration_s,
        [predict(strategy, there.profile, ran=kept).iteration_s for there in _at_errors(place)],
        sent_bytes=option.bytes,
        memory=memory,
        seconds_at=partial(_strategy_seconds, strategy),
        strategy=strategy,
        change=option.change,
        changes=describe_change(option),
        staleness=option.staleness,
        sharded_memory=_on_devices(memory, place.devices) if divided else None,
    )


def is_shardable(strategy: Strategy, plan: Plan) -> bool:
    """Return whether the replicas of a strategy may be divided by `fully_shard`, which averages the
    gradients inside a machine and keeps them until the step."""
    between = (t for t in plan.transfers if base_link(t.link) != INSIDE)
    return not strategy.synchronous and leaves_gradients(replace(plan, transfers=tuple(between)))


def of_strategy(strategy: Strategy, place: Place) -> Method | None:
    """Return the method of a strategy of any kind, or of the variant of it that suits the script of
    the profile; None if it cannot be predicted here, or if it needs a replica per rank and devices
    share one.

    Votes count as accepted. A strategy with servers has one server on a further machine.
    """
    has_plan = type(strategy).open is Planned.open
    if place.devices > 1 and not (has_plan or strategy.needs.nodes):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            strategy = strategy_that_runs(strategy, place.profile)
            prediction = _predict(strategy, place)
        except ValueError:
            return None
    if prediction.plan is not None:
        if prediction.plan.strategy != strategy.name:
            return None
        return of_option(option_of(strategy, prediction.plan, prediction), place)
    change: Change = "late" if strategy.applies_late else "averaged"
    clocks, iterations = getattr(strategy, "s", 0), getattr(strategy, "accumulate", 1)
    return _method(
        place,
        text_of(strategy),
        prediction.iteration_s,
        [_predict(strategy, there).iteration_s for there in _at_errors(place)],
        machines=place.machines + (SERVERS if strategy.needs.servers else 0),
        sent_bytes=sum(prediction.bytes_per_iteration.values()),
        memory=strategy.memory(place.profile),
        seconds_at=partial(_strategy_seconds, strategy),
        strategy=strategy,
        change=CHANGES[0] if strategy.synchronous else change,
        changes=strategy.describe_change(None) or "same numbers as DDP",
        staleness=(clocks + 1) * iterations - 1,
    )


def _strategy_seconds(strategy: Strategy, place: Place) -> float:
    with warnings.catch_warnings():  # of strategies that fall back to others
        warnings.simplefilter("ignore")
        strategy = strategy_that_runs(strategy, place.profile)
        return _predict(strategy, place).iteration_s


def _predict(strategy: Strategy, place: Place) -> Prediction:
    """Predict a strategy. Rates of single machines count only without a plan: a collective runs at
    the rate of the profile."""
    ranks = None if isinstance(strategy, Planned) else place.ranks
    return predict(strategy, place.profile, servers=SERVERS, ranks=ranks)


def default_methods(place: Place) -> Iterator[Method]:
    """Yield the default settings of all registered strategies that can be predicted."""
    for name in strategy_names():
        cls = find(name)
        if has_defaults(cls) and (method := of_strategy(cls(), place)) is not None:
            yield method


# --- methods of other libraries ------------------------------------------------------------------


def outsiders(place: Place) -> Iterator[Method]:
    """Yield the methods that need no offbeat."""
    yield one_machine(place)
    yield accumulation(place)
    yield half_precision(place)
    if place.devices > 1:
        yield hybrid_shards(place)
    yield full_shards(place)


def one_machine(place: Place) -> Method:
    """Return the method that leaves all but the fastest machine unused."""
    memory = held_memory(place.profile)
    return _method(
        place,
        ALONE,
        place.fastest_machine.compute_s,
        (),
        machines=1,
        batches=1,
        sent_bytes=0.0,
        memory=memory,
        seconds_at=lambda there: there.fastest_machine.compute_s,
        changes="the batch of one machine",
        sharded_memory=_on_devices(memory, place.devices) if place.devices > 1 else None,
        basis="equations",
    )


@dataclass(frozen=True)
class _TorchDDP:
    """torch's DDP, which averages over all ranks at once.

    Attributes:
        count: batches per update. torch's `no_sync` leaves out the messages of all but the last.
        share: bytes of its messages relative to those of the gradients.
    """

    count: int = 1
    share: float = 1.0

    def predict(self, plan: Plan, profile: Profile) -> Prediction:
        """Return the prediction of a plan of DDP on a profile."""
        if self.share != 1:
            profile = with_smaller_messages(profile, self.share)
        return predict_plan(
            accumulating_plan(plan, self.count) if self.count > 1 else plan,
            with_replica_per_rank(profile),
        )

    def seconds_at(self, place: Place) -> float:
        """Return the seconds per iteration in a place."""
        plan = planned(create(BASELINE)).plan(place.profile)
        return self.predict(plan, place.profile).iteration_s

    def method(self, place: Place, name: str, change: Change, changes: str) -> Method:
        """Return the method."""
        profile, strategy = place.profile, planned(create(BASELINE))
        plan = strategy.plan(profile)
        found, memory = self.predict(plan, profile), strategy.memory(profile, plan)
        cast_bytes = self.share * memory.gradients_bytes if self.share != 1 else 0
        return _method(
            place,
            f"{BASELINE}, {name}",
            found.iteration_s,
            [self.predict(plan, there.profile).iteration_s for there in _at_errors(place)],
            sent_bytes=self.share * sum(found.bytes_per_iteration.values()),
            memory=replace(memory, staged_bytes=memory.staged_bytes + cast_bytes),
            seconds_at=self.seconds_at,
            change=change,
            changes=changes,
        )


def accumulation(place: Place) -> Method:
    """Return DDP that updates once per 2, 4, ... batches: the least number whose messages leave
    `ENOUGH_COMPUTE` of the time to compute, at most `MOST_ACCUMULATED`."""
    count, needed_s = 2, place.profile.slowest().compute_s
    while (
        count < MOST_ACCUMULATED and _TorchDDP(count).seconds_at(place) * ENOUGH_COMPUTE > needed_s
    ):
        count *= 2
    changes = f"one update per {count} batches"
    return _TorchDDP(count).method(place, f"{count} batches", "larger batch", changes)


def accumulating_plan(plan: Plan, count: int) -> Plan:
    """Return the plan that averages and updates in the last of `count` iterations."""
    last = Phases([count - 1])
    return replace(
        plan,
        transfers=tuple(replace(t, phases=last) for t in plan.transfers),
        applies=tuple(replace(apply, phases=last) for apply in plan.applies),
        period=count,
        bound_s=None,
    )


def half_precision(place: Place) -> Method:
    """Return DDP with torch's `fp16_compress_hook`: messages of half the bytes, cast for free.

    For parameters of two bytes the hook changes nothing, and this prediction is too fast.
    """
    hook = _TorchDDP(share=HALF)
    return hook.method(place, "fp16 hook", "lossy", "gradients are sent as fp16")


def full_shards(place: Place) -> Method:
    """Return ZeRO-3 (`fully_shard`) over all devices of all machines."""
    memory = _sharded_memory(place.profile, place.machines * place.devices)
    return _by_equations("zero-3", lambda there: zero3(there.by_device), place, memory)


def hybrid_shards(place: Place) -> Method:
    """Return HSDP: shards inside each machine, and an average of gradients between them."""
    memory = _sharded_memory(place.profile, place.devices)
    return _by_equations("hsdp", lambda there: hsdp(there.profile, there.devices), place, memory)


def _by_equations(
    label: str, iteration: Callable[[Place], ShardedIteration], place: Place, memory: Memory
) -> Method:
    now, fast, slow = map(iteration, (place, *_at_errors(place)))
    return _method(
        place,
        label,
        now.iteration_s,
        (fast.bound_s, slow.unhidden_s),
        sent_bytes=now.sent_bytes,
        memory=memory,
        seconds_at=lambda there: iteration(there).iteration_s,
        basis="equations",
    )


# --- memory --------------------------------------------------------------------------------------


def _sharded_memory(profile: Profile, shards: int) -> Memory:
    """Return the memory of `fully_shard`: shards, and two gathered layers with one's gradients.

    A rank keeps its shard of parameters, gradients and optimizer state, gathers the next layer
    while it computes one, and has the whole gradients of the layer until they are scattered.
    """
    whole = _on_devices(held_memory(profile), shards)
    sizes = sorted(bucket.payload_bytes("param") for bucket in profile.buckets)
    gathered = sum(sizes[-2:]) + max(bucket.size_bytes for bucket in profile.buckets)
    return replace(whole, buffers_bytes=gathered)


def _on_devices(memory: Memory, devices: int) -> Memory:
    """Return the memory of a replica that the devices of a machine share."""
    return Memory(**{name: size / devices for name, size in asdict(memory).items()})
