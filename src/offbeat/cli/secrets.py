"""The job's secret from a file, never from the command line, which every user can read."""

from __future__ import annotations

import os
import sys
from pathlib import Path

READABLE_BY_OTHERS = 0o077


def adopt(path: Path | None) -> None:
    """Let a file's text be the secret of the processes that are started here; nothing without one.

    ValueError for a file that does not exist or says nothing, and for another secret in the
    variable. A file that others may read is said on stderr.
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
