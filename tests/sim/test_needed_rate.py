"""The rate that a strategy needs for a share of computing time, against the closed form of BSP."""

from dataclasses import replace

import pytest

from offbeat.core.profile.elsewhere import PAYLOAD, ring_passes
from offbeat.core.sim.needed_rate import needed_rates_bps, rate_grid, utilization
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import predict
from offbeat.strategies import BSP, DreamDDP

SIZE_BYTES, LATENCY_S = 4_000_000, 0.002
PROFILE = Profile(
    tuple(Bucket(str(n), 0.01, 0.02, SIZE_BYTES // 4) for n in range(4)),
    (Link("net", LATENCY_S, 1e6),),
    world_size=4,
    update_s=0.003,
    other_s=0.002,
)
COMPUTE_S = 4 * 0.03 + 0.003 + 0.002
RATES_BPS = rate_grid(1e6, 1e11, 120)


def closed_form_bps(target):
    """Return the rate at which BSP computes for the share `target` of an iteration."""
    message_s = COMPUTE_S / target - COMPUTE_S - LATENCY_S
    return SIZE_BYTES * 8 * ring_passes(4) / PAYLOAD / message_s


def test_the_rate_for_bsp_is_the_first_one_above_its_closed_form():
    targets = (0.1, 0.5, 0.8, 0.95)
    found = needed_rates_bps(BSP(), PROFILE, targets, RATES_BPS)
    for target, rate_bps in zip(targets, found, strict=True):
        assert rate_bps == next(rate for rate in RATES_BPS if rate >= closed_form_bps(target))


def test_a_share_that_latency_excludes_has_no_rate():
    most = COMPUTE_S / (COMPUTE_S + LATENCY_S)
    below, above = needed_rates_bps(BSP(), PROFILE, (most - 0.01, most + 0.001), RATES_BPS)
    assert below is not None
    assert above is None


def test_each_rate_has_a_plan_of_its_own_and_the_slowest_rank_counts():
    profile = replace(PROFILE, rank_scale=(0.8, 0.8, 1.2, 1.2))
    [rate_bps] = needed_rates_bps(DreamDDP(5), profile, [0.9], RATES_BPS)
    before_bps = RATES_BPS[RATES_BPS.index(rate_bps) - 1]
    for rate, reached in ((rate_bps, True), (before_bps, False)):
        [same] = needed_rates_bps(DreamDDP(5), profile, [0.9], [rate])
        assert (same == rate) is reached
    prediction = predict(BSP(), profile)
    assert utilization(prediction, profile) == pytest.approx(
        (0.002 + 1.2 * 0.123) / prediction.iteration_s
    )


@pytest.mark.parametrize(
    ("targets", "rates_bps", "said"),
    [
        ((1.5,), RATES_BPS, r"target \(1.5\) must be above 0 and at most 1"),
        ((0.5,), (), r"rates_bps \(0 rates\) must be ascending"),
        ((0.5,), (2e6, 1e6), r"rates_bps \(2 rates\) must be ascending"),
    ],
)
def test_errors_name_the_value(targets, rates_bps, said):
    with pytest.raises(ValueError, match=said):
        needed_rates_bps(BSP(), PROFILE, targets, rates_bps)
