"""Option --secret: the job's secret from a file, as every user can read a command line."""

from __future__ import annotations

import os
import sys
from pathlib import Path

READABLE_BY_OTHERS = 0o077


def set_secret(path: Path | None) -> None:
    """Set the secret of this process and its children to the text of a file. None: do nothing.

    Raises ValueError if the file is missing or empty, or if the environment variable holds another
    secret. Prints a warning to stderr if other users can read the file.
    """
    if path is None:
        return
    from offbeat.frames.secret import VARIABLE

    if not path.is_file():
        raise ValueError(
            f"--secret ({path}) must be a file that holds the secret, as a command line can be "
            f"read by every user (ps); write one, or set {VARIABLE}"
        )
    text = path.read_text().strip()
    if not text:
        raise ValueError(f"--secret ({path}) must not be an empty file; put a secret into it")
    if os.environ.get(VARIABLE, text) != text:
        raise ValueError(f"--secret ({path}) and {VARIABLE} are two secrets; unset the variable")
    if path.stat().st_mode & READABLE_BY_OTHERS:
        print(
            f"offbeat: {path} can be read by other users; chmod 600 {path}",
            file=sys.stderr,
            flush=True,
        )
    os.environ[VARIABLE] = text
