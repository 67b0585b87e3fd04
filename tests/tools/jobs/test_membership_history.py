"""Members over time: in records, on the screen of a running job, and in its report."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases.made_jobs import make_job
from cases.member_jobs import SECRET, Scenario, membership_service, train_recorded_member
from harness.ranks import watch_ranks

from offbeat import WFBP, LocalSGD, cli
from offbeat.core.files import replace_text
from offbeat.core.plan import Fact
from offbeat.core.sim.prediction import MEMBERS_FACT, predict_plan
from offbeat.experiments.report.job import read_report
from offbeat.jobs.job_view import JobFollower, view
from offbeat.jobs.membership_history import MembershipHistory, Presence
from offbeat.jobs.record_lines import ALIVE_FILE, LineWriter, load
from offbeat.jobs.watch import screen
from offbeat.profile import Bucket, Link, Profile


def change(epoch: int, t: float, members: list[int], s: float, **groups: Any) -> dict[str, Any]:
    """Fields of the event of a change."""
    text = f"{len(members)} members: host-x failed; {s:.2f} s"
    iteration = {"iteration": 12 * epoch, "landed": 1, "skipped": 2}
    return {
        "event": "members", "epoch": epoch, "t": t, "members": members, "s": s, "text": text,
        "joined": [], "left": [], "failed": [], **iteration, **groups,
    }  # fmt: skip


CHANGES = (
    change(1, 110.0, [0, 2], 0.3, failed=[1]),
    change(2, 130.0, [0, 2, 3], 0.5, joined=[3]),
    change(3, 140.0, [2, 3], 0.1, left=[0]),
)


def test_the_times_of_all_processes_follow_from_the_changes() -> None:
    own = {**CHANGES[0], "s": 0.2}  # of another member, which has waited less
    history = MembershipHistory.of(3, 100.0, [own, *CHANGES, {"event": "notice"}])
    assert history.counts == [(100.0, 3), (110.0, 2), (130.0, 3), (140.0, 2)]
    assert history.presences == [
        Presence(0, 100.0, 140.0, "left"),
        Presence(1, 100.0, 110.0, "failed"),
        Presence(2, 100.0),
        Presence(3, 130.0, joined=True),
    ]
    assert history.ended_members == {0: "left", 1: "failed"}
    assert history.seconds == [0.3, 0.5, 0.1]
    for number in ("2", "3", "1", "900", "500"):
        assert number in history.describe()


def write_changes(job: Path, writer: int) -> None:
    """Add changes of the members, which a rank has seen, to a made-up job."""
    lines, now = LineWriter(job, writer), time.time()
    for event in CHANGES:
        lines.line("event", **event | {"t": now - 200 + event["t"]})


def test_screen_and_report_show_the_members(tmp_path: Path, capsys: Any) -> None:
    job = make_job(tmp_path / "a", 3, intervals=60)
    write_changes(job, 0)
    shown = view(JobFollower(job))
    assert [count for _, count in shown.members] == [3, 2, 3, 2]
    assert shown.world_size == 2
    text = "\n".join(line.plain for line in screen(shown, 80))
    [bars] = [line for line in text.splitlines() if line.startswith("members ")]
    assert set(bars.split()[1]) == {"█", "▆"}
    assert bars.split()[1][0] == "█"
    assert cli.main(["report", "--json", str(job)]) == 0
    members = json.loads(capsys.readouterr().out)["members"]
    assert [change["epoch"] for change in members["changes"]] == [1, 2, 3]
    assert cli.main(["report", str(job)]) == 0
    page = (job / "report.html").read_text()
    assert all(text in page for text in ("Changes of the members", "without progress"))


def test_another_member_writes_when_rank_0_has_left(tmp_path: Path) -> None:
    """Its earlier lines repeat what rank 0 has written."""
    job = make_job(tmp_path / "a", 3, intervals=4)
    LineWriter(job, 0).line("event", **CHANGES[0] | {"t": time.time()})
    follower = JobFollower(job)
    assert follower.event_count == 1
    before = len(follower.series)
    LineWriter(job, 0).line("end", how="left", iteration=48, text="left the job")
    time.sleep(0.002)
    LineWriter(job, 2).line("event", event="decision", iteration=50, text="another plan")
    LineWriter(job, 2).line("event", **CHANGES[1] | {"t": time.time()})
    alive = json.loads((job / ALIVE_FILE).read_text())
    replace_text(job / ALIVE_FILE, json.dumps({**alive, "writer": 2}))
    follower.read()
    follower.read()
    assert follower.end is None
    assert len(follower.series) == before
    assert [event["event"] for event in follower.events] == ["members", "decision", "members"]
    LineWriter(job, 2).line("end", how="ended", iteration=60, text="")
    follower.read()
    assert view(follower).state == "ended"


def test_a_comparison_of_the_members_is_part_of_the_prediction() -> None:
    bucket = Bucket("a", 0.01, 0.02, 1_000_000)
    link = Link("net", 0.001, 1e8, vote_s=0.004)
    profile = Profile((bucket, bucket), (link,), 3)
    plan = WFBP().plan(profile)
    with_fact = replace(plan, facts=(*plan.facts, Fact(MEMBERS_FACT, 8, "")))
    added = predict_plan(with_fact, profile).iteration_s - predict_plan(plan, profile).iteration_s
    assert added == pytest.approx(0.004 / 8)


def test_records_of_members_that_fail_join_and_leave(tmp_path: Path) -> None:
    """Rank 0 is killed, so that the next member writes alive.json; a process joins and has a
    record of its own."""
    scenario = Scenario(LocalSGD(period=3), 30, kills={0: 5}, joins={3: 14}, join_after=1,
                        leaves={2: 22})  # fmt: skip
    with membership_service() as address:
        ended = watch_ranks(
            4, train_recorded_member, str(tmp_path), address, scenario, timeout_s=110, doomed=[0]
        )
    for one in ended:
        assert one.rank == 0 or not one.kind, one.error + one.traceback
    [run] = (tmp_path / "runs").iterdir()
    record = load([run])
    assert sorted(record.ranks) == [0, 1, 2, 3]
    assert record.world_size == 4
    assert record.ranks[3].head["rank"] == 3
    assert {i.rank for i in record.ranks[3].intervals} == {3}
    plan = record.json("plan.json")
    assert plan is not None
    assert {name: value for name, value, _ in plan["facts"]}[MEMBERS_FACT] == 3
    report = read_report([run])
    assert report.members is not None
    [joined] = [change for change in report.members.changes if change["joined"]]
    assert record.ranks[3].intervals[0].first == joined["iteration"]
    assert report.members.ended_members == {0: "failed", 2: "left"}
    assert report.members.members == [1, 3]
    assert [count for _, count in report.members.counts] == [3, 2, 3, 2]
    assert all(s > 0 for s in report.members.seconds)
    assert report.state == "ended"
    assert not report.problems
    ends = {rank: (lines.end or {}).get("how") for rank, lines in record.ranks.items()}
    assert ends == {0: None, 1: "ended", 2: "left", 3: "ended"}
    shown = view(JobFollower(run))
    assert shown.state == "ended"
    assert [count for _, count in shown.members] == [3, 2, 3, 2]
    assert json.loads((run / ALIVE_FILE).read_text())["writer"] == 1
    assert cli.main(["report", str(run)]) == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"report.html", "log3", "debug3"} <= {path.name for path in files}
    assert "members" in (tmp_path / "log1").read_text()
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path
