"""The job: what a launcher (`offbeat run`) asks of the processes that it starts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from offbeat.core.transport.interfaces import LinkSpec, parse_link

VARIABLE = "OFFBEAT_JOB"
LINKS_VARIABLE = "OFFBEAT_LINKS"
STRATEGY_VARIABLE = "OFFBEAT_STRATEGY"  # as dreamddp:period=8, instead of the script's
SERVERS_VARIABLE = "OFFBEAT_SERVERS"  # so many of the last ranks serve
RANK_VARIABLE = "OFFBEAT_RANK"  # both where RANK and WORLD_SIZE leave servers out
WORLD_SIZE_VARIABLE = "OFFBEAT_WORLD_SIZE"
JOIN_VARIABLE = "OFFBEAT_JOIN"  # HOST:PORT of a worker that gossips
WORKER_VARIABLE = "OFFBEAT_WORKER"  # come back as this one
SCHEMA = 1


@dataclass(frozen=True)
class Job:
    """Contents of the file that OFFBEAT_JOB names; all of it optional.

    `profile` is read, `save_profile` written by rank 0; `record_dir` receives rank{r}.jsonl.
    With a `pace` the profile that is measured is that of hosts so many times slower, or as slow as
    need be ("auto"); ranks then compute in turns, of which `turns` is the lock file. `checkpoint`
    is a folder in which the runtime saves every `checkpoint_every` iterations, and from whose
    newest checkpoint it goes on if told to `resume`. Rank 0 writes the strategy that the script
    names to `save_strategy` (see `named_strategy`); with `stop_after_strategy` all ranks exit
    then. `min_bucket_bytes` is that of `offbeat.prepare`, in place of the script's; where buckets
    are measured, they are smaller if there would be fewer than `least_buckets`.
    """

    strategy: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    profile: str | None = None
    save_profile: str | None = None
    stop_after_profile: bool = False
    record_dir: str | None = None
    timeout_s: float | None = None
    pace: float | Literal["auto"] | None = None
    turns: str | None = None
    checkpoint: str | None = None
    checkpoint_every: int | None = None
    resume: bool = False
    min_bucket_bytes: int | None = None
    least_buckets: int = 1
    save_strategy: str | None = None
    stop_after_strategy: bool = False


def current_job() -> Job:
    """The job of this process, an empty one without a launcher; ValueError on a bad file."""
    path = os.environ.get(VARIABLE)
    if not path:
        return Job()
    data = json.loads(Path(path).read_text())
    if data.pop("schema", None) != SCHEMA:
        raise ValueError(f"{VARIABLE} ({path}) must have the schema {SCHEMA}; update offbeat")
    unknown = set(data) - {f.name for f in fields(Job)}
    if unknown:
        raise ValueError(f"{VARIABLE} ({path}) has the unknown field {min(unknown)!r}")
    return Job(**data)


def current_links() -> list[LinkSpec]:
    """The links that the launcher set, or "eth0,gloo:eth1" from a user; one unbound by default."""
    text = os.environ.get(LINKS_VARIABLE)
    if not text:
        return [LinkSpec("net")]
    if not text.startswith("["):
        return [parse_link(link.strip()) for link in text.split(",")]
    return [LinkSpec(**link) for link in json.loads(text)]


def current_servers() -> int:
    """How many of the last ranks serve; ValueError unless it is a number."""
    text = os.environ.get(SERVERS_VARIABLE) or "0"
    if not text.isdecimal():
        raise ValueError(f"{SERVERS_VARIABLE} ({text!r}) must be a number of ranks, 0 or more")
    return int(text)


def current_place() -> tuple[int, int]:
    """Rank and number of ranks, servers included. A launcher that starts servers tells scripts
    only of workers (RANK, WORLD_SIZE), by which they split their data."""
    rank = os.environ.get(RANK_VARIABLE, os.environ["RANK"])
    return int(rank), int(os.environ.get(WORLD_SIZE_VARIABLE) or os.environ.get("WORLD_SIZE", "1"))


def current_join_request() -> tuple[tuple[str, int], int | None] | None:
    """Where this process is to join a job of gossip, and as which worker; None if it is not."""
    text, worker = os.environ.get(JOIN_VARIABLE), os.environ.get(WORKER_VARIABLE)
    if text is None:
        return None
    if worker is not None and not worker.isdecimal():
        raise ValueError(f"{WORKER_VARIABLE} ({worker!r}) must be the id of a worker, as 3")
    return parse_address(text), None if worker is None else int(worker)


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"address ({text!r}) must be HOST:PORT of a worker, as 10.0.0.1:40123")
    return host, int(port)
