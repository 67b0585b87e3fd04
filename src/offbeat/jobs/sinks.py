"""Sinks: metrics of all ranks for Prometheus and TensorBoard.

Rank 0 opens the sinks and passes the state of the job to each of them. A sink that fails causes one
warning and does not end training.
"""

from __future__ import annotations

import errno
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.jobs.interval import CAUSES, Interval
from offbeat.jobs.settings import SinkSetting

LOOPBACK = "127.0.0.1"  # interface of the Prometheus target if the setting names no host


@dataclass(frozen=True)
class SinkLabels:
    """Labels of all series.

    Attributes:
        job_name: name of the job.
        run: name of the run's folder.
        strategy: text of the strategy.
        version: version of offbeat.
        hosts: host by rank.
    """

    job_name: str
    run: str
    strategy: str
    version: str
    hosts: Sequence[str]


@dataclass(frozen=True)
class RankState:
    """State of one rank.

    Attributes:
        interval: newest interval; None before the end of the first one.
        totals: sums over all intervals since the start; None before the end of the first one.
        last_seen_t: time of the last heartbeat in seconds since 1970, by rank 0's clock.
        iterations: iterations since the start by the last heartbeat. Intervals grow with the age of
            the job, so `totals` alone would stand still for minutes.
    """

    interval: Interval | None
    totals: Interval | None
    last_seen_t: float
    iterations: int = 0


@dataclass(frozen=True)
class JobState:
    """State of a job.

    Attributes:
        ranks: state by rank, without ranks that have left.
        predicted_s: predicted seconds of an iteration; None without a prediction.
        bound_s: lower bound of the seconds of an iteration; None without one.
        divergence: mean squared distance of the replicas from their mean; None if unknown.
        notices: number of notices by cause.
    """

    ranks: Mapping[int, RankState] = field(default_factory=dict)
    predicted_s: float | None = None
    bound_s: float | None = None
    divergence: float | None = None
    notices: Mapping[str, int] = field(default_factory=dict)


class Series(NamedTuple):
    """Time series of Prometheus.

    Attributes:
        name: name.
        kind: type, counter or gauge.
        help: one sentence.
        labels: labels beside `job_name`.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ("rank", "host")


_BY_LINK = ("rank", "host", "link")
SERIES = (
    Series("offbeat_info", "gauge", "Strategy, version of offbeat and run; always 1.",
           ("strategy", "version", "run")),
    Series("offbeat_iterations_total", "counter", "Iterations ended."),
    Series("offbeat_updates_total", "counter", "Iterations that applied an update."),
    Series("offbeat_iteration_seconds", "gauge",
           "Mean seconds of an iteration in the last interval."),
    Series("offbeat_predicted_iteration_seconds", "gauge", "Predicted seconds of an iteration.",
           ()),
    Series("offbeat_bound_iteration_seconds", "gauge",
           "Lower bound of the seconds of an iteration.", ()),
    Series("offbeat_compute_seconds_total", "counter", "Seconds in forward, backward and updates."),
    Series("offbeat_exposed_seconds_total", "counter",
           "Seconds in which compute waited for messages."),
    Series("offbeat_script_seconds_total", "counter", "Seconds between iterations."),
    Series("offbeat_message_seconds_total", "counter", "Seconds of messages on the way, by link.",
           _BY_LINK),
    Series("offbeat_sent_bytes_total", "counter", "Payload sent in bytes, by link.", _BY_LINK),
    Series("offbeat_loss", "gauge", "Mean loss of the last interval."),
    Series("offbeat_nonfinite_total", "counter", "Losses that were NaN or infinite."),
    Series("offbeat_divergence", "gauge", "Mean squared distance of the replicas from their mean.",
           ()),
    Series("offbeat_last_seen_timestamp_seconds", "gauge",
           "Time of the last heartbeat in seconds since 1970."),
    Series("offbeat_notices_total", "counter", "Departures from the prediction, by cause.",
           ("cause",)),
    Series("offbeat_resident_bytes", "gauge", "Memory of the process in bytes."),
)  # fmt: skip


class Sink(ABC):
    """Destination of the metrics of a job.

    Args:
        setting: kind and target, as in OFFBEAT_METRICS.
        warn: called with the text of the first error.
    """

    def __init__(self, setting: str, warn: Callable[[str], object]):
        self.setting, self._warn = setting, warn
        self._has_warned = self._is_closed = False

    def update(self, state: JobState) -> None:
        """Pass on the newest state. The first error causes a warning. A closed sink ignores it."""
        if not self._is_closed:
            self._attempt(lambda: self._update(state))

    def close(self) -> None:
        """Close the sink."""
        self._is_closed = True
        self._attempt(self._close)

    def _attempt(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:  # a library's error must not end the thread of the caller
            if not self._has_warned:
                self._has_warned = True
                reason = error.strerror if isinstance(error, OSError) else None
                self._warn(
                    f"metrics ({self.setting!r}) cannot be written: {reason or error}; training "
                    "goes on. Make room there, or set another target"
                )

    @abstractmethod
    def _update(self, state: JobState) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...


def open_sinks(
    settings: Sequence[SinkSetting], labels: SinkLabels, warn: Callable[[str], object]
) -> list[Sink]:
    """Return the sinks of a job, opened by rank 0.

    Args:
        settings: kind and target of each sink; the packages are installed.
        labels: labels of all series.
        warn: called once for each sink that cannot be opened, and for each one that fails later.
    """
    kinds: dict[str, type[PrometheusTarget | EventFiles]] = {
        "prometheus": PrometheusTarget,
        "tensorboard": EventFiles,
    }
    sinks: list[Sink] = []
    for kind, target in settings:
        try:
            sinks.append(kinds[kind](target, labels, warn))
        except OSError as error:
            reason = error.strerror or error
            if error.errno == errno.EADDRINUSE:
                reason = f"port {target.rpartition(':')[2]} is taken"
            problem = f"metrics ('{kind}:{target}') cannot be opened: {reason}"
            warn(f"{problem}; training goes on without metrics")
    return sinks


class MetricFamilies:
    """Collector of prometheus_client: makes all samples from the newest state.

    Attributes:
        state: newest state.
    """

    def __init__(self, labels: SinkLabels):
        self._labels = labels
        self.state = JobState()
        self._iterations: dict[int, int] = {}  # highest by rank: a heartbeat may begin anew

    def collect(self) -> Iterable[Any]:
        """Return the families of samples, in the order of `SERIES`."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        state, labels = self.state, self._labels
        families = {
            series.name: kinds[series.kind](
                series.name, series.help, labels=("job_name", *series.labels)
            )
            for series in SERIES
        }

        def add(name: str, value: float | None, *values: str) -> None:
            if value is not None:
                families[f"offbeat_{name}"].add_metric((labels.job_name, *values), value)

        add("info", 1, labels.strategy, labels.version, labels.run)
        add("predicted_iteration_seconds", state.predicted_s)
        add("bound_iteration_seconds", state.bound_s)
        add("divergence", state.divergence)
        for cause, n in (dict.fromkeys(CAUSES, 0) | dict(state.notices)).items():
            add("notices_total", n, cause)
        for rank, of_rank in sorted(state.ranks.items()):
            place = (str(rank), labels.hosts[rank] if rank < len(labels.hosts) else "")
            add("last_seen_timestamp_seconds", of_rank.last_seen_t, *place)
            if (last := of_rank.interval) is not None:
                add("iteration_seconds", last.mean_s, *place)
                add("loss", last.loss.mean if last.loss and last.loss.n else None, *place)
                add("resident_bytes", last.rss_bytes, *place)
            n = max(of_rank.iterations, self._iterations.get(rank, 0))
            if (totals := of_rank.totals) is not None:
                n = max(n, totals.n)
                add("updates_total", totals.updates, *place)
                add("compute_seconds_total", totals.own_s, *place)
                add("exposed_seconds_total", totals.wait_s, *place)
                add("script_seconds_total", totals.script_s, *place)
                add("nonfinite_total", totals.loss.nonfinite if totals.loss else 0, *place)
                for link, sums in sorted(totals.links.items()):
                    add("message_seconds_total", sums.seconds, *place, link)
                    add("sent_bytes_total", sums.bytes, *place, link)
            self._iterations[rank] = n
            add("iterations_total", n, *place)
        return families.values()


class PrometheusTarget(Sink):
    """HTTP target that answers with the text of all series, made at each scrape."""

    def __init__(self, target: str, labels: SinkLabels, warn: Callable[[str], object]):
        from prometheus_client import CollectorRegistry, start_http_server

        super().__init__(f"prometheus:{target}", warn)
        self._families, registry = MetricFamilies(labels), CollectorRegistry()
        registry.register(self._families)
        host, _, port = target.rpartition(":")
        self._server, _ = start_http_server(int(port), host.strip("[]") or LOOPBACK, registry)

    def _update(self, state: JobState) -> None:
        self._families.state = state

    def _close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class EventFiles(Sink):
    """Event files of TensorBoard in a folder of the run.

    Scalars are written for each new interval of the lowest rank, at the number of its iterations.
    """

    def __init__(self, target: str, labels: SinkLabels, warn: Callable[[str], object]):
        from torch.utils.tensorboard import SummaryWriter

        super().__init__(f"tensorboard:{target}", warn)
        self._writer = SummaryWriter(str(Path(target) / labels.run))
        self._writer.add_text("info", f"{labels.strategy}, offbeat {labels.version}")
        self._iteration = -1

    def _update(self, state: JobState) -> None:
        newest = [
            of_rank.interval for _, of_rank in sorted(state.ranks.items()) if of_rank.interval
        ]
        if newest and newest[0].stop > self._iteration:
            self._iteration = newest[0].stop
            for name, value in scalars(newest, state).items():
                self._writer.add_scalar(name, value, self._iteration)
            self._writer.flush()

    def _close(self) -> None:
        self._writer.close()


def scalars(newest: Sequence[Interval], state: JobState) -> dict[str, float]:
    """Return the scalars of TensorBoard: means over ranks, sums per iteration.

    Args:
        newest: newest interval of each rank; at least one.
        state: state of the job.
    """

    def mean(value: Callable[[Interval], float]) -> float:
        return statistics.fmean(value(interval) / interval.n for interval in newest)

    values: dict[str, float | None] = {
        "time/iteration_s": mean(lambda interval: interval.s_sum),
        "time/predicted_s": state.predicted_s,
        "time/bound_s": state.bound_s,
        "time/own_s": mean(lambda interval: interval.own_s),
        "time/exposed_s": mean(lambda interval: interval.wait_s),
        "time/script_s": mean(lambda interval: interval.script_s),
        "loss": _mean([i.loss.mean for i in newest if i.loss and i.loss.n]),
        "divergence": state.divergence,
        "memory/rss": _mean([i.rss_bytes for i in newest if i.rss_bytes is not None]),
    }
    for link in sorted({link for interval in newest for link in interval.links}):
        sums = [(i.links[link], i.n) for i in newest if link in i.links]
        values[f"link/{link}/s"] = _mean([of_link.seconds / n for of_link, n in sums])
        values[f"link/{link}/bytes"] = _mean([of_link.bytes / n for of_link, n in sums])
    return {name: value for name, value in values.items() if value is not None}


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
