"""`offbeat check`: this host, or under a launcher the hosts of a job and their network."""

from __future__ import annotations

import os
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
    """Print versions, platform, links and limits of this host, for a report of a fault. Under the
    launcher of a job, check its hosts and the network between them: `srun offbeat check` or
    `torchrun ... -m offbeat check`.

    Example: offbeat check
    """
    from offbeat.core.start.launchers import torchrun_variables

    if not {"RANK", "WORLD_SIZE"} & {*os.environ, *torchrun_variables(os.environ)}:
        if port is not None or quick or strict:
            raise ValueError(
                "--port, --quick and --strict must be left out without the launcher of a job, such "
                "as srun or torchrun"
            )
        from offbeat.check.host import host_lines

        print(*host_lines(), sep="\n")
        return 0
    from offbeat.check import command

    if port is not None:
        texts.require_range("--port", port, 1, "leave it out for a free port", 65535)
    return command.check(port, quick=quick, strict=strict)
