"""Simulation: plans interpreted in virtual time; no torch."""

from offbeat.sim.prediction import Prediction, predict, predict_plan
from offbeat.sim.ranks import Ranks
from offbeat.sim.simulation import simulate

__all__ = ["Prediction", "Ranks", "predict", "predict_plan", "simulate"]
