"""`offbeat check`: hosts of a job and the network between them, under the job's launcher."""

from __future__ import annotations

from typing import Annotated

from offbeat.cli import texts
from offbeat.cli.entry import app
from offbeat.cli.options import number, option


@app.command
def check(
    *,
    port: Annotated[
        int | None,
        number("Port of the first rank of each host; by default those of OFFBEAT_PORTS, or any."),
    ] = None,
    quick: Annotated[bool, option("Measure no rates.")] = False,
    strict: Annotated[bool, option("Exit with 1 also if something is slow or uncertain.")] = False,
) -> int:
    """Check the hosts of a job and the network between them, under the job's launcher: `srun
    offbeat check` or `torchrun ... -m offbeat check`.

    Example: offbeat check --quick
    """
    from offbeat.check import command

    if port is not None:
        texts.require_range("--port", port, 1, "leave it out for a free port", 65535)
    return command.check(port, quick=quick, strict=strict)
