"""Functions that write files and name the file in each error, and the rule for schemas.

The schema of a file changes with each incompatible change of its format. A file with another schema
is refused, because its unknown parts may change the meaning of the known ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any


class SchemaError(ValueError):
    """A file of another version of offbeat."""


def require_schema(found: Any, schema: int, what: object) -> None:
    """Raise unless `found` is the schema of this version.

    Args:
        found: schema that the file states.
        schema: schema that this version writes.
        what: file that states the schema.

    Raises:
        SchemaError: the schema is another one.
    """
    if found != schema:
        raise SchemaError(
            f"schema ({found!r}) of {what} must be {schema}: another version of offbeat has "
            "written it; install that version, or write it again"
        )


def write_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8.

    Raises:
        OSError: names the file. Python's own error of a failed write, as to a full disk, does not
            name it.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def replace_text(path: str | Path, text: str) -> None:
    """Replace a text file in UTF-8 atomically. No reader sees an incomplete file.

    Raises:
        OSError: names the file, which keeps its former text, as on a full disk.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    try:
        write_text(draft, text)
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_or_warn(
    write: Callable[[str], object], path: str, what: str, loss: str = "", *, needed: bool
) -> None:
    """Write a file, and turn an OSError into a warning unless the file is `needed`.

    Args:
        write: function that writes the file at a path.
        path: path of the file.
        what: noun for the contents of the file.
        loss: end of the warning: effect of the missing file on later runs. Begins with a comma.
        needed: whether to raise the error, as for a command whose only result is the file.
    """
    try:
        write(path)
    except OSError as error:
        if needed:
            raise
        warnings.warn(
            f"{what} ({path}) cannot be written: {error.strerror or error}; training goes on"
            f"{loss}. Give a path that this user may write, on a disk that is not full",
            stacklevel=3,
        )
