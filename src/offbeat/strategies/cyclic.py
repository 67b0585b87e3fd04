"""Cyclic data parallelism: workers staggered in time that send sums of gradients from one to the
next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from random import Random
from typing import Any, ClassVar, Literal

from offbeat.core.plan import (
    Apply,
    Buffer,
    Fact,
    Moment,
    Payload,
    Phases,
    Plan,
    Transfer,
    channel,
)
from offbeat.core.profile import Profile
from offbeat.core.sim import predict_plan
from offbeat.core.strategy.interface import require_choice, require_count
from offbeat.strategies.compressible import Wired
from offbeat.strategies.equations import Equations, World
from offbeat.strategies.solvers.stages import cut

END = Moment("end")
SETTLED = 2  # iterations from the first update until every worker has received new parameters
RANDOM_PERIOD = 16  # iterations after which random delays repeat
# first channel of each use: two, one, three, one, two channels
SUMS, ENTRY, ROUND, OTHERS, TURNS = 0, 2, 3, 6, 7
PARTS = 64  # slices of the smallest bucket; a turn message sends one of them
STAGGER_GAIN = 0.01  # relative gain required of the stagger of 1/N of an iteration
MOST_SIMULATED = 1024  # largest number of messages for which `stagger="auto"` simulates

Table = tuple[tuple[bool, ...], ...]  # indexed by worker (1, 2, ...) and stage (from the input)


@dataclass(frozen=True)
class Cyclic(Wired):
    """Stagger workers in time; sums of gradients and new parameters go from worker to worker.

    The model is cut into N stages, and worker i lags behind worker i-1. Each worker adds its
    gradient of a stage to the sum that it receives, and sends the result to the next worker. The
    last worker updates the stage and sends the new parameters. All messages are between two workers
    and spread over the iteration.

    A forward uses the parameters w_t, or those of the previous iteration. `v1` never uses w_t. `v2`
    uses w_t wherever it can be available: in stages j >= N-i+1 of worker i (both count from 1,
    stages from the input). With R times as many workers as stages, R neighbouring workers share a
    position. The norm of the whole gradient is not known when the first stage is updated, so `clip`
    bounds the norm of each stage.

    Rank 0 is the last worker (N). Only rank 0 has the optimizer state and, between iterations, the
    newest parameters of all stages. Other ranks hold stages of two versions until `consolidate`.
    """

    rule: Literal["v1", "v2", "random"] = "v2"
    """Forwards that use the newest parameters: none (`v1`), all that can (`v2`), or each with
    probability `chance` (`random`)."""
    stages: int | None = None
    """Number of stages of the model, a divisor of the number of workers; None: one per worker."""
    split: Literal["time", "bytes"] | tuple[int, ...] = "time"
    """Division of buckets into stages: even compute (`time`), even `bytes`, or numbers of buckets,
    from the input (`3/2/2`)."""
    stagger: Literal["auto", "least", "paper"] = "auto"
    """Lag of a worker behind the previous one: as long as messages need (`least`), 1/N of an
    iteration (`paper`), or the one with the shorter predicted iteration (`auto`)."""
    start: Literal["repeat", "skip"] = "repeat"
    """First update: count the first gradients twice (`repeat`), or omit the first update (`skip`)
    as the authors' program does."""
    clip: float | None = None
    """Bound on the norm of each stage's gradient; None: no clipping."""
    table: Table | None = None
    """Explicit table instead of a rule: for each worker and stage, whether it uses the newest
    parameters, such as `001/011/111`."""
    chance: float = 0.5
    """Probability of newest parameters with the rule `random`."""
    seed: int = 0
    """Seed of the draws with the rule `random`, which repeat after 16 iterations."""

    name: ClassVar[str] = "cyclic"
    synchronous: ClassVar[bool] = False
    unadvised: ClassVar[str] = "only rank 0 has the newest parameters and the optimizer state"
    sends: ClassVar[bool] = True
    citation: ClassVar[str] = "Fournier and Oyallon, Cyclic Data Parallelism, 2024, Eq. 5 to 7"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stages is not None:
            require_count("stages", self.stages)
        require_count("seed", self.seed, least=0)
        if self.clip is not None and not 0 < self.clip < float("inf"):
            raise ValueError(f"clip ({self.clip}) must be a norm above 0, or None for no clipping")
        if not 0 <= self.chance <= 1:
            raise ValueError(f"chance ({self.chance}) must lie between 0 and 1")
        object.__setattr__(self, "split", _split(self.split))
        object.__setattr__(self, "table", _table(self.table))

    @property
    def applies_late(self) -> bool:
        return True

    def describe_change(self, plan: Plan | None) -> str | None:
        return "late: workers compute in turns, partly with parameters of the iteration before"

    def schedule(self, profile: Profile) -> Plan:
        if self.stagger != "auto":
            return self._staggered_plan(self.stagger, profile)
        least = self._staggered_plan("least", profile)
        if profile.world_size == 1 or len(least.transfers) > MOST_SIMULATED:
            return least
        # Without jitter, a few iterations are enough for the comparison.
        links = tuple(replace(link, jitter=0.0) for link in profile.links)
        steady = replace(profile, jitter=0.0, rank_jitter=(), links=links)
        enough_s = predict_plan(least, steady).iteration_s * (1 - STAGGER_GAIN)
        if self.bound_s(steady) >= enough_s:
            return least  # no stagger is faster by the required gain
        paper = self._staggered_plan("paper", profile)
        return paper if predict_plan(paper, steady).iteration_s < enough_s else least

    def _staggered_plan(self, stagger: Literal["least", "paper"], profile: Profile) -> Plan:
        job = self._job(profile)
        transfers = [*job.turn_transfers(profile)] if stagger == "paper" else []
        transfers += [*job.sum_transfers(), *job.version_transfers()]
        buffers = [Buffer("sum", "grad", kept=False)]
        if job.owner_needs_older:
            buffers.append(Buffer("older", start="param"))
        return Plan(
            self.name,
            job.buckets,
            tuple(transfers),
            tuple(job.applies(self.clip)),
            buffers=tuple(buffers),
            period=job.period,
            prologue=job.prologue,
            source=0,
            facts=(
                Fact(
                    "stages", [[run.start, run.stop] for run in job.runs], "buckets, output first"
                ),
                Fact("stagger", stagger),
            ),
        )

    def equations(self, plan: Plan) -> Equations:
        runs = [range(*edges) for edges in plan.fact("stages")]
        ranks = 1 + max(max(t.ranks or (0,)) for t in plan.transfers) if plan.transfers else 1
        job = _Job(ranks, runs, self.rules(len(runs)), self._skip_count, "")
        return cyclic(runs, job.uses_newest, self._skip_count)

    def bound_s(self, profile: Profile) -> float:
        """Return a lower bound on the seconds per iteration: the largest of three times.

        The first is the compute of the slowest rank. The second is the compute of rank 0 with the
        update. The third is the time that a middle rank needs to send the gradients of all stages
        and the parameters of all stages but one over one link, without latency, at the highest
        total rate of its channels.
        """
        slowest, workers = profile.slowest(), profile.world_size
        own = profile.rank_scale[0] if profile.rank_scale else 1.0
        owner_s = own * (profile.forward_s + profile.backward_s + profile.update_s)
        others_s = slowest.forward_s + slowest.backward_s
        compute_s = profile.other_s + max(owner_s, others_s)
        if workers == 1:
            return compute_s
        link = profile.default_link
        sums_s, params_s = (profile.transfer_s(link.name, kind) for kind in ("grad", "param"))
        kept_s = max(
            sum(params_s[b] for b in run) for run in self._cut(profile, self.stages or workers)
        )
        sent_s = sum(sums_s) + (sum(params_s) - kept_s if workers > 2 else 0.0)
        together = max(n * profile.speed(link.name, [link.name] * (n - 1)) for n in (1, 2, 3))
        rate = together * profile.send_bytes_per_s(link.name) / link.bytes_per_s
        return max(compute_s, sent_s / rate)

    @property
    def _skip_count(self) -> int:
        return int(self.start == "skip")

    def least_buckets(self, ranks: int) -> int:
        """Return the number of stages: each stage has at least one bucket."""
        return self.stages or ranks

    def _job(self, profile: Profile) -> _Job:
        ranks = profile.world_size
        stages = self.stages or ranks
        if ranks % stages:
            raise ValueError(
                f"stages ({stages}) must divide the number of workers ({ranks}), which then share "
                "the places of the stages; start another number of workers"
            )
        if ranks == 1 and self._skip_count:
            raise ValueError(
                "start ('skip') needs at least two workers; leave it out, or start more of them"
            )
        link = profile.default_link.name
        return _Job(ranks, self._cut(profile, stages), self.rules(stages), self._skip_count, link)

    def _cut(self, profile: Profile, stages: int) -> list[range]:
        """Return runs of buckets, starting at the output side."""
        if isinstance(self.split, tuple):
            counts = self.split[::-1]
            if len(counts) != stages or sum(counts) != len(profile.buckets):
                raise ValueError(
                    f"split ({'/'.join(map(str, self.split))}) must be {stages} numbers of "
                    f"buckets, {len(profile.buckets)} together"
                )
            return [range(a, z) for a, z in pairwise([0, *accumulate(counts)])]
        if self.split == "bytes":
            return [*cut([bucket.size_bytes for bucket in profile.buckets], stages)]
        return [*cut([b.forward_s + b.backward_s for b in profile.buckets], stages)]

    def rules(self, stages: int) -> list[Table]:
        """Return tables of the uses of w_t, one per iteration of the period.

        Args:
            stages: number of stages. Columns of a table are stages from the output on.
        """
        allowed = [[g < i for g in range(stages)] for i in range(1, stages + 1)]
        if self.table is not None:
            rows = [row[::-1] for row in self.table]
            if len(rows) != stages or any(len(row) != stages for row in rows):
                raise ValueError(
                    f"table ({len(rows)} rows) must have {stages} rows of {stages}: one for each "
                    "worker, with one entry for each stage"
                )
            for i, row in enumerate(rows):
                for g, new in enumerate(row):
                    if new and not allowed[i][g]:
                        raise ValueError(
                            f"table: worker {i + 1} cannot have w_t in stage {stages - g}, which "
                            "is still being summed up when it begins; it can from stage "
                            f"{stages - i} on"
                        )
            return [tuple(rows)]
        if self.rule == "v1":
            return [tuple((False,) * stages for _ in allowed)]
        if self.rule == "v2":
            return [tuple(map(tuple, allowed))]
        draw = Random(f"cyclic {self.seed}")
        return [
            tuple(tuple(can and draw.random() < self.chance for can in row) for row in allowed)
            for _ in range(RANDOM_PERIOD)
        ]


@dataclass
class _Job:
    """Workers, stages (runs of buckets from the output), and tables of the uses of w_t by
    iteration."""

    ranks: int
    runs: Sequence[range]
    rules: Sequence[Table]
    skipped: int
    link: str

    @property
    def period(self) -> int:
        return len(self.rules)

    @property
    def prologue(self) -> int:
        return SETTLED + self.skipped

    @property
    def buckets(self) -> int:
        return self.runs[-1].stop

    @property
    def workers(self) -> list[int]:
        """Ranks in the order in which sums pass through them; rank 0 is the last."""
        return [*range(1, self.ranks), 0]

    def place(self, rank: int) -> int:
        """Return the row of a rank in a table; with R times as many workers as stages, R neighbours
        share a row."""
        return ((rank or self.ranks) - 1) * len(self.runs) // self.ranks

    def uses_newest(self, iteration: int, rank: int, stage: int) -> bool:
        """Return whether the rank uses the newest parameters of a stage in an iteration."""
        return self.rules[iteration % self.period][self.place(rank)][stage]

    def lag(self, t: int, rank: int, stage: int) -> int | None:
        """Return the number of iterations until a rank first uses the parameters that iteration t
        has updated.

        Return None if the rank never uses them: it uses older parameters first and newer ones
        afterwards.
        """
        if self.uses_newest(t + 1, rank, stage):
            return 1
        return None if self.uses_newest(t + 2, rank, stage) else 2

    @property
    def owner_needs_older(self) -> bool:
        """Whether rank 0 uses older parameters than its newest ones in any iteration."""
        return any(not all(rule[self.place(0)]) for rule in self.rules)

    @property
    def iterations(self) -> range:
        """One iteration of each phase."""
        return range(self.prologue + self.period)

    def phases(self, holds: Callable[[int], bool]) -> Phases:
        """Return the phases of the iterations for which `holds` is true."""
        return Phases([i for i in self.iterations if holds(i)])

    def update_moment(self, run: range) -> Moment:
        """Return the moment of a stage's update: in backward, when its sum has arrived."""
        return Moment("grad", run[-1]) if self.ranks > 1 else Moment("step")

    # ---- sums ------------------------------------------------------------------------------

    def sum_transfers(self) -> Iterator[Transfer]:
        """Yield the transfers of every stage's gradients from worker to worker."""
        active = self.phases(lambda i: i >= self.skipped)
        for run in self.runs:
            ready = Moment("grad", run[-1])
            if self.ranks == 1:
                yield Transfer(Payload("grad", run), ready, Moment("step"), active, self.link)
            for n, (a, b) in enumerate(pairwise(self.workers)):
                yield Transfer(
                    Payload("grad", run),
                    ready,
                    ready,
                    active,
                    channel(self.link, SUMS + n % 2),
                    "send",
                    (a, b),
                    "sum",
                )

    def applies(self, clip: float | None) -> Iterator[Apply]:
        """Yield the arithmetic of each worker on its sum, and that of rank 0 on the last sum."""
        active, last = self.phases(lambda i: i >= self.skipped), self.workers[-1]
        shares = (("buffer", "grad"), ("by", (1 / self.ranks,) * self.ranks))
        others = tuple(self.workers[:-1])
        owner = (last,) if others else None
        for g, run in enumerate(self.runs):
            ready, begins = self.update_moment(run), Moment("forward", run[-1])
            late = self.phases(lambda i, g=g: not self.uses_newest(i, last, g))
            older = (("a", "param"), ("b", "older"))
            kept = (("source", "param"), ("target", "older"))
            if late:
                yield Apply("copy", run, begins, Phases([0]), owner, args=kept)
                yield Apply("swap", run, begins, late, owner, args=older)
            if self.ranks > 1:
                added = (("source", "sum"), ("target", "grad"))
                yield Apply("add", run, ready, active, tuple(self.workers[1:]), args=added)
                yield Apply("scale", run, ready, active, owner, args=shares)
            if clip is not None:
                bounded = (("buffer", "grad"), ("norm", float(clip)))
                yield Apply("clip", run, ready, active, owner, args=bounded)
            if late:
                yield Apply("swap", run, ready, late, owner, args=older)
            if self.owner_needs_older:
                yield Apply("copy", run, ready, Phases(self.iterations), owner, args=kept)
            yield Apply("local", run, ready, active, owner)
        everything, dropped = range(self.buckets), (("buffer", "grad"),)
        if others:
            yield Apply("clear", everything, END, Phases(self.iterations), others, args=dropped)
        if self.skipped:
            yield Apply("clear", everything, END, Phases([0]), owner, args=dropped)

    # ---- versions --------------------------------------------------------------------------

    def version_transfers(self) -> Iterator[Transfer]:
        """Yield the transfers of every stage's new parameters.

        Rank 0 sends them to the worker that uses them first. Each worker sends them to the next one
        when it begins to use them.
        """
        hops: dict[tuple[int, int, int, int], set[int]] = defaultdict(set)
        for i in self.iterations:
            for g in range(len(self.runs)):
                for t in (i, i - 1, i - 2):
                    for a, b, sent, due in self._version_hops(t, g) if t >= self.skipped else ():
                        if i == t + sent:
                            hops[g, a, b, due - sent].add(i)
        for (g, a, b, later), iterations in sorted(hops.items(), key=self._sort_key):
            run = self.runs[g]
            begins = Moment("forward", run[-1])
            after = Moment("grad", run[-1]) if a == 0 else begins
            yield Transfer(
                Payload("param", run),
                after,
                Moment("forward", run[-1], later),
                Phases(iterations),
                channel(self.link, self._channel(a, b)),
                "send",
                (a, b),
            )

    def _version_hops(self, t: int, g: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (sender, receiver, send lag, use lag) for the parameters that iteration t has
        updated.

        Lags are iterations after t. The order is that of first use.
        """
        lags = {rank: self.lag(t, rank, g) for rank in range(1, self.ranks)}
        users = sorted((lag, rank) for rank, lag in lags.items() if lag is not None)
        for (sent, a), (due, b) in pairwise([(0, 0), *users]):
            yield a, b, sent, due

    def _sort_key(self, hop: tuple[tuple[int, int, int, int], set[int]]) -> tuple[int, ...]:
        """Return the key that sorts the messages of a channel by the moment of sending."""
        (g, a, b, later), _ = hop
        # Rank 0 sends in backward, output first. Other ranks send in forward, input first.
        return (1, g, a, b) if a == 0 else (0, -g, a, b, later)

    def _channel(self, a: int, b: int) -> int:
        """Return a channel on which each rank only sends or only receives."""
        around = self.ranks - 1
        if a == 0:
            return ENTRY
        if b != a % around + 1:
            return OTHERS
        return ROUND + (2 if a == around and around % 2 else a % 2)

    # ---- stagger ---------------------------------------------------------------------------

    def turn_transfers(self, profile: Profile) -> Iterator[Transfer]:
        """Yield a message from each worker to the next one when it is 1/N of an iteration ahead."""
        slowest, last = profile.slowest(), self.buckets - 1
        smallest = min(range(self.buckets), key=lambda b: slowest.buckets[b].size_bytes)
        step_s = (slowest.forward_s + slowest.backward_s) / self.ranks
        begun = [*accumulate((b.forward_s for b in reversed(slowest.buckets)), initial=0.0)]
        done = [*accumulate((b.backward_s for b in slowest.buckets), initial=begun[-1])]
        times = [(s, Moment("forward", last - n)) for n, s in enumerate(begun[1:-1], 1)]
        times += [(s, Moment("grad", n)) for n, s in enumerate(done[1:])]
        after = min(times, key=lambda time: abs(time[0] - step_s))[1]
        for n, (a, b) in enumerate(pairwise(self.workers)):
            yield Transfer(
                Payload("sum", range(smallest, smallest + 1), 0, PARTS),
                after,
                Moment("forward"),
                Phases(self.iterations),
                channel(self.link, TURNS + n % 2),
                "send",
                (a, b),
            )


def _split(given: Any) -> Any:
    """Return "time", "bytes", or a tuple of bucket counts from JSON or the command line."""
    if isinstance(given, str) or not given:
        require_choice("split", given, ("time", "bytes"))
        return given
    for count in given:
        require_count("split", count)
    return tuple(given)


def _table(given: Any) -> Table | None:
    """Return a table of booleans from JSON."""
    if given is None:
        return None
    try:
        rows = tuple(tuple(bool((False, True).index(entry)) for entry in row) for row in given)
    except (TypeError, ValueError):
        rows = ()
    if not rows:
        raise ValueError(
            f"table ({given!r}) must have a row of 0 and 1 for each worker, such as "
            "((0, 1), (1, 1))"
        )
    return rows


def cyclic(
    stages: Sequence[range], fresh: Callable[[int, int, int], bool], skipped: int = 0
) -> Equations:
    """Return the equations of cyclic data parallelism.

    `w_(t+1) = w_t - rate / N * sum_i grad f_i(w^_(i,t))`, where stage j of `w^_(i,t)` is w_t if
    `fresh(t, i, j)`, otherwise w_(t-1). w_-1 = w_0.

    Args:
        stages: runs of buckets.
        fresh: function of (iteration t, replica i, stage j).
        skipped: number of initial iterations without an update.
    """
    last: list[Any] = []

    def advance(world: World, iteration: int) -> None:
        newest = last[0] if last else world.keep()
        world.gradients(iteration)
        world.average("grad")
        for rank in range(world.size):
            world.use(rank, None, newest)
        if iteration >= skipped:
            world.step()
        last[:] = [world.keep()]
        for rank in range(world.size):
            for stage, run in enumerate(stages):
                if not fresh(iteration + 1, rank, stage):
                    world.use(rank, Payload("param", run), newest)
        world.end()

    return advance
