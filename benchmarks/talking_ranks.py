"""Ranks that open their own sockets: their launch, their addresses and their answers."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def launch_ranks(
    script: str, rate: str | None, ranks: int, role: str, *arguments: str
) -> list[dict[str, Any]]:
    """Launch `script --role ...` with a folder on each rank and return the printed JSON lines; exit
    if a rank fails.

    Args:
        script: file of the script.
        rate: rate of the links; None for loopback.
        ranks: number of ranks.
        role: argument before the folder; empty for none.
        arguments: arguments after the folder.
    """
    from offbeat.lab import Cluster, Lab, NoLab, launch

    answers: list[dict[str, Any]] = []

    def on_line(_: int, line: str) -> None:
        if line.startswith("{"):
            answers.append(json.loads(line))

    cluster = Cluster.simple(ranks, rate)
    with (
        Lab(cluster, "ranks") if rate else NoLab(cluster) as lab,
        tempfile.TemporaryDirectory() as folder,
    ):
        argv = [sys.executable, script, "--role", *filter(None, [role]), folder, *arguments]
        result = launch(lab, argv, log_dir=Path(folder, "logs"), timeout_s=120, on_line=on_line)
        if result.problem:
            sys.exit(result.problem)
    return answers


def own_address() -> str:
    """Return the address of this rank's link, or that of the loopback."""
    from offbeat.core.transport.interfaces import ipv4_of

    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    found = ipv4_of(interface) if interface else None
    return str(found.ip) if found else "127.0.0.1"


def publish(folder: Path, address: Sequence[Any], rank: int = 0) -> None:
    """Write the address of a rank for all others."""
    draft = folder / f"address{rank}.part"
    draft.write_text(json.dumps(address))
    draft.rename(folder / f"address{rank}")


def published(folder: Path, rank: int = 0) -> tuple[str, int]:
    """Wait for the address of a rank."""
    while not (folder / f"address{rank}").exists():
        time.sleep(0.01)
    host, port = json.loads((folder / f"address{rank}").read_text())
    return host, port
