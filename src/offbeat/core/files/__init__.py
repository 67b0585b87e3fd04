"""Functions that write files and name the file in each error, and the rule for schemas.

The schema of a file grows with each incompatible change of its format. A file with an equal or an
earlier schema is read, by every version with the same major number. A file with a later schema is
refused, because its unknown parts may change the meaning of the known ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any


class NewerSchemaError(ValueError):
    """A file of a later version of offbeat."""


def require_schema(found: Any, newest: int, what: object) -> None:
    """Raise unless `found` is a schema of at most `newest`, that of this version.

    Args:
        found: schema that the file states.
        newest: schema that this version writes.
        what: file that states the schema.

    Raises:
        NewerSchemaError: the schema is that of a later version.
        ValueError: the schema is no schema.
    """
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ValueError(f"schema ({found!r}) of {what} must be {newest}; write it again")
    if found > newest:
        raise NewerSchemaError(
            f"schema ({found}) of {what} must be at most {newest}: a later version of offbeat has "
            "written it; install that version"
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
