"""Metrics as Prometheus and TensorBoard read them; the dashboard and the alerts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness.commands import ForkedPython
from harness.ranks import free_port

from offbeat import cli
from offbeat.jobs.interval import Interval, LinkSums, LossSums, bin_of, combine
from offbeat.jobs.settings import parse_sinks
from offbeat.jobs.sinks import SERIES, JobState, RankState, Sink, SinkLabels, open_sinks

pytest.importorskip("prometheus_client", reason="the extra metrics is not installed")
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as families_of

MONITORING = Path(__file__).parents[3] / "examples" / "monitoring"
RUN = "1124-0612-3f9a"
LABELS = SinkLabels("gpt", RUN, "bsp(period=2)", "0.1.0", ("host-a", 'host "b"\\'))
NAMES = {series.name for series in SERIES}


def interval(rank: int, first: int, n: int = 4, **changed: Any) -> Interval:
    """Return an interval of iterations of .5 s: .3 of compute, .15 of waiting, .05 of script."""
    values: dict[str, Any] = {
        "t": 1e9 + first,
        "s_sum": 0.5 * n,
        "s_min": 0.5,
        "s_max": 0.7,
        "hist": {bin_of(0.5): n},
        "own_s": 0.3 * n,
        "wait_s": 0.15 * n,
        "script_s": 0.05 * n,
        "links": {"net": LinkSums(2 * n, 1000 * n, 0.1 * n)},
        "loss": LossSums(n, 3.0 + rank, 2.5, 1),
        "updates": n // 2,
        "rss_bytes": 1 << 30,
    }
    return Interval(rank=rank, first=first, n=n, **values | changed)


def state_of(*intervals: list[Interval], **changed: Any) -> JobState:
    """Return the state of a job in which each rank has ended some intervals."""
    ranks = {
        done[0].rank: RankState(done[-1], combine(done), 1e9 + done[-1].stop) for done in intervals
    }
    values = {"predicted_s": 0.4, "bound_s": 0.35, "divergence": 0.01, "notices": {"slow_rank": 2}}
    return JobState(ranks, **values | changed)


TWO = state_of([interval(0, 0), interval(0, 4)], [interval(1, 0)])


@contextmanager
def opened(text: str, labels: SinkLabels = LABELS) -> Iterator[tuple[list[Sink], list[str]]]:
    """Sinks of a text, and the warnings that they cause."""
    warnings: list[str] = []
    found = open_sinks(parse_sinks("", text), labels, warnings.append)
    try:
        yield found, warnings
    finally:
        for sink in found:
            sink.close()


def scrape(port: int, accept: str = "text/plain") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.read().decode()


def samples_of(text: str) -> dict[tuple[str, ...], float]:
    """Return the samples by name and by values of all labels except `job_name`, in label order."""
    samples = {}
    for family in families_of(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("job_name") == "gpt"
            samples[(sample.name, *(labels[name] for name in sorted(labels)))] = sample.value
    return samples


# ---- Prometheus -----------------------------------------------------------------------------


def test_a_scrape_has_every_series_with_its_type_and_help() -> None:
    port = free_port()
    with opened(f"prometheus:{port}") as ((sink,), warnings):
        assert samples_of(scrape(port))[("offbeat_info", RUN, "bsp(period=2)", "0.1.0")] == 1
        sink.update(TWO)
        text = scrape(port)
        modern = scrape(port, "application/openmetrics-text; version=1.0.0")
    assert not warnings
    by_name = {family.name: family for family in families_of(text)}
    assert len(by_name) == len(SERIES) == 17
    for series in SERIES:
        family = by_name[series.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (series.kind, series.help)
        assert family.samples, series.name
        for sample in family.samples:
            assert sample.name == series.name
            assert set(sample.labels) == {"job_name", *series.labels}
    assert {sample.name for family in openmetrics(modern) for sample in family.samples} == NAMES
    for line in text.splitlines():
        assert line.startswith("# ") or line.split("{")[0] in NAMES


def test_values() -> None:
    """Counters are sums since the start, gauges are of the last interval."""
    port = free_port()
    with opened(f"prometheus:{port}") as ((sink,), _):
        sink.update(TWO)
        samples = samples_of(scrape(port))
    first, second = ("host-a", "0"), ('host "b"\\', "1")
    expected = {
        ("iterations_total", *first): 8,
        ("iterations_total", *second): 4,
        ("updates_total", *first): 4,
        ("iteration_seconds", *first): 0.5,
        ("predicted_iteration_seconds",): 0.4,
        ("bound_iteration_seconds",): 0.35,
        ("compute_seconds_total", *first): 2.4,
        ("exposed_seconds_total", *first): 1.2,
        ("script_seconds_total", *first): 0.4,
        ("message_seconds_total", "host-a", "net", "0"): 0.8,
        ("sent_bytes_total", "host-a", "net", "0"): 8000,
        ("loss", *second): 4.0,
        ("nonfinite_total", *first): 2,
        ("divergence",): 0.01,
        ("last_seen_timestamp_seconds", *first): 1e9 + 8,
        ("notices_total", "slow_rank"): 2,
        ("notices_total", "slow_link"): 0,
        ("resident_bytes", *second): 1 << 30,
    }
    for (name, *labels), value in expected.items():
        assert samples[(f"offbeat_{name}", *labels)] == pytest.approx(value), name


def test_unknown_values_have_no_sample() -> None:
    """Before the first interval; without prediction; with losses that are all NaN; unknown host."""
    nan = interval(1, 0, loss=LossSums(0, 0.0, 0.0, 4), rss_bytes=None, links={})
    ranks = {1: RankState(nan, nan, 5.0), 2: RankState(None, None, 6.0, iterations=3)}
    port = free_port()
    with opened(f"prometheus:{port}") as ((sink,), _):
        sink.update(JobState(ranks))
        samples = samples_of(scrape(port))
    absent = "predicted_iteration_seconds bound_iteration_seconds divergence loss resident_bytes"
    absent += " message_seconds_total sent_bytes_total"
    assert {name for name, *_ in samples} == NAMES - {f"offbeat_{n}" for n in absent.split()}
    assert samples[("offbeat_iterations_total", "", "2")] == 3


def test_counters_never_fall() -> None:
    """Over several intervals, and with heartbeats that are ahead of the intervals."""
    counters = {series.name for series in SERIES if series.kind == "counter"}
    ended: list[list[Interval]] = [[], []]
    before: dict[tuple[str, ...], float] = {}
    grown = set()
    port = free_port()
    with opened(f"prometheus:{port}") as ((sink,), _):
        for update in range(6):
            if update % 2 == 0:
                for rank in range(2):
                    ended[rank].append(interval(rank, 4 * len(ended[rank])))
            state = state_of(*ended, notices={"slow_link": update})
            ranks = {
                rank: RankState(of.interval, of.totals, of.last_seen_t, 4 * (update // 2) + 5)
                for rank, of in state.ranks.items()
            }
            sink.update(JobState(ranks, notices=state.notices))
            now = samples_of(scrape(port))
            assert now[("offbeat_iterations_total", "host-a", "0")] == 4 * len(ended[0]) + 1
            for key, value in before.items():
                if key[0] in counters:
                    assert now[key] >= value, key
                    grown |= {key[0]} if now[key] > value else set()
            before = now
        assert grown == counters
        sink.update(JobState({0: RankState(None, None, 1.0, iterations=0)}))  # a heartbeat anew
        key = ("offbeat_iterations_total", "host-a", "0")
        assert samples_of(scrape(port))[key] == before[key] == 13


def listening_addresses(port: int) -> set[str]:
    """Addresses in hexadecimal, in the order of the host's bytes, that listen on a port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows
            if row[3] == "0A" and int(row[1].partition(":")[2], 16) == port}  # fmt: skip


def test_other_hosts_need_a_host_in_the_setting() -> None:
    """Without a host the target listens on the loopback alone."""
    port = free_port()
    for text, address in ((f"{port}", "0100007F"), (f"0.0.0.0:{port}", "00000000")):
        with opened(f"prometheus:{text}"):
            assert listening_addresses(port) == {address}


def test_a_sink_that_cannot_be_opened_causes_one_warning() -> None:
    """A port that is taken, an address of no host."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        for text in (f"prometheus:{port}", "prometheus:192.0.2.1:9400"):
            with opened(text) as (found, warnings):
                assert found == []
            (warning,) = warnings
            assert text in warning


class FullDisk(Sink):
    """A sink that cannot write."""

    def _update(self, state: JobState) -> None:
        raise OSError(28, "No space left on device")

    def _close(self) -> None:
        raise OSError(28, "No space left on device")


def test_a_sink_that_cannot_write_causes_one_warning() -> None:
    warnings: list[str] = []
    sink = FullDisk("tensorboard:tb", warnings.append)
    for _ in range(3):
        sink.update(TWO)
    sink.close()
    (warning,) = warnings
    assert "tensorboard:tb" in warning


# ---- TensorBoard ----------------------------------------------------------------------------


def test_tensorboard_reads_the_scalars(tmp_path: Path) -> None:
    """One point for each interval of rank 0, with means over ranks per iteration."""
    pytest.importorskip("tensorboard", reason="the extra metrics is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    slow = interval(1, 0, own_s=2.4, s_sum=3.2)
    with opened(f"tensorboard:{tmp_path}") as ((sink,), warnings):
        for state in (
            JobState({0: RankState(None, None, 1.0)}),
            TWO,
            TWO,
            state_of([interval(0, 8)], [slow], predicted_s=None),
        ):
            sink.update(state)
    assert not warnings
    events = EventAccumulator(str(tmp_path / RUN))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {
        *("time/iteration_s", "time/predicted_s", "time/bound_s", "time/own_s", "time/exposed_s"),
        *("time/script_s", "link/net/s", "link/net/bytes", "loss", "divergence", "memory/rss"),
    }

    def points(name: str) -> list[tuple[int, float]]:
        return [(point.step, pytest.approx(point.value)) for point in events.Scalars(name)]

    assert points("time/iteration_s") == [(8, 0.5), (12, 0.65)]
    assert points("time/own_s") == [(8, 0.3), (12, 0.45)]
    assert points("time/predicted_s") == [(8, 0.4)]
    assert points("link/net/bytes") == [(8, 1000), (12, 1000)]
    assert points("link/net/s") == [(8, 0.1), (12, 0.1)]
    assert points("loss") == [(8, 3.5), (12, 3.5)]
    assert points("memory/rss") == [(8, 1 << 30), (12, 1 << 30)]


# ---- a job ----------------------------------------------------------------------------------

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import offbeat

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = offbeat.prepare(model, optimizer, "wfbp", observe=4)
stop = torch.zeros(())
while not stop:
    optimizer.zero_grad()
    loss = model(torch.ones(2, 64)).square().mean()
    time.sleep(0.05 * (1 + int(os.environ["RANK"])))
    loss.backward()
    optimizer.step()
    stop.fill_(Path(sys.argv[1]).exists())
    dist.all_reduce(stop)
model.close()
"""


def test_a_job_of_torchrun_is_scraped_and_watched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the first heartbeats to the intervals of both ranks, while counters never fall. Rank 1
    computes 50 ms longer. `offbeat watch` states it, and that the job has ended."""
    script, stop, port = tmp_path / "t.py", tmp_path / "stop", free_port()
    script.write_text(SCRIPT)
    runs = tmp_path / "runs"
    counters = {series.name for series in SERIES if series.kind == "counter"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    process = ForkedPython(
        [*torchrun, "--nproc-per-node", "2", str(script), str(stop)],
        env={k: v for k, v in os.environ.items() if not k.startswith("OFFBEAT_")}
        | {"OFFBEAT_METRICS": f"prometheus:{port}", "OFFBEAT_JOB_NAME": "gpt"}
        | {"OFFBEAT_RECORD": str(runs), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stderr=subprocess.PIPE,
        start_new_session=True,
        workers=True,
    )
    try:
        before: dict[tuple[str, ...], float] = {}
        until, shown = time.monotonic() + 80, dict[str, Any]()
        while [rank["delays_others"] for rank in shown.get("ranks", ())] != [False, True] or sum(
            name == "offbeat_loss" for name, *_ in before
        ) < 2:
            time.sleep(0.5)
            assert process.poll() is None
            assert time.monotonic() < until
            with contextlib.suppress(urllib.error.URLError):
                now = samples_of(scrape(port))
                assert all(now[key] >= x for key, x in before.items() if key[0] in counters)
                before = now
            if any(runs.glob("*/run.json")):
                cli.main(["watch", str(runs), "--json"])
                shown = json.loads(capsys.readouterr().out)
        stop.touch()
        _, errors = process.communicate(timeout=20)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors
    assert {name for name, *_ in before} | {"offbeat_divergence"} == NAMES
    for rank in "01":
        place = (socket.gethostname(), rank)
        assert before[("offbeat_iteration_seconds", *place)] > 0.05
        assert abs(before[("offbeat_last_seen_timestamp_seconds", *place)] - time.time()) < 30
        sent = before[("offbeat_sent_bytes_total", place[0], "net", rank)]
        assert sent >= 4 * 65 * 64 * before[("offbeat_updates_total", *place)] > 0
    facts = [shown[name] for name in ("strategy", "world_size", "hosts", "state")]
    assert facts == ["wfbp", 2, 1, "running"]
    assert shown["predicted_s"] > 0
    assert shown["iteration_s"] > 0.05
    assert cli.main(["watch", str(runs), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "ended"


# ---- dashboard and alerts -------------------------------------------------------------------


def expressions(node: Any) -> Iterator[str]:
    """Yield all expressions of Prometheus in a dashboard or in rules."""
    if isinstance(node, dict):
        if isinstance(node.get("expr"), str):
            yield node["expr"]
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            yield from expressions(child)


def test_the_dashboard_and_the_alerts_name_series_that_exist() -> None:
    """The dashboard shows every quantity, in panels that do not overlap."""
    yaml = pytest.importorskip("yaml")
    board = json.loads((MONITORING / "offbeat-dashboard.json").read_text())
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    for node in (board, rules):
        found = [*expressions(node)]
        assert len(found) >= 3
        for expression in found:
            assert {*re.findall(r"offbeat_\w+", expression)} <= NAMES
            for label in re.findall(r"by \(([^)]*)\)", expression):
                assert set(label.split(", ")) <= {"job_name", "rank", "host", "link"}
    shown = set(re.findall(r"offbeat_\w+", " ".join(expressions(board["panels"]))))
    assert shown == NAMES - {
        *("offbeat_iterations_total", "offbeat_updates_total", "offbeat_divergence")
    }
    places = [panel["gridPos"] for panel in board["panels"]]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    (group,) = rules["groups"]
    assert {rule["alert"]: rule["for"] for rule in group["rules"]} == {
        "OffbeatSlow": "10m",
        "OffbeatSilent": "1m",
        "OffbeatStuck": "5m",
    }
