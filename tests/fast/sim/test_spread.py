"""Messages and ranks that vary: drawn alike by both engines, and used by predictions."""

from dataclasses import replace

import numpy as np
import pytest

from offbeat.core.sim import event_engine as events
from offbeat.core.sim import fast_engine as engine
from offbeat.core.sim.job import Spread
from offbeat.core.sim.simulation import make_job
from offbeat.plan import Moment, Plan, transfer
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import Ranks, predict
from offbeat.strategies import BSP, DreamDDP, LocalSGD

PROFILE = Profile(
    (Bucket("a", 1.0, 2.0, 8), Bucket("b", 0.5, 1.0, 4)),
    (Link("net", 0.5, 4.0, jitter=0.3),),
    world_size=4,
)
STEADY = replace(PROFILE, links=(replace(PROFILE.links[0], jitter=0.0),))


def messages(count: int) -> Plan:
    """So many small messages in every iteration."""
    when = {"after": Moment("step"), "before": Moment("end"), "phases": [0], "link": "net"}
    rules = (transfer("param", range(1), part=i, parts=count, **when) for i in range(count))
    return Plan("many", 2, tuple(rules))


def test_factors_have_mean_one_and_the_links_deviation():
    plan = messages(50)
    spread = Spread(plan, PROFILE, seed=1)
    factors = np.array([[spread.factor(t, i) for t in plan.transfers] for i in range(2000)])
    assert factors.min() > 0
    assert factors.mean() == pytest.approx(1.0, abs=0.005)
    assert factors.std() == pytest.approx(0.3, abs=0.01)
    assert abs(np.corrcoef(factors[:, 0], factors[:, 1])[0, 1]) < 0.1
    assert spread.factor(plan.transfers[3], 7) == factors[7, 3]  # long forgotten, drawn again
    assert Spread(plan, PROFILE, seed=2).factor(plan.transfers[3], 7) != factors[7, 3]


@pytest.mark.parametrize("strategy", [BSP(), LocalSGD(period=2), DreamDDP(period=2)])
def test_both_engines_draw_the_same(strategy):
    plan = strategy.plan(PROFILE)
    jobs = [make_job(plan, PROFILE, Ranks(), 6, 5, {}, {}) for _ in range(2)]
    one, other = engine.run(jobs[0]), events.run(jobs[1])
    assert one.ends_s[:, 0] == pytest.approx(other.ends_s[:, 0])
    steady = engine.run(make_job(plan, STEADY, Ranks(), 6, 5, {}, {}))
    assert not np.allclose(one.ends_s, steady.ends_s)


def test_a_prediction_takes_the_profiles_jitter_of_every_rank():
    uneven = replace(STEADY, jitter=0.1, rank_jitter=(0.0, 0.0, 0.0, 0.4))
    seconds = {
        name: predict(BSP(), profile, **given).iteration_s
        for name, profile, given in (
            ("steady", STEADY, {}),
            ("told", uneven, {"ranks": Ranks(jitter=0.0)}),
            ("own", uneven, {}),
            ("mean", replace(uneven, rank_jitter=()), {}),
            ("as mean", STEADY, {"ranks": Ranks(jitter=0.1)}),
        )
    }
    assert seconds["told"] == pytest.approx(seconds["steady"])
    assert seconds["mean"] == seconds["as mean"] > seconds["steady"]
    # One lognormal rank beside three steady ones: E max(1, X) by quadrature, of 4.5 s of compute.
    sigma = np.sqrt(np.log1p(0.4**2))
    x = np.linspace(-8, 8, 20001)
    density = np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
    most = np.maximum(1, np.exp(sigma * x - sigma**2 / 2))
    expected = 4.5 * (np.trapezoid(most * density, x) - 1)
    assert seconds["own"] - seconds["steady"] == pytest.approx(expected, rel=0.25)
