"""Monitor of a job on rank 0: alive.json, the lines of rank 0, notices and messages."""

from __future__ import annotations

import math
import shlex
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from offbeat.core.console import console
from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import Strategy
from offbeat.core.strategy.registry import BASELINE
from offbeat.core.transport.control import Control
from offbeat.core.transport.failure_detector import LEFT
from offbeat.core.transport.topology import Topology
from offbeat.core.words import (
    count_text,
    duration,
    loss_text,
    percent,
    prediction_error,
    seconds,
    size,
)
from offbeat.jobs.interval import Interval, combine
from offbeat.jobs.outlook import (
    Notice,
    Outlook,
    describe_memory,
    describe_plan,
    describe_prediction,
)
from offbeat.jobs.record_lines import ALIVE_FILE, LineWriter
from offbeat.jobs.settings import RECORD_VARIABLE, JobSettings
from offbeat.jobs.sinks import JobState, RankState, SinkLabels, open_sinks

RANKS_SHORTEST_S, RANKS_AGE_SHARE = 60.0, 100  # rank 0 keeps the sums of all ranks this often
FIRST_LINE_S, RAREST_LINE_S = 10.0, 600.0  # time to the first line, and the longest between two


class JobMonitor:
    """Monitor of all ranks, on rank 0. Its thread is the board's.

    Args:
        settings: settings of the job.
        facts: content of run.json.
        strategy: strategy that runs.
        servers: number of ranks that serve.
        control: heartbeat of all ranks.
        writer: lines of rank 0; None without a record.
        clock: seconds since 1970.
        number: number of this process in the record, which is its rank at the start.
    """

    def __init__(
        self,
        settings: JobSettings,
        facts: Mapping[str, Any],
        strategy: Strategy,
        servers: int,
        control: Control,
        writer: LineWriter | None,
        clock: Callable[[], float] = time.time,
        number: int = 0,
    ):
        self._number = number
        self._numbers: Sequence[int] = range(len(facts["hosts"]))  # of the processes, by rank
        self._settings, self._facts, self._strategy = settings, facts, strategy
        self._servers, self._control, self._writer, self._clock = servers, control, writer, clock
        self._totals: dict[int, Interval] = {}
        self._newest: dict[int, Interval] = {}
        self._began_s = time.monotonic()
        self._ranks_due_s = self._began_s + RANKS_SHORTEST_S
        self._line_due_s, self._line_every_s = self._began_s + FIRST_LINE_S, FIRST_LINE_S
        self._planned: tuple[Plan | None, Profile | None] | None = None  # not yet predicted
        self._first = 0  # first iteration of the strategy
        self._suffix = ""  # of the files of the newest plan
        self._outlook: Outlook | None = None
        labels = SinkLabels(
            facts["job_name"],
            facts["id"],
            facts["strategy"],
            facts["versions"]["offbeat"],
            facts["hosts"],
        )
        self._sinks = open_sinks(
            settings.sinks, labels, lambda text: console.print("metrics", text, "warning")
        )
        self._divergence: float | None = None
        self.notices: Counter[str] = Counter()
        self.decisions = 0

    @property
    def _folder(self) -> str | None:
        """Folder of the record as an argument of a command; None without a record."""
        return None if self._writer is None else shlex.quote(str(self._writer.folder))

    # ---- called by the training thread ------------------------------------------------------

    def on_plan(self, plan: Plan | None, profile: Profile | None, iteration: int) -> None:
        """Handle the plan that begins with an iteration, or the start of a strategy without a
        plan."""
        is_first = self._planned is None and self._outlook is None and not self._number
        # A variant that the first iteration of the script requires takes the place of the plan.
        if not is_first and iteration > self._first + 1:
            self._suffix = f"-{iteration}"
        self._planned, self._first = (plan, profile), iteration
        for name, part in (("plan", plan), ("profile", profile)):
            if part is not None and self._writer is not None:
                self._writer.replace(f"{name}{self._suffix}.json", part.to_dict())

    def on_members(self, numbers: Sequence[int]) -> None:
        """Handle a change of the members of the job.

        Args:
            numbers: numbers of the processes in the record, by rank.
        """
        self._numbers, self._newest = numbers, {}

    def on_end(self, how: str, text: str, total: Interval | None, iterations: int) -> None:
        """Print three lines about the whole job.

        Args:
            how: "ended", "raised", "signal" or "left".
            text: error, signal, or that this process leaves.
            total: sums over the iterations of rank 0 after the measurement of the profile.
            iterations: number of all iterations of rank 0 in this process.
        """
        if self._writer is not None and how != "left":  # no round may have written it
            statuses = self._control.statuses()[: len(self._numbers)]
            self._write_alive(self._writer, statuses)
        for sink in self._sinks:
            sink.close()
        lines = self._describe_end(how, text, total, iterations)
        level = "info" if how in ("ended", "left") else "warning"
        console.print("end", "\n".join(lines), level, how=how, iterations=iterations)

    # ---- called by the board's thread -------------------------------------------------------

    def on_round(self, newest: Mapping[int, Interval], divergence: float | None) -> None:
        """Handle the newest intervals of all ranks, every few seconds.

        Args:
            newest: newest interval of each rank.
            divergence: mean squared distance of the replicas from their mean; None if unknown.
        """
        statuses = self._control.statuses()
        if len(statuses) != len(self._numbers):  # the members change just now
            return
        self._divergence = divergence
        for rank, interval in newest.items():
            before = self._newest.get(rank)
            if before is None or interval.t != before.t:
                number = self._numbers[rank]
                total = self._totals.get(number)
                self._totals[number] = interval if total is None else combine([total, interval])
        self._newest = dict(newest)
        if self._planned is not None:
            planned, self._planned = self._planned, None
            self._announce(*planned)
        self._compare()
        self._print_line()
        for sink in self._sinks:
            sink.update(self._state(statuses))
        if self._writer is not None:
            self._write_alive(self._writer, statuses)
            self._write_ranks(self._writer)

    def _announce(self, plan: Plan | None, profile: Profile | None) -> None:
        """Predict the plan, and print what it does."""
        is_first = self._outlook is None
        hosts = [self._facts["hosts"][number] for number in self._numbers]
        nodes = Topology.from_record(self._facts)
        job = hosts, self._servers, self._numbers, nodes
        outlook = Outlook.of(self._strategy, plan, profile, *job)
        self._outlook = outlook
        lines, numbers = [], dict[str, Any]()
        if profile is not None:
            summary = (type(self._strategy).__doc__ or "").partition("\n")[0]
            lines.append(describe_plan(outlook, summary))
            if nodes is None or not nodes.sharded:
                lines.append(describe_memory(self._strategy.memory(profile, plan)))
        if outlook.prediction is not None:
            line, numbers = describe_prediction(outlook)
            lines.append(line)
            if self._writer is not None:
                self._writer.replace("predicted.json", outlook.prediction.trace.to_dict())
        elif profile is None:
            lines.append(f"{self._facts['strategy']} measures no profile, so nothing is predicted")
        if is_first:
            lines.append(self._record_hint())
        console.print("plan", "\n".join(lines), strategy=self._facts["strategy"], **numbers)

    def _record_hint(self) -> str:
        if self._folder is None:
            return f"nothing is recorded; {RECORD_VARIABLE}=runs keeps what happens"
        return f"watch it with: offbeat watch {self._folder}"

    def _compare(self) -> None:
        own = self._newest.get(0)
        if self._outlook is None or own is None or own.first < self._first:
            return
        notice = self._outlook.compare(self._newest, 0, time.monotonic())
        if notice is not None:
            self._report(notice)

    def _report(self, notice: Notice) -> None:
        """Print a notice and add it to the record."""
        cause: dict[str, Any] = {} if notice.cause is None else {"cause": notice.cause.name}
        if notice.cause is not None:
            self.notices[notice.cause.name] += 1
            if notice.cause.rank is not None:
                cause["rank"] = notice.cause.rank
        numbers = {"iteration": notice.iteration, "s": notice.measured_s, **cause}
        assert self._outlook is not None
        numbers["predicted_s"] = self._outlook.iteration_s
        console.print(notice.event, notice.text, "notice", **numbers)
        if self._writer is not None:
            self._writer.line("event", event=notice.event, text=notice.text, **numbers)

    def _print_line(self) -> None:
        """Print a line about the newest interval, ever more rarely."""
        now_s, own = time.monotonic(), self._newest.get(0)
        if now_s < self._line_due_s or own is None or self._outlook is None:
            return
        self._line_every_s = min(2 * self._line_every_s, RAREST_LINE_S)
        self._line_due_s = now_s + self._line_every_s
        predicted_s = self._outlook.iteration_s
        done = count_text(own.stop, "iteration")
        pace = f"{seconds(own.mean_s)} each"
        if predicted_s is not None:
            error = prediction_error(predicted_s, own.mean_s)
            pace += f" (predicted {self._outlook.mark}{seconds(predicted_s)}, {error})"
        parts = [f"{done}; the last {own.n:,}: {pace}"] if own.n < own.stop else [done, pace]
        parts.append(f"{percent(own.wait_s / own.s_sum)} waiting")
        loss = own.loss.mean if own.loss is not None and own.loss.n else None
        if loss is not None:
            parts.append(f"mean loss {loss_text(loss)}")
        numbers = {"iterations": own.stop, "n": own.n, "s": own.mean_s, "predicted_s": predicted_s}
        console.print("progress", ", ".join(parts), **numbers, wait_s=own.wait_s / own.n, loss=loss)

    def _describe_end(
        self, how: str, text: str, total: Interval | None, iterations: int
    ) -> list[str]:
        count = count_text(iterations, "iteration")
        if total is None:
            done = f"{count}, all before the plan" if iterations else "no iteration has ended"
            return [f"{done}{f'; {text}' if text else ''}"]
        first = count if how != "raised" else f"stopped by {text.partition(':')[0]} after {count}"
        outlook = self._outlook
        predicted_s = None if outlook is None else outlook.iteration_s
        if total.n < iterations:  # the others have measured the profile, or came before a load
            first += f"; the last {total.n:,}"
        first += f" in {duration(total.s_sum)}, {seconds(total.mean_s)} each"
        if outlook is not None and predicted_s is not None:
            first += f", predicted {outlook.mark}{seconds(predicted_s)}"
        sent = sum(link.bytes for link in total.links.values())
        waiting = percent(total.wait_s / total.s_sum)
        second = f"{waiting} waiting; {size(sent)} sent by rank {self._number}"
        if outlook is not None and (baseline := outlook.baseline) is not None:
            whole_s = baseline.iteration_s * total.n
            second += f"; {BASELINE}: {outlook.mark}{duration(whole_s)} (predicted)"
        third = []
        if total.loss is not None and total.loss.n:
            third.append(f"loss {loss_text(total.loss.last)} at the end")
        if self.notices.total():
            third.append(count_text(self.notices.total(), "notice"))
        if self.decisions:
            third.append(f"{count_text(self.decisions, 'decision')} about the plan")
        if self._folder is not None:
            third.append(f"offbeat report {self._folder}")
        signal = [text] if how == "signal" else []  # a member that leaves prints its text itself
        return [*signal, first, second, *(["; ".join(third)] if third else [])]

    # ---- files ------------------------------------------------------------------------------

    def _state(self, statuses: Sequence[Mapping[str, Any]]) -> JobState:
        """Return the state of all ranks for the sinks."""
        outlook, now = self._outlook, self._clock()
        ranks = {
            self._numbers[rank]: RankState(
                self._newest.get(rank),
                self._totals.get(self._numbers[rank]),
                now - status["age_s"],
                max(0, status["iteration"]),
            )
            for rank, status in enumerate(statuses)
            if status["state"] != LEFT
        }
        return JobState(
            ranks,
            None if outlook is None else finite(outlook.iteration_s),
            None if outlook is None else finite(outlook.bound_s),
            divergence=finite(self._divergence),
            notices=dict(self.notices),
        )

    def _write_alive(self, writer: LineWriter, statuses: Sequence[Mapping[str, Any]]) -> None:
        hosts, pids = self._facts["hosts"], self._facts["pids"]
        ranks = [
            {
                "rank": self._numbers[rank],
                "host": hosts[self._numbers[rank]],
                "pid": pids[self._numbers[rank]],
                **status,
                "interval": self._newest[rank].to_dict() if rank in self._newest else None,
            }
            for rank, status in enumerate(statuses)
        ]
        outlook = self._outlook
        alive = {
            "id": self._facts["id"],
            "t": self._clock(),
            "strategy": self._facts["strategy"],
            "writer": self._number,
            "predicted_s": None if outlook is None else finite(outlook.iteration_s),
            "bound_s": None if outlook is None else finite(outlook.bound_s),
            "mark": "" if outlook is None else outlook.mark,
            "ranks": ranks,
        }
        writer.replace(ALIVE_FILE, alive)

    def _write_ranks(self, writer: LineWriter) -> None:
        """Write a line with the sums of all ranks, ever more rarely."""
        now_s = time.monotonic()
        if now_s < self._ranks_due_s:
            return
        age_s = now_s - self._began_s
        self._ranks_due_s = now_s + max(RANKS_SHORTEST_S, age_s / RANKS_AGE_SHARE)
        names = ("n", "s_sum", "own_s", "wait_s", "script_s")
        sums = {
            rank: [round(getattr(total, name), 3) for name in names]
            for rank, total in self._totals.items()
        }
        writer.line("ranks", sums=sums)


def finite(value: float | None) -> float | None:
    """Return a value that JSON can hold; None for infinity and NaN."""
    return value if value is not None and math.isfinite(value) else None
