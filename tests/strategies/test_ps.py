"""Methods over parameter servers: what they are called, what they refuse."""

import math

import pytest

from offbeat.strategies import PSBSP, SSP, PSSelSync, create


def test_bsp_over_servers_is_ssp_without_staleness():
    strategy = create("ps-bsp", {"silent_s": 5.0})
    assert (strategy.s, strategy.apply, strategy.accumulate) == (0, "clock", 1)
    assert strategy.duty == SSP(s=0, silent_s=5.0).duty
    assert "s" not in strategy.settings()
    assert PSBSP(**strategy.settings()) == strategy
    with pytest.raises(ValueError, match=r"setting of ps-bsp \('s'\) must be one of"):
        create("ps-bsp", {"s": 3})


def test_servers_of_selsync_keep_means():
    assert PSSelSync().duty.keeps == "parameters"
    assert PSSelSync(aggregate="gradients").duty.keeps == "gradients"
    assert SSP().duty.keeps is None
    assert PSSelSync(delta=math.inf).settings()["delta"] == math.inf


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"delta": -0.1}, r"delta \(-0.1\) must be a number of at least 0"),
        ({"delta": math.nan}, r"delta \(nan\) must be a number of at least 0"),
        ({"window": 0}, r"window \(0\) must be an integer of at least 1"),
        ({"aggregate": "gradient"}, r"must be one of parameters, gradients; did you mean"),
        ({"silent_s": 0}, r"silent_s \(0\) must be a number of seconds above 0"),
        ({"vote_lag": 1}, r"setting of ps-selsync \('vote_lag'\) must be one of"),
        ({"snapshot": "d"}, r"setting of ps-selsync \('snapshot'\) must be one of"),
    ],
)
def test_refuses(settings, words):
    with pytest.raises(ValueError, match=words):
        create("ps-selsync", settings)
