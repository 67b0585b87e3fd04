"""Report of a job from its record: how it ended, and where its time went; does not import torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from offbeat.core import words
from offbeat.core.plan import INSIDE, base_link
from offbeat.core.profile import Profile
from offbeat.core.transport.failure_detector import interval_s
from offbeat.core.transport.topology import Topology
from offbeat.core.words import count_text, duration
from offbeat.jobs.interval import Interval, LossSums, combine, quantile
from offbeat.jobs.job_view import ACTIVE, LEFT, delaying_ranks, heartbeat_timeout_s
from offbeat.jobs.membership_history import EVENT, MembershipHistory
from offbeat.jobs.record_folder import find_runs, is_alive, is_run
from offbeat.jobs.record_lines import JobRecord, RankLines, load

SILENT_S = 2.0  # lower bound; a rank with an older heartbeat at the first error failed before it


@dataclass(frozen=True)
class Restart:
    """An earlier run of the job. The next run has loaded its checkpoint.

    Attributes:
        run: id of the earlier run; None if its checkpoint names no record.
        folder: folder of its record; None if it was not found.
        iteration: iterations before the checkpoint.
        repeated: iterations that ran in both; None if unknown.
    """

    run: str | None
    folder: str | None
    iteration: int
    repeated: int | None


@dataclass(frozen=True)
class JobReport:
    """Facts of a report. Times are seconds per iteration, means over all ranks with lines.

    Attributes:
        folder: folder of the record.
        id: id of the run.
        strategy: strategy with its settings.
        world_size: number of ranks.
        nodes: number of ranks of each replica; empty if every rank holds a replica of its own.
        state: "ended", "running", "raised", "signal" or "silent".
        ending: how the job ended, or what it does.
        started_t: start in seconds since 1970.
        duration_s: seconds from the start to the last line.
        iterations: iterations of the job, with those before a checkpoint.
        counted: iterations of the record after the measurement of a profile.
        iteration_s: mean; None without any interval, as all that follow.
        range_s: quantiles at 2.5 % and 97.5 %.
        predicted_s: prediction; None if nothing was predicted.
        mark: "~" if the prediction is of a disturbed profile.
        bound_s: lower bound of the strategy.
        compute_s: forward, backward and updates.
        messages_s: waiting for messages, without `late_s`.
        late_s: waiting for ranks that begin their messages late; None if fewer than two ranks have
            lines.
        script_s: between iterations.
        late_ranks: ranks that begin their messages late.
        sent_bytes: bytes that a rank has sent in these iterations, between nodes if replicas have
            several ranks.
        baseline_share: these bytes divided by those of DDP; None without a profile.
        losses: mean loss of the first and of the last interval.
        nonfinite_losses: number of losses that were not finite.
        members: changes of the members; None for a job without any.
        events: notices, decisions, warnings and checkpoints of the job.
        restarts: earlier runs, newest first.
        problems: missing and unreadable parts of the record.
    """

    folder: str
    id: str
    strategy: str
    world_size: int
    nodes: tuple[int, ...]
    state: str
    ending: str
    started_t: float
    duration_s: float
    iterations: int
    counted: int
    iteration_s: float | None
    range_s: tuple[float, float] | None
    predicted_s: float | None
    mark: str
    bound_s: float | None
    compute_s: float | None
    messages_s: float | None
    late_s: float | None
    script_s: float | None
    late_ranks: tuple[int, ...]
    sent_bytes: float | None
    baseline_share: float | None
    losses: tuple[float, float] | None
    nonfinite_losses: int
    members: MembershipHistory | None
    events: tuple[Mapping[str, Any], ...]
    restarts: tuple[Restart, ...]
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as JSON types."""
        return asdict(self)


def find_record(folders: Sequence[Path]) -> list[Path] | None:
    """Return the folders of a job's record; of a folder of runs the newest run. None if the first
    folder holds neither."""
    found = []
    for folder in folders:
        runs = [] if is_run(folder) else find_runs(folder)
        found.append(runs[-1] if runs else folder)
    unique = {path.resolve(): path for path in found}
    return list(unique.values()) if is_run(found[0]) else None


def read_report(folders: Sequence[Path]) -> JobReport:
    """Return the facts of a job's record in the folders of its hosts, as of now.

    Raises:
        ValueError: the folders hold records of different runs, or of a newer version.
    """
    return job_report(load(folders), time.time())


def job_report(record: JobRecord, now: float) -> JobReport:
    """Return the facts of a job's record. `now` is in seconds since 1970."""
    counted = {
        rank: total
        for rank, lines in sorted(record.ranks.items())
        if (total := total_of(lines)) is not None
    }
    state, ending = _ending(record, now)
    everything = [interval for lines in record.ranks.values() for interval in lines.intervals]
    members = members_of(record)
    own = next(iter(counted.values()), None)
    if members is not None:  # the first rank may have left
        own = max(counted.values(), key=lambda total: total.n, default=None)
    alive = record.alive or {}
    message_s = _message_seconds(counted)
    profile = record.read_file("profile.json", Profile.from_dict)
    sent = _mean(counted, _payload_bytes)
    nodes = Topology.from_record(record.run)
    baseline = 0.0 if profile is None else _baseline_bytes(profile, nodes)
    started = record.run.get("started") or min(_times(record), default=0.0)
    first, last = _losses(record, 0), _losses(record, -1)
    return JobReport(
        folder=str(record.folders[0]),
        id=run_name(record),
        strategy=str(record.run.get("strategy") or alive.get("strategy") or "unknown strategy"),
        world_size=record.world_size,
        nodes=() if nodes is None else nodes.sizes,
        state=state,
        ending=ending,
        started_t=started,
        duration_s=max(0.0, max(_times(record), default=started) - started),
        iterations=_stop(record),
        counted=0 if own is None else own.n,
        iteration_s=None if own is None else own.mean_s,
        range_s=None if own is None else _range_s(own),
        predicted_s=alive.get("predicted_s"),
        mark=alive.get("mark", ""),
        bound_s=alive.get("bound_s"),
        compute_s=_mean(counted, lambda i: i.own_s),
        messages_s=None if message_s is None else message_s[0],
        late_s=None if message_s is None else message_s[1],
        script_s=_mean(counted, lambda i: i.script_s),
        late_ranks=tuple(sorted(delaying_ranks(list(counted.values())))),
        sent_bytes=None if sent is None or own is None else sent * own.n,
        baseline_share=sent / baseline if sent and baseline else None,
        losses=(first, last) if first is not None and last is not None else None,
        nonfinite_losses=sum(i.loss.nonfinite for i in everything if i.loss is not None),
        members=members,
        events=tuple(events_of(record)),
        restarts=tuple(_restarts(record)),
        problems=tuple(_problems(record, state)),
    )


# --- how it ended --------------------------------------------------------------------------------


def _ending(record: JobRecord, now: float) -> tuple[str, str]:
    """Return the state of a job and a text about its end.

    Of several ranks that stopped, the first one counts: a rank whose error is none of another
    rank's failure, or a rank that fell silent before it.
    """
    ends = {
        rank: lines.end
        for rank, lines in record.ranks.items()
        if lines.end is not None and lines.end.get("how") != LEFT
    }
    folders, writer = record.folders, (record.alive or {}).get("writer", 0)
    if writer not in ends and any(is_alive(folder, now) for folder in folders):
        return "running", _running_text(record)
    raised = sorted((end["t"], rank) for rank, end in ends.items() if end.get("how") == "raised")
    own_errors = [(t, rank) for t, rank in raised if not ends[rank].get("waited")]
    history = members_of(record)
    gone = {*ends} if history is None else {*ends, *history.ended_members}
    silent = sorted((t, rank) for rank, t in _last_signs(record).items() if rank not in gone)
    if own_errors:
        error_t, rank = own_errors[0]
        # Of few ranks, heartbeats are at most 1 s old.
        least_s = max(SILENT_S, 1.5 * interval_s(len(_entries(record))))
        silent = [(t, r) for t, r in silent if t < error_t - least_s]
        if not silent:
            return "raised", _stop_text(record, rank, ends[rank])
    hows = {end.get("how") for end in ends.values()}
    if silent and "ended" not in hows:
        return "silent", _silent_text(record, silent, ends)
    if "signal" in hows:
        # Ranks of gossip and servers stop separately, so the text is that of rank 0 if possible.
        _, rank = min((r != 0, r) for r, end in ends.items() if end.get("how") == "signal")
        return "signal", _stop_text(record, rank, ends[rank])
    if raised:
        return "raised", _stop_text(record, raised[0][1], ends[raised[0][1]])
    if "ended" in hows:
        return "ended", f"after {count_text(_stop(record), 'iteration')}"
    return "silent", "the record has no line about the end"


def _stop_text(record: JobRecord, rank: int, end: Mapping[str, Any]) -> str:
    text = words.shorten(str(end.get("text", "")))
    place = f"at iteration {end.get('iteration', 0):,}"
    if end.get("how") == "signal":
        return text  # names the rank and the iteration
    return f"{_name(record, rank)} raised {text} {place}"


def _silent_text(
    record: JobRecord,
    silent: Sequence[tuple[float, int]],
    ends: Mapping[int, Mapping[str, Any]],
) -> str:
    """Return which rank fell silent first, where, its memory, and what ended another rank."""
    silent_t, rank = silent[0]
    entry = _entries(record).get(rank, {})
    activity = str(entry.get("activity") or "")
    text = f"{_name(record, rank)} fell silent at iteration {_iteration(record, rank):,}"
    text += f", {activity}" if activity else ""
    lines = record.ranks.get(rank)
    memory = [i.rss_bytes for i in lines.intervals if i.rss_bytes] if lines is not None else []
    if memory:
        first, last = words.size(memory[0]), words.size(memory[-1])
        text += f". Its memory was {first} at first and {last} at last"
    if len(silent) > 1:
        more = [_name(record, r, host=False) for _, r in silent[1:]]
        later = duration(silent[-1][0] - silent_t)
        text += f". {words.join_texts(more)} fell silent up to {later} later"
    if ends:
        end_t, other = min((end["t"], other) for other, end in ends.items())
        later = f"{duration(max(0.0, end_t - silent_t))} later"
        end = ends[other]
        if end.get("how") == "signal":
            text += f". A signal ended {_name(record, other, host=False)} {later}"
        else:
            error = str(end.get("text", "")).partition(":")[0]
            text += f". {_name(record, other, host=False).capitalize()} raised {error} {later}"
    return text


def _running_text(record: JobRecord) -> str:
    text, entries = f"at iteration {_stop(record):,}", _entries(record)
    timeout_s = heartbeat_timeout_s(len(entries))
    silent = [
        f"{_name(record, rank)} silent for {duration(entry['age_s'])}"
        for rank, entry in sorted(entries.items())
        if entry.get("state") in ACTIVE and (entry.get("age_s") or 0) > timeout_s
    ]
    return "; ".join([text, *silent])


def _last_signs(record: JobRecord) -> dict[int, float]:
    """Return the time of the last sign of each rank that is known and has not left."""
    signs = {rank: max(_rank_times(lines)) for rank, lines in record.ranks.items() if lines.head}
    alive_t = (record.alive or {}).get("t")
    for rank, entry in _entries(record).items():
        if entry.get("state") not in ACTIVE:
            signs.pop(rank, None)
        elif alive_t is not None:
            # Heartbeats by rank 0's clock count more than lines by the rank's own clock.
            signs[rank] = alive_t - (entry.get("age_s") or 0.0)
    return signs


def _entries(record: JobRecord) -> dict[int, Mapping[str, Any]]:
    """Return the entries of alive.json by rank."""
    entries = (record.alive or {}).get("ranks") or ()
    return {entry["rank"]: entry for entry in entries if isinstance(entry, dict)}


def _iteration(record: JobRecord, rank: int) -> int:
    """Return the last known iteration of a rank. Heartbeats count from the start of a process."""
    lines = record.ranks.get(rank, RankLines())
    before = max((e["iteration"] for e in lines.events if "continues" in e), default=0)
    heard = _entries(record).get(rank, {}).get("iteration", -1)
    stop = lines.intervals[-1].stop if lines.intervals else 0
    return max(stop, before + heard)


def process_fact(record: JobRecord, names: str, rank: int, name: str) -> Any:
    """Return the host (`hosts`, `host`) or process (`pids`, `pid`) of a rank by run.json or its
    lines."""
    known = record.run.get(names) or []
    if rank < len(known):
        return known[rank]
    return record.ranks.get(rank, RankLines()).head.get(name)


def _name(record: JobRecord, rank: int, *, host: bool = True) -> str:
    named = process_fact(record, "hosts", rank, "host")
    return f"rank {rank} ({named})" if host and named else f"rank {rank}"


# --- numbers -------------------------------------------------------------------------------------


def total_of(lines: RankLines) -> Interval | None:
    """Return the sums after the measurement of a profile, or of all iterations if none follow."""
    counted = [i for i in lines.intervals if i.first >= lines.first] or lines.intervals
    return combine(counted) if counted else None


def _range_s(total: Interval) -> tuple[float, float]:
    """Return the quantiles at 2.5 % and 97.5 %, which the bins of the histogram round."""
    low, high = (quantile(total.hist, share) for share in (0.025, 0.975))
    return max(low, total.s_min), min(high, total.s_max)


def _mean(totals: Mapping[int, Interval], part: Callable[[Interval], float]) -> float | None:
    """Return the mean over ranks of a part of an iteration."""
    return fmean(part(total) / total.n for total in totals.values()) if totals else None


def _message_seconds(totals: Mapping[int, Interval]) -> tuple[float, float | None] | None:
    """Return the seconds of waiting for messages and for late ranks.

    A collective ends on all ranks at the same time. The messages of the rank that begins them last
    take the least time, so any additional time of another rank's messages is spent on late ranks.
    """
    if not totals:
        return None
    waits = {rank: total.wait_s / total.n for rank, total in totals.items()}
    if len(totals) < 2:
        return fmean(waits.values()), None
    least_s = min(total.message_s for total in totals.values())
    late_s = fmean(min(waits[rank], t.message_s - least_s) for rank, t in totals.items())
    return fmean(waits.values()) - late_s, late_s


def _payload_bytes(total: Interval) -> int:
    return sum(sums.bytes for name, sums in total.links.items() if base_link(name) != INSIDE)


def _baseline_bytes(profile: Profile, nodes: Topology | None) -> float:
    """Return the bytes that a rank sends per iteration of DDP, as a mean over the ranks; between
    nodes if replicas have several ranks."""
    held = sum(bucket.size_bytes for bucket in profile.buckets)
    if nodes is None:
        return held
    whole = held * nodes.sizes[0] if nodes.sharded else held
    return whole * fmean(nodes.ring_share(rank) for rank in range(nodes.ranks))


def _losses(record: JobRecord, place: int) -> float | None:
    """Return the mean loss over ranks of their first (0) or last (-1) interval with a loss."""
    found: list[LossSums] = []
    for lines in record.ranks.values():
        losses = [i.loss for i in lines.intervals if i.loss is not None and i.loss.n]
        found += losses[place : place + 1 or None]
    return fmean(loss.mean for loss in found) if found else None


def _stop(record: JobRecord) -> int:
    """Return the number of iterations of the rank with the most."""
    ranks = {*record.ranks, *_entries(record)}
    return max((_iteration(record, rank) for rank in ranks), default=0)


def _rank_times(lines: RankLines) -> Iterator[float]:
    """Yield the times of the lines of a rank."""
    yield from (line["t"] for line in (lines.head, lines.end or {}, *lines.events) if "t" in line)
    yield from (interval.t for interval in lines.intervals)


def _times(record: JobRecord) -> Iterator[float]:
    for lines in record.ranks.values():
        yield from _rank_times(lines)
    if record.alive is not None and "t" in record.alive:
        yield record.alive["t"]


def run_name(record: JobRecord) -> str:
    heads = (lines.head.get("id") for lines in record.ranks.values())
    return str(record.run.get("id") or next(filter(None, heads), record.folders[0].resolve().name))


# --- events, restarts, problems ------------------------------------------------------------------


def events_of(record: JobRecord) -> Iterator[Mapping[str, Any]]:
    """Yield the events of all ranks in order of iterations, each text of an iteration once, and of
    each change of the members that with the longest time."""
    found: dict[tuple[int, str, str], dict[str, Any]] = {}
    for rank, lines in sorted(record.ranks.items()):
        for event in lines.events:
            kind, text = event.get("event", ""), event.get("text", "")
            if kind == EVENT:
                text = str(event.get("epoch"))
            key = (event.get("iteration", 0), kind, text)
            is_longer = kind == EVENT and event.get("s", 0.0) > found.get(key, {}).get("s", 0.0)
            if key not in found or is_longer:
                found[key] = {"rank": rank, **event}
    yield from (found[key] for key in sorted(found))


def members_of(record: JobRecord) -> MembershipHistory | None:
    """Return the changes of the members of a job; None if there are none."""
    events = [event for _, lines in sorted(record.ranks.items()) for event in lines.events]
    start_t = float(record.run.get("started") or min(_times(record), default=0.0))
    found = MembershipHistory.of(int(record.run.get("world_size") or 0), start_t, events)
    return found if found.changes else None


def _restarts(record: JobRecord) -> Iterator[Restart]:
    """Yield the earlier runs of the job by loaded checkpoints and restarts, newest first."""
    for event, earlier in _continuations(record):
        run, iteration = event["continues"], event["iteration"]
        if earlier is None:
            yield Restart(run, None, iteration, None)
        else:
            repeated = max(0, _stop(earlier) - iteration)
            yield Restart(run, str(earlier.folders[0]), iteration, repeated)


def earlier_records(record: JobRecord) -> Iterator[JobRecord]:
    """Yield the records of the earlier runs of the job that are beside this one, newest first."""
    yield from (earlier for _, earlier in _continuations(record) if earlier is not None)


def _continuations(record: JobRecord) -> Iterator[tuple[Mapping[str, Any], JobRecord | None]]:
    """Yield each load of a checkpoint, newest first, and the record of the run that saved it; None
    if it is not beside this one."""
    seen = {run_name(record)}
    while (event := _continuation(record)) is not None:
        run = event["continues"]
        folder = record.folders[0].resolve().parent / str(run)
        if run is None or run in seen or not is_run(folder):
            yield event, None
            return
        record = load([record.folders[0].parent / str(run)])
        seen.add(run)
        yield event, record


def _continuation(record: JobRecord) -> Mapping[str, Any] | None:
    """Return the event about the checkpoint that a job has loaded, or else about its restart."""
    events = [e for lines in record.ranks.values() for e in lines.events if "continues" in e]
    return next((e for e in events if e["event"] != "restart"), next(iter(events), None))


def _problems(record: JobRecord, state: str) -> Iterator[str]:
    yield from record.problems
    if record.missing:
        ranks = words.join_texts([str(rank) for rank in record.missing])
        plural = "s" * (len(record.missing) > 1)
        yield f"no lines of rank{plural} {ranks}: give the folders of their hosts, too"
    history = members_of(record)
    gone = {} if history is None else history.ended_members
    if not record.run:
        yield "run.json is missing: rank 0's folder was not given, or could not be written"
    for rank, lines in sorted(record.ranks.items()):
        if lines.torn and state != "running":
            yield f"the last line of rank {rank} is incomplete"
        if lines.damaged:
            yield f"{count_text(lines.damaged, 'line')} of rank {rank} cannot be read"
        if state == "ended" and lines.end is None and rank not in gone:
            yield f"rank {rank} has written no end"
