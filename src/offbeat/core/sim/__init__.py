"""Simulation of plans in virtual time, without torch."""

from offbeat.core.sim.outcomes import Votes
from offbeat.core.sim.prediction import Prediction, predict, predict_plan, within_bound
from offbeat.core.sim.ranks import Ranks
from offbeat.core.sim.simulation import simulate
