"""Simulation: plans interpreted in virtual time; no torch."""

from offbeat.sim.outcomes import Votes
from offbeat.sim.prediction import Prediction, predict, predict_plan, within_bound
from offbeat.sim.ranks import Ranks
from offbeat.sim.simulation import simulate

__all__ = ["Prediction", "Ranks", "Votes", "predict", "predict_plan", "simulate", "within_bound"]
