"""Memory of a rank in training with codecs and in gossip: peaks, temporary tensors included."""

from __future__ import annotations

import sys
from functools import cache

import pytest
from cases.memories import peak_copies
from harness.ranks import run_ranks

# Codes of two ranks in int4 are a quarter of a copy; numbers under way 4 MB, a sixth of one.
CODES, CUT, NOISE = 0.25, 0.17, 0.1

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@cache
def copies(strategy: str) -> float:
    """The larger peak of two ranks, each in a fresh process."""
    return max(run_ranks(2, peak_copies, strategy))


@pytest.mark.parametrize(
    "strategy",
    [
        "local-sgd:period=3",
        "dreamddp:period=3",
        "dreamddp:period=3:due=delayed",
        "diloco:period=3",
        "wfbp",
    ],
)
def test_a_codec_takes_two_copies(strategy: str) -> None:
    """The anchor and the errors; not the numbers of a message, nor their mean."""
    added = copies(f"{strategy}:wire=int4") - copies(strategy)
    assert added < 2 + CODES + CUT + NOISE


def test_gossip_takes_three_copies() -> None:
    """x~, the copy of the weights, and an exchange; chunks may wait to be sent."""
    assert copies("a2cid2:rate=4") - copies("wfbp") < 3 + NOISE
