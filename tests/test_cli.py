"""The command line: help, exit codes, error lines, JSON contracts, quick imports."""

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
from support.strategy_lists import ALL, STRATEGIES

from offbeat import __version__
from offbeat.cli import entry as cli
from offbeat.cli import texts
from offbeat.core.profile.elsewhere import extrapolate
from offbeat.plan import Plan
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import predict
from offbeat.strategies import LocalSGD, OuterSGD

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("here")]

BUCKET = {
    "forward_s": 0.001,
    "backward_s": 0.002,
    "size_bytes": 1000000,
    "communication_s": {"net": 0.02},
}
PROFILE = {
    "schema": 1,
    "world_size": 16,
    "update_s": 0.0,
    "links": [{"name": "net", "latency_s": 1e-4, "bytes_per_s": 1.25e8}],
    "buckets": [{"name": f"h.{i}", **BUCKET} for i in range(6)],
}
COMMANDS = [
    "run",
    "profile",
    "plan",
    "simulate",
    "compare",
    "demo",
    "report",
    "watch",
    "strategies",
    "graph",
    "doctor",
    "check",
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own working directory with a profile and a script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE))
    (tmp_path / "train.py").write_text("")
    return tmp_path


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that wrong use leaves on stderr."""
    assert cli.main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("offbeat: ")
    return printed.err


def json_of(capsys: pytest.CaptureFixture[str], *argv: str):
    """What a command prints with --json; nothing else may be on stdout."""
    assert cli.main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# --- help ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [(), ("--help",)])
def test_help_lists_every_command(argv, capsys):
    assert cli.main(argv) == 0
    text = capsys.readouterr().out
    assert all(f" {command} " in text for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_is_short_and_has_an_example(command, capsys):
    assert cli.main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"Example: offbeat {command}" in text
    assert text.count("\n") <= 48


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def test_strategies_are_listed_with_settings_and_sources(capsys):
    assert cli.main(["strategies"]) == 0
    text = capsys.readouterr().out
    for name, cls in ALL.items():
        assert name in text
        assert cls.citation in text
    rows = json_of(capsys, "strategies")
    assert [row["name"] for row in rows] == list(ALL)
    assert next(r for r in rows if r["name"] == "dreamddp")["settings"]["period"] == 5


@pytest.mark.parametrize("name", ALL)
def test_a_strategy_is_explained_with_each_setting(name, capsys):
    assert cli.main(["strategies", name]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    lines = lines[lines.index("Settings with their defaults (change one with --set NAME=VALUE):") :]
    for field in fields(ALL[name]):
        (at,) = [i for i, line in enumerate(lines) if line.startswith(f"    {field.name}=")]
        assert lines[at].startswith(f"    {field.name}={field.default}  (")
        assert lines[at + 1].startswith("        ")
    told = json_of(capsys, "strategies", name)
    assert set(told["meanings"]) == set(told["values"]) == set(told["settings"])


def test_an_unknown_strategy_is_not_explained(capsys):
    assert "did you mean 'dreamddp'" in error_of(capsys, "strategies", "dremddp")


# --- wrong use -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("plan --strategy dreamddp --set period=0", "period (0) must be an integer of at least 1"),
        ("plan --strategy dreamdp", "did you mean 'dreamddp'?"),
        ("plan --strategy dreamddp --set perod=3", "did you mean 'period'?"),
        ("plan --strategy dreamddp --set period", "setting ('period') must read NAME=VALUE"),
        ("simulate", "either --plan FILE or --strategy NAME"),
        ("simulate --plan plan.json --strategy ddp", "either --plan FILE or --strategy NAME"),
        ("simulate --plan plan.json", "file (plan.json) must exist; write one with `offbeat plan"),
        (
            "simulate --plan profile.json",
            "profile.json is no plan (schema (1) of the plan must be 2",
        ),
        ("simulate --strategy ddp --iterations 0", "iterations (0) must be at least 1"),
        ("simulate --strategy ddp --votes .5", "votes (.5) must be left out: there are none"),
        ("simulate --strategy selsync --votes 2", "votes['sync'] (2.0) must lie between 0 and 1"),
        ("simulate --strategy selsync --votes x.json", "file (x.json) must exist; give a share"),
        ("simulate --strategy selsync --votes profile.json", "the record of a run with votes"),
    ],
)
def test_wrong_planning_is_one_line(argv, words, capsys):
    command, *rest = argv.split()
    assert words in error_of(capsys, command, "--profile", "profile.json", *rest)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "file (other.json) must exist; measure one with `offbeat profile`"),
        ("{", "other.json is not JSON"),
        ("[]", "other.json: a profile must be a JSON object"),
        ("{}", "other.json: schema (None) of the profile must be 1"),
    ],
)
def test_a_profile_that_cannot_be_read(text, words, here, capsys):
    if text is not None:
        (here / "other.json").write_text(text)
    line = error_of(capsys, "plan", "--profile", "other.json", "--strategy", "ddp")
    assert words in line


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("comprae", 'Did you mean "compare"?'),
        ("compare", "SCRIPT requires an argument"),
        ("run --hots 3 train.py", "Did you mean --hosts?"),
        ("run --hosts many train.py", "--hosts"),
        ("run --hosts 0 train.py", "--hosts (0) must be from 1 to 250"),
        ("run --hosts -2 train.py", "--hosts (-2) must be from 1 to 250"),
        ("run --hosts 2.5 train.py", "must be a whole number"),
        ("simulate --profile profile.json --strategy bsp --servers 1.5", "must be a whole number"),
        ("graph --workers 4.4", "must be a whole number"),
        ("graph --seed 0.5", "must be a whole number"),
        ("run --servers -1 train.py", "--servers (-1) must be at least 0"),
        ("run --rate 10foo train.py", "--rate ('10foo') has the unknown unit 'foo'"),
        ("run --rate -5mbit train.py", "--rate ('-5mbit') must be from 1kbit to 32gbit; write"),
        ("run --rate=-5mbit train.py", "--rate ('-5mbit') must be from 1kbit to 32gbit; write"),
        ("run --rate 5 train.py", "--rate ('5') must be from 1kbit to 32gbit; write bit, kbit"),
        ("run --rate fast train.py", "--rate ('fast') is not a number with a unit; write"),
        ("run --rate --hosts 4 train.py", "--rate ('--hosts') is not a number with a unit"),
        ("run --pace -2 train.py", "pace (-2) must be at least 1"),
        ("run --wait -1 train.py", "--wait (-1) must be above 0"),
        ("run --min-bucket 0 train.py", "--min-bucket (0) must be at least 1"),
        ("run --secret s3cret train.py", "--secret (s3cret) must be a file"),
        ("run -m nothing.here", "module ('nothing.here') must exist"),
        ("run -m", "-m must be followed by a module"),
        ("compare -m json", "module ('json') is a package and must have a __main__.py"),
        ("profile -m json.tool.x", "module ('json.tool.x') must exist"),
        ("run -m train.py", "module ('train.py') must exist"),
        ("run --cluster x.toml train.py", "file (x.toml) must exist"),
        ("run --cluster profile.json --hosts 2 train.py", "--cluster replaces --hosts"),
        ("run --lab sea train.py", '"auto", "none"'),
        ("run --strategy wfpb train.py", "did you mean 'wfbp'?"),
        ("run --timeout 0 train.py", "--timeout (0) must be above 0"),
        ("run nothing.py --steps 3", "script ('nothing.py --steps 3') must begin with an existing"),
        (
            "run --profile profile.json --hosts 1 train.py",
            "world_size (16) of profile.json must be",
        ),
        ("compare --repeat 0 train.py", "--repeat (0) must be at least 1"),
        ("compare --strategies ddp,dremddp train.py", "did you mean 'dreamddp'?"),
        ("compare --strategies ddp,ddp train.py", "contestant ('ddp') must be unique"),
        ("compare --set dreamdp.period=2 train.py", "did you mean 'dreamddp'?"),
        ("compare --set perod=2 train.py", "did you mean 'period'?"),
        ("compare --out . train.py", "run directory (.) must be new or empty"),
        ("report nowhere", "run directory (nowhere) must hold run.json"),
    ],
)
def test_wrong_running_is_one_line(argv, words, here, capsys):
    assert words in error_of(capsys, *argv.split())
    assert not (here / "runs").exists()


def test_a_wrong_plan_is_shown_with_an_arrow(here, capsys):
    arguments = ["--profile", "profile.json"]
    assert cli.main(["plan", *arguments, "--strategy", "bsp", "-o", "plan.json"]) == 0
    plan = json.loads((here / "plan.json").read_text())
    plan["transfers"][0]["before"] = "grad(1)"
    (here / "plan.json").write_text(json.dumps(plan))
    capsys.readouterr()
    assert cli.main(["simulate", *arguments, "--plan", "plan.json"]) == 2
    assert "\n-> grad[0:6]" in capsys.readouterr().err


# --- planning and simulating ---------------------------------------------------------------------


def test_plan_text_and_file(here, capsys):
    argv = ["plan", "--profile", "profile.json", "--strategy", "dreamddp", "--set", "period=3"]
    assert cli.main([*argv, "-o", "plan.json"]) == 0
    plan = Plan.from_dict(json.loads((here / "plan.json").read_text()))
    assert plan.period == 3
    lines = capsys.readouterr().out.removeprefix(f"{plan}\n").splitlines()
    assert [line.partition(":")[0] for line in lines] == ["sets", "fill"]


def test_full_disk_names_the_file(here, capsys):
    (here / "plan.json").symlink_to("/dev/full")
    arguments = ["--profile", "profile.json", "--strategy", "dreamddp", "-o", "plan.json"]
    assert error_of(capsys, "plan", *arguments).startswith("offbeat: plan.json: No space left")


def test_plan_json_has_the_sets_among_the_facts(capsys):
    argv = ["plan", "--profile", "profile.json", "--strategy", "dreamddp", "--set", "period=3"]
    data = json_of(capsys, *argv)
    facts = {name: value for name, value, _ in data["facts"]}
    assert {b for layer_set in facts["sets"] for b in layer_set} == set(range(6))
    assert len(facts["sets"]) == len(facts["fill"]) == data["period"] == 3
    assert Plan.from_dict(data).strategy == "dreamddp"
    without = json_of(capsys, "plan", "--profile", "profile.json", "--strategy", "ddp")
    assert "sets" not in [name for name, *_ in without["facts"]]


def test_simulate_agrees_for_a_strategy_and_its_plan(capsys):
    settings = ["--strategy", "dreamddp", "--set", "period=3"]
    assert cli.main(["plan", "--profile", "profile.json", *settings, "-o", "plan.json"]) == 0
    capsys.readouterr()
    one = json_of(capsys, "simulate", "--profile", "profile.json", *settings)
    two = json_of(capsys, "simulate", "--profile", "profile.json", "--plan", "plan.json")
    for name in ("iteration_s", "bound_s", "exposed_s"):
        assert one[name] == pytest.approx(two[name])
    assert one["bound_s"] <= one["iteration_s"]
    assert one["strategy"] == "dreamddp(period=3)"
    # F + max(B, C / H) with C in one message, which has one latency
    assert one["bound_s"] == pytest.approx(0.006 + (6 * 0.02 - 5 * 1e-4) / 3)


def test_simulate_text(capsys):
    argv = ["simulate", "--profile", "profile.json", "--strategy", "bsp", "--iterations", "4"]
    assert cli.main(argv) == 0
    text = capsys.readouterr().out
    assert "bsp, seconds per iteration: 0.1375" in text
    assert "exposed communication: 0.1195" in text


def test_a_plan_has_no_settings(capsys):
    where = ["--profile", "profile.json", "--strategy", "ddp", "-o", "plan.json"]
    assert cli.main(["plan", *where]) == 0
    capsys.readouterr()
    for option in (["--set", "period=3"], ["--servers", "3"]):
        argv = ["simulate", "--profile", "profile.json", "--plan", "plan.json", *option]
        assert "must be left out with --plan" in error_of(capsys, *argv)


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_the_variant_that_a_script_needs_is_named(here, command, capsys):
    (here / "clips.json").write_text(json.dumps({**PROFILE, "usage": {"changes": True}}))
    (here / "scales.json").write_text(json.dumps({**PROFILE, "usage": {"scales": True}}))
    for profile, words in (
        ("profile.json", ""),
        ("clips.json", "note: a job of this script runs p3:update=at_step instead of p3\n"),
    ):
        assert cli.main([command, "--profile", profile, "--strategy", "p3"]) == 0
        assert capsys.readouterr().err == words
    assert cli.main([command, "--profile", "scales.json", "--strategy", "deft"]) == 0
    assert "note: the script uses a GradScaler with deft" in capsys.readouterr().err


def test_simulate_over_a_product_is_one_table(capsys):
    argv = ["simulate", "--profile", "profile.json", "--strategy", "dreamddp", "--iterations", "4"]
    axes = ["--rate", "10mbit,0.1gbit", "--hosts", "4,32", "--jitter", ".1", "--period", "5,10"]
    assert cli.main([*argv, *axes]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    columns, rows = lines[0], lines[1:]
    told = [(row[1], row[2], row[3], row[4]) for row in rows]
    assert columns[1:5] == ["period", "hosts", "rate", "jitter"]
    assert sorted(told) == sorted(
        (period, hosts, rate, "0.1")
        for period in ("5", "10")
        for hosts in ("4", "32")
        for rate in ("10mbit", "100mbit")
    )
    assert cli.main([*argv, *axes, "--csv"]) == 0
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [list(row.values()) for row in table] == rows
    by_place = {(r["period"], r["hosts"], r["rate"]): float(r["iteration_s"]) for r in table}
    for period in ("5", "10"):
        for hosts in ("4", "32"):
            assert by_place[period, hosts, "100mbit"] < by_place[period, hosts, "10mbit"]
    found = json_of(capsys, *argv, *axes)
    assert [f"{row['prediction']['iteration_s']:.6g}" for row in found] == [
        row["iteration_s"] for row in table
    ]


def test_single_values_are_one_prediction_elsewhere(capsys):
    argv = ["simulate", "--profile", "profile.json", "--strategy", "local-sgd"]
    one = json_of(capsys, *argv, "--period", "7", "--rate", "1gbit", "--hosts", "16")
    assert one["strategy"] == "local-sgd(period=7)"
    profile = extrapolate(Profile.load("profile.json"), rate_bps=1e9)
    assert one["iteration_s"] == predict(LocalSGD(period=7), profile).iteration_s


def test_simulate_compares_strategies_and_prints_one_row_as_csv(capsys):
    argv = ["simulate", "--profile", "profile.json", "--strategy"]
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


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--strategy bsp --period 5", "period (5) is no setting of bsp; leave it out"),
        ("--strategy dreamddp --period 5,0", "period (0) must be an integer of at least 1"),
        ("--strategy dreamddp --period 5,x", "period ('x') must be an integer"),
        ("--plan plan.json --period 5", "period (5) is the plan's already; give --strategy NAME"),
        ("--strategy bsp --rate 5foo", "rate ('5foo') has the unknown unit 'foo'"),
        ("--strategy bsp --rate unlimited", "rate ('unlimited') must be a number with a unit"),
        ("--strategy bsp --hosts 4,1", "hosts ('1') must be integers of at least 2"),
        ("--strategy bsp --jitter .1,-1", "jitter ('-1') must be numbers from 0 to 2"),
        ("--strategy bsp --jitter nan", "jitter ('nan') must be numbers from 0 to 2"),
    ],
)
def test_wrong_products_are_one_line(argv, words, capsys):
    assert words in error_of(capsys, "simulate", "--profile", "profile.json", *argv.split())


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
    "epoch_share": {"steps_per_epoch": 8},
    "steps_per_epoch": {"epoch_share": 0.5},
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


DOCUMENTED = [
    (name, field.name, text, value)
    for name, cls in STRATEGIES.items()
    for field in fields(cls)
    for kind in kinds_of(get_type_hints(cls)[field.name])
    for text, value in texts_of(kind)
]


def shape_of(text: str) -> str:
    """The text with one letter for each word and one digit for each number."""
    return re.sub(r"[a-z]+", "a", re.sub(r"\d+", "0", text.lower()))


# Options of the command line are texts, whatever the setting. One setting per shape of a text is
# enough for complete commands, whose parsing takes most of the time.
COMMANDED = {shape_of(text): (name, setting, text) for name, setting, text, _ in DOCUMENTED}


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_value_of_every_setting_can_be_given(name):
    for owner, *what in DOCUMENTED:
        if owner == name:
            require_setting(name, *what)


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
    if COMMANDED[shape_of(text)] == (name, setting, text):
        one = parsed("plan", "--profile", "p.json", "--strategy", name, *set_options(pairs))
        assert (one["strategy"], one["set_"]) == (name, pairs)
        for strategies, options in forms:
            many = parsed("compare", "--strategies", strategies, *set_options(options), "train.py")
            assert (many["strategies"], many.get("set_") or []) == (strategies, options)
    made = [texts.strategy(name, pairs)]
    made += [texts.contestants(strategies, options)[0].strategy for strategies, options in forms]
    for strategy in made:
        assert strategy == expected, (setting, text)
        assert type(getattr(strategy, setting)) is type(value), (setting, text)


def allows(hint: Any, value: Any) -> bool:
    """Whether there is such a setting, with this choice if its values are choices."""
    return hint is not None and (get_origin(hint) is not Literal or value in get_args(hint))


def set_options(pairs: list[str]) -> list[str]:
    return [word for pair in pairs for word in ("--set", pair)]


def parsed(*argv: str) -> dict[str, Any]:
    """Arguments of a command as the command line makes them."""
    _, bound, *_ = cli.app.parse_args(cli.mark_script(list(argv)), exit_on_error=False)
    return bound.arguments


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("dreamddp --set fill=no", "fill ('no') must be one of auto, true, false"),
        ("dreamddp --set period=often", "period ('often') must be an integer"),
        ("dreamddp --set period=none", "period ('none') must be an integer"),
        ("ddp --set bucket_cap_mb=tune", "bucket_cap_mb ('tune') must be tuned or none or a num"),
        ("bytescheduler --set credit_elements=.5", "credit_elements ('.5') must be none or an in"),
        ("wfbp --set fusion=nine", "fusion ('nine') must be one of none, ddp, mg-wfbp, optimal"),
        ("wfbp --set fusion=None", "did you mean 'none'?"),
        ("selsync --set vote_lag=2", "vote_lag ('2') must be one of 0, 1"),
        ("selsync --set delta=nan", "delta (nan) must be a number of at least 0"),
        ("selsync --set vote_lag=1 --set aggregate=gradients", "vote_lag (1) must be 0 with aggr"),
        ("wfbp --set wire=int5", "wire ('int5') must be one of none, bf16"),
        ("bsp --set wire=topk:0", "fraction (0) of wire 'topk' must be above 0"),
        ("fedavg --set fraction=0", "fraction (0.0) must lie above 0"),
        ("local-sgd --set outer=0.7/1", "outer ('0.7/1') must be none or LR/MOMENTUM with LR abo"),
        ("diloco --set outer=none", "outer ('none') must be LR/MOMENTUM"),
        ("deft --set outer=0.7/0.5", "outer must be left out with deft: outer optimizers step on"),
        ("fedavg --set samples=1/x", "samples ('1/x') must be none or numbers with / between"),
    ],
)
def test_values_that_a_setting_does_not_have(argv, words, capsys):
    line = error_of(capsys, "plan", "--profile", "profile.json", "--strategy", *argv.split())
    assert words in line


def test_contestants_with_settings():
    chosen = texts.contestants(
        "ddp, ddp:bucket_cap_mb=0.5,local-sgd,dreamddp:period=8:fill=false,dreamddp",
        ["period=4", "dreamddp.solver=optimal"],
    )
    assert [c.label for c in chosen] == [
        "ddp",
        "ddp-bucket_cap_mb=0.5",
        "local-sgd",
        "dreamddp-period=8-fill=false",
        "dreamddp",
    ]
    assert [str(c.strategy) for c in chosen] == [
        "ddp",
        "ddp(bucket_cap_mb=0.5)",
        "local-sgd(period=4)",
        "dreamddp(period=8, solver=optimal, fill=False)",
        "dreamddp(period=4, solver=optimal)",
    ]


# --- script arguments ----------------------------------------------------------------------------

ECHO = """
import sys
print(sys.argv[1:], flush=True)
sys.exit(7)
"""


@pytest.mark.parametrize(
    ("own", "scripts"),
    [
        ("--hosts 1", "--steps 5 --help"),
        ("--hosts=1 --strategy dreamddp --set period=3", "--hosts 9 --out x --set y"),
        ("--hosts 1 --json", "-- --json -o a.json --version"),
        ("--seed -3 --hosts 1", "-x -5 plain --"),
    ],
)
def test_arguments_after_the_script_are_the_scripts(own, scripts, here, capsys):
    (here / "echo.py").write_text(ECHO)
    argv = ["run", "--lab", "none", *own.split(), "echo.py", *scripts.split()]
    assert cli.main(argv) == 1
    printed = capsys.readouterr()
    assert "exited with code 7" in printed.err
    assert f"    {scripts.split()}" in printed.err  # the end of rank 0's log


def test_a_module_is_run_as_python_does(here, capsys):
    """From the folder that holds its package, with relative imports; nothing of it is imported by
    the launcher."""
    package = here / "package_of_mine" / "training"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("import os; assert os.environ['RANK']")
    (package / "__init__.py").write_text("")
    (package / "words.py").write_text("from sys import argv")
    (package / "echo.py").write_text("from .words import argv\n" + ECHO)
    argv = ["run", "--lab", "none", "--hosts", "1", "-m", "package_of_mine.training.echo"]
    assert cli.main([*argv, "--steps", "-m"]) == 1
    printed = capsys.readouterr()
    assert "    ['--steps', '-m']" in printed.err
    [run] = (here / "runs").iterdir()
    assert run.name.endswith("-package_of_mine.training.echo")
    assert f"runs/{run.name}/STRATEGY/rep0/rankR.log" in printed.out


@pytest.mark.parametrize("given", [None, "s3cret", "another"])
def test_the_secret_comes_from_a_file(given, here, capsys, monkeypatch):
    """Ranks see it in the variable, no command line shows it, and two secrets are refused."""
    monkeypatch.setenv("OFFBEAT_SECRET", given or "")  # so that it is as before after the test
    if given is None:
        monkeypatch.delenv("OFFBEAT_SECRET")
    (here / "secret.txt").write_text("s3cret\n")
    (here / "secret.txt").chmod(0o640)
    (here / "say.py").write_text(
        "import os, sys; sys.exit('I know ' + os.environ['OFFBEAT_SECRET'])"
    )
    argv = ["run", "--lab", "none", "--hosts", "1", "--secret", "secret.txt", "say.py"]
    if given == "another":
        assert "are two secrets" in error_of(capsys, *argv)
        return
    assert cli.main(argv) == 1
    printed = capsys.readouterr()
    assert "    I know s3cret" in printed.err
    assert "chmod 600 secret.txt" in printed.err
    [run] = (here / "runs").iterdir()
    assert "s3cret" not in (run / "run.json").read_text()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("profile t.py -x -o p.json", "profile -o p.json -- t.py -x"),
        ("profile -o p.json t.py -o q.json", "profile -o p.json -- t.py -o q.json"),
        ("profile --output p.json t.py -o q.json", "profile --output p.json -- t.py -o q.json"),
        ("profile t.py -o model.pt", "profile -- t.py -o model.pt"),
        ("run t.py -o p.json", "run -- t.py -o p.json"),
        ("run --hosts 2 -- t.py --help", "run --hosts 2 -- t.py --help"),
        ("run --help", "run --help"),
        ("run --hosts 2 -m a.b --hosts 3", "run --hosts 2 -- -m a.b --hosts 3"),
        ("profile -m a.b -o p.json", "profile -o p.json -- -m a.b"),
        ("join 1.2.3.4:5 -m a.b", "join -- 1.2.3.4:5 -m a.b"),
        ("plan --profile p.json", "plan --profile p.json"),
        ("profile", "profile"),
        (
            "advise --hosts 4 t.py --lr 3 --rate 20mbit --rehearse --batch=8 x",
            "advise --hosts 4 --rate 20mbit --rehearse --batch=8 -- t.py --lr 3 x",
        ),
        ("rehearse -m a.b --ranks 8 -- --rate 3", "rehearse --ranks 8 -- -m a.b --rate 3"),
        ("advise --profile p.json", "advise --profile p.json"),
        ("advise -- t.py --hosts 4", "advise -- t.py --hosts 4"),
    ],
)
def test_where_the_script_begins(argv, expected):
    assert cli.mark_script(argv.split()) == expected.split()


def test_options_after_the_script_of_a_prediction_are_named():
    argv = ["advise", "--rate", "1", "t.py", "--hosts", "4", "--lr", "2"]
    assert cli.moved_options(argv) == ["--hosts"]
    for argv in ("advise --hosts 4 t.py", "advise t.py -- --hosts 4", "run t.py --hosts 4", ""):
        assert cli.moved_options(argv.split()) == []


# --- imports -------------------------------------------------------------------------------------

WITHOUT_TORCH = """
import sys
from offbeat.cli import main
for argv in {commands!r}:
    assert main(argv) == 0, argv
assert "torch" not in sys.modules
"""


def test_planning_does_not_import_torch():
    arguments = ["--profile", "profile.json", "--strategy", "dreamddp"]
    commands = [["--help"], ["plan", *arguments], ["simulate", *arguments], ["strategies"]]
    subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH.format(commands=commands)],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=60,
    )


def test_help_imports_neither_lab_nor_report():
    code = (
        "import sys, offbeat.cli as c; c.main(['--help']); "
        "found = {'torch', 'offbeat.lab', 'offbeat.experiments.report'} & {*sys.modules}; "
        "sys.exit(bool(found))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=60)


def test_as_a_module():
    argv = [sys.executable, "-m", "offbeat", "plan", "--profile", "no.json", "--strategy", "ddp"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("offbeat: file (no.json) must exist")


def test_a_plan_takes_the_text_of_a_strategy(tmp_path, capsys):
    path = tmp_path / "p.json"
    Profile((Bucket("b", 0.01, 0.02, 4000),), (Link("net", 0.001, 1e6),), world_size=2).save(path)
    printed = []
    for words in (["dreamddp:period=3"], ["dreamddp", "--set", "period=3"]):
        assert cli.main(["plan", "--profile", str(path), "--strategy", *words]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
