"""Observer of a job: what a rank records, publishes and prints, wherever the job was started."""

from __future__ import annotations

import atexit
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from offbeat.core.console import console
from offbeat.core.derive.windows import Windows
from offbeat.core.measuring.loss import LossTap
from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.runtime.iteration import Iteration
from offbeat.core.runtime.recording import MemberChange, Recorder, process_facts
from offbeat.core.runtime.session import Session
from offbeat.core.strategy.interface import Strategy
from offbeat.core.transport.cluster import Cluster
from offbeat.core.transport.heartbeat import run_at_process_exit
from offbeat.core.transport.job_place import current_servers
from offbeat.core.transport.peer_errors import describe_exception
from offbeat.jobs.board import Board
from offbeat.jobs.interval import Interval, combine
from offbeat.jobs.iteration_log import IterationLog
from offbeat.jobs.monitor import JobMonitor
from offbeat.jobs.record_folder import describe_removal, new_run, previous_attempt, remove_above
from offbeat.jobs.record_lines import RUN_FILE, BackgroundWriter
from offbeat.jobs.replica_sample import Sample, SampledElements
from offbeat.jobs.reported import clear_receiver, set_receiver
from offbeat.jobs.settings import (
    OFF,
    JobSettings,
    launcher_name,
    mask_secrets,
    require_same_settings,
    torchrun_attempt,
)
from offbeat.jobs.tally import Tally
from offbeat.jobs.timelines import Timelines

INTERVAL_S = 5.0  # intervals that rank 0 receives
AGE_SHARE = 1000  # a recorded interval lasts at least the age of the job divided by this
SAMPLE_S = 60.0  # least time between two samples of the parameters, by the profile
SAMPLE_ITERATIONS = 1000  # iterations between two samples without a profile
FLUSH_S = 3.0  # longest wait for the record folder at the end
MOST_TEXT = 2000  # characters of the text of an error
EPOCH_BOARD = "members"  # name of the board of an epoch, whose store has no other board


class JobObserver(Recorder):
    """Observer of one rank of a job.

    Every rank must create it at the same point of `prepare`. Without a record it keeps no files.
    In a job whose members change each process has a number, which is its rank at the start; a
    process that joins has the next number.

    Args:
        settings: settings of the job, the same on all ranks.
        strategy: the strategy that runs.
        cluster: links and control of this rank.
        clock: seconds since 1970.
        members: names of the members, by rank; empty if members cannot change.
        joining: see `join_observer`, in a process that joins a running job.
    """

    def __init__(
        self,
        settings: JobSettings,
        strategy: Strategy,
        cluster: Cluster,
        clock: Callable[[], float] = time.time,
        members: Sequence[str] = (),
        joining: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        control = cluster.control
        self.every_bucket, self.splits_every = settings.every, 1 if settings.every else 16
        self._device, self._clock = cluster.device, clock
        self._settings, self._strategy, self._control = settings, strategy, control
        self._names, self._number = [*members], control.rank
        self._facts: dict[str, Any] = {}
        if joining is not None:
            self._names, self._facts = [*joining["names"]], dict(joining["facts"])
            self._add_processes(joining["members"], joining["joined"])
            self._number = self._names.index(joining["members"][control.rank])
        self._device_type = cluster.where.type
        self._blames_peers = control.blames_peers
        self._session: Session | None = None
        self._tally = Tally(self._number, cluster.device, self._session_traffic, clock)
        self._total: Interval | None = None
        self._began_s = time.monotonic()
        self._due_s, self._line_due_s = self._began_s + INTERVAL_S, self._began_s
        self._unwritten: list[Interval] = []
        self._elements: SampledElements | None = None
        self._sample_every = SAMPLE_ITERATIONS
        self._before = 0 if joining is None else joining["before"]  # iterations of processes before
        self._count = 0  # iterations of this process
        # Number of the first iteration after the last interval.
        self._next = 0 if joining is None else joining["iteration"]
        self._ending = threading.Lock()  # held from the start of `end`
        self._process_id = os.getpid()  # a fork of this process ends nothing
        self._windows: Windows | None = None
        self._profile: Profile | None = None
        self._metrics: dict[str, list[float]] = {}
        self._sent: Mapping[str, int] = {}  # bytes of this rank by link, at the end
        own = {**process_facts(), **versions()}
        if joining is None:
            kept = settings.record if control.rank == 0 and not settings.every else None
            own["id"] = new_run(kept, clock())
            self._facts = self._job_facts(cluster, control.gather(own))
        self.id = str(self._facts["id"])
        self._writer: BackgroundWriter | None = None
        self._timelines: Timelines | None = None
        self._log: IterationLog | None = None
        self.ends_at_signal = settings.record is not None and not settings.every
        if settings.record:
            self._open_record(cluster, Path(settings.record), own)
        self.monitor: JobMonitor | None = None
        if control.rank == 0:
            if self._writer is not None:
                self._begin_record(self._writer, Path(settings.record or ""))
            self._create_monitor()
        name = None if joining is None else EPOCH_BOARD
        self._board = Board(control, self.monitor.on_round if self.monitor else None, name)
        self._tap = LossTap()
        self._receive = self._add_metric
        set_receiver(self._receive)
        self._at_exit = run_at_process_exit(self._end_at_exit)

    def _open_record(self, cluster: Cluster, folder: Path, own: Mapping[str, Any]) -> None:
        """Begin the lines of this rank. `own` has its host and process."""
        every, number, device = self._settings.every, self._number, cluster.device
        self._writer = BackgroundWriter(
            folder if every else folder / str(self.id), number, self._clock
        )
        self._line("head", id=self.id, rank=number, world_size=self._control.world_size,
                   host=own["host"], pid=own["pid"])  # fmt: skip
        if every:
            self.notes |= cluster.topology.record()
            self._log = IterationLog(self, self._line, number, device)
        else:
            self._timelines = Timelines(self._line, number, device, self.origin_s)

    def _begin_record(self, writer: BackgroundWriter, folder: Path) -> None:
        """Write run.json, name the run that torchrun has restarted, and remove old runs."""
        limit_bytes = self._settings.record_limit
        if limit_bytes is not None and not self._settings.every:
            removal = remove_above(folder, limit_bytes, str(self.id))
            if removal.runs:
                console.print("record", describe_removal(removal))
        attempt = torchrun_attempt(os.environ)
        if attempt is not None and attempt["restarts"]:
            self._link_attempt(previous_attempt(folder, attempt))
        writer.replace(RUN_FILE, self._facts)

    def _job_facts(self, cluster: Cluster, everyone: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the content of run.json."""
        return {
            "id": str(everyone[0]["id"]),
            "job_name": self._settings.job_name,
            "strategy": str(self._strategy),
            "argv": mask_secrets(sys.argv),
            "world_size": self._control.world_size,
            "hosts": [one["host"] for one in everyone],
            "pids": [one["pid"] for one in everyone],
            "versions": versions(),
            "links": {name: str(spec) for name, spec in cluster.specs.items()},
            **cluster.topology.record(),
            "launcher": launcher_name(os.environ),
            "torchrun": torchrun_attempt(os.environ),
            "started": self._clock(),
        }

    def _create_monitor(self) -> None:
        self.monitor = JobMonitor(
            self._settings,
            self._facts,
            self._strategy,
            current_servers(),
            self._control,
            self._writer,
            self._clock,
            self._number,
        )

    def attach(self, session: Session) -> None:
        self._session = session
        for warning in self.warnings:  # of the preparation
            self.decide(0, warning, warning)

    def _session_traffic(self) -> Mapping[str, int]:
        return self._session.traffic() if self._session is not None else {}

    def _line(self, kind: str, **fields: Any) -> None:
        if self._writer is not None:
            self._writer.line(kind, **fields)

    # ---- called by the session --------------------------------------------------------------

    def start(
        self, strategy: str, plan: Plan | None, observed: int, profile: Profile | None = None
    ) -> None:
        self._close_interval(write=True)
        if self._log is not None:
            self._log.complete()
        if profile is not None:
            self._total = None  # iterations that were measured are none of the strategy
            self._line("start", iteration=self._next)
        self.plan = plan
        if self._log is not None:
            self._log.start(strategy, observed)
        self._set_windows(plan)
        self._profile = profile
        if profile is not None:
            self._sample_every = max(100, math.ceil(SAMPLE_S / profile.compute_s))
        if self.monitor is not None:
            self.monitor.on_plan(plan, profile, self._next)

    def set_plan(self, plan: Plan, profile: Profile | None = None) -> None:
        self._profile = self._profile if profile is None else profile
        if self._log is not None:
            self._log.complete()
        if self.plan is not None and plan is not self.plan:
            self._close_interval(write=True)
            self._set_windows(plan)
            if self.monitor is not None:
                self.monitor.on_plan(plan, self._profile, self._next)
        self.plan = plan

    def _set_windows(self, plan: Plan | None) -> None:
        self._windows = None if plan is None else Windows(plan)
        if self._timelines is not None:
            self._timelines.restart()

    def on_step_begin(self, iteration: int) -> None:
        if (loss := self._tap.take()) is not None:
            self._tally.add_loss(loss)
        if self._log is not None:
            self._log.begin_step(iteration, loss)
        before = self._session.iteration - iteration if self._session is not None else 0
        if before != self._before:  # a checkpoint was loaded
            self._close_interval(write=True)
            self._before, self._next = before, before + iteration

    def ended(self, iteration: Iteration) -> None:
        done, windows = iteration, self._windows
        applied = windows is None or bool(windows.applied_window(done.planned))
        applied = applied and not done.skipped and not done.abandoned
        self._tally.add(done, self._before + done.number, applied)
        now_s = time.monotonic()
        if self._log is not None:
            self._log.add(done)
        if self._timelines is not None:
            self._timelines.add(done, self.plan, self._before)
        if now_s >= self._due_s:
            self._close_interval()

    def set_sample(self, create: Callable[[], Sample] | None) -> None:
        if self._log is not None:
            self._log.set_sample(create)
        # A copy from a GPU would wait for the device.
        if create is None or self._device_type != "cpu":
            self._elements = None
        else:
            self._elements = create().elements

    def on_step_end(self, iteration: int) -> None:
        if self._log is not None:
            self._log.end_step(iteration)
        if self._elements is not None and (iteration + 1) % self._sample_every == 0:
            self._board.post_sample(iteration // self._sample_every, self._elements)

    def decide(self, iteration: int, what: str, warning: str | None) -> None:
        kind = "decision" if warning is None else "warning"
        if self.monitor is not None and warning is None:
            self.monitor.decisions += 1
        self._line("event", iteration=self._before + iteration, event=kind, text=what)

    def on_members(self, change: MemberChange, joined: Mapping[int, Mapping[str, Any]]) -> None:
        self._close_interval(write=True)
        self._add_processes(change.members, joined)
        numbers = {name: number for number, name in enumerate(self._names)}
        groups = {
            group: [numbers[name] for name in getattr(change, group) if name in numbers]
            for group in ("members", "joined", "left", "failed")
        }
        self._line("event", iteration=change.iteration, event="members", text=change.text,
                   epoch=change.epoch, s=round(change.seconds, 4), landed=change.landed,
                   skipped=change.skipped, **groups)  # fmt: skip
        if self._control.rank == 0 and self._writer is not None:
            self._writer.replace(RUN_FILE, {**self._facts, "processes": len(self._names)})
        self._board.abandon()  # its store has ended with the epoch
        if self._control.rank == 0 and self.monitor is None:
            self._create_monitor()
            assert self.monitor is not None
            self.monitor.on_plan(self.plan, self._profile, self._next)
        if self.monitor is not None:
            self.monitor.on_members(groups["members"])
        on_round = self.monitor.on_round if self.monitor else None
        self._board = Board(self._control, on_round, EPOCH_BOARD)

    def _add_processes(
        self, members: Sequence[str], joined: Mapping[int, Mapping[str, Any]]
    ) -> None:
        """Give the next numbers to the members that have none.

        Args:
            members: names of the members, by rank.
            joined: by rank of each member that has joined, its host and process (`pid`).
        """
        for rank, name in enumerate(members):
            if name not in self._names:
                facts = joined.get(rank, {})
                self._names.append(name)
                self._facts["hosts"].append(facts.get("host", ""))
                self._facts["pids"].append(facts.get("pid"))

    def joining_facts(self) -> dict[str, Any]:
        return {
            "facts": self._facts,
            "names": self._names,
            "before": self._before,
            "iteration": 0 if self._session is None else self._session.iteration,
        }

    def on_load(self, record: str | None, iteration: int) -> None:
        self._line("event", iteration=iteration, event="checkpoint", continues=record,
                   text=f"continued from a checkpoint after {iteration:,} iterations")  # fmt: skip

    def _link_attempt(self, earlier: str | None) -> None:
        """Record that torchrun has restarted a job. Where a checkpoint is loaded later, that event
        takes the place of this one."""
        if earlier is not None:
            self._line("event", iteration=0, event="restart", continues=earlier,
                       text="restarted by torchrun")  # fmt: skip

    def write(self, bytes_sent: Mapping[str, int]) -> None:
        self._sent = bytes_sent
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.end("ended")
        elif isinstance(error, KeyboardInterrupt):
            self.end("signal", f"Rank {self._number} received SIGINT (Ctrl-C)")
        else:
            text = describe_exception(error)[:MOST_TEXT]
            self.end("raised", text, waited=self._blames_peers(error))

    # ---- end --------------------------------------------------------------------------------

    def end(self, how: str, text: str = "", *, waited: bool = False) -> None:
        """Write the end of the record, once. Any thread may call this method.

        Args:
            how: "ended", "raised", "signal" or "left".
            text: error, signal, or that this process leaves.
            waited: whether the error ended a wait for another rank, which has failed before.
        """
        if os.getpid() != self._process_id or not self._ending.acquire(blocking=False):
            return
        if how in ("ended", "left"):
            self._tally.end()
        self._close_interval(write=True)
        facts: dict[str, Any] = {"waited": True} if waited else {}
        if self._log is not None:
            self._log.end()
            facts |= {"bytes": dict(self._sent), "pace": self.pace}
        self._line("end", how=how, iteration=self._next, text=text, **facts)
        self._board.close()
        if self.monitor is not None:
            self.monitor.on_end(how, text, self._total, self._count)
        if self._writer is not None and self._writer.flush(FLUSH_S):
            self._writer.close()
        elif self._writer is not None:
            text = f"record ({self._writer.folder}) did not answer within {FLUSH_S:g} s; its last "
            console.print("record", f"{text}lines may be missing", "warning")
        self._tap.close()
        clear_receiver(self._receive)
        atexit.unregister(self._at_exit)
        self._session = None

    def _end_at_exit(self) -> None:
        """End a record whose session did not close."""
        self.write({})

    # ---- intervals --------------------------------------------------------------------------

    def _close_interval(self, *, write: bool = False) -> None:
        """Publish the sums since the last interval, and add them to the record.

        Args:
            write: write the line of the record even if it is not due.
        """
        now_s = time.monotonic()
        self._due_s = now_s + INTERVAL_S
        interval = self._tally.close_interval()
        if interval is not None:
            self._total = interval if self._total is None else combine([self._total, interval])
            self._count, self._next = self._count + interval.n, interval.stop
            self._unwritten.append(interval)
            self._board.post(interval)
        if write or now_s >= self._line_due_s:
            self._line_due_s = now_s + (now_s - self._began_s) / AGE_SHARE
            self._write_interval()

    def _write_interval(self) -> None:
        if self._writer is not None:
            if self._unwritten:
                interval = combine(self._unwritten)
                self._writer.line("interval", **interval.to_dict())
            for name, values in self._metrics.items():
                mean, last = sum(values) / len(values), self._next - 1
                self._writer.line("metric", iteration=last, name=name, value=mean, n=len(values))
        self._unwritten, self._metrics = [], {}

    def _add_metric(self, name: str, value: float) -> None:
        """Record a metric that the script reports: one line per interval, with the mean.

        NaN and infinity are left out, because JSON cannot hold them.
        """
        if self._log is not None:
            self._log.add_metric(name, value)
        elif math.isfinite(value):
            self._metrics.setdefault(name, []).append(value)


def open_observer(
    settings: JobSettings, strategy: Strategy, cluster: Cluster, members: Sequence[str] = ()
) -> JobObserver | None:
    """Return the observer of this rank; None if nothing is recorded, printed or exported.

    Every rank must call it. Rank 0's console output counts for all ranks.

    Args:
        settings: settings of the job.
        strategy: the strategy that runs.
        cluster: links and control of this rank.
        members: names of the members, by rank; empty if members cannot change.

    Raises:
        ValueError: on every rank, if settings differ or a rank cannot use them.
    """
    require_same_settings(settings, os.environ, cluster.control)
    logs = cluster.control.gather(settings.log)[0] != OFF
    if settings.record is None and not settings.sinks and not logs:
        return None
    return JobObserver(settings, strategy, cluster, members=members)


def join_observer(
    settings: JobSettings,
    strategy: Strategy,
    cluster: Cluster,
    joining: Mapping[str, Any] | None,
) -> JobObserver | None:
    """Return the observer of a process that joins a running job, with the settings of this process;
    None if the members have none.

    Args:
        settings: settings of this process.
        strategy: the strategy that runs.
        cluster: links and control of this rank.
        joining: result of `joining_facts` of rank 0, with the names of the members by rank
            (`members`), and the processes of joining members by rank (`joined`).
    """
    if joining is None:
        return None
    return JobObserver(settings, strategy, cluster, joining=joining)


def versions() -> dict[str, str]:
    """Return the versions of offbeat, torch and Python."""
    from offbeat import __version__

    return {
        "offbeat": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
