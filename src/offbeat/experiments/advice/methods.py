"""Methods of a verdict: strategies of the registry, and what other libraries do.

The uncertainty of a simulated method has two parts: messages that are slower or faster than
assumed, and the error of the simulator. Over 80 measured settings the simulator was at most 2.7 %
off (result `paced`). Published all-reduces of 4 and 8 machines at 50 Mbit/s to 5 Gbit/s took .94 to
1.23 times as long as estimated from rate and delay, with at most 10 ms of delay (result `stories`).
The uncertainty of equations for GPUs extends from all messages hidden to none.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from offbeat.core.derive.lean import leaves_gradients
from offbeat.core.guards.suitable_strategy import strategy_that_runs
from offbeat.core.plan import INSIDE, Phases, Plan, base_link
from offbeat.core.profile import Profile
from offbeat.core.sim import predict, predict_plan
from offbeat.core.strategy.interface import Planned, Strategy, planned
from offbeat.core.strategy.parsing import text_of
from offbeat.core.strategy.plan_memory import Memory, held_memory
from offbeat.core.strategy.registry import BASELINE, create, find, strategy_names
from offbeat.experiments.advice.place import Place
from offbeat.experiments.advice.selection import (
    CHANGES,
    SAME_NUMBERS,
    Change,
    Option,
    has_defaults,
    predict_option,
)
from offbeat.experiments.advice.sharded import ShardedIteration, hsdp, zero3
from offbeat.experiments.elsewhere import with_slower_links, with_smaller_messages
from offbeat.strategies.ddp import with_replica_per_rank

SecondsAt = Callable[[Place], float]
MODEL_ERROR = 0.03  # of the simulator, relative
MEASURED_ERROR = 0.03  # least relative error of measured message times
ESTIMATED = (0.93, 1.25)  # least and greatest time of estimated messages, relative
MOST_ACCUMULATED = 32  # batches per update
SHARE = 0.9  # of the time that compute takes at the least rate, and from which accumulation ends
HALF = 0.5  # bytes of fp16 relative to float32
ALONE = "one machine"
LEAST_RATE_BPS, MOST_RATE_BPS = 1e5, 1e13
TOLERANCE = 1.05  # ratio of neighbouring rates of a search
ROUNDING = 1e-9
MOST_MACHINES = 64
PAYS = 0.5  # share of one machine's speed that a further machine must add


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
    changes: str = SAME_NUMBERS
    staleness: int = 0
    sharded_memory: Memory | None = None

    @property
    def same_numbers(self) -> bool:
        """Return whether the method learns the same as DDP on all machines."""
        return self.change == CHANGES[0] and self.machines > 1

    @property
    def least_memory(self) -> Memory:
        """Return the memory on a device, divided by `fully_shard` if the method allows it."""
        return self.sharded_memory or self.memory

    @property
    def batch_s(self) -> float:
        """Return the seconds per batch of one machine alone."""
        return self.iteration_s / self.batches


def _at_errors(place: Place) -> Iterator[Place]:
    """Yield the place with the least and with the greatest message times by their uncertainty."""
    fit = max((link.fit_error or 0.0 for link in place.profile.links), default=0.0)
    error = max(MEASURED_ERROR, fit)
    for times in ESTIMATED if place.estimated else (1 - error, 1 + error):
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
        changes=option.changes,
        staleness=option.staleness,
        sharded_memory=_on_devices(memory, place.devices) if divided else None,
    )


def is_shardable(strategy: Strategy, plan: Plan) -> bool:
    """Return whether the replicas of a strategy may be divided by `fully_shard`, which averages the
    gradients inside a machine and keeps them until the step."""
    between = (t for t in plan.transfers if base_link(t.link) != INSIDE)
    return not strategy.synchronous and leaves_gradients(replace(plan, transfers=tuple(between)))


def of_strategy(strategy: Strategy, place: Place) -> Method | None:
    """Return the method of a strategy with a plan, or of the variant of it that suits the script of
    the profile; None if it cannot be predicted here, or falls back to another strategy."""
    option = predict_option(strategy, place.profile)
    return None if option is None else of_option(option, place)


def _strategy_seconds(strategy: Strategy, place: Place) -> float:
    with warnings.catch_warnings():  # of strategies that fall back to others
        warnings.simplefilter("ignore")
        strategy = strategy_that_runs(strategy, place.profile)
        return predict(strategy, place.profile).iteration_s


def default_methods(place: Place) -> Iterator[Method]:
    """Yield the default settings of all registered strategies with a plan that can be predicted."""
    for cls in map(find, strategy_names()):
        if has_defaults(cls) and issubclass(cls, Planned):
            method = of_strategy(cls(), place)
            yield from () if method is None else (method,)


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
    )


def accumulation(place: Place) -> Method:
    """Return DDP that updates once per 2, 4, ... batches: the least number whose messages leave
    `SHARE` of the time to compute, at most `MOST_ACCUMULATED`."""
    count, enough_s = 2, place.profile.slowest().compute_s / SHARE
    while count < MOST_ACCUMULATED and _ddp_seconds(count, 1.0, place) > enough_s:
        count *= 2
    changes = f"one update per {count} batches"
    return _torch_ddp(place, f"{count} batches", "larger batch", changes, count=count)


def half_precision(place: Place) -> Method:
    """Return DDP with torch's `fp16_compress_hook`: messages of half the bytes, cast for free.

    For parameters of two bytes the hook changes nothing, and this prediction is too fast.
    """
    return _torch_ddp(place, "fp16 hook", "lossy", "gradients are sent as fp16", share=HALF)


def _torch_ddp(
    place: Place, name: str, change: Change, changes: str, count: int = 1, share: float = 1.0
) -> Method:
    """Return torch's DDP, which averages over all ranks at once.

    It updates once per `count` batches, as torch's `no_sync` leaves out the messages of all but the
    last, and its messages have a share of the bytes of the gradients.
    """
    profile, strategy = place.profile, planned(create(BASELINE))
    plan, seconds_at = strategy.plan(profile), partial(_ddp_seconds, count, share)
    memory = strategy.memory(profile, plan)
    cast_bytes = share * memory.gradients_bytes if share != 1 else 0
    found = predict_plan(accumulating_plan(plan, count), with_replica_per_rank(profile))
    return _method(
        place,
        f"{BASELINE}, {name}",
        seconds_at(place),
        [_ddp_seconds(count, share, there, plan) for there in _at_errors(place)],
        sent_bytes=share * sum(found.bytes_per_iteration.values()),
        memory=replace(memory, staged_bytes=memory.staged_bytes + cast_bytes),
        seconds_at=seconds_at,
        change=change,
        changes=changes,
    )


def _ddp_seconds(count: int, share: float, place: Place, plan: Plan | None = None) -> float:
    """Return the seconds per iteration of torch's DDP, planned anew without a plan."""
    plan = planned(create(BASELINE)).plan(place.profile) if plan is None else plan
    profile = with_smaller_messages(place.profile, share) if share != 1 else place.profile
    return predict_plan(accumulating_plan(plan, count), with_replica_per_rank(profile)).iteration_s


def accumulating_plan(plan: Plan, count: int) -> Plan:
    """Return the plan that averages and updates in the last of `count` iterations."""
    if count == 1:
        return plan
    last = Phases([count - 1])
    return replace(
        plan,
        transfers=tuple(replace(t, phases=last) for t in plan.transfers),
        applies=tuple(replace(apply, phases=last) for apply in plan.applies),
        period=count,
        bound_s=None,
    )


def full_shards(place: Place) -> Method:
    """Return ZeRO-3 (`fully_shard`) over all devices of all machines."""
    memory = _sharded_memory(place.profile, place.machines * place.devices)
    return _by_equations(
        "zero-3", lambda there: zero3(with_replica_per_rank(there.profile)), place, memory
    )


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
    )


def least_rate(method: Method, place: Place, share: float = SHARE) -> float | None:
    """Return the least rate at which compute takes a share of the time, in bits per second and to a
    relative `TOLERANCE`; None if it does not at `MOST_RATE_BPS`.

    The compute is that of the slowest machine. The method is planned anew at each rate. A greater
    rate may have a smaller share, as plans change with the rate; the result lies above the rate of
    the place, if the share is not reached there.
    """
    needed_s, here_bps = place.profile.slowest().compute_s * (1 + ROUNDING), place.rate_bps
    reached = needed_s >= share * method.iteration_s
    first, last = (LEAST_RATE_BPS, here_bps) if reached else (here_bps, MOST_RATE_BPS)
    steps = math.ceil(max(0.0, math.log(last / first, TOLERANCE)))
    rates = [first * TOLERANCE**step for step in range(steps)]
    found = bisect_left(
        rates, True, key=lambda bps: needed_s >= share * method.seconds_at(place.at_rate(bps))
    )
    return rates[found] if found < len(rates) else here_bps if reached else None


def last_paying_machine(method: Method, place: Place, most: int = MOST_MACHINES) -> int:
    """Return the number of machines beyond which a further one adds less than `PAYS` of the speed
    of one machine alone; `most` if even the last one pays."""
    alone_s = place.fastest_machine.compute_s

    def speed(machines: int) -> float:
        if machines == 1:
            return 1 / alone_s
        there = place.with_machines(machines)
        return there.batches / method.seconds_at(there)

    def is_too_many(count: int) -> bool:
        return speed(count) - speed(count - 1) < PAYS / alone_s

    if not is_too_many(most):
        return most
    return 1 + bisect_left(range(2, most + 1), True, key=is_too_many)


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
