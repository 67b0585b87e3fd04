"""JSON form of profiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from offbeat.core.plan.text import compact
from offbeat.core.profile.records import (
    Bucket,
    CodecSpeed,
    Contention,
    GradientNoise,
    Link,
    ScriptUsage,
)

if TYPE_CHECKING:
    from offbeat.core.profile.facts import Profile

SCHEMA = 1
# Fields of a profile that are lists of records, with the name of a record in messages.
RECORDS = (
    ("buckets", "bucket", Bucket),
    ("links", "link", Link),
    ("contention", "contention", Contention),
    ("codecs", "codec", CodecSpeed),
)


def fields_as_json(profile: Profile) -> dict[str, Any]:
    """Return the fields of a profile as JSON types. Optional fields with default values are left
    out."""
    head = {"schema": SCHEMA, "world_size": profile.world_size, "update_s": profile.update_s}
    return head | {name: _as_json(value) for name, value in compact(profile).items()}


def read_fields(data: Any, known: set[str]) -> dict[str, Any]:
    """Return the fields of a profile from a result of `fields_as_json`.

    Args:
        data: result of `fields_as_json`.
        known: names of all fields.

    Raises:
        ValueError: the schema differs, or a field is missing, unknown or out of range.
    """
    if not isinstance(data, Mapping):
        raise ValueError("a profile must be a JSON object; see `offbeat profile`")
    if data.get("schema") != SCHEMA:
        raise ValueError(
            f"schema ({data.get('schema')!r}) of the profile must be {SCHEMA}; measure it again "
            "with `offbeat profile`"
        )
    _reject_unknown("profile", data, {"schema", *known})
    for key in ("world_size", "links", "buckets"):
        if key not in data:
            raise ValueError(f"the profile lacks {key!r}")
    values = {name: _as_tuples(value) for name, value in data.items() if name != "schema"}
    for name, what, record in RECORDS:
        values[name] = tuple(_record(record, what, one) for one in data.get(name, ()))
    noise = data.get("noise")
    values["noise"] = _record(GradientNoise, "noise", noise) if noise else None
    values["usage"] = _record(ScriptUsage, "usage", data.get("usage", {}))
    inside = data.get("inside")
    values["inside"] = _record(Link, "link", inside) if inside else None
    return values


def _as_json(value: Any) -> Any:
    """Return the value of a field as JSON types."""
    if isinstance(value, tuple):
        return [_as_json(one) for one in value]
    return compact(value) if is_dataclass(value) else value


def _reject_unknown(what: str, data: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(data) - known)
    if unknown:
        raise ValueError(f"{what} field ({unknown[0]!r}) must be one of {', '.join(sorted(known))}")


def _record(cls: type, what: str, data: Any) -> Any:
    if not isinstance(data, Mapping):
        raise ValueError(f"{what} ({data!r}) must be a JSON object")
    known = {f.name for f in fields(cls)}
    _reject_unknown(f"{what} {data.get('name', '?')!r}", data, known)
    try:
        return cls(**{k: _as_tuples(v) for k, v in data.items()})
    except TypeError:
        raise ValueError(
            f"{what} {data.get('name', '?')!r} must have the fields {', '.join(sorted(known))}"
        ) from None


def _as_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_tuples(one) for name, one in value.items()}
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
