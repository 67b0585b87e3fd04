"""Text form and JSON form of plans."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar, get_args

from offbeat.core.plan.phases import Phases
from offbeat.core.plan.types import (
    INSIDE,
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
from offbeat.core.words import count_text

SCHEMA = 2
T = TypeVar("T")


def text_of(plan: Plan, mark: Iterable[Any] = ()) -> str:
    """Return the plan as text, one line per rule, with an arrow at each rule in `mark`."""
    marked = {id(rule) for rule in mark}
    head = f"{plan.strategy}: {count_text(plan.buckets, 'bucket')}, "
    head += f"period {count_text(plan.period, 'iteration')}"
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
        alone = link == INSIDE and max(map(len, groups)) == 1
        parts = "each replica" if alone else " | ".join(",".join(map(str, g)) for g in groups)
        yield f"link {link} within {parts}"


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
    wire = f"as {rule.wire.name}{_format_args(rule.wire.args)}" if rule.wire else ""
    on = " ".join(filter(None, (f"on {rule.link}", wire, when)))
    what = rule.id.removesuffix(f"@{rule.link}")
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
    source = {} if plan.source is None else {"source": plan.source}
    return {
        "schema": SCHEMA,
        "strategy": plan.strategy,
        "buckets": plan.buckets,
        "period": plan.period,
        "prologue": plan.prologue,
        **source,
        "buffers": [_record_to_dict(buffer) for buffer in plan.buffers],
        "groups": {link: [list(g) for g in groups] for link, groups in plan.groups.items()},
        "transfers": [_transfer_to_dict(t) for t in plan.transfers],
        "votes": [{"args": {}} | _record_to_dict(vote) for vote in plan.votes],
        "applies": [_record_to_dict(apply) for apply in plan.applies],
        "bound_s": plan.bound_s,
        "facts": [[f.name, f.value, f.meaning] for f in plan.facts],
    }


def plan_from_dict(data: Mapping[str, Any]) -> Plan:
    """Return the plan that `data`, a result of `plan_to_dict`, describes.

    Raises:
        ValueError: the schema differs, or a field is missing or malformed.
    """
    if not isinstance(data, Mapping):
        raise ValueError("a plan must be a JSON object; write it with `offbeat plan`")
    if data.get("schema") != SCHEMA:
        raise ValueError(
            f"schema ({data.get('schema')!r}) of the plan must be {SCHEMA}; "
            "write the plan again with `offbeat plan`"
        )
    required = [f.name for f in fields(Plan) if f.name != "source"]
    return _record_from_dict(Plan, data, _PLAN_FIELDS, required)


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


def compact(record: Any) -> dict[str, Any]:
    """Return the fields of a record whose values are not the default."""
    values = {f: getattr(record, f.name) for f in fields(record)}
    return {f.name: value for f, value in values.items() if value != _default_value(f)}


def _default_value(f: Field[Any]) -> Any:
    return f.default if f.default_factory is MISSING else f.default_factory()


def _record_to_dict(record: Any) -> dict[str, Any]:
    """Return the fields of a record whose values are not the default, as JSON types."""
    return {name: _field_to_json(name, value) for name, value in compact(record).items()}


def _field_to_json(name: str, value: Any) -> Any:
    if name == "args":
        return dict(value)
    if isinstance(value, range):
        return [value.start, value.stop]
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, (Moment, Phases)) else value


def _transfer_to_dict(t: Transfer) -> dict[str, Any]:
    data = _record_to_dict(t.payload) | _record_to_dict(t)
    del data["payload"]
    if t.wire is not None:
        data["wire"] = {"args": {}, "error": None} | _record_to_dict(t.wire)
    return data


def _record_from_dict(
    cls: type[T],
    data: Mapping[str, Any],
    parsers: Mapping[str, Callable[[Any], Any]],
    required: Iterable[str] = (),
    **known: Any,
) -> T:
    """Return a record from its fields as JSON types.

    Args:
        cls: class of the record.
        data: fields by name; others are ignored.
        parsers: function from the JSON value of a field to its value, by name; others are kept.
        required: names of fields that must be in `data` in addition to those without a default.
        known: values of fields that are not in `data`.

    Raises:
        ValueError: a field is missing or malformed.
    """
    values = dict(known)
    for f in fields(cls):  # type: ignore[arg-type]
        if f.name in known:
            continue
        if f.name not in data:
            if f.name in required or _default_value(f) is MISSING:
                raise ValueError(f"the plan lacks the field {f.name!r}")
            continue
        value = data[f.name]
        try:
            values[f.name] = parsers[f.name](value) if f.name in parsers else value
        except (TypeError, AttributeError):
            raise ValueError(f"field {f.name!r} of the plan ({value!r}) is malformed") from None
    return cls(**values)


def _transfer_from_dict(data: Mapping[str, Any]) -> Transfer:
    payload = _record_from_dict(Payload, data, _FIELDS)
    return _record_from_dict(Transfer, data, _FIELDS, payload=payload)


def _records(cls: type) -> Callable[[Any], tuple[Any, ...]]:
    """Return the parser of a list of records."""
    return lambda rows: tuple(_record_from_dict(cls, row, _FIELDS) for row in rows)


def _ranks(ranks: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(int, ranks))


def _range(pair: Sequence[Any]) -> range:
    start, stop = pair
    return range(int(start), int(stop))


def _choice(name: str, value: Any, allowed: Sequence[str]) -> Any:
    if value not in allowed:
        raise ValueError(f"{name} ({value!r}) must be one of {', '.join(allowed)}")
    return value


# Parsers of the fields of rules, payloads, wires and buffers.
_FIELDS: Mapping[str, Callable[[Any], Any]] = {
    "buckets": _range,
    "ranks": _ranks,
    "phases": Phases.parse,
    "kept": bool,
    "wire": lambda data: data and _record_from_dict(Wire, data, {}),
    "verb": lambda verb: _choice("verb", verb, VERBS),
    "kind": lambda kind: _choice("kind", kind, get_args(Kind)),
    "start": lambda start: _choice("start", start, get_args(Start)),
    **dict.fromkeys(("after", "before", "at", "due"), parse_moment),
    **dict.fromkeys(("part", "parts", "width", "age", "ago", "copies"), int),
}
_PLAN_FIELDS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("buckets", "period", "prologue", "source"), int),
    "transfers": lambda rows: tuple(map(_transfer_from_dict, rows)),
    "applies": _records(Apply),
    "votes": _records(Vote),
    "buffers": _records(Buffer),
    "groups": lambda groups: {link: tuple(map(_ranks, parts)) for link, parts in groups.items()},
    "facts": lambda rows: tuple(Fact(*row) for row in rows),
}
