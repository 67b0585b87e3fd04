"""The command line: help, exit codes, refusals, JSON contracts, quick imports."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from cases.strategy_lists import ALL, STRATEGIES

from offbeat import Plan, Profile, __version__
from offbeat.cli import entry as cli
from offbeat.cli import texts
from offbeat.core.profile.elsewhere import extrapolate
from offbeat.core.strategy.interface import setting_fields
from offbeat.profile import Bucket, Link
from offbeat.sim import predict
from offbeat.strategies import LocalSGD, OuterSGD

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("here")]

PROFILE = Profile(
    tuple(Bucket(f"h.{i}", 0.001, 0.002, 10**6, communication_s={"net": 0.02}) for i in range(6)),
    (Link("net", 1e-4, 1.25e8),),
    world_size=16,
)
COMMANDS = [
    *("run", "profile", "plan", "simulate", "compare", "demo", "report", "watch", "strategies"),
    *("check", "advise", "rehearse"),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own working directory with a profile and a script."""
    monkeypatch.chdir(tmp_path)
    PROFILE.save("profile.json")
    (tmp_path / "train.py").write_text("")
    return tmp_path


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that wrong use leaves on stderr."""
    assert cli.main(argv) == 2, argv
    printed = capsys.readouterr()
    assert printed.out == "", argv
    assert printed.err.count("\n") == 1, argv
    assert printed.err.startswith("offbeat: ")
    return printed.err


def json_of(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    """What a command prints with --json; nothing else may be on stdout."""
    assert cli.main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# --- help ----------------------------------------------------------------------------------------


def test_help_lists_every_command_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ((), ("--help",)):
        assert cli.main(argv) == 0
        text = capsys.readouterr().out
        assert [command for command in COMMANDS if f" {command} " not in text] == []
    for command in COMMANDS:
        assert cli.main([command, "--help"]) == 0
        text = capsys.readouterr().out
        assert f"offbeat {command}" in text
        assert text.count("\n") <= 48
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def test_strategies_are_listed_and_explained_with_each_setting(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = json_of(capsys, "strategies")
    assert [row["name"] for row in rows] == list(ALL)
    assert cli.main(["strategies"]) == 0
    text = capsys.readouterr().out
    for name, cls in ALL.items():
        assert name in text
        assert cls.citation in text
        told = json_of(capsys, "strategies", name)
        known = {field.name: field.default for field in setting_fields(cls)}
        assert {*told["settings"]} == {*told["meanings"]} == {*told["values"]} == {*known}
        assert cli.main(["strategies", name]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 100
        for setting, default in known.items():
            assert any(f" {setting}={default}" in line for line in lines), (name, setting)


# --- refusals ------------------------------------------------------------------------------------

# command, and the parameter or value that its refusal names
REFUSED = [
    ("comprae", '"compare"'),
    ("strategies dremddp", "'dreamddp'"),
    ("plan --profile profile.json --strategy dreamdp", "'dreamddp'"),
    ("plan --profile none.json --strategy ddp", "none.json"),
    ("plan --profile broken.json --strategy ddp", "broken.json"),
    ("plan --profile list.json --strategy ddp", "list.json"),
    ("plan --profile empty.json --strategy ddp", "schema"),
    ("plan --profile profile.json --strategy ddp -o full.json", "full.json"),
    ("simulate --profile profile.json", "--plan"),
    ("simulate --profile profile.json --plan plan.json --strategy ddp", "--plan"),
    ("simulate --profile profile.json --plan plan.json --set period=3", "--plan"),
    ("simulate --profile profile.json --plan plan.json --period 5", "--period"),
    ("simulate --profile profile.json --plan none.json", "none.json"),
    ("simulate --profile profile.json --plan profile.json", "profile.json"),
    ("simulate --profile profile.json --strategy ddp --iterations 0", "iterations (0)"),
    ("simulate --profile profile.json --strategy ddp --votes .5", "votes (.5)"),
    ("simulate --profile profile.json --strategy selsync --votes 2", "votes['sync'] (2.0)"),
    ("simulate --profile profile.json --strategy selsync --votes x.json", "x.json"),
    ("simulate --profile profile.json --strategy bsp --servers 1.5", "--servers"),
    ("simulate --profile profile.json --strategy bsp --period 5", "period (5)"),
    ("simulate --profile profile.json --strategy dreamddp --period 5,0", "period (0)"),
    ("simulate --profile profile.json --strategy dreamddp --period 5,x", "period ('x')"),
    ("simulate --profile profile.json --strategy bsp --rate 5foo", "rate ('5foo')"),
    ("simulate --profile profile.json --strategy bsp --rate unlimited", "rate ('unlimited')"),
    ("simulate --profile profile.json --strategy bsp --hosts 4,1", "hosts (1)"),
    ("simulate --profile profile.json --strategy bsp --jitter .1,-1", "jitter ('-1')"),
    ("run --hots 3 train.py", "--hosts"),
    ("run --hosts 0 train.py", "--hosts (0)"),
    ("run --hosts 2.5 train.py", "--hosts"),
    ("run --servers -1 train.py", "--servers (-1)"),
    ("run --rate 10foo train.py", "--rate ('10foo')"),
    ("run --rate=-5mbit train.py", "--rate ('-5mbit')"),
    ("run --rate --hosts 4 train.py", "--rate"),
    ("run --pace -2 train.py", "pace (-2)"),
    ("run --wait -1 train.py", "--wait ('-1')"),
    ("run --timeout 0 train.py", "--timeout ('0')"),
    ("run --min-bucket 0 train.py", "--min-bucket (0)"),
    ("run --secret s3cret train.py", "--secret (s3cret)"),
    ("run --lab sea train.py", "--lab"),
    ("run --strategy wfpb train.py", "'wfbp'"),
    ("run -m nothing.here", "'nothing.here'"),
    ("run -m", "-m"),
    ("compare -m json", "'json'"),
    ("run --cluster x.toml train.py", "x.toml"),
    ("run --cluster profile.json --hosts 2 train.py", "--cluster"),
    ("run nothing.py --steps 3", "nothing.py"),
    ("run --profile profile.json --hosts 1 train.py", "world_size (16)"),
    ("compare", "SCRIPT"),
    ("demo --iterations 5", "--iterations (5)"),
    ("report nowhere", "nowhere"),
]


def test_wrong_use_exits_2_with_one_line_that_names_the_parameter(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("broken", "{"), ("list", "[]"), ("empty", "{}")):
        (here / f"{name}.json").write_text(text)
    (here / "full.json").symlink_to("/dev/full")
    plan = ["plan", "--profile", "profile.json", "--strategy", "bsp", "-o", "plan.json"]
    assert cli.main(plan) == 0
    capsys.readouterr()
    for argv, parameter in REFUSED:
        assert parameter in refusal(capsys, *argv.split()), argv
    assert not (here / "runs").exists()
    # A plan that cannot be executed is shown, with an arrow at the transfer.
    plan = json.loads((here / "plan.json").read_text())
    plan["transfers"][0]["before"] = "grad(1)"
    (here / "plan.json").write_text(json.dumps(plan))
    assert cli.main(["simulate", "--profile", "profile.json", "--plan", "plan.json"]) == 2
    assert "\n-> " in capsys.readouterr().err


# --- planning and simulating ---------------------------------------------------------------------


def test_a_plan_is_printed_written_and_simulated(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, settings = ["--profile", "profile.json"], ["--strategy", "dreamddp:period=3"]
    assert cli.main(["plan", *profile, *settings, "-o", "plan.json"]) == 0
    plan = Plan.from_dict(json.loads((here / "plan.json").read_text()))
    assert capsys.readouterr().out.startswith(f"{plan}\n")
    data = json_of(capsys, "plan", *profile, "--strategy", "dreamddp", "--set", "period=3")
    assert Plan.from_dict(data) == plan
    facts = {name: value for name, value, _ in data["facts"]}
    assert {b for layer_set in facts["sets"] for b in layer_set} == set(range(6))
    assert len(facts["sets"]) == len(facts["fill"]) == data["period"] == 3
    one = json_of(capsys, "simulate", *profile, *settings)
    two = json_of(capsys, "simulate", *profile, "--plan", "plan.json")
    for name in ("iteration_s", "bound_s", "exposed_s"):
        assert one[name] == pytest.approx(two[name])
    assert one["bound_s"] <= one["iteration_s"]
    assert one["strategy"] == "dreamddp(period=3)"
    # F + max(B, C / H) with C in one message, which has one latency
    assert one["bound_s"] == pytest.approx(0.006 + (6 * 0.02 - 5 * 1e-4) / 3)
    bsp = json_of(capsys, "simulate", *profile, "--strategy", "bsp", "--iterations", "4")
    assert f"{bsp['iteration_s']:.6g}" == "0.1375"


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_the_variant_that_a_script_needs_is_noted(
    here: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for usage in ("changes", "scales"):
        data = {**PROFILE.to_dict(), "usage": {usage: True}}
        (here / f"{usage}.json").write_text(json.dumps(data))
    for profile, strategy, note in (
        ("profile", "p3", ""),
        ("changes", "p3", "p3:update=at_step"),
        ("scales", "deft", "GradScaler"),
    ):
        assert cli.main([command, "--profile", f"{profile}.json", "--strategy", strategy]) == 0
        printed = capsys.readouterr().err
        assert note in printed
        assert bool(printed) == bool(note)


def test_simulate_over_a_product_is_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["simulate", "--profile", "profile.json", "--strategy", "dreamddp", "--iterations", "4"]
    axes = ["--rate", "10mbit,0.1gbit", "--hosts", "4,32", "--jitter", ".1", "--period", "5,10"]
    assert cli.main([*argv, *axes]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][1:5] == ["period", "hosts", "rate", "jitter"]
    assert cli.main([*argv, *axes, "--csv"]) == 0
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [list(row.values()) for row in table] == lines[1:]
    by_place = {(r["period"], r["hosts"], r["rate"]): float(r["iteration_s"]) for r in table}
    assert len(by_place) == len(table) == 8
    assert {r["jitter"] for r in table} == {"0.1"}
    for period in ("5", "10"):
        for hosts in ("4", "32"):
            assert by_place[period, hosts, "100mbit"] < by_place[period, hosts, "10mbit"]
    found = json_of(capsys, *argv, *axes)
    assert [f"{row['prediction']['iteration_s']:.6g}" for row in found] == [
        row["iteration_s"] for row in table
    ]


def test_strategies_and_single_values_of_a_product(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["simulate", "--profile", "profile.json", "--strategy"]
    one = json_of(capsys, *argv, "local-sgd", "--period", "7", "--rate", "1gbit", "--hosts", "16")
    assert one["strategy"] == "local-sgd(period=7)"
    there = extrapolate(Profile.load("profile.json"), rate_bps=1e9)
    assert one["iteration_s"] == predict(LocalSGD(period=7), there).iteration_s
    assert cli.main([*argv, "bsp,local-sgd", "--period", "2,4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        ["bsp", "-"],
        ["local-sgd(period=2)", "2"],
        ["local-sgd(period=4)", "4"],
    ]
    assert cli.main([*argv, "bsp", "--csv"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header == "strategy,period,hosts,rate,jitter,iteration_s,bound_s,exposed_s"
    assert row.startswith("bsp,,16,,0,0.1")


# --- settings ------------------------------------------------------------------------------------

NUMBERS = {
    int: ("3", 3),
    float: ("0.25", 0.25),
    OuterSGD: ("0.8/0.5/plain", OuterSGD(0.8, 0.5, nesterov=False)),
    tuple[int, ...]: ("2/5", (2, 5)),
    tuple[float, ...]: ("1.5/2", (1.5, 2.0)),
    tuple[tuple[bool, ...], ...]: ("01/11", ((False, True), (True, True))),
}
TOGETHER = {  # settings that need each other
    "forward": {"backward": 2},
    "backward": {"forward": 2},
    "delay": {"due": "delayed"},
    "gain": {"due": "delayed"},
    "alpha": {"delay": 2},
    "wire": {"update": "at_step"},
}


def kinds_of(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def texts_of(kind: Any) -> list[tuple[str, Any]]:
    """(text, value) of what the documented type of a setting allows; one of all numbers."""
    if get_origin(kind) is Literal:
        return [(str(word), word) for word in get_args(kind)]
    if kind is NoneType:
        return [("none", None), ("None", None)]
    if kind is str:  # the codec of a wire
        return [(word, word) for word in ("none", "int4", "topk:0.01")]
    return [("true", True), ("False", False)] if kind is bool else [NUMBERS[kind]]


def test_the_announced_minutes_of_the_demo_follow_from_its_size(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "used").mkdir()
    (here / "used/run.json").touch()

    def minutes(*options: str) -> int:
        assert cli.main(["demo", *options, "--out", "used"]) == 2, "the folder is refused"
        return int(re.findall(r"(\d+) minutes", capsys.readouterr().out)[0])

    usual = minutes()
    assert 3 <= usual <= 4
    assert minutes("--hosts", "2") < usual < minutes("--iterations", "100")
    assert cli.main(["demo", "--help"]) == 0
    assert "at least 20" in capsys.readouterr().out


DOCUMENTED = [
    (name, field.name, text, value)
    for name, cls in STRATEGIES.items()
    for field in fields(cls)
    for kind in kinds_of(get_type_hints(cls)[field.name])
    for text, value in texts_of(kind)
]


def test_every_value_of_every_setting_can_be_given() -> None:
    for documented in DOCUMENTED:
        require_setting(*documented)


def require_setting(name: str, setting: str, text: str, value: Any) -> None:
    """Require that all forms of a command give a setting this value."""
    hints = get_type_hints(STRATEGIES[name])
    needed = {} if value is None else TOGETHER.get(setting, {})
    others = {key: other for key, other in needed.items() if allows(hints.get(key), other)}
    given = {setting: text, **{key: str(other) for key, other in others.items()}}
    pairs = [f"{key}={word}" for key, word in given.items()]
    expected = STRATEGIES[name](**{setting: value, **others})

    forms = (
        (":".join([name, *pairs]), []),
        (f"{name},bsp", pairs),
        (f"{name},bsp", [f"{name}.{pair}" for pair in pairs]),
    )
    made = [texts.strategy(name, pairs)]
    made += [texts.contestants(strategies, options)[0].strategy for strategies, options in forms]
    for strategy in made:
        assert strategy == expected, (setting, text)
        assert type(getattr(strategy, setting)) is type(value), (setting, text)


def allows(hint: Any, value: Any) -> bool:
    """Whether there is such a setting, with this choice if its values are choices."""
    return hint is not None and (get_origin(hint) is not Literal or value in get_args(hint))


# strategy with a setting, and what its refusal names
WRONG_SETTINGS = [
    ("dreamddp --set period=0", "period (0)"),
    ("dreamddp --set perod=3", "'period'"),
    ("dreamddp --set period", "'period'"),
    ("dreamddp --set fill=no", "fill ('no')"),
    ("dreamddp --set period=often", "period ('often')"),
    ("dreamddp --set period=none", "period ('none')"),
    ("ddp --set bucket_cap_mb=tune", "bucket_cap_mb ('tune')"),
    ("bytescheduler --set credit_elements=.5", "credit_elements ('.5')"),
    ("wfbp --set fusion=nine", "fusion ('nine')"),
    ("selsync --set vote_lag=2", "vote_lag ('2')"),
    ("selsync --set delta=nan", "delta (nan)"),
    ("selsync --set vote_lag=1 --set aggregate=gradients", "vote_lag (1)"),
    ("wfbp --set wire=int5", "wire ('int5')"),
    ("bsp --set wire=topk:0", "fraction (0)"),
    ("fedavg --set fraction=0", "fraction (0.0)"),
    ("local-sgd --set outer=0.7/1", "outer ('0.7/1')"),
    ("diloco --set outer=none", "outer ('none')"),
    ("deft --set outer=0.7/0.5", "outer"),
    ("fedavg --set samples=1/x", "samples ('1/x')"),
]


def test_values_that_a_setting_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, parameter in WRONG_SETTINGS:
        argv = ["plan", "--profile", "profile.json", "--strategy", *argv.split()]
        assert parameter in refusal(capsys, *argv), argv


def test_contestants_with_settings() -> None:
    chosen = texts.contestants(
        "ddp, ddp:bucket_cap_mb=0.5,local-sgd,dreamddp:period=8:fill=false,dreamddp",
        ["period=4", "dreamddp.solver=optimal"],
    )
    assert [(c.label, str(c.strategy)) for c in chosen] == [
        ("ddp", "ddp"),
        ("ddp-bucket_cap_mb=0.5", "ddp(bucket_cap_mb=0.5)"),
        ("local-sgd", "local-sgd(period=4)"),
        ("dreamddp-period=8-fill=false", "dreamddp(period=8, solver=optimal, fill=False)"),
        ("dreamddp", "dreamddp(period=4, solver=optimal)"),
    ]


# --- script arguments ----------------------------------------------------------------------------

ECHO = """
import os, sys
print(sys.argv[1:], os.environ.get("OFFBEAT_SECRET"), flush=True)
sys.exit(7)
"""


@pytest.mark.parametrize(
    ("own", "scripts"),
    [
        ("--hosts=1 --strategy dreamddp --set period=3", "--hosts 9 --out x --set y --help"),
        ("--hosts 1 --json", "-- --json -o a.json --version"),
        ("--seed -3 --hosts 1", "-x -5 plain --"),
    ],
)
def test_arguments_after_the_script_are_the_scripts(
    own: str, scripts: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "echo.py").write_text(ECHO)
    argv = ["run", "--lab", "none", *own.split(), "echo.py", *scripts.split()]
    assert cli.main(argv) == 1
    printed = capsys.readouterr()
    assert "code 7" in printed.err
    assert f"    {scripts.split()} None\n" in printed.err  # the end of rank 0's log


def test_a_module_is_run_as_python_does(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the folder that holds its package, with relative imports; nothing of it is imported by
    the launcher. The secret comes from a file: ranks see it in the variable, no file of the run
    holds it, and two secrets are refused."""
    monkeypatch.setenv("OFFBEAT_SECRET", "")  # so that it is as before after the test
    monkeypatch.delenv("OFFBEAT_SECRET")
    package = here / "package_of_mine" / "training"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("import os; assert os.environ['RANK']")
    (package / "__init__.py").write_text("")
    (package / "words.py").write_text("from sys import argv")
    (package / "echo.py").write_text("from .words import argv\n" + ECHO)
    (here / "secret.txt").write_text("s3cret\n")
    (here / "secret.txt").chmod(0o640)
    argv = ["run", "--lab", "none", "--hosts", "1", "--secret", "secret.txt"]
    module = ["-m", "package_of_mine.training.echo"]
    assert cli.main([*argv, *module, "--steps", "-m"]) == 1
    err = capsys.readouterr().err
    assert "    ['--steps', '-m'] s3cret\n" in err
    assert "chmod 600 secret.txt" in err
    [run] = (here / "runs").iterdir()
    assert run.name.endswith("-package_of_mine.training.echo")
    assert "s3cret" not in (run / "run.json").read_text()
    monkeypatch.setenv("OFFBEAT_SECRET", "another")
    assert "OFFBEAT_SECRET" in refusal(capsys, *argv, "train.py")


SCRIPT_POSITIONS = [
    ("profile -o p.json t.py -x -o q.json", "profile -o p.json -- t.py -x -o q.json"),
    ("run --hosts 2 -- t.py --help", "run --hosts 2 -- t.py --help"),
    ("run --hosts 2 -m a.b --hosts 3", "run --hosts 2 -- -m a.b --hosts 3"),
    ("join 1.2.3.4:5 -m a.b", "join -- 1.2.3.4:5 -m a.b"),
    ("advise --hosts 4 --json t.py --rate 20mbit", "advise --hosts 4 --json -- t.py --rate 20mbit"),
    ("rehearse -m a.b --ranks 8 -- --rate 3", "rehearse -- -m a.b --ranks 8 -- --rate 3"),
    ("advise -- t.py --hosts 4", "advise -- t.py --hosts 4"),
    ("advise --profile p.json", "advise --profile p.json"),
]


def test_where_the_script_begins() -> None:
    for argv, expected in SCRIPT_POSITIONS:
        assert cli.mark_script(argv.split()) == expected.split()


# --- imports -------------------------------------------------------------------------------------

WITHOUT_TORCH = """
import re
import sys
from offbeat.cli import main
assert main(["--help"]) == 0
assert not {{"offbeat.lab", "offbeat.experiments.report"}} & {{*sys.modules}}
for argv in {commands!r}:
    assert main(argv) == 0, argv
assert "torch" not in sys.modules
"""


def test_planning_does_not_import_torch_and_the_package_is_a_command() -> None:
    arguments = ["--profile", "profile.json", "--strategy", "dreamddp"]
    commands = [["plan", *arguments], ["simulate", *arguments], ["strategies"]]
    code = WITHOUT_TORCH.format(commands=commands)
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=60)
    argv = [sys.executable, "-m", "offbeat", "plan", "--profile", "no.json", "--strategy", "ddp"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "no.json" in ended.stderr
