"""`offbeat advise`: invariants of its verdict, which predictions of other commands must confirm."""

from __future__ import annotations

import io
import json
import math
import re
import shlex
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest
import torch

from offbeat.cli import entry as cli
from offbeat.experiments.advice.selection import CHANGES
from offbeat.experiments.record.run_directory import load_rank
from offbeat.profile import Bucket, Link, Profile

TRAINING_BYTES = 4  # parameters, gradients and two moments, in sizes of the model


def profile_of(layers: int = 3, ranks: int = 4, ratio: float = 3.0) -> Profile:
    """Layers of unequal size; an average of all gradients takes `ratio` times the compute."""
    rng = Random(0)
    sizes = [rng.randrange(1, 40) * 25_000 for _ in range(layers)]
    backward_s = [rng.uniform(0.002, 0.03) for _ in sizes]
    compute_s = 1.5 * sum(backward_s)
    return Profile(
        tuple(
            Bucket(f"b{i}", s / 2, s, size, state_bytes=2 * size)
            for i, (s, size) in enumerate(zip(backward_s, sizes, strict=True))
        ),
        (Link("net", 1e-3, sum(sizes) / (ratio * compute_s)),),
        world_size=ranks,
        update_s=0.1 * compute_s,
        other_s=0.01 * compute_s,
    )


def json_of(*argv: str) -> Any:
    out = io.StringIO()
    with redirect_stdout(out):
        assert cli.main([argv[0], "--json", *argv[1:]]) == 0
    return json.loads(out.getvalue())


def advise(*argv: str) -> dict[str, Any]:
    """Advice without the strategies that average parameters, which are many."""
    fresh = () if "--max-staleness" in argv else ("--max-staleness", "0")
    found = json_of("advise", *fresh, *argv)
    return {**found, "rows": {row["method"]: row for row in found["methods"]}}


def simulate(strategy: str, *argv: str, profile: str = "p.json") -> float:
    return json_of("simulate", "--profile", profile, "--strategy", strategy, *argv)["iteration_s"]


def text_of(*argv: str) -> str:
    with redirect_stdout(io.StringIO()) as out:
        assert cli.main(["advise", *argv]) == 0
    return out.getvalue()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own working directory with profiles of four ranks and of one, and a script."""
    monkeypatch.chdir(tmp_path)
    profile_of().save("p.json")
    profile_of(ranks=1).save("one.json")
    (tmp_path / "t.py").write_text("")
    return tmp_path


# --- one verdict ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A verdict for 64,000 samples on four machines, with its profile."""
    folder = tmp_path_factory.mktemp("verdict")
    profile_of().save(folder / "p.json")
    asked = ["--samples", "64k", "--batch", "16", "--price", "3", "--device-memory", "24GB"]
    asked += ["--max-staleness", "1"]
    return {**advise("--profile", str(folder / "p.json"), *asked), "folder": folder}


def test_every_method_has_its_row_and_rows_are_sorted_by_time(found: dict[str, Any]) -> None:
    rows = found["methods"]
    assert {"one machine", "ddp", "zero-3", "ddp, fp16 hook", *found["compared"]} <= {
        *found["rows"]
    }
    times = [row["seconds"] for row in rows]
    assert times == sorted(times)
    assert found["best"] == rows[0]["method"]
    assert found["advised"] in found["compared"]
    assert {row["change"] for row in rows} <= {*CHANGES, "larger batch"}
    assert max(row["staleness"] for row in rows) <= 1
    for row in rows:
        low_s, high_s = row["iteration_range_s"]
        assert low_s <= row["iteration_s"] <= high_s
        assert row["fits"]
        assert row["changes"]
        parts = {**row["memory_bytes"]}
        total = parts.pop("total_bytes")
        assert total == sum(size or 0 for size in parts.values())


def test_hours_and_cost_follow_from_the_iteration(found: dict[str, Any]) -> None:
    for row in found["methods"]:
        batches = 64_000 / 16 / row["machines"]
        low_s, high_s = row["iteration_range_s"]
        assert row["seconds"] == pytest.approx(batches * row["iteration_s"])
        assert row["range_s"] == pytest.approx([batches * low_s, batches * high_s])
        assert row["cost"] == pytest.approx(3.0 * row["machines"] * row["seconds"] / 3600)


def test_times_are_those_of_the_simulation(found: dict[str, Any]) -> None:
    profile, checked = str(found["folder"] / "p.json"), 0
    for row in found["methods"]:
        if row["strategy"] is not None:
            assert row["iteration_s"] == simulate(row["method"], profile=profile)
            checked += 1
    assert checked >= 3
    for option in found["options"][:3]:
        assert option["iteration_s"] == simulate(option["strategy"], profile=profile)


def test_help_is_what_a_simulation_there_gives(found: dict[str, Any]) -> None:
    """Of twice the rate, and of one machine more."""
    profile, best, rate_bps = str(found["folder"] / "p.json"), found["best"], found["rate_bps"]
    saved = {help_["change"]: help_["saved"] for help_ in found["helps"]}
    by_kind = {"machine" if "machine" in text else "rate": one for text, one in saved.items()}
    now_s = simulate(best, profile=profile) / 4
    more_s = simulate(best, "--hosts", "5", profile=profile) / 5
    faster_s = simulate(best, "--rate", f"{2 * rate_bps:.6f}bit", profile=profile) / 4
    expected = {"machine": 1 - more_s / now_s, "rate": 1 - faster_s / now_s}
    assert by_kind == pytest.approx(expected, abs=1e-6)


def test_needed_rates_reach_their_share_of_compute_and_lower_ones_do_not(
    found: dict[str, Any],
) -> None:
    profile, compute_s = str(found["folder"] / "p.json"), profile_of().compute_s
    for label in ("ddp", found["best"]):
        rate_bps = found["rows"][label]["rate_bps"]
        shares = [
            compute_s / simulate(label, "--rate", f"{times * rate_bps:.3f}bit", profile=profile)
            for times in (1.0, 1 / 1.15)
        ]
        assert shares[0] * 1.001 >= 0.9 > shares[1], label


@pytest.mark.usefixtures("here")
def test_the_page_fits_the_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["advise", "--profile", "p.json", "--max-staleness", "0", "--hosts", "2"]
    for columns, more in ((72, []), (80, ["--price", "2", "--device-memory", "8GB"])):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert cli.main([*argv, *more]) == 0
        lines = capsys.readouterr().out.splitlines()
        long = [line for line in lines if len(line) > columns]
        assert all(line.startswith("    --strategies ") for line in long)  # a command to copy
        for label in ("one machine", "ddp", "zero-3"):
            assert any(re.search(rf"  {label}$", line) for line in lines), label


# --- what is best where --------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
def test_one_machine_is_best_where_messages_take_too_long() -> None:
    """At the rate from which machines pay, they do; below they do not."""
    profile_of(ratio=300.0, ranks=2).save("slow.json")
    verdict = advise("--profile", "slow.json")
    assert verdict["best"] == "one machine"
    for times, pays in ((1.1, True), (1 / 1.1, False)):
        rate = f"{times * verdict['worthwhile_bps']:.0f}bit"
        rows = advise("--profile", "slow.json", "--rate", rate)["rows"]
        together = min(r["seconds"] for r in rows.values() if r["machines"] == 2 and r["strategy"])
        assert (together < rows["one machine"]["seconds"]) == pays


@pytest.mark.usefixtures("here")
def test_what_does_not_fit_is_not_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """Devices of a machine may share its replica."""
    whole = TRAINING_BYTES * sum(bucket.size_bytes for bucket in profile_of().buckets)
    options = ["--profile", "p.json", "--per-node", "4", "--max-staleness", "1"]
    tight = advise(*options, "--device-memory", f"{(whole - 1) / 1e9}GB")
    roomy = advise(*options, "--device-memory", "99GB")
    assert (tight["devices"], tight["rows"]["ddp"]["fits"]) == (4, False)
    best = tight["rows"][tight["best"]]
    assert best["fits"]
    assert best["sharded"] or tight["best"] in ("zero-3", "hsdp")
    assert best["memory_bytes"]["total_bytes"] < whole
    assert roomy["rows"][roomy["best"]]["memory_bytes"]["total_bytes"] >= whole
    for row in roomy["methods"]:  # 1,000 batches of one device
        batches = 1000 / (row["machines"] * 4)
        assert row["seconds"] == pytest.approx(batches * row["iteration_s"])
    assert cli.main(["advise", *options, "--device-memory", ".0001GB"]) == 2
    assert "device_memory" in capsys.readouterr().err


def test_slow_links_are_helped_by_connections_where_messages_are_lost(here: Path) -> None:
    text = 'hosts = 3\nrate = "200mbit"\nlatency = "40ms"\n'
    for loss, helps in (("", False), ("loss = 0.001", True)):
        (here / "c.toml").write_text(text + loss)
        found = advise("--profile", "one.json", "--cluster", "c.toml")["helps"]
        assert any("connections" in one["change"] for one in found) == helps


# --- machines of the question --------------------------------------------------------------------


@pytest.mark.usefixtures("here")
def test_hosts_rate_and_device_of_a_profile_of_one_device() -> None:
    there = ["--profile", "one.json", "--hosts", "4", "--rate", "20mbit"]
    verdict = advise(*there, "--device-speed", ".5s")
    assert (verdict["machines"], verdict["rate_bps"], verdict["estimated"]) == (4, 20e6, True)
    assert verdict["rows"]["one machine"]["seconds"] == pytest.approx(1000 * 0.5)
    assert verdict["compute"]["iteration_s"] == pytest.approx(0.5)
    even, uneven = (advise(*there, "--jitter", jitter)["rows"]["ddp"] for jitter in ("0", "0.5"))
    assert uneven["iteration_s"] > even["iteration_s"]


def test_slow_hosts_of_a_cluster_file_delay_the_others(here: Path) -> None:
    text = 'hosts = 3\nrate = "100mbit"\n'
    slow = '[[overrides]]\nhost = 1\nspeed = 0.5\nrates = { net = "20mbit" }'
    verdicts = []
    for more in ("", slow):
        (here / "c.toml").write_text(text + more)
        verdicts.append(advise("--profile", "one.json", "--cluster", "c.toml"))
    even, uneven = verdicts
    assert (even["rate_bps"], uneven["rate_bps"]) == (100e6, 20e6)
    times = [one["rows"]["ddp"]["iteration_s"] for one in verdicts]
    assert times[1] > 2 * times[0]
    alone = [one["rows"]["one machine"]["iteration_s"] for one in verdicts]
    assert alone[0] == pytest.approx(alone[1], rel=0.02)  # of the fastest machine


@pytest.mark.parametrize(
    ("argv", "options", "profiled"),
    [
        ("", "--profile p.json", True),
        ("--hosts 3 --rate 20mbit", "--hosts 3 --rate 20mbit", True),
        ("--per-node 2", "--per-node 2", False),
        ("--cluster plain.toml --device-speed .035s", "--device-speed 0.035s", True),
        ("--cluster delayed.toml", "--cluster delayed.toml", False),
        ("--cluster nodes.toml", "--cluster nodes.toml", False),
    ],
)
def test_the_command_compares_for_the_same_machines(
    argv: str, options: str, profiled: bool, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lab would run it; only the script is missing. A profile that cannot be converted, as of
    links without the delay of the cluster, is measured anew."""
    for name, more in (("plain", ""), ("delayed", 'latency = "20ms"'), ("nodes", "ranks = 2")):
        (here / f"{name}.toml").write_text(f'hosts = 4\nrate = "20mbit"\n{more}')
    verdict = advise("--profile", "p.json", *argv.split())
    command = shlex.split(verdict["command"])
    assert [word for word in options.split() if word not in command] == []
    assert ("--profile" in command) == profiled
    assert command[command.index("--strategies") + 1] == ",".join(verdict["compared"])
    assert cli.main([*command[1:-1], "missing.py"]) == 2
    assert "missing.py" in capsys.readouterr().err


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("changes", "argv"),
    [
        ({"asked_rate_bps": 2e7, "asked_latency_s": 0.02}, ""),
        ({"name": "lan"}, ""),
        ({"bytes_per_s": 1e10}, ""),  # more than the lab can have
        ({}, "--hosts 1000"),
    ],
)
def test_no_command_names_a_cluster_file_that_is_not_given(
    changes: dict[str, Any], argv: str
) -> None:
    """Nor other machines: those that `--hosts` and `--rate` cannot describe have no command."""
    profile = profile_of(2)
    replace(profile, links=(replace(profile.links[0], **changes),)).save("p.json")
    options = ["--profile", "p.json", "--max-staleness", "0", *argv.split()]
    assert advise(*options)["command"] is None
    assert "train.py" not in text_of(*options)


# option or relation, and the parameter that its refusal names
REFUSED = [
    ("", "--profile"),
    ("t.py", "hosts"),
    ("--hosts 4 t.py", "rate"),
    ("--hosts 1 --rate 1gbit t.py", "hosts (1)"),
    ("--hosts 2 --rate fast t.py", "--rate ('fast')"),
    ("--profile one.json --hosts 4", "rate"),
    ("--profile p.json --rate unlimited", "--rate ('unlimited')"),
    ("--profile p.json --samples 1M", "--batch"),
    ("--profile p.json --samples many --batch 2", "--samples ('many')"),
    ("--profile p.json --device-memory 24", "--device-memory ('24')"),
    ("--profile p.json --device-speed 0s", "--device-speed ('0s')"),
    ("--hosts 2 --rate 1gbit --price -1 t.py", "price (-1)"),
    ("--profile p.json --max-staleness -1", "--max-staleness (-1)"),
    ("--profile p.json --per-node 0", "--per-node (0)"),
    ("--profile p.json --cluster c.toml --hosts 2", "--cluster"),
    ("--profile p.json --rehearse", "--rehearse"),
    ("--profile p.json --seeds 0,1", "--seeds"),
    ("--rehearse --samples 1M --batch 2 t.py", "--samples"),
    ("--rehearse --target accuracy=.9 t.py", "--target"),
]


@pytest.mark.usefixtures("here")
def test_wrong_questions_exit_2_with_one_line_that_names_the_parameter(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for argv, parameter in REFUSED:
        assert cli.main(["advise", *argv.split()]) == 2, argv
        printed = capsys.readouterr()
        assert (printed.out, printed.err.count("\n")) == ("", 1), argv
        assert parameter in printed.err, argv


# --- scripts -------------------------------------------------------------------------------------

SCRIPT = """
import os, sys, torch, offbeat
torch.manual_seed(10 * int(os.environ["OFFBEAT_SEED"]) + int(os.environ["RANK"]))
model = torch.nn.Linear(8, 1)
optimizer = {optimizer}
model, optimizer = offbeat.prepare(model, optimizer)
weights = torch.arange(8.0) / 4
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    x = torch.randn(16, 8)
    (model(x)[:, 0] - x @ weights).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.usefixtures("forked_ranks")
def test_a_script_is_measured_on_one_device(here: Path) -> None:
    (here / "t.py").write_text(SCRIPT.format(optimizer="torch.optim.Adam(model.parameters())"))
    verdict = advise("--hosts", "3", "--rate", "50mbit", "t.py", "40")
    memory = verdict["rows"]["one machine"]["memory_bytes"]
    assert (verdict["machines"], verdict["rate_bps"]) == (3, 50e6)
    assert memory["parameters_bytes"] == 4 * 9
    assert math.isclose(memory["state_bytes"], 2 * 4 * 9, abs_tol=8)  # two moments and counters
    assert verdict["compute"]["iteration_s"] > 0
    assert "--profile" not in verdict["command"]


def expected_losses(seed: int, ranks: int, count: int) -> list[float]:
    """Losses of the script on ranks that average their gradients."""
    models, batches = [], []
    for rank in range(ranks):
        torch.manual_seed(10 * seed + rank)
        models.append(torch.nn.Linear(8, 1))
        batches.append([torch.randn(16, 8) for _ in range(count)])
    model, weights = models[0], torch.arange(8.0) / 4
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for x in map(torch.cat, zip(*batches, strict=True)):
        optimizer.zero_grad()
        loss = (model(x)[:, 0] - x @ weights).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def iterations_to(losses: list[float], target: float) -> int:
    """Iterations until the mean of ten losses has reached the target."""
    means = [fmean(losses[i : i + 10]) for i in range(len(losses) - 9)]
    return next(i for i, mean in enumerate(means) if mean <= target) + 10


@pytest.mark.timeout(300)  # a rehearsal of each method and seed
@pytest.mark.usefixtures("forked_rehearsals")
def test_rehearsed_losses_decide(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Times are those of the rehearsed iterations, and the spread over seeds widens the range."""
    optimizer = "torch.optim.SGD(model.parameters(), 0.05)"
    (here / "t.py").write_text(SCRIPT.format(optimizer=optimizer))
    buckets = (Bucket("b", 0.01, 0.02, 36, tensors=("weight", "bias")),)
    Profile(buckets, (Link("net", 0.2, 1e6),), 2).save("p.json")
    argv = ["--rehearse", "--profile", "p.json", "--seeds", "0,1", "--max-staleness", "0"]
    verdict = advise(*argv, "--target", "loss=0.5", "t.py", "60")
    counts, rows = verdict["rehearsal"]["iterations"], verdict["rows"]
    assert counts.keys() == {"ddp", "one machine"}
    for label, ranks in (("ddp", 2), ("one machine", 1)):
        expected = [iterations_to(expected_losses(seed, ranks, 60), 0.5) for seed in range(2)]
        row, (low_s, high_s) = rows[label], rows[label]["iteration_range_s"]
        assert counts[label] == expected
        assert row["batches_by_seed"] == [ranks * count for count in expected]
        assert row["seconds"] == pytest.approx(fmean(expected) * row["iteration_s"])
        assert row["range_s"] == pytest.approx([min(expected) * low_s, max(expected) * high_s])
    # ZeRO-3 trains with the numbers of DDP.
    zero = rows["zero-3"]
    assert zero["seconds"] == pytest.approx(fmean(counts["ddp"]) * zero["iteration_s"])
    (folder,) = (here / "runs").iterdir()
    record = load_rank(folder / "ddp" / "rep0" / "rank0.jsonl")
    ends_s = [rows["ddp"]["iteration_s"] * (i + 1) for i in range(60)]
    assert record.trace.ends_s[0] == pytest.approx(ends_s, rel=1e-6)
    again = [*argv, "--target", "loss=0.0", "--resume", str(folder), "t.py", "60"]
    assert cli.main(["advise", *again]) == 1  # not reached, by losses that are not trained again
    assert capsys.readouterr().err


# --- passes --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
def test_a_script_may_divide_its_passes_by_the_number_of_ranks() -> None:
    """The passes before the last one are part of the rest of the loop."""
    plain = profile_of()
    pass_s = plain.forward_s + plain.backward_s

    def with_passes(count: int) -> Profile:
        usage, other_s = replace(plain.usage, backwards=count), plain.other_s + (count - 1) * pass_s
        return replace(plain, other_s=other_s, usage=usage)

    with_passes(4).save("four.json")
    with_passes(2).save("two.json")
    asked = ["--profile", "four.json", "--iterations", "100"]
    whole, half = advise(*asked), advise(*asked, "--passes", "2")
    assert (whole["passes"], half["passes"]) == (4, 2)
    assert half["rows"]["one machine"] == whole["rows"]["one machine"]
    row = half["rows"]["ddp"]
    assert row["iteration_s"] == pytest.approx(simulate("ddp", profile="two.json"))
    assert row["seconds"] == pytest.approx(100 * row["iteration_s"] / (4 * 2 / 4))
    assert "--profile" not in half["command"]
    assert "--passes" in text_of(*asked)
    assert cli.main(["advise", *asked, "--passes", "0"]) == 2


@pytest.mark.usefixtures("here")
def test_the_first_line_states_whether_machines_are_worth_it() -> None:
    for rate, answer in (("1gbit", "yes"), ("100kbit", "no")):
        asked = ["--profile", "one.json", "--hosts", "2", "--rate", rate]
        rows = advise(*asked)["rows"]
        alone_s = rows.pop("one machine")["seconds"]
        first = text_of(*asked, "--max-staleness", "0").splitlines()[0]
        assert first.startswith(f"second machine: {answer}, ")
        times = [float(number) for number in re.findall(r"\d*\.?\d+", first)]
        assert times[-1] == pytest.approx(alone_s / rows["ddp"]["seconds"], rel=0.06)
