"""Writing of files whose errors name the file."""

from __future__ import annotations

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
