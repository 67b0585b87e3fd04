"""Comparing: order, run directory, failures, Ctrl-C; with a script that needs no torch."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.forking import launch_forks

from offbeat.cli import commands
from offbeat.cli import entry as cli
from offbeat.core import files
from offbeat.core.measuring.processors import processors
from offbeat.core.sim.trace import Trace
from offbeat.experiments import compare, launcher, report
from offbeat.experiments.comparison import Comparison, Contestant, Setup
from offbeat.experiments.launcher import Launcher, Outcome
from offbeat.experiments.new_run import default_run_dir
from offbeat.experiments.progress import Progress
from offbeat.experiments.record.run_directory import BEFORE, Repetition
from offbeat.lab import Cluster
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import predict
from offbeat.strategies import DDP, SSP, WFBP, DreamDDP, SelSync

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("here")]
# Where starts and ends of processes are not the subject.
forked = pytest.mark.usefixtures("forked_ranks")

# A stand-in for training: it does what the runtime does with its job, in made-up time.
SCRIPT = """
import json, os, sys, time
from pathlib import Path
from offbeat.profile import Bucket, Link, Profile
from offbeat.core.runtime.named_strategy import NamedStrategy
from offbeat.strategies import create
from offbeat.core.strategy.parsing import parse
from offbeat.core.sim.trace import Trace

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
job = json.loads(Path(os.environ["OFFBEAT_JOB"]).read_text())
assert job.pop("schema") == 1
words = sys.argv[1:]
asking = job.get("stop_after_strategy", False)
named = next((parse(word[6:]) for word in words if word.startswith("names=")), None)
default = named or create("wfbp", {})
strategy = default if asking else create(job["strategy"], job["settings"])
what = "profile" if job["stop_after_profile"] else Path(job["record_dir"] or "asking/_").parent.name
if rank == 0:
    with open("order.txt", "a") as order:
        print(what, os.environ["OFFBEAT_SEED"], job["timeout_s"], file=order)
print(f"{what} on rank {rank}", flush=True)
if f"fail={what}" in words and rank == 1:
    sys.exit("the loss is not a number")
if f"sleep={what}" in words:
    Path(f"sleeping.{rank}").write_text(str(os.getpid()))
    time.sleep(600)
if "dwell" in words:
    time.sleep(0.5)
if f"idle={what}" in words:
    sys.exit(0)
if rank == 0:
    text = named and str(named)
    NamedStrategy(text, default.name, default.settings()).save(job["save_strategy"])
if asking:
    sys.exit(0)
if job["stop_after_profile"]:
    assert job["profile"] is None and job["record_dir"] is None
    if rank == 0:
        buckets = tuple(Bucket(f"h.{i}", 0.001, 0.002, 10**6) for i in range(4))
        Profile(buckets, (Link("net", 1e-4, 1.25e7),), size).save(job["save_profile"])
    sys.exit(0)
profile = Profile.load(job["profile"])
if int(os.environ.get("OFFBEAT_RANK", 0)) >= size:
    sys.exit(0)  # a server has served
plan = strategy.plan(profile) if strategy.needs.profile else None
step_s = strategy.bound_s(profile)
trace = Trace(
    source="measured",
    strategy=str(strategy),
    starts_s=(0.0,),
    ends_s=(tuple(step_s * (i + 1) for i in range(12)),),
    period=plan.period if plan else 1,
)
record = {
    "schema": 1, "rank": rank, "strategy": str(strategy), "observed": 0,
    "emulated": "emulated" in words, "bytes": {"net": 1000},
    "losses": [[i, step_s * (i + 1), 2.0 / (i + 1)] for i in range(12)],
    "trace": trace.to_dict(), "warnings": [],
}
directory = Path(job["record_dir"])
(directory / f"rank{rank}.json").write_text(json.dumps(record))
if rank == 0 and plan:
    (directory / "plan.json").write_text(json.dumps(plan.to_dict()))
if f"killed={what}" in words:
    from offbeat.experiments.record.record_file import RecordWriter, path_of
    (directory / f"rank{rank}.json").unlink()
    block = {"first": 0, "rank": rank, "strategy": str(strategy), "observed": 0, "period": 1,
        "uneven": False, "ends_s": trace.ends_s[0], "losses": [[11, 0.5]]}
    RecordWriter(path_of(directory, rank)).append(block)
    end_s = time.monotonic() + 20  # the launcher kills the other rank soon after the first one
    while not all(path_of(directory, r).exists() for r in range(size)) and time.monotonic() < end_s:
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
if f"late={what}" in words:
    sys.exit("failed after recording")
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own working directory with the script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def setup(*words: str, hosts: int = 2) -> Setup:
    """The stand-in on the loopback."""
    return Setup(("train.py", *words), Cluster.simple(hosts), shaped=False, seed=7)


CONTESTANTS = (
    Contestant("ddp", DDP()),
    Contestant("dreamddp-period=2", DreamDDP(period=2)),
)


def comparison(
    *words: str,
    repetitions: int = 2,
    profile: Path | None = None,
    contestants: tuple[Contestant, ...] = CONTESTANTS,
    hosts: int = 2,
):
    """Two contestants that take turns. One host is enough if no rank differs from another."""
    return Comparison(setup(*words, hosts=hosts), contestants, repetitions, None, profile)


@dataclass(frozen=True)
class Turns:
    """A comparison that has ended: where, what came out, and what was printed."""

    here: Path
    outcome: Outcome
    out: str
    err: str


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Turns:
    """Two contestants, two repetitions; nobody changes what they leave."""
    here = tmp_path_factory.mktemp("turns")
    (here / "train.py").write_text(SCRIPT)
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.chdir(here),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        patch.setattr("offbeat.experiments.launcher.launch", launch_forks)
        outcome = compare.compare(comparison("emulated"), here / "out")
    return Turns(here, outcome, out.getvalue(), err.getvalue())


def launched(here: Path = Path()) -> list[str]:
    """What was launched, in order."""
    return [line.split()[0] for line in (here / "order.txt").read_text().splitlines()]


def read(path: Path):
    return json.loads(path.read_text())


def test_contestants_take_turns_after_one_profile(turns):
    outcome = turns.outcome
    assert launched(turns.here) == ["profile", *["ddp", "dreamddp-period=2"] * 2]
    assert (outcome.measured, outcome.failures, outcome.interrupted) == (4, [], False)
    assert "UNSHAPED" in turns.out
    assert "dreamddp-period=2, repetition 2 of 2: " in turns.out
    assert turns.err == ""
    order = (turns.here / "order.txt").read_text().splitlines()
    # The profile has the first seed; all contestants of a repetition share one.
    assert [line.split()[1] for line in order] == ["7", "7", "7", "8", "8"]


def test_run_directory(turns):
    out = turns.here / "out"
    run = read(out / "run.json")
    assert run["schema"] == 1
    assert run["script"] == ["train.py", "emulated"]
    assert run["lab"] == "none"
    assert "UNSHAPED" in run["note"]
    assert run["emulated"] is True
    assert set(run["versions"]) == {"offbeat", "torch", "python", "kernel"}
    assert (run["seed"], run["repetitions"], run["skip"]) == (7, 2, 2)
    assert run["seeds"] == [7, 8]
    assert read(out / "summary.json")["seeds"] == [7, 8]
    assert run["probed"] == run["changed"] == []  # nothing is asked of the loopback
    assert Cluster(**run["cluster"]) == Cluster.simple(2)
    assert run["contestants"][1] == {
        "label": "dreamddp-period=2",
        "strategy": "dreamddp",
        "settings": DreamDDP(period=2).settings(),
        "arguments": [],
    }
    assert turns.outcome.report == out / "report.html"
    for name in ("report.html", "summary.json", "profile.json", "profiling/rank0.log"):
        assert (out / name).is_file()
    for name in ("rank0.json", "rank1.json", "rank0.log", "job.json"):
        assert (out / "ddp" / "rep1" / name).is_file()
    assert not (out / "ddp" / "rep2").exists()


def test_the_report_reads_the_directory(turns):
    run = report.load(turns.here / "out")
    assert run.failures() == []
    rows = report.summarize(run)
    assert [row.repetitions for row in rows] == [2, 2]
    for row, strategy in zip(rows, (DDP(), DreamDDP(period=2)), strict=True):
        bound_s = strategy.bound_s(Profile.load(turns.here / "out" / "profile.json"))
        assert row.iteration_s == pytest.approx(bound_s)
        assert row.bound_s == pytest.approx(bound_s)
        assert row.predicted_s >= bound_s


def test_predicted_is_one_period_with_its_numbers(here):
    profile = Profile.load(_profile(here))
    seconds = compare.predict(DreamDDP(period=2), profile, here / "d")
    trace = Trace.load(here / "d" / "predicted.json")
    assert (trace.source, trace.strategy, trace.period) == ("simulated", "dreamddp", 2)
    assert trace.iterations == 2
    assert trace.iteration_s() == pytest.approx(seconds)
    assert {span.iteration for span in trace.spans} == {trace.first, trace.first + 1}
    assert trace.notes["iteration_s"] == seconds
    assert trace.notes["bound_s"] == DreamDDP(period=2).bound_s(profile)
    assert trace.notes["exposed_s"] >= 0


@forked
def test_the_plan_that_ran_stands(here):
    """A runtime that planned otherwise than expected is what the report shows."""
    other = DreamDDP(period=3).plan(Profile.load(_profile(here)))
    text = SCRIPT.replace(
        "strategy.plan(profile)", "create('dreamddp', {'period': 3}).plan(profile)"
    )
    (here / "train.py").write_text(text)
    alone = comparison(repetitions=1, profile=here / "given.json", contestants=CONTESTANTS[1:])
    compare.compare(alone, here / "out")
    written = read(here / "out" / "dreamddp-period=2" / "plan.json")
    assert written["period"] == other.period == 3
    assert Trace.load(here / "out" / "dreamddp-period=2" / "predicted.json").period == 3


@pytest.mark.parametrize(("how", "times"), [("fail", 2), ("late", 1)])
def test_a_failing_contestant_does_not_stop_the_others(how, times, here, capsys):
    asked = comparison(f"{how}=ddp", repetitions=times, profile=_profile(here))
    outcome = compare.compare(asked, here / "out")
    assert launched() == ["ddp", "dreamddp-period=2"] * times
    assert outcome.measured == times
    assert [words.partition(":")[0] for words in outcome.failures] == [
        f"ddp, repetition {number} of {times}" for number in range(1, times + 1)
    ]
    assert "exited with code 1" in outcome.failures[0]
    assert "    the loss is" in outcome.failures[0] or how == "late"
    assert capsys.readouterr().err.count("offbeat: ddp, repetition") == times
    ddp, dreamddp = report.summarize(report.load(here / "out"))
    # What was recorded before it failed counts, as there is nothing better, and is marked.
    kept = how == "late"
    assert (ddp.repetitions, ddp.failed, ddp.cut) == (
        (times, 0, True) if kept else (0, times, False)
    )
    assert (dreamddp.repetitions, dreamddp.failed, dreamddp.cut) == (times, 0, False)
    assert outcome.report is not None


def test_what_was_recorded_before_a_kill_is_reported(here, capsys):
    """One contestant is killed in all of its repetitions, the other in none."""
    argv = [
        "compare",
        "--keep-disturbed",
        "--lab",
        "none",
        "--hosts",
        "2",
        "--strategies",
        "ddp,wfbp",
        "--out",
        "out",
    ]
    assert cli.main([*argv, "--repeat", "1", "train.py", "killed=ddp"]) == 1
    printed = capsys.readouterr()
    assert "ddp stopped before its end" in " ".join(printed.out.split())
    ddp, wfbp = report.summarize(report.load(here / "out"))
    assert (ddp.cut, ddp.repetitions, ddp.failed) == (True, 1, 0)
    assert (wfbp.cut, wfbp.repetitions, wfbp.failed) == (False, 1, 0)
    bound_s = DDP().bound_s(Profile.load(here / "out" / "profile.json"))
    assert ddp.iteration_s == pytest.approx(bound_s)
    said = " ".join(report.load(here / "out").failures())
    assert re.search("the record of ranks? (0, )?1 ends after 12 iterations", said)
    assert "SIGKILL" in said or "killed" in said
    page = (here / "out" / "report.html").read_text()
    assert f"stopped after {ddp.iterations} iterations: " in page
    assert 11 <= ddp.iterations <= 12


@forked
def test_a_strategy_without_a_plan_fails_in_words(here):
    """Like any other failure: the others go on."""

    class Broken(WFBP):
        def plan(self, profile):
            raise ValueError(f"{len(profile.buckets)} buckets are too many")

    chosen = (Contestant("broken", Broken()), Contestant("wfbp", WFBP()))
    asked = comparison(repetitions=1, profile=_profile(here), contestants=chosen)
    outcome = compare.compare(asked, here / "out")
    assert outcome.failures == ["broken: 4 buckets are too many"]
    assert launched() == ["wfbp"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [("fail=profile", "exited with code 1"), ("idle=profile", "it must call offbeat.prepare")],
)
def test_without_a_profile_nothing_runs(words, expected, here):
    outcome = compare.compare(comparison(words), here / "out")
    assert len(outcome.failures) == 1
    assert expected in outcome.failures[0]
    assert launched() == ["profile"]
    assert outcome.report is None


@forked
def test_a_script_that_leaves_no_record_has_failed(here):
    alone = CONTESTANTS[:1]
    asked = comparison("idle=ddp", repetitions=1, profile=_profile(here), contestants=alone)
    outcome = compare.compare(asked, here / "out")
    assert len(outcome.failures) == 1
    assert "left no record" in outcome.failures[0]
    assert "offbeat.prepare" in outcome.failures[0]


@forked
def test_a_given_profile_is_not_measured_again(here):
    given = _profile(here, hosts=1)
    outcome = compare.compare(comparison(repetitions=1, profile=given, hosts=1), here / "out")
    assert outcome.measured == 2
    assert launched() == ["ddp", "dreamddp-period=2"]
    assert Profile.load(here / "out" / "profile.json") == Profile.load(given)


def test_a_contestant_without_a_plan(here):
    contestants = (Contestant("ssp", SSP(s=1)),)
    served = replace(setup(hosts=3), servers=1)
    outcome = compare.compare(Comparison(served, contestants, 1), here / "out")
    assert (outcome.failures, outcome.measured) == ([], 1)
    loaded = report.load(here / "out")
    (row,) = report.summarize(loaded)
    # 12 iterations have run, which begin in step.
    short = predict(SSP(s=1), loaded.profile, iterations=12, skip=2)
    assert row.predicted_s == short.iteration_s != predict(SSP(s=1), loaded.profile).iteration_s
    (shown,) = loaded.contestants
    assert min(span.iteration for span in shown.predicted.spans) == 2


@forked
def test_hosts_keep_the_profiles_pace(here):
    profile = Profile.load(_profile(here, hosts=1))
    paced = here / "paced.json"
    profile.with_pace(3.0).save(paced)
    asked = comparison(repetitions=1, profile=paced, contestants=CONTESTANTS[:1], hosts=1)
    outcome = compare.compare(asked, here / "out")
    assert outcome.measured == 1
    assert read(here / "out" / "ddp" / "rep0" / "job.json")["pace"] == 3.0
    again = replace(asked, setup=replace(asked.setup, pace=4.0))
    compare.compare(again, here / "again")
    assert read(here / "again" / "ddp" / "rep0" / "job.json")["pace"] == 4.0
    assert Profile.load(here / "again" / "profile.json") == profile.with_pace(4.0)


@pytest.mark.parametrize(("pace", "made"), [("none", 2.0), ("auto", 0.0)])
def test_a_profile_of_other_hosts_is_refused(here, pace, made):
    profile = Profile.load(_profile(here))
    (profile.with_pace(made) if made else profile).save(here / "given.json")
    asked = comparison(profile=here / "given.json")
    with pytest.raises(ValueError, match=rf"pace \({pace}\) must be that of"):
        compare.compare(replace(asked, setup=replace(asked.setup, pace=pace)), here / "out")


def test_pace_by_default():
    def default(hosts: int, shaped: bool = True, pace=None):
        return replace(setup(hosts=hosts), shaped=shaped, pace=pace).measured_pace

    assert default(processors() + 1) == "auto"
    assert default(processors()) is None
    assert default(processors() + 1, shaped=False) is None
    assert default(processors() + 1, pace="none") is None
    assert default(1, pace=2.5) == 2.5
    slow = Cluster.from_toml('hosts = 1\nrate = "1gbit"\n[[overrides]]\nhost = 0\nspeed = 0.5')
    assert replace(setup(), cluster=slow, shaped=True).measured_pace == "auto"
    with pytest.raises(ValueError, match="speed and jitter of hosts need a pace"):
        replace(setup(), cluster=slow, shaped=True, pace="none")
    with pytest.raises(ValueError, match=r"pace \(0.5\) must be at least 1"):
        default(2, pace=0.5)


def test_a_directory_in_use_is_refused(here):
    (here / "out").mkdir()
    (here / "out" / "run.json").write_text("mine")
    with pytest.raises(ValueError, match="must be new or empty"):
        compare.compare(comparison(), here / "out")
    assert (here / "out" / "run.json").read_text() == "mine"


def test_default_directories_differ(here):
    first = default_run_dir("scripts/train.py")
    assert first.parent == Path("runs")
    assert first.name.endswith("-train")
    first.mkdir(parents=True)
    assert default_run_dir("scripts/train.py") != first
    assert here


# --- through the command line --------------------------------------------------------------------


@forked
def test_compare_command(here, capsys):
    argv = [
        "compare",
        "--keep-disturbed",
        "--lab",
        "none",
        "--hosts",
        "2",
        "--strategies",
        "ddp,dreamddp:period=2",
    ]
    assert cli.main([*argv, "--repeat", "1", "--wait", "30", "train.py"]) == 0
    (run_dir,) = (here / "runs").iterdir()
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert "ddp, repetition 1 of 1 ..." in lines
    assert lines[-1] == f"Report: runs/{run_dir.name}/report.html"
    run = report.load(run_dir)
    assert report.headline(run, report.summarize(run)).sentence in " ".join(lines)
    assert Path("order.txt").read_text().splitlines()[1] == "ddp 0 30.0"
    (run_dir / "report.html").unlink()
    assert cli.main(["report", str(run_dir)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"Report: {run_dir}/report.html"
    assert (run_dir / "report.html").is_file()


@forked
def test_demo_command(here, capsys, monkeypatch):
    """With the stand-in in place of its script (which test_examples.py trains)."""
    monkeypatch.setattr(commands, "DEMO", "train")
    options = ["--lab", "none", "--hosts", "2", "--iterations", "20", "--out", "out"]
    assert cli.main(["demo", *options]) == 0
    assert {*launched()} == {"profile", "ddp", "local-sgd", "dreamddp"}
    assert read(here / "out" / "run.json")["script"] == ["-m", "train", "--iterations", "20"]
    assert capsys.readouterr().out.splitlines()[-1].endswith(".")  # a sentence
    assert (here / "out" / "report.html").exists()


@forked
@pytest.mark.parametrize("given", [False, True], ids=["measured", "profile"])
def test_run_takes_the_strategy_that_the_script_names(given, here, capsys):
    """And the default if the script names none, however the profile comes about."""
    argv = ["run", "--lab", "none", "--hosts", "1"]
    argv += ["--profile", str(_profile(here, hosts=1))] if given else []
    first = "asking" if given else "profile"
    assert cli.main([*argv, "--out", "a", "train.py", "names=dreamddp:period=3"]) == 0
    assert launched() == [first, "dreamddp"]
    assert read(here / "a/dreamddp/rep0/job.json")["settings"]["period"] == 3
    (entry,) = read(here / "a/run.json")["contestants"]
    assert (entry["strategy"], entry["settings"]["period"]) == ("dreamddp", 3)
    assert read(here / "a/summary.json")["notes"] == []
    assert cli.main([*argv, "--out", "b", "train.py"]) == 0
    assert read(here / "b/run.json")["contestants"][0]["strategy"] == "wfbp"
    # What the command line names counts before it, loudly.
    capsys.readouterr()
    assert cli.main([*argv, "--strategy", "bsp", "--out", "c", "train.py", "names=dreamddp"]) == 0
    assert read(here / "c/run.json")["contestants"][0]["strategy"] == "bsp"
    printed = capsys.readouterr()
    (note,) = read(here / "c/summary.json")["notes"]
    assert note.startswith("dreamddp, which the script names, is not used")
    assert note in printed.err
    assert note in printed.out


@forked
def test_run_json_is_complete_while_the_comparison_runs(here, monkeypatch):
    """The strategy that the script names, and what the lab has changed so far."""
    real, seen = Launcher.launch, []

    def launch(*args, **fields):
        if fields.get("stop_after_profile"):
            return real(*args, **fields)
        seen.append(read(here / "out" / "run.json"))
        problem, _ = real(*args, **fields)
        return problem, [{"at_s": 1.0, "change": "rate 5mbit for all hosts"}]

    monkeypatch.setattr(Launcher, "launch", launch)
    asked = Comparison(setup("names=dreamddp:period=3", hosts=1), None, 2)
    assert compare.compare(asked, here / "out").measured == 2
    entries = [run["contestants"] for run in seen]
    assert [[entry["strategy"] for entry in one] for one in entries] == [["dreamddp"]] * 2
    assert [[change["repetition"] for change in run["changed"]] for run in seen] == [[], [0]]


OWN = """
import torch
from dataclasses import dataclass
from typing import ClassVar
import offbeat
from offbeat.strategies import WFBP

@dataclass(frozen=True)
class Mine(WFBP):
    name: ClassVar[str] = "mine"

if __name__ == "__main__":
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model, optimizer = offbeat.prepare(model, optimizer, Mine(fusion="none"), observe=2)
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.ones(2, 64)).square().mean().backward()
        optimizer.step()
"""


@forked
def test_run_takes_a_strategy_whose_class_the_script_defines(here):
    """It is predicted from the plan that has run."""
    (here / "own.py").write_text(OWN)
    assert cli.main(["run", "--lab", "none", "--hosts", "1", "--out", "r", "own.py"]) == 0
    (entry,) = read(here / "r/run.json")["contestants"]
    assert (entry["strategy"], entry["settings"]["fusion"]) == ("mine", "none")
    (row,) = read(here / "r/summary.json")["rows"]
    assert row["iteration_s"] > 0
    assert row["predicted_s"] > 0
    assert read(here / "r/mine/plan.json") == read(here / "r/mine/rep0/plan.json")


@forked
def test_run_refuses_what_the_scripts_strategy_lacks(capsys):
    """Servers for one that has servers; a setting without a strategy."""
    argv = ["run", "--lab", "none", "--hosts", "2", "--out", "r"]
    assert cli.main([*argv, "train.py", "names=ssp"]) == 1
    assert "servers (0) must be at least 1 for ssp" in capsys.readouterr().err
    assert cli.main([*argv, "--set", "period=3", "train.py"]) == 2
    assert "needs --strategy" in capsys.readouterr().err
    assert launched() == ["profile"]


@forked
def test_options_after_the_script_are_stated(here, capsys):
    argv = ["run", "--lab", "none", "--strategy", "bsp", "--hosts", "2", "--out", "r", "train.py"]
    assert cli.main([*argv, "--hosts", "3", "--rate=5mbit", "--steps", "9"]) == 0
    notes = read(here / "r/summary.json")["notes"]
    assert [note.split()[0] for note in notes] == ["--hosts", "--rate"]
    assert all(note in capsys.readouterr().err for note in notes[:1])
    assert Profile.load(here / "r/profile.json").world_size == 2


@forked
def test_json_is_all_there_is_on_stdout(here, capsys):
    argv = ["run", "--lab", "none", "--hosts", "2", "--strategy", "dreamddp", "--out", "r"]
    assert cli.main([*argv, "--set", "period=3", "--json", "train.py"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["run_dir"], data["report"]) == ("r", "r/report.html")
    assert [row["label"] for row in data["rows"]] == ["dreamddp"]
    assert data["rows"][0]["strategy"] == "dreamddp(period=3)"
    assert launched() == ["profile", "dreamddp"]
    assert cli.main(["report", "r", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == data
    assert here


@forked
def test_a_failed_contestant_exits_1_with_the_table(capsys):
    argv = [
        "compare",
        "--keep-disturbed",
        "--lab",
        "none",
        "--hosts",
        "2",
        "--strategies",
        "ddp,wfbp",
        "--repeat",
        "1",
    ]
    assert cli.main([*argv, "train.py", "fail=ddp"]) == 1
    printed = capsys.readouterr()
    assert "the loss is not a number" in printed.err
    assert "failed" in printed.out  # the table says that something is missing
    assert "report.html" in printed.out


@forked
def test_profile_command(here, capsys):
    argv = ["profile", "--lab", "none", "--hosts", "2", "train.py"]
    assert cli.main([*argv, "-o", "p.json"]) == 0
    assert Profile.load(here / "p.json").world_size == 2
    assert cli.main([*argv, "fail=profile"]) == 1
    assert "the loss is not a number" in capsys.readouterr().err
    assert not (here / "profile.json").exists()


INTERRUPTIBLE = """
import signal, sys
from offbeat.cli import entry as cli
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" has it ignored
sys.exit(cli.main(sys.argv[1:]))
"""


def test_ctrl_c_keeps_what_was_measured(here):
    argv = [
        "compare",
        "--keep-disturbed",
        "--lab",
        "none",
        "--hosts",
        "2",
        "--strategies",
        "ddp,wfbp,bsp",
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, *argv, "--out", "out", "train.py", "sleep=wfbp"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    ranks = [int(_text_of(here / f"sleeping.{rank}", process)) for rank in range(2)]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == ("offbeat: interrupted; what was measured is in out; --resume out completes it\n")
    assert "out/report.html" in out
    assert launched() == ["profile", "ddp", "wfbp"]
    rows = report.summarize(report.load(here / "out"))
    assert [row.repetitions for row in rows] == [1, 0, 0]
    assert [row.failed for row in rows] == [0, 1, 0]
    assert [row.not_run for row in rows] == [False, False, True]
    assert rows[1].problem == "interrupted with Ctrl-C"
    assert re.search(r"^bsp +was not run$", out, re.MULTILINE)
    assert "bsp was not run." in " ".join(out.split())
    assert "bsp failed" not in out
    assert read(here / "out" / "run.json")["interrupted"] is True
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)


@forked
@pytest.mark.parametrize("name", ["job.json", "load.json", "run.json", "summary.json"])
def test_a_full_disk_names_the_file_and_keeps_what_was_measured(name, here, monkeypatch, capsys):
    """The disk is full from the second contestant on: no file of that name can be written."""
    write = files.write_text

    def write_until_full(path: str | Path, text: str) -> None:
        begun = "dreamddp" in str(path) or (here / "out" / "dreamddp-period=2" / "rep0").exists()
        if begun and Path(path).name.removesuffix(".part") == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, text)

    monkeypatch.setattr(files, "write_text", write_until_full)
    outcome = compare.compare(comparison(repetitions=1, hosts=1), here / "out")
    err = capsys.readouterr().err
    (failure,) = outcome.failures
    assert re.search(
        rf"out/\S*{name} cannot be written: No space left on device; make room", failure
    )
    assert failure in err
    monkeypatch.undo()
    monkeypatch.chdir(here)
    ddp, _ = report.summarize(report.load(here / "out"))
    assert ddp.iteration_s is not None
    if name in ("job.json", "load.json"):
        assert outcome.report is not None
        assert "what was measured is kept in" in failure
    else:
        assert f"write the report with `offbeat report {here / 'out'}`" in failure
        assert report.write(here / "out").exists()


RESUMABLE = (
    *("compare", "--keep-disturbed", "--lab", "none", "--hosts", "2", "--strategies"),
    *("ddp,wfbp,bsp", "--seeds", "3,5"),
)


def test_the_rest_is_estimated_from_the_first_run():
    predicted_s = {"ddp": 2.0, "dreamddp": 1.0}
    runs = [Contestant(one.name, one) for one in (DDP(), DreamDDP(), SelSync())] * 2
    # 50 s of dreamddp twice; 100 s of ddp, and of selsync, which has no prediction
    text = "about 6 min 40 s for the other 5 runs"
    assert compare.remaining_text(runs, predicted_s, 100.0) == text
    assert compare.remaining_text(runs, predicted_s, 10.0) == ""
    assert compare.remaining_text(runs[:1], predicted_s, 1e6) == ""
    # "--steps 9" of one contestant, for example
    runs[1] = replace(runs[1], arguments=("--steps", "9"))
    assert compare.remaining_text(runs, predicted_s, 100.0) == ""


@forked
def test_an_interrupted_comparison_is_resumed(here, capsys):
    """What is complete stays; what was cut short or has not begun runs with the same seeds."""
    arguments = ("--args", "wfbp=--rate 2", "train.py")
    command = ["1" if word == "2" else word for word in RESUMABLE]  # of one host
    assert cli.main([*command, "--out", "out", *arguments]) == 0
    before = (here / "out" / "ddp" / "rep1" / "rank0.json").stat().st_mtime_ns
    shutil.rmtree(here / "out" / "bsp")
    (here / "out" / "wfbp" / "rep1" / "problem.txt").write_text("interrupted with Ctrl-C")
    (here / "order.txt").unlink()
    capsys.readouterr()
    assert cli.main([*command, "--resume", "out", *arguments]) == 0
    out = capsys.readouterr().out
    assert "ddp, repetition 1 of 2: kept, as it is complete" in out
    order = [line.split()[:2] for line in (here / "order.txt").read_text().splitlines()]
    assert order == [["bsp", "3"], ["wfbp", "5"], ["bsp", "5"]]
    assert (here / "out" / "ddp" / "rep1" / "rank0.json").stat().st_mtime_ns == before
    rows = report.summarize(report.load(here / "out"))
    assert [row.repetitions for row in rows] == [2, 2, 2]
    assert {row.seeds for row in rows} == {(3, 5)}


@forked
def test_a_resumed_comparison_may_have_further_repetitions(here, capsys):
    """One launch becomes three; the first one stays. Fewer or other seeds are another run."""
    command = ["1" if word == "2" else word for word in RESUMABLE[:-2]]  # of one host
    command[-1] = "ddp,bsp"
    assert cli.main([*command, "--repeat", "1", "--out", "out", "train.py"]) == 0
    before = [(here / "out" / name / "rep0" / "rank0.json").stat() for name in ("ddp", "bsp")]
    (here / "order.txt").unlink()
    capsys.readouterr()
    assert cli.main([*command, "--repeat", "3", "--resume", "out", "train.py"]) == 0
    assert "ddp, repetition 1 of 3: kept, as it is complete" in capsys.readouterr().out
    order = [line.split()[:2] for line in (here / "order.txt").read_text().splitlines()]
    assert order == [["ddp", "1"], ["bsp", "1"], ["ddp", "2"], ["bsp", "2"]]
    after = [(here / "out" / name / "rep0" / "rank0.json").stat() for name in ("ddp", "bsp")]
    assert [one.st_mtime_ns for one in after] == [one.st_mtime_ns for one in before]
    rows = report.summarize(report.load(here / "out"))
    assert [(row.repetitions, row.seeds) for row in rows] == [(3, (0, 1, 2))] * 2
    for wrong in (["--repeat", "2"], ["--seeds", "1,2,0"], ["--seeds", "0,2,1,3"]):
        assert cli.main([*command, *wrong, "--resume", "out", "train.py"]) == 2
        assert "seeds (" in capsys.readouterr().err


OTHER_COMMANDS = (
    (["--args", "ddp=-x 1"], "contestants ("),
    (["--rate", "5mbit"], "cluster ("),
    (["--pace", "3"], "pace (3"),
    (["--target", "loss=.1"], "target_loss (0.1) must be that of out (null)"),
    (["--target", "accuracy=.9"], 'target ({"name": "accuracy", "value": 0.9}) must be'),
    (["--device-speed", "20x"], 'device_speed ({"factor": 20.0, "iteration_s": null}) must be'),
    (["--out", "new"], "--out (new) is the folder of --resume"),
)


@forked
def test_another_command_is_not_resumed(here, capsys):
    assert cli.main([*RESUMABLE, "--out", "out", "train.py", "fail=profile"]) == 1
    before = (here / "out" / "run.json").read_text()
    capsys.readouterr()
    for argv, words in OTHER_COMMANDS:
        again = [*RESUMABLE, "--resume", "out", *argv, "train.py", "fail=profile"]
        assert cli.main(again) == 2
        assert words in capsys.readouterr().err
        assert (here / "out" / "run.json").read_text() == before
    assert cli.main([*RESUMABLE, "--resume", "nowhere", "train.py"]) == 2
    assert "run directory (nowhere) must hold the run.json" in capsys.readouterr().err


@forked
def test_a_resumed_comparison_keeps_its_profile_and_states_other_limits(here, capsys):
    given = Profile.load(_profile(here))
    arguments = ("--profile", str(_profile(here)), "--timeout", "60", "train.py")
    command = ("compare", "--keep-disturbed", "--lab", "none", "--hosts", "2", "--repeat", "1")
    assert cli.main([*command, "--strategies", "bsp", "--out", "out", *arguments]) == 0
    again = [*command, "--strategies", "bsp", "--resume", "out"]
    before = read(here / "out" / "run.json")
    given.with_pace(4.0).save("other.json")
    capsys.readouterr()
    assert cli.main([*again, "--profile", "other.json", "train.py"]) == 2
    assert "profile (other.json) must be out/profile.json" in capsys.readouterr().err
    assert cli.main([*again, *arguments]) == 0
    assert cli.main([*again, "--wait", "99", "train.py"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "note: timeout_s is unlimited; it was 60 s in the repetitions that are kept" in out
    assert "note: wait_s is 99 s; it was 120 s in the repetitions that are kept" in out
    assert read(here / "out" / "run.json")["profile"] == before["profile"] is not None


@forked
def test_arguments_of_one_strategy(here, capsys):
    """They stand after those of all strategies, in the command of its ranks alone."""
    (here / "train.py").write_text(f"{SCRIPT}\nprint('words:', *sys.argv[1:], flush=True)")
    argv = [*RESUMABLE[:7], "ddp,ddp:bucket_cap_mb=1", "--repeat", "1", "--out", "out"]
    given = ["--args", 'ddp=--name "a b"', "--args", "ddp:bucket_cap_mb=1=--lr 3e-4"]
    assert cli.main([*argv, *given, "train.py", "emulated"]) == 0
    said = {
        label: (here / "out" / label / "rep0" / "rank1.log").read_text().splitlines()[-1]
        for label in ("ddp", "ddp-bucket_cap_mb=1")
    }
    assert said["ddp"] == "words: emulated --name a b"
    assert said["ddp-bucket_cap_mb=1"] == "words: emulated --name a b --lr 3e-4"
    assert "ddp with --name a b" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--seeds 0,1 --repeat 2", "--seeds (0,1) replaces --repeat"),
        ("--seeds 0,1 --seed 4", "--seeds (0,1) replaces --seed"),
        ("--seeds 0,x", "--seeds ('0,x') must be whole numbers"),
        ("--seeds 1,1", "--seeds (1,1) must differ"),
        ("--args dreamdpp=--lr", "strategy of --args ('dreamdpp')"),
        ("--args dreamddp", "--args ('dreamddp') must be a strategy and its arguments"),
    ],
)
def test_wrong_seeds_and_arguments(argv, words, capsys):
    assert cli.main(["compare", "--lab", "none", *argv.split(), "train.py"]) == 2
    assert words in capsys.readouterr().err


def _text_of(path: Path, process: subprocess.Popen[str]) -> str:
    """Text of a file once it is there; an error if the process ends before."""
    while not (path.exists() and path.read_text()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    return path.read_text()


def _profile(here: Path, hosts: int = 2) -> Path:
    """What the stand-in measures."""
    buckets = tuple(Bucket(f"h.{i}", 0.001, 0.002, 10**6) for i in range(4))
    Profile(buckets, (Link("net", 1e-4, 1.25e7),), hosts).save(here / "given.json")
    return here / "given.json"


def test_iterations_are_counted_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In lines, while something runs, and not after."""
    counted, calls = threading.Event(), iter((0, 1234))

    def count() -> int:
        found = next(calls, 5000)
        if found == 5000:
            counted.set()
        return found

    with Progress(first_s=0.01).step("running", count):
        assert counted.wait(30)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "running ..."
    assert lines[1].startswith("running: ")
    assert "iterations" not in lines[1]
    assert lines[2].startswith("running: 1,234 iterations, ")


def test_what_the_library_says_to_a_scripts_user_stays(capsys: pytest.CaptureFixture[str]) -> None:
    """As where others can join; what the script says is for its log."""
    with Progress().step("running") as on_line:
        on_line("step 10")
        on_line("offbeat: others can join this job at 10.0.0.1:40123, with the same")
        on_line("         OFFBEAT_SECRET:")
        on_line("step 11")
        on_line("         of the script")
    said = capsys.readouterr().out
    assert "10.0.0.1:40123" in said
    assert "OFFBEAT_SECRET" in said
    assert "step 1" not in said
    assert "of the script" not in said


def test_a_disturbed_profile_is_not_kept_if_its_repetition_ends(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise `--resume` would take it for a good one."""
    launches = list[Path]()

    def launch(_: str, logs: Path, *__: Any, save_profile: str, **___: Any) -> tuple[None, None]:
        launches.append(logs)
        if len(launches) > 1:
            raise KeyboardInterrupt
        logs.mkdir()
        Profile((Bucket("b", 0.1, 0.2, 4),), (Link("net", 0.1, 1e6),), 2).save(save_profile)
        return None, None

    setup = Setup(("train.py",), Cluster.simple(2, "10mbit"), shaped=False)
    made = Launcher(setup, None, Outcome(here), Progress())  # type: ignore[arg-type]
    made.launch = launch  # type: ignore[assignment]
    monkeypatch.setattr(
        launcher, "disturbance_of", lambda *_: SimpleNamespace(text="other programs ran")
    )
    with pytest.raises(KeyboardInterrupt):
        made.measure(here / "profile.json", here / "profiling", again=True)
    assert len(launches) == 2
    assert not (here / "profile.json").exists()


def test_a_disturbed_profile_of_an_interrupted_run_is_replaced(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(_: str, logs: Path, *__: Any, save_profile: str, **___: Any) -> tuple[None, None]:
        logs.mkdir()
        Profile((Bucket("b", 0.1, 0.2, 4),), (Link("net", 0.1, 1e6),), 2).save(save_profile)
        return None, None

    earlier = here / f"{BEFORE}profiling"
    earlier.mkdir()
    (earlier / "rank0.log").write_text("of the interrupted run")
    setup = Setup(("train.py",), Cluster.simple(2, "10mbit"), shaped=False)
    made = Launcher(setup, None, Outcome(here), Progress())  # type: ignore[arg-type]
    made.launch = launch  # type: ignore[assignment]
    found = iter([SimpleNamespace(text="other programs ran"), None])
    monkeypatch.setattr(launcher, "disturbance_of", lambda *_: next(found))
    assert made.measure(here / "profile.json", here / "profiling", again=True)
    assert (here / "profile.json").exists()
    assert [path.name for path in earlier.iterdir()] == ["profile.json"]


def test_a_disturbed_repetition_is_marked_and_repeated_once(here: Path) -> None:
    """A loop on every processor beside the profile and the run, which leaves other programs the
    time that they need."""
    loop = "import os; os.nice(19)\nwhile True: pass"
    loops = [subprocess.Popen([sys.executable, "-S", "-c", loop]) for _ in range(processors())]
    try:
        outcome = compare.compare(
            replace(
                comparison("dwell", repetitions=1, contestants=CONTESTANTS[:1], hosts=1),
                repeat_disturbed=True,
            ),
            here / "out",
        )
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    assert launched() == ["profile"] * 2 + ["ddp"] * 2
    assert (outcome.measured, outcome.failures) == (1, [])
    summary = read(here / "out" / "summary.json")
    (row,) = summary["rows"]
    assert (row["repetitions"], row["failed"], row["repeated"]) == (1, 0, 1)
    (disturbed,) = row["disturbed"]
    assert disturbed["repetition"] == 0
    assert disturbed["foreign"] > 0.3
    assert summary["profile_disturbed"]["foreign"] > 0.3
    assert (here / "out" / "ddp" / "disturbed-rep0" / "rank0.json").exists()
    out = io.StringIO()
    with redirect_stdout(out):
        cli.main(["report", str(here / "out")])
    assert "disturbed" in out.getvalue()
    assert "disturbed" in (here / "out" / "report.html").read_text()


@forked
@pytest.mark.parametrize("how", ["fails", "is interrupted"])
def test_a_second_attempt_that_does_not_end(here: Path, monkeypatch, how: str) -> None:
    """One that fails is the repetition's failure; after Ctrl-C the first one counts again."""
    real, launches = Launcher.launch, []

    def launch(*args, **fields):
        launches.append(args)
        if len(launches) < 3:
            return real(*args, **fields)
        args[2].mkdir()
        if how == "fails":
            return "rank 1 exited with code 1", []
        raise KeyboardInterrupt

    monkeypatch.setattr(Launcher, "launch", launch)
    disturbed = Repetition(0, (), load={"disturbed": 1.0, "foreign": 0.5})
    monkeypatch.setattr(compare, "load_repetition", lambda *_: disturbed)
    monkeypatch.setattr(launcher, "load_in", lambda _: None)
    made = comparison(repetitions=1, contestants=CONTESTANTS[:1], hosts=1)
    outcome = compare.compare(replace(made, repeat_disturbed=True), here / "out")
    assert len(launches) == 3
    assert (outcome.measured, outcome.interrupted) == ((0, False) if how == "fails" else (1, True))
    assert len(outcome.failures) == (how == "fails")
    if how == "is interrupted":
        (row,) = read(here / "out" / "summary.json")["rows"]
        assert (row["repetitions"], row["repeated"]) == (1, 0)
