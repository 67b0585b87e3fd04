"""Record folder of a made-up job, as a job with a record writes it."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offbeat.core.files import replace_text
from offbeat.jobs.interval import Interval, LinkSums, LossSums, bin_of
from offbeat.jobs.record_lines import ALIVE_FILE, RUN_FILE, SCHEMA, LineWriter

PREDICTED_S, BOUND_S = 0.412, 0.395
INTERVAL_S, ITERATIONS = 5.0, 12  # of each interval
SLOWER = 1.6  # factor of an iteration from three quarters of the job on, if a rank is slow


def make_job(
    folder: Path,
    world_size: int,
    *,
    intervals: int = 120,
    silent: int | None = None,
    slow: int | None = None,
    end: dict[str, Any] | None = None,
    events: Sequence[dict[str, Any]] = (),
    writers: Sequence[int] | None = None,
) -> Path:
    """Write the record of a job, which ends now, and return its folder.

    Args:
        folder: folder of the run; its name is the id.
        world_size: number of ranks, one per host.
        intervals: number of intervals of each rank.
        silent: rank whose last heartbeat was 47 s ago.
        slow: rank for which the others wait in the last quarter of the job.
        end: fields of the last line of each rank: how, iteration, text; None if it runs.
        events: fields of the events of rank 0: iteration, event, text.
        writers: ranks with lines; None for all.
    """
    now, numbers = time.time(), random.Random(1)
    start = now - intervals * INTERVAL_S
    hosts = [f"host-{rank}" for rank in range(world_size)]
    pids = [48101 + rank for rank in range(world_size)]
    _write_json(
        folder,
        RUN_FILE,
        {
            "id": folder.name,
            "continues": None,
            "argv": ["train.py"],
            "strategy": "dreamddp(period=8)",
            "job_name": "made",
            "hosts": hosts,
            "pids": pids,
            "versions": {"offbeat": "0.2.0"},
            "links": {"net": "gloo:eth0"},
            "launcher": "torchrun",
            "options": {},
            "world_size": world_size,
            "started": start,
        },
    )
    newest = {}
    for rank in range(world_size):
        made = [made_interval(rank, k, intervals, start, slow, numbers) for k in range(intervals)]
        newest[rank] = made[-1] if made else None
        if writers is None or rank in writers:
            writer = LineWriter(folder, rank)
            head = {"id": folder.name, "rank": rank, "host": hosts[rank], "pid": pids[rank]}
            writer.line("head", t=start, world_size=world_size, **head)
            for interval in made:
                writer.line("interval", **interval.to_dict())
            for event in events if rank == 0 else ():
                writer.line("event", **event)
            if end is not None:
                writer.line("end", **end)
    write_alive(folder, world_size, newest, silent=silent, slow=slow)
    return folder


def made_interval(
    rank: int, k: int, of: int, start: float, slow: int | None, numbers: random.Random
) -> Interval:
    """Return the k-th interval of a rank."""
    n, s = ITERATIONS, 0.418 * numbers.uniform(0.98, 1.02)
    own_s, message_s = 0.38 * numbers.uniform(0.99, 1.01), 0.03 * numbers.uniform(1, 1.2)
    if slow is not None and k >= 0.75 * of:
        s *= SLOWER
        own_s, message_s = (0.615, message_s) if rank == slow else (own_s, message_s + 0.24)
    loss = 4.2 - 0.01 * k
    return Interval(
        rank=rank,
        first=k * n,
        n=n,
        t=start + (k + 1) * INTERVAL_S,
        s_sum=n * s,
        s_min=0.98 * s,
        s_max=1.02 * s,
        hist={bin_of(s): n},
        own_s=n * own_s,
        wait_s=n * max(0.0, s - own_s - 0.005),
        script_s=n * 0.005,
        links={"net": LinkSums(4 * n, n * 2_100_000, n * message_s)},
        loss=LossSums(n, loss, loss, 0),
        updates=n,
        rss_bytes=9 << 30,
    )


def write_alive(
    folder: Path,
    world_size: int,
    newest: dict[int, Interval | None],
    *,
    silent: int | None = None,
    slow: int | None = None,
) -> None:
    """Replace alive.json by one of now."""
    states = [("running", "in forward"), ("running", "in backward")]
    waiting = ("waiting", "in backward, waiting for param of blocks.3..1 on 'net'")
    ranks = []
    for rank in range(world_size):
        state, activity = states[rank % 2] if silent is None else waiting
        if rank == silent:
            state, activity = "running", "in its script"
        elif slow is not None:
            state, activity = states[0] if rank == slow else waiting
        interval = newest.get(rank)
        iteration = -1 if interval is None else interval.stop + 3 * (silent not in (None, rank))
        ranks.append(
            {
                "rank": rank,
                "host": f"host-{rank}",
                "pid": 48101 + rank,
                "age_s": 47.0 if rank == silent else 0.4,
                "iteration": iteration,
                "state": state,
                "activity": activity,
                "interval": None if interval is None else interval.to_dict(),
            }
        )
    data = {"id": folder.name, "t": time.time(), "strategy": "dreamddp(period=8)"}
    prediction = {"predicted_s": PREDICTED_S, "bound_s": BOUND_S}
    _write_json(folder, ALIVE_FILE, {**data, **prediction, "ranks": ranks})


def _write_json(folder: Path, name: str, data: dict[str, Any]) -> None:
    replace_text(folder / name, json.dumps({"schema": SCHEMA, **data}))
