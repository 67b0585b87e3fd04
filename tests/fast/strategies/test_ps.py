"""Methods over parameter servers: what they are called, what they refuse."""

import pytest

from offbeat.strategies import PSBSP, SSP, create


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
