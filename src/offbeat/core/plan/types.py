"""Plans: what one job moves and computes, at which moments, repeated over a period.

A plan is pure data, one for all ranks. It holds no tensors, no times and no addresses. What it
means is said in one place, `core/plan/program.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

from offbeat.core.plan.phases import Phases

Point = Literal["forward", "grad", "step", "end"]
Verb = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "send"]
Kind = Literal["grad", "param", "state", "buffers"]
Start = Literal["zero", "param"]
Merge = Literal["sum", "mean"]

POINTS: tuple[str, ...] = get_args(Point)
VERBS: tuple[str, ...] = get_args(Verb)
CHANNEL = "#"
VOTES = "votes"
Groups = tuple[tuple[int, ...], ...]
BUFFERS = "buffers"  # those of the module that forward writes
Args = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Moment:
    """A point of one worker's own iteration.

    forward(b): bucket b's forward is about to begin; grad(b): the gradients of buckets 0..b are
    complete; step: the user called `optimizer.step()`; end: it is about to return. A lag counts
    iterations after the rule's own. Without a bucket a transfer means the whole model (its first
    forward, its last gradient), an apply each of its buckets at that bucket's own moment.
    """

    point: Point
    bucket: int | None = None
    lag: int = 0

    def __str__(self) -> str:
        where = "" if self.bucket is None else f"({self.bucket})"
        return f"{self.point}{where}" + (f"+{self.lag}" if self.lag else "")


@dataclass(frozen=True, slots=True)
class Buffer:
    """Named storage of the model's shape on every worker.

    `kind` says which shape: of the gradients, of the parameters with the running statistics, or
    of the optimizer's state. It starts at zero or as a copy of the parameters. Of several copies
    the rule `close` makes the newest one the one before. A buffer that is `kept` belongs into a
    checkpoint. grad, param and state exist in every plan; a plan lists one to say how many copies.
    `buffers` are the module's own that forward writes, as `register_buffer` knows them.
    """

    name: str
    kind: Kind = "param"
    start: Start = "zero"
    copies: int = 1
    kept: bool = True


BUILT_IN = {
    "grad": Buffer("grad", kind="grad"),
    "param": Buffer("param", kind="param", start="param"),
    "state": Buffer("state", kind="state"),
    BUFFERS: Buffer(BUFFERS, kind="buffers", kept=False),
}


@dataclass(frozen=True, slots=True)
class Payload:
    """What moves: one buffer of a run of neighbouring buckets (backward order).

    One bucket may be cut into `parts` equal slices; then it holds `width` of them from `part` on.
    `age` counts copies of the buffer: 0 is the newest, 1 the one that was closed before.
    """

    buffer: str
    buckets: range
    part: int = 0
    parts: int = 1
    width: int = 1
    age: int = 0

    def __str__(self) -> str:
        last = "" if self.width == 1 else f"-{self.part + self.width}"
        slice_ = "" if self.parts == 1 else f"/{self.part + 1}{last}of{self.parts}"
        age = f"~{self.age}" if self.age else ""
        return f"{self.buffer}{age}[{self.buckets.start}:{self.buckets.stop}]{slice_}"

    def slice_of(self, size: int) -> slice:
        """Which of `size` elements laid end to end it holds."""
        return slice(size * self.part // self.parts, size * (self.part + self.width) // self.parts)


@dataclass(frozen=True, slots=True)
class Wire:
    """What goes over the link instead of the payload: a codec by name, with its settings.

    `error` names a buffer that keeps what encoding lost and adds it to the next message. With an
    `anchor`, a buffer that is equal on all ranks, the difference to it is encoded; it moves by the
    mean of what was decoded, and is then what arrives. The anchor of a send is the sender's alone:
    what the receiver has. Both move by what was decoded, so what is lost stays in the difference.
    """

    name: str
    args: Args = ()
    error: str | None = None
    anchor: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "args", _pairs(self.args))

    def arg(self, name: str, default: Any = None) -> Any:
        return dict(self.args).get(name, default)


@dataclass(frozen=True)
class Transfer:
    """One rule of communication, active in the iterations of `phases`.

    all_reduce: the payload becomes its mean over the ranks of the link's group. It also comes in
    two halves: reduce_scatter leaves each rank one shard of the mean, all_gather spreads the
    shards. broadcast: the payload becomes that of the group's first rank. send: `ranks` = (from,
    to); `after` is the sender's moment, `before` the receiver's. The result is in its place from
    `before` on; `into` is another buffer to put it, else the payload's own. The order of a plan's
    transfers is the order in which every rank issues them on a link. A link's name may end in
    `#n`, its n-th further channel. `when` names a vote: if it says no, the transfer is passed
    over. `ago`: the vote of so many iterations before; where there was none yet it is a yes.
    """

    payload: Payload
    after: Moment
    before: Moment
    phases: Phases
    link: str
    verb: Verb = "all_reduce"
    ranks: tuple[int, int] | None = None
    into: str | None = None
    wire: Wire | None = None
    when: str | None = None
    ago: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", _phases(self.phases))

    @property
    def target(self) -> str:
        """The buffer that receives the result."""
        return self.into or self.payload.buffer

    @property
    def sends_delta(self) -> bool:
        """Whether it sends what the receiver's copy lacks, by the sender's anchor."""
        return self.verb == "send" and self.wire is not None and self.wire.anchor is not None

    @property
    def in_place(self) -> bool:
        """Whether the payload itself is on the link, not a copy of it."""
        return self.into is None and self.verb != "send" and self.wire is None

    @cached_property
    def id(self) -> str:
        """Name, unique among the transfers of one iteration, the same on every rank."""
        verb = "" if self.verb == "all_reduce" else f"{self.verb} "
        ranks = "" if self.ranks is None else f" {self.ranks[0]}->{self.ranks[1]}"
        into = "" if self.into is None else f" into {self.into}"
        return f"{verb}{self.payload}{ranks}{into}@{self.link}"


@dataclass(frozen=True)
class Apply:
    """One rule of local arithmetic, by name (see `numerics`), on some buckets at a moment.

    The user's optimizer is the rule `local`. `ranks`: who does it (None: all); `when`, `ago`:
    the vote that it depends on, as for a transfer.
    """

    rule: str
    buckets: range
    at: Moment
    phases: Phases
    ranks: tuple[int, ...] | None = None
    when: str | None = None
    args: Args = ()
    ago: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", _phases(self.phases))
        object.__setattr__(self, "args", _pairs(self.args))

    @cached_property
    def _settings(self) -> dict[str, Any]:
        return dict(self.args)

    def arg(self, name: str, default: Any = None) -> Any:
        """One of its settings."""
        return self._settings.get(name, default)

    @property
    def id(self) -> str:
        """Name for texts."""
        return f"{self.rule}[{self.buckets.start}:{self.buckets.stop}]"


@dataclass(frozen=True)
class Vote:
    """A decision made while running, the same on every rank: yes if any rank says yes.

    Every rank has its say at `at`, by a rule (see `numerics`), and knows the outcome from `due`.
    It is about some buckets, by default all.
    """

    name: str
    rule: str
    at: Moment
    due: Moment
    phases: Phases
    args: Args = ()
    buckets: range | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", _phases(self.phases))
        object.__setattr__(self, "args", _pairs(self.args))

    def arg(self, name: str, default: Any = None) -> Any:
        """One of its settings."""
        return dict(self.args).get(name, default)


@dataclass(frozen=True)
class Fact:
    """Something worth knowing about a plan, for people: it changes nothing."""

    name: str
    value: Any
    meaning: str = ""


@dataclass(frozen=True)
class Plan:
    """Rules for `prologue` iterations that happen once, then for `period` that repeat.

    Iteration t has phase t in the prologue, then prologue + (t - prologue) % period. Rules of one
    moment act in the order of the plan. `groups` partitions the ranks per link: a collective on
    the link and on its channels spans one part; a link that is not there spans all ranks, and so
    do votes. `source`: the rank that has
    the job's newest parameters between iterations, and the optimizer's state; None: all are alike,
    or their mean counts. `bound_s`: lower bound in seconds per iteration of every schedule of the
    strategy's family.
    """

    strategy: str
    buckets: int
    transfers: tuple[Transfer, ...] = ()
    applies: tuple[Apply, ...] = ()
    votes: tuple[Vote, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    groups: Mapping[str, Groups] = field(default_factory=dict)
    period: int = 1
    prologue: int = 0
    source: int | None = None
    bound_s: float | None = None
    facts: tuple[Fact, ...] = ()

    @property
    def phases(self) -> range:
        return range(self.prologue + self.period)

    @property
    def cycle(self) -> range:
        """The phases that repeat."""
        return range(self.prologue, self.prologue + self.period)

    def phase(self, iteration: int) -> int:
        """Phase of an iteration (counted from 0)."""
        if iteration < self.prologue:
            return iteration
        return self.prologue + (iteration - self.prologue) % self.period

    @cached_property
    def all_buffers(self) -> dict[str, Buffer]:
        """Every buffer by name, those of every plan first."""
        return BUILT_IN | {buffer.name: buffer for buffer in self.buffers}

    @property
    def links(self) -> tuple[str, ...]:
        """Names of the links that the plan uses, in order of first use."""
        return tuple(dict.fromkeys(transfer.link for transfer in self.transfers))

    @property
    def uniform(self) -> bool:
        """Whether every rank does the same, in one group."""
        rules = (*self.transfers, *self.applies)
        return not self.groups and all(rule.ranks is None for rule in rules)

    def fact(self, name: str, default: Any = None) -> Any:
        """The value of a fact."""
        return next((fact.value for fact in self.facts if fact.name == name), default)

    @cached_property
    def digest(self) -> str:
        """Hash of everything that ranks must agree on (facts and the bound are left out)."""
        from offbeat.core.plan.text import digest_of

        return digest_of(self)

    def __str__(self) -> str:
        return self.text()

    def text(self, mark: Iterable[Any] = ()) -> str:
        """One line per rule; the rules in `mark` get an arrow."""
        from offbeat.core.plan.text import text_of

        return text_of(self, mark)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, with the schema version."""
        from offbeat.core.plan.text import plan_to_dict

        return plan_to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Inverse of `to_dict`; ValueError on another schema or a malformed field."""
        from offbeat.core.plan.text import plan_from_dict

        return plan_from_dict(data)


def transfer(
    buffer: str,
    buckets: range,
    *,
    after: Moment,
    before: Moment,
    phases: Iterable[int],
    link: str,
    part: int = 0,
    parts: int = 1,
    width: int = 1,
    age: int = 0,
    **more: Any,
) -> Transfer:
    """A transfer from its fields, the short way to write one; `more` are those of `Transfer`."""
    payload = Payload(buffer, buckets, part, parts, width, age)
    return Transfer(payload, after, before, _phases(phases), link, **more)


def local(buckets: int, at: Moment, phases: Iterable[int], **args: Any) -> Apply:
    """The user's optimizer on all buckets: at `step` as a whole, else each at its own moment."""
    return Apply("local", range(buckets), at, Phases(phases), args=_pairs(args))


def channel(link: str, index: int) -> str:
    """Name of a link's index-th channel: the link itself, then `link#1`, `link#2`, ..."""
    return f"{link}{CHANNEL}{index}" if index else link


def base_link(name: str) -> str:
    """The link that a channel belongs to."""
    return name.partition(CHANNEL)[0]


def vote_channel(link: str) -> str:
    """Name of the channel of a link that carries votes. It spans all ranks, whatever the groups of
    its link, and no bulk message delays it."""
    return f"{link}{CHANNEL}{VOTES}"


def is_vote_channel(name: str) -> bool:
    """Whether the name is that of a channel of votes."""
    return name.partition(CHANNEL)[2] == VOTES


def groups_of(name: str, groups: Mapping[str, Groups]) -> Groups:
    """Groups of ranks that the collectives of a link or channel span; () if they span all ranks."""
    return () if is_vote_channel(name) else groups.get(base_link(name), ())


def _phases(members: Iterable[int]) -> Phases:
    return members if isinstance(members, Phases) else Phases(members)


def _pairs(args: Mapping[str, Any] | Args) -> Args:
    """Settings in the order of their names; lists, as JSON knows them, become tuples."""
    pairs = args.items() if isinstance(args, Mapping) else args
    return tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in pairs))
