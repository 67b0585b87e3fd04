"""Memory of a rank in training with codecs and in gossip: peaks, temporary tensors included."""

from __future__ import annotations

import sys
from functools import cache

import pytest
from cases.memories import Build, added_copies, build, build_uneven, peak_copies
from harness.ranks import run_ranks

# Codes of two ranks in int4 are a quarter of a copy; numbers under way, 4 MB, at most another.
CODES, CUT, NOISE, PREDICTED = 0.25, 0.25, 0.3, 0.6

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@cache
def copies(strategy: str, build: Build = build) -> float:
    """The larger peak of two ranks, each in a fresh process."""
    return max(run_ranks(2, peak_copies, strategy, build))


@pytest.mark.parametrize(
    ("strategy", "build"),
    [
        ("local-sgd:period=3", build),
        ("dreamddp:period=3", build),
        ("dreamddp:period=3:due=delayed", build),
        ("diloco:period=3", build),
        ("wfbp", build),
        ("local-sgd:period=3", build_uneven),
        ("dreamddp:period=3:due=delayed", build_uneven),
    ],
)
def test_a_codec_takes_two_copies(strategy: str, build: Build) -> None:
    """The anchor and the errors; not the numbers of a message, nor their mean. A rank takes what is
    predicted, above what `wfbp` takes without a codec."""
    coded = copies(f"{strategy}:wire=int4", build)
    assert coded - copies(strategy, build) < 2 + CODES + CUT + NOISE
    predicted = added_copies(f"{strategy}:wire=int4", build)
    assert abs(coded - copies("wfbp", build) - predicted) < PREDICTED


def test_gossip_takes_three_copies() -> None:
    """x~, the copy of the weights, and an exchange; chunks may wait to be sent."""
    assert copies("a2cid2:rate=4") - copies("wfbp") < 3 + NOISE
