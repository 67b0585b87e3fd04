"""Simulation: predicted times and timelines of plans."""

from offbeat.core.sim import Prediction, Ranks, Votes, predict, predict_plan, simulate, within_bound

__all__ = ["Prediction", "Ranks", "Votes", "predict", "predict_plan", "simulate", "within_bound"]
