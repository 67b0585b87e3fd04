"""Launch request: options that a launcher (`offbeat run`) passes to the processes it starts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from offbeat.core.transport.addresses import parse_address
from offbeat.core.transport.interfaces import LinkSpec, parse_link

VARIABLE = "OFFBEAT_JOB"
LINKS_VARIABLE = "OFFBEAT_LINKS"
NODES_VARIABLE = "OFFBEAT_NODES"  # "auto", or the number of ranks that share a replica
STRATEGY_VARIABLE = "OFFBEAT_STRATEGY"  # replaces the script's strategy, as dreamddp:period=8
CHECKPOINT_VARIABLE = "OFFBEAT_CHECKPOINT"  # directory of checkpoints, in a job without a launcher
JOIN_VARIABLE = "OFFBEAT_JOIN"  # HOST:PORT of a gossip worker
WORKER_VARIABLE = "OFFBEAT_WORKER"  # former id of a returning worker
SCHEMA = 1


@dataclass(frozen=True)
class LaunchRequest:
    """Contents of the file named by OFFBEAT_JOB. All fields are optional.

    Attributes:
        strategy: name of the strategy; replaces the script's.
        settings: settings of that strategy.
        profile: file of the profile to plan from.
        save_profile: file to which rank 0 writes the measured profile.
        stop_after_profile: exit after the profile is measured.
        record_dir: directory that receives `rank{r}.jsonl`.
        timeout_s: longest wait, in seconds; replaces the script's.
        pace: factor by which the emulated hosts are slower than this machine, or "auto" for the
            smallest possible factor. Ranks then compute in turns.
        turns: lock file of these turns.
        checkpoint: directory of checkpoints.
        checkpoint_every: iterations between two checkpoints.
        resume: whether to continue from the newest checkpoint in that directory.
        min_bucket_bytes: replaces the argument of `offbeat.prepare`.
        least_buckets: smallest number of buckets to measure. Buckets get smaller than the measured
            minimum if necessary.
        save_strategy: file to which rank 0 writes the script's strategy (see `NamedStrategy`).
        stop_after_strategy: exit on all ranks after that.
        rehearsed: whether the profile is of another network, whose times are simulated.
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
    rehearsed: bool = False


def current_job() -> LaunchRequest:
    """Return the launch request of this process. Without a launcher, it holds the checkpoints of
    OFFBEAT_CHECKPOINT. Raise ValueError if the file is invalid."""
    path = os.environ.get(VARIABLE)
    if not path:
        checkpoint = os.environ.get(CHECKPOINT_VARIABLE) or None
        return LaunchRequest(checkpoint=checkpoint, resume=checkpoint is not None)
    data = json.loads(Path(path).read_text())
    if data.pop("schema", None) != SCHEMA:
        raise ValueError(f"{VARIABLE} ({path}) must have the schema {SCHEMA}; update offbeat")
    unknown = set(data) - {f.name for f in fields(LaunchRequest)}
    if unknown:
        raise ValueError(f"{VARIABLE} ({path}) has the unknown field {min(unknown)!r}")
    return LaunchRequest(**data)


def current_links() -> list[LinkSpec]:
    """Return the links from OFFBEAT_LINKS: JSON of a launcher, or text of a user such as
    "eth0,gloo:eth1". Without the variable, return one link that is not bound to an interface."""
    text = os.environ.get(LINKS_VARIABLE)
    if not text:
        return [LinkSpec("net")]
    if not text.startswith("["):
        return [parse_link(link.strip()) for link in text.split(",")]
    return [LinkSpec(**link) for link in json.loads(text)]


def current_nodes() -> Literal["auto"] | int | None:
    """Return the nodes from OFFBEAT_NODES: "auto", or the number of ranks of each; None without
    it. Raise ValueError for other texts."""
    text = os.environ.get(NODES_VARIABLE)
    if not text:
        return None
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(
            f"{NODES_VARIABLE} ({text!r}) must be 'auto' or the number of ranks of each node, at "
            "least 1"
        )
    return int(text)


def current_join_request() -> tuple[tuple[str, int], int | None] | None:
    """Return the (host, port) of a gossip worker whose job this process joins, and the former id of
    this worker or None. Return None if this process joins no running job."""
    text, worker = os.environ.get(JOIN_VARIABLE), os.environ.get(WORKER_VARIABLE)
    if text is None:
        return None
    if worker is not None and not worker.isdecimal():
        raise ValueError(f"{WORKER_VARIABLE} ({worker!r}) must be the id of a worker, as 3")
    return parse_address(text), None if worker is None else int(worker)
