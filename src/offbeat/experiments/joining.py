"""Launch of a script as an additional worker of a running gossip job."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from offbeat.core.files import write_text
from offbeat.core.start.launch_request import JOIN_VARIABLE, SCHEMA, VARIABLE, WORKER_VARIABLE
from offbeat.core.strategy.interface import Strategy
from offbeat.core.strategy.registry import reference_of
from offbeat.core.transport.addresses import parse_address
from offbeat.core.transport.job_place import RANK_VARIABLE, WORLD_SIZE_VARIABLE
from offbeat.experiments.script import require_runnable
from offbeat.frames.secret import VARIABLE as SECRET_VARIABLE

LAUNCHERS = ("RANK", "WORLD_SIZE", RANK_VARIABLE, WORLD_SIZE_VARIABLE, VARIABLE)


def run_joined(
    address: str, script: Sequence[str], worker: int | None, strategy: Strategy | None
) -> int:
    """Run the script as a joining worker and return its exit code.

    Args:
        address: address of a listener of the job.
        script: script or module with its arguments.
        worker: id of a returning worker; None for a new worker.
        strategy: gossip strategy; None uses the strategy that the script names.

    Raises:
        ValueError: the address is malformed or its host is unknown, the script cannot be run, the
            job's secret is not set, or the strategy does not allow workers to join.
    """
    host, _ = parse_address(address)
    require_runnable(script)
    _require_known_host(host, address)
    if not os.environ.get(SECRET_VARIABLE):
        raise ValueError(
            f"{SECRET_VARIABLE} must be set to the job's secret, or --secret name a file with it; "
            "start the job with it, too"
        )
    if strategy is not None and not strategy.needs.allows_joining:
        raise ValueError(f"strategy ({strategy}) must be one of gossip: a2cid2, ad-psgd")
    env = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    env[JOIN_VARIABLE] = address
    if worker is not None:
        env[WORKER_VARIABLE] = str(worker)
    with tempfile.TemporaryDirectory() as folder:
        if strategy is not None:
            job = {
                "schema": SCHEMA,
                "strategy": reference_of(strategy),
                "settings": strategy.settings(),
            }
            env[VARIABLE] = str(Path(folder, "job.json"))
            write_text(env[VARIABLE], json.dumps(job))
        return subprocess.run([sys.executable, *script], env=env).returncode


def _require_known_host(host: str, address: str) -> None:
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise ValueError(
            f"address ({address}) must begin with the name or address of a worker's host, and "
            f"{host} does not resolve ({error.strerror or error}); copy HOST:PORT from the job's "
            "output"
        ) from None
