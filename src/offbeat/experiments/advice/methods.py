"""Methods of a verdict: strategies of the registry, and what other libraries do.

The uncertainty of a simulated method has two parts: messages that are slower or faster than
assumed, and the error of the simulator. Over 80 measured settings the simulator was at most 2.7 %
off (result `paced`). Published all-reduces of 4 and 8 machines at 50 Mbit/s to 5 Gbit/s took .94 to
1.23 times as long as estimated from rate and delay, with at most 10 ms of delay (result `stories`).
The uncertainty of equations extends from all messages hidden to none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from offbeat.core.derive.lean import leaves_gradients
from offbeat.core.guards.script_usage import strategy_that_runs
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
        strategy: strategy of the registry; None for a method of other libraries.
        change: kind of change of the mathematics against DDP.
        changes: phrase for this change.
        staleness: largest number of iterations until a gradient has reached all machines.
        machines: number of machines.
        batches: batches per iteration, in those of one machine alone.
        iteration_s: seconds per iteration.
        low_s: least seconds per iteration by the uncertainty.
        high_s: greatest seconds per iteration by the uncertainty.
        sent_bytes: payload bytes that a machine sends per iteration.
        memory: memory on a device. Devices of a machine each hold the whole replica, except under
            HSDP and ZeRO-3.
        sharded_memory: memory on a device if `fully_shard` divides the replica inside a machine;
            None if the method does not allow it.
        bound_at: lower bound of `seconds_at`, which needs no plan; None if there is none.
        basis: origin of the prediction.
        seconds_at: seconds per iteration in a place, planned anew there.
    """

    label: str
    strategy: Strategy | None
    change: Change
    changes: str
    staleness: int
    machines: int
    batches: float
    iteration_s: float
    low_s: float
    high_s: float
    sent_bytes: float
    memory: Memory
    basis: Basis
    seconds_at: SecondsAt = field(repr=False, compare=False)
    sharded_memory: Memory | None = None
    bound_at: SecondsAt | None = field(default=None, repr=False, compare=False)

    @property
    def same_numbers(self) -> bool:
        """Return whether the method learns the same as DDP on all machines."""
        return self.change == CHANGES[0] and self.machines > 1

    @property
    def batch_s(self) -> float:
        """Return the seconds per batch of one machine alone."""
        return self.iteration_s / self.batches

    @property
    def uncertainty(self) -> float:
        """Return the larger relative distance of `low_s` and `high_s` from `iteration_s`."""
        most = max(self.high_s - self.iteration_s, self.iteration_s - self.low_s)
        return most / self.iteration_s if self.iteration_s else 0.0


def message_errors(place: Place) -> tuple[float, float]:
    """Return the least and the greatest message time relative to the one in the profile."""
    if place.estimated:
        return ESTIMATED
    fit = max((link.fit_error or 0.0 for link in place.profile.links), default=0.0)
    error = max(MEASURED_ERROR, fit)
    return 1 - error, 1 + error


def of_option(option: Option, place: Place) -> Method:
    """Return the method of a simulated option."""
    method = _simulated_method(
        text_of(option.strategy),
        option.strategy,
        partial(_planned_seconds, option.strategy, option.plan),
        place,
        place.profile,
        iteration_s=option.iteration_s,
        change=option.change,
        changes=describe_change(option),
        staleness=option.staleness,
        sent_bytes=option.bytes,
        memory=option.strategy.memory(place.profile, option.plan),
        seconds_at=partial(_strategy_seconds, option.strategy),
        is_shardable=is_shardable(option.strategy, option.plan),
    )
    return replace(method, bound_at=partial(_strategy_bound_s, option.strategy))


def _planned_seconds(strategy: Strategy, plan: Plan, profile: Profile) -> float:
    """Return the seconds per iteration of a plan that is not made anew for the profile."""
    ran = replace(plan, bound_s=None)  # its bound is that of another profile
    return predict(strategy, profile, ran=ran).iteration_s


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
    served = SERVERS if strategy.needs.servers else 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            strategy = strategy_that_runs(strategy, place.profile)
            prediction = _predict(strategy, place, place.profile)
        except ValueError:
            return None
    if prediction.plan is not None:
        if prediction.plan.strategy != strategy.name:
            return None
        return of_option(option_of(strategy, prediction.plan, prediction), place)
    low, high = message_errors(place)
    times_s = [
        _predict(strategy, place, with_slower_links(place.profile, times)).iteration_s
        for times in (low, high)
    ]
    change: Change = "late" if strategy.applies_late else "averaged"
    if strategy.synchronous:
        change = CHANGES[0]
    clocks, iterations = getattr(strategy, "s", 0), getattr(strategy, "accumulate", 1)
    return Method(
        text_of(strategy),
        strategy,
        change,
        strategy.describe_change(None) or "same numbers as DDP",
        (clocks + 1) * iterations - 1,
        place.machines + served,
        place.batches,
        prediction.iteration_s,
        min(*times_s, prediction.iteration_s) * (1 - MODEL_ERROR),
        max(*times_s, prediction.iteration_s) * (1 + MODEL_ERROR),
        sum(prediction.bytes_per_iteration.values()),
        strategy.memory(place.profile),
        "simulated",
        partial(_strategy_seconds, strategy),
        bound_at=partial(_strategy_bound_s, strategy),
    )


def _strategy_seconds(strategy: Strategy, place: Place) -> float:
    with warnings.catch_warnings():  # of strategies that fall back to others
        warnings.simplefilter("ignore")
        strategy = strategy_that_runs(strategy, place.profile)
        return _predict(strategy, place, place.profile).iteration_s


def _strategy_bound_s(strategy: Strategy, place: Place) -> float:
    return strategy.bound_s(strategy.costed(place.profile))


def _predict(strategy: Strategy, place: Place, profile: Profile) -> Prediction:
    """Predict a strategy. Rates of single machines count only without a plan: a collective runs at
    the rate of the profile."""
    ranks = None if isinstance(strategy, Planned) else place.ranks
    return predict(strategy, profile, servers=SERVERS, ranks=ranks)


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
    seconds, memory = place.fastest_machine.compute_s, held_memory(place.profile)
    return Method(
        ALONE,
        None,
        "same numbers",
        "the batch of one machine",
        0,
        1,
        1,
        seconds,
        seconds * (1 - MODEL_ERROR),
        seconds * (1 + MODEL_ERROR),
        0.0,
        memory,
        "equations",
        lambda there: there.fastest_machine.compute_s,
        _on_devices(memory, place.devices) if place.devices > 1 else None,
    )


def accumulation(place: Place) -> Method:
    """Return DDP that updates once per 2, 4, ... batches: the least number whose messages leave
    `ENOUGH_COMPUTE` of the time to compute, at most `MOST_ACCUMULATED`.

    torch's `no_sync` leaves out the messages of all but the last batch.
    """
    profile, strategy = place.profile, planned(create(BASELINE))
    plan, needed_s = strategy.plan(profile), profile.slowest().compute_s
    count = 1
    while True:
        count *= 2
        made = accumulating_plan(plan, count)
        prediction = predict_plan(made, with_replica_per_rank(profile))
        enough = prediction.iteration_s * ENOUGH_COMPUTE <= needed_s
        if enough or count == MOST_ACCUMULATED:
            break
    return _simulated_method(
        f"{BASELINE}, {count} batches",
        None,
        partial(_ddp_seconds, made),
        place,
        profile,
        iteration_s=prediction.iteration_s,
        change="larger batch",
        changes=f"one update per {count} batches",
        staleness=0,
        sent_bytes=sum(prediction.bytes_per_iteration.values()),
        memory=strategy.memory(profile, plan),
        seconds_at=partial(_accumulation_seconds, count),
    )


def _accumulation_seconds(count: int, place: Place) -> float:
    plan = planned(create(BASELINE)).plan(place.profile)
    return _ddp_seconds(accumulating_plan(plan, count), place.profile)


def _ddp_seconds(plan: Plan, profile: Profile) -> float:
    """Return the seconds per iteration of a plan of torch's DDP, which averages over all ranks at
    once."""
    return predict_plan(plan, with_replica_per_rank(profile)).iteration_s


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
    profile, strategy = place.profile, planned(create(BASELINE))
    plan = strategy.plan(profile)
    prediction = predict_plan(plan, with_replica_per_rank(with_smaller_messages(profile, HALF)))
    memory = strategy.memory(profile, plan)
    staged = memory.staged_bytes + HALF * memory.gradients_bytes
    return _simulated_method(
        f"{BASELINE}, fp16 hook",
        None,
        partial(_ddp_seconds, plan),
        place,
        with_smaller_messages(profile, HALF),
        iteration_s=prediction.iteration_s,
        change="lossy",
        changes="gradients are sent as fp16",
        staleness=0,
        sent_bytes=HALF * sum(prediction.bytes_per_iteration.values()),
        memory=replace(memory, staged_bytes=staged),
        seconds_at=_half_precision_seconds,
    )


def _half_precision_seconds(place: Place) -> float:
    plan = planned(create(BASELINE)).plan(place.profile)
    return _ddp_seconds(plan, with_smaller_messages(place.profile, HALF))


def full_shards(place: Place) -> Method:
    """Return ZeRO-3 (`fully_shard`) over all devices of all machines."""
    memory = _sharded_memory(place.profile, place.machines * place.devices)
    return _by_equations("zero-3", _full_iteration, place, memory)


def hybrid_shards(place: Place) -> Method:
    """Return HSDP: shards inside each machine, and an average of gradients between them."""
    return _by_equations(
        "hsdp", _hybrid_iteration, place, _sharded_memory(place.profile, place.devices)
    )


def _full_iteration(place: Place) -> ShardedIteration:
    return zero3(place.by_device)


def _hybrid_iteration(place: Place) -> ShardedIteration:
    return hsdp(place.profile, place.devices)


def _by_equations(
    label: str, iteration: Callable[[Place], ShardedIteration], place: Place, memory: Memory
) -> Method:
    low, high = message_errors(place)
    now, fast, slow = (
        iteration(replace(place, profile=with_slower_links(place.profile, times)))
        for times in (1.0, low, high)
    )
    return Method(
        label,
        None,
        "same numbers",
        "same numbers as DDP",
        0,
        place.machines,
        place.batches,
        now.iteration_s,
        min(fast.bound_s, now.iteration_s) * (1 - MODEL_ERROR),
        max(slow.unhidden_s, now.iteration_s) * (1 + MODEL_ERROR),
        now.sent_bytes,
        memory,
        "equations",
        lambda there: iteration(there).iteration_s,
    )


def _simulated_method(
    label: str,
    strategy: Strategy | None,
    planned_seconds: Callable[[Profile], float],
    place: Place,
    profile: Profile,
    *,
    iteration_s: float,
    change: Change,
    changes: str,
    staleness: int,
    sent_bytes: float,
    memory: Memory,
    seconds_at: SecondsAt,
    is_shardable: bool = False,
) -> Method:
    """Return a method with a plan, which runs unchanged if messages take other times.

    `planned_seconds` returns the seconds per iteration of the plan on a profile.
    """
    low, high = message_errors(place)
    times_s = [planned_seconds(with_slower_links(profile, times)) for times in (low, high)]
    return Method(
        label,
        strategy,
        change,
        changes,
        staleness,
        place.machines,
        place.batches,
        iteration_s,
        min(*times_s, iteration_s) * (1 - MODEL_ERROR),
        max(*times_s, iteration_s) * (1 + MODEL_ERROR),
        sent_bytes,
        memory,
        "simulated",
        seconds_at,
        _on_devices(memory, place.devices) if is_shardable and place.devices > 1 else None,
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
    return replace(
        memory,
        parameters_bytes=memory.parameters_bytes / devices,
        gradients_bytes=memory.gradients_bytes / devices,
        state_bytes=memory.state_bytes / devices,
        buffers_bytes=memory.buffers_bytes / devices,
        staged_bytes=memory.staged_bytes / devices,
    )
