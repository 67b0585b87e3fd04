"""Types of a plan: the transfers, computations and votes of one job, and the moment of each.

A plan is pure data and is the same on all ranks. It contains no tensors, times or addresses. Its
meaning is defined in `core/plan/program.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

from offbeat.core.plan.phases import Phases

Point = Literal["forward", "grad", "step", "end"]
Verb = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "send", "exchange"]
"""Operation of a transfer, see `Transfer`."""
Kind = Literal["grad", "param", "state", "buffers"]
"""Shape of a buffer, see `Buffer`."""
Start = Literal["zero", "param"]
Merge = Literal["sum", "mean"]
"""Whether gradients of an accumulation window are added up or averaged over its iterations."""

POINTS: tuple[str, ...] = get_args(Point)
VERBS: tuple[str, ...] = get_args(Verb)
"""All verbs of transfers."""
CHANNEL = "#"
"""Separator between the name of a link and its channel, as in `net#1`."""
VOTES = "votes"
"""Name of the channel that carries votes, as in `net#votes`."""
INSIDE = "inside"
"""Name of the link between the ranks that share a replica. In a plan each replica is a group of its
own on it: a collective on this link averages over the ranks of a replica."""
Groups = tuple[tuple[int, ...], ...]
"""Partition of the ranks into groups; () for one group of all ranks."""
MOMENT_PREFIX = "state."
"""Prefix of the names of buffers that are one moment of the optimizer's state. `state.0` is the
first tensor that the optimizer keeps for a parameter, in the order of their names (`exp_avg`),
`state.1` the second one (`exp_avg_sq`). They have the shape of gradients."""
BUFFERS = "buffers"
"""Name of the buffer that holds the module's own buffers, such as running statistics."""
Args = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Moment:
    """Point in an iteration of one worker.

    Without a bucket, the moment of a transfer refers to the whole model (its first forward or its
    last gradient), and the moment of an apply refers to each bucket's own moment.

    Attributes:
        point: "forward": the forward of the bucket is about to begin; "grad": the gradients of
            buckets 0 to `bucket` are complete; "step": `optimizer.step()` has been called;
            "end": `optimizer.step()` is about to return.
        bucket: index of the bucket; None for "step", "end" and the whole model.
        lag: number of iterations after the iteration of the rule.
    """

    point: Point
    bucket: int | None = None
    lag: int = 0

    def __str__(self) -> str:
        where = "" if self.bucket is None else f"({self.bucket})"
        return f"{self.point}{where}" + (f"+{self.lag}" if self.lag else "")


@dataclass(frozen=True, slots=True)
class Buffer:
    """Named storage on every worker, as large as the gradients, the parameters or the optimizer
    state.

    The buffers grad, param, state and buffers exist in every plan. A plan lists one of them to set
    its number of copies. "buffers" holds the buffers that the module has registered by
    `register_buffer` and that its forward writes.

    Attributes:
        name: name of the buffer.
        kind: shape: "grad" for gradients, "param" for parameters and running statistics,
            "state" for the optimizer's state, "buffers" for the module's buffers.
        start: initial value: "zero", or "param" for a copy of the parameters.
        copies: number of copies. The rule `close` turns the newest copy into the previous one.
        kept: whether the buffer is part of a checkpoint.
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
"""Buffers that exist in every plan, by name."""


@dataclass(frozen=True, slots=True)
class Payload:
    """Content of a message: one buffer of a run of adjacent buckets, or slices of one bucket.

    Attributes:
        buffer: name of the buffer.
        buckets: run of buckets, in backward order.
        part: index of the first slice.
        parts: number of equal slices that the bucket is cut into.
        width: number of slices.
        age: copy of the buffer: 0 for the newest, 1 for the one that was closed before it.
    """

    buffer: str
    buckets: range
    part: int = 0
    parts: int = 1
    width: int = 1
    age: int = 0

    @property
    def moment(self) -> int | None:
        """Return which moment of the optimizer's state the payload holds; None for other
        buffers."""
        return moment_of(self.buffer)

    def __str__(self) -> str:
        last = "" if self.width == 1 else f"-{self.part + self.width}"
        slice_ = "" if self.parts == 1 else f"/{self.part + 1}{last}of{self.parts}"
        age = f"~{self.age}" if self.age else ""
        return f"{self.buffer}{age}[{self.buckets.start}:{self.buckets.stop}]{slice_}"

    def slice_of(self, size: int) -> slice:
        """Return the elements of the payload, as a slice of the buckets' `size` elements.

        Args:
            size: number of elements of all buckets of the payload.
        """
        return slice(size * self.part // self.parts, size * (self.part + self.width) // self.parts)


class _Settings:
    """Settings of a codec, a rule or a vote."""

    __slots__ = ()
    args: Args

    def arg(self, name: str, default: Any = None) -> Any:
        """Return a setting, or `default`.

        Args:
            name: name of the setting.
            default: value if the setting is not given.
        """
        return next((value for key, value in self.args if key == name), default)


@dataclass(frozen=True, slots=True)
class Wire(_Settings):
    """Codec of a transfer: the message carries the encoded payload.

    With an anchor, the codec encodes the difference between the payload and the anchor. The anchor
    moves by the mean of the decoded differences and replaces the payload as the result. The anchor
    of an all_reduce is equal on all ranks. The anchor of a send is the sender's copy of
    the values that the receiver holds. The coding error remains in the next difference.

    Attributes:
        name: name of the codec.
        args: settings of the codec.
        error: buffer that stores the coding error and adds it to the next message; None for
            none.
        anchor: buffer that differences are taken from; None for none.
    """

    name: str
    args: Args = ()
    error: str | None = None
    anchor: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "args", _pairs(self.args))


@dataclass(frozen=True)
class Transfer:
    """Rule of communication: one message in each iteration of `phases`.

    Every rank issues the transfers of a link in the order of the plan. The result is available from
    `before` on.

    Attributes:
        payload: content of the message.
        after: release: the moment from which the message may be sent. For a send, a moment of
            the sender.
        before: deadline: the moment that waits for the message. For a send, a moment of the
            receiver.
        phases: phases in which the transfer is active.
        link: name of the link, or of a channel of it (`link#n`).
        verb: "all_reduce": the payload becomes its mean over the ranks of the link's group;
            "reduce_scatter": each rank gets one shard of the mean; "all_gather": all ranks get
            all shards; "broadcast": the payload becomes that of the first rank of the group;
            "send": one rank sends the payload to another; "exchange": each of two ranks gets
            the payload of the other, in both directions at the same time.
        ranks: (sender, receiver) of a send, or the two ranks of an exchange; None otherwise.
        into: buffer that receives the result; None for the buffer of the payload.
        wire: codec; None to send the payload itself.
        when: vote that must result in yes, otherwise the transfer is skipped; None for no vote.
        ago: number of iterations between that vote and this transfer. In the first `ago`
            iterations the outcome is yes.
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
        object.__setattr__(self, "phases", Phases(self.phases))

    @property
    def target(self) -> str:
        """Return the buffer that receives the result."""
        return self.into or self.payload.buffer

    @property
    def sends_delta(self) -> bool:
        """Return whether a send carries the difference between the payload and the receiver's
        copy."""
        return self.verb == "send" and self.wire is not None and self.wire.anchor is not None

    @property
    def in_place(self) -> bool:
        """Return whether the collective works on the payload itself, not on a copy."""
        return self.into is None and self.verb != "send" and self.wire is None

    def only_receives(self, rank: int) -> bool:
        """Return whether a rank is the receiver of a send.

        Args:
            rank: the rank.
        """
        return self.verb == "send" and self.ranks is not None and self.ranks[1] == rank

    @property
    def way(self) -> tuple[int, int] | None:
        """Return (sender, receiver) of a send; None for other verbs."""
        return self.ranks if self.verb == "send" else None

    @cached_property
    def id(self) -> str:
        """Return the name of the transfer: the same on all ranks, unique within an iteration."""
        verb = "" if self.verb == "all_reduce" else f"{self.verb} "
        arrow = "<->" if self.verb == "exchange" else "->"
        ranks = "" if self.ranks is None else f" {self.ranks[0]}{arrow}{self.ranks[1]}"
        into = "" if self.into is None else f" into {self.into}"
        return f"{verb}{self.payload}{ranks}{into}@{self.link}"


@dataclass(frozen=True)
class Apply(_Settings):
    """Rule of local arithmetic on some buckets, executed at a moment.

    Attributes:
        rule: name of the rule (see `core/rules`). The rule `local` is the user's optimizer.
        buckets: run of buckets.
        at: moment. Without a bucket in "forward" or "grad", each bucket has its own moment.
        phases: phases in which the rule is active.
        ranks: ranks that execute the rule; None for all.
        when: vote that must result in yes, otherwise the rule is skipped; None for no vote.
        args: settings of the rule.
        ago: number of iterations between that vote and this apply. In the first `ago`
            iterations the outcome is yes.
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
        object.__setattr__(self, "phases", Phases(self.phases))
        object.__setattr__(self, "args", _pairs(self.args))

    @property
    def id(self) -> str:
        """Return the name of the apply for messages and texts."""
        return f"{self.rule}[{self.buckets.start}:{self.buckets.stop}]"


@dataclass(frozen=True)
class Vote(_Settings):
    """Decision at run time that is the same on all ranks: yes if at least one rank votes yes.

    Attributes:
        name: name of the vote.
        rule: name of the rule that computes the vote of a rank (see `core/rules`).
        at: moment at which each rank votes.
        due: moment from which the outcome is available.
        phases: phases in which the vote takes place.
        args: settings of the rule.
        buckets: run of buckets that the rule inspects; None for all.
    """

    name: str
    rule: str
    at: Moment
    due: Moment
    phases: Phases
    args: Args = ()
    buckets: range | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", Phases(self.phases))
        object.__setattr__(self, "args", _pairs(self.args))


@dataclass(frozen=True)
class Fact:
    """Information about a plan for its readers. A fact does not affect execution.

    Attributes:
        name: name of the fact.
        value: value of the fact, a JSON type.
        meaning: description of the value.
    """

    name: str
    value: Any
    meaning: str = ""


@dataclass(frozen=True)
class Plan:
    """Schedule of one job: rules for `prologue` iterations, then for `period` iterations that
    repeat.

    Iteration t has the phase t in the prologue, otherwise `prologue + (t - prologue) % period`.
    Rules with the same moment act in the order of the plan.

    Attributes:
        strategy: name of the strategy that made the plan.
        buckets: number of buckets.
        transfers: rules of communication.
        applies: rules of local arithmetic.
        votes: decisions at run time.
        buffers: buffers in addition to those of every plan, or with more copies.
        groups: link name to a partition of the ranks. A collective on the link and its channels
            spans one part. A link without an entry spans all ranks, and votes always do.
        period: number of iterations that repeat.
        prologue: number of iterations before them.
        source: rank that has the newest parameters and the optimizer's state between
            iterations. None if all ranks are equal or if their mean is the result.
        bound_s: lower bound of the seconds per iteration for every schedule of the strategy's
            family; None if not known.
        facts: information for readers.
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
        """Return all phases."""
        return range(self.prologue + self.period)

    @property
    def cycle(self) -> range:
        """Return the phases that repeat."""
        return range(self.prologue, self.prologue + self.period)

    def phase(self, iteration: int) -> int:
        """Return the phase of an iteration.

        Args:
            iteration: number of the iteration, counted from 0.
        """
        if iteration < self.prologue:
            return iteration
        return self.prologue + (iteration - self.prologue) % self.period

    @cached_property
    def all_buffers(self) -> dict[str, Buffer]:
        """Return all buffers by name, first those of every plan."""
        return BUILT_IN | {buffer.name: buffer for buffer in self.buffers}

    @property
    def links(self) -> tuple[str, ...]:
        """Return the names of the links that the plan uses, in order of first use."""
        return tuple(dict.fromkeys(transfer.link for transfer in self.transfers))

    @property
    def uniform(self) -> bool:
        """Return whether all ranks have the same rules, in one group on each link but `INSIDE`."""
        rules = (*self.transfers, *self.applies)
        divided = {link for link, groups in self.groups.items() if max(map(len, groups)) > 1}
        return not divided | (self.groups.keys() - {INSIDE}) and all(
            rule.ranks is None for rule in rules
        )

    def fact(self, name: str, default: Any = None) -> Any:
        """Return the value of a fact, or `default`.

        Args:
            name: name of the fact.
            default: value if the plan has no such fact.
        """
        return next((fact.value for fact in self.facts if fact.name == name), default)

    @cached_property
    def digest(self) -> str:
        """Return the hash of all fields that must be equal on all ranks: all but `facts` and
        `bound_s`."""
        from offbeat.core.plan.text import digest_of

        return digest_of(self)

    def __str__(self) -> str:
        return self.text()

    def text(self, mark: Iterable[Any] = ()) -> str:
        """Return the plan as text, one line per rule.

        Args:
            mark: rules to mark with an arrow.
        """
        from offbeat.core.plan.text import text_of

        return text_of(self, mark)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON types, with the schema version."""
        from offbeat.core.plan.text import plan_to_dict

        return plan_to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Return the plan that a result of `to_dict` describes.

        Args:
            data: plan as JSON types.

        Raises:
            ValueError: the schema differs, or a field is missing or malformed.
        """
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
    """Return a transfer of a payload that is given by its fields.

    Args:
        buffer: see `Payload`.
        buckets: see `Payload`.
        after: see `Transfer`.
        before: see `Transfer`.
        phases: phases in which the transfer is active.
        link: see `Transfer`.
        part: see `Payload`.
        parts: see `Payload`.
        width: see `Payload`.
        age: see `Payload`.
        more: further fields of `Transfer`.
    """
    payload = Payload(buffer, buckets, part, parts, width, age)
    return Transfer(payload, after, before, Phases(phases), link, **more)


def local(buckets: int, at: Moment, phases: Iterable[int], **args: Any) -> Apply:
    """Return an apply of the user's optimizer to all buckets.

    Args:
        buckets: number of buckets.
        at: moment: "step" or "end" for one call, "forward" or "grad" for each bucket at its own
            moment.
        phases: phases in which the apply is active.
        args: settings of the rule `local`.
    """
    return Apply("local", range(buckets), at, Phases(phases), args=_pairs(args))


def channel(link: str, index: int) -> str:
    """Return the name of a channel of a link: the link itself for 0, then `link#1`, `link#2`.

    Args:
        link: name of the link.
        index: number of the channel.
    """
    return f"{link}{CHANNEL}{index}" if index else link


def base_link(name: str) -> str:
    """Return the link that a channel belongs to.

    Args:
        name: name of the link or channel.
    """
    return name.partition(CHANNEL)[0]


def vote_channel(link: str) -> str:
    """Return the name of the channel of a link that carries votes.

    The channel spans all ranks, whatever the groups of its link. Other messages do not delay it.

    Args:
        link: name of the link.
    """
    return f"{link}{CHANNEL}{VOTES}"


def is_vote_channel(name: str) -> bool:
    """Return whether a name is the name of a channel of votes.

    Args:
        name: name of a link or channel.
    """
    return name.partition(CHANNEL)[2] == VOTES


def moment_of(buffer: str) -> int | None:
    """Return which moment of the optimizer's state a buffer is; None for other buffers.

    Args:
        buffer: name of the buffer, such as `state.0`.
    """
    number = buffer.removeprefix(MOMENT_PREFIX)
    return int(number) if number != buffer and number.isdecimal() else None


def groups_of(name: str, groups: Mapping[str, Groups]) -> Groups:
    """Return the groups of ranks that collectives on a link or channel span; () for all ranks.

    Args:
        name: name of the link or channel.
        groups: groups by link, as in `Plan.groups`.
    """
    return () if is_vote_channel(name) else groups.get(base_link(name), ())


def _pairs(args: Mapping[str, Any] | Args) -> Args:
    """Return settings in the order of their names, with lists (from JSON) as tuples."""
    pairs = args.items() if isinstance(args, Mapping) else args
    return tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in pairs))
