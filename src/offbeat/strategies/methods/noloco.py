"""NoLoCo: local steps, then an outer step on the mean of a pair of workers that is drawn anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

import numpy as np

from offbeat.core.plan import Apply, Buffer, Fact, Moment, Payload, Phases, Plan, Transfer, local
from offbeat.core.profile import Profile
from offbeat.core.rules.vocabulary import Context, Setting, rule
from offbeat.core.strategy.interface import Planned, backward_bound_s, require_count
from offbeat.strategies.averaging import EVERY_ITERATION
from offbeat.strategies.equations import Array, Equations, World
from offbeat.strategies.outer_optimizer import is_real

STEP, END = Moment("step"), Moment("end")
SLOW, VELOCITY = "slow", "velocity"
THEIRS, THEIR_SLOW = "partner", "slow of partner"
Pair = tuple[int, ...]


@rule(
    reads=("param",),
    writes=("param",),
    conserves=False,
    kept=Setting("number", 0.3, most=1.0, contracts=True),
    rate=Setting("number", optional=True),
    momentum=Setting("number", 0.5, contracts=True),
    slow=Setting("buffer", SLOW, kind="param"),
    velocity=Setting("buffer", VELOCITY, kind="param"),
    theirs=Setting("buffer", THEIRS, kind="param", use="reads"),
    their_slow=Setting("buffer", kind="param", optional=True, use="reads"),
)
def step_in_pair(context: Context, apply: Apply) -> None:
    """Compute `v = momentum v + rate (mean(w) - mean(slow)) + (1 - kept) (mean(slow) - slow); slow
    += v; w = slow`, with means over this worker and its partner.

    `kept` is the share of the difference between slow parameters that remains. Without `rate` it is
    `1 - kept`, so that the slow parameters of the partner are not needed. Running statistics become
    the mean.

    Source: Kolehmainen et al., NoLoCo, 2025, Section 3.2, and its reference code, where `1 - kept`
    is gamma.
    """
    buckets, momentum = apply.buckets, apply.arg("momentum", 0.5)
    closing, rate = 1 - apply.arg("kept", 0.3), apply.arg("rate")
    names = ["param", apply.arg("slow", SLOW), apply.arg("velocity", VELOCITY)]
    names += [apply.arg("theirs", THEIRS), apply.arg("their_slow") or names[1]]
    columns = [context.parameters(name, buckets) for name in names]
    new = []
    for w, slow, velocity, theirs, their_slow in zip(*columns, strict=True):
        velocity *= momentum
        if rate is None:
            velocity += closing * ((w + theirs) / 2 - slow)
        else:
            mean_slow = (slow + their_slow) / 2
            velocity += rate * ((w + theirs) / 2 - mean_slow) + closing * (mean_slow - slow)
        slow += velocity
        new.append(slow)
    means = context.read(names[3], buckets)
    for w, theirs in zip(context.write("param", buckets), means, strict=True):
        w += theirs
        w /= 2
    for w, slow in zip(columns[0], new, strict=True):
        w[...] = slow


@dataclass(frozen=True)
class NoLoCo(Planned):
    """Local steps, then an outer step with one other worker, drawn anew in each round.

    After `period` local steps the workers form random pairs. Each pair exchanges parameters, and
    both workers step their own slow parameters s:

        v_k = momentum v_k + lr (mean(w) - mean(s)) + gamma (mean(s) - s_k);  s_k += v_k;  w_k = s_k

    with means over the pair. No message waits for a third worker. Replicas approach each other but
    are not equal; `model.consolidate()` averages them. With an odd number of workers one of them
    steps alone in each round. The pairs of `rounds` rounds are drawn from `seed` and then repeat.
    Readings: `gamma` is `lr`, as in the reference code; pipeline stages are not rerouted.
    """

    period: int = 50
    """Local steps between two rounds."""
    lr: float = 0.7
    """Learning rate of the outer step (beta)."""
    momentum: float = 0.5
    """Momentum of the outer step (alpha)."""
    gamma: float | None = None
    """Factor of the difference from the pair's mean slow parameters; None: that of `lr`, which
    needs no message of slow parameters."""
    rounds: int = 16
    """Rounds with pairs of their own, before the pairs repeat."""
    seed: int = 0
    """Seed of the pairs."""

    name: ClassVar[str] = "noloco"
    synchronous: ClassVar[bool] = False
    unadvised: ClassVar[str] = (
        "replicas differ until the end of training, as only pairs of workers average"
    )
    citation: ClassVar[str] = (
        "Kolehmainen et al., NoLoCo: No-all-reduce low communication training method for large "
        "models, arXiv 2506.10911, 2025"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("period", self.period, remedy=EVERY_ITERATION)
        require_count("rounds", self.rounds)
        require_count("seed", self.seed, least=0)
        for name, value in (("lr", self.lr), ("gamma", self.gamma)):
            if value is not None and (not is_real(value) or not 0 < value <= 1):
                raise ValueError(
                    f"{name} ({value!r}) must lie above 0 and be at most 1; 1 takes the mean"
                )
        if not is_real(self.momentum) or not 0 <= self.momentum < 1:
            raise ValueError(
                f"momentum ({self.momentum!r}) must be at least 0 and below 1: with 1 its steps "
                "never become smaller"
            )

    def describe_change(self, plan: Plan | None) -> str | None:
        return f"averaged: random pairs, every {self.period} iterations, and replicas differ"

    def schedule(self, profile: Profile) -> Plan:
        everything, ranks = range(len(profile.buckets)), profile.world_size
        rounds = [draw_pairs(ranks, self.seed, done) for done in range(self.rounds)]
        last = Phases(done * self.period + self.period - 1 for done in range(self.rounds))
        kept = round(1 - self._gamma, 12)  # without the digits of 1 - .7
        settings: dict[str, Any] = {"kept": kept, "momentum": float(self.momentum)}
        sent = {"param": THEIRS}
        if self._sends_slow:
            settings |= {"rate": float(self.lr), "their_slow": THEIR_SLOW}
            sent |= {SLOW: THEIR_SLOW}
        applies = [local(len(everything), STEP, range(self.rounds * self.period))]
        alone: dict[int, list[int]] = {}
        for done, pairs in enumerate(rounds if ranks > 1 else ()):
            for rank in (pair[0] for pair in pairs if len(pair) == 1):
                alone.setdefault(rank, []).append(done)
        for rank, those in sorted(alone.items()):
            for source, target in sent.items():
                args, phases = (("source", source), ("target", target)), self._phases(those)
                applies.append(Apply("copy", everything, END, phases, ranks=(rank,), args=args))
        args = tuple(settings.items())
        applies.append(Apply(step_in_pair.__name__, everything, END, last, args=args))
        buffers = [Buffer(SLOW, start="param"), Buffer(VELOCITY), *map(Buffer, sent.values())]
        size = profile.payload_bytes("param", everything)
        spread = rounds_to_all(rounds, ranks)
        return Plan(
            self.name,
            len(everything),
            tuple(self._sends(rounds, sent, profile)),
            tuple(applies),
            buffers=tuple(buffers),
            period=self.rounds * self.period,
            facts=(
                Fact("memory_bytes", len(buffers) * size, "further buffers on every rank"),
                Fact("rounds", spread, f"averages until a change reaches all, at most {ranks**2}"),
            ),
        )

    def _sends(
        self, rounds: Sequence[Sequence[Pair]], sent: dict[str, str], profile: Profile
    ) -> list[Transfer]:
        """Return the messages of all pairs.

        A single rank averages with itself.
        """
        everything, link = range(len(profile.buckets)), profile.default_link.name
        if profile.world_size == 1:
            last = self._phases(range(self.rounds))
            return [
                Transfer(Payload(source, everything), STEP, END, last, link, into=target)
                for source, target in sent.items()
            ]
        done_by: dict[Pair, list[int]] = {}
        for done, pairs in enumerate(rounds):
            for pair in pairs:
                if len(pair) == 2:
                    done_by.setdefault(pair, []).append(done)
        return [
            Transfer(
                Payload(source, everything),
                STEP,
                END,
                self._phases(done),
                link,
                verb="exchange",
                ranks=(pair[0], pair[1]),
                into=target,
            )
            for pair, done in sorted(done_by.items())
            for source, target in sent.items()
        ]

    def _phases(self, rounds: Any) -> Phases:
        return Phases(done * self.period + self.period - 1 for done in rounds)

    @property
    def _gamma(self) -> float:
        return float(self.lr if self.gamma is None else self.gamma)

    @property
    def _sends_slow(self) -> bool:
        return self._gamma != self.lr

    def equations(self, plan: Plan) -> Equations:
        kept = list[Any]()

        def advance(world: World, iteration: int) -> None:
            if not kept:
                kept.extend((world.keep(), 0 * world.keep()))
            world.gradients(iteration)
            world.step()
            done, place = divmod(iteration, self.period)
            if place + 1 == self.period:
                pairs = draw_pairs(world.size, self.seed, done % self.rounds)

                def outer_step(w: Array, slow: Array, velocity: Array) -> Array:
                    before = slow.copy()
                    for pair in map(list, pairs):
                        for k in pair:
                            toward = before[pair].mean(axis=0)
                            velocity[k] = (
                                self.momentum * velocity[k]
                                + self.lr * (w[pair].mean(axis=0) - toward)
                                + self._gamma * (toward - before[k])
                            )
                            slow[k] = before[k] + velocity[k]
                    return np.array(slow)

                world.change(None, outer_step, *kept)
            world.end()

        return advance

    def bound_s(self, profile: Profile) -> float:
        """Return `F + max(B, C / period)` with C of one exchange, as no message overlaps a forward
        and each worker has one exchange per round."""
        payload, link = Payload("param", range(len(profile.buckets))), profile.default_link.name
        message_s = profile.message_s(payload, link, "exchange") if profile.world_size > 1 else 0.0
        return backward_bound_s(profile, message_s / self.period)


def rounds_to_all(rounds: Sequence[Sequence[Pair]], ranks: int) -> int:
    """Return the largest number of rounds until a change has reached all ranks; at most as many as
    the square of their number, if repeated pairs never reach some of them.

    Args:
        rounds: pairs of each round, which repeat.
        ranks: number of ranks.
    """
    most, everyone = 1, (1 << ranks) - 1
    for first in range(len(rounds)):
        known, done = [1 << rank for rank in range(ranks)], 0  # sources as bits
        before = list[int]()
        while any(sources != everyone for sources in known) and done < ranks * ranks:
            if done % len(rounds) == 0:
                if known == before:
                    return ranks * ranks
                before = list(known)
            for pair in rounds[(first + done) % len(rounds)]:
                known[pair[0]] = known[pair[-1]] = known[pair[0]] | known[pair[-1]]
            done += 1
        most = max(most, done)
    return most


def draw_pairs(ranks: int, seed: int, done: int) -> list[Pair]:
    """Return the pairs of a round, each in ascending order. With an odd number of ranks, one is
    alone.

    Args:
        ranks: number of ranks.
        seed: seed of the draw.
        done: number of previous rounds.
    """
    order = list(range(ranks))
    Random(f"{seed} {done}").shuffle(order)
    return sorted(tuple(sorted(order[k : k + 2])) for k in range(0, ranks, 2))
