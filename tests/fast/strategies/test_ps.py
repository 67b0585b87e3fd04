"""Methods over parameter servers: what they are called, what they refuse."""

import pytest

import offbeat
from offbeat import Profile
from offbeat.cli import main
from offbeat.cli.texts import contestants
from offbeat.core.strategy.parsing import parse
from offbeat.profile import Bucket, Link
from offbeat.strategies import PSBSP, SSP, SelSync, create, strategy_names


def test_bsp_over_servers_is_ssp_without_staleness():
    strategy = create("ps-bsp", {"silent_s": 5.0})
    assert (strategy.s, strategy.apply, strategy.accumulate) == (0, "clock", 1)
    assert SSP(s=0, **strategy.settings()) == SSP(s=0, silent_s=5.0)
    assert "s" not in strategy.settings()
    assert PSBSP(**strategy.settings()) == strategy
    with pytest.raises(ValueError, match=r"setting of ps-bsp \('s'\) must be one of"):
        create("ps-bsp", {"s": 3})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"accumulate": 0}, r"accumulate \(0\) must be an integer of at least 1"),
        ({"silent_s": 0}, r"silent_s \(0\) must be a number of seconds above 0"),
        ({"snapshots": "d"}, r"setting of ps-bsp \('snapshots'\) must be one of"),
    ],
)
def test_refuses(settings, words):
    with pytest.raises(ValueError, match=words):
        create("ps-bsp", settings)


def test_a_former_name_warns_and_runs_selsync():
    assert "ps-selsync" not in strategy_names()
    expected = SelSync(delta=0.1, aggregate="gradients")
    with pytest.warns(FutureWarning, match="use selsync"):
        assert offbeat.PSSelSync(0.1, aggregate="gradients", silent_s=3.0) == expected
    with pytest.warns(FutureWarning, match="use selsync"):
        assert parse("ps-selsync:delta=.1:aggregate=gradients:silent_s=3") == expected
    with pytest.warns(FutureWarning, match="use selsync"):
        (found,) = contestants("ps-selsync", ["delta=.1", "aggregate=gradients"])
    assert found.strategy == expected
    with pytest.raises(ValueError, match=r"setting of ps-selsync \('vote_lag'\) must be one of"):
        create("ps-selsync", {"vote_lag": 1})


@pytest.mark.filterwarnings("ignore:ps-selsync")
def test_servers_are_refused_with_a_former_name(tmp_path, capsys):
    path = tmp_path / "profile.json"
    Profile((Bucket("a", 0.1, 0.2, 4000),), (Link("net", 0.0, 1e5),), 4).save(path)
    common = ["simulate", "--profile", str(path), "--strategy", "ps-selsync"]
    assert main([*common, "--servers", "2"]) == 2
    assert "servers (2) must be left out with ps-selsync" in capsys.readouterr().err
    assert main(common) == 0
