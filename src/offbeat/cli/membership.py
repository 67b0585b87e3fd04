"""`offbeat membership`: the service through which members join, leave and meet."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from offbeat.cli import texts
from offbeat.cli.entry import app
from offbeat.cli.options import number

DEFAULT_PORT = 29600


@app.command
def membership(
    *,
    journal: Path,
    port: Annotated[int, number(0, 65535)] = DEFAULT_PORT,
    host: str = "0.0.0.0",
    secret: Path | None = None,
) -> int:
    """Run the membership service of one job until it gets SIGTERM or Ctrl-C.

    Example: offbeat membership --journal job.journal --secret secret.txt

    Args:
        journal: File that restores the state after a restart.
        port: Port of the service; 0 for a free one.
        host: Address of the service; 0.0.0.0 for all interfaces.
        secret: File with the secret; else OFFBEAT_SECRET_FILE, OFFBEAT_SECRET.
    """
    from offbeat.frames.secret import read_secret
    from offbeat.membership.service import open_service

    if secret is not None:
        texts.warn_if_readable(secret)
    service = open_service(journal, host, port, read_secret(secret), report=_report)
    _report(f"membership service at {service.address}, {service.summary}")
    signal.signal(signal.SIGTERM, lambda *_: service.stop())
    with suppress(KeyboardInterrupt):  # the journal holds all answered requests
        service.serve()
    return 0


def _report(text: str) -> None:
    print(f"offbeat: {text}", flush=True)
