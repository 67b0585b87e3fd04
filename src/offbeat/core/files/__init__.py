"""Writing of files whose errors name the file."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path


def write_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8. An OSError names the file.

    A failed write, as to a full disk, raises an OSError without a file name otherwise.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_or_warn(
    write: Callable[[str], object], path: str, what: str, loss: str = "", *, needed: bool
) -> None:
    """Call `write` with the path; warn of an OSError, or raise it if the file is all that is
    asked for.

    Args:
        what: noun for the contents of the file.
        loss: what a later run does without the file, beginning with a comma.
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
