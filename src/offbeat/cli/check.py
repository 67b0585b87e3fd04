"""`offbeat check`: this host, or under a launcher the hosts of a job and their network."""

from __future__ import annotations

import os

from offbeat.cli.entry import app


@app.command
def check(*, quick: bool = False, strict: bool = False) -> int:
    """Print versions, platform, links and limits of this host, for a report of a fault. Under the
    launcher of a job, check its hosts and the network between them: `srun offbeat check` or
    `torchrun ... -m offbeat check`.

    Example: offbeat check

    Args:
        quick: Measure no rates.
        strict: Exit with 1 also if something is slow or uncertain.
    """
    from offbeat.core.start.launchers import torchrun_variables

    if {"RANK", "WORLD_SIZE"} & {*os.environ, *torchrun_variables(os.environ)}:
        from offbeat.check import command

        return command.check(quick=quick, strict=strict)
    if quick or strict:
        raise ValueError(
            "--quick and --strict must be left out without the launcher of a job, such as srun or "
            "torchrun"
        )
    from offbeat.check.host import host_lines

    print(*host_lines(), sep="\n")
    return 0
