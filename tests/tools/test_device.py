"""Predictions for the user's device instead of hosts at 1/K of a core."""

from __future__ import annotations

import json

import pytest
from cases.layered import layered_script

from offbeat.cli import entry as cli
from offbeat.cli.texts import parse_device
from offbeat.experiments.device_speed import Compute, DeviceSpeed
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import predict
from offbeat.strategies import BSP, LocalSGD

MACHINE = Profile(
    tuple(Bucket(f"h.{i}", 0.008, 0.02, 2 * 10**5) for i in range(2)),
    (Link("net", 1e-3, 1e6),),
    world_size=2,
    update_s=0.002,
    other_s=0.002,
    step_s=0.001,
)
PACED = MACHINE.with_pace(2.0)  # .06 s of compute per iteration become .12 s


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    PACED.save("p.json")


def test_the_device_computes_and_the_messages_stay():
    for speed in (DeviceSpeed(factor=3), DeviceSpeed(iteration_s=0.02)):
        there = speed.apply(PACED)
        assert there.compute_s == pytest.approx(0.02)
        assert (there.pace, there.links) == (0.0, PACED.links)
        assert there.step_s == pytest.approx(0.001 / 3)
        # The factor counts from the machine without its pace.
        assert speed.apply(MACHINE).buckets[0].backward_s == pytest.approx(0.02 / 3)
        assert Compute.of(PACED, speed).device_speed == pytest.approx(3)
    # Bound by messages, a faster device gains only its compute.
    slow, fast = (predict(BSP(), p).iteration_s for p in (PACED, DeviceSpeed(3).apply(PACED)))
    assert slow - fast == pytest.approx(0.12 - 0.02)


@pytest.mark.parametrize("text", ["20", "x", "-3x", "0x", "5min", "20 x x", "infx", "nans"])
def test_a_speed_has_a_unit(text):
    with pytest.raises(ValueError, match=r"^--device-speed \("):
        parse_device(text)


def test_simulate_and_advise_state_whose_times_they_are(capsys):
    argv = ["simulate", "--profile", "p.json", "--strategy", "bsp"]
    assert cli.main(argv) == 0
    assert "1/2 of a core" in capsys.readouterr().out
    assert cli.main([*argv, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["compute"]
    assert (told["pace"], told["device_speed"], told["iteration_s"]) == (
        2,
        None,
        pytest.approx(0.12),
    )
    assert cli.main([*argv, "--device-speed", "20ms", "--json", "--rate", "10mbit,20mbit"]) == 0
    for row in json.loads(capsys.readouterr().out):
        assert row["compute"]["device_speed"] == pytest.approx(3)
        assert row["compute"]["pace"] == 0
    assert cli.main([*argv, "--device-speed", "3x", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["iteration_s"]
    assert found == predict(BSP(), DeviceSpeed(3).apply(PACED)).iteration_s
    MACHINE.save("machine.json")
    assert cli.main(["simulate", "--profile", "machine.json", "--strategy", "bsp"]) == 0
    assert "note" not in capsys.readouterr().out
    argv = ["advise", "--profile", "p.json", "--device-speed", "3x"]
    assert cli.main([*argv, "--json"]) == 0
    advice = json.loads(capsys.readouterr().out)
    assert "--device-speed 3x" in advice["command"]
    assert advice["compute"]["iteration_s"] == pytest.approx(0.02)
    assert cli.main(argv) == 0
    assert "3 times as fast as the measured machine" in capsys.readouterr().out


@pytest.mark.usefixtures("forked_ranks")
def test_compare_predicts_for_the_device_beside_the_measured_hosts(tmp_path, capsys):
    (tmp_path / "train.py").write_text(layered_script(2, 2 * 10**5))
    argv = ["compare", "--lab", "none", "--hosts", "2", "--profile", "p.json", "--out", "r"]
    argv += ["--strategies", "bsp,local-sgd", "--repeat", "1", "--device-speed", "20ms"]
    assert cli.main([*argv, "train.py"]) == 0
    assert "your device" in capsys.readouterr().out
    summary = json.loads((tmp_path / "r/summary.json").read_text())
    there = DeviceSpeed(iteration_s=0.02).apply(PACED)
    for row, strategy in zip(summary["rows"], (BSP(), LocalSGD()), strict=True):
        assert row["device_s"] == predict(strategy, there).iteration_s
        assert row["predicted_s"] == predict(strategy, PACED).iteration_s
    assert summary["compute"]["pace"] == 2
    assert summary["compute"]["device"]["device_speed"] == pytest.approx(3)
