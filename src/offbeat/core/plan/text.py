"""Text form and JSON form of plans."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from offbeat.core.plan.phases import Phases
from offbeat.core.plan.types import (
    POINTS,
    VERBS,
    Apply,
    Buffer,
    Fact,
    Kind,
    Moment,
    Payload,
    Plan,
    Start,
    Transfer,
    Vote,
    Wire,
)

SCHEMA = 2


def text_of(plan: Plan, mark: Iterable[Any] = ()) -> str:
    """Return the plan as text, one line per rule, with an arrow at each rule in `mark`."""
    marked = {id(rule) for rule in mark}
    head = f"{plan.strategy}: {_count_text(plan.buckets, 'bucket')}, "
    head += f"period {_count_text(plan.period, 'iteration')}"
    head += f" after a prologue of {plan.prologue}" if plan.prologue else ""
    rules = [*plan.transfers, *plan.votes, *plan.applies]
    rows = [_cells(rule) for rule in rules]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [head, *(f"   {line}" for line in _storage_lines(plan))]
    for rule, row in zip(rules, rows, strict=True):
        cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(("-> " if id(rule) in marked else "   ") + cells.rstrip())
    return "\n".join(lines)


def _storage_lines(plan: Plan) -> Iterable[str]:
    """Yield the lines of buffers and groups."""
    for buffer in plan.buffers:
        copies = f", {buffer.copies} copies" if buffer.copies > 1 else ""
        yield f"buffer {buffer.name} like {buffer.kind}, starts as {buffer.start}{copies}"
    for link, groups in plan.groups.items():
        yield f"link {link} within " + " | ".join(",".join(map(str, group)) for group in groups)


def _cells(rule: Transfer | Apply | Vote) -> tuple[str, ...]:
    """Return the cells of the line of a rule."""
    phases = f"in {rule.phases}"
    if isinstance(rule, Vote):
        run = rule.buckets
        return (
            f"vote {rule.name}" + (f"[{run.start}:{run.stop}]" if run is not None else ""),
            f"at {rule.at}",
            f"due {rule.due}",
            phases,
            f"by {rule.rule}{_format_args(rule.args)}",
        )
    ago = f"~{rule.ago}" if rule.ago else ""
    when = f"when {rule.when}{ago}" if rule.when else ""
    if isinstance(rule, Apply):
        each = "each " if rule.at.bucket is None and rule.at.point in ("forward", "grad") else ""
        who = f"rank {','.join(map(str, rule.ranks))}" if rule.ranks is not None else ""
        extra = " ".join(filter(None, (who, when)))
        return f"{rule.id}{_format_args(rule.args)}", f"at {each}{rule.at}", "", phases, extra
    verb = "" if rule.verb == "all_reduce" else f"{rule.verb} "
    ranks = "" if rule.ranks is None else f" {rule.ranks[0]}->{rule.ranks[1]}"
    into = "" if rule.into is None else f" into {rule.into}"
    wire = f"as {rule.wire.name}{_format_args(rule.wire.args)}" if rule.wire else ""
    on = " ".join(filter(None, (f"on {rule.link}", wire, when)))
    what = f"{verb}{rule.payload}{ranks}{into}"
    return what, f"after {rule.after}", f"before {rule.before}", phases, on


def _format_args(args: Iterable[tuple[str, Any]]) -> str:
    inside = ", ".join(f"{name}={value}" for name, value in args)
    return f"({inside})" if inside else ""


def digest_of(plan: Plan) -> str:
    """Return the hash of all fields that must be equal on all ranks."""
    data = plan_to_dict(plan)
    del data["facts"], data["bound_s"]
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON types, with the schema version. Fields with default values are
    left out."""
    return {
        "schema": SCHEMA,
        "strategy": plan.strategy,
        "buckets": plan.buckets,
        "period": plan.period,
        "prologue": plan.prologue,
        **_compact(plan, "source"),
        "buffers": [_compact(b, "name", "kind", "start", "copies", "kept") for b in plan.buffers],
        "groups": {link: [list(g) for g in groups] for link, groups in plan.groups.items()},
        "transfers": [_transfer_to_dict(t) for t in plan.transfers],
        "votes": [
            {
                "name": v.name,
                "rule": v.rule,
                "at": str(v.at),
                "due": str(v.due),
                "phases": str(v.phases),
                "args": dict(v.args),
                **({"buckets": _pair(v.buckets)} if v.buckets is not None else {}),
            }
            for v in plan.votes
        ],
        "applies": [_apply_to_dict(a) for a in plan.applies],
        "bound_s": plan.bound_s,
        "facts": [[f.name, f.value, f.meaning] for f in plan.facts],
    }


def plan_from_dict(data: Mapping[str, Any]) -> Plan:
    """Return the plan that `data`, a result of `plan_to_dict`, describes.

    Raises:
        ValueError: the schema differs, or a field is missing or malformed.
    """
    if data.get("schema") != SCHEMA:
        raise ValueError(
            f"schema ({data.get('schema')!r}) of the plan must be {SCHEMA}; "
            "write the plan again with `offbeat plan`"
        )
    try:
        return Plan(
            strategy=data["strategy"],
            buckets=int(data["buckets"]),
            transfers=tuple(_transfer_from_dict(t) for t in data["transfers"]),
            applies=tuple(_apply_from_dict(a) for a in data["applies"]),
            votes=tuple(
                Vote(
                    v["name"],
                    v["rule"],
                    parse_moment(v["at"]),
                    parse_moment(v["due"]),
                    Phases.parse(v["phases"]),
                    v["args"],
                    _range(v["buckets"]) if "buckets" in v else None,
                )
                for v in data["votes"]
            ),
            buffers=tuple(_buffer_from_dict(b) for b in data["buffers"]),
            groups={
                link: tuple(tuple(map(int, group)) for group in groups)
                for link, groups in data["groups"].items()
            },
            period=int(data["period"]),
            prologue=int(data["prologue"]),
            source=None if "source" not in data else int(data["source"]),
            bound_s=data["bound_s"],
            facts=tuple(Fact(*fact) for fact in data["facts"]),
        )
    except KeyError as error:
        raise ValueError(f"the plan lacks the field {error.args[0]!r}") from None


def parse_moment(text: str) -> Moment:
    """Return the moment that `text`, a result of `str(moment)`, denotes.

    Args:
        text: for example "grad(3)", "end" or "forward(0)+1".

    Raises:
        ValueError: the text is not a moment.
    """
    place, _, lag = text.partition("+")
    point, _, bucket = place.rstrip(")").partition("(")
    return Moment(
        _choice("moment", point, POINTS), int(bucket) if bucket else None, int(lag) if lag else 0
    )


def _transfer_to_dict(t: Transfer) -> dict[str, Any]:
    wire = None
    if t.wire is not None:
        wire = {"name": t.wire.name, "args": dict(t.wire.args), "error": t.wire.error}
        wire |= _compact(t.wire, "anchor")
    optional = {
        "verb": None if t.verb == "all_reduce" else t.verb,
        "ranks": None if t.ranks is None else list(t.ranks),
        "into": t.into,
        "wire": wire,
        "when": t.when,
    }
    return {
        "buffer": t.payload.buffer,
        "buckets": _pair(t.payload.buckets),
        **_compact(t.payload, "part", "parts", "width", "age"),
        "after": str(t.after),
        "before": str(t.before),
        "phases": str(t.phases),
        "link": t.link,
        **_compact(t, "ago"),
        **{name: value for name, value in optional.items() if value is not None},
    }


def _transfer_from_dict(data: Mapping[str, Any]) -> Transfer:
    slice_ = {f: int(data[f]) for f in ("part", "parts", "width", "age") if f in data}
    wire = data.get("wire")
    return Transfer(
        payload=Payload(data["buffer"], _range(data["buckets"]), **slice_),
        after=parse_moment(data["after"]),
        before=parse_moment(data["before"]),
        phases=Phases.parse(data["phases"]),
        link=data["link"],
        verb=_choice("verb", data.get("verb", "all_reduce"), VERBS),
        ranks=_ranks(data),  # type: ignore[arg-type]
        into=data.get("into"),
        wire=Wire(**wire) if wire else None,
        when=data.get("when"),
        ago=int(data.get("ago", 0)),
    )


def _apply_to_dict(a: Apply) -> dict[str, Any]:
    optional = {
        "ranks": None if a.ranks is None else list(a.ranks),
        "when": a.when,
        "args": dict(a.args) or None,
    }
    return {
        "rule": a.rule,
        "buckets": _pair(a.buckets),
        "at": str(a.at),
        "phases": str(a.phases),
        **_compact(a, "ago"),
        **{name: value for name, value in optional.items() if value is not None},
    }


def _apply_from_dict(data: Mapping[str, Any]) -> Apply:
    return Apply(
        data["rule"],
        _range(data["buckets"]),
        parse_moment(data["at"]),
        Phases.parse(data["phases"]),
        ranks=_ranks(data),
        when=data.get("when"),
        args=data.get("args", {}),
        ago=int(data.get("ago", 0)),
    )


def _buffer_from_dict(data: Mapping[str, Any]) -> Buffer:
    return Buffer(
        data["name"],
        _choice("kind", data.get("kind", "param"), get_args(Kind)),
        _choice("start", data.get("start", "zero"), get_args(Start)),
        int(data.get("copies", 1)),
        bool(data.get("kept", True)),
    )


def _compact(record: Any, *names: str) -> dict[str, Any]:
    """Return the fields `names` of a record whose values are not the default."""
    defaults = {f.name: f.default for f in record.__dataclass_fields__.values()}
    return {n: getattr(record, n) for n in names if getattr(record, n) != defaults[n]}


def _ranks(data: Mapping[str, Any]) -> tuple[int, ...] | None:
    return tuple(map(int, data["ranks"])) if "ranks" in data else None


def _pair(buckets: range) -> list[int]:
    return [buckets.start, buckets.stop]


def _range(pair: Sequence[int]) -> range:
    start, stop = pair
    return range(int(start), int(stop))


def _count_text(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("s" if number != 1 else "")


def _choice(name: str, value: Any, allowed: Iterable[str]) -> Any:
    allowed = tuple(allowed)
    if value not in allowed:
        raise ValueError(f"{name} ({value!r}) must be one of {', '.join(allowed)}")
    return value
