"""Messages for errors in a cluster file: location, value and expected value."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError


def describe_errors(error: ValidationError, known: Mapping[str, Sequence[str]]) -> str:
    """Return one line per error.

    Args:
        error: errors of pydantic.
        known: known keys by table; the top level has the name "".
    """
    return "\n".join(_describe_error(dict(item), known) for item in error.errors())


def _describe_error(item: dict[str, Any], known: Mapping[str, Sequence[str]]) -> str:
    where = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        *table, key = map(str, item["loc"])
        keys = known.get(table[0] if table else "", known[""])
        guess = difflib.get_close_matches(key, keys, n=1)
        hint = f"did you mean {guess[0]!r}?" if guess else f"known: {list(keys)}"
        return f"{where}: unknown key; {hint}"
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] != "value_error":
        message = f"({item['input']!r}) {message[:1].lower()}{message[1:]}"
    return f"{where}: {message}" if where else message
