"""TOML text of flat tables and lists of flat tables, because tomllib only reads TOML."""

import json
from typing import Any


def toml_text(record: dict[str, Any]) -> str:
    """Return plain data as TOML without None and empty tables."""
    tables = {k: v for k, v in record.items() if isinstance(v, list)}
    lines = _pairs({k: v for k, v in record.items() if k not in tables})
    for name, items in tables.items():
        for item in items:
            lines += ["", f"[[{name}]]", *_pairs(item)]
    return "\n".join(lines) + "\n"


def _pairs(table: dict[str, Any]) -> list[str]:
    return [f"{key} = {_value(value)}" for key, value in table.items() if value not in (None, {})]


def _value(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key)} = {_value(item)}" for key, item in value.items())
        return "{ " + ", ".join(pairs) + " }"
    return json.dumps(value)  # JSON and TOML have the same syntax for strings, numbers and lists
