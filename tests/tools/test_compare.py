"""`offbeat compare` and `run`: turns, folders, failures, Ctrl-C, resumption, by real training."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from harness.commands import launch_forks

from offbeat import Profile
from offbeat.cli import entry as cli
from offbeat.core.measuring.processors import processors
from offbeat.core.sim.trace import Trace
from offbeat.strategies import DDP, DreamDDP

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("here")]
# Where starts and ends of processes are not the subject.
forked = pytest.mark.usefixtures("forked_ranks")

# Words after the script say what becomes of it; a file says in which order rank 0 was started.
SCRIPT = """
import os, shutil, sys, time
from pathlib import Path

rank, words = int(os.environ["RANK"]), [word.lstrip("-") for word in sys.argv[1:]]
with open("order.txt" if rank == 0 else os.devnull, "a") as file:
    print(os.environ["OFFBEAT_SEED"], *sys.argv[1:], file=file)
with open("order.txt") as file:
    started = file.read().split("\\n")[:-1]
if rank == 0 and Path("out", "run.json").exists():
    shutil.copy("out/run.json", f"seen{len(started)}.json")
if "fail" in words or ("fail-again" in words and started.count(started[-1]) > 1):
    sys.exit("the loss is not a number")
if "sleep" in words:
    Path(f"sleeping.{rank}").write_text(str(os.getpid()))
    time.sleep(600)
if "idle" in words:
    sys.exit(0)

import torch, offbeat
from dataclasses import dataclass
from typing import ClassVar
from offbeat.strategies import WFBP

@dataclass(frozen=True)
class Mine(WFBP):
    name: ClassVar[str] = "mine"

torch.manual_seed(0)
named = Mine(fusion="none") if "mine" in words else None
named = next((word[6:] for word in words if word.startswith("names=")), named)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
model, optimizer = offbeat.prepare(model, optimizer, named, observe=2)
for _ in range(1200 if "killed" in words else 12):
    optimizer.zero_grad()
    model(torch.ones(2, 64)).square().mean().backward()
    optimizer.step()
if "dwell" in words:
    time.sleep(0.5)
if "killed" in words:
    os.kill(os.getpid(), 9)
if "late" in words:
    sys.exit("failed after training")
if "full" in words:  # no file of the run can be written any more
    for name in ("run.json", "summary.json"):
        Path("out", name).rename(f"{name}.before") if Path("out", name).exists() else None
        for path in (name, f"{name}.part"):
            Path("out", path).symlink_to("/dev/full")
"""
BUCKETS = 2


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own working directory with the script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def command(name: str, *options: str, hosts: int = 1, out: str = "out") -> list[str]:
    """A command without a lab, which keeps what other programs have disturbed."""
    words = [name, "--lab", "none", "--hosts", str(hosts), *options]
    words += ["--keep-disturbed"] if name == "compare" else []
    return [*words, *(() if "--resume" in options else ("--out", out)), "train.py"]


def compare(*options: str, **more: Any) -> list[str]:
    return command("compare", *options, **more)


def started(here: Path = Path()) -> list[list[str]]:
    """Seed and words of each launch."""
    return [line.split() for line in (here / "order.txt").read_text().splitlines()]


def read(path: Path | str) -> Any:
    return json.loads(Path(path).read_text())


def rows(out: str = "out") -> dict[str, dict[str, Any]]:
    return {row["label"]: row for row in read(f"{out}/summary.json")["rows"]}


# --- two contestants -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of two contestants with two repetitions on two hosts; nobody changes it."""
    here = tmp_path_factory.mktemp("turns")
    (here / "train.py").write_text(SCRIPT)
    named = ["--args", "ddp=--one", "--args", "dreamddp:period=2=--name 'a b'"]
    with pytest.MonkeyPatch.context() as patch, chdir(here), redirect_stdout(io.StringIO()) as out:
        patch.setattr("offbeat.experiments.launcher.launch", launch_forks)
        options = ["--strategies", "ddp,dreamddp:period=2", "--seed", "7", "--min-bucket", "1"]
        argv = compare(*options, *named, hosts=2)
        assert cli.main([*argv, "all"]) == 0
    (here / "printed.txt").write_text(out.getvalue())
    return here


def test_contestants_take_turns_after_one_profile(turns: Path) -> None:
    """The profile has the first seed; all contestants of a repetition share one. Each has its
    arguments after those of all."""
    one, other = ["all", "--one"], ["all", "--name", "a", "b"]
    expected = [["7", "all"], ["7", *one], ["7", *other], ["8", *one], ["8", *other]]
    assert started(turns) == expected


def test_run_directory(turns: Path) -> None:
    out = turns / "out"
    run, summary = read(out / "run.json"), read(out / "summary.json")
    assert (run["script"], run["lab"], run["emulated"]) == (["train.py", "all"], "none", False)
    assert (run["repetitions"], run["seeds"], summary["seeds"]) == (2, [7, 8], [7, 8])
    assert {*run["versions"]} == {"offbeat", "torch", "python", "kernel"}
    assert run["cluster"]["hosts"] == 2
    assert run["note"]
    assert [c["label"] for c in run["contestants"]] == ["ddp", "dreamddp-period=2"]
    assert run["contestants"][1]["strategy"] == "dreamddp"
    assert run["contestants"][1]["settings"] == DreamDDP(period=2).settings()
    for name in ("report.html", "profile.json", "profiling/rank1.log", "ddp/rep1/rank1.log"):
        assert (out / name).is_file(), name
    assert not (out / "ddp" / "rep2").exists()
    for number in range(2, 6):  # complete for a reader while the comparison runs
        seen = read(turns / f"seen{number}.json")
        assert seen["contestants"] == run["contestants"]
        assert seen["seeds"] == [7, 8]


def test_each_contestant_has_its_row_with_its_prediction(turns: Path) -> None:
    profile = Profile.load(turns / "out" / "profile.json")
    assert (profile.world_size, len(profile.buckets)) == (2, BUCKETS)
    summary = {row["label"]: row for row in read(turns / "out" / "summary.json")["rows"]}
    for label, strategy in (("ddp", DDP()), ("dreamddp-period=2", DreamDDP(period=2))):
        row = summary[label]
        assert (row["repetitions"], row["failed"], row["iterations"]) == (2, 0, 12)
        assert row["iteration_s"] > 0
        assert row["bound_s"] == pytest.approx(strategy.bound_s(profile))
        assert row["predicted_s"] >= row["bound_s"] * (1 - 1e-9)
        assert row["final_loss"] < 1
    path = turns / "out" / "dreamddp-period=2"
    assert read(path / "plan.json")["period"] == 2
    trace = Trace.load(path / "predicted.json")
    assert (trace.source, trace.strategy, trace.period, trace.iterations) == (
        *("simulated", "dreamddp", 2, 2),
    )
    assert trace.notes["iteration_s"] >= trace.notes["bound_s"]
    assert trace.notes["bound_s"] == pytest.approx(summary["dreamddp-period=2"]["bound_s"])
    assert {span.iteration for span in trace.spans} == {trace.first, trace.first + 1}


def test_the_table_has_each_contestant_and_the_report_is_written_again(
    turns: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = (turns / "printed.txt").read_text().splitlines()
    summary = read(turns / "out" / "summary.json")
    assert summary["sentence"] in " ".join(printed)
    for row in summary["rows"]:
        assert any(line.startswith(row["label"]) for line in printed)
    (turns / "out" / "report.html").unlink()
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["report", str(turns / "out")]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines()[:-1])) <= 80
    assert (turns / "out" / "report.html").is_file()


# --- failures ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of the script on one host."""
    folder = tmp_path_factory.mktemp("measured")
    (folder / "train.py").write_text(SCRIPT)
    with pytest.MonkeyPatch.context() as patch, chdir(folder), redirect_stdout(io.StringIO()):
        patch.setattr("offbeat.experiments.launcher.launch", launch_forks)
        argv = ["profile", "--lab", "none", "--hosts", "1", "-o", "p.json", "train.py"]
        assert cli.main(argv) == 0
        assert cli.main([*argv[:-3], "-o", "q.json", "train.py", "fail"]) == 1
    assert not (folder / "q.json").exists()
    return folder / "p.json"


@forked
def test_a_failing_contestant_does_not_stop_the_others(
    measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was recorded before it failed counts, as there is nothing better, and is marked."""
    ways = {"ddp": "fail", "wfbp": "late", "local-sgd": "killed", "dear": "idle", "bsp": "well"}
    given = [word for name, way in ways.items() for word in ("--args", f"{name}=--{way}")]
    options = ["--strategies", ",".join(ways), "--repeat", "1", "--profile", str(measured)]
    assert cli.main(compare(*options, *given)) == 1
    assert [word for _, word in started()] == [f"--{way}" for way in ways.values()]
    printed, found = capsys.readouterr(), rows()
    assert {
        label: (row["repetitions"], row["failed"], row["cut"]) for label, row in found.items()
    } == {
        "ddp": (0, 1, False),
        "wfbp": (1, 0, True),
        "local-sgd": (1, 0, True),
        "dear": (0, 1, False),
        "bsp": (1, 0, False),
    }
    assert "the loss is not a number" in printed.err  # the end of its log
    assert [name for name in ways if f"offbeat: {name}, repetition 1 of 1: " in printed.err] == [
        *("ddp", "wfbp", "local-sgd", "dear"),
    ]
    assert (found["wfbp"]["iterations"], found["bsp"]["iterations"]) == (12, 12)
    assert found["local-sgd"]["iterations"] >= 900
    assert "offbeat.prepare" in found["dear"]["problem"]
    assert Profile.load("out/profile.json") == Profile.load(measured)
    assert (Path("out") / "report.html").exists()


@forked
@pytest.mark.parametrize("way", ["fail", "idle"])
def test_without_a_profile_nothing_runs(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*compare("--strategies", "ddp,bsp"), way]) == 1
    assert capsys.readouterr().err
    assert started() == [["0", way]]
    assert not Path("out/report.html").exists()


@forked
def test_a_full_disk_keeps_what_was_measured(
    measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--strategies", "ddp,bsp", "--repeat", "1", "--profile", str(measured)]
    assert cli.main(compare(*options, "--args", "bsp=--full")) == 1
    assert "No space left on device" in capsys.readouterr().err
    for name in ("run.json", "summary.json"):
        Path("out", name).unlink()
        Path("out", f"{name}.part").unlink(missing_ok=True)
    Path("run.json.before").rename("out/run.json")
    assert cli.main(["report", "out"]) == 0
    assert {label: row["repetitions"] for label, row in rows().items()} == {"ddp": 1, "bsp": 1}


INTERRUPTIBLE = """
import signal, sys
from offbeat.cli import entry as cli
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" has it ignored
sys.exit(cli.main(sys.argv[1:]))
"""


def test_ctrl_c_keeps_what_was_measured_and_resume_completes_it(
    here: Path, measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--strategies", "ddp,wfbp,bsp", "--seeds", "3,5", "--profile", str(measured)]
    argv = compare(*options, "--args", "wfbp=--sleep")
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, *argv],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not ((sleeping := here / "sleeping.0").exists() and sleeping.read_text()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.count("\n")) == (130, 1)
    assert "--resume out" in err
    with pytest.raises(ProcessLookupError):
        os.kill(int(sleeping.read_text()), 0)
    assert started() == [["3"], ["3", "--sleep"]]
    found = rows()
    assert [row["repetitions"] for row in found.values()] == [1, 0, 0]
    assert [bool(row["problem"]) for row in found.values()] == [False, True, False]
    assert read("out/run.json")["interrupted"] is True
    before = Path("out/ddp/rep0/rank0.log").stat().st_mtime_ns

    (here / "order.txt").unlink()
    (here / "train.py").write_text(SCRIPT.replace("time.sleep(600)", "pass"))
    monkeypatch.setattr("offbeat.experiments.launcher.launch", launch_forks)
    assert cli.main(compare(*options, "--args", "wfbp=--sleep", "--resume", "out")) == 0
    assert started() == [["3", "--sleep"], ["3"], ["5"], ["5", "--sleep"], ["5"]]
    assert Path("out/ddp/rep0/rank0.log").stat().st_mtime_ns == before
    assert {(row["repetitions"], *row["seeds"]) for row in rows().values()} == {(2, 3, 5)}


# --- resumption ----------------------------------------------------------------------------------

# a changed option of a resumed run, and the parameter that its refusal names
OTHER_RUNS = [
    ("--strategies ddp,bsp", "contestants"),
    ("--args ddp=-x", "contestants"),
    ("--rate 5mbit", "cluster"),
    ("--pace 3", "pace"),
    ("--target loss=.1", "target_loss"),
    ("--target accuracy=.9", "target"),
    ("--device-speed 20x", "device_speed"),
    ("--repeat 1", "seeds"),
    ("--seeds 1,0", "seeds"),
    ("--out new", "--out"),
    ("--profile other.json", "profile (other.json)"),
]


@forked
def test_a_resumed_comparison_may_have_more_repetitions_and_no_other_change(
    measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fewer or other seeds are another run; other limits are noted."""
    options = {"--strategies": "ddp", "--profile": str(measured), "--repeat": "2"}

    def again(changed: Mapping[str, str], out: str = "out") -> list[str]:
        given = {**options, "--timeout": "60", **changed, "--resume": out}
        if "--seeds" in changed:
            del given["--repeat"]
        return compare(*(word for option in given.items() for word in option))

    first = [word for option in options.items() for word in option]
    assert cli.main(compare(*first, "--timeout", "60")) == 0
    before, record = started(), Path("out/run.json").read_text()
    Profile.load(measured).with_pace(4.0).save("other.json")
    capsys.readouterr()
    for changed, parameter in OTHER_RUNS:
        assert cli.main(again(dict([changed.split()]))) == 2, changed
        assert parameter in capsys.readouterr().err, changed
        assert Path("out/run.json").read_text() == record
    assert started() == before
    assert cli.main(again({"--repeat": "3", "--timeout": "99"})) == 0
    assert started()[len(before) :] == [["2"]]
    assert {(row["repetitions"], *row["seeds"]) for row in rows().values()} == {(3, 0, 1, 2)}
    assert any("timeout_s" in note for note in read("out/summary.json")["notes"])
    assert cli.main(again({}, "nowhere")) == 2


# what is asked, and the parameter that its refusal names
REFUSED = [
    ("--seeds 0,1 --repeat 2", "--seeds"),
    ("--seeds 0,1 --seed 4", "--seeds"),
    ("--seeds 0,x", "--seeds ('0,x')"),
    ("--seeds 1,1", "--seeds (1,1)"),
    ("--args dreamdpp=--lr", "--args ('dreamdpp')"),
    ("--args dreamddp", "--args ('dreamddp')"),
    ("--repeat 0", "--repeat (0)"),
    ("--strategies ddp,ddp", "('ddp')"),
    ("--strategies ddp,dremddp", "'dreamddp'"),
    ("--set dreamdp.period=2", "'dreamddp'"),
    ("--set perod=2", "'period'"),
    ("--pace .5", "pace (0.5)"),
    ("--profile paced.json --pace none", "pace (none)"),
    ("--profile two.json --pace auto", "pace (auto)"),
    ("--profile one.json", "world_size (1)"),
    ("--resume nowhere", "run directory (nowhere)"),
]


def test_wrong_comparisons_run_nothing(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Profile.load(measured).save("one.json")
    Path("out").mkdir()
    Path("out/run.json").write_text("mine")
    two = Profile.from_dict(Profile.load(measured).to_dict() | {"world_size": 2})
    two.save("two.json")
    two.with_pace(2.0).save("paced.json")
    for words, parameter in [*REFUSED, ("", "run directory (out)")]:
        argv = compare(*words.split(), hosts=2, out="new" if words else "out")
        assert cli.main(argv) == 2, words
        printed = capsys.readouterr()
        assert (printed.out, printed.err.count("\n")) == ("", 1), words
        assert parameter in printed.err, words
    assert Path("out/run.json").read_text() == "mine"
    assert not Path("order.txt").exists()


# --- one strategy --------------------------------------------------------------------------------


@forked
def test_run_takes_the_strategy_that_the_script_names(
    measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the default if the script names none, however the profile comes about. What the command
    line names counts before it, and a note states that; notes on stderr name options that stand
    after the script."""
    argv = command("run", "--profile", str(measured), out="a")
    assert cli.main([*argv, "names=dreamddp:period=3"]) == 0
    (entry,) = read("a/run.json")["contestants"]
    assert (entry["strategy"], entry["settings"]["period"]) == ("dreamddp", 3)
    assert read("a/dreamddp/plan.json")["period"] == 3
    assert read("a/summary.json")["notes"] == []
    assert cli.main(command("run", out="b")) == 0
    assert read("b/run.json")["contestants"][0]["strategy"] == "wfbp"
    capsys.readouterr()
    argv = command("run", "--strategy", "bsp", "--json", "--profile", str(measured), out="c")
    assert cli.main([*argv, "names=dreamddp", "--hosts", "3", "--rate=5mbit", "--steps", "9"]) == 0
    printed = capsys.readouterr()
    data = json.loads(printed.out)  # nothing else is on stdout
    assert (data["run_dir"], [row["strategy"] for row in data["rows"]]) == ("c", ["bsp"])
    notes = read("c/summary.json")["notes"]
    assert [note.split()[0].strip(",") for note in notes] == ["dreamddp"]
    assert all(note in printed.err for note in [*notes, "note: --hosts ", "note: --rate "])
    assert "note: --steps" not in printed.err
    assert cli.main(["report", "c", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == data


@forked
def test_run_takes_a_strategy_whose_class_the_script_defines() -> None:
    """It is predicted from the plan that has run."""
    assert cli.main([*command("run", out="r"), "mine"]) == 0
    (entry,) = read("r/run.json")["contestants"]
    assert (entry["strategy"], entry["settings"]["fusion"]) == ("mine", "none")
    (row,) = rows("r").values()
    assert min(row["iteration_s"], row["predicted_s"]) > 0
    assert read("r/mine/plan.json") == read("r/mine/rep0/plan.json")


@forked
def test_servers_of_a_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    """A contestant without a plan is predicted, too; servers of one that has none are refused."""
    argv = command("run", "--strategy", "ssp", "--set", "s=1", "--servers", "1", hosts=2, out="r")
    assert cli.main(argv) == 0
    (row,) = rows("r").values()
    assert row["predicted_s"] > 0
    assert not Path("r/ssp/plan.json").exists()
    assert cli.main([*command("run", out="s"), "names=ssp"]) == 1
    assert "servers (0)" in capsys.readouterr().err
    assert cli.main(command("run", "--set", "period=3", out="t")) == 2
    assert "--strategy" in capsys.readouterr().err


@forked
def test_hosts_keep_the_pace_of_the_profile(measured: Path) -> None:
    """Unless another one is given."""
    profile = Profile.load(measured)
    profile.with_pace(3.0).save("paced.json")
    options = ["--strategy", "bsp", "--profile", "paced.json"]
    assert cli.main(command("run", *options, out="a")) == 0
    assert Profile.load("a/profile.json") == profile.with_pace(3.0)
    assert read("a/summary.json")["rows"][0]["pace"] == 3.0
    assert cli.main(command("run", *options, "--pace", "4", out="b")) == 0
    assert Profile.load("b/profile.json") == profile.with_pace(4.0)


# --- disturbance ---------------------------------------------------------------------------------


@forked
def test_a_disturbed_repetition_is_marked_and_repeated_once(here: Path) -> None:
    """Ranks that are not started by the run's own process are other programs, and a loop on every
    processor leaves none idle. If the second attempt fails, so has the repetition."""
    loop = "import os; os.nice(19)\nwhile True: pass"
    loops = [subprocess.Popen([sys.executable, "-S", "-c", loop]) for _ in range(processors())]
    argv = compare("--strategies", "ddp,bsp", "--repeat", "1")
    argv.remove("--keep-disturbed")
    argv[-1:] = ["--args", "ddp=--dwell", "--args", "bsp=--fail-again", "train.py"]
    try:
        code = cli.main(argv)
    finally:
        for one in loops:
            one.kill()
            one.wait()
    dwells, fails = [["0", "--dwell"]] * 2, [["0", "--fail-again"]] * 2
    assert started() == [["0"], ["0"], *dwells, *fails]
    for label in ("ddp", "bsp"):
        assert (here / "out" / label / "disturbed-rep0").is_dir()
    summary, found = read("out/summary.json"), rows()
    assert (code, found["bsp"]["repetitions"], found["bsp"]["failed"]) == (1, 0, 1)
    assert summary["profile_disturbed"]["foreign"] > 0.3
    row = found["ddp"]
    assert (row["repetitions"], row["failed"], row["repeated"]) == (1, 0, 1)
    assert row["disturbed"][0]["foreign"] > 0.3
    assert "disturbed" in (here / "out" / "report.html").read_text()
